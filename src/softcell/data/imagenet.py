"""ImageNet: the ILSVRC 2012 folders, and its first 120 classes at 16 x 16 as NAS-Bench-201 uses them."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from softcell.data.augment import Augment
from softcell.data.dataset import Dataset, from_arrays
from softcell.data.folder import Scan, images_of, scan
from softcell.data.images import Images
from softcell.data.pickles import check_labels, read_batch
from softcell.data.subset import SomeClasses, scan_some_classes
from softcell.errors import UserError

# The values the field uses; taking them from 1.3 million files on every start would cost minutes.
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)
_SIZE = 224


def load_imagenet(root: Path, image_size: int | None, memory_limit: int, some: SomeClasses | None = None) -> Dataset:
    """`root` has train/ and val/ with one folder per class, or is the one above imagenet/ that has them.

    The short side is scaled to 8/7 of the image size (256 for 224) and the central square is kept; evaluation
    sees the centre of that, training takes random resized crops from it. Of some classes alone files are decoded.
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
        train, test = scan_some_classes(train, taken), scan_some_classes(test, taken)
    size = image_size or _SIZE
    stored = round(size * 8 / 7)
    num_bytes = (len(train.names) + len(test.names)) * 3 * stored * stored

    def images(part: Scan, is_test: bool) -> Images:
        return images_of(part, 3, (size, size), (stored, stored), is_test=is_test, resident=num_bytes <= memory_limit)

    return Dataset(
        "imagenet",
        train.classes,
        images(train, False),
        images(test, True),
        _MEAN,
        _STD,
        Augment(resized_crop=True, flip=True, jitter=0.4),
        source,
        scaled_to=(stored, stored),
    )


def _read_batches(paths: list[Path], num_classes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels uint8 [N, 3, 16, 16] and labels int64 [N] from 0 of the first `num_classes` classes."""
    rows, numbers = [], []
    for path in paths:
        if not path.is_file():
            raise UserError(f"imagenet16-120 must be complete, but {path} is missing; unpack the whole archive")
        data, labels = read_batch(path, "labels", 3 * 16 * 16)
        check_labels(labels, 1, 1000, path)
        kept = labels <= num_classes
        rows.append(data[kept])
        numbers.append(labels[kept] - 1)
    return np.concatenate(rows).reshape(-1, 3, 16, 16), np.concatenate(numbers)


def load_imagenet16(root: Path, num_classes: int = 120) -> Dataset:
    """`root` is the folder with train_data_batch_1 to 10 and val_data, or the one above ImageNet16/."""
    folder = root if (root / "train_data_batch_1").is_file() else root / "ImageNet16"
    if not (folder / "train_data_batch_1").is_file():
        raise UserError(
            f"imagenet16-120 must have train_data_batch_1 to 10 and val_data, but they are neither in "
            f"{root} nor in {folder}; see https://www.image-net.org/download-images (downsampled, 16 x 16)"
        )
    train = _read_batches([folder / f"train_data_batch_{number}" for number in range(1, 11)], num_classes)
    test = _read_batches([folder / "val_data"], num_classes)
    missing = set(range(num_classes)) - set(np.unique(train[1]).tolist())
    if missing:
        raise UserError(
            f"imagenet16-120 must have images of the classes 1..{num_classes}, but {folder} has none of "
            f"class {min(missing) + 1}; unpack the whole archive"
        )
    return from_arrays(
        f"imagenet16-{num_classes}",
        tuple(str(number) for number in range(1, num_classes + 1)),
        train,
        test,
        Augment(crop_padding=2, flip=True),  # as in NAS-Bench-201
        "downsampled ImageNet 16 x 16, Chrabaszcz et al. 2017, first 120 classes; val_data is the test set",
    )
