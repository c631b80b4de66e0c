"""Weighted sums of all calibrations of a mixed cell, where those of a node run together as on a GPU.

The kernels D and attentions A of a target are sums over its sources i (Eq 2 of NOS), whose modules m make results of
few values each. A source adds to the sums of all its targets at once, by one product and one launch for maps:

    K += M_i R_i        R_i [Σ k² + channel attentions, c]: results of the source
    S_t += w_t s_t      s_t [h, w]: spatial attentions, one for each target t

K [targets · size², c] are kernels of the largest size. A column of M_i has one weight, in the row of the tap to which
it adds; a channel attention adds to the tap in the middle. Sources run in ascending order, and so do targets: the first
part of K is complete when its target is computed, and the next source adds to the rest. Stacking, multiplying, padding
and adding for every target and candidate would take thousands of small launches per search step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softcell.kernels.calibrate import spatial_sums
from softcell.nn.calibrate import (
    Calibration,
    Together,
    as_kernels,
    run_together,
    together,
)


class Form(NamedTuple):
    """How the results of a source are added to the sums of its targets."""

    targets: tuple[int, ...]
    """In ascending order."""
    size: int
    """The side of the largest kernel."""
    columns: tuple[tuple[int, int, int], ...]
    """For each kernel, then each channel attention: its side (1), the number of its target, the position of its weight
    in the flattened matrix of a mix."""
    spatial: tuple[int, ...]
    """The positions of the weights of spatial attentions, one for each target; empty without them."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of M."""
        return len(self.targets) * self.size**2, sum(side**2 for side, _, _ in self.columns)


class Source(NamedTuple):
    """The calibrations that leave a node."""

    modules: Together
    form: Form


def plan_source(edges: Sequence[tuple[Calibration, int, int]]) -> Source | None:
    """edges: modules with their targets and the positions of their weights; None if sums are formed one by one."""
    modules = together(module for module, _, _ in edges)
    place = {id(module): (target, position) for module, target, position in edges}
    if modules is None or len(place) < len(edges):
        return None
    targets = tuple(sorted({target for target, _ in place.values()}))
    sides = [module.size for module in modules.kernels] + [1] * len(modules.channel)
    found = [place[id(module)] for module in (*modules.kernels, *modules.channel)]
    columns = tuple((side, targets.index(t), position) for side, (t, position) in zip(sides, found, strict=True))
    maps = [place[id(module)] for module in modules.spatial]
    if any(side % 2 == 0 for side in sides) or (maps and tuple(target for target, _ in maps) != targets):
        return None
    return Source(modules, Form(targets, max(sides), columns, tuple(position for _, position in maps)))


class Weights(NamedTuple):
    """M [targets · size², Σ k² + channel attentions] and w [targets] of a source."""

    matrix: Tensor
    spatial: Tensor


Constants = MutableMapping[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]]
"""By forms and device: what `_Spread` reads. Kept, since copying them each step would stall a GPU."""


def weights_of(weights: Tensor, forms: Iterable[Form], dtype: torch.dtype, constants: Constants) -> list[Weights]:
    """The weights of sources from those of a mix [positions], read by one launch for all sources.

    dtype: of maps; weights are float32 or wider, as kernels are.
    """
    forms = tuple(forms)
    exact = torch.promote_types(dtype, torch.float32)
    key = forms, weights.device, weights.dtype, len(weights)
    if key not in constants:
        constants[key] = _constants(forms, weights)
    matrices = _Spread.apply(weights, *constants[key]).to(exact)  # type: ignore[no-untyped-call]
    sizes = [form.shape[0] * form.shape[1] for form in forms]
    parts = torch.split(matrices, [*sizes, *(len(form.spatial) for form in forms)])
    matrices, spatial = parts[: len(forms)], parts[len(forms) :]
    return [Weights(part.view(form.shape), own) for form, part, own in zip(forms, matrices, spatial, strict=True)]


