"""Charts as SVG files and as cards of the HTML report: lines over epochs, and accuracy against cost.

Both are drawn by the same axes, frame, lines and marks. Series differ by line and mark, not only by colour, and a
picture fits on a phone without zooming.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from softcell.app.report.theme import (
    CHAR,
    MARGIN,
    Family,
    Html,
    big,
    data,
    el,
    escape,
    mark,
    num,
    page,
    percent,
    sheet,
    shorten,
    text,
)
from softcell.app.report.theme import columns as cells
from softcell.errors import UserError

LOOKS: tuple[Family, ...] = ("conv", "dilated", "pool", "attention", "other", "skip")
"""Colour, line and mark of a series."""
FILE_SIZE = (480.0, 240.0)  # the plot of an SVG file
CARD_SIZE = (400.0, 236.0)  # the whole picture of a card
DIGITS = 6.8  # advance of 11 px monospace digits
MAX_POINTS = 400
MARKS = 6  # marks along a line
LARGEST = 1e300  # an axis that spans more would overflow

Point = tuple[float, float]
Tick = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Series:
    """A named line of (epoch, value) points; None is a gap. band: (epoch, low, high), drawn behind the line."""

    name: str
    points: Sequence[Point | None]
    band: Sequence[tuple[float, float, float]] = ()

    @property
    def known(self) -> list[Point]:
        return [point for point in self.points if point is not None]


@dataclass(frozen=True, slots=True)
class Cloud:
    """A group of (cost, accuracy) points with a label each; `spread`: mean and std, each (cost, accuracy)."""

    name: str
    points: Sequence[Point]
    spread: tuple[Point, Point] | None
    labels: Sequence[str]


def series(rows: Sequence[Mapping[str, object]], names: Mapping[str, str], first: int = 1) -> list[Series]:
    """Lines of the metrics `names` (key: name to show) over epochs, counted from `first`.

    A row without an epoch counts by its position. A metric that was not measured in a row is skipped; one that is not
    a finite number leaves a gap.
    """
    found = []
    for key, name in names.items():
        points: list[Point | None] = []
        for position, row in enumerate(rows):
            if row.get(key) is not None:
                epoch, value = _number(row.get("epoch", position)), _number(row[key])
                x = (position if epoch is None else epoch) + first
                points.append(None if value is None else (x, value))
        step = max(1, -(-len(points) // MAX_POINTS))
        found.append(Series(name, points[::step] + ([points[-1]] if step > 1 and (len(points) - 1) % step else [])))
    return found


def curves_svg(
    history: Sequence[Mapping[str, object]],
    keys: Iterable[str],
    title: str,
    bands: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
    x_label: str = "epoch",
) -> str:
    """An SVG file with the metrics `keys` over epochs, each named at the end of its line.

    history: one mapping per epoch, which is drawn at its `epoch`, or else its position. bands: by metric (epoch, low,
    high). x_label: below the axis, where `epoch` holds something else, for example seconds.

    Example:
        >>> from softcell.app.report import curves_svg
        >>> history = [{"epoch": 0, "val_accuracy": 0.5}, {"epoch": 1, "val_accuracy": 0.7}]
        >>> curves_svg(history, keys=["val_accuracy"], title="A search").startswith("<svg")
        True
    """
    names = list(dict.fromkeys(keys))
    if not names:
        raise UserError("a chart needs at least one key, got none")
    found = series(history, {name: name for name in names}, first=0)
    lines = [Series(line.name, line.points, tuple((bands or {}).get(line.name, ()))) for line in found]
    points = _extent(lines)
    heading = shorten(title, 80)
    rows = ticks(min((y for _, y in points), default=0.0), max((y for _, y in points), default=1.0))
    left, top = MARGIN + max(cells(label) for _, label in rows) * DIGITS + 10, MARGIN + 40
    axes = _axes((left, top, left + FILE_SIZE[0], top + FILE_SIZE[1]), [x for x, _ in points], rows)
    x_ticks = ticks(axes.low[0], axes.high[0], whole=True)
    body = [text(MARGIN, MARGIN + 16, heading, "sc-title"), *_frame(axes, rows, x_ticks, x_label)]
    facts, ends = [], []
    for i, line in enumerate(lines):
        body += _line(axes, line, i)
        last = line.known[-1] if line.known else None
        shown = f"{shorten(line.name, 28)} {f'{last[1]:.4g}' if last else '(no data)'}"
        ends.append((axes.place(*last)[1] if last else axes.bottom, shown, i))
        facts.append(f"{line.name}: {line.known[0][1]:.4g} to {last[1]:.4g}." if last else f"{line.name}: no data.")
    if not points:
        middle = (axes.left + axes.right) / 2, (axes.top + axes.bottom) / 2
        body.append(text(*middle, "no data", "sc-quiet", "middle"))
    body += _end_labels(ends, axes)
    height = max(axes.bottom + 38, axes.top + 18 * len(ends))
    longest = max(cells(label) + 2 * (i >= len(LOOKS)) for _, label, i in ends)
    width = max(axes.right + 34 + longest * CHAR, MARGIN + cells(heading) * 10.5) + MARGIN
    return page(width, height + MARGIN - 6, heading, " ".join(facts), sheet(), body)


def line_chart(
    title: str, lines: Sequence[Series], *, shares: bool = False, limit: tuple[float, str] | None = None
) -> Html | None:
    """A card with a line chart, its legend and a readout that follows the pointer; None without any value.

    shares: values are 0..1 and shown as percent. limit: a height to be marked by a thin rule, and what it means.
    """
    lines = [line for line in lines if line.known]
    points = _extent(lines)
    if not points:
        return None
    ys = [y for _, y in points] + ([limit[0]] if limit else [])
    counts = not shares and all(float(y).is_integer() for y in ys)
    rows = _labelled(ticks(min(ys), max(ys), whole=counts, wanted=4), shares)
    axes = _axes(_card_area(rows), [x for x, _ in points], rows)
    body = _frame(axes, rows, ticks(axes.low[0], axes.high[0], whole=True, wanted=5), "epoch")
    if limit is not None:
        y = axes.place(points[0][0], limit[0])[1]
        body.append(f'<path class="sc-axis limit" d="M{num(axes.left)} {num(y)}H{num(axes.right)}"/>')
        body.append(text(axes.right, y - 4, limit[1], "sc-quiet sc-num", "end"))
    for i, line in enumerate(lines):
        body += _line(axes, line, i)
    body.append(f'<path class="cursor" d="M0 {num(axes.top)}V{num(axes.bottom)}"/>')

    def show(value: float) -> str:
        return percent(value) if shares else big(value) if abs(value) >= 1e4 else f"{value:.4g}"

    described = "; ".join(f"{one.name} from {show(one.known[0][1])} to {show(one.known[-1][1])}" for one in lines)
    legend = [
        el("li", _sample(i), el("span", line.name), el("b", show(line.known[-1][1]))) for i, line in enumerate(lines)
    ]
    epochs = sorted({x for line in lines for x, _ in line.known})
    spread = {"x": [num(axes.place(x, axes.low[1])[0]) for x in epochs], "e": [num(x) for x in epochs]}
    return el(
        "figure",
        el("figcaption", title),
        _picture(body, f"{title}: {described}"),
        el("p", "at the end", class_="readout", aria_live="polite"),
        el("ul", legend, class_="legend"),
        class_="card plot",
        tabindex=0,
        data_spread=data(spread),
        data_values=data([{num(x): show(y) for x, y in line.known} for line in lines]),
    )


def scatter(title: str, x_label: str, clouds: Sequence[Cloud]) -> Html:
    """A card with accuracy against cost; every point shows its run in a tooltip."""
    points = [point for cloud in clouds for point in cloud.points]
    for cloud in clouds:
        if cloud.spread is not None:
            (mx, my), (sx, sy) = cloud.spread
            points += [(mx - sx, my - sy), (mx + sx, my + sy)]
    costs = ticks(min(x for x, _ in points), max(x for x, _ in points), wanted=4)
    rows = _labelled(ticks(min(y for _, y in points), max(y for _, y in points), wanted=4), shares=True)
    axes = _axes(_card_area(rows), [value for value, _ in costs], rows)
    body = _frame(axes, rows, _short(costs, least=1e3), x_label)
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
            tip = escape(f"{label}: {percent(point[1])}, {big(point[0])}")
            body.append(f"<g><title>{tip}</title>{mark(look, *axes.place(*point))}</g>")
        n = len(cloud.points)
        std = f" ± {100 * cloud.spread[1][1]:.1f}" if cloud.spread else ""
        mean = f"{100 * sum(y for _, y in cloud.points) / n:.1f}{std} %" + (f", n = {n}" if n > 1 else "")
        legend.append(el("li", _sample(i), el("span", cloud.name), el("b", mean)))
    return el(
        "figure",
        el("figcaption", title),
        _picture(body, f"{title}: " + "; ".join(cloud.name for cloud in clouds)),
        el("ul", legend, class_="legend"),
        class_="card",
    )


def front_svg(points: Sequence[tuple[float, float, str]], title: str, x_label: str, y_label: str) -> str:
    """An SVG file of accuracy, a share, against cost; points: (cost, accuracy, label), drawn in the order of cost."""
    ordered = sorted(points, key=lambda point: point[:2])  # stable: equal points keep the order of their labels
    heading = shorten(title, 80)
    rows = _labelled(ticks(min(y for _, y, _ in ordered), max(y for _, y, _ in ordered)), shares=True)
    costs = ticks(min(x for x, _, _ in ordered), max(x for x, _, _ in ordered))
    left, top = MARGIN + max(cells(label) for _, label in rows) * DIGITS + 10, MARGIN + 60
    axes = _axes((left, top, left + FILE_SIZE[0], top + FILE_SIZE[1]), [value for value, _ in costs], rows)
    body = [text(MARGIN, MARGIN + 16, heading, "sc-title"), text(MARGIN, MARGIN + 38, y_label, "sc-quiet")]
    body += _frame(axes, rows, _short(costs, least=1e3), x_label)
    body += _line(axes, Series(y_label, [(x, y) for x, y, _ in ordered]), 0)
    facts, widest = [], 0.0
    labels: dict[tuple[float, float], list[str]] = {}
    for x, y, label in ordered:
        labels.setdefault((x, y), []).append(label)  # several budgets may lead to the same network
    for (x, y), same in labels.items():
        place = axes.place(x, y)
        fact = f"{', '.join(same)}: {percent(y)}, {big(x)} {x_label}"
        body.append(f"<g><title>{escape(fact)}</title>{mark(LOOKS[0], *place)}</g>")
        label = shorten(", ".join(shorten(one, 12) for one in same), 30)
        widest = max(widest, cells(label) * DIGITS)
        body.append(text(place[0], place[1] - 8, label, "sc-quiet sc-num", "middle"))
        facts.append(f"{fact}.")
    width = max(axes.right + max(30, widest / 2), MARGIN + cells(heading) * 10.5) + MARGIN
    return page(width, axes.bottom + 38 + MARGIN - 6, heading, " ".join(facts), sheet(), body)


def ticks(low: float, high: float, whole: bool = False, wanted: int = 6) -> list[Tick]:
    """Round numbers from at most `low` to at least `high`, with their labels."""
    if high <= low:
        spread = abs(low) * 0.1 or 1.0
        low, high = (low, low + 1) if whole else (low - spread, high + spread)
    raw = high / wanted - low / wanted  # not (high - low) / wanted, which may overflow
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 0.0
    if power == 0.0 or not math.isfinite(power):
        return [(low, f"{low:.4g}"), (high, f"{high:.4g}")]
    # The tolerances here keep rounding from choosing the next larger step or adding an empty interval.
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if last - first > 3 * wanted or first * step + step == first * step:  # a spread below the precision of floats
        return [(low, f"{low:.4g}"), (high, f"{high:.4g}")]
    decimals = max(0, -math.floor(math.log10(step)))
    largest = max(abs(first), abs(last), 1) * step
    plain = decimals <= 4 and largest < 1e6
    digits = max(3, math.floor(math.log10(largest)) - math.floor(math.log10(step)) + 1)  # those that differ
    return [
        (k * step, f"{k * step:.{decimals}f}" if plain else f"{k * step:.{digits}g}") for k in range(first, last + 1)
    ]


def _number(value: object) -> float | None:
    """The value where it is a number that can be drawn."""
    return float(value) if isinstance(value, int | float) and abs(value) <= LARGEST else None


def _extent(lines: Sequence[Series]) -> list[Point]:
    """All points that must be inside the axes."""
    return [point for line in lines for point in line.known] + [
        (x, y) for line in lines for x, low, high in line.band for y in (low, high)
    ]


@dataclass(frozen=True, slots=True)
class Axes:
    """The rectangle of a plot, and the values at its lower left (`low`) and upper right (`high`)."""

    left: float
    top: float
    right: float
    bottom: float
    low: Point
    high: Point

    def place(self, x: float, y: float) -> Point:
        across, up = (
            (value - low) / (high - low) if high > low else 0.5
            for value, low, high in zip((x, y), self.low, self.high, strict=True)
        )
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)


def _axes(area: tuple[float, float, float, float], xs: Sequence[float], rows: Sequence[Tick]) -> Axes:
    """Axes that span the values `xs` from side to side and the ticks `rows` from bottom to top."""
    return Axes(*area, (min(xs, default=0.0), rows[0][0]), (max(xs, default=1.0), rows[-1][0]))


def _card_area(rows: Sequence[Tick]) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the plot in a card, with room for the labels of its rows."""
    width, height = CARD_SIZE
    return max(cells(label) for _, label in rows) * DIGITS + 8, 12.0, width - 12, height - 38


