"""Fused derived cells of NAS-Bench-201 against their own modules: values, gradients, statistics, drop-path.

By the plain twins on the CPU in float64, and by the kernels on a GPU or in Triton's interpreter.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import Cell, Pick
from softcell.kernels.cell import mixed_cell, mixed_cell_reference
from softcell.nn import Spec
from softcell.nn.stochastic import DropPath
from softcell.spaces import PickedCell, _affine_cells, _fused_cell
from softcell.spaces._affine_cells import plan_affine
from softcell.spaces._fused_plan import Unfit
from tests.helpers.kernel_runs import DEVICE, INTERPRETED, MARKS
from tests.helpers.picked_cells import (
    CELLS,
    SKIP,
    THREE,
    ZERO,
    form_of,
    inputs_of,
    outcome,
    picked,
    require_close,
    require_modules_results,
)

PASSES = [(True, True), (True, False), (False, False)]
"""Training or evaluation, with or without drop-path."""


def both(name: str, *, training: bool, drops: bool, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    x, factors = inputs_of(name, 4, 3, (6, 5))
    dropped = factors if drops else None
    cell = picked(name, 4, dropped).train(training)
    return outcome(cell, x, dropped, fused=True, **options), outcome(cell, x, dropped, fused=False, **options)


@pytest.mark.parametrize("function", [mixed_cell, mixed_cell_reference])
@pytest.mark.parametrize(("training", "drops"), PASSES)
@pytest.mark.parametrize("name", list(CELLS))
def test_a_derived_cell_equals_its_modules(
    name: str, training: bool, drops: bool, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fused_cell, "mixed_cell", function)
    require_modules_results(both, name, training=training, drops=drops)


@pytest.mark.parametrize("name", list(CELLS))
def test_only_the_last_node_may_have_a_gradient(name: str) -> None:
    require_close(*both(name, training=True, drops=True, last=True), 1e-10)


def test_an_input_that_nothing_reads_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is written by no kernel, so it must not be what the memory held before."""
    monkeypatch.setitem(CELLS, "input unread", ((0, 1, ZERO), (1, 2, THREE), (2, 3, THREE)))
    original = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **more: original(x, **more).fill_(7.0))
    mine, theirs = both("input unread", training=True, drops=False)
    assert not theirs["input 0"].any()
    require_close(mine, theirs, 1e-10)


def test_frozen_scales_and_shifts_get_no_gradient() -> None:
    cell = picked("best", 4)
    for norm in cell.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.requires_grad_(False)
    x, _ = inputs_of("best", 4, 3, (6, 5))
    weights = [p for p in cell.parameters() if p.requires_grad]
    mine = torch.autograd.grad(form_of(cell)([x])[-1].square().sum(), weights)
    theirs = torch.autograd.grad(cell([x])[-1].square().sum(), weights)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_have_the_layout_of_their_parameters() -> None:
    """Fused optimisers refuse others."""
    cell = picked("best", 4).float().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, _ = inputs_of("best", 4, 3, (6, 5))
    parameters = list(cell.parameters())
    form_of(cell)([x.float()])[-1].square().sum().backward()
    assert all(p.grad is not None and p.grad.stride() == p.stride() for p in parameters)


def test_a_copied_cell_reads_its_own_parameters() -> None:
    cell = picked("best", 4)
    form_of(cell)
    other = copy.deepcopy(cell)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    x, _ = inputs_of("best", 4, 3, (6, 5))
    torch.testing.assert_close(form_of(other)([x])[-1], other([x])[-1])


def test_what_all_cells_share_is_copied_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy has ended when it is first read; a kernel that fills it could still be waiting on another stream."""
    made: list[Tensor] = []

    def ones(*shape: int, **settings: Any) -> Tensor:
        made.append(torch.full(shape, 1.0, **settings))
        return made[-1]

    monkeypatch.setattr(_affine_cells, "_ONES", {})
    monkeypatch.setattr(torch, "ones", ones)
    found = [_affine_cells._ones(torch.empty(3, device="meta")) for _ in range(2)]
    assert found[0] is found[1] and found[0].is_meta
    assert [one.device.type for one in made] == ["cpu"]


# --- what has no fused form ---


def refused(*modules: nn.Module) -> str:
    with pytest.raises(Unfit) as found:
        plan_affine([(0, 1, module) for module in modules], 1, 2, 4, 1, DropPath(0.0))
    return str(found.value)


def module(op: str, **settings: Any) -> nn.Module:
    cell = PickedCell(Cell((Pick(0, 1, op),), output=(1,)), 1, lambda source: Spec(4, **settings), DropPath(0.0))
    found = cell.edges.module(0)
    assert found is not None
    return found


def test_cells_without_a_fused_form_are_refused() -> None:
    assert "no scale and shift" in refused(module(THREE, affine=False))
    assert "between two convolutions" in refused(module("sep_conv_3x3"))
    assert "no convolution" in refused(module(SKIP))
    assert "Conv2d" in refused(module(THREE), nn.Conv2d(4, 4, 3, padding=1))
    assert "stride 2" in refused(module(THREE, stride=2))
    shared = module(THREE)
    with pytest.raises(Unfit, match="share"):
        plan_affine([(0, 1, shared), (0, 2, shared)], 1, 3, 4, 1, DropPath(0.0))
    assert picked("best", 4, affine=False).fused_affine() is None


# --- the kernels themselves ---


class TestKernels:
    pytestmark = MARKS

    @pytest.mark.parametrize(("training", "drops"), PASSES)
    @pytest.mark.parametrize("name", list(CELLS))
    def test_kernels_equal_modules_in_float64(self, name: str, training: bool, drops: bool) -> None:
        channels, batch, size = (5, 2, (6, 5)) if INTERPRETED else (16, 6, (9, 7))
        x, factors = inputs_of(name, channels, batch, size)
        dropped = factors if drops else None
        cell = picked(name, channels, dropped).train(training)
        exact = outcome(cell, x, dropped, fused=False)
        mine = outcome(cell, x, dropped, fused=True, device=DEVICE, dtype=torch.float32)
        require_close(mine, exact, 1e-4)
