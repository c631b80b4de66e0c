"""Labelled images, either resident in memory as one uint8 tensor or decoded from files on demand.

`decode` reads an image file of any kind; errors name the file and the reason.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from softcell.data.splits import check_readable
from softcell.errors import UserError
from softcell.machine import total_memory

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
        why = getattr(error, "strerror", None) or error  # the text of an OSError also has its number and the path
        super().__init__(
            f"every image must be decodable, but {path} is not ({self.reason}: {why}); repair the file or remove it"
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
    whole: all of the image is scaled to `size` instead, ignoring its aspect ratio.
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


class Images(ABC):
    """N labelled images that all have one shape.

    Images may be *stored* larger than they are seen: ImageNet keeps 256 pixels of which evaluation sees the
    central 224, while a random resized crop draws from all of them.

    labels: int64 [N]. shape: (C, H, W) as a network sees them. is_test: see `softcell.data.splits`.

    Example:
        >>> import torch
        >>> from softcell.data import Images, load
        >>> images = load("digits").train
        >>> isinstance(images, Images), images.fetch(torch.tensor([0, 1])).shape
        (True, torch.Size([2, 1, 8, 8]))
    """

    labels: Tensor
    shape: tuple[int, int, int]
    is_test: bool

    def __len__(self) -> int:
        return self.labels.shape[0]

    @abstractmethod
    def fetch_stored(self, indices: Tensor) -> Tensor:
        """The images at `indices` int64 [n] as stored, uint8 [n, C, H', W'] with H' >= H and W' >= W."""

    def fetch(self, indices: Tensor) -> Tensor:
        """The images at `indices` int64 [n], uint8 [n, C, H, W]: the centre of what is stored."""
        return centre_view(self.fetch_stored(indices), self.shape)


def check_memory(count: int, shape: tuple[int, int, int], bytes_each: int = 1) -> None:
    """Raise UserError unless `count` images of `shape` (C, H, W) fit into this machine's memory.

    bytes_each: bytes per pixel and channel.
    """
    channels, height, width = shape
    needed, there = count * channels * height * width * bytes_each, total_memory()
    if there is not None and needed > there:
        raise _too_large(count, shape, needed, f"the machine has {_gib(there)}")


def _too_large(count: int, shape: tuple[int, int, int], needed: int, why: str) -> UserError:
    _, height, width = shape
    images = "image" if count == 1 else "images"
    return UserError(
        f"images that are read together must fit into memory, but {count} {images} of {height}x{width} pixels need "
        f"{_gib(needed)} and {why}; choose a smaller --image-size"
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"


def centre_view(stored: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """The centre of `stored` [n, C, H', W'], [n, *shape]."""
    _, height, width = shape
    top, left = (stored.shape[2] - height) // 2, (stored.shape[3] - width) // 2
    return stored[:, :, top : top + height, left : left + width]


def box_of(boxes: NDArray[np.float64] | None, index: int) -> Box | None:
    """Row `index` of boxes [N, 4]; None without boxes."""
    if boxes is None:
        return None
    left, top, width, height = boxes[index].tolist()
    return left, top, width, height


class Resident(Images):
    """Images held in one uint8 tensor, on the CPU or on a device.

    pixels: uint8 [N, C, H', W']. labels: int64 [N], moved to the same device.
    view: the central (H, W) that `fetch` returns; all of the stored image when None.

    Example:
        >>> import torch
        >>> from softcell.data import Resident
        >>> images = Resident(torch.zeros(5, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 0, 1, 1, 2]))
        >>> len(images), images.shape, images.device
        (5, (3, 8, 8), device(type='cpu'))
    """

    def __init__(
        self, pixels: Tensor, labels: Tensor, *, is_test: bool = False, view: tuple[int, int] | None = None
    ) -> None:
        if pixels.dtype != torch.uint8 or pixels.dim() != 4 or labels.dtype != torch.int64:
            raise UserError(
                "pixels must be uint8 [N, C, H, W] with int64 labels [N], but got "
                f"{pixels.dtype} {list(pixels.shape)} with {labels.dtype} {list(labels.shape)}; "
                "convert them first"
            )
        if labels.shape != pixels.shape[:1]:
            raise UserError(
                f"there must be one label per image, but got {pixels.shape[0]} images and "
                f"labels of shape {list(labels.shape)}; pass labels [N]"
            )
        height, width = view or (pixels.shape[2], pixels.shape[3])
        assert height <= pixels.shape[2] and width <= pixels.shape[3]
        self._pixels = pixels
        self.labels = labels.to(pixels.device)
        self.shape = (pixels.shape[1], height, width)
        self.is_test = is_test
        # The two loaders of a bilevel search share one copy of the data on the device.
        self._copies: WeakValueDictionary[torch.device, Resident] = WeakValueDictionary()

    @property
    def device(self) -> torch.device:
        return self._pixels.device

    @property
    def pixels(self) -> Tensor:
        """All images as stored, uint8 [N, C, H', W'], without the guard of the test set: only for fingerprints."""
        return self._pixels

    def to(self, device: torch.device | str) -> "Resident":
        """These images on `device`; the object itself if they are there already."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device == self.device:
            return self
        copy = self._copies.get(device)
        if copy is None:
            pixels, view = self._pixels.to(device), self.shape[1:]
            copy = Resident(pixels, self.labels, is_test=self.is_test, view=view)
            self._copies[device] = copy
        return copy

    def fetch_stored(self, indices: Tensor) -> Tensor:
        check_readable(self.is_test)
        return self._pixels.index_select(0, indices.to(self.device))


