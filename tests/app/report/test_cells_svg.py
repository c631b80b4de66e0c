"""Drawings of cells: geometry checked by brute force, SVG parsed as XML."""

from __future__ import annotations

import re
import string
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from softcell.app.report import to_svg
from softcell.app.report.cells_graph import MAX_ITEMS, input_nodes
from softcell.app.report.cells_svg import Box, Drawing, Point, lay_out
from softcell.app.report.theme import COLOURS, FAMILIES, STROKES, clean, family, mark, shorten
from softcell.arch import Cell, Genotype, Pick
from softcell.arch.notation import from_darts, from_nb201
from softcell.errors import UserError
from tests.helpers.report_cells import NB201, cells, chain, random_cell
from tests.reference.published_genotypes import DARTS_V2

SVG = "{http://www.w3.org/2000/svg}"


def overlap(a: Box, b: Box) -> bool:
    return a.x < b.right and b.x < a.right and a.y < b.bottom and b.y < a.bottom


def assert_geometry(drawing: Drawing) -> None:
    """Nothing overlaps, nothing runs through what is not its own, everything is inside and attached."""
    boxes = [node.box for node in drawing.nodes]
    labels = [edge.label for edge in drawing.edges if edge.label is not None]
    for a, b in combinations(boxes + labels, 2):
        assert not overlap(a, b), (a, b)
    for box in boxes + labels:
        assert box.x >= -0.01
        assert box.y >= -0.01
        assert box.right <= drawing.width + 0.01
        assert box.bottom <= drawing.height + 0.01
    for edge in drawing.edges:
        own = {id(edge.label)}
        way = list(sampled(edge.points))
        for box in boxes + labels:
            if id(box) not in own:
                assert not any(inside(point, box) for point in way), (edge, box)
        if edge.label is not None:
            middle = edge.label.centre
            assert any(abs(x - middle[0]) < 8 and abs(y - middle[1]) < 0.1 for x, y in way)
        source, target = boxes[edge.source], boxes[edge.target]
        assert edge.points[-1][0] == pytest.approx(target.x)
        assert target.y < edge.points[-1][1] < target.bottom
        assert edge.points[0][0] == pytest.approx(source.right)
        assert source.y < edge.points[0][1] < source.bottom


