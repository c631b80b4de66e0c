"""Folders of images of any kind and size: one folder per class, ImageNet, or images without classes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from softcell.data.augment import Augment
from softcell.data.dataset import Dataset, SomeClasses, hold_out_test, renumbered, statistics
from softcell.data.images import SUFFIXES, Files, Images, Resident, box_of, decode, read_header
from softcell.errors import UserError

MEMORY_LIMIT = 4 * 1024**3
"""Bytes of pixels up to which the images of a folder are held in memory."""
# The values the field uses; taking them from 1.3 million files on every start would cost minutes.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_IMAGENET_SIZE = 224
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