def _labelled(rows: Sequence[Tick], shares: bool) -> list[Tick]:
    """Labels for a card: shares as percent with equally many decimals, large values in few characters."""
    if not shares:
        return _short(rows)
    decimals = max(len(f"{100 * v:.3g}".partition(".")[2]) for v, _ in rows)
    return [(v, f"{100 * v:.{decimals}f} %") for v, _ in rows]


def _short(rows: Sequence[Tick], least: float = 1e4) -> list[Tick]:
    """Values of at least `least` in few characters, but with enough digits to read the distance of two ticks."""
    large = [v for v, _ in rows if abs(v) >= least]
    error = (rows[-1][0] - rows[0][0]) / (100 * len(rows))
    digits = next((d for d in range(3, 17) if all(abs(float(f"{v:.{d}g}") - v) <= error for v in large)), 17)
    return [(v, big(v, digits) if abs(v) >= least else label) for v, label in rows]


def _frame(axes: Axes, rows: Sequence[Tick], x_ticks: Sequence[Tick], x_label: str) -> list[str]:
    """Grid and axis with their labels. A label at the right border ends there, since it would be cut off in a card."""
    body = []
    for value, label in rows:
        y = axes.place(axes.low[0], value)[1]
        body.append(f'<path class="sc-grid" d="M{num(axes.left)} {num(y)}H{num(axes.right)}"/>')
        body.append(text(axes.left - 6, y + 4, label, "sc-num sc-quiet", "end"))
    for value, label in x_ticks:
        if axes.low[0] <= value <= axes.high[0]:
            x = axes.place(value, axes.low[1])[0]
            body.append(f'<path class="sc-axis" d="M{num(x)} {num(axes.bottom)}v4"/>')
            half = cells(label) * DIGITS / 2
            body.append(
                text(axes.right + 11, axes.bottom + 18, label, "sc-num sc-quiet", "end")
                if x + half > axes.right + 11
                else text(x, axes.bottom + 18, label, "sc-num sc-quiet", "middle")
            )
    body.append(f'<path class="sc-axis" d="M{num(axes.left)} {num(axes.bottom)}H{num(axes.right)}"/>')
    body.append(text((axes.left + axes.right) / 2, axes.bottom + 34, x_label, "sc-quiet", "middle"))
    return body


