"""CUB-200-2011 in its official layout: 11,788 photographs of 200 kinds of birds.

Wah et al.: The Caltech-UCSD Birds-200-2011 Dataset, 2011. The folder has `images.txt` (number, path),
`image_class_labels.txt`, `classes.txt`, `train_test_split.txt` (1 for training), `images/` and `bounding_boxes.txt`
(left, top, width, height in pixels). `cub200-boxes` crops every image to the square around its bird.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from softcell.data.augment import Augment
from softcell.data.dataset import Dataset
from softcell.data.folder import IMAGENET_MEAN, IMAGENET_STD, Scan, images_of
from softcell.data.images import Box, Images, read_header
from softcell.errors import UserError

WHOLE, BOXED = NAMES = ("cub200", "cub200-boxes")
FILES = ("images.txt", "image_class_labels.txt", "classes.txt", "train_test_split.txt")
BOXES = "bounding_boxes.txt"
_SIZE = 448


def _read_table(file: Path) -> dict[int, str]:
    """A file with a number and a text per line."""
    found: dict[int, str] = {}
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cub200 must be complete, but {file} cannot be read ({error}); unpack the archive") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            key, _, value = line.strip().partition(" ")
            if not key.isdigit() or not value:
                raise UserError(f"{file}, line {number}: must be a number and a value, got {line!r}")
            found[int(key)] = value
    return found


def _read_boxes(file: Path, images: Iterable[int]) -> dict[int, Box]:
    """The boxes of all `images`, by number."""
    found: dict[int, Box] = {}
    for number, text in _read_table(file).items():
        try:
            left, top, width, height = (float(word) for word in text.split())
        except ValueError as error:
            raise UserError(
                f"{file}: image {number} must have four numbers (x, y, width, height), got {text!r}"
            ) from error
        if not (all(map(math.isfinite, (left, top))) and 0 < width < math.inf and 0 < height < math.inf):
            raise UserError(f"{file}: the box of image {number} must have a width and a height, got {text!r}")
        found[number] = (left, top, width, height)
    missing = next((key for key in images if key not in found), None)
    if missing is not None:
        raise UserError(f"{file}: image {missing} has no bounding box; unpack the archive again, or use cub200")
    return found


def _read_parts(file: Path) -> dict[int, bool]:
    """Whether each image is for training, by number; at least one must be."""
    found: dict[int, bool] = {}
    for key, text in _read_table(file).items():
        if text.strip() not in ("0", "1"):
            raise UserError(
                f"{file}, line {_line_of(file, key)}: image {key} must have 1 (training) or 0 (testing), but has "
                f"{text.strip()!r}; correct the line, or unpack the archive again"
            )
        found[key] = text.strip() == "1"
    if not any(found.values()):
        raise UserError(
            f"{file}: at least one image must be for training (1), but none of {len(found)} is; unpack the archive "
            "again"
        )
    return found


def _line_of(file: Path, key: int) -> int:
    """The last line of a table that has `key`."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return max(number for number, line in enumerate(lines, 1) if line.strip() and int(line.split()[0]) == key)


def _check_boxes(file: Path, boxes: Mapping[int, Box], paths: Mapping[int, Path]) -> None:
    """Raise `UserError` if a box is outside its image; reads only headers."""

    def outside(key: int) -> tuple[int, int] | None:
        left, top, width, height = boxes[key]
        image = read_header(paths[key])
        within = left < image.width and top < image.height and left + width > 0 and top + height > 0
        return None if within else (image.width, image.height)

    with ThreadPoolExecutor() as pool:
        for key, size in zip(paths, pool.map(outside, paths), strict=True):
            if size is not None:
                raise UserError(
                    f"{file}: the box of image {key} must be in the image, which is {size[0]}x{size[1]}, but is at "
                    f"{' '.join(f'{number:g}' for number in boxes[key])} (x, y, width, height); unpack the archive "
                    "again, or use cub200"
                )


def load_cub(
    root: Path, image_size: int | None, memory_limit: int, *, boxed: bool = False, scaled_to: int | None = None
) -> Dataset:
    """CUB-200-2011 with its official test set; without a test set if all images are for training.

    `root` is CUB_200_2011/ or the folder above it.
    Every whole image is scaled to a square of `scaled_to` pixels, by default the image size (full-attention NAS, §IV-E:
    448; §IV-F: 256, cropped to 227). Evaluation uses the centre of that, training takes random crops. `boxed`:
    only the square around the bounding box is kept, with a margin (by default 8/7), so that evaluation uses exactly
    that square.
    """
    folder = root if (root / FILES[0]).is_file() else root / "CUB_200_2011"
    for name in (*FILES, BOXES) if boxed else FILES:
        if not (folder / name).is_file():
            raise UserError(
                f"cub200 must have {', '.join((*FILES, BOXES))} and images/ in {root} or {folder}, but {name} "
                "is missing; see https://www.vision.caltech.edu/datasets/cub_200_2011"
            )
    names, labels, classes = (_read_table(folder / name) for name in FILES[:3])
    part = _read_parts(folder / FILES[3])
    if not (names.keys() == labels.keys() == part.keys()):
        raise UserError(f"the tables of {folder} must name the same images, but they differ; unpack the archive again")
    order = sorted(classes)
    place = {key: i for i, key in enumerate(order)}
    wrong = next((key for key, label in labels.items() if not label.isdigit() or int(label) not in place), None)
    if wrong is not None:
        raise UserError(
            f"{folder / FILES[1]}: image {wrong} has the class {labels[wrong]!r}, which is not in classes.txt"
        )
    boxes = _read_boxes(folder / BOXES, names) if boxed else None
    if boxes is not None:
        _check_boxes(folder / BOXES, boxes, {key: folder / "images" / name for key, name in names.items()})
    size = image_size or _SIZE
    stored = scaled_to or (round(size * 8 / 7) if boxed else size)
    if stored < size:
        raise UserError(f"scaled_to must be at least the image size, {size}, but got {stored}")
    resident = len(names) * 3 * stored * stored <= memory_limit

    def images(*, is_test: bool) -> Images:
        kept = sorted(key for key, trains in part.items() if trains != is_test)
        numbers = np.array([place[int(labels[key])] for key in kept], np.int64)
        own = None if boxes is None else np.array([boxes[key] for key in kept], np.float64).reshape(-1, 4)
        paths = tuple(names[key] for key in kept)
        scan = Scan(folder / "images", tuple(classes[key] for key in order), paths, numbers, own)
        return images_of(scan, 3, (size, size), (stored, stored), is_test=is_test, resident=resident, whole=not boxed)

    return Dataset(
        BOXED if boxed else WHOLE,
        tuple(classes[key] for key in order),
        images(is_test=False),
        None if all(part.values()) else images(is_test=True),
        IMAGENET_MEAN,
        IMAGENET_STD,
        Augment(resized_crop=True, flip=True),
        "CUB-200-2011, Wah et al. 2011; the official split; "
        + ("the square around every bounding box" if boxed else "whole images, scaled to squares"),
        # Other pictures have no box: users of such a network pass the square itself.
        scaled_to=None if boxed else (stored, stored),
        whole=not boxed,
    )
