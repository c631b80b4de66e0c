"""Places for the parts of a layered graph: columns from left to right, rows where it would grow too wide."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from softcell.app.report.drawing import CHAR, Box, Drawing, Edge, Kind, Node, Point
from softcell.app.report.order import order
from softcell.app.report.place import Pull, Straightener, settle
from softcell.app.report.strings import columns, shorten
from softcell.arch import Pick

LABEL_HEIGHT = 22.0
LABEL_PADDING = 34.0  # both margins and the family mark
LONGEST = 36  # characters of a label; the full name stays in the tooltip
NODE_HEIGHT = 30.0
PORT = 10.0  # distance of two links at a node
GAP = 10.0  # vertical distance of two items
ROW_WIDTH = 1040.0  # wider drawings continue in a new row where they can
ROW_GAP = 44.0
TURN = 18.0  # room for the line that leads from one row to the next


@dataclass
class Sketch:
    """The graph before it has places. Vertices come first among the items; labels and bends follow."""

    labels: list[str] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    numbers: list[int | None] = field(default_factory=list)
    entry: dict[int, int] = field(default_factory=dict)  # node to the vertex its edges arrive at
    exit: dict[int, int] = field(default_factory=dict)  # node to the vertex its edges leave from
    links: list[tuple[int, int, str | None]] = field(default_factory=list)

    def vertex(self, number: int | None, label: str, kind: Kind) -> int:
        self.numbers.append(number)
        self.labels.append(label)
        self.kinds.append(kind)
        return len(self.labels) - 1


class Layout:
    """Gives every item its place."""

    def __init__(self, sketch: Sketch, ranks: list[list[int]], chains: list[list[int]]) -> None:
        self.sketch, self.chains = sketch, chains
        self.vertices = len(sketch.labels)
        total = sum(len(rank) for rank in ranks) + sum(link[2] is None for link in sketch.links)
        left: list[list[int]] = [[] for _ in range(total)]
        right: list[list[int]] = [[] for _ in range(total)]
        for chain in chains:
            for a, b in pairwise(chain):
                right[a].append(b)
                left[b].append(a)
        self.ranks = order(ranks, left, right)
        first = [v for v in self.ranks[0] if sketch.kinds[v] == "input"]
        if first and first[0] > first[-1]:
            self.ranks = [rank[::-1] for rank in self.ranks]  # a mirror image crosses nothing new
        self.place = {item: i for rank in self.ranks for i, item in enumerate(rank)}
        self.texts = {
            self.vertices + i: shorten(op, LONGEST) for i, (_, _, op) in enumerate(sketch.links) if op is not None
        }
        self.ports = self._ports()
        self.heights = [4.0] * total
        self.widths = [0.0] * total
        for vertex, label in enumerate(sketch.labels):
            many = max(sum(link[0] == vertex for link in sketch.links), sum(link[1] == vertex for link in sketch.links))
            self.heights[vertex] = max(NODE_HEIGHT, many * PORT + 10)
            self.widths[vertex] = max(34.0, node_text_width(label) + 18)
        for item, text in self.texts.items():
            self.heights[item] = LABEL_HEIGHT
            self.widths[item] = columns(text) * CHAR + LABEL_PADDING
        self.centre = settle(self.ranks, self._pulls(total), self.heights, GAP)
        straight = Straightener(self.ranks, chains, self.ports, self.heights, GAP)
        for _ in range(3):  # one chain that moves makes room for another
            straight.chains_on(self.centre)
            straight.nodes_on(self.centre, NODE_HEIGHT / 2)
        straight.chains_on(self.centre)

    def _ports(self) -> list[tuple[float, float]]:
        """Where each link leaves and enters its nodes, as distances from their centres."""
        leave, enter = [0.0] * len(self.chains), [0.0] * len(self.chains)
        for ports, tip, step in ((leave, 0, 1), (enter, -1, -2)):
            for vertex in range(self.vertices):
                mine = [(self.place[chain[step]], i) for i, chain in enumerate(self.chains) if chain[tip] == vertex]
                for k, (_, link) in enumerate(sorted(mine)):
                    ports[link] = (k - (len(mine) - 1) / 2) * PORT
        return list(zip(leave, enter, strict=True))

    def _pulls(self, total: int) -> list[list[Pull]]:
        pulls: list[list[Pull]] = [[] for _ in range(total)]
        for chain, (leave, enter) in zip(self.chains, self.ports, strict=True):
            for i, (a, b) in enumerate(pairwise(chain)):
                shift = (leave if i == 0 else 0.0) - (enter if i == len(chain) - 2 else 0.0)
                # A bend in mid-link is worse than one at a node.
                weight = 1.0 if i == 0 or i == len(chain) - 2 else 6.0
                pulls[b].append(Pull(a, shift, weight))
                pulls[a].append(Pull(b, -shift, weight))
        return pulls

    def drawing(self, absent: tuple[Pick, ...]) -> Drawing:
        if not self.vertices:
            return Drawing(0.0, 0.0, (), (), absent)
        widths = [max((self.widths[item] for item in rank), default=0.0) for rank in self.ranks]
        gaps = self._gaps()
        rows = self._rows(widths, gaps, ROW_WIDTH)
        if len(rows) > 1:  # columns of all rows stand below each other
            widths = [max(widths[r % 2 :: 2]) for r in range(len(widths))]
            gaps = [max(gaps)] * len(gaps)
            rows = self._rows(widths, gaps, ROW_WIDTH)
            limits = [ROW_WIDTH - 20 * step for step in range(int(ROW_WIDTH / 20))]
            rows = [r for r in (self._rows(widths, gaps, w) for w in limits) if len(r) == len(rows)][-1]
        starts, tops = [0.0] * len(widths), [0.0] * len(widths)
        lead = 2 * TURN if len(rows) > 1 else 0.0
        ends: list[tuple[float, float]] = []  # right border and lower border of every row
        top = width = 0.0
        for first, stop in rows:
            low = min(self.centre[i] - self.heights[i] / 2 for rank in self.ranks[first:stop] for i in rank)
            high = max(self.centre[i] + self.heights[i] / 2 for rank in self.ranks[first:stop] for i in rank)
            x = lead
            for rank in range(first, stop):
                starts[rank], tops[rank] = x, top - low
                x += widths[rank] + gaps[rank]
            x -= gaps[stop - 1]
            ends.append((x, top + high - low))
            width = max(width, x + (2 * TURN if stop < len(self.ranks) else 0.0))
            top += high - low + ROW_GAP
        home = {item: r for r, rank in enumerate(self.ranks) for item in rank}
        boxes = {
            item: Box(
                starts[r] + (widths[r] - self.widths[item]) / 2,
                self.centre[item] + tops[r] - self.heights[item] / 2,
                self.widths[item],
                self.heights[item],
            )
            for item, r in home.items()
        }
        row_of = [k for k, (first, stop) in enumerate(rows) for _ in range(first, stop)]
        edges = []
        joints: dict[int, Point] = {}
        for link, chain in enumerate(self.chains):
            start, end, op = self.sketch.links[link]
            leave, enter = self.ports[link]
            points = [(boxes[start].right, boxes[start].centre[1] + leave)]
            points.append((starts[home[start]] + widths[home[start]], points[0][1]))
            for item in chain[1:-1]:
                r, y = home[item], boxes[item].centre[1]
                points += [(starts[r], y), (starts[r] + widths[r], y)]
            turned = row_of[home[end]] != row_of[home[start]]
            if turned:
                border = ends[row_of[home[start]]][0]
                into = [c[-2] for c in self.chains if c[-1] == end]
                middle = sum(boxes[item].centre[1] for item in into) / len(into)
                joints[end] = (border + TURN, middle)
                points.append(joints[end])
            else:
                y = boxes[end].centre[1] + enter
                points += [(starts[home[end]], y), (boxes[end].x, y)]
            label = boxes[self.vertices + link] if op is not None else None
            text = self.texts.get(self.vertices + link, "")
            edges.append(Edge(start, end, op, text, label, _simplified(points), not turned))
        for end, (x, y) in joints.items():
            between = ends[row_of[home[end]] - 1][1] + ROW_GAP / 2
            box = boxes[end]
            route = [(x, y), (x + TURN, y), (x + TURN, between), (0.0, between), (0.0, box.centre[1])]
            edges.append(Edge(end, end, None, "", None, _simplified([*route, (box.x, box.centre[1])])))
        nodes = tuple(
            Node(self.sketch.numbers[v], self.sketch.labels[v], self.sketch.kinds[v], boxes[v])
            for v in range(self.vertices)
        )
        return Drawing(width, top - ROW_GAP, nodes, tuple(edges), absent)

    def _gaps(self) -> list[float]:
        """Room after each rank: more of it where links climb steeply."""
        home = {item: r for r, rank in enumerate(self.ranks) for item in rank}
        climb = [0.0] * len(self.ranks)
        for chain, (leave, enter) in zip(self.chains, self.ports, strict=True):
            for i, (a, b) in enumerate(pairwise(chain)):
                start = self.centre[a] + (leave if i == 0 else 0.0)
                end = self.centre[b] + (enter if i == len(chain) - 2 else 0.0)
                climb[home[a]] = max(climb[home[a]], abs(end - start))
        return [20 + min(56.0, 0.22 * value) for value in climb]

    def _rows(self, widths: list[float], gaps: list[float], limit: float) -> list[tuple[int, int]]:
        """Ranks of each row, none wider than `limit` if that can be.

        A row may begin at a node that everything runs through: a rank of that node alone.
        """
        rows, first, used = [], 0, 0.0
        cuts = [r for r in range(2, len(widths), 2) if len(self.ranks[r]) == 1 and self.ranks[r][0] < self.vertices]
        cuts = [r for r in cuts if any(chain[-1] == self.ranks[r][0] for chain in self.chains)]
        for here, after in zip([0, *cuts], [*cuts, len(widths)], strict=True):
            piece = sum(widths[here:after]) + sum(gaps[here:after])
            # The last node must not stand alone in a row.
            alone = after == len(widths) and after - here == 1
            if used and used + piece > limit and not alone:
                rows.append((first, here))
                first, used = here, 0.0
            used += piece
        return [*rows, (first, len(widths))]


def node_text_width(label: str) -> float:
    """The width of a node's label as it is set: `c_{k-2}` has a small subscript."""
    return 36.0 if label.startswith("c_{k-") else 18.0 if label == "c_{k}" else columns(label) * 8.6


def _simplified(points: list[Point]) -> tuple[Point, ...]:
    """Without repeated points and without points amid a horizontal line."""
    kept: list[Point] = []
    for x, y in points:
        if kept and abs(kept[-1][0] - x) < 0.05 and abs(kept[-1][1] - y) < 0.05:
            continue
        if len(kept) > 1 and kept[-2][1] == kept[-1][1] == y:
            kept.pop()
        kept.append((x, y))
    return tuple(kept)
