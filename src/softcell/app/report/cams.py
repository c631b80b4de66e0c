"""Where every candidate of a layer looks: a row per image, a column per candidate (IT-NAS, Figure 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from softcell.app.report.html.mistakes import overlay

SIDE = 128
GAP = 8
TEXT = 20
CHOSEN = (214, 106, 20)


def cam_grid(
    images: Tensor, heats: dict[str, Tensor], titles: Sequence[str], chosen: str | None, heading: str
) -> Image.Image:
    """images uint8 [n, c, h, w], heats [n, h', w'] in 0..1 by candidate, a title per image; `chosen` is framed."""
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
