"""Small datasets that are read whole into memory: digits, CIFAR-10 and -100, SVHN and ImageNet16-120.

CIFAR and the downsampled ImageNet are published as pickles, and a pickle may call any function it can name.
`read_batch` runs no code that a pickle names: the four names that numpy arrays are made of lead to small stand-ins,
every other name is rejected, and numpy's own (C) unpickling is not used either. An array is made from its bytes, whose
number is checked.
"""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from softcell.data.augment import Augment
from softcell.data.dataset import Dataset, from_arrays
from softcell.errors import UserError

_DIGITS = Path(__file__).parent / "assets" / "digits.npz"
_NUM_TRAINING_DIGITS = 1_347


def load_digits() -> Dataset:
    """The digits that come with the package (`assets/DIGITS.md`): 1,347 training and 450 test images, 8 x 8 grey.

    Their order is kept, since it tends to separate writers.
    """
    if not _DIGITS.is_file():
        raise UserError(f"the package must contain its digits, but {_DIGITS} is missing; install softcell again")
    with np.load(_DIGITS, allow_pickle=False) as content:
        pixels, labels = content["images"][:, None], content["labels"].astype(np.int64)
    return from_arrays(
        "digits",
        tuple(str(digit) for digit in range(10)),
        (pixels[:_NUM_TRAINING_DIGITS], labels[:_NUM_TRAINING_DIGITS]),
        (pixels[_NUM_TRAINING_DIGITS:], labels[_NUM_TRAINING_DIGITS:]),
        Augment(crop_padding=1),  # a mirrored digit is not a digit
        "UCI Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, CC BY 4.0, doi:10.24432/C50P49",
    )


Part = tuple[NDArray[np.uint8], NDArray[np.int64]]
_PIXELS = 3 * 32 * 32
# Images per file; otherwise a file cut short at the end of a record would look complete.
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
    """The files of one of the two datasets."""

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


def _read_cifar(path: Path, layout: _Layout) -> Part:
    """Pixels uint8 [N, 3, 32, 32] and labels int64 [N] of one file."""
    if not path.is_file():
        raise UserError(f"{layout.name} must be complete, but {path} is missing; unpack the whole archive")
    rows, labels = (_read_binary if path.suffix == ".bin" else _read_python)(path, layout)
    check_labels(labels, 0, len(layout.classes) - 1, path)
    return rows.reshape(-1, 3, 32, 32), labels


def load_cifar(name: str, root: Path) -> Dataset:
    """CIFAR-10 or CIFAR-100 (A. Krizhevsky, 2009), from the official binary or Python archive, unpacked.

    `name` is cifar10 or cifar100; `root` is the unpacked folder or the one above it. The binary form is preferred.
    """
    layout = _LAYOUTS[name]
    for subfolder, suffix in ((layout.binary_folder, ".bin"), (layout.python_folder, "")):
        for folder in (root, root / subfolder):
            if (folder / (layout.train[0] + suffix)).is_file():
                return _load_cifar_from(folder, suffix, layout)
    raise UserError(
        f"{name} must be in {layout.binary_folder}/ or {layout.python_folder}/ (its official archives, "
        f"unpacked), but neither is at {root}; fetch one from https://www.cs.toronto.edu/~kriz/cifar.html "
        "and pass the folder that contains it (--data-root, in Python data_root)"
    )


def _load_cifar_from(folder: Path, suffix: str, layout: _Layout) -> Dataset:
    parts = [_read_cifar(folder / (stem + suffix), layout) for stem in layout.train]
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return from_arrays(
        layout.name,
        layout.classes,
        (pixels, labels),
        _read_cifar(folder / (layout.test + suffix), layout),
        Augment(crop_padding=4, flip=True),
        f"{layout.name}, A. Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html (no licence stated)",
    )


_SVHN_SITE = "http://ufldl.stanford.edu/housenumbers"


