"""CIFAR-10 and CIFAR-100 (A. Krizhevsky, 2009), from the official binary or Python archives, unpacked."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from softcell.data.augment import Augment
from softcell.data.dataset import Dataset, from_arrays
from softcell.data.pickles import check_labels, read_batch
from softcell.errors import UserError

Part = tuple[NDArray[np.uint8], NDArray[np.int64]]

_PIXELS = 3 * 32 * 32
# Images per file; a file cut short at the end of a record could not be told from a whole one otherwise.
RECORDS = {"data_batch": 10_000, "test_batch": 10_000, "train": 50_000, "test": 10_000}

_CLASSES_10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CLASSES_100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


@dataclass(frozen=True, slots=True)
class _Layout:
    """How one of the two datasets lies on disk."""

    name: str
    classes: tuple[str, ...]
    binary_folder: str
    python_folder: str
    train: tuple[str, ...]
    test: str
    label_bytes: int  # in front of the pixels of a binary record; the last one is the label
    label_key: str


_LAYOUTS = {
    "cifar10": _Layout(
        name="cifar10",
        classes=tuple(_CLASSES_10.split()),
        binary_folder="cifar-10-batches-bin",
        python_folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test="test_batch",
        label_bytes=1,
        label_key="labels",
    ),
    "cifar100": _Layout(
        name="cifar100",
        classes=tuple(_CLASSES_100.split()),
        binary_folder="cifar-100-binary",
        python_folder="cifar-100-python",
        train=("train",),
        test="test",
        label_bytes=2,  # coarse, then fine
        label_key="fine_labels",
    ),
}


def _check_number(path: Path, found: int) -> None:
    expected = next(count for start, count in RECORDS.items() if path.name.startswith(start))
    if found != expected:
        raise UserError(f"{path.name} must hold {expected} images, but {path} holds {found}; fetch the archive again")


def _read_binary(path: Path, layout: _Layout) -> Part:
    record = layout.label_bytes + _PIXELS
    content = np.fromfile(path, np.uint8)
    if len(content) % record:
        raise UserError(
            f"the length of a {layout.name} binary must be a multiple of {record} bytes, but {path} has "
            f"{len(content)}; fetch the archive again"
        )
    rows = content.reshape(-1, record)
    _check_number(path, len(rows))
    return rows[:, layout.label_bytes :], rows[:, layout.label_bytes - 1].astype(np.int64)


def _read_python(path: Path, layout: _Layout) -> Part:
    rows, labels = read_batch(path, layout.label_key, _PIXELS)
    _check_number(path, len(rows))
    return rows, labels


def _read(path: Path, layout: _Layout) -> Part:
    """Pixels uint8 [N, 3, 32, 32] and labels int64 [N] of one file."""
    if not path.is_file():
        raise UserError(f"{layout.name} must be complete, but {path} is missing; unpack the whole archive")
    rows, labels = (_read_binary if path.suffix == ".bin" else _read_python)(path, layout)
    check_labels(labels, 0, len(layout.classes) - 1, path)
    return rows.reshape(-1, 3, 32, 32), labels


def load_cifar(name: str, root: Path) -> Dataset:
    """`name` is cifar10 or cifar100; `root` is the unpacked folder or the one above it. Binary goes first."""
    layout = _LAYOUTS[name]
    for subfolder, suffix in ((layout.binary_folder, ".bin"), (layout.python_folder, "")):
        for folder in (root, root / subfolder):
            if (folder / (layout.train[0] + suffix)).is_file():
                return _load_from(folder, suffix, layout)
    raise UserError(
        f"{name} must lie in {layout.binary_folder}/ or {layout.python_folder}/ (its official archives, "
        f"unpacked), but neither is at {root}; fetch one from https://www.cs.toronto.edu/~kriz/cifar.html "
        "and give its folder as root"
    )


def _load_from(folder: Path, suffix: str, layout: _Layout) -> Dataset:
    parts = [_read(folder / (stem + suffix), layout) for stem in layout.train]
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return from_arrays(
        layout.name,
        layout.classes,
        (pixels, labels),
        _read(folder / (layout.test + suffix), layout),
        Augment(crop_padding=4, flip=True),
        f"{layout.name}, A. Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html (no licence stated)",
    )
