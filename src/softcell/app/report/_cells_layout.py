"""Lays out a cell in fixed columns, as plain data: boxes, labels and lines, from left to right.

Nodes are in even columns by their depth (longest path from the inputs), the labels of operations in odd columns. An
edge is a level line through all columns between its nodes; it only climbs in the gaps beside its first and last column.
Items that share a column keep their distance there, so no label or box covers another, and no line crosses a label or
box of another edge. Lengths are pixels, y grows downwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from softcell.app.report.cells_graph import Graph, Kind, graph_of, input_nodes
from softcell.app.report.theme import CHAR, columns, family, shorten
from softcell.arch import Cell, Pick

Point = tuple[float, float]

LABEL_HEIGHT = 22.0
LABEL_PADDING = 34.0  # both margins and the family mark
LONGEST = 36  # characters of a label; the full name stays in the tooltip
NODE_HEIGHT = 30.0
LINE_HEIGHT = 4.0  # of an edge where it has no label
PORT = 10.0  # distance of two edges at a node
GAP = 10.0  # vertical distance of two items
ROW_WIDTH = 1040.0  # wider drawings continue in a new row where they can
ROW_GAP = 44.0
CROSSING = 60.0  # an edge climbs up to this many pixels rather than cross another
MOST_ITEMS = 80  # beyond this many nodes and edges, the search for a good order would take seconds
TURN = 18.0  # room for the line that leads from one row to the next


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; x and y are its upper left corner."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def centre(self) -> Point:
        return self.x + self.width / 2, self.y + self.height / 2

    def overlaps(self, other: Box) -> bool:
        return self.x < other.right and other.x < self.right and self.y < other.bottom and other.y < self.bottom


@dataclass(frozen=True, slots=True)
class Node:
    """A box. `number` is the cell's node, None for the box that concatenates several."""

    number: int | None
    label: str
    kind: Kind
    box: Box


@dataclass(frozen=True, slots=True)
class Edge:
    """A line between two nodes (indices into `Drawing.nodes`); without an operation it passes the node's value on.

    `points`: two neighbours on one horizontal or vertical are joined by a straight line, others by an S-curve that
    starts and ends horizontally. `text` is the operation's name as it fits, in the box `label`.
    """

    source: int
    target: int
    op: str | None
    text: str
    label: Box | None
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A laid-out cell within [0, width] x [0, height]; `absent` are the picks of `none`, which are not drawn."""

    width: float
    height: float
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    absent: tuple[Pick, ...]


def node_text_width(label: str) -> float:
    """The width of a node's label as it is set: `c_{k-2}` has a small subscript."""
    return 36.0 if label.startswith("c_{k-") else 18.0 if label == "c_{k}" else columns(label) * 8.6


@lru_cache(maxsize=256)  # pages that are served are drawn again whenever a run changes
def lay_out(cell: Cell, inputs: tuple[int, ...] | None = None) -> Drawing:
    """The drawing of a cell; inputs: the nodes that come from outside, found by `input_nodes` unless given."""
    absent = tuple(pick for pick in cell.picks if family(pick.op) == "none")
    graph = graph_of(cell, input_nodes(cell) if inputs is None else inputs)
    if not graph.labels:
        return Drawing(0.0, 0.0, (), (), absent)
    apart = distances(graph)
    order = order_items(graph, apart)
    ports = _ports(graph, order)
    return _draw(graph, ports, place_items(graph, apart, order, ports), absent)


Apart = list[list[float]]
"""The least vertical distance of the centres of two items; 0 where they share no column."""


