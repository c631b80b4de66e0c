"""A dataset from arrays: an .npz file, or arrays, tensors and torch datasets of a Python program.

An .npz file has `images` and `labels`, or `x_train`, `y_train`, `x_test` and `y_test`. Data in memory is written to
such a file first (`keep_arrays`): a run names its data by a path, so that any other process can resume or repeat it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softcell.data.augment import Augment
from softcell.data.dataset import Dataset, from_arrays, hold_out_test
from softcell.errors import UserError

AnyArray = NDArray[np.generic]
MAX_BYTES = 4 * 1024**3
"""Of the images of a torch dataset, which are read into memory."""
_KINDS = (
    "(images, labels) as arrays or tensors, a torch dataset, or a mapping with `train`, `test` and `classes` or with "
    "the names of an .npz file"
)


def _read(path: Path) -> dict[str, AnyArray]:
    try:
        # Opened here, because numpy leaves the file open when it is not a zip archive.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as content:
            return {key: content[key] for key in content.files}
    except Exception as error:
        # zipfile, zlib and numpy raise many types on damaged files, and ValueError on pickled objects.
        raise UserError(
            f"an .npz file must be whole and hold plain arrays, but {path} is not readable "
            f"({type(error).__name__}: {error}); write it with numpy.savez"
        ) from error


def _channels_first(pixels: AnyArray, key: str, path: Path | str) -> AnyArray:
    """Images [N, C, H, W] with C = 1 or 3, from grey [N, H, W], [N, H, W, C] or [N, C, H, W]."""
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif pixels.ndim == 4 and (pixels.shape[1] in (1, 3)) != (pixels.shape[3] in (1, 3)):
        pixels = pixels if pixels.shape[1] in (1, 3) else pixels.transpose(0, 3, 1, 2)
    else:
        raise UserError(
            f"images must be [N, H, W], [N, H, W, C] or [N, C, H, W] with C = 1 or 3 in one place, "
            f"but {key!r} of {path} is {list(pixels.shape)}; reshape it"
        )
    if 0 in pixels.shape:
        raise UserError(f"there must be at least one image, but {key!r} of {path} is {list(pixels.shape)}")
    return pixels


def _factor(pixels: AnyArray) -> int:
    """The factor that scales the values to 0..255: 255 for booleans and for floats in 0..1, else 1."""
    if pixels.dtype.kind == "b":
        return 255
    return 255 if pixels.dtype.kind == "f" and float(pixels.max()) <= 1 else 1


def _to_uint8(pixels: AnyArray, factor: int, key: str, path: Path | str) -> NDArray[np.uint8]:
    """The values times `factor`, rounded, uint8 of the same shape."""
    if pixels.dtype == np.uint8:
        return pixels.astype(np.uint8, copy=False)
    if pixels.dtype.kind not in "biuf":
        raise UserError(f"images must be numbers, but {key!r} of {path} is {pixels.dtype}")
    values = pixels.astype(np.float64) * factor
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 255):  # written so that NaN fails too
        raise UserError(
            f"images must be 0..255, or floats in 0..1 throughout, but {key!r} of {path} has "
            f"{low / factor:g}..{high / factor:g}; scale it"
        )
    return np.rint(values).astype(np.uint8)


def _labels(labels: AnyArray, num_images: int, key: str, path: Path | str) -> NDArray[np.int64]:
    if labels.shape == (num_images, 1):
        labels = labels[:, 0]
    if labels.dtype.kind not in "iu" or labels.shape != (num_images,):
        raise UserError(
            f"labels must be one whole number per image ({num_images}), but {key!r} of {path} is "
            f"{labels.dtype} {list(labels.shape)}"
        )
    return labels.astype(np.int64)


def _class_names(
    content: Mapping[str, AnyArray], labels: NDArray[np.int64], key: str, path: Path | str
) -> tuple[str, ...]:
    """Names from the array 'classes' if there is one, else the numbers; every class must have an image."""
    names = tuple(str(name) for name in content["classes"].ravel()) if "classes" in content else None
    present = np.unique(labels)
    number = len(names) if names else int(present[-1]) + 1
    # Counted before they are listed: a single label of 10⁹ would ask for 8 GB.
    if number < 2 or len(present) != number or not np.array_equal(present, np.arange(number)):
        raise UserError(
            f"labels must be 0..K-1 with K >= 2 and every class present, but {key!r} of {path} has "
            f"{len(present)} values from {present[0]} to {present[-1]}"
            + (f" for {number} names in 'classes'" if names else "")
            + "; number the classes from 0 without gaps"
        )
    return names or tuple(str(label) for label in range(number))


def load_npz(path: Path) -> Dataset:
    """The dataset in the file at `path`; without x_test and y_test a fifth is held out, see `hold_out_test`.

    Values are uint8, or any numbers in 0..255, or floats in 0..1. An array 'classes' of strings may name the
    classes. Images are not mirrored by default: such files often hold digits or other signs.
    """
    found = _checked(_read(path), path)
    pixels, labels, classes = found["x_train"], found["y_train"], tuple(map(str, found["classes"]))
    if "x_test" in found:
        test_pixels, test_labels, note = found["x_test"], found["y_test"], "test: x_test"
    else:
        train, test, note = hold_out_test(labels, classes, str(path))
        test_pixels, test_labels = pixels[test.numpy()], labels[test.numpy()]
        pixels, labels = pixels[train.numpy()], labels[train.numpy()]
    return from_arrays(
        path.stem,
        classes,
        (pixels, labels),
        (test_pixels, test_labels),
        Augment(crop_padding=min(pixels.shape[2:]) // 8),
        f"array file {path.name}; {note}",
    )


def _checked(content: Mapping[str, AnyArray], path: Path | str) -> dict[str, Any]:
    """x_train uint8 [N, C, H, W], y_train int64 [N], classes str [K], and x_test and y_test if there are any."""
    x_key, y_key = ("x_train", "y_train") if "x_train" in content else ("images", "labels")
    needed = {x_key, y_key} | ({"x_test", "y_test"} if {"x_test", "y_test"} & content.keys() else set())
    if needed - content.keys():
        kind = "an .npz file" if isinstance(path, Path) else path
        raise UserError(
            f"{kind} must have images and labels, or x_train, y_train, x_test and y_test, but "
            f"{path} has {sorted(content)} and lacks {sorted(needed - content.keys())}"
        )
    pixels = _channels_first(content[x_key], x_key, path)
    factor = _factor(pixels)
    labels = _labels(content[y_key], len(pixels), y_key, path)
    classes = _class_names(content, labels, y_key, path)
    found: dict[str, Any] = {"x_train": _to_uint8(pixels, factor, x_key, path), "y_train": labels}
    found["classes"] = np.array(classes)
    if "x_test" in content:
        test = _channels_first(content["x_test"], "x_test", path)
        # The training images' factor: a dark test set must not be scaled by another one.
        found["x_test"] = _to_uint8(test, factor, "x_test", path)
        found["y_test"] = _labels(content["y_test"], len(test), "y_test", path)
        _check_test(found["x_train"], found["x_test"], found["y_test"], len(classes), path)
    return found


def _check_test(
    train: NDArray[np.uint8], test: NDArray[np.uint8], labels: NDArray[np.int64], num_classes: int, path: Path | str
) -> None:
    if train.shape[1:] != test.shape[1:]:
        raise UserError(
            f"training and test images must have one shape, but in {path} they are "
            f"{list(train.shape[1:])} and {list(test.shape[1:])} (C, H, W)"
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise UserError(
            f"test labels must be in 0..{num_classes - 1}, but 'y_test' of {path} has {labels.min()}..{labels.max()}"
        )


def keep_arrays(data: Any, folder: Path) -> Path:
    """Writes images in memory to `folder`/NAME-DIGEST.npz and returns the path; the same images give the same file.

    data: (images, labels) as arrays or tensors, in any form that an .npz file may hold them; or a torch dataset of
        (image, label) pairs, whose images are arrays, tensors or PIL images of one size, without random augmentation
        or normalisation, because every item is read once. Or a mapping: `train` and perhaps `test`, each one of these,
        and perhaps `classes`, their names; or arrays by the names of an .npz file.

    Example:
        >>> import numpy as np
        >>> from pathlib import Path
        >>> from softcell.data import keep_arrays, load
        >>> images, labels = np.random.default_rng(0).random((40, 8, 8)), np.arange(40) % 2
        >>> file = keep_arrays((images, labels), Path("."))
        >>> load(file).shape, len(load(file).train), keep_arrays((images, labels), Path(".")) == file
        ((1, 8, 8), 32, True)
    """
    kept = KeptArrays.of(data, folder)
    kept.write()
    return kept.path


@dataclass(frozen=True, slots=True)
class KeptArrays:
    """Checked arrays and the file that is to hold them; nothing is written before `write`."""

    path: Path
    content: Mapping[str, AnyArray]

    @classmethod
    def of(cls, data: Any, folder: Path) -> KeptArrays:
        """The arrays of `data` (see `keep_arrays`) and the path derived from their content."""
        name, content = _content(data)
        found = _checked(content, "the given data")
        digest = hashlib.sha256()
        for key in sorted(found):
            array = np.ascontiguousarray(found[key])
            digest.update(f"{key} {array.dtype.str} {array.shape}".encode())
            digest.update(array.data if array.dtype.kind != "U" else "\0".join(array).encode())
        return cls(folder / f"{name}-{digest.hexdigest()[:16]}.npz", found)

    def write(self) -> None:
        """Writes the file unless it exists."""
        if self.path.exists():
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")  # same folder: an atomic rename
        try:
            with open(partial, "wb") as stream:
                np.savez(stream, **self.content)  # type: ignore[arg-type]
            os.replace(partial, self.path)
        finally:
            partial.unlink(missing_ok=True)


def _content(data: Any) -> tuple[str, dict[str, AnyArray]]:
    """A name for the data, and their arrays by the names of an .npz file."""
    if isinstance(data, Mapping) and "train" not in data:
        return "arrays", {str(key): _array(value) for key, value in data.items()}
    parts = dict(data) if isinstance(data, Mapping) else {"train": data}
    unknown = parts.keys() - {"train", "test", "classes"}
    if unknown:
        raise UserError(f"data must be {_KINDS}, but got the key {min(unknown)!r} in addition to 'train'; leave it out")
    name, images, labels, classes = _pair(parts["train"])
    content = {"x_train": images, "y_train": labels}
    if parts.get("test") is not None:
        _, content["x_test"], content["y_test"], _ = _pair(parts["test"])
    given = parts.get("classes", classes)
    if given is not None:
        content["classes"] = np.array([str(one) for one in given])
    return name, content


def _pair(data: Any) -> tuple[str, AnyArray, AnyArray, Iterable[str] | None]:
    """Name, images [N, ...], labels [N] and names of the classes of one part."""
    if isinstance(data, tuple | list):
        if len(data) != 2:
            raise UserError(f"data must be {_KINDS}, but got {type(data).__name__} of {len(data)} items")
        return "arrays", _array(data[0]), _array(data[1]), None
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or isinstance(data, str | np.ndarray | Tensor):
        raise UserError(f"data must be {_KINDS}, but got {type(data).__name__}")
    inner = data
    while hasattr(inner, "dataset"):  # torch's `Subset`
        inner = inner.dataset
    images, labels = [], []
    for number in range(len(data)):
        item = data[number]
        if not isinstance(item, tuple | list) or len(item) < 2:
            raise UserError(f"a torch dataset must yield (image, label) pairs, but item {number} is {item!r:.60}")
        images.append(_array(item[0]))
        try:
            labels.append(int(item[1]))
        except (TypeError, ValueError):
            raise UserError(f"labels must be whole numbers, but item {number} has {item[1]!r:.60}") from None
        if number == 0 and len(data) * images[0].nbytes > MAX_BYTES:
            raise UserError(
                f"a torch dataset is read into memory, up to {MAX_BYTES / 2**30:.0f} GiB, but {len(data):,} images "
                f"need {len(data) * images[0].nbytes / 2**30:.1f} GiB; pass a folder of CLASS/IMAGE files instead"
            )
        if images[-1].shape != images[0].shape:
            raise UserError(
                f"all images must have one size, but image 0 is {list(images[0].shape)} and image {number} "
                f"{list(images[-1].shape)}; resize them"
            )
    if not images:
        raise UserError("a dataset must have at least one image, but it is empty")
    return type(inner).__name__.lower(), np.stack(images), np.array(labels), getattr(inner, "classes", None)


def _array(value: Any) -> AnyArray:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
    found = np.asarray(value)
    if found.dtype == object:
        raise UserError(f"data must be {_KINDS}, but got a {type(value).__name__} that is not an array of numbers")
    return found
