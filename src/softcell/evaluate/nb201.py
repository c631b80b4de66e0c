"""The table of NAS-Bench-201: accuracies of all 15,625 cells, compared with the optimum and with random cells.

Dong, Yang, ICLR 2020; NATS-Bench, TPAMI 2021 (topology space). A table is a CSV file, gzipped or not, with a column
`arch` and, in percent, `cifar10_valid`, `cifar10_test`, `cifar100_valid`, `cifar100_test`, `imagenet16_valid`,
`imagenet16_test`; other columns are ignored.

`convert` makes such a table from three formats of the official files, without running anything that a file names:

    NATS-tss-v1_0-*-simple        a folder with one `NNNNNN.pickle.pbz2` per architecture
    NATS-tss-v1_0-*.pickle.pbz2   all in one file
    NAS-Bench-201-v1_*.pth        the same, through `torch.load(weights_only=True)`

An accuracy is the mean over the seeds in the file, after the last of 200 epochs: `x-valid` for validation; for test
`ori-test` on CIFAR-10, `x-test` on the other two. `convert` follows the layout of the published API and was never run
on the official files themselves.

`taus` compares indicators of importance with the table: Kendall's tau per edge (IT-NAS, A.7, Figures 6-8). Two rankings
of accuracy, both of fully trained networks: `best`, the best network that has the operation on the edge (Eq 9), and
`derived`, the derived network with the operation put there. Figure 3 uses a third, the accuracy of the supernet once an
edge keeps one operation: that is `discretisation` in `softcell.search.indicators`.

`zero_cost`: Zero-Cost-PT (Xiang et al., 2021, arXiv:2106.06799). The score of an untrained supernet without one
operation, whose weight the others of its edge share. The lower that score, the more the operation matters, so the
indicator is its negative. The scores are those of `softcell.methods.proxies`.
"""

from __future__ import annotations

import bz2
import csv
import functools
import gzip
import io
import math
import pickle
import statistics
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softcell.arch import Cell, Genotype, Layout, Pick, Rule, WeightMix, derive
from softcell.arch.notation import from_nb201, to_nb201
from softcell.errors import UserError
from softcell.files import atomic_write_bytes
from softcell.methods.proxies import SUPERNET_PROXIES, Proxy, prepare, score
from softcell.settings import is_seed
from softcell.spaces import Space

SETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "imagenet16": "ImageNet-16-120"}
COLUMNS = tuple(f"{name}_{split}" for name in SETS for split in ("valid", "test"))
OPERATIONS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
EDGES = tuple((source, target) for target in range(1, 4) for source in range(target))
OUTPUT = (3,)
COMPLETE = len(OPERATIONS) ** len(EDGES)

Accuracies = Mapping[str, float]
"""By column, in percent."""


