"""From the official files of NAS-Bench-201 and NATS-Bench to a table (`softcell.evaluate.nb201`).

Three of their formats are read, without running anything that a file names:

    NATS-tss-v1_0-*-simple        a folder with one `NNNNNN.pickle.pbz2` per architecture
    NATS-tss-v1_0-*.pickle.pbz2   all in one file
    NAS-Bench-201-v1_*.pth        the same, through `torch.load(weights_only=True)`

An accuracy is the mean over the seeds that the file has, after the last of 200 epochs: `x-valid` for validation; for
test `ori-test` on CIFAR-10, `x-test` on the other two. The layout is that of the published API; the files themselves
were not at hand when this was written.
"""

from __future__ import annotations

import bz2
import io
import pickle
import statistics
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from softcell.errors import UserError
from softcell.evaluate.nb201 import Accuracies

WHERE = {
    "cifar10_valid": ("cifar10-valid", "x-valid"),
    "cifar10_test": ("cifar10", "ori-test"),
    "cifar100_valid": ("cifar100", "x-valid"),
    "cifar100_test": ("cifar100", "x-test"),
    "imagenet16_valid": ("ImageNet16-120", "x-valid"),
    "imagenet16_test": ("ImageNet16-120", "x-test"),
}
LAST = 199


_READ: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    # Numbers of numpy; the module has had two names.
    ("numpy", "dtype"): np.dtype,
    **{(f"numpy.{core}.multiarray", "scalar"): np.float64(0).__reduce__()[0] for core in ("core", "_core")},
}
_NUMBERS: list[Any] = [
    *((made, f"{module}.{name}") for (module, name), made in _READ.items() if module.startswith("numpy")),
    *(type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64)),
]


class _Plain(pickle.Unpickler):
    """Reads dictionaries, lists, texts and numbers; whatever else a pickle names is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _READ:
            return _READ[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not read")


def convert(path: str | Path) -> dict[str, Accuracies]:
    """Accuracies by architecture string."""
    source = Path(path)
    if source.is_dir():
        files = sorted(file for file in source.glob("*.pickle.pbz2") if file.name[:6].isdigit())
        if not files:
            raise UserError(f"{source}: no files NNNNNN.pickle.pbz2; give the unpacked folder NATS-tss-v1_0-...-simple")
        infos: Iterable[tuple[str, Any]] = ((str(file), _unpacked(file)) for file in files)
    elif source.suffix == ".pth" and source.is_file():
        infos = _from_pth(source)
    elif source.name.endswith(".pickle.pbz2") and source.is_file():
        infos = _each(source, _unpacked(source))
    else:
        raise UserError(
            "--convert takes an unpacked folder NATS-tss-v1_0-...-simple, a file NATS-tss-v1_0-....pickle.pbz2 or a "
            f"file NAS-Bench-201-v1_*.pth, got {path}"
        )
    return dict(_row(where, info) for where, info in infos)


def _unpacked(file: Path) -> Any:
    try:
        return _Plain(io.BytesIO(bz2.decompress(file.read_bytes()))).load()
    except (OSError, ValueError, EOFError, pickle.UnpicklingError, AttributeError, IndexError, KeyError) as error:
        raise UserError(f"{file}: cannot be read as a plain pickle in bz2 ({error})") from error


def _from_pth(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with torch.serialization.safe_globals(_NUMBERS):
            data = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file}: cannot be loaded without running what is in it ({reason})") from error
    return _each(file, data)


def _each(file: Path, data: Any) -> Iterator[tuple[str, Any]]:
    """The architectures of a file that holds all of them."""
    infos = data.get("arch2infos") if isinstance(data, Mapping) else None
    if not isinstance(infos, Mapping):
        raise UserError(f"{file}: `arch2infos` is missing; this is no file of NAS-Bench-201")
    return ((f"{file}, architecture {key}", info) for key, info in infos.items())


def _row(where: str, info: Any) -> tuple[str, Accuracies]:
    """The long training is called `200` in NATS-Bench and `full` in NAS-Bench-201."""
    try:
        full = info["200"] if "200" in info else info["full"]
        results: Mapping[tuple[str, int], Mapping[str, Any]] = full["all_results"]
        found = {}
        for column, (dataset, split) in WHERE.items():
            seeds = [result for (name, _), result in results.items() if name == dataset]
            found[column] = statistics.fmean(float(seed["eval_acc1es"][f"{split}@{LAST}"]) for seed in seeds)
        return str(full["arch_str"]), found
    except (KeyError, TypeError, ValueError, statistics.StatisticsError) as error:
        raise UserError(
            f"{where}: the accuracies of 200 epochs are not where NAS-Bench-201 has them "
            f"({type(error).__name__}: {error})"
        ) from error
