"""CUB-200-2011 in its official layout: 11,788 photographs of 200 kinds of birds.

Wah et al.: The Caltech-UCSD Birds-200-2011 Dataset, 2011. The folder has `images.txt` (number, path),
`image_class_labels.txt`, `classes.txt`, `train_test_split.txt` (1 for training), `images/` and `bounding_boxes.txt`
(left, top, width, height in pixels). As `cub200-boxes` every image is cropped to the square around its bird.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from softcell.data.augment import Augment
from softcell.data.dataset import Dataset
from softcell.data.decode import Box
from softcell.data.folder import Scan, images_of
from softcell.data.images import Images
from softcell.errors import UserError

FILES = ("images.txt", "image_class_labels.txt", "classes.txt", "train_test_split.txt")
BOXES = "bounding_boxes.txt"
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as the field uses
_SIZE = 448


def read_table(file: Path) -> dict[int, str]:
    """Lines of a number and a text."""
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


def read_boxes(file: Path, images: Iterable[int]) -> dict[int, Box]:
    """The boxes of all `images` by their number."""
    found: dict[int, Box] = {}
    for number, text in read_table(file).items():
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


def load_cub(root: Path, image_size: int | None, memory_limit: int, *, boxed: bool = False) -> Dataset:
    """`root` is CUB_200_2011/ or the folder above it; the official split, its second part being the test set.

    The short side is scaled to 8/7 of the image size and the central square kept; evaluation sees the centre of that,
    training takes random resized crops from it. `boxed`: of every image there is only the square around its bounding
    box, an eighth of it as a margin, so that evaluation sees just the square.
    """
    folder = root if (root / FILES[0]).is_file() else root / "CUB_200_2011"
    for name in (*FILES, BOXES) if boxed else FILES:
        if not (folder / name).is_file():
            raise UserError(
                f"cub200 must have {', '.join((*FILES, BOXES))} and images/ in {root} or {folder}, but {name} "
                "is missing; see https://www.vision.caltech.edu/datasets/cub_200_2011"
            )
    names, labels, classes, part = (read_table(folder / name) for name in FILES)
    if not (names.keys() == labels.keys() == part.keys()):
        raise UserError(f"the tables of {folder} must name the same images, but they differ; unpack the archive again")
    order = sorted(classes)
    place = {key: i for i, key in enumerate(order)}
    wrong = next((key for key, label in labels.items() if not label.isdigit() or int(label) not in place), None)
    if wrong is not None:
        raise UserError(
            f"{folder / FILES[1]}: image {wrong} has the class {labels[wrong]!r}, which classes.txt has not"
        )
    boxes = read_boxes(folder / BOXES, names) if boxed else None
    size = image_size or _SIZE
    stored = round(size * 8 / 7)
    resident = len(names) * 3 * stored * stored <= memory_limit

    def images(wanted: str) -> Images:
        kept = sorted(key for key, which in part.items() if which.strip() == wanted)
        numbers = np.array([place[int(labels[key])] for key in kept], np.int64)
        own = None if boxes is None else np.array([boxes[key] for key in kept], np.float64).reshape(-1, 4)
        paths = tuple(names[key] for key in kept)
        scan = Scan(folder / "images", tuple(classes[key] for key in order), paths, numbers, own)
        is_test = wanted == "0"
        return images_of(scan, 3, (size, size), (stored, stored), is_test=is_test, resident=resident)

    return Dataset(
        "cub200-boxes" if boxed else "cub200",
        tuple(classes[key] for key in order),
        images("1"),
        images("0"),
        _MEAN,
        _STD,
        Augment(resized_crop=True, flip=True),
        "CUB-200-2011, Wah et al. 2011; the official split; "
        + ("the square around every bounding box" if boxed else "bounding boxes not used"),
    )