@dataclass(frozen=True)
class Nb201Table:
    """`values` [architectures, columns] in percent; `index` gives the row of an architecture's operations by edge."""

    source: str
    index: dict[tuple[str, ...], int]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_complete(self) -> bool:
        return bool(len(self) == COMPLETE)

    def lookup(self, genotype: Genotype) -> Accuracies:
        """The accuracies of an architecture in the benchmark."""
        row = self.index.get(operations(genotype))
        if row is None:
            raise UserError(
                f"{self.source} has no row for {notation(genotype)}; it holds {len(self):,} of {COMPLETE:,} "
                "architectures"
            )
        return dict(zip(COLUMNS, self.values[row].tolist(), strict=True))

    def optimum(self) -> Accuracies:
        """The best value of each column."""
        return dict(zip(COLUMNS, self.values.max(0).tolist(), strict=True))

    def chance(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of each column over all architectures: the expectation of a random one."""
        return {
            c: (statistics.fmean(v), statistics.pstdev(v)) for c, v in zip(COLUMNS, self.values.T.tolist(), strict=True)
        }

    def best_of(self, count: int, by: str = "cifar10_valid") -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of each column over the best of `count` random architectures, exactly.

        This is what random search finds if it trains `count` cells as long as the benchmark does and keeps the one with
        the highest `by`. Cells are drawn independently; ties are broken at random.

        Example:
            >>> from softcell.evaluate.nb201 import load_table
            >>> table = load_table("nb201_200epochs.csv.gz")  # doctest: +SKIP
            >>> table.best_of(10)["cifar10_test"]  # doctest: +SKIP
            (93.0..., 0.5...)
        """
        if count < 1:
            raise ValueError(f"`count >= 1` must hold, but got count={count}")
        _, group, sizes = np.unique(self.values[:, COLUMNS.index(by)], return_inverse=True, return_counts=True)
        # The best of `count` draws is among the lowest k of n architectures with probability (k/n)^count.
        reached = (np.cumsum(sizes) / len(self)) ** count
        weights = (np.diff(reached, prepend=0.0) / sizes)[group]
        means = weights @ self.values
        deviations = np.sqrt(weights @ (self.values - means) ** 2)
        return dict(zip(COLUMNS, zip(means.tolist(), deviations.tolist(), strict=True), strict=True))

    def best_accuracy(self, column: str) -> list[list[float]]:
        """Per edge and operation the best accuracy of all architectures that have it there (Eq 9): [6][5].

        NaN where the table has none.
        """
        values = self.values[:, COLUMNS.index(column)]
        found = np.full((len(EDGES), len(OPERATIONS)), -math.inf)
        for edge in range(len(EDGES)):
            np.maximum.at(found[edge], self._codes[:, edge], values)
        found[np.isinf(found)] = math.nan
        return [[float(value) for value in row] for row in found]

    @functools.cached_property
    def _codes(self) -> NDArray[np.int64]:
        """The number of each architecture's operation on each edge [architectures, 6]."""
        numbers = {op: k for k, op in enumerate(OPERATIONS)}
        codes = np.empty((len(self), len(EDGES)), dtype=np.int64)
        for ops, row in self.index.items():
            codes[row] = [numbers[op] for op in ops]
        return codes

    def with_each(self, genotype: Genotype, column: str) -> list[list[float]]:
        """Per edge and operation the accuracy of `genotype` with that operation there instead: [6][5]."""
        own, position = operations(genotype), COLUMNS.index(column)
        found = []
        for edge in range(len(EDGES)):
            rows = [self.index.get((*own[:edge], op, *own[edge + 1 :])) for op in OPERATIONS]
            found.append([math.nan if row is None else float(self.values[row, position]) for row in rows])
        return found


def operations(genotype: Genotype) -> tuple[str, ...]:
    """The operation of each edge, in the order of `EDGES`; cells that the benchmark does not have are rejected.

    A missing edge is one with `none`: both add nothing to their node.
    """
    if genotype.space != "nb201":
        raise UserError(
            f"NAS-Bench-201 has genotypes of space 'nb201' only, but this one is of space {genotype.space!r}"
        )
    if set(genotype.cells) != {"cell"}:
        raise UserError(f"NAS-Bench-201 has one cell named 'cell', but this genotype has {sorted(genotype.cells)}")
    cell = genotype.cells["cell"]
    if tuple(cell.output) != OUTPUT:  # otherwise the missing edges of a smaller cell would count as `none`
        raise UserError(
            f"NAS-Bench-201 has cells of 4 nodes that end in node {OUTPUT[0]}, but this one ends in "
            f"{', '.join(map(str, cell.output)) or 'none'}; the table has no such network"
        )
    by_edge = {(pick.source, pick.target): pick.op for pick in cell.picks}
    found = tuple(by_edge.get(edge, "none") for edge in EDGES)
    foreign = sorted({op for op in found if op not in OPERATIONS})
    foreign += [f"an edge {source}->{target}" for source, target in sorted(set(by_edge) - set(EDGES))]
    if foreign or len(by_edge) != len(cell.picks):
        raise UserError(
            f"NAS-Bench-201 has the operations {', '.join(OPERATIONS)}, one on each of 6 edges between 4 nodes; this "
            f"genotype has {', '.join(foreign) or 'several on one edge'}"
        )
    return found


def notation(genotype: Genotype) -> str:
    """The benchmark's string of a cell, in which every edge has an operation, if only `none`."""
    picks = tuple(Pick(*edge, op) for edge, op in zip(EDGES, operations(genotype), strict=True))
    return to_nb201(Genotype(genotype.space, {"cell": Cell(picks, OUTPUT)}))


def check_search(method: str, layout: Layout, rule: Rule | None) -> None:
    """Rejects a search whose cells the benchmark cannot have, as far as that is known before it.

    rule: the method's own; None for the space's.
    """
    ops = {op for table in layout.tables for choice in table.choices for op in choice.candidates}
    foreign = sorted(ops - set(OPERATIONS))
    if foreign and layout.space == "nb201":
        raise UserError(
            f"NAS-Bench-201 has the operations {', '.join(OPERATIONS)}, but this search also has "
            f"{', '.join(foreign)}; leave them out of space.candidates"
        )
    # If all candidates are equally strong, a rule that allows several of them on one edge uses them.
    even = {table.name: torch.ones(table.shape) for table in layout.tables}
    try:
        operations(derive(layout, even, rule))
    except UserError as error:
        raise UserError(
            f"{method} would derive cells that the table does not have, so the search was not started: {error}"
        ) from error


def load_table(path: str | Path) -> Nb201Table:
    """Reads a table; raises `UserError` with the reason if the file is not one."""
    file = Path(path)
    if not file.is_file():
        raise UserError(
            f"--table must name a CSV file of NAS-Bench-201, but {path} "
            f"{'is a folder' if file.is_dir() else 'does not exist'}; official NATS-Bench files are converted with "
            "`softcell bench nb201 --convert FILES --table NEW.csv.gz`"
        )
    index: dict[tuple[str, ...], int] = {}
    values: list[list[float]] = []
    try:
        with _opened(file) as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in ("arch", *COLUMNS) if name not in (reader.fieldnames or ())]
            if missing:
                raise UserError(f"{file}: a table of NAS-Bench-201 needs the columns {', '.join(missing)}")
            for number, row in enumerate(reader, start=2):
                where = f"{file}, line {number}"
                ops = _parsed(where, row["arch"])
                if ops in index:
                    raise UserError(f"{where}: duplicate row for {row['arch']}")
                index[ops] = len(values)
                values.append([_percent(where, column, row[column]) for column in COLUMNS])
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file}: cannot be read as CSV ({error})") from error
    if not values:
        raise UserError(f"{file}: a table of NAS-Bench-201 must have at least one row")
    return Nb201Table(str(file), index, np.array(values))


