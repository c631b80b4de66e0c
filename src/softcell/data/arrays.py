"""A dataset from one .npz file: images and labels, or x_train, y_train, x_test and y_test."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from softcell.data.augment import Augment
from softcell.data.dataset import Dataset, from_arrays, hold_out_test
from softcell.errors import UserError

AnyArray = NDArray[np.generic]


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


def _channels_first(pixels: AnyArray, key: str, path: Path) -> AnyArray:
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


def _to_uint8(pixels: AnyArray, factor: int, key: str, path: Path) -> NDArray[np.uint8]:
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


def _labels(labels: AnyArray, num_images: int, key: str, path: Path) -> NDArray[np.int64]:
    if labels.shape == (num_images, 1):
        labels = labels[:, 0]
    if labels.dtype.kind not in "iu" or labels.shape != (num_images,):
        raise UserError(
            f"labels must be one whole number per image ({num_images}), but {key!r} of {path} is "
            f"{labels.dtype} {list(labels.shape)}"
        )
    return labels.astype(np.int64)


def _class_names(content: dict[str, AnyArray], labels: NDArray[np.int64], key: str, path: Path) -> tuple[str, ...]:
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
    content = _read(path)
    x_key, y_key = ("x_train", "y_train") if "x_train" in content else ("images", "labels")
    needed = {x_key, y_key} | ({"x_test", "y_test"} if {"x_test", "y_test"} & content.keys() else set())
    if needed - content.keys():
        raise UserError(
            f"an .npz file must have images and labels, or x_train, y_train, x_test and y_test, but "
            f"{path} has {sorted(content)} and lacks {sorted(needed - content.keys())}"
        )
    pixels = _channels_first(content[x_key], x_key, path)
    factor = _factor(pixels)
    train_pixels = _to_uint8(pixels, factor, x_key, path)
    train_labels = _labels(content[y_key], len(pixels), y_key, path)
    classes = _class_names(content, train_labels, y_key, path)
    if "x_test" in content:
        test_raw = _channels_first(content["x_test"], "x_test", path)
        # The training images' factor: a dark test set must not be scaled by another one.
        test_pixels = _to_uint8(test_raw, factor, "x_test", path)
        test_labels = _labels(content["y_test"], len(test_raw), "y_test", path)
        _check_test(train_pixels, test_pixels, test_labels, len(classes), path)
        note = "test: x_test"
    else:
        train, test, note = hold_out_test(train_labels, classes, str(path))
        test_pixels, test_labels = train_pixels[test.numpy()], train_labels[test.numpy()]
        train_pixels, train_labels = train_pixels[train.numpy()], train_labels[train.numpy()]
    return from_arrays(
        path.stem,
        classes,
        (train_pixels, train_labels),
        (test_pixels, test_labels),
        Augment(crop_padding=min(train_pixels.shape[2:]) // 8),
        f"array file {path.name}; {note}",
    )


def _check_test(
    train: NDArray[np.uint8], test: NDArray[np.uint8], labels: NDArray[np.int64], num_classes: int, path: Path
) -> None:
    if train.shape[1:] != test.shape[1:]:
        raise UserError(
            f"training and test images must have one shape, but in {path} they are "
            f"{list(train.shape[1:])} and {list(test.shape[1:])} (C, H, W)"
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise UserError(
            f"test labels must lie in 0..{num_classes - 1}, but 'y_test' of {path} has {labels.min()}..{labels.max()}"
        )
