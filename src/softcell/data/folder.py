"""Datasets whose images are files: a folder per class, images without classes, ImageNet and CUB-200-2011."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from softcell.data.augment import Augment
from softcell.data.dataset import Dataset, SomeClasses, hold_out_test, renumbered, statistics
from softcell.data.images import SUFFIXES, Box, Files, Images, Resident, box_of, decode, read_header
from softcell.errors import UserError

MEMORY_LIMIT = 4 * 1024**3
"""Bytes of pixels up to which the images of a folder are held in memory."""
# The values the field uses; taking them from 1.3 million files on every start would cost minutes.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_IMAGENET_SIZE = 224
CUB, CUB_BOXES = CUB_NAMES = ("cub200", "cub200-boxes")
_CUB_TABLES = ("images.txt", "image_class_labels.txt", "classes.txt", "train_test_split.txt")
_BOX_TABLE = "bounding_boxes.txt"
_CUB_SIZE = 448
_TEST_FOLDERS = ("test", "val")
_SMALLEST, _LARGEST, _STEP = 32, 224, 8  # limits and step of a chosen size


@dataclass(frozen=True, slots=True)
class Scan:
    """The image files under `root`, sorted by class and name: names [N] relative to it, labels int64 [N].

    boxes: float [N, 4], see `softcell.data.images.Files`.
    """

    root: Path
    classes: tuple[str, ...]
    names: tuple[str, ...]
    labels: NDArray[np.int64]
    boxes: NDArray[np.float64] | None = None

    def take(self, indices: NDArray[np.int64]) -> Scan:
        names = tuple(self.names[index] for index in indices.tolist())
        boxes = None if self.boxes is None else self.boxes[indices]
        return Scan(self.root, self.classes, names, self.labels[indices], boxes)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of `folder`, sorted by name, without hidden ones."""
    try:
        with os.scandir(folder) as found:
            return sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        raise UserError(f"image folders must be readable, but {folder} is not ({error.strerror})") from error


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.is_file() and os.path.splitext(entry.name)[1].lower() in SUFFIXES


def scan(root: Path, classes: tuple[str, ...] | None = None) -> Scan:
    """Find the images in the class folders of `root`; with `classes` given, these are the ones allowed."""
    entries = _entries(root)
    stray = next((entry.name for entry in entries if _is_image(entry)), None)
    if stray is not None:
        raise UserError(f"every image must be in the folder of its class, but {root / stray} is not; move it into one")
    folders = [entry.name for entry in entries if entry.is_dir()]
    if classes is None:
        classes = tuple(folders)
        if len(classes) < 2:
            raise UserError(
                f"an image folder must have at least 2 class folders, but {root} has {list(classes)}; "
                "lay it out as CLASS/IMAGE or train/CLASS/IMAGE and test/CLASS/IMAGE"
            )
    number_of = {name: number for number, name in enumerate(classes)}
    names: list[str] = []
    labels: list[int] = []
    ignored: list[str] = []
    for folder in folders:
        if folder not in number_of:
            raise UserError(
                f"test classes must be among the training classes, but {root / folder} is not; "
                "rename the folder or add training images"
            )
        inside = _entries(root / folder)
        found = [f"{folder}/{entry.name}" for entry in inside if _is_image(entry)]
        ignored += [f"{folder}/{entry.name}" for entry in inside if not _is_image(entry)]
        if not found:
            raise UserError(
                f"every class folder must hold an image ({', '.join(sorted(SUFFIXES))}), but "
                f"{root / folder} has none; add images or remove the folder"
            )
        names += found
        labels += [number_of[folder]] * len(found)
    if not names:
        raise UserError(f"an image folder must hold images in class folders, but {root} holds none")
    if ignored:
        more = f" and {len(ignored) - 1:,} more" if len(ignored) > 1 else ""
        warnings.warn(
            f"entries that are not images are ignored: {ignored[0]}{more} in {root}",
            stacklevel=2,
        )
    return Scan(root, classes, tuple(names), np.array(labels, np.int64))


def images_of(
    part: Scan,
    channels: int,
    size: tuple[int, int],
    stored: tuple[int, int],
    *,
    is_test: bool,
    resident: bool,
    whole: bool = False,
) -> Images:
    """The scanned images decoded to `stored`, all of each if `whole`, and seen at `size`, in memory if `resident`."""
    labels = torch.from_numpy(part.labels)
    if not resident:
        return Files(
            part.root,
            part.names,
            labels,
            channels=channels,
            size=size,
            stored=stored,
            is_test=is_test,
            boxes=part.boxes,
            whole=whole,
        )
    pixels = np.empty((len(part.names), channels, *stored), np.uint8)
    margin = stored[0] / size[0]

    def fill(number: int) -> None:
        box = box_of(part.boxes, number)
        pixels[number] = decode(part.root / part.names[number], channels, stored, box, margin, whole=whole)

    # Threads, because decoders release the interpreter lock; `map` raises the first error in file order.
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(fill, range(len(part.names))):
            pass
    return Resident(torch.from_numpy(pixels), labels, is_test=is_test, view=size)


