"""Genotypes as SVG: cells as boxes, labels and lines, in one self-contained file with the same bytes every time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from softcell.app.report.cells_graph import (
    Graph,
    Kind,
    column_gaps,
    distances,
    graph_of,
    input_nodes,
    item_height,
    order_items,
    place_items,
    ports_of,
    split_rows,
)
from softcell.app.report.theme import (
    CHAR,
    FAMILIES,
    MARGIN,
    TITLES,
    Family,
    clean,
    columns,
    escape,
    family,
    mark,
    num,
    page,
    sheet,
    shorten,
    text,
    wrap,
)
from softcell.arch import Cell, Genotype, Pick

Point = tuple[float, float]

SANS_CHAR = 7.2  # a generous advance of 12 px sans-serif text
LEGEND_CHAR = 6.4
PAGE_WIDTH = 1120.0  # cells are drawn side by side while they fit
CELL_GAP = 40.0
HEAD = 52.0  # heading and subtitle of a cell
CORNER = 8.0
LABEL_PADDING = 34.0  # both margins and the family mark
LONGEST = 36  # characters of a label; the full name stays in the tooltip
ROW_GAP = 44.0
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
    ports = ports_of(graph, order)
    return _draw(graph, ports, place_items(graph, apart, order, ports), absent)


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
    gaps = column_gaps(graph, ports, y)
    rows = split_rows(graph, widths, gaps)
    if len(rows) > 1:  # the columns of all rows are aligned
        widths = [max(widths[column % 2 :: 2]) for column in range(len(widths))]
        gaps = [max(gaps)] * len(gaps)
        rows = split_rows(graph, widths, gaps)
    lead = 2 * TURN if len(rows) > 1 else 0.0
    starts, shifts, row_of = [0.0] * len(widths), [0.0] * len(widths), [0] * len(widths)
    ends: list[Point] = []  # right and lower border of every row
    top = 0.0
    for number, (first, stop) in enumerate(rows):
        inside = [
            (i, c) for i in range(total) for c in range(first, stop) if graph.spans[i][0] <= c <= graph.spans[i][1]
        ]
        low = min(y[item] - item_height(graph, item, column) / 2 for item, column in inside)
        high = max(y[item] + item_height(graph, item, column) / 2 for item, column in inside)
        x = lead
        for column in range(first, stop):
            starts[column], shifts[column], row_of[column] = x, top - low, number
            x += widths[column] + gaps[column]
        ends.append((x - gaps[stop - 1], top + high - low))
        top += high - low + ROW_GAP
    boxes = {
        item: Box(
            starts[column] + (widths[column] - sizes[item]) / 2,
            y[item] + shifts[column] - item_height(graph, item, column) / 2,
            sizes[item],
            item_height(graph, item, column),
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


@dataclass(frozen=True, slots=True)
class _Panel:
    """One cell with its heading and notes, measured."""

    name: str
    subtitle: str
    drawing: Drawing
    notes: tuple[str, ...]
    width: float
    height: float


def to_svg(genotype: Genotype, title: str | None = None, *, titled: bool = True) -> str:
    """A picture of all cells of a genotype, for light and dark pages; without `titled`, the title is metadata only.

    Example:
        >>> from softcell.app.report import to_svg
        >>> from softcell.arch import notation
        >>> genotype = notation.parse("|nor_conv_3x3~0|+|none~0|skip_connect~1|")
        >>> picture = to_svg(genotype, title="A cell")
        >>> picture.startswith("<svg"), "A cell" in picture
        (True, True)
    """
    heading = shorten(title if title is not None else f"{genotype.space} architecture", 110)
    panels = [_panel(name, cell) for name, cell in genotype.cells.items()]
    rows: list[list[_Panel]] = []
    for panel in panels:
        if rows and sum(p.width + CELL_GAP for p in rows[-1]) + panel.width <= PAGE_WIDTH:
            rows[-1].append(panel)
        else:
            rows.append([panel])
    inner = max(
        [sum(p.width for p in row) + CELL_GAP * (len(row) - 1) for row in rows] + [columns(heading) * 10.5, 320.0]
    )
    used = {family(pick.op) for cell in genotype.cells.values() for pick in cell.picks} - {"none"}
    body = [text(MARGIN, MARGIN + 16, heading, "sc-title")] if titled else []
    y = MARGIN + 44 if titled else MARGIN
    for row in rows:
        x = MARGIN
        for panel in row:
            body += _draw_panel(panel, x, y)
            x += panel.width + CELL_GAP
        y += max(panel.height for panel in row) + 28
    legend, y = _legend([name for name in FAMILIES if name in used], inner, y)
    description = " ".join(f"{name} cell: {describe(cell)}" for name, cell in genotype.cells.items())
    return page(inner + 2 * MARGIN, y + MARGIN - 8, heading, description, sheet(), body + legend)


def describe(cell: Cell) -> str:
    """A cell in words, for screen readers."""
    parts = []
    for target in cell.targets:
        terms = " + ".join(f"{pick.op}({pick.source})" for pick in cell.incoming(target))
        parts.append(f"node {target} = {terms};")
    return " ".join([*parts, f"output = {_output(cell)}."])


def _output(cell: Cell) -> str:
    nodes = ", ".join(str(number) for number in cell.output)
    return f"node {nodes}" if len(cell.output) == 1 else f"concat({nodes})"


def _panel(name: str, cell: Cell) -> _Panel:
    drawing = lay_out(cell)
    drawn = len(cell.picks) - len(drawing.absent)
    subtitle = f"{drawn} operation{'' if drawn == 1 else 's'}, output = {_output(cell)}"
    subtitle = shorten(subtitle, 72)
    width = max(drawing.width, columns(subtitle) * SANS_CHAR, 220.0)
    title = shorten(name, int(width / 9.5))
    listed = [f"{pick.source} → {pick.target}" for pick in drawing.absent]
    if listed:
        names = sorted({clean(pick.op) for pick in drawing.absent})
        listed[0] = f"not drawn ({', '.join(names)}): {listed[0]}"
    notes = tuple(wrap(listed, int(width / SANS_CHAR)))
    height = HEAD + drawing.height + (12 + 18 * len(notes) if notes else 0)
    return _Panel(title, subtitle, drawing, notes, width, height)


def _draw_panel(panel: _Panel, x: float, y: float) -> list[str]:
    lines = [text(x, y + 12, panel.name, "sc-head"), text(x, y + 31, panel.subtitle, "sc-quiet")]
    drawing = panel.drawing
    lines.append(f'<g transform="translate({num(x)} {num(y + HEAD)})">')
    for edge in drawing.edges:  # lines first: labels and boxes are drawn over them
        lines += _draw_line(edge)
    for edge in drawing.edges:
        lines += _draw_label(edge, drawing)
    for node in drawing.nodes:
        lines += _draw_node(node)
    lines.append("</g>")
    for i, note in enumerate(panel.notes):
        lines.append(text(x, y + HEAD + drawing.height + 24 + 18 * i, note, "sc-quiet"))
    return lines


def _draw_line(edge: Edge) -> list[str]:
    if edge.op is None:
        line, tip = "sc-edge sc-hand", "sc-tip"
    else:
        name = family(edge.op)
        line, tip = f"sc-edge sc-l-{name}", f"sc-f-{name}"
    points = edge.points
    x, y = points[-1]
    # The line ends inside the arrowhead, so that its round cap does not show.
    shaft = (*points[:-1], (x - 6, y))
    head = f"M{num(x - 1)} {num(y)}l-8 -4v8z"
    return [f'<path class="{line}" d="{path(shaft)}"/>', f'<path class="{tip}" d="{head}"/>']


def _draw_label(edge: Edge, drawing: Drawing) -> list[str]:
    if edge.op is None or edge.label is None:
        return []
    box, name = edge.label, family(edge.op)
    ends = f"{drawing.nodes[edge.source].label} → {drawing.nodes[edge.target].label}"
    middle = box.centre[1]
    return [
        f"<g><title>{escape(f'{edge.op}: {ends}')}</title>"
        f'<rect class="sc-pill sc-p-{name}" x="{num(box.x)}" y="{num(box.y)}" width="{num(box.width)}" '
        f'height="{num(box.height)}" rx="{num(box.height / 2)}"/>'
        + mark(name, box.x + 14, middle)
        + text(box.x + 24, middle + 4, edge.text, "sc-op", width=columns(edge.text) * CHAR)
        + "</g>"
    ]


def _draw_node(node: Node) -> list[str]:
    box = node.box
    x, y = box.centre
    ink = " sc-on-output" if node.kind == "output" else ""
    if node.label.startswith("c_{"):
        sub = node.label[3:-1].replace("-", "−")
        label = (
            f'<text class="sc-var{ink}" x="{num(x)}" y="{num(y + 3)}" text-anchor="middle">c'
            f'<tspan class="sc-sub" dx="1" dy="4">{sub}</tspan></text>'
        )
    else:
        label = text(x, y + 4.5, node.label, f"sc-node{ink}", "middle")
    return [
        f'<rect class="sc-box sc-{node.kind}" x="{num(box.x)}" y="{num(box.y)}" width="{num(box.width)}" '
        f'height="{num(box.height)}" rx="7"/>',
        label,
    ]


def path(points: tuple[Point, ...]) -> str:
    """Path data: straight where two points share a coordinate, else an S-curve; right angles are rounded."""
    commands = [f"M{num(points[0][0])} {num(points[0][1])}"]
    for i, (x, y) in enumerate(points[1:], start=1):
        before_x, before_y = points[i - 1]
        if x != before_x and y != before_y:
            middle = num((x + before_x) / 2)
            commands.append(f"C{middle} {num(before_y)} {middle} {num(y)} {num(x)} {num(y)}")
            continue
        after = points[i + 1] if i + 1 < len(points) else None
        if after is not None and _turns(points[i - 1], (x, y), after):
            short_x, short_y = _towards((x, y), (before_x, before_y))
            long_x, long_y = _towards((x, y), after)
            commands.append(f"L{num(short_x)} {num(short_y)}Q{num(x)} {num(y)} {num(long_x)} {num(long_y)}")
        else:
            commands.append(f"L{num(x)} {num(y)}")
    return "".join(commands)


def _turns(before: Point, here: Point, after: Point) -> bool:
    """Whether the way makes a right angle."""
    down_then_across = before[0] == here[0] != after[0] and here[1] == after[1]
    across_then_down = before[1] == here[1] != after[1] and here[0] == after[0]
    return down_then_across or across_then_down


def _towards(start: Point, end: Point) -> Point:
    """A corner's radius from `start` on the way to `end`, at most half of it."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = abs(dx) + abs(dy)
    share = min(CORNER, length / 2) / length if length else 0.0
    return start[0] + dx * share, start[1] + dy * share


def _legend(names: list[Family], width: float, y: float) -> tuple[list[str], float]:
    """Line, mark and name of every family in the picture."""
    lines, x = [], MARGIN
    for name in names:
        room = 58 + columns(TITLES[name]) * LEGEND_CHAR
        if x > MARGIN and x + room > MARGIN + width:
            x, y = MARGIN, y + 22
        lines.append(f'<path class="sc-edge sc-l-{name}" d="M{num(x)} {num(y)}h34"/>')
        lines.append(mark(name, x + 46, y))
        lines.append(text(x + 58, y + 4, TITLES[name], "sc-quiet"))
        x += room + 16
    return lines, y + 14 if names else y
