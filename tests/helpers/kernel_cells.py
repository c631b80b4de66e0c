"""Cells for the tests of fused kernels, and the comparison of their two paths."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from softcell.arch import Live, WeightMix
from softcell.nn.stochastic import DropPath
from softcell.spaces import build_space
from softcell.spaces._fused_cell import FusedCell
from softcell.spaces._fused_plan import plan
from softcell.spaces.cell import MixedCell
from softcell.spaces.execution import modules_only

SPACES: dict[str, dict[str, object]] = {
    "darts": {"cells": 4, "channels": 3, "nodes": 2},
    "shared": {"cells": 4, "channels": 2, "nodes": 3, "share_features": True},
    "nb201": {"cells_per_stage": 1, "channels": 3, "nodes": 3},
    "bottleneck": {"cells": 4, "channels": 8, "nodes": 3, "bottleneck": 2},
    "bottleneck, shared": {"cells": 4, "channels": 8, "nodes": 3, "bottleneck": 2, "share_features": True},
    "nos": {"cells": 4, "channels": 4, "nodes": 3},
    "nos, shared": {"cells": 4, "channels": 4, "nodes": 3, "share_features": True},
}


def build_cell(name: str, number: int = 0, **settings: object) -> MixedCell:
    """Cell `number` of a small supernet; number 1 of a DARTS supernet of 4 cells is a reduction."""
    torch.manual_seed(0)
    kind = name.split(",")[0]
    space = build_space(kind if kind in ("nb201", "nos") else "darts", {**SPACES[name], **settings})
    cell = space.supernet((3, 8, 8), 10).cells[number]  # type: ignore[index, union-attr]
    assert isinstance(cell, MixedCell)
    return cell


def fuse(cell: MixedCell, live: Live | None = None) -> FusedCell:
    spec = cell.spec_of(0)
    return plan(cell.live_entries(live), cell.inputs, max(cell.table.targets) + 1, spec.channels, spec.stride)


def leaving(name: str, number: int, node: int, *, apart: bool = False, **settings: object) -> FusedCell:
    """The small program of all that leaves one node of a cell; `apart`: every candidate a sum of its own."""
    cell = build_cell(name, number, **settings)
    forms = cell.node_outputs if apart else cell.node_sums
    form = forms.of(node, None, cell.spec_of(0).stride if node < cell.inputs else 1)
    assert form is not None, "it has a fused form"
    return form.cell


class OneSite(WeightMix):
    """A mix of one site."""

    def __init__(self, table: Tensor, live: Live | None = None) -> None:
        self._table, self._live = table, live
        self._picked = frozenset()
        self._offsets = []

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


# --- what bfloat16 explains ---


def _kind(name: str, inputs: int) -> str:
    if name.startswith("node "):
        return "outputs"
    if name.startswith("input "):
        return "gradients of the mix" if name == f"input {inputs}" else "gradients of inputs"
    return "statistics" if "running" in name or "num_batches" in name else "gradients of weights"


def errors_by_kind(mine: dict[str, Tensor], exact: dict[str, Tensor], inputs: int) -> dict[str, list[float]]:
    """By kind of tensor the relative errors of all tensors of that kind."""
    assert mine.keys() == exact.keys()
    found: dict[str, list[float]] = {}
    for name, expected in exact.items():
        wide = expected.detach().double().cpu()
        error = float((mine[name].detach().double().cpu() - wide).norm() / (wide.norm() + 1e-30))
        found.setdefault(_kind(name, inputs), []).append(error)
    return found


def short_outcomes(
    cell: MixedCell, size: tuple[int, int], batch: int, device: str = "cpu"
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Errors by kind of the fused path (on `device`) and of the modules under autocast, both in bfloat16.

    Against the modules in float64, all from the same inputs, which bfloat16 holds exactly.
    """
    states, weights = random_inputs(cell, size, batch, torch.float32)
    states = [s.bfloat16() for s in states]
    found = {}
    for path in ("exact", "fused", "modules"):
        own = copy.deepcopy(cell)
        given = [t.clone() for t in (*states, weights)]
        if path == "exact":
            own, given = own.double(), [t.double() for t in given]
        elif path == "fused":
            own, given = own.to(device), [t.to(device) for t in given]
        inputs = [t.requires_grad_() for t in given]
        if path == "fused":
            nodes = fuse(own)(inputs[:-1], inputs[-1].flatten())
        else:
            with modules_only(), torch.autocast("cpu", torch.bfloat16, enabled=path == "modules"):
                nodes = own(inputs[:-1], OneSite(inputs[-1]), 0)
        found[path] = outcome(own, nodes[own.inputs :], inputs)
    exact = found["exact"]
    return tuple(errors_by_kind(found[path], exact, len(states)) for path in ("fused", "modules"))  # type: ignore[return-value]


def require_rounding_only(fused: dict[str, list[float]], modules: dict[str, list[float]]) -> None:
    """The fused path may err as bfloat16 makes the modules err, kind by kind, and hardly more.

    The modules round more often than the fused path (every product, norm and sum), so over the tensors of a kind their
    mean error is what rounding explains; the fused path has half to nine tenths of it. Half as much again is allowed,
    and what one flipped sign or maximum does to the gradient of a small tensor, about 2⁻⁷; outputs and statistics have
    no such flips. A single tensor (a depthwise weight of few values, the mix) may have bad luck by a factor of three.
    """
    assert fused.keys() == modules.keys()
    for kind, errors in fused.items():
        others = modules[kind]
        mean, worst = sum(errors) / len(errors), max(errors)
        explained = 1.5 * sum(others) / len(others) + (2**-7 if kind.startswith("gradients") else 2**-10)
        assert len(errors) == 1 or mean <= explained, (
            f"{kind}: {mean:.4f} on average, where {explained:.4f} is explained"
        )
        assert worst <= 3 * max(others) + 2**-8, f"{kind}: {worst:.4f} at worst, that of modules {max(others):.4f}"
    assert max(fused["outputs"]) <= 2**-7, "an output is a sum of values that were rounded once or twice, by 2⁻⁹ each"


def of_learned(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without tensors that are zero, or are rounding errors of a sum that is zero."""
    return {name: found[name] for name, value in exact.items() if value.double().norm() > 1e-6}