def write_table(path: str | Path, rows: Mapping[str, Accuracies]) -> None:
    """Writes a table of accuracies by architecture string, gzipped if the name ends in `.gz`."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("index", "arch", *COLUMNS))
    for number, (arch, accuracies) in enumerate(rows.items()):
        writer.writerow((number, arch, *(f"{accuracies[column]:.6f}" for column in COLUMNS)))
    data = stream.getvalue().encode("utf-8")
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    # Without a time in its header, so that the same table gives the same bytes.
    atomic_write_bytes(file, gzip.compress(data, mtime=0) if file.suffix == ".gz" else data)


def _opened(file: Path) -> IO[str]:
    with file.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    if packed:
        return gzip.open(file, "rt", encoding="utf-8", newline="")
    return file.open(encoding="utf-8", newline="")


def _parsed(where: str, text: str | None) -> tuple[str, ...]:
    try:
        return operations(from_nb201(text or ""))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _percent(where: str, column: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 100.0:
        raise UserError(f"{where}: {column} must be an accuracy in percent, got {text!r}")
    return value


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
    """Reads dictionaries, lists, texts and numbers; everything else in a pickle is rejected."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _READ:
            return _READ[module, name]
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not allowed")


def convert(path: str | Path) -> dict[str, Accuracies]:
    """Accuracies by architecture string."""
    source = Path(path)
    if source.is_dir():
        files = sorted(file for file in source.glob("*.pickle.pbz2") if file.name[:6].isdigit())
        if not files:
            raise UserError(f"{source}: no files NNNNNN.pickle.pbz2; pass the unpacked folder NATS-tss-v1_0-...-simple")
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
        raise UserError(f"{file}: cannot be loaded without running code from it ({reason})") from error
    return _each(file, data)