def distances(graph: Graph) -> Apart:
    total = len(graph.spans)
    heights = [
        {c: _height(graph, item, c) for c in range(first, last + 1)} for item, (first, last) in enumerate(graph.spans)
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
    large = total > MOST_ITEMS
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
        ports = _ports(graph, order)
        y = place_items(graph, apart, order, ports, final=False)
        climbs = [
            abs(y[start] + leave - y[vertices + i]) + abs(y[end] + enter - y[vertices + i])
            for i, ((start, end, _), (leave, enter)) in enumerate(zip(graph.edges, ports, strict=True))
        ]
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


def _ports(graph: Graph, order: Sequence[int]) -> list[tuple[float, float]]:
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
        for item in edges:  # the longest first: an edge that is level with one of its ports climbs only once
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


def _draw(graph: Graph, ports: Sequence[tuple[float, float]], y: Sequence[float], absent: tuple[Pick, ...]) -> Drawing:
    vertices, total = len(graph.labels), len(graph.spans)
    texts = [None if op is None else shorten(op, LONGEST) for _, _, op in graph.edges]
    homes = [first for first, _ in graph.spans[:vertices]] + graph.label_columns  # the column of a box or label
    sizes = [max(34.0, node_text_width(label) + 18) for label in graph.labels]
    sizes += [0.0 if text is None else columns(text) * CHAR + LABEL_PADDING for text in texts]
    widths = [0.0] * (max(last for _, last in graph.spans) + 1)
    for item, column in enumerate(homes):
        if column is not None:
            widths[column] = max(widths[column], sizes[item])
    gaps = _gaps(graph, ports, y)
    rows = _rows(graph, widths, gaps)
    if len(rows) > 1:  # the columns of all rows are aligned
        widths = [max(widths[column % 2 :: 2]) for column in range(len(widths))]
        gaps = [max(gaps)] * len(gaps)
        rows = _rows(graph, widths, gaps)
    lead = 2 * TURN if len(rows) > 1 else 0.0
    starts, shifts, row_of = [0.0] * len(widths), [0.0] * len(widths), [0] * len(widths)
    ends: list[Point] = []  # right and lower border of every row
    top = 0.0
    for number, (first, stop) in enumerate(rows):
        inside = [
            (i, c) for i in range(total) for c in range(first, stop) if graph.spans[i][0] <= c <= graph.spans[i][1]
        ]
        low = min(y[item] - _height(graph, item, column) / 2 for item, column in inside)
        high = max(y[item] + _height(graph, item, column) / 2 for item, column in inside)
        x = lead
        for column in range(first, stop):
            starts[column], shifts[column], row_of[column] = x, top - low, number
            x += widths[column] + gaps[column]
        ends.append((x - gaps[stop - 1], top + high - low))
        top += high - low + ROW_GAP
    boxes = {
        item: Box(
            starts[column] + (widths[column] - sizes[item]) / 2,
            y[item] + shifts[column] - _height(graph, item, column) / 2,
            sizes[item],
            _height(graph, item, column),
        )
        for item, column in enumerate(homes)
        if column is not None
    }
    edges = []
    for number, (start, end, op) in enumerate(graph.edges):
        item, (leave, enter) = vertices + number, ports[number]
        (first, last), (source, target) = graph.spans[item], (boxes[start], boxes[end])
        level, arrival = y[item] + shifts[first], target.centre[1] + enter
        points = [(source.right, source.centre[1] + leave)]
        points.append((starts[first - 1] + widths[first - 1], points[0][1]))
        points += [(starts[first], level), (starts[last] + widths[last], level)]
        row = row_of[last]
        if row_of[last + 1] != row:  # to the next row: around its end, back between the rows, and in from the left
            border, between = ends[row][0] + TURN, ends[row][1] + ROW_GAP / 2
            middle = target.centre[1]
            into = [y[vertices + i] for i, edge in enumerate(graph.edges) if edge[1] == end]
            joint = sum(into) / len(into) + shifts[last]
            points += [(border, joint), (border + TURN, joint), (border + TURN, between), (0.0, between)]
            points += [(0.0, middle), (target.x, middle)]
        else:
            points += [(starts[last + 1], arrival), (target.x, arrival)]
        edges.append(Edge(start, end, op, texts[number] or "", boxes.get(item), _simplified(points)))
    nodes = (Node(graph.numbers[v], graph.labels[v], graph.kinds[v], boxes[v]) for v in range(vertices))
    width = max(right + (2 * TURN if k + 1 < len(rows) else 0.0) for k, (right, _) in enumerate(ends))
    return Drawing(width, top - ROW_GAP, tuple(nodes), tuple(edges), absent)


def _height(graph: Graph, item: int, column: int) -> float:
    """Of a node, which grows with its edges, or of an edge in one of its columns."""
    if item >= len(graph.labels):
        return LABEL_HEIGHT if graph.label_columns[item - len(graph.labels)] == column else LINE_HEIGHT
    most = max(sum(edge[end] == item for edge in graph.edges) for end in (0, 1))
    return max(NODE_HEIGHT, most * PORT + 10)


def _gaps(graph: Graph, ports: Sequence[tuple[float, float]], y: Sequence[float]) -> list[float]:
    """Room after each column: more of it where edges climb steeply."""
    climb = [0.0] * (max(last for _, last in graph.spans) + 1)
    for number, ((start, end, _), (leave, enter)) in enumerate(zip(graph.edges, ports, strict=True)):
        item = len(graph.labels) + number
        first, last = graph.spans[item]
        climb[first - 1] = max(climb[first - 1], abs(y[start] + leave - y[item]))
        climb[last] = max(climb[last], abs(y[end] + enter - y[item]))
    return [20 + min(56.0, 0.22 * value) for value in climb]


def _rows(graph: Graph, widths: Sequence[float], gaps: Sequence[float]) -> list[tuple[int, int]]:
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
    return [narrower for limit in limits if len(narrower := split(limit)) == len(rows)][-1]


def _simplified(points: list[Point]) -> tuple[Point, ...]:
    """Without repeated points and without points in the middle of a horizontal line."""
    kept: list[Point] = []
    for x, y in points:
        if kept and abs(kept[-1][0] - x) < 0.05 and abs(kept[-1][1] - y) < 0.05:
            continue
        if len(kept) > 1 and kept[-2][1] == kept[-1][1] == y:
            kept.pop()
        kept.append((x, y))
    return tuple(kept)
