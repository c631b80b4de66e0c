"""Genotypes as SVG: one self-contained file, the same bytes for the same genotype."""

from __future__ import annotations

from dataclasses import dataclass

from softcell.app.report._cells_layout import Drawing, Edge, Node, Point, lay_out
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
from softcell.arch import Cell, Genotype

SANS_CHAR = 7.2  # a generous advance of 12 px sans-serif text
LEGEND_CHAR = 6.4
PAGE_WIDTH = 1120.0  # cells are drawn side by side while they fit
CELL_GAP = 40.0
HEAD = 52.0  # heading and subtitle of a cell
CORNER = 8.0


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
