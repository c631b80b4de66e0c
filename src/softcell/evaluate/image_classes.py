"""The classes of image files by a trained network, which are prepared as its test images were.

Files are decoded and classified batch by batch, so that a folder may hold any number of them. A file that cannot be
read is part of the result, with the reason, and does not stop the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from softcell.data.images import SUFFIXES, DecodeError, centre_view, decode
from softcell.errors import UserError
from softcell.spaces import Inputs, Shape

BATCH_SIZE = 32
Forward = Callable[[Tensor], Tensor]
"""Pixels float32 [n, c, h, w] in 0..1, on the CPU, to logits [n, classes]."""


@dataclass(frozen=True, slots=True)
class ImagePrediction:
    """The most likely classes of an image file, the first one first; none, but an `error`, for an unreadable file.

    Example:
        >>> from pathlib import Path
        >>> from softcell.evaluate import ImagePrediction
        >>> found = ImagePrediction(Path("tom.jpg"), ("cat", "dog"), (0.9, 0.1))
        >>> found.classes[0], found.error
        ('cat', None)
    """

    file: Path
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None


def image_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files among `paths`, whatever their name, and all image files below the folders among them, sorted by name.

    Example:
        >>> from pathlib import Path
        >>> from softcell.evaluate import image_files
        >>> Path("photos/cats").mkdir(parents=True)
        >>> for name in ("cats/tom.jpg", "rex.PNG", "notes.txt"):
        ...     Path("photos", name).touch()
        >>> [file.as_posix() for file in image_files(["photos", "photos/notes.txt"])]
        ['photos/rex.PNG', 'photos/cats/tom.jpg', 'photos/notes.txt']
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        below = len(found)
        for folder, inner, names in os.walk(path):
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            images = (name for name in sorted(names) if os.path.splitext(name)[1].lower() in SUFFIXES)
            found += [Path(folder, name) for name in images if not name.startswith(".")]
        if len(found) == below:
            raise UserError(
                f"a folder must hold images ({', '.join(sorted(SUFFIXES))}), but there are none in {path} or below it"
            )
    return found


def classify(
    forward: Forward,
    files: Sequence[Path],
    shape: Shape,
    inputs: Inputs,
    *,
    top: int = 3,
    batch_size: int = BATCH_SIZE,
) -> Iterator[ImagePrediction]:
    """The `top` most likely classes of every file, in the order of `files`.

    shape: (c, h, w) of the images that the network sees.

    Example:
        >>> from pathlib import Path
        >>> import torch
        >>> from PIL import Image
        >>> from softcell.evaluate import classify
        >>> from softcell.spaces import Inputs
        >>> Image.new("L", (20, 10), 255).save("white.png")
        >>> by_brightness = lambda pixels: torch.stack((pixels, 1 - pixels), 1).mean((2, 3, 4)) * 10
        >>> inputs = Inputs(("bright", "dark"), mean=(0.0,), std=(1.0,))
        >>> for found in classify(by_brightness, [Path("white.png"), Path("lost.png")], (1, 8, 8), inputs, top=1):
        ...     print(found.file, found.classes, found.error)
        white.png ('bright',) None
        lost.png () lost.png cannot be read as an image: No such file or directory
    """
    if top < 1:
        raise UserError(f"`top >= 1` must hold, but got top={top}")
    if shape[0] not in (1, 3):
        raise UserError(
            f"image files have 1 or 3 channels, but this network was trained on images of {shape[0]} channels; call it "
            "on arrays instead: softcell.api.Network.from_pretrained"
        )
    # Threads, because decoders release the interpreter lock.
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(files), batch_size):
            chunk = files[start : start + batch_size]
            read = list(pool.map(lambda file: _read(file, shape, inputs), chunk))
            pixels = [found for found in read if isinstance(found, Tensor)]
            answers = iter(_answers(forward, torch.stack(pixels), inputs.classes, top) if pixels else ())
            for file, found in zip(chunk, read, strict=True):
                if isinstance(found, str):
                    yield ImagePrediction(file, error=found)
                else:
                    yield ImagePrediction(file, *next(answers))


def _read(file: Path, shape: Shape, inputs: Inputs) -> Tensor | str:
    """The image as uint8 [c, h, w], prepared as in training; a sentence on why it cannot be read."""
    try:
        stored = decode(file, shape[0], inputs.scaled_to or shape[1:], whole=inputs.whole)
    except DecodeError as error:
        cause = error.__cause__
        return f"{file} cannot be read as an image: {getattr(cause, 'strerror', None) or cause}"
    except UserError as error:
        return str(error)
    return centre_view(torch.from_numpy(stored.copy())[None], shape)[0]


@torch.no_grad()
def _answers(
    forward: Forward, pixels: Tensor, classes: Sequence[str], top: int
) -> Iterator[tuple[tuple[str, ...], tuple[float, ...]]]:
    logits = forward(pixels.float() / 255).cpu()
    if logits.shape != (len(pixels), len(classes)):
        raise UserError(
            f"a network must give one output per class, but this one has outputs of shape {list(logits.shape)} for "
            f"{len(pixels)} images and {len(classes)} classes"
        )
    best = logits.double().softmax(1).topk(min(top, len(classes)), dim=1)
    for numbers, chances in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        yield tuple(classes[number] for number in numbers), tuple(chances)
