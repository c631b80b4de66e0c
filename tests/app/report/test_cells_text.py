"""Terminal drawings, read back by a decoder that follows the lines."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from softcell.app.report import to_text
from softcell.app.report._cells_text import MARKS
from softcell.app.report.cells_graph import input_nodes, node_numbers
from softcell.app.report.theme import family
from softcell.arch import Cell, Genotype, Pick
from softcell.arch.notation import from_darts, from_nb201
from tests.helpers.report_cells import NB201, cells, chain, random_cell
from tests.reference.published_genotypes import DARTS_V2


def printed(genotype: Genotype, columns: int = 80, encoding: str = "utf-8", **options: object) -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    console = Console(file=stream, width=columns, color_system=None, legacy_windows=False)
    console.print(to_text(genotype, **options))  # type: ignore[arg-type]
    stream.flush()
    return raw.getvalue().decode(encoding)


def decode(cell: Cell, drawn: str) -> list[Pick]:
    """Follows every line from the rail it leaves to the rail it enters."""
    nodes, mark = node_numbers(cell, input_nodes(cell)), f"[{''.join(MARKS.values())}]"
    rows = [
        (line[: found.start()], re.split(rf"  {mark} ", found[1]))
        for line in drawn.splitlines()
        if (found := re.search(rf"{mark} (.+)$", line))
    ]
    inked = [
        i for ink, _ in rows for i, c in enumerate(ink) if c in "├╰╮┤↻" or (c.isdigit() and not ink[i - 1].isdigit())
    ]
    for pitch in (5, 4, 3):  # the widest on which everything lies
        if all(i % pitch == 1 for i in inked) and max(inked, default=0) // pitch < len(nodes):
            break
    picks = []
    for ink, names in rows:
        own = ink.find("↻")
        if own >= 0:
            source = target = nodes[own // pitch]
        elif re.search("[├╰]", ink):  # else the names continue
            start = next(i for i, c in enumerate(ink) if c in "├╰")
            end = next(i for i, c in enumerate(ink[start + 1 :], start + 1) if c in "╮┤▶")
            end += ink[end] == "▶"
            source, target = nodes[start // pitch], nodes[end // pitch]
        picks += [Pick(source, target, name) for name in names]
    return picks


def test_darts_v2_normal_cell_is_drawn_as_expected() -> None:
    genotype = Genotype("darts", {"normal": from_darts(DARTS_V2).cells["normal"]})
    assert printed(genotype) == (
        "normal\n"
        " c_{k-2}\n"
        " │    c_{k-1}\n"
        " ├────│────╮ ··················· ■ sep_conv_3x3\n"
        " │    ├───▶2 ··················· ■ sep_conv_3x3\n"
        " ├────│────│────╮ ·············· ■ sep_conv_3x3\n"
        " │    ├────│───▶3 ·············· ■ sep_conv_3x3\n"
        " ├────│────│────│────╮ ········· → skip_connect\n"
        " │    ╰────│────│───▶4 ········· ■ sep_conv_3x3\n"
        " ╰─────────│────│────│────╮ ···· → skip_connect\n"
        "           ├────│────│───▶5 ···· □ dil_conv_3x3\n"
        "           ╰────┴────┴────┴─▶ c_{k} = concat(2, 3, 4, 5)\n"
    )


def test_operations_on_one_edge_share_its_line() -> None:
    ops = ("sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "skip_connect")
    picks = (*(Pick(0, 2, op) for op in ops), Pick(1, 2, "skip_connect"), Pick(2, 3, "skip_connect"))
    drawn = printed(Genotype("darts", {"normal": Cell((*picks, Pick(0, 3, "max_pool_3x3")), (2, 3))}), 64)
    assert drawn == (
        "normal\n"
        " c_{k-2}\n"
        " │    c_{k-1}\n"
        " ├────│────╮ ········· ■ sep_conv_3x3  ■ sep_conv_5x5\n"
        " │    │    │ ········· □ dil_conv_3x3  → skip_connect\n"
        " │    ╰───▶2 ········· → skip_connect\n"
        " ╰─────────│────╮ ···· ▼ max_pool_3x3\n"
        "           ├───▶3 ···· → skip_connect\n"
        "           ╰────┴─▶ c_{k} = concat(2, 3)\n"
    )


@pytest.mark.parametrize("seed", range(60))
def test_rails_can_be_read_back(seed: int) -> None:
    cell = random_cell(seed)
    short = Cell(tuple(Pick(p.source, p.target, p.op[:20]) for p in cell.picks), cell.output)
    expected = sorted((p for p in short.picks if family(p.op) != "none"), key=str)
    drawn = printed(Genotype("any", {"cell": short}))
    if "──" in drawn and "├" not in drawn and "╰" not in drawn and "in ──" in drawn:
        pytest.skip("a chain has no rails")
    assert sorted(decode(short, drawn), key=str) == expected


def test_none_edges_are_listed() -> None:
    drawn = printed(from_nb201(NB201))
    assert drawn.endswith("╰─▶ out = 3\n  none: 0→2\n")


def test_a_node_without_inputs_is_called_empty() -> None:
    cell = Cell((Pick(0, 3, "conv"), Pick(2, 4, "conv")), (2, 3, 4))
    assert re.search(r"2 ·+ empty: no inputs", printed(Genotype("darts", {"normal": cell})))


def test_an_unread_node_has_no_rail() -> None:
    cell = Cell((Pick(0, 1, "conv"), Pick(0, 2, "conv"), Pick(0, 3, "conv")), (3,))
    drawn = printed(Genotype("any", {"cell": cell}))
    assert [line.split(" ·")[0] for line in drawn.splitlines()[2:5]] == [" ├───▶1", " ├────────▶2", " ╰─────────────▶3"]


def test_chains_run_in_even_rows() -> None:
    lines = printed(Genotype("chain", {"layers": chain(21)})).splitlines()[1:]
    assert [line.count("mbconv_e6_k5") for line in lines] == [3] * 7
    assert lines[0].split()[0] == "in"
    assert lines[-1].endswith("─▶ out")
    assert {line.index("■") for line in lines} == {8}


@pytest.mark.parametrize("width", [20, 40, 60, 80, 132])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_line_is_wider_than_the_terminal(width: int, encoding: str) -> None:
    for seed in range(40):
        drawn = printed(Genotype("any", {"cell": random_cell(seed)}), width, encoding)
        assert max(cell_len(line) for line in drawn.splitlines()) <= width


@settings(max_examples=80, deadline=None)
@given(cells(), st.sampled_from([80, 33]), st.booleans())
def test_any_cell_can_be_printed(cell: Cell, width: int, plain: bool) -> None:
    for line in to_text(Genotype("any", {"cell": cell})).lines(width, plain):
        assert cell_len(line.plain) <= width
        assert "\n" not in line.plain
        assert not plain or line.plain.isascii()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252"])
@pytest.mark.parametrize("seed", range(8))
def test_every_pick_is_named(encoding: str, seed: int) -> None:
    cell = Cell(tuple(p for p in random_cell(seed).picks if len(p.op) < 25), (2,))
    for width in (80, 44):
        drawn = printed(Genotype("any", {"cell": cell}), width, encoding)
        for op in {pick.op for pick in cell.picks} - {"none"}:
            assert drawn.count(op) == sum(pick.op == op for pick in cell.picks)
        assert ("none:" in drawn) == any(pick.op == "none" for pick in cell.picks)


def test_many_nodes_become_a_list() -> None:
    cell = Cell(tuple(Pick(i, t, "sep_conv_3x3") for t in range(2, 30) for i in (0, t - 1)), tuple(range(2, 30)))
    drawn = printed(Genotype("darts", {"normal": cell}))
    assert drawn.count("sep_conv_3x3") == 56
    assert re.search(r"29 ◀─┬─ c_\{k-2\} ■ sep_conv_3x3\n +╰─ +28 ■ sep_conv_3x3\n", drawn)
    assert "26, 27, 28, 29)" in drawn


def test_colour_can_be_disabled_and_markup_is_printed_as_text() -> None:
    genotype = Genotype("any", {"[bold]cell[/bold]": Cell((Pick(0, 1, "[red]conv[/red]\x1b[2J"),), (1,))})
    lines = list(to_text(genotype).lines(80))
    assert any(line.spans for line in lines)
    assert all(not line.spans for line in to_text(genotype, colour=False).lines(80))
    whole = "\n".join(line.plain for line in lines if isinstance(line, Text))
    assert "[bold]cell[/bold]" in whole
    assert "[red]conv[/red]�[2J" in whole


def test_width_caps_the_terminal() -> None:
    drawn = printed(from_darts(DARTS_V2), 120, width=40)
    assert max(cell_len(line) for line in drawn.splitlines()) <= 40
