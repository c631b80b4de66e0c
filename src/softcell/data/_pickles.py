"""Read the arrays and lists in a pickle without running any code it names.

CIFAR and the downsampled ImageNet are published as pickles, and a pickle may call any function it can name.
Here the four names that numpy arrays are made of lead to small stand-ins below, every other name is refused,
and numpy's own (C) unpickling is not used either: the array is made from its bytes, whose number is checked.
"""

import math
import pickle
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from softcell.errors import UserError

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
            f"labels must lie in {low}..{high}, but image {first} of {path} has label {int(labels[first])}; "
            "the file is damaged or of another dataset"
        )
