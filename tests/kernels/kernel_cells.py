"""Cells for the tests of fused kernels, and the comparison of their two paths."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from softcell.arch import Live, WeightMix
from softcell.nn.drop import DropPath
from softcell.spaces import build_space
from softcell.spaces.cell import MixedCell
from softcell.spaces.fused import modules_only
from softcell.spaces.fused_cell import FusedCell
from softcell.spaces.fused_plan import plan

SPACES = {
    "darts": {"cells": 4, "channels": 3, "nodes": 2},
    "shared": {"cells": 4, "channels": 2, "nodes": 3, "share_features": True},
    "nb201": {"cells_per_stage": 1, "channels": 3, "nodes": 3},
}


def build_cell(name: str, number: int = 0, **settings: object) -> MixedCell:
    """Cell `number` of a small supernet; number 1 of a DARTS supernet of 4 cells is a reduction."""
    torch.manual_seed(0)
    space = build_space("nb201" if name == "nb201" else "darts", {**SPACES[name], **settings})
    cell = space.supernet((3, 8, 8), 10).cells[number]  # type: ignore[index, union-attr]
    assert isinstance(cell, MixedCell)
    return cell


def fuse(cell: MixedCell, live: Live | None = None) -> FusedCell:
    spec = cell.spec_of(0)
    return plan(cell._entries(live), cell.inputs, max(cell.table.targets) + 1, spec.channels, spec.stride)


class OneSite(WeightMix):
    """A mix of one site."""

    def __init__(self, table: Tensor, live: Live | None = None) -> None:
        self._table, self._live = table, live
        self._picked = frozenset()

    def weights(self, site: int) -> Tensor:
        return self._table

    def live(self, site: int) -> Live | None:
        return self._live


def random_inputs(
    cell: MixedCell, size: tuple[int, int], batch: int, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)
    channels = cell.spec_of(0).channels
    states = [torch.randn(batch, channels, *size, generator=generator, dtype=dtype) for _ in range(cell.inputs)]
    return states, torch.rand(len(cell.table), cell.table.width, generator=generator, dtype=dtype)


def outcome(cell: MixedCell, nodes: Sequence[Tensor], inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Values, gradients of a random linear function of them, and buffers."""
    generator = torch.Generator().manual_seed(7)
    slopes = [torch.randn(node.shape, generator=generator).to(node) for node in nodes]
    loss = sum((node * slope).sum() for node, slope in zip(nodes, slopes, strict=True))
    names = [name for name, _ in cell.named_parameters()]
    assert isinstance(loss, Tensor)
    gradients = torch.autograd.grad(loss, [*inputs, *cell.parameters()], allow_unused=True)
    found = {f"node {i}": node for i, node in enumerate(nodes)}
    found |= {f"input {i}": g for i, g in enumerate(gradients[: len(inputs)]) if g is not None}
    found |= {name: g for name, g in zip(names, gradients[len(inputs) :], strict=True) if g is not None}
    return found | dict(cell.named_buffers())


def both_paths(
    cell: MixedCell, size: tuple[int, int], batch: int, live: Live | None = None, *, drops: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the fused path and the modules give, from equal copies of the cell; `drops` by equal random numbers."""
    results = []
    drop_path = DropPath(0.4) if drops else None
    for fused in (True, False):
        own = copy.deepcopy(cell)
        states, weights = random_inputs(own, size, batch, next(own.parameters()).dtype)
        inputs = [t.requires_grad_() for t in (*states, weights)]
        if fused:
            torch.manual_seed(5)
            factors = None if drop_path is None else drop_path.factors(states[0], len(own.table))
            nodes = fuse(own, live)(inputs[:-1], inputs[-1].flatten(), factors)
        else:
            own.use_drop_path(drop_path)
            torch.manual_seed(5)
            with modules_only():
                nodes = own(inputs[:-1], OneSite(inputs[-1], live), 0)
        results.append(outcome(own, nodes[own.inputs :], inputs))
    return results[0], results[1]


def require_same(mine: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        difference = (mine[name].double() - expected.double()).norm() / (expected.double().norm() + 1e-12)
        assert difference <= tolerance, f"{name}: {difference}"
