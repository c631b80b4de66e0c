"""The candidate modules of a cell's edges, and how those that leave one node are run on its value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from softcell.arch import Pick
from softcell.nn.calibrate import Calibration
from softcell.nn.candidates import Spec, get_candidate
from softcell.nn.conv import FactorisedReduction, ReLUFirst
from softcell.nn.recompute import recomputed
from softcell.nn.stack import grouped, run_stacked, stack_key, stacking_pays
from softcell.nn.stack_calibrations import grouping_calibrations_pays, run_calibrations
from softcell.spaces.fused import apart

SpecOf = Callable[[int], Spec]
"""What the candidates that leave a node are built for."""


class Edges(nn.Module):
    """The candidate modules of a set of picks.

    `own` holds one module per edge and candidate, `shared` one per source and candidate that needs no weights. With
    `share_features` everything is shared by source (EnTranNAS, Eq 6). A candidate that stands twice on one edge gets a
    module each time.
    """

    def __init__(self, picks: Iterable[Pick], spec_of: SpecOf, *, share_features: bool = False) -> None:
        super().__init__()
        self.own, self.shared = nn.ModuleDict(), nn.ModuleDict()
        self.places: list[tuple[str, str, str] | None] = []  # None: a zero candidate, which has no module
        counts: dict[Pick, int] = {}
        for pick in picks:
            kind, spec = get_candidate(pick.op), spec_of(pick.source)
            if kind.zero:
                self.places.append(None)
                continue
            sharing = kind.shared(spec)
            group = self.shared if sharing else self.own
            by_source = sharing or share_features
            row = str(pick.source) if by_source else f"{pick.source}_{pick.target}"
            counts[pick] = counts.get(pick, 0) + 1
            column = pick.op if by_source or counts[pick] == 1 else f"{pick.op}__{counts[pick]}"
            modules = _row(group, row)
            if column not in modules:
                modules[column] = kind.build(spec)
            self.places.append(("shared" if sharing else "own", row, column))

    def module(self, index: int) -> nn.Module | None:
        """The module of pick number `index`; the same object for picks that share it."""
        place = self.places[index]
        if place is None:
            return None
        group, row, column = place
        modules = (self.shared if group == "shared" else self.own)[row]
        assert isinstance(modules, nn.ModuleDict)
        return modules[column]


def _row(group: nn.ModuleDict, name: str) -> nn.ModuleDict:
    if name not in group:
        group[name] = nn.ModuleDict()
    row = group[name]
    assert isinstance(row, nn.ModuleDict)
    return row


def narrowed(spec_of: SpecOf, ratio: int) -> SpecOf:
    """What candidates are built for inside a bottleneck: `ratio` times fewer channels, at least one."""
    return lambda source: replace(spec_of(source), channels=max(1, spec_of(source).channels // ratio))


class Bottleneck(nn.Module):
    """1×1 convolutions that narrow every node in `sources` and widen every node in `inner` (EnTranNAS, §2.5).

    Candidates between them work on fewer channels than the cell. They are convolutions alone, as printed: every
    candidate has its own ReLU and norm. Supernets and networks in search form have them, evaluation networks do not.

    wide, narrow: the specs of candidates without and with the bottleneck.
    """

    def __init__(self, sources: Iterable[int], inner: Iterable[int], wide: Spec, narrow: Spec) -> None:
        super().__init__()
        c, few = wide.channels, narrow.channels
        self.reduce = nn.ModuleDict({str(node): nn.Conv2d(c, few, 1, bias=False) for node in sources})
        self.recover = nn.ModuleDict({str(node): nn.Conv2d(few, c, 1, bias=False) for node in inner})

    def reduce_source(self, node: int, x: Tensor) -> Tensor:
        """[n, c, h, w] to [n, c / ratio, h, w]"""
        return self.reduce[str(node)](x)  # type: ignore[no-any-return]

    def recover_target(self, node: int, x: Tensor) -> Tensor:
        """[n, c / ratio, h, w] to [n, c, h, w]"""
        return self.recover[str(node)](x)  # type: ignore[no-any-return]


class Runner:
    """Runs modules on one node's value, each module at most once, and the ReLU that most start with once for all.

    A bottleneck narrows the value before the first module that runs.
    """

    def __init__(self, x: Tensor, node: int, bottleneck: Bottleneck | None) -> None:
        self._x, self._done = x, dict[int, Tensor]()
        self._node, self._bottleneck = node, bottleneck
        self._activated: Tensor | None = None

    def __call__(self, module: nn.Module, *, again: bool = False) -> Tensor:
        """again: only the input is kept for the backward pass, in which the module runs anew."""
        key = id(module)
        if key not in self._done:
            self._narrow()
            self._done[key] = self._run(module, again)
        return self._done[key]

    def together(self, modules: Iterable[nn.Module | None]) -> None:
        """Runs those that can be stacked ahead of the others, where that pays."""
        if apart():
            return
        own = list(modules)
        if stacking_pays(self._x):
            self._stack(own)
        if grouping_calibrations_pays(self._x) and any(isinstance(module, Calibration) for module in own):
            self._done |= run_calibrations(own, self.value())

    def _stack(self, modules: Iterable[nn.Module | None]) -> None:
        for own in grouped(modules, stack_key).values():
            if len(own) > 1:
                self._narrow()
                outputs = run_stacked(list(own.values()), self._activate())
                self._done.update(zip(own, outputs, strict=True))

    def value(self) -> Tensor:
        """What the modules run on: the node's value, behind a bottleneck a narrower one."""
        self._narrow()
        return self._x

    def _narrow(self) -> None:
        if self._bottleneck is not None:
            self._x, self._bottleneck = self._bottleneck.reduce_source(self._node, self._x), None

    def _run(self, module: nn.Module, again: bool) -> Tensor:
        starts = isinstance(module, ReLUFirst | FactorisedReduction)
        inputs = (self._x, self._activate()) if starts else (self._x,)
        return recomputed(module, *inputs) if again else module(*inputs)

    def _activate(self) -> Tensor:
        if self._activated is None:
            self._activated = torch.relu(self._x)
        return self._activated
