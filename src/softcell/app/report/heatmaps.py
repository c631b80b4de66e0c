"""Heat maps: weights as an SVG file, weights over epochs and confusions as HTML tables, and Grad-CAM over images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from softcell.app.report.runs import Names, Run, is_table, mapping, number, table_names
from softcell.app.report.theme import (
    CHAR,
    MARGIN,
    Html,
    data,
    el,
    join,
    num,
    page,
    percent,
    sheet,
    shorten,
    table,
    text,
)
from softcell.app.report.theme import columns as cells
from softcell.arch import StrongestEach, TopInputs
from softcell.errors import UserError

SHADES = 10
CELL_WIDTH, CELL_HEIGHT = 46.0, 24.0
DIGITS = 6.8  # advance of 11 px monospace digits
MAX_FRAMES = 120
MAX_CLASSES = 24  # a matrix of more is unreadable; the largest confusions are listed instead
MAX_PAIRS = 12

# From the page's own tone to a deep one: the order survives without colour.
LIGHT_RAMP = ((236, 242, 249), (8, 69, 130))
DARK_RAMP = ((32, 41, 54), (140, 198, 255))

SIDE, GAP, TEXT = 128, 8, 20  # pixels of an image in a grid of maps, between two, and of a line of text
CHOSEN = (214, 106, 20)

# Dark blue over grey to yellow: even steps in lightness, so that it reads without colour too.
RAMP = torch.tensor([[0, 32, 77], [70, 80, 108], [124, 123, 120], [185, 170, 108], [255, 234, 70]]).float()


def heat_svg(weights: Sequence[Sequence[float | None]], rows: Sequence[str], columns: Sequence[str], title: str) -> str:
    """An SVG file with a heat map of weights [choices, candidates], each number printed in its cell.

    Rows may be shorter than `columns`, and None is padding; both stay blank.

    Example:
        >>> from softcell.app.report import heat_svg
        >>> picture = heat_svg([[0.75, 0.25]], rows=["0->1"], columns=["skip_connect", "conv"], title="Weights")
        >>> "0.75" in picture, "skip_connect" in picture
        (True, True)
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
            described.append(f"{name}: strongest {best[1]} {f'{best[0]:.4g}'}.")
    return page(width, bottom + 34 + MARGIN, heading, " ".join(described), sheet(*shade_rules()), body)


def _shade(value: float, low: float, high: float) -> int:
    span = high / 2 - low / 2  # halves, since the whole may overflow
    return min(SHADES - 1, int((value / 2 - low / 2) / span * SHADES)) if span > 0 else 0


def _heat_cell(x: float, y: float, value: float, low: float, high: float) -> str:
    """A cell; its number is dark on light shades and light on dark ones."""
    if not math.isfinite(value):
        style, label = "sc-page", str(value)
        ink = "sc-num sc-quiet"
    else:
        shade = _shade(value, low, high)
        # Adding 0.0 turns -0.0 into 0.0.
        style, label = f"sc-h{shade}", f"{round(value, 2) + 0.0:.2f}" if -10 < value < 100 else f"{value:.0e}"
        ink = f"sc-num sc-t{shade}"
    box = f'<rect class="{style}" x="{num(x + 1)}" y="{num(y + 1)}" width="{num(CELL_WIDTH - 2)}" '
    box += f'height="{num(CELL_HEIGHT - 2)}" rx="3"/>'
    return box + text(x + CELL_WIDTH / 2, y + CELL_HEIGHT / 2 + 4, label, ink, "middle")


def _scale(x: float, y: float, low: float, high: float) -> list[str]:
    """The shades in order, with the numbers at their ends."""
    start = x + cells(f"{low:.4g}") * DIGITS + 8
    lines = [text(x, y + 10, f"{low:.4g}", "sc-num sc-quiet")]
    for shade in range(SHADES):
        lines.append(f'<rect class="sc-h{shade}" x="{num(start + 12 * shade)}" y="{num(y)}" width="12" height="12"/>')
    lines.append(text(start + 12 * SHADES + 8, y + 10, f"{high:.4g}", "sc-num sc-quiet"))
    return lines


def shade_rules(*, tables: bool = False) -> tuple[str, str]:
    """Style rules of the shades on light and on dark pages, for pictures and, if asked for, for HTML tables.

    Numbers get the ink that has more contrast.
    """
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
            rules += f".sc .h{shade}{{background:{colour};color:{ink}}}" if tables else ""
        sheets.append(rules)
    return sheets[0], sheets[1]


