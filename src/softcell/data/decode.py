"""Decodes an image file of any kind to uint8; an error names the file and the reason."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from softcell.errors import UserError

SUFFIXES = frozenset(
    [".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"]
)
_SIXTEEN_BIT = frozenset(["I", "I;16", "I;16B", "I;16L", "I;16N"])
_GREY = _SIXTEEN_BIT | {"1", "L", "LA", "La", "F"}
_ORIENTATION = 0x0112  # EXIF tag; values 5 to 8 exchange width and height
_SWAPPED = range(5, 9)


class DecodeError(UserError):
    """An image file cannot be decoded; `reason` is the type of the decoder's error."""

    def __init__(self, path: Path, error: Exception) -> None:
        self.reason = type(error).__name__
        super().__init__(
            f"every image must be decodable, but {path} is not ({self.reason}: {error}); repair the file or remove it"
        )


@dataclass(frozen=True, slots=True)
class Header:
    """The upright size of an image and whether its mode is grey, read without decoding it."""

    height: int
    width: int
    grey: bool


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """The image at `path`; any error while it is open becomes a UserError that names the file."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
        raise UserError(f"every image must be a regular file, but {path} is not; remove it")
    try:
        with Image.open(path) as image:
            yield image
    except UserError:
        raise
    except Exception as error:
        # Decoders raise nearly every type there is on damaged data (OSError, SyntaxError, struct.error,
        # IndexError, ...): all of them mean the same to the owner of the file.
        raise DecodeError(path, error) from error


def read_header(path: Path) -> Header:
    """Size after EXIF rotation, and whether the mode (or the whole palette) is grey."""
    with _opened(path) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION) in _SWAPPED:
            width, height = height, width
        return Header(height, width, _is_grey(image))


def _is_grey(image: Image.Image) -> bool:
    if image.mode != "P":
        return image.mode in _GREY
    palette = np.array(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
    return bool((palette == palette[:, :1]).all())


def _to_eight_bits(image: Image.Image, path: Path) -> Image.Image:
    """A 16-bit grey image as mode L, 65535 becoming 255."""
    values = np.asarray(image).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise UserError(
            f"integer images must have values in 0..65535, but {path} has {low}..{high}; convert it to 8 bits"
        )
    return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))


def _to_mode(image: Image.Image, channels: int, path: Path) -> Image.Image:
    """The image in mode L (channels=1) or RGB (channels=3); transparency is laid over white.

    White, because drawings and icons with black strokes assume it.
    """
    mode = "L" if channels == 1 else "RGB"
    if image.mode == "F":
        raise UserError(
            f"images must have integer values, but {path} holds 32-bit floats, whose range is unknown; "
            "convert it to 8 or 16 bits"
        )
    if image.mode in _SIXTEEN_BIT:
        image = _to_eight_bits(image, path)
    if "transparency" in image.info or image.mode in ("LA", "La", "PA", "RGBA", "RGBa"):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def _fit(image: Image.Image, height: int, width: int) -> Image.Image:
    """Scale so that `height` x `width` is covered and take the centre.

    One resampling of the central box instead of a resize and a crop, which would make a 1 x 100,000 image huge.
    """
    if image.size == (width, height):
        return image
    scale = min(image.width / width, image.height / height)
    # Rounding must not push the box past a border: Pillow refuses that.
    left, top = max(0.0, (image.width - width * scale) / 2), max(0.0, (image.height - height * scale) / 2)
    right, bottom = min(left + width * scale, image.width), min(top + height * scale, image.height)
    return image.resize((width, height), Image.Resampling.BILINEAR, box=(left, top, right, bottom))


Box = tuple[float, float, float, float]
"""Of an object in an image: left, top, width, height in pixels."""


def square_around(box: Box, width: int, height: int, margin: float) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of a square around `box` in an image; its side is the box's longer one times `margin`.

    It is moved into the image if it crosses a border, and is at most as long as the image's short side.
    """
    left, top, wide, high = box
    side = min(max(1, round(max(wide, high) * margin)), width, height)
    x = min(max(0, round(left + wide / 2 - side / 2)), width - side)
    y = min(max(0, round(top + high / 2 - side / 2)), height - side)
    return x, y, x + side, y + side


def decode(
    path: Path,
    channels: int,
    size: tuple[int, int],
    box: Box | None = None,
    margin: float = 1.0,
    *,
    whole: bool = False,
) -> NDArray[np.uint8]:
    """The image at `path`, upright, uint8 [channels, H, W] for `size` (H, W); a centre crop keeps the aspect.

    box: only the square around it is taken (see `square_around`).
    whole: all of the image is scaled to `size` instead, whatever its aspect.
    """
    with _opened(path) as image:
        upright = ImageOps.exif_transpose(image)
        if box is not None:
            upright = upright.crop(square_around(box, upright.width, upright.height, margin))
        converted, (height, width) = _to_mode(upright, channels, path), size
        # Pillow returns the image itself if it has this size already.
        fitted = converted.resize((width, height), Image.Resampling.BILINEAR) if whole else _fit(converted, *size)
        pixels = np.array(fitted, np.uint8)
    return pixels.reshape(*size, channels).transpose(2, 0, 1)
