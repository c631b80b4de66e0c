"""A dataset: training images, optional test images, their statistics, random subsets of classes, fingerprints."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softcell.data.augment import Augment
from softcell.data.images import Files, Images, Resident, gathered
from softcell.data.splits import fingerprint, split
from softcell.errors import UserError

_STATISTICS_SAMPLE = 512  # images decoded for mean and std when not all are in memory
_SMALLEST_STD = 1 / 255  # for a constant channel
_SPLIT_SEED = 0
TEST_FRACTION = 0.2
MAX_STATED = 100_000
"""Files whose sizes and times are part of a fingerprint (`content_of`)."""
NUM_SAMPLED = 64
"""Files whose contents are part of it."""
_BLOCK = 4096  # images hashed at a time


@dataclass(frozen=True, slots=True)
class Dataset:
    """Images with the names of their classes.

    mean, std: per channel over the training images, in 0..1 units; std is at least 1/255.
    augment: the default augmentation in training. source: one line on where the images come from.
    test: never read in a search; see `softcell.data.splits`.
    scaled_to: (H', W') that a picture is scaled to before its centre is taken; None if nothing is cut off.
    whole: whether the whole picture is scaled to that, changing its aspect, or a central part of that aspect.

    Example:
        >>> from softcell.data import load
        >>> digits = load("digits")
        >>> digits.shape, digits.num_classes, len(digits.train), len(digits.test)
        ((1, 8, 8), 10, 1347, 450)
    """

    name: str
    classes: tuple[str, ...]
    train: Images
    test: Images | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: Augment
    source: str
    scaled_to: tuple[int, int] | None = None
    whole: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""
        return self.train.shape

    @property
    def num_classes(self) -> int:
        return len(self.classes)


def _blocks(images: Images, size: int) -> Iterator[Tensor]:
    """The images for the statistics, in blocks uint8 [n, C, H, W]."""
    chosen = torch.arange(len(images))
    if isinstance(images, Files) and len(images) > _STATISTICS_SAMPLE:
        # Evenly spaced: files are sorted by class, so this is a sample of all classes.
        chosen = torch.arange(_STATISTICS_SAMPLE) * len(images) // _STATISTICS_SAMPLE
    for block in torch.split(chosen, size):
        yield images.fetch(block)


def statistics(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of each channel in 0..1 units, of all images (of 512 spread evenly when they are `Files`).

    Computed from a histogram of the 256 values, so exact for any number of images.
    """
    channels = images.shape[0]
    histogram = np.zeros((channels, 256), np.float64)
    for block in _blocks(images, size=512):
        for channel in range(channels):
            histogram[channel] += torch.bincount(block[:, channel].flatten().int(), minlength=256).numpy()
    weight = histogram / histogram.sum(1, keepdims=True)
    values = np.arange(256) / 255
    mean = weight @ values
    std = np.sqrt((weight * (values - mean[:, None]) ** 2).sum(1))
    return tuple(mean.tolist()), tuple(np.maximum(std, _SMALLEST_STD).tolist())


def from_arrays(
    name: str,
    classes: tuple[str, ...],
    train: tuple[NDArray[np.uint8], NDArray[np.int64]],
    test: tuple[NDArray[np.uint8], NDArray[np.int64]],
    augment: Augment,
    source: str,
) -> Dataset:
    """A dataset in memory from (pixels uint8 [N, C, H, W], labels int64 [N]) pairs."""
    images = [
        Resident(torch.from_numpy(np.ascontiguousarray(pixels)), torch.from_numpy(labels), is_test=is_test)
        for (pixels, labels), is_test in ((train, False), (test, True))
    ]
    mean, std = statistics(images[0])
    return Dataset(name, classes, images[0], images[1], mean, std, augment, source)


def hold_out_test(labels: NDArray[np.int64], classes: tuple[str, ...], where: str) -> tuple[Tensor, Tensor, str]:
    """Train indices, test indices and a note on them, for data without a test set.

    A fifth of `labels` int64 [N], stratified. The seed is fixed: the same data always has the same test set.
    """
    counts = np.bincount(labels, minlength=len(classes))
    if counts.min() < 2:
        rare = classes[int(counts.argmin())]
        raise UserError(
            f"without a test set every class needs at least 2 images, but class {rare!r} of {where} has "
            f"{counts.min()}; add images or pass a test set"
        )
    num_test = max(round(TEST_FRACTION * len(labels)), len(classes))  # at least one of each class
    sizes = {"train": len(labels) - num_test, "test": num_test}
    parts = split(torch.from_numpy(labels), sizes, _SPLIT_SEED)
    note = f"test: a stratified {len(parts['test'])} of {len(labels)} images, split {fingerprint(parts['test'])}"
    return parts["train"], parts["test"], note


