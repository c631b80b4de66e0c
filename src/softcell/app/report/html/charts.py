"""Charts for the page: small enough for a phone as they are, and readable without colour (dashes, marks, labels)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from softcell.app.report.curves import LARGEST, LOOKS, ticks
from softcell.app.report.html.elements import Html, big, data, el, percent
from softcell.app.report.runs import number
from softcell.app.report.strings import escape
from softcell.app.report.theme import Family, mark, num, text

WIDTH, HEIGHT = 400.0, 236.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 12.0, 38.0
MOST_POINTS = 400
MARKS = 6  # marks along a line

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """A named line of (epoch, value) points."""

    name: str
    points: Sequence[Point]


def series(rows: Sequence[Mapping[str, object]], names: Mapping[str, str]) -> list[Series]:
    """Lines of the metrics `names` (key: name to show) over epochs counted from 1, without those that have no value."""
    result = []
    for key, name in names.items():
        points = [
            (epoch + 1, value)
            for row in rows
            if (epoch := number(row.get("epoch"))) is not None
            and (value := number(row.get(key))) is not None
            and abs(value) <= LARGEST
        ]
        if points:
            step = -(-len(points) // MOST_POINTS)
            kept = points[::step] if points[-1] in points[::step] else [*points[::step], points[-1]]
            result.append(Series(name, kept))
    return result


@dataclass(frozen=True, slots=True)
class Axes:
    """Where numbers lie in the picture."""

    low: Point
    high: Point

    def place(self, x: float, y: float) -> Point:
        across, up = (
            (value - low) / (high - low) if high > low else 0.5
            for value, low, high in zip((x, y), self.low, self.high, strict=True)
        )
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def line_chart(
    title: str, lines: Sequence[Series], *, shares: bool = False, limit: tuple[float, str] | None = None
) -> Html:
    """A card with a line chart, its legend and a readout that follows the pointer.

    shares: values are 0..1 and shown as percent. limit: a height to be marked by a thin rule, and what it means.
    """
    points = [point for line in lines for point in line.points]
    xs, ys = [x for x, _ in points], [y for _, y in points] + ([limit[0]] if limit else [])
    rows = ticks(min(ys), max(ys), wanted=4)
    axes = Axes((min(xs), rows[0][0]), (max(xs), rows[-1][0]))
    body = _frame(axes, rows, ticks(min(xs), max(xs), whole=True, wanted=5), "epoch", shares)
    if limit is not None:
        y = axes.place(xs[0], limit[0])[1]
        body.append(f'<path class="sc-axis limit" d="M{num(LEFT)} {num(y)}H{num(WIDTH - RIGHT)}"/>')
        body.append(text(WIDTH - RIGHT, y - 4, limit[1], "sc-quiet sc-num", "end"))
    for i, line in enumerate(lines):
        body += _line([axes.place(*point) for point in line.points], LOOKS[i % len(LOOKS)], i)
    body.append(f'<path class="cursor" d="M0 {num(TOP)}V{num(HEIGHT - BOTTOM)}"/>')
    described = "; ".join(
        f"{line.name} from {_show(line.points[0][1], shares)} to {_show(line.points[-1][1], shares)}" for line in lines
    )
    legend = [
        el(
            "li",
            _sample(LOOKS[i % len(LOOKS)]),
            el("span", line.name),
            el("b", _show(line.points[-1][1], shares)),
        )
        for i, line in enumerate(lines)
    ]
    spread = {"x": [num(axes.place(x, 0)[0]) for x in sorted(set(xs))], "e": [num(x) for x in sorted(set(xs))]}
    values = [{num(x): _show(y, shares) for x, y in line.points} for line in lines]
    return el(
        "figure",
        el("figcaption", title),
        _picture(body, f"{title}: {described}", "sc chart"),
        el("p", "at the end", class_="readout", aria_live="polite"),
        el("ul", legend, class_="legend"),
        class_="card plot",
        tabindex=0,
        data_spread=data(spread),
        data_values=data(values),
    )


@dataclass(frozen=True, slots=True)
class Cloud:
    """A group of (cost, accuracy) points; mean and std are drawn for two or more."""

    name: str
    points: Sequence[Point]
    spread: tuple[Point, Point] | None  # mean and std, each (cost, accuracy)
    labels: Sequence[str]


def scatter(title: str, x_label: str, clouds: Sequence[Cloud]) -> Html:
    """A card with accuracy against cost; every point names its run to those who point at it."""
    points = [point for cloud in clouds for point in cloud.points]
    for cloud in clouds:
        if cloud.spread is not None:
            (mx, my), (sx, sy) = cloud.spread
            points += [(mx - sx, my - sy), (mx + sx, my + sy)]
    cols = ticks(min(x for x, _ in points), max(x for x, _ in points), wanted=4)
    rows = ticks(min(y for _, y in points), max(y for _, y in points), wanted=4)
    axes = Axes((cols[0][0], rows[0][0]), (cols[-1][0], rows[-1][0]))
    body = _frame(axes, rows, [(value, big(value)) for value, _ in cols], x_label, True)
    legend = []
    for i, cloud in enumerate(clouds):
        look = LOOKS[i % len(LOOKS)]
        if cloud.spread is not None:
            (mx, my), (sx, sy) = cloud.spread
            (left, low), (right, high) = axes.place(mx - sx, my - sy), axes.place(mx + sx, my + sy)
            x, y = axes.place(mx, my)
            cross = f"M{num(left)} {num(y)}H{num(right)}M{num(x)} {num(low)}V{num(high)}"
            body.append(f'<path class="sc-edge sc-l-{look} bar" d="{cross}"/>')
        for point, label in zip(cloud.points, cloud.labels, strict=True):
            x, y = axes.place(*point)
            said = escape(f"{label}: {percent(point[1])}, {big(point[0])}")
            body.append(f"<g><title>{said}</title>{mark(look, x, y)}</g>")
        n = len(cloud.points)
        mean = sum(y for _, y in cloud.points) / n
        std = f" ± {100 * cloud.spread[1][1]:.1f}" if cloud.spread else ""
        shown = f"{100 * mean:.1f}{std} %" + (f", n = {n}" if n > 1 else "")
        legend.append(el("li", _sample(look), el("span", cloud.name), el("b", shown)))
    return el(
        "figure",
        el("figcaption", title),
        _picture(body, f"{title}: " + "; ".join(cloud.name for cloud in clouds), "sc chart"),
        el("ul", legend, class_="legend"),
        class_="card",
    )


def _frame(
    axes: Axes, rows: Sequence[tuple[float, str]], cols: Sequence[tuple[float, str]], x_label: str, shares: bool
) -> list[str]:
    body = []
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value, label in rows:
        y = axes.place(axes.low[0], value)[1]
        body.append(f'<path class="sc-grid" d="M{num(LEFT)} {num(y)}H{num(right)}"/>')
        shown = f"{100 * value:.3g} %" if shares else label if len(label) < 7 else big(value)
        body.append(text(LEFT - 6, y + 4, shown, "sc-num sc-quiet", "end"))
    for value, label in cols:
        if axes.low[0] <= value <= axes.high[0]:
            x = axes.place(value, axes.low[1])[0]
            body.append(f'<path class="sc-axis" d="M{num(x)} {num(bottom)}v4"/>')
            body.append(text(x, bottom + 17, label, "sc-num sc-quiet", "middle"))
    body.append(f'<path class="sc-axis" d="M{num(LEFT)} {num(bottom)}H{num(right)}"/>')
    body.append(text((LEFT + right) / 2, HEIGHT - 5, x_label, "sc-quiet", "middle"))
    return body


def _line(points: list[Point], look: Family, offset: int) -> list[str]:
    lines = []
    if len(points) > 1:
        path = "M" + "L".join(f"{num(x)} {num(y)}" for x, y in points)
        lines.append(f'<path class="sc-edge sc-l-{look}" d="{path}"/>')
    step = max(1, len(points) // MARKS)
    # Each line begins its marks elsewhere, so that lines on top of each other show all their marks.
    chosen = points[min(offset * step // 3, len(points) - 1) :: step]
    return lines + [mark(look, x, y) for x, y in chosen]


def _sample(look: Family) -> Html:
    """Line and mark of a series, for its legend."""
    return Html(
        f'<svg class="sc sample" viewBox="0 0 38 12" width="38" height="12" aria-hidden="true"><path class="sc-edge '
        f'sc-l-{look}" d="M2 6h34"/>{mark(look, 19, 6)}</svg>'
    )


def _picture(body: Sequence[str], described: str, style: str) -> Html:
    return Html(
        f'<svg class="{style}" role="img" viewBox="0 0 {num(WIDTH)} {num(HEIGHT)}" '
        f'aria-label="{escape(described)}">{"".join(body)}</svg>'
    )


def _show(value: float, shares: bool) -> str:
    return percent(value) if shares else f"{value:.4g}"
