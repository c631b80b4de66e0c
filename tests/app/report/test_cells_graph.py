"""Order and placement of a drawing's items, against brute force and closed forms."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, permutations

import pytest

from softcell.app.report.cells_graph import (
    GAP,
    LABEL_HEIGHT,
    MAX_ITEMS,
    NODE_HEIGHT,
    Graph,
    crossings,
    distances,
    graph_of,
    input_nodes,
    order_items,
    place_items,
    segments,
)
from softcell.app.report.cells_svg import lay_out
from softcell.arch import Cell, Pick
from tests.helpers.report_cells import random_cell


def graph(cell: Cell) -> Graph:
    return graph_of(cell, input_nodes(cell))


def ranks(order: list[int]) -> list[int]:
    return [order.index(item) for item in range(len(order))]


def small_graph(seed: int) -> Graph:
    """Two inputs and two nodes with an edge from each input: eight items."""
    rng = random.Random(seed)
    picks = [Pick(source, target, "conv") for target in (2, 3) for source in (0, 1)]
    rng.shuffle(picks)
    return graph(Cell(tuple(picks), (2,)))


def counted_by_points(found: Graph, order: list[int]) -> int:
    """Pairs of segments in one gap whose ends lie in opposite orders, each segment as two points."""
    place = ranks(order)
    lines = [(gap, place[a], place[b]) for gap, a, b in segments(found)]
    return sum(
        gap == other and ((a > c and b < d) or (a < c and b > d))
        for (gap, a, b), (other, c, d) in combinations(lines, 2)
    )


@pytest.mark.parametrize("seed", range(12))
def test_crossings_counts_what_brute_force_counts(seed: int) -> None:
    found = graph(random_cell(seed))
    order = list(range(len(found.spans)))
    random.Random(seed).shuffle(order)
    pieces = segments(found)
    assert crossings(ranks(order), pieces, pieces) == 2 * counted_by_points(found, order)


def test_order_has_the_fewest_crossings_of_all_orders() -> None:
    for seed in range(3):
        found = small_graph(seed)
        order = order_items(found, distances(found))
        assert sorted(order) == list(range(len(found.spans)))
        vertices, edges = range(len(found.labels)), range(len(found.labels), len(found.spans))
        fewest = min(
            counted_by_points(found, [*upper, *lower])
            for upper in permutations(vertices)
            for lower in permutations(edges)
        )
        assert counted_by_points(found, order) == fewest == 1  # the complete graph between two and two nodes


def test_the_edge_from_the_last_node_to_the_output_does_not_dip() -> None:
    """It ends above a long edge that runs below that node, which only an order with moves in both directions finds."""
    ops = [("sep_conv_3x3", "skip_connect"), ("dil_conv_5x5",), ("dil_conv_5x5",)]
    picks = [Pick(s, t, op) for t in range(2, 6) for s in range(t) for op in ops[(s + t) % 3]]
    drawing = lay_out(Cell(tuple(picks), (2, 3, 4, 5)))
    (edge,) = [edge for edge in drawing.edges if edge.op is None and edge.source == 5]
    climbs = [b[1] - a[1] for a, b in pairwise(edge.points)]
    assert min(climbs) >= -0.1 or max(climbs) <= 0.1, climbs


def test_items_of_a_column_keep_their_order_and_distance() -> None:
    for seed in range(20):
        found = graph(random_cell(seed))
        apart = distances(found)
        order = order_items(found, apart)
        y = place_items(found, apart, order, [(0.0, 0.0)] * len(found.edges))
        for above, below in combinations(order, 2):
            assert y[below] - y[above] >= apart[above][below] - 1e-9 or not apart[above][below]


def test_distances_are_half_of_both_heights_and_a_gap() -> None:
    found = graph(Cell((Pick(0, 1, "conv"), Pick(0, 1, "pool"), Pick(0, 2, "conv")), (2,)))
    labels = len(found.labels)
    assert distances(found)[labels][labels + 1] == LABEL_HEIGHT + GAP  # two labels between the same nodes
    cell = Cell((Pick(0, 2, "conv"), Pick(1, 2, "conv")), (2,))
    assert distances(graph(cell))[0][1] == NODE_HEIGHT + GAP  # two inputs


def test_a_single_path_is_a_straight_line() -> None:
    drawing = lay_out(Cell((Pick(0, 1, "conv"), Pick(1, 2, "pool"), Pick(2, 3, "conv")), (3,)))
    assert {round(node.box.centre[1], 3) for node in drawing.nodes} == {NODE_HEIGHT / 2}
    assert all(len(edge.points) == 2 for edge in drawing.edges)


def test_large_cells_lose_crossings_too() -> None:
    rng = random.Random(0)
    picks = tuple(Pick(rng.randrange(target), target, "conv") for target in range(2, 24) for _ in range(3))
    found = graph(Cell(picks, (23,)))
    order, pieces = order_items(found, distances(found)), segments(found)
    assert len(order) > MAX_ITEMS
    before = crossings(range(len(order)), pieces, pieces)
    assert crossings(ranks(order), pieces, pieces) < 0.7 * before