def _luminance(colour: Sequence[int]) -> float:
    """Relative luminance of sRGB, as WCAG defines it."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def weights(run: Run) -> Html | None:
    """The slider and its tables; None for a run without weights, such as a training run or a random search."""
    rows = [row for row in run.architecture if any(is_table(t) for t in mapping(row.get("tables")).values())]
    rows = [row for row in rows if number(row.get("epoch")) is not None]
    if not rows:
        return None
    frames = [rows[i] for i in evenly(len(rows), MAX_FRAMES)]
    epochs = [int(float(row["epoch"])) + 1 for row in frames]
    known = table_names(run)
    tables = [_table(name, names, frames) for name, names in known.items()]
    last = len(frames) - 1
    controls = el(
        "div",
        el("button", "▶ play", type="button", class_="play", aria_label="play the epochs"),
        el(
            "input",
            type="range",
            class_="epochs",
            min=0,
            max=last,
            value=last,
            step=1,
            aria_label="epoch",
            aria_valuetext=f"epoch {epochs[-1]}",
        ),
        el("output", f"epoch {epochs[-1]}"),
        class_="slider",
    )
    legend = el(
        "p",
        "Each row is an edge, each column a candidate. Darker means more weight (lighter on a dark page). "
        f"{_about_frames(known, frames[-1])}",
        class_="quiet",
    )
    return el("div", controls, el("div", tables, class_="heats"), legend, class_="weights", data_epochs=data(epochs))


def _about_frames(known: Mapping[str, Names], frame: Mapping[str, Any]) -> str:
    """What a frame around a weight means: the rule of the space, where the recorded architecture follows it."""
    text = "A frame marks what would be derived in that epoch"
    rules = [names.rule for names in known.values()]
    if any(rule is None for rule in rules) or not all(_follows(name, names, frame) for name, names in known.items()):
        return (
            f"{text}. That need not be the largest weight of a row: the method may have its own rule, keep only some "
            "of the edges, or never derive “none”."
        )
    rule = rules[0]
    never = ", ".join(f"“{op}”" for op in ([] if rule is None else rule.never_picked))
    beside = f" {never} is never derived, even where its weight is the largest." if never else ""
    if isinstance(rule, TopInputs):
        other = f" other than {never}" if never else ""
        return (
            f"{text}: for every node its {rule.inputs} strongest edges, each with its strongest candidate{other}. Rows "
            f"without a frame are edges that are dropped.{beside}"
        )
    return f"{text}{': the strongest candidate of every edge' if isinstance(rule, StrongestEach) else ''}.{beside}"


def _follows(name: str, names: Names, frame: Mapping[str, Any]) -> bool:
    """Whether the rule of the space derives the recorded architecture from the recorded weights."""
    found, edges = (
        mapping(frame.get("tables")).get(name),
        mapping(mapping(frame.get("genotype")).get(name)).get("edges"),
    )
    if (
        names.table is None
        or names.rule is None
        or not isinstance(found, list)
        or not is_table(found)
        or not isinstance(edges, list)
    ):
        return False
    width = names.table.width
    try:
        # Rows of a ragged table may be shorter than its width.
        derived = names.rule(names.table, torch.tensor([[*row, *[0.0] * width][:width] for row in found]))
    except (UserError, ValueError, IndexError):
        return False
    return sorted(str([p.source, p.target, p.op]) for p in derived) == sorted(str(edge) for edge in edges)


def _table(name: str, names: Names, frames: Sequence[Mapping[str, Any]]) -> Html:
    columns = list(dict.fromkeys(op for ops in names.candidates for op in ops))
    values = [_values(name, names, columns, frame) for frame in frames]
    picked = [_picked(name, names, columns, frame) for frame in frames]
    top = max(1, max(map(max, values)))
    rows = []
    for i, choice in enumerate(names.choices):
        cells = []
        for j, op in enumerate(columns):
            number_ = i * len(columns) + j
            if op not in names.candidates[i]:
                cells.append(el("td", class_="void"))
                continue
            share = values[-1][number_]
            style = f"h{shade(share, top)}" + (" picked" if number_ in picked[-1] else "")
            cells.append(el("td", f"{share / 100:.2f}", class_=style, data_i=number_))
        rows.append(el("tr", el("th", _set(choice), scope="row"), cells))
    head = el("tr", el("td"), [el("th", el("span", op), scope="col") for op in columns])
    return el(
        "figure",
        el("figcaption", f"{name} cell" if name != "cell" else "cell"),
        el(
            "div", el("table", el("thead", head), el("tbody", rows), class_="heat sc"), class_="scroll fade", tabindex=0
        ),
        class_="card",
        data_top=top,
        data_frames=data(values),
        data_picked=data(picked),
    )


def _set(name: str) -> Html:
    """The name of an edge with its small letters as subscripts, which are easier to read."""
    text = join(name).replace("cₖ₋", "c<sub>k−</sub>").replace("cₖ", "c<sub>k</sub>")
    return Html(text.replace("</sub>₂", "2</sub>").replace("</sub>₁", "1</sub>"))


def shade(hundredths: int, top: int = 100) -> int:
    """The shade (0 to 9) of a weight in hundredths, where `top` has the strongest."""
    return min(SHADES - 1, max(0, hundredths * SHADES // top))


def _values(name: str, names: Names, columns: list[str], frame: Mapping[str, Any]) -> list[int]:
    """Weights of all cells of the table in hundredths, row by row; 0 where there is no such candidate."""
    found = mapping(frame.get("tables")).get(name)
    table = found if is_table(found) else None
    result = []
    for i, ops in enumerate(names.candidates):
        row = table[i] if table is not None and i < len(table) else []
        known = dict(zip(ops, row, strict=False))
        result += [round(100 * min(1.0, max(0.0, known.get(op, 0.0)))) for op in columns]
    return result


def _picked(name: str, names: Names, columns: list[str], frame: Mapping[str, Any]) -> list[int]:
    """The cells of the table that the architecture derived in this epoch consists of."""
    edges = mapping(mapping(frame.get("genotype")).get(name)).get("edges")
    result = []
    for edge in edges if isinstance(edges, list) else []:
        if isinstance(edge, list) and len(edge) == 3 and edge[2] in columns and tuple(edge[:2]) in names.ends:
            result.append(names.ends.index((edge[0], edge[1])) * len(columns) + columns.index(edge[2]))
    return sorted(result)


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` positions, evenly spread, with the first and the last."""
    return list(range(count)) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]


