"""Small charts as SVG: metrics over epochs, and architecture weights as a heat map."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from softcell.app.report.strings import columns as cells
from softcell.app.report.strings import shorten
from softcell.app.report.theme import CHAR, MARGIN, Family, mark, num, page, sheet, text
from softcell.errors import UserError

LOOKS: tuple[Family, ...] = (
    "conv",
    "dilated",
    "pool",
    "attention",
    "other",
    "skip",
)  # colour, line and mark of a series
PLOT_WIDTH, PLOT_HEIGHT = 480.0, 240.0
DIGITS = 6.8  # advance of 11 px monospace digits
SHADES = 10
LARGEST = 1e300
CELL_WIDTH, CELL_HEIGHT = 46.0, 24.0

# From the page's own tone to a deep one: the order survives without colour.
LIGHT_RAMP = ((236, 242, 249), (8, 69, 130))
DARK_RAMP = ((32, 41, 54), (140, 198, 255))


def curves_svg(
    history: Sequence[Mapping[str, object]],
    keys: Iterable[str],
    title: str,
    bands: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
) -> str:
    """A line chart of the metrics `keys` over epochs.

    history: one mapping per epoch, placed by its `epoch` where it has one and by its position otherwise. A metric that
    was not measured in an epoch is passed over; one that is not finite leaves a gap in its line. bands: by metric
    (epoch, low, high), drawn behind its line.
    """
    names = list(dict.fromkeys(keys))
    if not names:
        raise UserError("a chart needs at least one key, got none")
    series = {name: _series(history, name) for name in names}
    finite = [point for line in series.values() for point in line if point is not None]
    shaded = {name: list(own) for name, own in (bands or {}).items() if name in series}
    finite += [(x, y) for own in shaded.values() for x, *ends_of in own for y in ends_of]
    heading = shorten(title, 80)
    xs = ticks(min((x for x, _ in finite), default=0.0), max((x for x, _ in finite), default=1.0), whole=True)
    ys = ticks(min((y for _, y in finite), default=0.0), max((y for _, y in finite), default=1.0))
    left = MARGIN + max(cells(label) for _, label in ys) * DIGITS + 10
    top = MARGIN + 40
    right, bottom = left + PLOT_WIDTH, top + PLOT_HEIGHT
    low_x = min([x for x, _ in finite] + [xs[0][0]]) if len(finite) < 2 else min(x for x, _ in finite)
    high_x = max([x for x, _ in finite] + [xs[-1][0]]) if len(finite) < 2 else max(x for x, _ in finite)
    low_y, high_y = ys[0][0], ys[-1][0]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        return left + across * PLOT_WIDTH, bottom - (y - low_y) / (high_y - low_y) * PLOT_HEIGHT

    body = [text(MARGIN, MARGIN + 16, heading, "sc-title")]
    for value, label in ys:
        y = place(low_x, value)[1]
        body.append(f'<path class="sc-grid" d="M{num(left)} {num(y)}H{num(right)}"/>')
        body.append(text(left - 8, y + 4, label, "sc-num sc-quiet", "end"))
    for value, label in xs:
        if low_x <= value <= high_x:
            x = place(value, low_y)[0]
            body.append(f'<path class="sc-axis" d="M{num(x)} {num(bottom)}v4"/>')
            body.append(text(x, bottom + 18, label, "sc-num sc-quiet", "middle"))
    body.append(f'<path class="sc-axis" d="M{num(left)} {num(bottom)}H{num(right)}"/>')
    body.append(text((left + right) / 2, bottom + 38, "epoch", "sc-quiet", "middle"))
    ends: list[tuple[float, str, Family, bool]] = []
    facts = []
    for i, (name, line) in enumerate(series.items()):
        look = LOOKS[i % len(LOOKS)]
        known = [point for point in line if point is not None]
        again = i >= len(LOOKS)
        if own := shaded.get(name):
            body.append(_band([place(x, low) for x, low, _ in own], [place(x, high) for x, _, high in own], look))
        body += _line([place(*point) if point is not None else None for point in line], look, marked=again)
        last = place(*known[-1])[1] if known else bottom
        ends.append((last, f"{shorten(name, 28)} {_short(known[-1][1]) if known else '(no data)'}", look, again))
        facts.append(f"{name}: {_short(known[0][1])} to {_short(known[-1][1])}." if known else f"{name}: no data.")
    if not finite:
        body.append(text((left + right) / 2, (top + bottom) / 2, "no data", "sc-quiet", "middle"))
    body += _end_labels(ends, right + 12, top)
    tall = max(bottom + 38, top + 18 * len(ends))
    longest = max(cells(label) + 2 * again for _, label, _, again in ends)
    width = max(right + 34 + longest * CHAR, MARGIN + cells(heading) * 10.5) + MARGIN
    return page(width, tall + MARGIN - 6, heading, " ".join(facts), sheet(), body)


def heat_svg(weights: Sequence[Sequence[float | None]], rows: Sequence[str], columns: Sequence[str], title: str) -> str:
    """A heat map of weights [choices, candidates], each number printed in its cell.

    Rows may be shorter than `columns`, and None stands for padding; both stay blank.
    """
    if len(weights) != len(rows):
        raise UserError(f"a heat map needs one name per row, but got {len(rows)} names for {len(weights)} rows")
    widest = max((len(row) for row in weights), default=0)
    if widest > len(columns):
        raise UserError(f"a heat map needs one name per column, but got {len(columns)} names for {widest} columns")
    heading = shorten(title, 80)
    values = [v for row in weights for v in row if v is not None and math.isfinite(v)]
    low, high = min([0.0, *values]), max(values, default=1.0)
    high = high if high > low else low + 1.0
    names = [shorten(name, 28) for name in columns]
    sides = [shorten(name, 28) for name in rows]
    left = MARGIN + max((cells(name) for name in sides), default=0) * CHAR + 12
    rise = max((cells(name) for name in names), default=0) * CHAR * math.sqrt(0.5)
    top = MARGIN + 44 + rise
    body = [text(MARGIN, MARGIN + 16, heading, "sc-title")]
    for j, name in enumerate(names):
        x, y = left + (j + 0.5) * CELL_WIDTH, top - 8
        body.append(
            f'<g transform="translate({num(x)} {num(y)}) rotate(-45)">'
            + text(0, 4, name, "sc-op", width=cells(name) * CHAR)
            + "</g>"
        )
    for i, (side, row) in enumerate(zip(sides, weights, strict=True)):
        y = top + i * CELL_HEIGHT
        body.append(text(left - 10, y + CELL_HEIGHT / 2 + 4, side, "sc-op", "end", cells(side) * CHAR))
        for j, value in enumerate(row):
            if value is not None:
                body.append(_heat_cell(left + j * CELL_WIDTH, y, value, low, high))
    bottom = top + len(rows) * CELL_HEIGHT
    right = left + len(columns) * CELL_WIDTH
    body += _scale(left, bottom + 16, low, high)
    width = max(right + rise, MARGIN + cells(heading) * 10.5, left + 200) + MARGIN
    described = []
    for name, row in zip(rows, weights, strict=True):
        known = [(v, columns[j]) for j, v in enumerate(row) if v is not None and math.isfinite(v)]
        if known:
            best = max(known, key=lambda pair: pair[0])
            described.append(f"{name}: strongest {best[1]} {_short(best[0])}.")
    return page(width, bottom + 34 + MARGIN, heading, " ".join(described), sheet(*_shades()), body)


def ticks(low: float, high: float, whole: bool = False, wanted: int = 6) -> list[tuple[float, str]]:
    """Round numbers from at most `low` to at least `high`, with their labels."""
    if high <= low:
        spread = abs(low) * 0.1 or 1.0
        low, high = (low, low + 1) if whole else (low - spread, high + spread)
    raw = high / wanted - low / wanted  # not (high - low) / wanted, which may overflow
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 0.0
    if power == 0.0 or not math.isfinite(power):
        return [(low, _short(low)), (high, _short(high))]
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if last - first > 3 * wanted or first * step + step == first * step:  # a spread below the precision of floats
        return [(low, _short(low)), (high, _short(high))]
    decimals = max(0, -math.floor(math.log10(step)))
    plain = decimals <= 4 and max(abs(low), abs(high)) < 1e6
    return [(k * step, f"{k * step:.{decimals}f}" if plain else f"{k * step:.3g}") for k in range(first, last + 1)]


def _series(history: Sequence[Mapping[str, object]], name: str) -> list[tuple[float, float] | None]:
    line: list[tuple[float, float] | None] = []
    for i, entry in enumerate(history):
        if entry.get(name) is None:
            continue
        epoch, value = _number(entry.get("epoch", i)), _number(entry[name])
        line.append((epoch if epoch is not None else float(i), value) if value is not None else None)
    return line


def _number(value: object) -> float | None:
    """The value where it can be drawn; an axis that spans more than `LARGEST` would overflow."""
    return float(value) if isinstance(value, (int, float)) and abs(value) <= LARGEST else None


def _short(value: float) -> str:
    return f"{value:.4g}"


def _line(points: list[tuple[float, float] | None], look: Family, *, marked: bool) -> list[str]:
    """Polylines between gaps; a point alone carries the series' mark, and with `marked` every point does.

    That is how a series is told from the one that had the same look before.
    """
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    runs = [run for run in runs if run]
    lines = []
    for run in runs:
        if len(run) > 1:
            data = "M" + "L".join(f"{num(x)} {num(y)}" for x, y in run)
            lines.append(f'<path class="sc-edge sc-l-{look}" d="{data}"/>')
    alone = [point for run in runs if marked or len(run) == 1 for point in run]
    return lines + [mark(look, x, y) for x, y in alone]


def _band(low: list[tuple[float, float]], high: list[tuple[float, float]], look: Family) -> str:
    """The area between two lines; of one point a vertical line."""
    around = "L".join(f"{num(x)} {num(y)}" for x, y in [*low, *reversed(high)])
    return f'<path class="sc-f-{look} sc-p-{look}" fill-opacity="0.15" stroke-opacity="0.15" d="M{around}Z"/>'


def _end_labels(ends: list[tuple[float, str, Family, bool]], x: float, top: float) -> list[str]:
    """Names at the ends of their lines, pushed apart so that none covers another; two marks for a line of marks."""
    ordered = sorted(range(len(ends)), key=lambda i: (ends[i][0], i))
    places: list[float] = []
    for i in ordered:
        places.append(max(ends[i][0], places[-1] + 18 if places else top))
    # What was pushed below the plot moves back up as far as the others allow.
    limit = max(top + PLOT_HEIGHT, top + 18 * (len(ends) - 1))
    for k in reversed(range(len(places))):
        places[k] = min(places[k], limit)
        limit = places[k] - 18
    lines = []
    for i, y in zip(ordered, places, strict=True):
        _, label, look, again = ends[i]
        lines += [mark(look, x + 5, y), *([mark(look, x + 18, y)] if again else [])]
        lines.append(text(x + (29 if again else 16), y + 4, label, "sc-op", width=cells(label) * CHAR))
    return lines


def _shade(value: float, low: float, high: float) -> int:
    span = high / 2 - low / 2  # halves, for the whole may overflow
    return min(SHADES - 1, int((value / 2 - low / 2) / span * SHADES)) if span > 0 else 0


def _heat_cell(x: float, y: float, value: float, low: float, high: float) -> str:
    """A cell; its number is dark on light shades and light on dark ones."""
    if not math.isfinite(value):
        style, label = "sc-page", str(value)
        ink = "sc-num sc-quiet"
    else:
        shade = _shade(value, low, high)
        style, label = f"sc-h{shade}", f"{round(value, 2) + 0.0:.2f}" if -10 < value < 100 else f"{value:.0e}"
        ink = f"sc-num sc-t{shade}"
    box = f'<rect class="{style}" x="{num(x + 1)}" y="{num(y + 1)}" width="{num(CELL_WIDTH - 2)}" '
    box += f'height="{num(CELL_HEIGHT - 2)}" rx="3"/>'
    return box + text(x + CELL_WIDTH / 2, y + CELL_HEIGHT / 2 + 4, label, ink, "middle")


def _scale(x: float, y: float, low: float, high: float) -> list[str]:
    """The shades in order, with the numbers at their ends."""
    start = x + cells(_short(low)) * DIGITS + 8
    lines = [text(x, y + 10, _short(low), "sc-num sc-quiet")]
    for shade in range(SHADES):
        lines.append(f'<rect class="sc-h{shade}" x="{num(start + 12 * shade)}" y="{num(y)}" width="12" height="12"/>')
    lines.append(text(start + 12 * SHADES + 8, y + 10, _short(high), "sc-num sc-quiet"))
    return lines


def _shades() -> tuple[str, str]:
    """The heat colours on light and on dark pages; numbers take the ink that stands out more."""
    sheets = []
    for start, end in (LIGHT_RAMP, DARK_RAMP):
        rules = ""
        for shade in range(SHADES):
            share = shade / (SHADES - 1)
            mixed = [round(a + (b - a) * share) for a, b in zip(start, end, strict=True)]
            bright = _luminance(mixed)
            # White on c has contrast 1.05 / (c + 0.05), black on c (c + 0.05) / 0.05.
            ink = "#ffffff" if 1.05 / (bright + 0.05) > (bright + 0.05) / 0.05 else "#0b0f14"
            colour = "#" + "".join(f"{part:02x}" for part in mixed)
            rules += f".sc .sc-h{shade}{{fill:{colour}}}.sc .sc-t{shade}{{fill:{ink}}}"
        sheets.append(rules)
    return sheets[0], sheets[1]


def _luminance(colour: Sequence[int]) -> float:
    """Relative luminance of sRGB, as WCAG defines it."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
