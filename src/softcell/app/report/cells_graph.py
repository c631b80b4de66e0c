"""A cell as a graph to be drawn: its vertices and edges with their labels, and their columns.

Nodes are in even columns by their depth (longest path from the inputs), the labels of operations in odd ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from softcell.app.report.theme import family
from softcell.arch import Cell, Table
from softcell.errors import UserError

Kind = Literal["input", "inner", "surrogate", "empty", "output"]

MANY_NODES = 64  # beyond this, gaps in the numbering are no longer drawn as empty nodes


def input_nodes(cell: Cell) -> tuple[int, ...]:
    """The nodes below the first target, except those in the output: these have only lost their inputs."""
    targets = [pick.target for pick in cell.picks if pick.source != pick.target]
    sources = {pick.source for pick in cell.picks}
    first = min(targets, default=min(cell.output, default=0))
    below = set(range(min(first, MANY_NODES))) | {source for source in sources if source < first}
    return tuple(sorted(below - set(cell.output) or below))


def input_label(inputs: Sequence[int], number: int) -> str:
    """`c_{k-2}` and `c_{k-1}` where there are two inputs, as in DARTS cells."""
    if len(inputs) == 2:
        return ("c_{k-2}", "c_{k-1}")[inputs.index(number)]
    return "in" if len(inputs) == 1 else f"in {number}"


def output_label(inputs: Sequence[int]) -> str:
    return "c_{k}" if len(inputs) == 2 else "out"


def edge_names(table: Table) -> list[str]:
    """The choices of a table as `cₖ₋₂ → 2`, with the names that nodes have in a drawing."""
    inputs = tuple(range(min(choice.target for choice in table.choices)))

    def name(node: int) -> str:
        if node in inputs:
            label = input_label(inputs, node)
        else:
            label = output_label(inputs) if table.output == (node,) else str(node)
        return label.replace("c_{k-2}", "cₖ₋₂").replace("c_{k-1}", "cₖ₋₁").replace("c_{k}", "cₖ")

    return [f"{name(choice.source)} → {name(choice.target)}" for choice in table.choices]


def node_numbers(cell: Cell, inputs: tuple[int, ...]) -> tuple[int, ...]:
    """All nodes of a cell; a gap in the numbering is a node that lost all its edges."""
    named = {n for pick in cell.picks for n in (pick.source, pick.target)} | set(cell.output) | set(inputs)
    last = max(named, default=-1)
    return tuple(range(last + 1)) if last < MANY_NODES else tuple(sorted(named))


@dataclass
class Graph:
    """What is drawn: vertices first, then edges; both are items, numbered in this order."""

    labels: list[str] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    numbers: list[int | None] = field(default_factory=list)
    edges: list[tuple[int, int, str | None]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # first and last column of each item
    label_columns: list[int | None] = field(default_factory=list)  # of each edge

    def vertex(self, number: int | None, label: str, kind: Kind) -> int:
        self.numbers.append(number)
        self.labels.append(label)
        self.kinds.append(kind)
        return len(self.labels) - 1

    def shared(self, a: int, b: int) -> range:
        """The columns that two items share."""
        return range(max(self.spans[a][0], self.spans[b][0]), min(self.spans[a][1], self.spans[b][1]) + 1)


def graph_of(cell: Cell, inputs: tuple[int, ...]) -> Graph:
    """The graph of a cell whose nodes `inputs` come from outside; `none` is left out."""
    for pick in cell.picks:
        if not 0 <= pick.source <= pick.target:
            raise UserError(f"an edge must have 0 <= source <= target to be drawn, got {pick}")
    graph = Graph()
    entry: dict[int, int] = {}  # node to the vertex at which its edges end
    leave: dict[int, int] = {}  # node to the vertex at which its edges start
    picks = [pick for pick in cell.picks if family(pick.op) != "none"]
    fed = {pick.target for pick in picks if pick.source < pick.target}
    calibrated = {pick.target for pick in picks if pick.source == pick.target}
    alone = cell.output[0] if len(cell.output) == 1 and cell.output[0] not in inputs else None
    for number in node_numbers(cell, inputs):
        kind: Kind = "input" if number in inputs else "inner" if number in fed else "empty"
        label = input_label(inputs, number) if kind == "input" else str(number)
        if number in calibrated:
            # A pick from a node to itself works on the sum of its inputs, which gets a box of its own.
            first = label if kind == "input" else f"{number}′"
            first += " empty" if kind == "empty" else ""
            entry[number] = graph.vertex(number, first, "surrogate" if kind == "inner" else kind)
            label, kind = str(number), "inner"
        if number == alone and kind == "inner":
            label, kind = output_label(inputs), "output"
        label += f"{' out' * (number == alone)} empty" if kind == "empty" else ""
        leave[number] = graph.vertex(number, label, kind)
        entry.setdefault(number, leave[number])
    for pick in sorted(picks, key=lambda pick: (pick.target, pick.source)):
        on_itself = pick.source == pick.target
        start = entry[pick.source] if on_itself else leave[pick.source]
        graph.edges.append((start, leave[pick.target] if on_itself else entry[pick.target], pick.op))
    if alone is None and cell.output:
        concat = graph.vertex(None, output_label(inputs), "output")
        graph.edges += [(leave[number], concat, None) for number in cell.output]
    depth = _depths(graph)
    graph.spans = [(2 * value, 2 * value) for value in depth]
    graph.spans += [(2 * depth[start] + 1, 2 * depth[end] - 1) for start, end, _ in graph.edges]
    crowd = [0] * (2 * max(depth, default=0) + 1)
    graph.label_columns = [None] * len(graph.edges)
    # Short edges have no choice where their label goes; long ones then take the emptiest column.
    spans = graph.spans[len(depth) :]
    for edge in sorted(range(len(spans)), key=lambda i: (spans[i][1] - spans[i][0], i)):
        if graph.edges[edge][2] is not None:
            column = min(range(spans[edge][0], spans[edge][1] + 1, 2), key=lambda column: (crowd[column], column))
            graph.label_columns[edge] = column
            crowd[column] += 1
    return graph


def _depths(graph: Graph) -> list[int]:
    """Longest path from the inputs; a node without inputs is just before its first reader."""
    depth = [0 if kind == "input" else 1 for kind in graph.kinds]
    for start, end, _ in sorted(graph.edges, key=lambda edge: edge[1]):
        depth[end] = max(depth[end], depth[start] + 1)  # vertices are numbered along the flow
    for vertex, kind in enumerate(graph.kinds):
        if kind == "empty":
            depth[vertex] = min((depth[end] for start, end, _ in graph.edges if start == vertex), default=2) - 1
    readers = {start for start, _, _ in graph.edges}
    for vertex, kind in enumerate(graph.kinds):
        if kind == "output" and vertex not in readers:
            depth[vertex] = max(depth)  # the output comes last
    used = sorted(set(depth))
    return [used.index(value) for value in depth]