def _constants(forms: Sequence[Form], weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each value of all matrices the position of its weight; which are not zero; and their sums by position.

    Shapes: [values], [not zero], [positions, not zero]. The position after the last one holds a zero.
    """
    index = torch.cat([*map(_positions, forms), torch.tensor([*chain(*(form.spatial for form in forms))])]).long()
    index[index < 0] = len(weights)
    (places,) = (index < len(weights)).nonzero(as_tuple=True)
    sums = torch.zeros(len(weights), len(places), dtype=weights.dtype)
    sums[index[places], torch.arange(len(places))] = 1.0
    return index.to(weights.device), places.to(weights.device), sums.to(weights.device)


def _positions(form: Form) -> Tensor:
    """For each value of M the position of its weight, -1 where M is zero: [values]"""
    found = torch.full((len(form.targets), form.size, form.size, form.shape[1]), -1)
    column = 0
    for side, target, position in form.columns:
        border = (form.size - side) // 2
        for tap in range(side**2):
            found[target, border + tap // side, border + tap % side, column] = position
            column += 1
    return found.flatten()


class _Spread(torch.autograd.Function):
    """Weights by index, where the index after the last is zero. Plain autograd would add up gradients in any order."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, index: Tensor, places: Tensor, sums: Tensor) -> Tensor:
        ctx.save_for_backward(places, sums)
        return torch.constant_pad_nd(weights, (0, 1)).index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        places, sums = ctx.saved_tensors
        return torch.mv(sums, gradient.index_select(0, places)), None, None, None


class _Pending(NamedTuple):
    """Sums of targets that are not computed yet: kernels [n, targets · size², c], attentions [targets, n, h, w]."""

    targets: tuple[int, ...]
    size: int
    modules: Together
    kernels: Tensor
    spatial: Tensor | None


class CalibrationSums:
    """The sums of the calibrations of one cell during a pass; nodes are added and taken in ascending order."""

    def __init__(self, sources: dict[int, tuple[Source, Weights]]) -> None:
        self._sources, self._pending = sources, list[_Pending]()

    def add(self, node: int, value: Callable[[], Tensor]) -> bool:
        """Adds the calibrations that leave a node of this value [n, c, h, w]; False if they must run one by one."""
        if node not in self._sources:
            return False
        source, (matrix, weights) = self._sources[node]
        made = run_together(source.modules, x := value())
        if made is None:
            return False
        rows, seen = made
        with torch.autocast(x.device.type, enabled=False):
            matrix = matrix.to(rows.dtype).expand(len(rows), -1, -1)
            before = self._alike(source.form, with_maps=seen is not None)
            earlier = None if before is None else before.spatial
            kernels = torch.bmm(matrix, rows) if before is None else torch.baddbmm(before.kernels, matrix, rows)
            spatial = None if seen is None else spatial_sums(seen.hidden, seen.gather, weights, earlier, seen.size)
        self._pending.append(_Pending(source.form.targets, source.form.size, source.modules, kernels, spatial))
        return True

    def _alike(self, form: Form, *, with_maps: bool) -> _Pending | None:
        """Takes the sums that have the same targets and parts, if there are any."""
        for one in self._pending:
            if (one.targets, one.size, one.spatial is not None) == (form.targets, form.size, with_maps):
                self._pending.remove(one)
                return one
        return None

    def take(self, node: int) -> list[tuple[Calibration, Tensor]]:
        """The sums of a target, each with a module that applies it: kernels [n, c, k, k], attentions [n, 1, h, w]."""
        found: list[tuple[Calibration, Tensor]] = []
        for one in [one for one in self._pending if node in one.targets]:
            assert node == one.targets[0], "targets are computed in ascending order"
            self._pending.remove(one)
            count, area = len(one.targets), one.size**2
            kernels, spatial, rest = one.kernels, one.spatial, one.spatial
            if count > 1:
                kernels, others = torch.split(kernels, [area, (count - 1) * area], dim=1)
                if spatial is not None:
                    spatial, rest = torch.split(spatial, [1, count - 1])
                self._pending.append(_Pending(one.targets[1:], one.size, one.modules, others, rest))
            found.append((one.modules.kernels[0], as_kernels(kernels, one.size)))
            if spatial is not None:
                found.append((one.modules.spatial[0], spatial.squeeze(0)[:, None]))
        return found
