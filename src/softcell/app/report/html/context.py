"""What context auto-regression gave: the loss of the first phase of a search, and the pictures that were filled in."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image

from softcell.app.report.html.charts import line_chart, series
from softcell.app.report.html.elements import Html, el, join
from softcell.app.report.runs import Run, number, read_lines
from softcell.search.phases import FIRST
from softcell.search.reconstruct import PICTURE

_WIDEST = 1600  # pixels of the picture in a page


def context(run: Run) -> Html | None:
    """Of a search that began with such a phase, or was one."""
    within = run.folder / FIRST
    if run.kind != "search" or not (within.is_dir() or (run.folder / PICTURE).is_file()):
        return None
    parts: list[Html | None] = []
    if within.is_dir():
        rows = [row for row in read_lines(within, "metrics.jsonl", []) if number(row.get("epoch")) is not None]
        lines = series(rows, {"train_loss": "train", "val_loss": "validation"})
        if lines:
            chart = line_chart("phase 1: L1 distance to what was hidden", lines)
            parts.append(el("div", chart, class_="plots"))
    shown = picture(within / PICTURE) or picture(run.folder / PICTURE)
    if shown is not None:
        told = "rows: images, what the network was shown of them, and what it filled in"
        inner = el("div", shown, class_="scroll fade", tabindex=0)
        parts.append(el("figure", el("figcaption", told), inner, class_="card"))
    return join(*parts) if parts else None


def picture(file: Path) -> Html | None:
    """A picture as an element that holds its own bytes; None where there is none that can be read."""
    try:
        with Image.open(file, formats=["PNG"]) as opened:
            image = opened.convert("L" if opened.mode == "L" else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    image.thumbnail((_WIDEST, _WIDEST))
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    source = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")
    described = "images, what was shown of them and what was filled in"
    return el("img", src=source, alt=described, width=image.width, height=image.height, class_="filled")