def class_names(run: Run) -> list[str]:
    """Names of the classes, or numbers where the run has no names."""
    names = mapping(run.results.get("data")).get("classes")
    known = [str(name) for name in names] if isinstance(names, list) else []
    top = 0
    if run.predictions is not None and len(run.predictions["labels"]):
        top = 1 + max(int(run.predictions["labels"].max()), int(run.predictions["predicted"].max()))
    return known + [f"class {i}" for i in range(len(known), top)]


def confusion(run: Run) -> Html | None:
    """The confusion matrix, or for many classes the most frequent confusions."""
    if run.predictions is None or not len(run.predictions["labels"]):
        return None
    names = class_names(run)
    labels, predicted = (run.predictions[name].long().clamp_min(0) for name in ("labels", "predicted"))
    size = len(names)
    counts = torch.bincount(labels * size + predicted, minlength=size * size).view(size, size)
    total = counts.sum(1)
    pairs = _pairs(counts, names)
    if size > MAX_CLASSES:
        worst = torch.argsort(counts.diagonal() / total.clamp_min(1), stable=True)[:MAX_PAIRS].tolist()
        hardest = [(names[i], percent(float(counts[i, i] / total[i])), str(int(total[i]))) for i in worst if total[i]]
        classes = table(("class", "correct", "images"), hardest, numeric=(1, 2))
        return el(
            "div",
            el("figure", el("figcaption", "the hardest classes"), classes, class_="card"),
            el("figure", el("figcaption", "the most frequent confusions"), pairs, class_="card"),
            class_="pair",
        )
    rows = []
    for i, name in enumerate(names):
        cells = []
        for j in range(size):
            share = float(counts[i, j] / total[i]) if total[i] else 0.0
            style = f"h{shade(round(100 * share))}" + (" picked" if i == j else "")
            tip = f"{int(counts[i, j])} of {int(total[i])} images of {name} were classified as {names[j]}"
            cells.append(el("td", str(int(counts[i, j])) if counts[i, j] else "·", class_=style, title=tip))
        right = percent(float(counts[i, i] / total[i]), 0) if total[i] else "–"
        rows.append(el("tr", el("th", name, scope="row"), cells, el("td", right, class_="side")))
    head = el("tr", el("td"), [el("th", el("span", name), scope="col") for name in names], el("th", "correct"))
    matrix = el("table", el("thead", head), el("tbody", rows), class_="heat square sc")
    return el(
        "div",
        el(
            "figure",
            el("figcaption", "rows: true class; columns: predicted class"),
            el("div", matrix, class_="scroll fade", tabindex=0),
            class_="card",
        ),
        el("figure", el("figcaption", "the most frequent confusions"), pairs, class_="card"),
        class_="pair",
    )