def _line(axes: Axes, line: Series, number: int) -> list[str]:
    """Band, line and some marks of a series; a line that repeats the look of an earlier one is thinner.

    A point between two gaps has its own mark. Each series begins its marks elsewhere, so that lines on top of each
    other show all their marks.
    """
    look, thin = LOOKS[number % len(LOOKS)], " sc-thin" if number >= len(LOOKS) else ""
    body = []
    if line.band:
        low, high = ([axes.place(x, ends[side]) for x, *ends in line.band] for side in (0, 1))
        around = "L".join(f"{num(x)} {num(y)}" for x, y in [*low, *reversed(high)])
        body.append(f'<path class="sc-f-{look} sc-p-{look}" fill-opacity="0.15" stroke-opacity="0.15" d="M{around}Z"/>')
    pieces: list[list[Point]] = [[]]
    for point in line.points:
        if point is None:
            pieces.append([])
        else:
            pieces[-1].append(axes.place(*point))
    for piece in pieces:
        if len(piece) > 1:
            path = "M" + "L".join(f"{num(x)} {num(y)}" for x, y in piece)
            body.append(f'<path class="sc-edge sc-l-{look}{thin}" d="{path}"/>')
    points = [point for piece in pieces for point in piece]
    step = max(1, len(points) // MARKS)
    chosen = points[number * step // 3 % step :: step]
    chosen += [piece[0] for piece in pieces if len(piece) == 1 and piece[0] not in chosen]
    return body + [mark(look, x, y) for x, y in chosen]


def _end_labels(ends: list[tuple[float, str, int]], axes: Axes) -> list[str]:
    """Names at the ends of their lines, pushed apart so that none covers another: (height, label, series)."""
    ordered = sorted(ends, key=lambda end: (end[0], end[2]))
    heights: list[float] = []
    for wanted, _, _ in ordered:
        heights.append(max(wanted, heights[-1] + 18 if heights else axes.top))
    # Labels that were pushed below the plot move back up as far as the others allow.
    limit = max(axes.bottom, axes.top + 18 * (len(ends) - 1))
    for k in reversed(range(len(heights))):
        heights[k] = min(heights[k], limit)
        limit = heights[k] - 18
    body, x = [], axes.right + 12
    for (_, label, number), y in zip(ordered, heights, strict=True):
        look, again = LOOKS[number % len(LOOKS)], number >= len(LOOKS)
        body += [mark(look, x + 5, y), *([mark(look, x + 18, y)] if again else [])]
        body.append(text(x + (29 if again else 16), y + 4, label, "sc-op", width=cells(label) * CHAR))
    return body


def _sample(number: int) -> Html:
    """Line and mark of a series, for its legend; two marks for one that repeats the look of an earlier one."""
    look = LOOKS[number % len(LOOKS)]
    places = (19,) if number < len(LOOKS) else (12, 26)
    return Html(
        f'<svg class="sc sample" viewBox="0 0 38 12" width="38" height="12" aria-hidden="true"><path class="sc-edge '
        f'sc-l-{look}" d="M2 6h34"/>{"".join(mark(look, x, 6) for x in places)}</svg>'
    )


def _picture(body: Sequence[str], described: str) -> Html:
    width, height = CARD_SIZE
    return Html(
        f'<svg class="sc chart" role="img" viewBox="0 0 {num(width)} {num(height)}" '
        f'aria-label="{escape(described)}">{"".join(body)}</svg>'
    )
