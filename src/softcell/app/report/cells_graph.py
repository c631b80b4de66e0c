"""A cell as a graph in fixed columns: its nodes and edges, their labels, and where each of them goes.

Nodes are in even columns by their depth (longest path from the inputs), the labels of operations in odd columns. An
edge is a level line through all columns between its nodes; it only climbs in the gaps next to its first and last
column. Items that share a column keep their distance there, so no label or box covers another, and no line crosses a
label or box of another edge. Lengths are pixels, y grows downwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from softcell.app.report.theme import family
from softcell.arch import Cell, Table
from softcell.errors import UserError

Kind = Literal["input", "inner", "surrogate", "empty", "output"]

MANY_NODES = 64  # beyond this, gaps in the numbering are no longer drawn as empty nodes
LABEL_HEIGHT = 22.0
NODE_HEIGHT = 30.0
LINE_HEIGHT = 4.0  # of an edge where it has no label
PORT = 10.0  # distance of two edges at a node
GAP = 10.0  # vertical distance of two items
CROSSING = 60.0  # an edge climbs up to this many pixels rather than cross another
MAX_ITEMS = 80  # beyond this many nodes and edges, the search for a good order would take seconds
ROW_WIDTH = 1040.0  # wider drawings continue in a new row where they can


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
    """The graph of a cell whose nodes `inputs` come from outside; `none` is omitted."""
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
            # A pick from a node to itself works on the sum of its inputs, which gets a separate box.
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


Apart = list[list[float]]
"""The least vertical distance of the centres of two items; 0 where they share no column."""


def distances(graph: Graph) -> Apart:
    total = len(graph.spans)
    heights = [
        {c: item_height(graph, item, c) for c in range(first, last + 1)}
        for item, (first, last) in enumerate(graph.spans)
    ]
    return [
        [
            max(((heights[a][c] + heights[b][c]) / 2 + GAP for c in graph.shared(a, b)), default=0.0)
            for b in range(total)
        ]
        for a in range(total)
    ]


Segment = tuple[int, int, int]
"""A gap between two columns, and the items that are joined there: one of each column."""


def segments(graph: Graph) -> list[Segment]:
    """All pieces of edges, by the gap they run in; in the gaps that it passes level, an edge joins itself."""
    found = []
    for number, (start, end, _) in enumerate(graph.edges):
        item = len(graph.labels) + number
        first, last = graph.spans[item]
        found += [(first - 1, start, item), *((gap, item, item) for gap in range(first, last)), (last, item, end)]
    return found


def crossings(place: Sequence[int], some: Iterable[Segment], others: Iterable[Segment]) -> int:
    """How many pairs of a segment in `some` and one in `others` cross, where `place` orders the items of a column."""
    by_gap: dict[int, list[tuple[int, int]]] = {}
    for gap, a, b in others:
        by_gap.setdefault(gap, []).append((place[a], place[b]))
    count = 0
    for gap, a, b in some:
        left, right = place[a], place[b]
        count += sum((left - c) * (right - d) < 0 for c, d in by_gap.get(gap, ()))
    return count


def order_items(graph: Graph, apart: Apart) -> list[int]:
    """All items from top to bottom, in an order in which few edges cross and none climbs far.

    Barycentre sweeps (Sugiyama, Tagawa and Toda 1981), then moves of single items while they help; deterministic.
    """
    total, vertices = len(graph.spans), len(graph.labels)
    sides: list[tuple[list[int], list[int]]] = [([], []) for _ in range(total)]  # linked items to the left and right
    for number, (start, end, _) in enumerate(graph.edges):
        item = vertices + number
        sides[item] = [start], [end]
        sides[start][1].append(item)
        sides[end][0].append(item)
    large = total > MAX_ITEMS
    pieces = segments(graph)
    own = [[piece for piece in pieces if item in piece[1:]] for item in range(total)]

    def neighbours(order: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """Every item, the next in one of its columns above or below, and where the item is and would be."""
        for item in list(order):
            at = order.index(item)
            for way in (range(at + 1, total), range(at - 1, -1, -1)):
                to = next((k for k in way if apart[item][order[k]]), None)
                if to is not None:
                    yield item, order[to], at, to
                    # The caller may have moved the item meanwhile.
                    at = order.index(item)

    def uncross(order: list[int]) -> list[int]:
        """Moves items past their neighbours while that removes crossings."""
        for _ in range(2 if large else 8):
            before = list(order)
            for item, other, at, to in neighbours(order):
                place = _ranks(order)
                now = crossings(place, own[item], own[other])
                place[item], place[other] = place[other], place[item]
                if crossings(place, own[item], own[other]) < now:
                    order.insert(to, order.pop(at))
            if order == before:
                break
        return order

    def cost(order: Sequence[int]) -> float:
        ports = ports_of(graph, order)
        y = place_items(graph, apart, order, ports, final=False)
        climbs = [
            abs(y[start] + leave - y[vertices + i]) + abs(y[end] + enter - y[vertices + i])
            for i, ((start, end, _), (leave, enter)) in enumerate(zip(graph.edges, ports, strict=True))
        ]
        # Every pair is counted from both of its sides.
        return CROSSING * crossings(_ranks(order), pieces, pieces) / 2 + sum(climbs)

    order = uncross(list(range(total)))
    best, least = list(order), 0.0 if large else cost(order)
    for sweep in range(0 if large else 12):
        place = _ranks(order)
        use = ((0,), (1,), (0, 1))[sweep % 3]
        linked = [[other for side in use for other in sides[item][side]] for item in range(total)]
        key = [sum(place[o] for o in linked[i]) / len(linked[i]) if linked[i] else place[i] for i in range(total)]
        order = uncross(sorted(range(total), key=lambda i: (key[i], place[i])))
        found = cost(order)
        if found < least:
            best, least = list(order), found
    for _ in range(0 if large else 2):
        for _item, _other, at, to in neighbours(best):
            moved = list(best)
            moved.insert(to, moved.pop(at))
            found = cost(moved)
            if found < least - 0.5:
                # In place, so that `neighbours` continues with the new order.
                best[:], least = moved, found
    inputs = [v for v in range(vertices) if graph.kinds[v] == "input"]
    if len(inputs) > 1 and best.index(inputs[0]) > best.index(inputs[-1]):
        best = best[::-1]  # a mirror image has the same crossings
    return best


def _ranks(order: Sequence[int]) -> list[int]:
    place = [0] * len(order)
    for rank, item in enumerate(order):
        place[item] = rank
    return place


def ports_of(graph: Graph, order: Sequence[int]) -> list[tuple[float, float]]:
    """Where each edge leaves and enters its nodes, as distances from their centres."""
    place, vertices = _ranks(order), len(graph.labels)
    ports = [[0.0, 0.0] for _ in graph.edges]
    for vertex in range(vertices):
        for end in (0, 1):
            mine = sorted((place[vertices + i], i) for i, edge in enumerate(graph.edges) if edge[end] == vertex)
            for k, (_, edge) in enumerate(mine):
                ports[edge][end] = (k - (len(mine) - 1) / 2) * PORT
    return [(leave, enter) for leave, enter in ports]


def place_items(
    graph: Graph, apart: Apart, order: Sequence[int], ports: Sequence[tuple[float, float]], final: bool = True
) -> list[float]:
    """The vertical centre of every item: close to what it is linked with, at least `GAP` from its neighbours."""
    total, vertices = len(order), len(graph.labels)
    above: list[list[tuple[int, float]]] = [
        [] for _ in range(total)
    ]  # the next items above, and the least distance to each
    below: list[list[tuple[int, float]]] = [[] for _ in range(total)]
    lowest: dict[int, int] = {}  # by column the last item so far
    for item in order:
        span = range(graph.spans[item][0], graph.spans[item][1] + 1)
        for other in {lowest[column]: None for column in span if column in lowest}:
            above[item].append((other, apart[item][other]))
            below[other].append((item, apart[item][other]))
        lowest.update(dict.fromkeys(span, item))
    pulls: list[list[tuple[int, float]]] = [[] for _ in range(total)]  # an item should be so far below another
    for number, ((start, end, _), (leave, enter)) in enumerate(zip(graph.edges, ports, strict=True)):
        item = vertices + number
        pulls[item] += [(start, leave), (end, enter)]
        pulls[start].append((item, -leave))
        pulls[end].append((item, -enter))

    def room(item: int) -> tuple[float, float]:
        low = max((y[other] + needed for other, needed in above[item]), default=float("-inf"))
        return low, min((y[other] - needed for other, needed in below[item]), default=float("inf"))

    y = [0.0] * total
    # Many orders are compared, for which rough positions are enough.
    for _ in range(60 if final else 6):
        wanted = [sum(y[o] + d for o, d in pulls[i]) / len(pulls[i]) if pulls[i] else y[i] for i in range(total)]
        wanted = [(old + new) / 2 for old, new in zip(y, wanted, strict=True)]
        # Pushed down from the top and up from the bottom; the mean of both keeps all distances too.
        down, up = list(wanted), list(wanted)
        for item in order:
            down[item] = max([wanted[item], *(down[other] + needed for other, needed in above[item])])
        for item in reversed(order):
            up[item] = min([wanted[item], *(up[other] - needed for other, needed in below[item])])
        y = [(a + b) / 2 for a, b in zip(down, up, strict=True)]
    edges = sorted(range(vertices, total), key=lambda i: (graph.spans[i][0] - graph.spans[i][1], i))
    for _ in range(3 if final else 0):  # one item that moves makes room for another
        for item in edges:  # longest first: an edge that is level with one of its ports climbs only once
            low, high = room(item)
            fitting = [level for o, d in reversed(pulls[item]) if low <= (level := y[o] + d) <= high]
            y[item] = fitting[0] if fitting else y[item]
        for vertex in range(vertices):
            for end in (1, 0):
                mine = [i for i, edge in enumerate(graph.edges) if edge[end] == vertex]
                low, high = room(vertex)
                level = y[vertices + mine[0]] - ports[mine[0]][end] if len(mine) == 1 else y[vertex]
                if low <= level <= high and abs(level - y[vertex]) <= NODE_HEIGHT / 2:
                    y[vertex] = level
    return y


def item_height(graph: Graph, item: int, column: int) -> float:
    """The height of a node, which grows with its edges, or of an edge in one of its columns."""
    if item >= len(graph.labels):
        return LABEL_HEIGHT if graph.label_columns[item - len(graph.labels)] == column else LINE_HEIGHT
    most = max(sum(edge[end] == item for edge in graph.edges) for end in (0, 1))
    return max(NODE_HEIGHT, most * PORT + 10)


def column_gaps(graph: Graph, ports: Sequence[tuple[float, float]], y: Sequence[float]) -> list[float]:
    """Room after each column: more of it where edges climb steeply."""
    climb = [0.0] * (max(last for _, last in graph.spans) + 1)
    for number, ((start, end, _), (leave, enter)) in enumerate(zip(graph.edges, ports, strict=True)):
        item = len(graph.labels) + number
        first, last = graph.spans[item]
        climb[first - 1] = max(climb[first - 1], abs(y[start] + leave - y[item]))
        climb[last] = max(climb[last], abs(y[end] + enter - y[item]))
    return [20 + min(56.0, 0.22 * value) for value in climb]


def split_rows(graph: Graph, widths: Sequence[float], gaps: Sequence[float]) -> list[tuple[int, int]]:
    """First column and end of each row, none wider than `ROW_WIDTH` if that can be, and all about equally wide.

    A row may begin at a node that everything runs through: one that has its column to itself.
    """
    inside = [[i for i, (first, last) in enumerate(graph.spans) if first <= c <= last] for c in range(len(widths))]
    fed = {end for _, end, _ in graph.edges}
    cuts = [c for c in range(2, len(widths), 2) if len(inside[c]) == 1 and inside[c][0] in fed]

    def split(limit: float) -> list[tuple[int, int]]:
        rows, first, used = [], 0, 0.0
        for here, after in zip([0, *cuts], [*cuts, len(widths)], strict=True):
            piece = sum(widths[here:after]) + sum(gaps[here:after])
            alone = after == len(widths) and after - here == 1  # the last node must not be alone in a row
            if used and used + piece > limit and not alone:
                rows.append((first, here))
                first, used = here, 0.0
            used += piece
        return [*rows, (first, len(widths))]

    rows = split(ROW_WIDTH)
    limits = [ROW_WIDTH - 20 * step for step in range(int(ROW_WIDTH / 20))]
    # The narrowest rows that need no further row are about equally wide.
    return [narrower for limit in limits if len(narrower := split(limit)) == len(rows)][-1]