def _pairs(counts: Tensor, names: list[str]) -> Html:
    wrong = counts.clone()
    wrong.fill_diagonal_(0)
    # Stable: a page has the same bytes for the same run.
    order = torch.argsort(wrong.flatten(), descending=True, stable=True)[:MAX_PAIRS].tolist()
    rows = [divmod(k, len(names)) for k in order if int(wrong.flatten()[k])]
    if not rows:
        return el("p", "No mistakes.", class_="quiet")
    return table(
        ("true class", "predicted class", "times"),
        [(names[i], names[j], str(int(wrong[i, j]))) for i, j in rows],
        numeric=(2,),
    )


def overlay(image: Tensor, heat: Tensor) -> Tensor:
    """The image uint8 [c, h, w] in grey under the colours of `heat` [h', w'] in 0..1; uint8 [3, H, W]."""
    height, width = image.shape[1:]
    scale = max(1, 64 // max(height, width))  # small images get room for a smooth map
    grey = image.float().mean(0, keepdim=True)[None]
    grey = F.interpolate(grey, scale_factor=scale, mode="nearest")[0]
    wide = F.interpolate(heat[None, None].float(), size=grey.shape[1:], mode="bilinear", align_corners=False)[0, 0]
    position = wide.clamp(0, 1) * (len(RAMP) - 1)
    low = position.floor().long().clamp_max(len(RAMP) - 2)
    share = (position - low)[..., None]
    colour = (RAMP[low] * (1 - share) + RAMP[low + 1] * share).permute(2, 0, 1)
    return (0.45 * grey + 0.55 * colour).round().clamp(0, 255).to(torch.uint8)


def cam_grid(
    images: Tensor, heats: dict[str, Tensor], titles: Sequence[str], chosen: str | None, heading: str
) -> Image.Image:
    """A row per image and a column per candidate of a layer (IT-NAS, Figure 4); `chosen` is framed.

    images: uint8 [n, c, h, w]; heats: by candidate [n, h', w'] in 0..1; titles: one per image.
    """
    names = list(heats)
    width, height = GAP + (len(names) + 1) * (SIDE + GAP), 2 * (TEXT + GAP) + len(images) * (SIDE + TEXT + GAP)
    picture = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(13)
    draw.text((GAP, GAP // 2), heading, fill="black", font=font)
    top = TEXT + GAP
    for column, name in enumerate(("image", *names)):
        mark = " *" if name == chosen else ""
        draw.text((_left(column), top), f"{name}{mark}", fill=CHOSEN if mark else "black", font=font)
    for row, image in enumerate(images):
        y = top + TEXT + row * (SIDE + TEXT + GAP)
        picture.paste(_tile(image.expand(3, -1, -1) if image.shape[0] == 1 else image), (_left(0), y))
        draw.text((_left(0), y + SIDE + 2), titles[row], fill="black", font=font)
        for column, name in enumerate(names, start=1):
            x = _left(column)
            picture.paste(_tile(overlay(image, heats[name][row].cpu())), (x, y))
            if name == chosen:
                draw.rectangle((x - 3, y - 3, x + SIDE + 2, y + SIDE + 2), outline=CHOSEN, width=3)
    return picture


def _left(column: int) -> int:
    return GAP + column * (SIDE + GAP)


def _tile(pixels: Tensor) -> Image.Image:
    """uint8 [3, h, w] as a square of SIDE; small images keep their pixels visible."""
    sized = F.interpolate(pixels[None].float(), size=(SIDE, SIDE), mode="nearest")[0].round().byte()
    return Image.fromarray(sized.permute(1, 2, 0).contiguous().numpy())
