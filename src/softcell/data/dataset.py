"""A dataset: training images, perhaps test images, and what is known about them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softcell.data.augment import Augment
from softcell.data.images import Files, Images, Resident
from softcell.data.splits import fingerprint, split
from softcell.errors import UserError

_STATISTICS_SAMPLE = 512  # images decoded for mean and std when not all are in memory
_SMALLEST_STD = 1 / 255  # of a channel that never varies
_SPLIT_SEED = 0
TEST_FRACTION = 0.2


@dataclass(frozen=True, slots=True)
class Dataset:
    """Images with the names of their classes.

    mean, std: per channel over the training images, in 0..1 units; std is at least 1/255.
    augment: what suits these images in training. source: one line on where they come from.
    test: never read in a search; see `softcell.data.guard`.
    scaled_to: (H', W') that a picture is scaled to before its centre is looked at, None where that is all of it.
    whole: whether all of a picture is scaled to that, whatever its aspect, or a central part of that aspect.

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
    """The images to take statistics of, in blocks uint8 [n, C, H, W]."""
    chosen = torch.arange(len(images))
    if isinstance(images, Files) and len(images) > _STATISTICS_SAMPLE:
        # Evenly spaced: files are sorted by class, so this is a sample of all classes.
        chosen = torch.arange(_STATISTICS_SAMPLE) * len(images) // _STATISTICS_SAMPLE
    for block in torch.split(chosen, size):
        yield images.fetch(block)


def statistics(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of each channel in 0..1 units, of all images (of 512 spread evenly when they are `Files`).

    Taken from a histogram of the 256 values: exact, whatever the number of images.
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
    """Train indices, test indices and a note on them, for data that comes without a test set.

    A fifth of `labels` int64 [N], stratified. The seed is fixed: the same data always has the same test set.
    """
    counts = np.bincount(labels, minlength=len(classes))
    if counts.min() < 2:
        rare = classes[int(counts.argmin())]
        raise UserError(
            f"without a test set every class needs at least 2 images, but class {rare!r} of {where} has "
            f"{counts.min()}; add images or give a test set"
        )
    num_test = max(round(TEST_FRACTION * len(labels)), len(classes))  # one of each class at least
    sizes = {"train": len(labels) - num_test, "test": num_test}
    parts = split(torch.from_numpy(labels), sizes, _SPLIT_SEED)
    note = f"test: a stratified {len(parts['test'])} of {len(labels)} images, split {fingerprint(parts['test'])}"
    return parts["train"], parts["test"], note


def check_fixed_size(name: str, image_size: int | None, actual: tuple[int, int]) -> None:
    """Raise UserError if another size is asked of images that are not resized."""
    if image_size is not None and (image_size, image_size) != actual:
        raise UserError(
            f"image_size only applies to image folders and imagenet, but got image_size={image_size} "
            f"for {name}, whose images are {actual[0]}x{actual[1]}; leave it out"
        )