def sampled(points: tuple[Point, ...]) -> list[Point]:
    """Points on the route: a straight line, or the cubic curve that the picture draws."""
    found = []
    for (ax, ay), (bx, by) in pairwise(points):
        steps = max(int(abs(bx - ax) + abs(by - ay)) // 8, 4)
        for i in range(steps + 1):
            t = i / steps
            if ax == bx or ay == by:
                found.append((ax + (bx - ax) * t, ay + (by - ay) * t))
            else:
                middle = (ax + bx) / 2
                x = (1 - t) ** 3 * ax + 3 * (1 - t) ** 2 * t * middle + 3 * (1 - t) * t**2 * middle + t**3 * bx
                found.append((x, ay + (by - ay) * (3 * t**2 - 2 * t**3)))
    return found


def inside(point: Point, box: Box) -> bool:
    slack = 0.5  # routes touch the borders of their nodes
    return box.x + slack < point[0] < box.right - slack and box.y + slack < point[1] < box.bottom - slack


@pytest.mark.parametrize(
    "block", [0, 1, 2, *(pytest.param(block, marks=pytest.mark.exhaustive) for block in range(3, 10))]
)
def test_random_cells_have_no_overlaps(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        cell = random_cell(seed)
        assert_geometry(lay_out(cell))


def test_cells_with_many_nodes_have_no_overlaps_either() -> None:
    """Beyond `MAX_ITEMS` the order is only improved a little, or this would take minutes."""
    picks = tuple(Pick(i, t, "sep_conv_3x3") for t in range(2, 40) for i in (0, t - 1))
    drawing = lay_out(Cell(picks, tuple(range(2, 40))))
    assert len(drawing.nodes) + len(drawing.edges) > MAX_ITEMS
    assert_geometry(drawing)


@settings(max_examples=80, deadline=None)
@given(cells())
def test_any_cell_is_drawn_without_overlaps_and_as_valid_xml(cell: Cell) -> None:
    drawing = lay_out(cell)
    assert_geometry(drawing)
    drawn = sorted((e.op for e in drawing.edges if e.op is not None), key=str)
    assert sorted([*drawn, *(pick.op for pick in drawing.absent)], key=str) == sorted(p.op for p in cell.picks)
    ET.fromstring(to_svg(Genotype("any", {"cell": cell})))


@pytest.mark.parametrize("layers", [1, 5, 6, 21, 40])
def test_chains_wrap_into_rows_without_overlaps(layers: int) -> None:
    drawing = lay_out(chain(layers), (0,))
    assert_geometry(drawing)
    assert drawing.width < 1120
    tops = sorted({round(node.box.centre[1]) for node in drawing.nodes})
    assert len(tops) == {1: 1, 5: 1, 6: 2, 21: 5, 40: 8}[layers]
    for top in tops:
        row = [node.number or 0 for node in drawing.nodes if round(node.box.centre[1]) == top]
        places = [node.box.x for node in drawing.nodes if round(node.box.centre[1]) == top]
        assert row == sorted(row)
        assert places == sorted(places)  # left to right in every row


def test_nodes_are_in_the_column_of_their_longest_path() -> None:
    drawing = lay_out(Cell((Pick(0, 2, "a"), Pick(2, 3, "b"), Pick(1, 4, "c"), Pick(3, 4, "d")), (2, 3, 4)), (0, 1))
    x = {node.label: node.box.x for node in drawing.nodes}
    assert x["c_{k-2}"] == x["c_{k-1}"] < x["2"] < x["3"] < x["4"] < x["c_{k}"]
    y = {node.label: node.box.y for node in drawing.nodes}
    assert y["c_{k-2}"] < y["c_{k-1}"]


def test_inputs_are_drawn_in_order() -> None:
    for seed in range(60):
        cell = random_cell(seed)
        inputs = input_nodes(cell)
        y = {node.number: node.box.y for node in lay_out(cell, inputs).nodes if node.kind == "input"}
        assert len(inputs) < 2 or y[inputs[0]] < y[inputs[-1]]


def test_darts_v2_normal_cell_has_eight_edges_and_four_to_the_output() -> None:
    cell = from_darts(DARTS_V2).cells["normal"]
    drawing = lay_out(cell)
    number = [-1 if node.number is None else node.number for node in drawing.nodes]
    found = [Pick(number[e.source], number[e.target], e.op) for e in drawing.edges if e.op is not None]
    assert sorted(found, key=str) == sorted(cell.picks, key=str)
    assert sorted(number[e.source] for e in drawing.edges if e.op is None) == [2, 3, 4, 5]
    assert [node.label for node in drawing.nodes] == ["c_{k-2}", "c_{k-1}", "2", "3", "4", "5", "c_{k}"]


def test_none_is_listed_and_not_drawn() -> None:
    cell = from_nb201(NB201).cells["cell"]
    drawing = lay_out(cell)
    assert drawing.absent == (Pick(0, 2, "none"),)
    assert len(drawing.edges) == 5
    assert [node.label for node in drawing.nodes] == ["in", "1", "2", "out"]
    assert "not drawn (none): 0 → 2" in texts(to_svg(from_nb201(NB201)))


def test_a_node_without_inputs_is_drawn_empty() -> None:
    cell = Cell((Pick(0, 3, "a"), Pick(2, 4, "b"), Pick(1, 4, "none")), (2, 3, 4, 5))
    assert input_nodes(cell) == (0, 1)
    kinds = {node.label: node.kind for node in lay_out(cell, (0, 1)).nodes}
    assert kinds == {
        "c_{k-2}": "input",
        "c_{k-1}": "input",
        "2 empty": "empty",
        "3": "inner",
        "4": "inner",
        "5 empty": "empty",
        "c_{k}": "output",
    }
    assert 'class="sc-box sc-empty"' in to_svg(Genotype("darts", {"normal": cell}))


def test_an_operation_of_a_node_on_itself_follows_its_sum() -> None:
    drawing = lay_out(Cell((Pick(0, 1, "conv"), Pick(1, 1, "attention"), Pick(1, 2, "pool")), (2,)), (0,))
    label = [node.label for node in drawing.nodes]
    assert [(label[e.source], e.op, label[e.target]) for e in drawing.edges] == [
        ("in", "conv", "1′"),
        ("1′", "attention", "1"),
        ("1", "pool", "out"),
    ]


def test_edges_against_the_flow_are_refused() -> None:
    with pytest.raises(UserError, match="source <= target"):
        lay_out(Cell((Pick(3, 1, "conv"),), (3,)), (0,))


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ET.fromstring(svg).iter(f"{SVG}text")]


GENOTYPES = {
    "darts": from_darts(DARTS_V2),
    "nb201": from_nb201(NB201),
    "chain": Genotype("chain", {"layers": chain(21)}),
    **{f"random{seed}": Genotype("any", {"a": random_cell(seed), "b": random_cell(seed + 500)}) for seed in range(6)},
}


@pytest.mark.parametrize("genotype", GENOTYPES.values(), ids=GENOTYPES)
def test_every_pick_is_a_label_of_the_picture(genotype: Genotype) -> None:
    root = ET.fromstring(to_svg(genotype))
    labels = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "sc-op"]
    picks = [pick for cell in genotype.cells.values() for pick in cell.picks]
    assert sorted(map(str, labels)) == sorted(shorten(p.op, 36) for p in picks if family(p.op) != "none")
    tips = [tip.text or "" for tip in root.iter(f"{SVG}title")]
    assert all(any(pick.op in tip for tip in tips) for pick in picks if family(pick.op) != "none")


