"""Fingerprints of a dataset's content, by which a resumed run knows that its data are those it began with.

Images in memory: the SHA-256 of all pixels and labels. Images that stay in files, which may be millions: names and
labels of all of them, sizes of up to 100,000 files and the contents of 64, both spread evenly; and apart from that the
modification times, which also change when a dataset is copied. A fingerprint is computed once per process and dataset.
"""

from __future__ import annotations

import hashlib
import math
from weakref import WeakKeyDictionary

import numpy as np
import torch

from softcell.data.dataset import Dataset
from softcell.data.images import Files, Images, Resident
from softcell.errors import UserError

MOST_STATED = 100_000
NUM_SAMPLED = 64
_BLOCK = 4096  # images hashed at a time
_known: WeakKeyDictionary[Images, dict[str, str]] = WeakKeyDictionary()


def content_of(dataset: Dataset) -> dict[str, str]:
    """By name the first 32 hex digits of digests of the training images.

    The test images have none: nothing reads them before the last epoch, and no step depends on them.
    """
    return {f"train_{key}": value for key, value in _content(dataset.train).items()}


def _content(images: Images) -> dict[str, str]:
    if images not in _known:
        _known[images] = _of_files(images) if isinstance(images, Files) else _of_pixels(images)
    return dict(_known[images])


def _of_pixels(images: Images) -> dict[str, str]:
    if not isinstance(images, Resident):
        return {"labels": _labels(images)}  # a user's own images, which may be costly to read
    total = hashlib.sha256(str((images.pixels.shape, images.shape)).encode())
    for block in torch.split(images.pixels, _BLOCK):
        total.update(np.ascontiguousarray(block.cpu().numpy()).data)
    return {"pixels": total.hexdigest()[:32], "labels": _labels(images)}


def _labels(images: Images) -> str:
    return hashlib.sha256(images.labels.cpu().numpy().astype("<i8").tobytes()).hexdigest()[:32]


def _of_files(images: Files) -> dict[str, str]:
    count = len(images)
    listed, times = hashlib.sha256(images.layout()), hashlib.sha256()
    for index in _spread(count, MOST_STATED):
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
    """At most `most` of `count` numbers, evenly spread: files are sorted by class, so these are of all classes."""
    return range(0, count, max(1, math.ceil(count / most)))
