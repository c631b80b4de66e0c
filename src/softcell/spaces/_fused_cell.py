"""A cell that runs as one program of `softcell.kernels`, with the modules it reads.

The program reads the weights of all its convolutions as one flat vector, and the running statistics of all norms as one
tensor. A pass through several cells prepares those of all of them together. These classes own no parameters: weights
and running statistics stay in the modules, under their names. `_fused_plan` makes the programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from softcell.kernels.cell import Program, mixed_cell
from softcell.kernels.schedule import backward_on_second_stream
from softcell.kernels.shared import SharedRows, shares_norms
from softcell.kernels.taps import Kind, Recipe, compose, compose_gradient, flat_kernels
from softcell.nn.norm import required, update_running_by_plane
from softcell.nn.stack import as_vector, parts_of
from softcell.spaces.execution import compute_type


class _Flattened(torch.autograd.Function):
    """The flat weights of several cells, and the same in the dtype of computation; see `flat_weights`."""

    @staticmethod
    def forward(
        ctx: Any, cells: Sequence[FusedCell], dtype: torch.dtype, stream: torch.cuda.Stream | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.cells = cells
        ctx.set_materialize_grads(False)
        sizes = [cell.program.size for cell in cells]
        with torch.cuda.stream(stream):
            flat = factors = torch.cat([as_vector(w) for w in weights])
            if not all(cell.are_copies for cell in cells):
                flat = factors.new_empty(sum(sizes))
                for cell, own, out in zip(cells, _by_cell(cells, factors), torch.split(flat, sizes), strict=True):
                    compose(own, out, cell.recipes, cell.program.channels)
            converted = torch.split(flat.to(dtype), sizes)
        ctx.save_for_backward(factors, *weights)
        ctx.mark_non_differentiable(*converted)
        return *torch.split(flat, sizes), *converted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cells: Sequence[FusedCell] = ctx.cells
        factors, *weights = ctx.saved_tensors
        found: list[Tensor | None] = []
        # The converted weights have no gradient.
        for cell, own, gradient in zip(cells, _by_cell(cells, factors), gradients[: len(cells)], strict=True):
            mine = weights[len(found) : len(found) + len(cell.convolutions)]
            found += [None] * len(mine) if gradient is None else cell.weight_gradients(mine, own, gradient)
        return None, None, None, *found


def _by_cell(cells: Sequence[FusedCell], factors: Tensor) -> Sequence[Tensor]:
    """The part of each cell in the concatenated weights of all cells."""
    return torch.split(factors, [sum(w.numel() for w in cell.parameters()) for cell in cells])


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a cell's program reads of its modules: flat weights [size], in their own dtype and in that of computation.

    running [2, planes, c]: running mean and variance by plane, if norms use them.
    """

    flat: Tensor
    converted: Tensor
    running: Tensor | None


_ALIGNED = 16
"""Weights of several cells share a vector only if all sizes are multiples of this, so that kernels read whole words."""


def prepare(cells: Sequence[FusedCell], x: Tensor) -> list[Prepared]:
    """Prepares several cells, all different, in as few launches as one; x: any tensor of the pass."""
    if any(cell.program.size % _ALIGNED for cell in cells):
        weights = [pair for cell in cells for pair in _flattened([cell], x)]
    else:
        weights = _flattened(cells, x)
    running = running_of([cell for cell in cells if not cell.training])
    return [Prepared(*pair, running.get(id(cell))) for cell, pair in zip(cells, weights, strict=True)]