def choose_size(sizes: list[tuple[int, int]]) -> tuple[tuple[int, int], str]:
    """The (height, width) to use for images of these sizes, and a note that says so.

    The common size if there is one; else a square of the median short side, in steps of 8, from 32 to 224.
    """
    height, width = sizes[0]
    if all(size == (height, width) for size in sizes):
        return (height, width), f"all images are {height}x{width}"
    middle = median(min(size) for size in sizes)
    side = min(max(int(middle / _STEP + 0.5) * _STEP, _SMALLEST), _LARGEST)
    return (
        side,
        side,
    ), f"sizes differ: scaled and centre-cropped to {side}x{side}, from a median short side of {middle:g}"


def is_split(root: Path) -> bool:
    """Whether `root`/train holds class folders; a class that happens to be called train holds images."""
    if not (root / "train").is_dir():
        return False
    inside = _entries(root / "train")
    return any(entry.is_dir() for entry in inside) and not any(_is_image(entry) for entry in inside)


def _parts(root: Path) -> tuple[Scan, Scan, str]:
    """Training files, test files and a note on the test set."""
    if not is_split(root):
        whole = scan(root)
    else:
        whole = scan(root / "train")
        present = [name for name in _TEST_FOLDERS if (root / name).is_dir()]
        if present:
            if len(present) > 1:
                warnings.warn(f"{root / present[1]} is not used: {present[0]}/ is the test set", stacklevel=2)
            return whole, scan(root / present[0], classes=whole.classes), f"test: {present[0]}/"
    train, test, note = hold_out_test(whole.labels, whole.classes, str(root))
    return whole.take(train.numpy()), whole.take(test.numpy()), note


def load_folder(root: Path, image_size: int | None, memory_limit: int) -> Dataset:
    """`root` has one folder per class, or train/ and perhaps test/ (or val/) that have them.

    All images become grey only if all of them have a grey mode; all become `image_size` square, or as in
    `choose_size`. They are held in memory if they fit into `memory_limit` bytes, else decoded when read.
    """
    train, test, note = _parts(root)
    found = _of_one_size(root.name, train, test, image_size, memory_limit)
    return replace(found, source=f"image folder {root.name}; {found.source}; {note}")