def _read_svhn(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels uint8 [N, 3, 32, 32] and labels int64 [N] in 0..9."""
    from scipy.io import loadmat  # slow to import, and only needed here

    if not path.is_file():
        raise UserError(
            f"svhn must be train_32x32.mat and test_32x32.mat, but {path} is missing; fetch it from {_SVHN_SITE}"
        )
    try:
        content = loadmat(path, variable_names=["X", "y"])
        pixels, labels = np.asarray(content["X"]), np.asarray(content["y"])
    except Exception as error:
        # The reader raises many types on damaged bytes.
        raise UserError(
            f"an svhn file must be a whole MATLAB 5 file with X and y, but {path} is not "
            f"({type(error).__name__}: {error}); fetch it again from {_SVHN_SITE}"
        ) from error
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise UserError(f"X must be uint8 [32, 32, 3, N], but in {path} it is {pixels.dtype} {list(pixels.shape)}")
    if labels.dtype.kind not in "iu" or labels.size != pixels.shape[3]:
        raise UserError(
            f"y must have one number per image ({pixels.shape[3]}), but in {path} it is {labels.dtype} "
            f"{list(labels.shape)}"
        )
    numbers = labels.reshape(-1).astype(np.int64)
    check_labels(numbers, 1, 10, path)
    return pixels.transpose(3, 2, 0, 1), numbers % 10  # the digit 0 is labelled 10


def load_svhn(root: Path) -> Dataset:
    """Street View House Numbers, cropped digits (Netzer et al., 2011), from their two MATLAB files.

    `root` is the folder with the files, or one with a subfolder svhn that has them.
    """
    folder = root if (root / "train_32x32.mat").is_file() else root / "svhn"
    return from_arrays(
        "svhn",
        tuple(str(digit) for digit in range(10)),
        _read_svhn(folder / "train_32x32.mat"),
        _read_svhn(folder / "test_32x32.mat"),
        Augment(crop_padding=4),  # Deviation: RobustDARTS also mirrors, but a mirrored digit is no longer a digit
        f"SVHN cropped digits, Netzer et al. 2011, {_SVHN_SITE} (for non-commercial use)",
    )


def _read_imagenet16(paths: list[Path], num_classes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
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
    """The first 120 classes of ImageNet at 16 x 16, as NAS-Bench-201 uses them.

    `root` is the folder with train_data_batch_1 to 10 and val_data, or the one above ImageNet16/.
    """
    folder = root if (root / "train_data_batch_1").is_file() else root / "ImageNet16"
    if not (folder / "train_data_batch_1").is_file():
        raise UserError(
            f"imagenet16-120 must have train_data_batch_1 to 10 and val_data, but they are neither in "
            f"{root} nor in {folder}; see https://www.image-net.org/download-images (downsampled, 16 x 16)"
        )
    train = _read_imagenet16([folder / f"train_data_batch_{number}" for number in range(1, 11)], num_classes)
    test = _read_imagenet16([folder / "val_data"], num_classes)
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


_PLAIN_NUMBER = re.compile(r"[biuf][1248]")
_ORDERS = {"<": "<", ">": ">", "|": "|", "=": "="}


def _text(value: object) -> str:
    """Strings written by Python 2 may arrive as bytes."""
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


class _DType:
    """Stands in for numpy.dtype: only plain numbers."""

    def __init__(self, code: object, align: object = False, copy: object = False) -> None:
        if not _PLAIN_NUMBER.fullmatch(_text(code)):
            raise pickle.UnpicklingError(f"arrays of type {_text(code)!r} are not plain numbers")
        self.code = _text(code)
        self.order = "|"

    def __setstate__(self, state: tuple[object, ...]) -> None:
        self.order = _ORDERS[_text(state[1])]

    def numpy(self) -> np.dtype[np.generic]:
        return np.dtype(self.order + self.code)


class _NdArray:
    """Stands in for the class numpy.ndarray, which a pickle only passes on."""


class _Array:
    """Stands in for an array under construction."""

    value: NDArray[np.generic]

    def __setstate__(self, state: tuple[object, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        assert isinstance(shape, tuple) and isinstance(dtype, _DType)
        data = raw.encode("latin1") if isinstance(raw, str) else raw
        assert isinstance(data, bytes)
        kind = dtype.numpy()
        if len(data) != math.prod(shape) * kind.itemsize:
            raise pickle.UnpicklingError(f"{len(data)} bytes do not fill an array of {shape} {kind}")
        # Copied, because bytes are read-only and torch needs writable memory.
        self.value = np.frombuffer(data, kind).copy().reshape(shape, order="F" if fortran else "C")


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    if kind is not _NdArray:
        raise pickle.UnpicklingError("only plain numpy arrays are read")
    return _Array()


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """Stands in for codecs.encode, which Python 3 uses to keep bytes in protocol 2."""
    if not isinstance(text, str) or _text(encoding) not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"encoding {encoding!r} is not read")
    return text.encode("latin1")


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,  # as numpy 2 writes it
    ("numpy", "ndarray"): _NdArray,
    ("numpy", "dtype"): _DType,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of an array") from None


def read_arrays(path: Path) -> dict[str, object]:
    """The dictionary pickled in the file at `path`, keys as strings, numpy arrays as such."""
    try:
        with path.open("rb") as stream:
            content = _Unpickler(stream, encoding="latin1").load()
    except Exception as error:
        # Damaged pickles raise nearly any type; none of their code has run.
        raise UserError(
            f"a data batch must be a whole pickle of arrays and lists only, but {path} is not "
            f"({type(error).__name__}: {error}); fetch the file again from its official source"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"a data batch must be a pickled dictionary, but {path} holds a {type(content).__name__}")
    return {_text(key): value.value if isinstance(value, _Array) else value for key, value in content.items()}


def read_batch(path: Path, label_key: str, row: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Rows uint8 [N, row] under the key 'data' and labels int64 [N] under `label_key`."""
    content = read_arrays(path)
    for key in ("data", label_key):
        if key not in content:
            raise UserError(f"a data batch must have the key {key!r}, but {path} has {sorted(content)}")
    data = content["data"]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != row:
        kind = f"{data.dtype} {list(data.shape)}" if isinstance(data, np.ndarray) else type(data).__name__
        raise UserError(f"'data' must be a uint8 array [N, {row}], but in {path} it is {kind}")
    labels = content[label_key]
    if isinstance(labels, list) and all(type(label) is int for label in labels):
        # Clipped, so that an absurd Python integer is reported as out of range and does not overflow here.
        labels = np.array([max(-1, min(label, 1 << 31)) for label in labels], np.int64)
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu" or labels.shape != (len(data),):
        raise UserError(f"{label_key!r} must be one whole number per row of 'data' ({len(data)}), but in {path} is not")
    return data, labels.astype(np.int64)


def check_labels(labels: NDArray[np.int64], low: int, high: int, path: Path) -> None:
    """Raise UserError unless labels int64 [N] are all in low..high and N >= 1."""
    if len(labels) == 0:
        raise UserError(f"a data file must hold at least one image, but {path} holds none; fetch it again")
    wrong = np.flatnonzero((labels < low) | (labels > high))
    if len(wrong):
        first = int(wrong[0])
        raise UserError(
            f"labels must be in {low}..{high}, but image {first} of {path} has label {int(labels[first])}; "
            "the file is damaged or belongs to another dataset"
        )
