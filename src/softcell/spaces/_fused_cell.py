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
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from softcell.kernels.backend import compute_type
from softcell.kernels.cell import Program, mixed_cell
from softcell.kernels.schedule import backward_on_second_stream
from softcell.kernels.shared import SharedRows, shares_norms
from softcell.kernels.taps import Kind, Recipe, compose, compose_gradient, flat_kernels
from softcell.nn.norm import required, update_running_by_plane
from softcell.nn.stack import as_vector, parts_of


class _Concatenated(torch.autograd.Function):
    """The flat weights of cells that are copies of their modules' weights; their gradients have the same layout.

    Nothing is launched backward, so it does not matter that the gradients of all cells arrive at one node.
    """

    @staticmethod
    def forward(
        ctx: Any, cells: Sequence[FusedCell], stream: torch.cuda.Stream | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.cells = cells
        ctx.save_for_backward(*weights)
        ctx.set_materialize_grads(False)
        with torch.cuda.stream(stream):
            return torch.split(torch.cat([as_vector(w) for w in weights]), [cell.program.size for cell in cells])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = []
        for cell, gradient in zip(ctx.cells, gradients, strict=True):
            own = ctx.saved_tensors[len(found) : len(found) + len(cell.convolutions)]
            found += [None] * len(own) if gradient is None else cell.weight_gradients(own, gradient)
        return None, None, *found


class _Composed(torch.autograd.Function):
    """The flat weights [size] of a cell, which are composed from its modules' weights; they are known already.

    One for each cell, made just before the cell runs: backward, the gradients of its weights are then the next to be
    computed, while other cells are still running.
    """

    @staticmethod
    def forward(ctx: Any, cell: FusedCell, flat: Tensor, *weights: Tensor) -> Tensor:
        ctx.cell = cell
        ctx.save_for_backward(*weights)
        return flat.view_as(flat)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.cell.weight_gradients(ctx.saved_tensors, gradient)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a cell's program reads of its modules: flat weights [size], in their own dtype and in that of computation.

    flat: without gradients if it is composed (`FusedCell.connected`). running [2, planes, c]: running mean and variance
    by plane, if norms use them.
    """

    flat: Tensor
    converted: Tensor
    running: Tensor | None


_ALIGNED = 16
"""Weights of cells in one vector begin at multiples of this, so that kernels read whole words."""


def prepare(cells: Sequence[FusedCell], x: Tensor) -> list[Prepared]:
    """Prepares several cells, all different, with as few launches as possible; x: any tensor of the pass."""
    if not cells:
        return []
    dtype = compute_type(x)  # read outside of the context, which disables autocast
    with torch.autocast(x.device.type, enabled=False), backward_on_second_stream(x.device) as stream:
        flats = _flats(cells, stream)
    with torch.no_grad():
        converted = [flat.detach() for flat in flats]
        if flats[0].dtype != dtype:
            given, converted = converted, [torch.empty_like(flat, dtype=dtype) for flat in converted]
            torch._foreach_copy_(converted, given)
    running = running_of([cell for cell in cells if not cell.training])
    return [Prepared(flat, own, running.get(id(cell))) for cell, flat, own in zip(cells, flats, converted, strict=True)]


def _flats(cells: Sequence[FusedCell], stream: torch.cuda.Stream | None) -> list[Tensor]:
    """The flat weights [size] of each cell. stream: for launches, instead of the current one."""
    copied = [cell for cell in cells if cell.are_copies]
    groups = [copied] if all(cell.program.size % _ALIGNED == 0 for cell in copied) else [[cell] for cell in copied]
    found: dict[int, Tensor] = {}
    for group in groups:
        if group:
            weights = [w for cell in group for w in cell.parameters()]
            flats = _Concatenated.apply(group, stream, *weights)  # type: ignore[no-untyped-call]
            found.update(zip(map(id, group), flats, strict=True))
    with torch.no_grad(), torch.cuda.stream(stream):
        found |= _composed([cell for cell in cells if not cell.are_copies])
    return [found[id(cell)] for cell in cells]


def _composed(cells: Sequence[FusedCell]) -> dict[int, Tensor]:
    """The flat weights [size] by the id of each cell, without gradients: one launch for all cells of one width."""
    if not cells:
        return {}
    factors = torch.cat([as_vector(w) for cell in cells for w in cell.parameters()])
    recipes: dict[int, list[Recipe]] = {}
    places: list[int] = []
    read = written = 0
    for cell in cells:
        own = recipes.setdefault(cell.program.channels, [])
        own += [
            replace(r, matrix=r.matrix + read, depthwise=r.depthwise + read, target=r.target + written)
            for r in cell.recipes
        ]
        places.append(written)
        read += sum(w.numel() for w in cell.parameters())
        written += -(-cell.program.size // _ALIGNED) * _ALIGNED
    out = factors.new_empty(written)
    for channels, listed in recipes.items():
        compose(factors, out, tuple(listed), channels)
    return {id(cell): out[start : start + cell.program.size] for start, cell in zip(places, cells, strict=True)}


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
        room: Tensor | None = None,
    ) -> list[Tensor]:
        """Maps input nodes [n, c, h, w] and mixing weights, in the form of `mixed_cell`, to the values of all nodes.

        mix: None if every output is returned separately. factors [choices, n]: of drop-path, by choice and sample.
        room: for the gradient of the mix (`kernels.cell.Read`).
        """
        device, training = states[0].device, self.training
        dtype = compute_type(states[0])
        given = _PREPARED.get().get(id(self)) or prepare([self], states[0])[0]
        with torch.autocast(device.type, enabled=False):
            flat = self.connected(given)
            mix = flat.detach() if mix is None else mix  # not read in this case, but kernels need a pointer
            mix = mix.to(torch.promote_types(dtype, torch.float32))
            n, _, height, width = states[0].shape
            stride = self.program.stride
            own_rows = n * -(-height // stride) * -(-width // stride)
            shared = SharedRows(own_rows) if training and shares_norms() else None
            own = (self.program, dtype, mix, flat, given.running, factors)
            nodes, moments = mixed_cell(*own, *states, shared=shared, converted=given.converted, room=room)
            if training:
                rows: int | Tensor = own_rows
                if shared is not None and shared.total is not None:
                    rows = shared.total.clamp(min=2)  # a check would stall the device
                elif own_rows <= 1:
                    raise ValueError(f"training needs more than 1 value per channel, but got {tuple(nodes[0].shape)}")
                update_running_by_plane(self.norms, moments[0], moments[2], rows / (rows - 1))
        return [*states, *nodes]

    def connected(self, given: Prepared) -> Tensor:
        """The flat weights [size], with gradients to the modules' weights."""
        if self.are_copies:
            return given.flat
        with backward_on_second_stream(given.flat.device):
            return _Composed.apply(self, given.flat, *self.parameters())  # type: ignore[no-any-return, no-untyped-call]

    def parameters(self) -> list[Tensor]:
        """The convolutions' weights, in the order of the recipes."""
        return [conv.weight for conv in self.convolutions]

    def flatten(self, weights: Sequence[Tensor]) -> Tensor:
        """The flat weights [size] from tensors like `parameters()`, by plain autograd."""
        return flat_kernels(torch.cat([as_vector(w) for w in weights]), self.recipes, self.program.channels)

    def weight_gradients(self, weights: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
        """The gradients of tensors like `parameters()` from that of the flat weights."""
        # For second order, weights are composed by plain autograd: kernels and copies in place have no derivative.
        if torch.is_grad_enabled():
            return list(torch.autograd.grad(self.flatten(weights), weights, gradient, create_graph=True))
        if self.are_copies:
            return parts_of(gradient.contiguous(), weights)
        # Concatenated once more, on the stream that reads them: memory of the forward pass could be reused by the first
        # stream while the second one still reads it.
        factors = torch.cat([as_vector(w) for w in weights])
        found = torch.empty_like(factors)
        compose_gradient(factors, gradient.contiguous(), found, self.recipes, self.program.channels)
        return parts_of(found, weights)


Norms = Sequence[tuple[int, nn.BatchNorm2d]]
"""(plane, its norm), all with the same momentum."""


class Planes(Protocol):
    """The numbers of planes and channels of a program."""

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
