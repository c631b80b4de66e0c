"""A mixed cell that runs through `softcell.kernels`: a program, and the modules with its weights and statistics.

Nothing is owned here: weights and running statistics stay in the modules, under their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softcell.kernels.cell import Program, mixed_cell
from softcell.kernels.compose import Recipe, compose, compose_gradient, flat_kernels
from softcell.kernels.shared import SharedRows, shares_norms
from softcell.nn.stack import as_vector, owned


class _Flat(torch.autograd.Function):
    """The flat weights [size] of a cell from its modules' weights, whose gradients come in the same layout."""

    @staticmethod
    def forward(ctx: Any, cell: FusedCell, *weights: Tensor) -> Tensor:
        ctx.cell = cell
        ctx.save_for_backward(*weights)
        factors = torch.cat([as_vector(w) for w in weights])
        out = factors.new_empty(cell.program.size)
        compose(factors, out, cell.recipes, cell.program.channels)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cell: FusedCell = ctx.cell
        weights: list[Tensor] = list(ctx.saved_tensors)
        if torch.is_grad_enabled():
            again = torch.autograd.grad(cell.flatten(weights), weights, gradient, create_graph=True)
            return None, *again
        factors = torch.cat([as_vector(w) for w in weights])
        found = torch.empty_like(factors)
        compose_gradient(factors, gradient, found, cell.recipes, cell.program.channels)
        return None, *owned(found, weights)


@dataclass(frozen=True, slots=True)
class FusedCell:
    """A program and the modules it reads."""

    program: Program
    recipes: tuple[Recipe, ...]  # how the convolutions' weights, one after the other, become the flat weights
    convolutions: tuple[nn.Conv2d, ...]
    norms: tuple[tuple[int, nn.BatchNorm2d], ...]  # (plane, its norm), all of one momentum

    def __call__(
        self, states: Sequence[Tensor], mix: Tensor | None = None, factors: Tensor | None = None
    ) -> list[Tensor]:
        """Input nodes [n, c, h, w] and mixing weights [any] to the values of all nodes.

        mix: None where every output is returned separately. factors [choices, n]: of drop-path, by choice and sample.
        """
        c, device = self.program.channels, states[0].device
        training = self.norms[0][1].training
        dtype = compute_type(states[0])
        with torch.autocast(device.type, enabled=False):
            flat = _Flat.apply(self, *self.parameters())  # type: ignore[no-untyped-call]
            running = None if training else running_statistics(self.norms, self.program.planes, c)
            mix = flat.detach() if mix is None else mix  # not read then, but kernels need a pointer
            mix = mix.to(torch.promote_types(dtype, torch.float32))
            n, _, height, width = states[0].shape
            stride = self.program.stride
            own_rows = n * -(-height // stride) * -(-width // stride)
            shared = SharedRows(own_rows) if training and shares_norms() else None
            nodes, moments = mixed_cell(self.program, dtype, mix, flat, running, factors, *states, shared=shared)
            if training:
                rows: int | Tensor = own_rows
                if shared is not None and shared.total is not None:
                    rows = shared.total.clamp(min=2)  # a check would stall the device
                elif own_rows <= 1:
                    raise ValueError(f"training needs more than 1 value per channel, but got {tuple(nodes[0].shape)}")
                unbiased = moments[2] * (rows / (rows - 1))
                planes = [plane for plane, _ in self.norms]
                means, variances = ([of[plane] for plane in planes] for of in (moments[0], unbiased))
                update_running([norm for _, norm in self.norms], means, variances)
        return [*states, *nodes]

    def parameters(self) -> list[Tensor]:
        """The convolutions' weights, in the order the recipes know them by."""
        return [conv.weight for conv in self.convolutions]

    def flatten(self, weights: Sequence[Tensor]) -> Tensor:
        """The flat weights [size] from tensors like `parameters()`, by plain autograd."""
        return flat_kernels(torch.cat([as_vector(w) for w in weights]), self.recipes, self.program.channels)


Norms = Sequence[tuple[int, nn.BatchNorm2d]]
"""(plane, its norm), all of one momentum."""


def running_statistics(norms: Norms, planes: int, channels: int) -> Tensor:
    """[2, planes, c]: running mean and variance by plane; the rows of planes without a norm are not read."""
    means = torch.stack([_present(m.running_mean) for _, m in norms])
    variances = torch.stack([_present(m.running_var) for _, m in norms])
    running = means.new_zeros(2, planes, channels)
    where = _positions(tuple(plane for plane, _ in norms), means.device)
    return running.index_copy_(1, where, torch.stack([means, variances]))


@torch.no_grad()
def update_running(norms: Sequence[nn.BatchNorm2d], means: Sequence[Tensor], variances: Sequence[Tensor]) -> None:
    """running = (1 − momentum) · running + momentum · new, as `nn.BatchNorm2d` does; variances are unbiased.

    Without a momentum it is the plain mean over all batches. Read at every call: recalibration removes the momentum for
    a while, from cells that were planned before.
    """
    if not norms:
        return
    running = [_present(m.running_mean) for m in norms] + [_present(m.running_var) for m in norms]
    new = [*means, *variances]
    seen = [_present(m.num_batches_tracked) for m in norms]
    torch._foreach_add_(seen, 1)
    momentum = norms[0].momentum
    if momentum is None:
        for old, value, count in zip(running, new, seen + seen, strict=True):
            old.add_((value - old) / count)
        return
    torch._foreach_mul_(running, 1 - momentum)
    torch._foreach_add_(running, new, alpha=momentum)


_POSITIONS: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _positions(planes: tuple[int, ...], device: torch.device) -> Tensor:
    key = (planes, device)
    if key not in _POSITIONS:
        _POSITIONS[key] = torch.tensor(planes, device=device)
    return _POSITIONS[key]


def _present(buffer: Tensor | None) -> Tensor:
    assert buffer is not None  # norms without running statistics are refused
    return buffer


def compute_type(x: Tensor) -> torch.dtype:
    """The dtype of computations on `x`: its own, or the dtype of autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
