"""When mixed cells run through `softcell.kernels`: all that leaves a node together, norm and mix in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from softcell.arch import Live
from softcell.kernels.backend import has_triton
from softcell.spaces.fused_cell import FusedCell, compute_type
from softcell.spaces.fused_plan import Entry, Unfit, plan

_MODULES_ONLY: ContextVar[bool] = ContextVar("modules_only", default=False)


@contextmanager
def modules_only() -> Iterator[None]:
    """Within this context every cell runs module by module: the literal path that the fused one is compared with."""
    token = _MODULES_ONLY.set(True)
    try:
        yield
    finally:
        _MODULES_ONLY.reset(token)


def literal() -> bool:
    """Whether `modules_only` holds here."""
    return _MODULES_ONLY.get()


def serves(x: Tensor) -> bool:
    """Whether cells on inputs like `x` are fused: on a GPU with Triton, in float32 or bfloat16, in one process."""
    if x.device.type != "cuda" or literal() or is_distributed():
        return False
    return has_triton() and compute_type(x) in (torch.float32, torch.bfloat16)


class Fused:
    """The fused forms of one cell, one per set of live candidates; the latest are kept."""

    KEPT = 64

    def __init__(self, entries_of: Callable[[Live | None], Iterable[Entry]], inputs: int, nodes: int) -> None:
        self._entries_of, self._inputs, self._nodes = entries_of, inputs, nodes
        self._known: dict[Live | None, FusedCell | None] = {}

    def of(self, live: Live | None, channels: int, stride: int) -> FusedCell | None:
        """None where the cell must run module by module."""
        if live not in self._known:
            while len(self._known) >= self.KEPT:
                self._known.pop(next(iter(self._known)))
            try:
                self._known[live] = plan(self._entries_of(live), self._inputs, self._nodes, channels, stride)
            except Unfit:
                self._known[live] = None
        return self._known[live]


@dataclass(frozen=True, slots=True)
class Departure:
    """Features that leave one node, run together: the cell they make, and the candidates in its sums by target."""

    cell: FusedCell
    candidates: Mapping[int, frozenset[int]]


class Departures:
    """The fused forms of the features that leave the nodes of one cell, for cells that cannot be fused as a whole.

    Something stands between such a cell's nodes (a bottleneck, a calibration), but what leaves one node is a small
    cell: one input, and one weighted sum per target.
    """

    def __init__(self, features_of: Callable[[int, Live | None], Iterable[tuple[int, Entry]]], channels: int) -> None:
        self._features_of, self._channels = features_of, channels
        self._known: dict[tuple[int, Live | None], Departure | None] = {}

    def of(self, node: int, live: Live | None, stride: int) -> Departure | None:
        """None where the features must run one by one; `stride` is that of all that leaves the node."""
        key = (node, live)
        if key not in self._known:
            while len(self._known) >= Fused.KEPT:
                self._known.pop(next(iter(self._known)))
            self._known[key] = self._plan(node, live, stride)
        return self._known[key]

    def _plan(self, node: int, live: Live | None, stride: int) -> Departure | None:
        candidates: dict[int, set[int]] = {}
        entries = []
        for candidate, entry in self._features_of(node, live):
            candidates.setdefault(entry.target, set()).add(candidate)
            entries.append(entry)
        places = {target: 1 + i for i, target in enumerate(candidates)}
        own = [replace(entry, source=0, target=places[entry.target]) for entry in entries]
        try:
            cell = plan(own, 1, 1 + len(places), self._channels, stride)
        except Unfit:
            return None
        return Departure(cell, {target: frozenset(found) for target, found in candidates.items()})


def is_distributed() -> bool:
    """Whether several processes share a batch; their norms must then merge statistics, which only the modules do."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
