"""Notations of other tools, read and written: published architectures as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softcell.arch import Cell, Genotype, Pick
from softcell.arch.genotype import MAX_NODES, alive
from softcell.arch.notation import from_darts, from_nb201, parse, to_darts, to_nb201
from softcell.errors import UserError
from softcell.spaces import build_space
from tests.reference import reference_snas_cells as snas_cells
from tests.reference.published_genotypes import DARTS_V1, DARTS_V2

PC_DARTS = (
    "PCDARTS = Genotype(normal=[('sep_conv_3x3', 1), ('skip_connect', 0), ('sep_conv_3x3', 0), ('dil_conv_3x3', 1), "
    "('sep_conv_5x5', 0), ('sep_conv_3x3', 1), ('avg_pool_3x3', 0), ('dil_conv_3x3', 1)], "
    "normal_concat=range(2, 6), reduce=[('sep_conv_5x5', 1), ('max_pool_3x3', 0), ('sep_conv_5x5', 1), "
    "('sep_conv_5x5', 2), ('sep_conv_3x3', 0), ('sep_conv_3x3', 3), ('sep_conv_3x3', 1), ('sep_conv_3x3', 2)], "
    "reduce_concat=list(range(2, 6)))"
)
# Five inner nodes and outputs that are not consecutive.
AMOEBANET = (
    "Genotype(normal=[('avg_pool_3x3', 0), ('max_pool_3x3', 1), ('sep_conv_3x3', 0), ('sep_conv_5x5', 2), "
    "('sep_conv_3x3', 0), ('avg_pool_3x3', 3), ('sep_conv_3x3', 1), ('skip_connect', 1), ('skip_connect', 0), "
    "('avg_pool_3x3', 1)], normal_concat=[4, 5, 6], reduce=[('avg_pool_3x3', 0), ('sep_conv_3x3', 1), "
    "('max_pool_3x3', 0), ('sep_conv_7x7', 2), ('sep_conv_7x7', 0), ('avg_pool_3x3', 1), ('max_pool_3x3', 0), "
    "('max_pool_3x3', 1), ('conv_7x1_1x7', 0), ('sep_conv_3x3', 5)], reduce_concat=[3, 4, 6])"
)
# One operation twice on one edge (normal cell, node 5, source 0).
NASNET = (
    "Genotype(normal=[('sep_conv_5x5', 1), ('sep_conv_3x3', 0), ('sep_conv_5x5', 0), ('sep_conv_3x3', 0), "
    "('avg_pool_3x3', 1), ('skip_connect', 0), ('avg_pool_3x3', 0), ('avg_pool_3x3', 0), ('sep_conv_3x3', 1), "
    "('skip_connect', 1)], normal_concat=[2, 3, 4, 5, 6], reduce=[('sep_conv_5x5', 1), ('sep_conv_7x7', 0), "
    "('max_pool_3x3', 1), ('sep_conv_7x7', 0), ('avg_pool_3x3', 1), ('sep_conv_5x5', 0), ('skip_connect', 3), "
    "('avg_pool_3x3', 2), ('sep_conv_3x3', 2), ('max_pool_3x3', 1)], reduce_concat=[4, 5, 6])"
)
PUBLISHED = {
    "DARTS_V1": DARTS_V1,
    "DARTS_V2": DARTS_V2,
    "PC-DARTS": PC_DARTS,
    "AmoebaNet": AMOEBANET,
    "NASNet": NASNET,
}


def test_darts_v2_is_read_edge_by_edge() -> None:
    cells = from_darts(DARTS_V2).cells
    assert [str(pick) for pick in cells["normal"].picks] == [
        "sep_conv_3x3(0->2)",
        "sep_conv_3x3(1->2)",
        "sep_conv_3x3(0->3)",
        "sep_conv_3x3(1->3)",
        "skip_connect(0->4)",
        "sep_conv_3x3(1->4)",
        "skip_connect(0->5)",
        "dil_conv_3x3(2->5)",
    ]
    assert [str(pick) for pick in cells["reduce"].picks[2:4]] == ["max_pool_3x3(1->3)", "skip_connect(2->3)"]
    assert cells["normal"].output == cells["reduce"].output == (2, 3, 4, 5)


def test_amoebanet_keeps_its_outputs_and_nasnet_a_repeated_operation_on_one_edge() -> None:
    assert from_darts(AMOEBANET).cells["reduce"].output == (3, 4, 6)
    assert from_darts(NASNET).cells["normal"].incoming(5) == (Pick(0, 5, "avg_pool_3x3"),) * 2


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_genotypes_survive_both_ways_and_json(name: str) -> None:
    genotype = parse(PUBLISHED[name])
    assert from_darts(to_darts(genotype)) == genotype
    assert parse(genotype.dumps()) == genotype


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_genotypes_become_networks(name: str) -> None:
    space = build_space("darts", {"cells": 3, "channels": 4})
    network = space.network(parse(PUBLISHED[name]), (3, 16, 16), 10)
    assert network(torch.randn(2, 3, 16, 16)).shape == (2, 10)


def test_consecutive_outputs_are_written_as_a_range_and_others_as_a_list() -> None:
    text = to_darts(from_darts(AMOEBANET))
    assert "normal_concat=range(4, 7)" in text
    assert "reduce_concat=[3, 4, 6]" in text


two_edges = st.integers(1, 4).flatmap(
    lambda nodes: st.tuples(
        *(
            st.tuples(st.sampled_from(["skip_connect", "sep_conv_3x3"]), st.integers(0, 1 + i // 2))
            for i in range(2 * nodes)
        )
    )
)


@settings(max_examples=60, deadline=None)
@given(normal=two_edges, reduce=two_edges)
def test_darts_notation_survives_both_ways(normal: tuple[object, ...], reduce: tuple[object, ...]) -> None:
    text = (
        f"Genotype(normal={list(normal)!r}, normal_concat=range(2, {2 + len(normal) // 2}), "
        f"reduce={list(reduce)!r}, reduce_concat={list(range(2, 2 + len(reduce) // 2))})"
    )
    genotype = from_darts(text)
    assert from_darts(to_darts(genotype)) == genotype
    picks = genotype.cells["normal"].picks
    assert sorted((pick.op, pick.source) for pick in picks) == sorted(normal)  # type: ignore[type-var]


GOOD = "[('skip_connect', 0), ('skip_connect', 1)]"


def written(normal: str = GOOD, concat: str = "[2]", more: str = "") -> str:
    return f"Genotype(normal={normal}, normal_concat={concat}, reduce={GOOD}, reduce_concat=[2]{more})"


BAD_DARTS = {
    "not closed": "Genotype(normal=[",
    "positional": f"Genotype({GOOD}, [2], {GOOD}, [2])",
    "a field missing": f"Genotype(normal={GOOD}, normal_concat=[2], reduce={GOOD})",
    "a field too many": written(more=", extra=1"),
    "code in a field": written("__import__('os').listdir()"),
    "code in a concat": written(concat="open('x')"),
    "an odd number of edges": written("[('a', 0)]"),
    "no edges": written("[]"),
    "an edge from the future": written("[('a', 0), ('a', 2)]"),
    "an edge from before": written("[('a', 0), ('a', -1)]"),
    "a source that is no number": written("[('a', 0), ('a', 'b')]"),
    "a source with a fraction": written("[('a', 0), ('a', 0.5)]"),
    "an operation that is no text": written("[('a', 0), (7, 1)]"),
    "triples": written("[('a', 0, 1), ('a', 0, 1)]"),
    "a node that feeds nothing and is not in the concat": written("[('a', 0), ('a', 1), ('a', 0), ('a', 1)]"),
    "a node that feeds by none alone": written("[('a', 0), ('a', 1), ('none', 2), ('a', 1)]", concat="[3]"),
    "14 edges that are neither two per node nor all": written(str([("a", 0), ("a", 1)] * 7), concat="range(2, 6)"),
    "an output that is no node": written(concat="[3]"),
    "an output with a fraction": written(concat="[2.5]"),
    "no output": written(concat="[]"),
    "arithmetic": written(concat="range(10**15)"),
    "a huge range": written(concat="range(999999999999)"),
    "a null byte": "Genotype(normal=\0)",
}


@pytest.mark.parametrize("what", BAD_DARTS)
def test_malformed_darts_notation_is_refused(what: str) -> None:
    with pytest.raises(UserError, match="DARTS notation"):
        parse(BAD_DARTS[what])


def test_text_is_never_evaluated(tmp_path: Path) -> None:
    victim = tmp_path / "made"
    code = f"open({str(victim)!r}, 'w')"
    for text in (written(code), written(concat=code), written(concat=f"range({code})"), written(f"[{code}]")):
        with pytest.raises(UserError):
            parse(text)
    assert not victim.exists()


def test_a_cell_that_darts_notation_cannot_say_is_refused_with_the_node() -> None:
    one = Cell((Pick(0, 2, "skip_connect"),), (2,))
    with pytest.raises(UserError, match="node 2 of the normal cell has 1"):
        to_darts(Genotype("darts", {"normal": one, "reduce": one}))
    with pytest.raises(UserError, match="normal and a reduce"):
        to_darts(Genotype("nb201", {"cell": one}))


# --- the notation of SNAS: one edge for every pair of nodes, `none` among the operations ---


@pytest.mark.parametrize("name", snas_cells.NONE)
def test_published_cells_of_snas_are_read_with_every_edge_between_four_nodes(name: str) -> None:
    genotype = parse(snas_cells.EDGE_ALL[name])
    for kind, cell in genotype.cells.items():
        assert cell.targets == cell.output == (2, 3, 4, 5)
        pairs = [(source, target) for target in range(2, 6) for source in range(target)]
        assert [(pick.source, pick.target) for pick in cell.picks] == pairs
        assert sum(pick.op == "none" for pick in cell.picks) == snas_cells.NONE[name][kind]


@pytest.mark.parametrize("name", ["mild", "moderate"])
def test_cells_with_two_real_inputs_per_node_are_written_with_two_edges(name: str) -> None:
    """`none` is no edge: what the authors write with 14 edges and with 8 is one architecture."""
    both = [parse(notation[name]) for notation in (snas_cells.EDGE_ALL, snas_cells.TWO_EDGES)]
    assert [len(one.cells["normal"].picks) for one in both] == [14, 8]
    assert from_darts(to_darts(both[0])) == both[1]
    alive_cells = [{key: alive(cell, 2) for key, cell in one.cells.items()} for one in both]
    assert alive_cells[0] == alive_cells[1]


def test_a_node_with_fewer_inputs_is_written_with_the_none_of_its_genotype() -> None:
    whole = parse(snas_cells.EDGE_ALL["aggressive"])
    written = from_darts(to_darts(whole))
    assert [str(pick) for pick in written.cells["reduce"].incoming(2)] == ["sep_conv_5x5(0->2)", "none(1->2)"]
    assert {key: alive(cell, 2) for key, cell in whole.cells.items()} == {
        key: alive(cell, 2) for key, cell in written.cells.items()
    }


def test_fourteen_edges_are_seven_nodes_if_the_concat_says_so() -> None:
    """Sources that would also be all edges between four nodes, once with four outputs and once with seven."""
    edges = [("skip_connect", source) for target in range(2, 6) for source in range(target)]
    four, seven = (
        from_darts(written(str(edges), concat=f"range(2, {last})")).cells["normal"].targets for last in (6, 9)
    )
    assert (four, seven) == ((2, 3, 4, 5), (2, 3, 4, 5, 6, 7, 8))


def test_odd_numbers_of_edges_are_all_edges_of_two_or_three_nodes() -> None:
    for nodes in (2, 3):
        edges = [("skip_connect", source) for target in range(2, 2 + nodes) for source in reversed(range(target))]
        cell = from_darts(written(str(edges), concat=f"range(2, {2 + nodes})")).cells["normal"]
        assert cell.picks[-1] == Pick(nodes, nodes + 1, "skip_connect")


def test_of_several_genotypes_one_is_chosen_by_name_and_commented_ones_do_not_count() -> None:
    text = (
        "from collections import namedtuple\nGenotype = namedtuple('Genotype', 'normal normal_concat')\n\n"
        f"FIRST = {written()}\n\nSECOND = {DARTS_V2}\n# THIRD = Genotype(\n#  normal=[])\n"
    )
    with pytest.raises(UserError, match=r"2 genotypes in one text \(FIRST, SECOND\); choose one with FILE@NAME"):
        parse(text)
    assert parse(text, "SECOND") == from_darts(DARTS_V2)
    with pytest.raises(UserError, match="no genotype is named 'THIRD'; there are: FIRST, SECOND"):
        parse(text, "THIRD")
    with pytest.raises(UserError, match="names to choose from"):
        parse(NB201, "FIRST")


def test_a_line_of_a_log_is_read() -> None:
    assert parse(f"11/16 03:00:01 PM genotype = {DARTS_V1}") == from_darts(DARTS_V1)


NB201 = "|nor_conv_3x3~0|+|nor_conv_1x1~0|avg_pool_3x3~1|+|skip_connect~0|none~1|nor_conv_3x3~2|"


def test_a_nas_bench_201_string_is_read_node_by_node() -> None:
    cell = parse(NB201).cells["cell"]
    assert [str(pick) for pick in cell.picks] == [
        "nor_conv_3x3(0->1)",
        "nor_conv_1x1(0->2)",
        "avg_pool_3x3(1->2)",
        "skip_connect(0->3)",
        "none(1->3)",
        "nor_conv_3x3(2->3)",
    ]
    assert cell.output == (3,)


@settings(max_examples=40, deadline=None)
@given(ops=st.lists(st.sampled_from(["none", "skip_connect", "nor_conv_1x1"]), min_size=6, max_size=6))
def test_nas_bench_201_strings_survive_both_ways(ops: list[str]) -> None:
    rest = iter(ops)
    text = "+".join("|" + "|".join(f"{next(rest)}~{s}" for s in range(t)) + "|" for t in range(1, 4))
    assert to_nb201(from_nb201(text)) == text
    assert to_nb201(Genotype.loads(from_nb201(text).dumps())) == text


@pytest.mark.parametrize(
    "text",
    [
        "|nor_conv_3x3~0",
        "||",
        "|nor_conv_3x3~1|",
        "|a~0|+|b~0|",
        "|a~0|+|b~0|c~0|",
        "|a~0|+|b~0|c|",
        "|a~0|+|b~0|c~x|",
        "|a~0|++|b~0|c~1|",
        "|a b~0|",
    ],
)
def test_malformed_nas_bench_201_strings_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="NAS-Bench-201 string"):
        parse(text)


def test_a_cell_that_a_nas_bench_201_string_cannot_say_is_refused() -> None:
    for picks in ((Pick(0, 2, "none"), Pick(0, 1, "none")), (Pick(0, 1, "none"), Pick(0, 1, "none"))):
        with pytest.raises(UserError, match="edges into node"):
            to_nb201(Genotype("nb201", {"cell": Cell(picks, (2,))}))
    with pytest.raises(UserError, match="'cell'"):
        to_nb201(from_darts(DARTS_V1))


def darts_of(last: int, outputs: list[int] | None = None) -> str:
    edges = [("skip_connect", source) for _ in range(2, last + 1) for source in (0, 1)]
    return written(str(edges), concat=str(outputs or list(range(2, last + 1))))


def nb201_of(last: int) -> str:
    return "+".join("|" + "|".join(f"none~{s}" for s in range(t)) + "|" for t in range(1, last + 1))


@pytest.mark.parametrize("text_of", [darts_of, nb201_of])
def test_the_largest_cell_that_is_read_survives_json_and_a_larger_one_is_refused(text_of: Callable[[int], str]) -> None:
    largest = parse(text_of(MAX_NODES))
    assert Genotype.loads(largest.dumps()) == largest
    with pytest.raises(UserError, match=f"up to (number )?{MAX_NODES}"):
        parse(text_of(MAX_NODES + 1))


def test_more_outputs_than_json_can_list_are_refused() -> None:
    with pytest.raises(UserError, match="as many outputs"):
        parse(darts_of(MAX_NODES, outputs=list(range(MAX_NODES + 1))))


@pytest.mark.parametrize("text", ["", "hello", "[1, 2]"])
def test_text_in_no_known_notation_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="softcell JSON"):
        parse(text)