class Files(Images):
    """Images decoded from files each time they are read, for data that does not fit in memory.

    names: paths relative to `root`, one per image. labels: int64 [N]. channels: 1 or 3.
    size: (H, W) as a network sees them. stored: the size decoded to before that centre is taken.
    boxes: float [N, 4], the part of each image that is used (`softcell.data.images.Box`); its square fills `size`.
    whole: all of an image is scaled to `stored`, ignoring its aspect ratio; otherwise a central part of that aspect
    ratio.

    Example:
        >>> from pathlib import Path
        >>> import torch
        >>> from PIL import Image
        >>> from softcell.data import Files
        >>> Image.new("RGB", (20, 10), "red").save("red.png")
        >>> images = Files(Path(), ["red.png"], torch.tensor([0]), channels=3, size=(8, 8))
        >>> images.fetch(torch.tensor([0]))[0, :, 0, 0]
        tensor([255,   0,   0], dtype=torch.uint8)
    """

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        labels: Tensor,
        *,
        channels: int,
        size: tuple[int, int],
        stored: tuple[int, int] | None = None,
        is_test: bool = False,
        boxes: NDArray[np.float64] | None = None,
        whole: bool = False,
    ) -> None:
        assert labels.dtype == torch.int64 and labels.shape == (len(names),)
        self.root = root
        # One block of bytes instead of a list of strings: worker processes that are forked share it,
        # whereas counting references to a million strings would copy all their pages.
        self._names = np.array([os.fsencode(name) for name in names], dtype=np.bytes_)
        self.labels = labels
        self.shape = (channels, *size)
        self.stored = stored or size
        self._boxes = boxes
        self._whole = whole
        self.is_test = is_test

    def path(self, index: int) -> Path:
        return self.root / os.fsdecode(bytes(self._names[index]))

    def layout(self) -> bytes:
        """Names, sizes as seen and stored, and boxes, as bytes; reads no file."""
        boxes = b"" if self._boxes is None else self._boxes.astype("<f8").tobytes()
        sizes = str((self.shape, self.stored, self._whole)).encode()
        return b"\0".join((sizes, boxes, b"\0".join(map(bytes, self._names))))

    def fetch_stored(self, indices: Tensor) -> Tensor:
        check_readable(self.is_test)
        return self.read(indices)

    def read(self, indices: Tensor) -> Tensor:
        """`fetch_stored` without the guard.

        Only for worker processes, which do not see the seal of their parent; the parent checks it.
        """
        out = self._room(len(indices))
        for row, index in enumerate(indices.tolist()):
            at = box_of(self._boxes, index), self.stored[0] / self.shape[1]
            out[row] = decode(self.path(index), self.shape[0], self.stored, *at, whole=self._whole)
        return torch.from_numpy(out)

    def _room(self, count: int) -> NDArray[np.uint8]:
        """Memory for `count` images as they are stored, uint8 [count, C, H', W']."""
        shape = (self.shape[0], *self.stored)
        check_memory(count, shape)
        try:
            return np.empty((count, *shape), np.uint8)
        except MemoryError as error:  # used by others, or a limit of this process
            raise _too_large(count, shape, count * math.prod(shape), "that much is not free") from error


def gathered(parts: Sequence[tuple[Images, Tensor]], *, is_test: bool) -> Images:
    """The images at the numbers int64 [n] given with each part, concatenated.

    All parts must be in memory or all in files, with the same shape. Nothing is decoded.
    """
    first, labels = parts[0][0], torch.cat([images.labels.cpu()[chosen] for images, chosen in parts])
    assert len({(type(images), images.shape) for images, _ in parts}) == 1, (
        "parts of one dataset have one type and shape"
    )
    if isinstance(first, Resident):
        pixels = torch.cat([images._pixels[chosen] for images, chosen in parts if isinstance(images, Resident)])
        return Resident(pixels, labels, is_test=is_test, view=first.shape[1:])
    assert isinstance(first, Files)
    files = [(images, chosen) for images, chosen in parts if isinstance(images, Files)]
    boxes = [images._boxes[chosen.numpy()] for images, chosen in files if images._boxes is not None]
    names = [str(images.path(number).absolute()) for images, chosen in files for number in chosen.tolist()]
    if len(files) == 1:  # one root: names stay relative, so that the data may be moved
        names = [os.fsdecode(bytes(first._names[number])) for number in files[0][1].tolist()]
    return Files(
        first.root,
        names,
        labels,
        channels=first.shape[0],
        size=first.shape[1:],
        stored=first.stored,
        is_test=is_test,
        boxes=np.concatenate(boxes) if boxes else None,
        whole=first._whole,
    )