def _flattened(cells: Sequence[FusedCell], x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The flat weights of each cell, in their own dtype and in that of computation."""
    if not cells:
        return []
    dtype = compute_type(x)  # read outside of the context, which disables autocast
    with torch.autocast(x.device.type, enabled=False), backward_on_second_stream(x.device) as stream:
        weights = [w for cell in cells for w in cell.parameters()]
        found = _Flattened.apply(cells, dtype, stream, *weights)  # type: ignore[no-untyped-call]
    return list(zip(found[: len(cells)], found[len(cells) :], strict=True))


_PREPARED: ContextVar[Mapping[int, Prepared]] = ContextVar("prepared", default=MappingProxyType({}))


@contextmanager
def prepared(cells: Sequence[FusedCell], x: Tensor) -> Iterator[None]:
    """Within this context `cells`, all different, are prepared together and not one by one."""
    token = _PREPARED.set(dict(zip(map(id, cells), prepare(cells, x), strict=True)))
    try:
        yield
    finally:
        _PREPARED.reset(token)


@dataclass(frozen=True, slots=True)
class FusedCell:
    """A program and the modules it reads."""

    program: Program
    recipes: tuple[Recipe, ...]  # composes the flat weights from the concatenated weights of the convolutions
    convolutions: tuple[nn.Conv2d, ...]
    norms: tuple[tuple[int, nn.BatchNorm2d], ...]  # (plane, its norm), all with the same momentum

    @property
    def training(self) -> bool:
        return self.norms[0][1].training  # all norms of a fused cell have the same mode (`remembered_form`)

    @property
    def are_copies(self) -> bool:
        """Whether the flat weights are the convolutions' weights, in the same order."""
        return all(r.kind is Kind.COPY and r.matrix == r.target for r in self.recipes)

    def __call__(
        self,
        states: Sequence[Tensor],
        mix: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> list[Tensor]:
        """Maps input nodes [n, c, h, w] and mixing weights, in the form of `mixed_cell`, to the values of all nodes.

        mix: None if every output is returned separately. factors [choices, n]: of drop-path, by choice and sample.
        """
        device, training = states[0].device, self.training
        dtype = compute_type(states[0])
        given = _PREPARED.get().get(id(self)) or prepare([self], states[0])[0]
        flat = given.flat
        with torch.autocast(device.type, enabled=False):
            mix = flat.detach() if mix is None else mix  # not read in this case, but kernels need a pointer
            mix = mix.to(torch.promote_types(dtype, torch.float32))
            n, _, height, width = states[0].shape
            stride = self.program.stride
            own_rows = n * -(-height // stride) * -(-width // stride)
            shared = SharedRows(own_rows) if training and shares_norms() else None
            own = (self.program, dtype, mix, flat, given.running, factors)
            nodes, moments = mixed_cell(*own, *states, shared=shared, converted=given.converted)
            if training:
                rows: int | Tensor = own_rows
                if shared is not None and shared.total is not None:
                    rows = shared.total.clamp(min=2)  # a check would stall the device
                elif own_rows <= 1:
                    raise ValueError(f"training needs more than 1 value per channel, but got {tuple(nodes[0].shape)}")
                update_running_by_plane(self.norms, moments[0], moments[2], rows / (rows - 1))
        return [*states, *nodes]

    def parameters(self) -> list[Tensor]:
        """The convolutions' weights, in the order of the recipes."""
        return [conv.weight for conv in self.convolutions]

    def flatten(self, weights: Sequence[Tensor]) -> Tensor:
        """The flat weights [size] from tensors like `parameters()`, by plain autograd."""
        return flat_kernels(torch.cat([as_vector(w) for w in weights]), self.recipes, self.program.channels)

    def weight_gradients(self, weights: Sequence[Tensor], factors: Tensor, gradient: Tensor) -> list[Tensor]:
        """The gradients of tensors like `parameters()`, concatenated in `factors`, from that of the flat weights."""
        # For second order, weights are composed by plain autograd, since `compose_gradient` has no derivative.
        if torch.is_grad_enabled():
            return list(torch.autograd.grad(self.flatten(weights), weights, gradient, create_graph=True))
        found = gradient.contiguous()
        if not self.are_copies:
            found = torch.empty_like(factors)
            compose_gradient(factors, gradient, found, self.recipes, self.program.channels)
        return parts_of(found, weights)


Norms = Sequence[tuple[int, nn.BatchNorm2d]]
"""(plane, its norm), all with the same momentum."""


class Planes(Protocol):
    """The planes of a program [c]."""

    @property
    def planes(self) -> int: ...
    @property
    def channels(self) -> int: ...


class Measured(Protocol):
    """A program whose planes are followed by norms."""

    @property
    def program(self) -> Planes: ...
    @property
    def norms(self) -> Norms: ...


def running_of(cells: Sequence[Measured]) -> dict[int, Tensor]:
    """Running mean and variance by plane, [2, planes, c], for the id of each cell; one concatenation for all cells.

    The rows of planes without a norm are not read; they repeat those of another plane.
    """
    rows: list[Tensor] = []
    for cell in cells:
        norms, (_, other) = dict(cell.norms), cell.norms[0]
        own = [norms.get(plane, other) for plane in range(cell.program.planes)]
        rows += [*(required(norm.running_mean) for norm in own), *(required(norm.running_var) for norm in own)]
    if not rows:
        return {}
    sizes = [(2, cell.program.planes, cell.program.channels) for cell in cells]
    parts = torch.split(torch.cat(rows), [math.prod(size) for size in sizes])
    return {id(cell): part.view(size) for cell, part, size in zip(cells, parts, sizes, strict=True)}