def check_fixed_size(name: str, image_size: int | None, actual: tuple[int, int]) -> None:
    """Raise UserError if `image_size` differs from the size of images that are not resized."""
    if image_size is not None and (image_size, image_size) != actual:
        raise UserError(
            f"image_size only applies to image folders and imagenet, but got image_size={image_size} "
            f"for {name}, whose images are {actual[0]}x{actual[1]}; leave it out"
        )


@dataclass(frozen=True, slots=True)
class SomeClasses:
    """`number` classes, drawn at random by `seed`: 100 of ImageNet's 1,000, as several papers search on."""

    number: int
    seed: int = 0

    def draw(self, classes: Sequence[str], where: str) -> list[int]:
        """The numbers of the drawn classes, sorted."""
        if not 2 <= self.number <= len(classes):
            raise UserError(
                f"`2 <= classes <= {len(classes)}` must hold, the number of classes of {where}, but got "
                f"classes={self.number}; leave it out for all of them"
            )
        generator = torch.Generator().manual_seed(self.seed)
        return sorted(torch.randperm(len(classes), generator=generator)[: self.number].tolist())

    def about(self, total: int) -> str:
        return f"{self.number} of {total} classes, drawn with seed {self.seed}"


def with_some_classes(dataset: Dataset, some: SomeClasses) -> Dataset:
    """The images of some classes, numbered from 0 in order; mean and std stay those of all classes."""
    taken = some.draw(dataset.classes, dataset.name)
    return replace(
        dataset,
        classes=tuple(dataset.classes[number] for number in taken),
        train=_among(dataset.train, taken),
        test=None if dataset.test is None else _among(dataset.test, taken),
        source=f"{dataset.source}; {some.about(len(dataset.classes))}",
    )


def _among(images: Images, taken: Sequence[int]) -> Images:
    labels = images.labels.cpu()
    found = gathered([(images, torch.isin(labels, torch.tensor(taken)).nonzero().squeeze(1))], is_test=images.is_test)
    found.labels = renumbered(found.labels, taken)
    return found


def renumbered(labels: Tensor, taken: Sequence[int]) -> Tensor:
    """Labels int64 [n], all in the sorted `taken`, as indices into it."""
    return torch.searchsorted(torch.tensor(taken), labels)


_known: WeakKeyDictionary[Images, dict[str, str]] = WeakKeyDictionary()


def content_of(dataset: Dataset) -> dict[str, str]:
    """The fingerprint of the training images: by name the first 32 hex digits of a digest.

    A resumed run compares it with the one it began with. Images in memory: the SHA-256 of all pixels and labels.
    Images that stay in files, which may be millions: names and labels of all of them, sizes of up to 100,000 files and
    the contents of 64, both spread evenly; and separately the modification times, which also change when a dataset is
    copied. A fingerprint is computed once per process and dataset.

    The test images are not included: no step depends on them.
    """
    return {f"train_{key}": value for key, value in _content(dataset.train).items()}


def _content(images: Images) -> dict[str, str]:
    if images not in _known:
        _known[images] = _of_files(images) if isinstance(images, Files) else _of_pixels(images)
    return dict(_known[images])


def _of_pixels(images: Images) -> dict[str, str]:
    if not isinstance(images, Resident):
        return {"labels": _labels(images)}  # a user's own class, which may be slow to read
    total = hashlib.sha256(str((images.pixels.shape, images.shape)).encode())
    for block in torch.split(images.pixels, _BLOCK):
        total.update(np.ascontiguousarray(block.cpu().numpy()).data)
    return {"pixels": total.hexdigest()[:32], "labels": _labels(images)}


def _labels(images: Images) -> str:
    return hashlib.sha256(images.labels.cpu().numpy().astype("<i8").tobytes()).hexdigest()[:32]


def _of_files(images: Files) -> dict[str, str]:
    count = len(images)
    listed, times = hashlib.sha256(images.layout()), hashlib.sha256()
    for index in _spread(count, MAX_STATED):
        path = images.path(index)
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(f"{path}: an image of the dataset cannot be read ({error.strerror or error})") from error
        listed.update(f"{status.st_size},".encode())
        times.update(f"{status.st_mtime_ns},".encode())
    for index in _spread(count, NUM_SAMPLED):
        listed.update(hashlib.sha256(images.path(index).read_bytes()).digest())
    return {"files": listed.hexdigest()[:32], "labels": _labels(images), "times": times.hexdigest()[:32]}


def _spread(count: int, most: int) -> range:
    """At most `most` of `count` numbers, evenly spaced: files are sorted by class, so all classes are covered."""
    return range(0, count, max(1, math.ceil(count / most)))