def _each(file: Path, data: Any) -> Iterator[tuple[str, Any]]:
    """The architectures of a file that holds all of them."""
    infos = data.get("arch2infos") if isinstance(data, Mapping) else None
    if not isinstance(infos, Mapping):
        raise UserError(f"{file}: `arch2infos` is missing; this is not a file of NAS-Bench-201")
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
            f"{where}: the accuracies of 200 epochs are not where NAS-Bench-201 stores them "
            f"({type(error).__name__}: {error})"
        ) from error


Ranking = Literal["best", "derived"]
RANKINGS: tuple[Ranking, ...] = ("best", "derived")


def kendall(indicator: Sequence[float], accuracy: Sequence[float]) -> float:
    """Kendall's tau-b of two lists; NaN where all entries of one are equal, or one entry is NaN."""
    from scipy.stats import kendalltau

    if any(math.isnan(value) for value in (*indicator, *accuracy)):
        return math.nan
    return float(kendalltau(indicator, accuracy).statistic)


def taus(
    table: Nb201Table, indicator: Sequence[Sequence[float]], genotype: Genotype, column: str
) -> dict[Ranking, list[float]]:
    """Tau-b for each of the six edges; indicator [6][5] in the order of `EDGES` and `OPERATIONS`."""
    if len(indicator) != len(EDGES) or any(len(row) != len(OPERATIONS) for row in indicator):
        raise UserError(
            f"an indicator for NAS-Bench-201 has {len(EDGES)} edges with {len(OPERATIONS)} operations, got "
            f"{[len(row) for row in indicator]}"
        )
    accuracies: Mapping[Ranking, list[list[float]]] = {
        "best": table.best_accuracy(column),
        "derived": table.with_each(genotype, column),
    }
    return {
        name: [kendall(own, row) for own, row in zip(indicator, rows, strict=True)] for name, rows in accuracies.items()
    }


def mean_tau(values: Sequence[float]) -> float:
    """The mean over the edges whose tau is not NaN."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def zero_cost(
    space: Space, proxy: Proxy, images: Tensor, labels: Tensor, num_classes: int, seed: int = 0
) -> dict[str, Tensor]:
    """Per table the importance of each operation [choices, width], padding 0, in a supernet of random weights.

    images: [n, c, h, w], normalised as for training. labels: int64 [n].
    """
    is_seed("seed", seed)
    if proxy not in SUPERNET_PROXIES:
        raise UserError(f"Zero-Cost-PT compares a supernet under several mixes, but its {proxy} are the same under all")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # In float64, because SynFlow's products over all layers leave float32's range.
        supernet = space.supernet((images.shape[1], images.shape[2], images.shape[3]), num_classes).double()
    images = images.double()
    prepare(supernet, proxy)
    layout = supernet.layout
    uniform = {t.name: t.mask().double() / t.mask().sum(1, keepdim=True) for t in layout.tables}
    found = {}
    for table in layout.tables:
        rows = torch.zeros(table.shape, dtype=torch.float64)
        for i, choice in enumerate(table.choices):
            for k in range(len(choice.candidates)):
                without = uniform[table.name].clone()
                without[i, k] = 0.0
                without[i] /= without[i].sum().clamp(min=1e-12)
                mix = WeightMix(layout, {**uniform, table.name: without})
                rows[i, k] = -score(proxy, functools.partial(supernet, mix=mix), supernet, images, labels)
        found[table.name] = rows
    return found
