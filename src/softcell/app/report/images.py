"""Images in reports: mistakes with Grad-CAM, the maps of several candidates, and reconstructions of hidden parts."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from softcell.app.report.charts import line_chart, series
from softcell.app.report.heatmaps import class_names
from softcell.app.report.runs import Run, number, read_lines
from softcell.app.report.theme import Html, el, join, percent
from softcell.search.run import FIRST
from softcell.search.supernet import PICTURE

SHOWN = 12
WIDEST = 1600  # pixels of a picture in a page
SIDE, GAP, TEXT = 128, 8, 20  # pixels of an image in a grid of maps, between two, and of a line of text
CHOSEN = (214, 106, 20)

# Dark blue over grey to yellow: even steps in lightness, so that it reads without colour too.
RAMP = torch.tensor([[0, 32, 77], [70, 80, 108], [124, 123, 120], [185, 170, 108], [255, 234, 70]]).float()


def most_wrong(run: Run) -> Html | None:
    """The images with the most confidence in a wrong class, each with its Grad-CAM map where there is one."""
    found = run.predictions
    if found is None or "worst" not in found:
        return None
    names, heat = class_names(run), found.get("heat")
    cards = []
    for place, index in enumerate(found["worst"].tolist()[:SHOWN]):
        label, predicted = (names[max(0, int(found[key][index]))] for key in ("labels", "predicted"))
        confidence, truth = float(found["confidence"][index]), float(found["truth"][index])
        image = found["images"][place]
        described = f"test image {index}: {label}, classified as {predicted}"
        pictures = [_img(image, described, "plain")]
        if heat is not None:
            pictures.append(_img(overlay(image, heat[place]), f"Grad-CAM of {described}", "cam"))
        cards.append(
            el(
                "figure",
                el("div", pictures, class_="pictures"),
                el(
                    "figcaption",
                    join(el("span", "is ", el("b", label)), el("span", "classified as ", el("b", predicted))),
                    el("span", f"{percent(confidence, 0)} confident, {percent(truth, 0)} for {label}", class_="quiet"),
                ),
                class_="wrong",
            )
        )
    control = None
    if heat is not None:
        control = el(
            "label",
            el("input", type="checkbox", class_="cams", checked=True),
            " show Grad-CAM of the predicted class in the last cell (bright yellow: high, dark blue: low)",
            class_="check",
        )
    return el("div", control, el("div", cards, class_="gallery"), class_="mistakes cams-on")


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


def _img(pixels: Tensor, described: str, style: str) -> Html:
    """An image uint8 [c, h, w] as an element that holds its own bytes."""
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    picture = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    sharp = " pixels" if max(pixels.shape[1:]) < 100 else ""
    return _element(picture, described, style + sharp)


def _element(picture: Image.Image, described: str, style: str) -> Html:
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True)
    source = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")
    return el("img", src=source, alt=described, class_=style, width=picture.width, height=picture.height)


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


def reconstructions(run: Run) -> Html | None:
    """Loss and pictures of context auto-regression, where a search began with this phase or consists of it."""
    first = run.folder / FIRST
    if run.kind != "search" or not (first.is_dir() or (run.folder / PICTURE).is_file()):
        return None
    parts: list[Html | None] = []
    if first.is_dir():
        rows = [row for row in read_lines(first, "metrics.jsonl", []) if number(row.get("epoch")) is not None]
        lines = series(rows, {"train_loss": "train", "val_loss": "validation"})
        chart = line_chart("phase 1: L1 distance to the hidden parts", lines)
        parts.append(None if chart is None else el("div", chart, class_="plots"))
    shown = _picture(first / PICTURE) or _picture(run.folder / PICTURE)
    if shown is not None:
        caption = "rows: images, the parts that the network saw, and its reconstruction"
        inner = el("div", shown, class_="scroll fade", tabindex=0)
        parts.append(el("figure", el("figcaption", caption), inner, class_="card"))
    return join(*parts) if any(parts) else None


def _picture(file: Path) -> Html | None:
    """A PNG file as an element; None where there is none that can be read."""
    try:
        with Image.open(file, formats=["PNG"]) as opened:
            image = opened.convert("L" if opened.mode == "L" else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    image.thumbnail((WIDEST, WIDEST))
    return _element(image, "images, their visible parts and their reconstructions", "filled")
