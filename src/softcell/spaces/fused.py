"""When mixed cells run through `softcell.kernels`: all that leaves a node together, norm and mix in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from softcell.arch import Live
from softcell.kernels.backend import has_triton
from softcell.spaces._fused_plan import (
    Entry,
    Unfit,
    plan,
    plan_apart,
)
from softcell.spaces.fused_cell import FusedCell, compute_type

_MODULES_ONLY: ContextVar[bool] = ContextVar("modules_only", default=False)
_NETWORKS: ContextVar[bool] = ContextVar("fused_networks", default=False)


@contextmanager
def modules_only() -> Iterator[None]:
    """Within this context every cell runs module by module: the literal path that the fused one is compared with."""
    token = _MODULES_ONLY.set(True)
    try:
        yield
    finally:
        _MODULES_ONLY.reset(token)


@contextmanager
def fused_networks() -> Iterator[None]:
    """Within this context cells of derived networks are fused, too, where that is possible.

    It pays for trainings alone: kernels are compiled for every width, and hooks on candidate modules see nothing.
    """
    token = _NETWORKS.set(True)
    try:
        yield
    finally:
        _NETWORKS.reset(token)


def serves_networks(x: Tensor) -> bool:
    """Whether cells of derived networks on inputs like `x` are fused here."""
    return _NETWORKS.get() and serves(x)


def literal() -> bool:
    """Whether `modules_only` holds here."""
    return _MODULES_ONLY.get()


def apart() -> bool:
    """Whether modules must run one by one: where that is asked for, or several processes share a batch."""
    return literal() or is_distributed()


def serves(x: Tensor) -> bool:
    """Whether cells on inputs like `x` are fused: on a GPU with Triton, in float32 or bfloat16, in one process."""
    if x.device.type != "cuda" or apart():
        return False
    return can_fuse() and compute_type(x) in (torch.float32, torch.bfloat16)


def can_fuse() -> bool:
    """Whether this machine has what fused cells need; without Triton their plain twins would be slower than modules."""
    return has_triton()


KEPT = 64
"""Fused forms of one cell, by what is live in it."""
K = TypeVar("K")
V = TypeVar("V")


def remembered(known: dict[K, V | None], key: K, make: Callable[[], V]) -> V | None:
    """What was made for `key`, None where there is no plan; of more than `KEPT`, the oldest is forgotten."""
    if key not in known:
        while len(known) >= KEPT:
            known.pop(next(iter(known)))
        try:
            known[key] = make()
        except Unfit:
            known[key] = None
    return known[key]


class Fused:
    """The fused forms of one cell, one per set of live candidates; the latest are kept."""

    def __init__(self, entries_of: Callable[[Live | None], Iterable[Entry]], inputs: int, nodes: int) -> None:
        self._entries_of, self._inputs, self._nodes = entries_of, inputs, nodes
        self._known: dict[Live | None, FusedCell | None] = {}

    def of(self, live: Live | None, channels: int, stride: int) -> FusedCell | None:
        """None where the cell must run module by module."""
        return remembered(
            self._known, live, lambda: plan(self._entries_of(live), self._inputs, self._nodes, channels, stride)
        )


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
        return remembered(self._known, (node, live), lambda: self._plan(node, live, stride))

    def _plan(self, node: int, live: Live | None, stride: int) -> Departure:
        candidates: dict[int, set[int]] = {}
        entries = []
        for candidate, entry in self._features_of(node, live):
            candidates.setdefault(entry.target, set()).add(candidate)
            entries.append(entry)
        places = {target: 1 + i for i, target in enumerate(candidates)}
        own = [replace(entry, source=0, target=places[entry.target]) for entry in entries]
        cell = plan(own, 1, 1 + len(places), self._channels, stride)
        return Departure(cell, {target: frozenset(found) for target, found in candidates.items()})


@dataclass(frozen=True, slots=True)
class Outputs:
    """Candidates that leave one node, run together: the cell they make, and which output is whose."""

    cell: FusedCell
    numbers: Mapping[int, int]


class OutputsApart:
    """The fused forms of the candidates that leave the nodes of one cell, for mixes that want each by itself.

    Candidates that hand on the node as it is are left out: nothing has to run for them.
    """

    def __init__(self, features_of: Callable[[int, Live | None], Iterable[tuple[int, Entry]]], channels: int) -> None:
        self._features_of, self._channels = features_of, channels
        self._known: dict[tuple[int, Live | None], Outputs | None] = {}

    def of(self, node: int, live: Live | None, stride: int) -> Outputs | None:
        """None where the candidates must run one by one; outputs are numbered by the places of their weights."""
        return remembered(self._known, (node, live), lambda: self._plan(node, live, stride))

    def _plan(self, node: int, live: Live | None, stride: int) -> Outputs:
        entries = [e for _, e in self._features_of(node, live) if not isinstance(e.module, nn.Identity)]
        cell, numbers = plan_apart((replace(e, source=0) for e in entries), self._channels, stride)
        return Outputs(cell, dict(zip((e.weight for e in entries), numbers, strict=True)))


def is_distributed() -> bool:
    """Whether several processes share a batch; their norms must then merge statistics, which only the modules do."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