def _of_one_size(name: str, train: Scan, test: Scan | None, image_size: int | None, memory_limit: int) -> Dataset:
    """The scanned images, all with one number of channels and one size; its source is a note on that size."""
    headers = [read_header(part.root / file) for part in (train, test) if part is not None for file in part.names]
    channels = 1 if all(header.grey for header in headers) else 3
    if image_size is None:
        size, note = choose_size([(header.height, header.width) for header in headers])
    else:
        size, note = (image_size, image_size), f"scaled and centre-cropped to {image_size}x{image_size}"
    resident = len(headers) * channels * size[0] * size[1] <= memory_limit
    images = images_of(train, channels, size, size, is_test=False, resident=resident)
    tests = None if test is None else images_of(test, channels, size, size, is_test=True, resident=resident)
    augment = Augment(crop_padding=min(size) // 8, flip=True)
    return Dataset(name, train.classes, images, tests, *statistics(images), augment, note)


def load_imagenet(root: Path, image_size: int | None, memory_limit: int, some: SomeClasses | None = None) -> Dataset:
    """`root` has train/ and val/ with one folder per class, or is the one above imagenet/ that has them.

    The short side is scaled to 8/7 of the image size (256 for 224) and the central square is kept; evaluation
    sees the centre of that, training takes random resized crops from it. With `some`, only files of these classes are
    decoded.
    """
    folder = root if (root / "train").is_dir() else root / "imagenet"
    for part in ("train", "val"):
        if not (folder / part).is_dir():
            raise UserError(
                f"imagenet must have the folders train/ and val/ with one folder per class, but "
                f"{folder / part} is missing; see https://www.image-net.org"
            )
    train = scan(folder / "train")
    test = scan(folder / "val", classes=train.classes)
    source = "ImageNet ILSVRC 2012, https://www.image-net.org (for non-commercial research); val/ is the test set"
    if some is not None:
        source += f"; {some.about(len(train.classes))}"
        taken = some.draw(train.classes, "imagenet")
        train, test = _scan_some_classes(train, taken), _scan_some_classes(test, taken)
    size = image_size or _IMAGENET_SIZE
    stored = round(size * 8 / 7)
    num_bytes = (len(train.names) + len(test.names)) * 3 * stored * stored

    def images(part: Scan, is_test: bool) -> Images:
        return images_of(part, 3, (size, size), (stored, stored), is_test=is_test, resident=num_bytes <= memory_limit)

    return Dataset(
        "imagenet",
        train.classes,
        images(train, False),
        images(test, True),
        IMAGENET_MEAN,
        IMAGENET_STD,
        Augment(resized_crop=True, flip=True, jitter=0.4),
        source,
        scaled_to=(stored, stored),
    )


def _scan_some_classes(part: Scan, taken: Sequence[int]) -> Scan:
    """The files of the classes `taken`, numbered from 0, before they are decoded."""
    kept = part.take(np.flatnonzero(np.isin(part.labels, taken)))
    numbers = renumbered(torch.from_numpy(kept.labels), taken)
    return replace(kept, classes=tuple(part.classes[number] for number in taken), labels=numbers.numpy())


def load_unlabelled(root: Path, image_size: int | None) -> Dataset:
    """All images below `root`, at any depth, without labels; only those below train/ if that has class folders.

    Sizes and colours are chosen as for a folder with classes. There is one class, and no test set.
    """
    top = root / "train" if is_split(root) else root
    names = []
    for folder, inner, files in os.walk(top):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        names += [
            str((Path(folder) / name).relative_to(top))
            for name in sorted(files)
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES
        ]
    if len(names) < 2:
        raise UserError(
            f"a folder of images must hold at least 2 images ({', '.join(sorted(SUFFIXES))}), but {root} holds "
            f"{len(names)}"
        )
    part = Scan(top, ("image",), tuple(names), np.zeros(len(names), np.int64))
    found = _of_one_size(root.name, part, None, image_size, MEMORY_LIMIT)
    return replace(found, source=f"{len(names)} images below {root.name}, without labels; {found.source}")


def _read_table(file: Path) -> dict[int, str]:
    """A table of CUB-200-2011: a number and a text per line."""
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
    """CUB-200-2011 in its official layout; without a test set if all images are for training.

    Wah et al.: The Caltech-UCSD Birds-200-2011 Dataset, 2011: 11,788 photographs of 200 kinds of birds. `root` is
    CUB_200_2011/ or the folder above it. It has `images.txt` (number, path), `image_class_labels.txt`, `classes.txt`,
    `train_test_split.txt` (1 for training), `images/` and `bounding_boxes.txt` (left, top, width, height in pixels).
    Every whole image is scaled to a square of `scaled_to` pixels, by default the image size (full-attention NAS, §IV-E:
    448; §IV-F: 256, cropped to 227). Evaluation uses the centre of that, training takes random crops. `boxed`:
    only the square around the bounding box is kept, with a margin (by default 8/7), so that evaluation uses exactly
    that square.
    """
    folder = root if (root / _CUB_TABLES[0]).is_file() else root / "CUB_200_2011"
    for name in (*_CUB_TABLES, _BOX_TABLE) if boxed else _CUB_TABLES:
        if not (folder / name).is_file():
            raise UserError(
                f"cub200 must have {', '.join((*_CUB_TABLES, _BOX_TABLE))} and images/ in {root} or {folder}, but "
                f"{name} is missing; see https://www.vision.caltech.edu/datasets/cub_200_2011"
            )
    names, labels, classes = (_read_table(folder / name) for name in _CUB_TABLES[:3])
    part = _read_parts(folder / _CUB_TABLES[3])
    if not (names.keys() == labels.keys() == part.keys()):
        raise UserError(f"the tables of {folder} must name the same images, but they differ; unpack the archive again")
    order = sorted(classes)
    place = {key: i for i, key in enumerate(order)}
    wrong = next((key for key, label in labels.items() if not label.isdigit() or int(label) not in place), None)
    if wrong is not None:
        raise UserError(
            f"{folder / _CUB_TABLES[1]}: image {wrong} has the class {labels[wrong]!r}, which is not in classes.txt"
        )
    boxes = _read_boxes(folder / _BOX_TABLE, names) if boxed else None
    if boxes is not None:
        _check_boxes(folder / _BOX_TABLE, boxes, {key: folder / "images" / name for key, name in names.items()})
    size = image_size or _CUB_SIZE
    stored = scaled_to or (round(size * 8 / 7) if boxed else size)
    if stored < size:
        raise UserError(f"scaled_to must be at least the image size, {size}, but got {stored}")
    resident = len(names) * 3 * stored * stored <= memory_limit

    def images(*, is_test: bool) -> Images:
        kept = sorted(key for key, trains in part.items() if trains != is_test)
        numbers = np.array([place[int(labels[key])] for key in kept], np.int64)
        own = None if boxes is None else np.array([boxes[key] for key in kept], np.float64).reshape(-1, 4)
        paths = tuple(names[key] for key in kept)
        birds = Scan(folder / "images", tuple(classes[key] for key in order), paths, numbers, own)
        return images_of(birds, 3, (size, size), (stored, stored), is_test=is_test, resident=resident, whole=not boxed)

    return Dataset(
        CUB_BOXES if boxed else CUB,
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