@pytest.mark.parametrize("genotype", GENOTYPES.values(), ids=GENOTYPES)
def test_label_text_fits_its_pill_and_panels_fit_the_page(genotype: Genotype) -> None:
    root = ET.fromstring(to_svg(genotype))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    panels = [group for group in root if group.tag == f"{SVG}g"]
    areas = []
    for panel, cell in zip(panels, genotype.cells.values(), strict=True):
        x, y = map(float, re.findall(r"[\d.]+", panel.attrib["transform"]))
        drawing = lay_out(cell)
        areas.append(Box(x, y, drawing.width, drawing.height))
        assert x + drawing.width <= width
        assert y + drawing.height <= height
        for group in panel.iter(f"{SVG}g"):
            pill, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
            if pill is not None and text is not None and group is not panel:
                end = float(text.attrib["x"]) + float(text.attrib["textLength"])
                assert end <= float(pill.attrib["x"]) + float(pill.attrib["width"]) - 5
    assert not any(overlap(a, b) for a, b in combinations(areas, 2))


@pytest.mark.parametrize("genotype", GENOTYPES.values(), ids=GENOTYPES)
def test_pictures_are_the_same_bytes_every_time(genotype: Genotype) -> None:
    assert to_svg(genotype) == to_svg(Genotype.from_dict(genotype.to_dict()))


def test_pictures_are_self_contained_and_accessible() -> None:
    svg = to_svg(from_darts(DARTS_V2), "DARTS_V2")
    root = ET.fromstring(svg)
    assert [child.tag for child in root][:2] == [f"{SVG}title", f"{SVG}desc"]
    assert root.findtext(f"{SVG}title") == "DARTS_V2"
    assert "node 5 = skip_connect(0) + dil_conv_3x3(2)" in root.findtext(f"{SVG}desc", "")
    assert root.get("role") == "img"
    assert "prefers-color-scheme:dark" in svg
    assert not re.search(r"<script|@import|url\(|href|@font-face", svg)
    assert min(map(int, re.findall(r"font(?:-size)?:(\d+)px", svg))) >= 11


def test_strings_of_users_are_escaped() -> None:
    evil = '<script>alert("x")</script>&amp;'
    cell = Cell((Pick(0, 1, evil), Pick(0, 1, "<script>"), Pick(0, 1, "a\x00b\x1b[31m\ud800\u202e")), (1,))
    svg = to_svg(Genotype(evil, {evil: cell}), title=evil)
    root = ET.fromstring(svg)
    assert "<script" not in svg
    assert not list(root.iter(f"{SVG}script"))
    assert root.findtext(f"{SVG}title") == evil
    assert evil in texts(svg)
    assert "a�b�[31m��" in texts(svg)
    svg.encode("utf-8")


def test_families_differ_without_colour() -> None:
    drawn = [name for name in FAMILIES if name != "none"]
    shapes = {re.sub(r'class="[^"]*"', "", mark(name, 0, 0)) for name in drawn}
    assert len(shapes) == len(drawn)
    # Convolution and skip are both solid, and differ by width.
    assert len({STROKES[name] for name in drawn}) == len(drawn) - 1
    assert len({COLOURS[name] for name in drawn}) == len(drawn)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sep_conv_3x3", "conv"),
        ("nor_conv_1x1", "conv"),
        ("mbconv_e6_k5", "conv"),
        ("mbconv_e6_k5_se", "conv"),
        ("dil_conv_5x5", "dilated"),
        ("dynamic_conv_3x3", "dynamic"),
        ("dil_dynamic_conv_5x5", "dynamic"),
        ("maxpool_3x3", "pool"),
        ("avg_pool_3x3", "pool"),
        ("skip_connect", "skip"),
        ("none", "none"),
        ("channel_attention", "attention"),
        ("local_sa_k3_h8", "attention"),
        ("noise", "other"),
        ("", "other"),
    ],
)
def test_family_follows_from_the_name(op: str, expected: str) -> None:
    assert family(op) == expected


@given(st.text(alphabet=string.printable + "注é\u0301…\x85\u2028", max_size=80), st.integers(0, 40))
def test_shorten_keeps_within_its_limit_and_leaves_short_text_alone(text: str, limit: int) -> None:
    short = shorten(text, limit)
    assert cell_len(short) <= limit
    if cell_len(clean(text)) <= limit:
        assert short == clean(text)
