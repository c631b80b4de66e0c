"""Fused derived cells: the twin against modules; the kernels against the twin, on a GPU or by the interpreter.

TRITON_INTERPRET=1 pytest tests/kernels/test_kernel_derived.py
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from derived_cells import Cell, states
from kernel_runs import DEVICE, INTERPRETED, MARKS
from torch import Tensor, nn

from softcell.kernels.derived import derived_cell, derived_cell_reference
from softcell.nn.conv import SeparableConv
from softcell.nn.flat import as_vector
from softcell.spaces import derived_plan
from softcell.spaces.derived_plan import Pick, plan_derived
from softcell.spaces.fused_plan import Unfit

FORMS = list(product((1, 2), (False, True), (False, True)))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.detach().cpu().double() - b.detach().cpu().double()).norm() / (b.detach().double().norm() + 1e-12))


@pytest.mark.parametrize(("stride", "older_is_larger", "pool_norm"), FORMS)
@pytest.mark.parametrize("training", [True, False])
def test_twin_equals_the_modules_with_running_statistics(
    stride: int, older_is_larger: bool, pool_norm: bool, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    cell = Cell(4, stride, older_is_larger=older_is_larger, pool_norm=pool_norm).double().train(training)
    twin = Cell(4, stride, older_is_larger=older_is_larger, pool_norm=pool_norm).double().train(training)
    twin.load_state_dict(cell.state_dict())
    given = [x.double() for x in states(3, (6, 5), older_is_larger=older_is_larger)]
    fused = twin.plan()
    factors = torch.rand(fused.program.paths, 3, dtype=torch.float64) if training else None
    monkeypatch.setattr(type(twin.drop_path), "factors", lambda *_: factors)
    monkeypatch.setattr(derived_plan, "derived_cell", derived_cell_reference)
    mine, theirs = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    y, z = fused(mine), cell(*theirs, factors)
    torch.testing.assert_close(y, z)
    grad = torch.randn_like(y)
    y.backward(grad)
    z.backward(grad)
    for a, b in zip((*mine, *twin.parameters()), (*theirs, *cell.parameters()), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    for (name, a), (_, b) in zip(twin.named_buffers(), cell.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def outcomes(fused: derived_plan.DerivedCell, given: list[Tensor], dtype: torch.dtype, *, plain: bool) -> list[Tensor]:
    """Output, statistics, gradients of parameters and inputs, always with the same factors and output gradient."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(1)
    parameters = torch.cat([as_vector(w) if w.dim() == 4 else w for w in fused.parameters()]).detach().to(wide)
    parameters.requires_grad_()
    inputs = [x.to(parameters.device, dtype).requires_grad_() for x in given]
    factors = (torch.rand(fused.program.paths, len(given[0]), generator=generator) + 0.5).to(parameters.device, wide)
    run = derived_cell_reference if plain else derived_cell
    out, moments = run(fused.program, dtype, parameters, None, factors, *inputs)
    grad = torch.randn(out.shape, generator=generator).to(out.device, dtype)
    return [out, moments, *torch.autograd.grad(out, (parameters, *inputs), grad)]


TYPES = [(torch.float32, 1e-5), *([] if INTERPRETED else [(torch.bfloat16, 5e-2)])]  # the interpreter has no bfloat16
SIZES = [(5, (7, 6)), *([] if INTERPRETED else [(36, (16, 16)), (144, (8, 8))])]


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize(("stride", "older_is_larger", "pool_norm"), FORMS)
@pytest.mark.parametrize(("channels", "size"), SIZES)
class TestKernels:
    pytestmark = MARKS

    def test_kernels_equal_their_twin_in_float64(
        self, stride: int, older_is_larger: bool, pool_norm: bool, channels: int, size: tuple[int, int],
        dtype: torch.dtype, tolerance: float,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        cell = Cell(channels, stride, older_is_larger=older_is_larger, pool_norm=pool_norm).to(DEVICE)
        given = states(3, size, older_is_larger=older_is_larger)
        fused = cell.plan()
        mine = outcomes(fused, given, dtype, plain=False)
        theirs = outcomes(cell.double().cpu().plan(), given, torch.float64, plain=True)
        for a, b in zip(mine, theirs, strict=True):
            assert relative(a, b) <= tolerance
        cell.float().to(DEVICE)
        again = outcomes(cell.plan(), given, dtype, plain=False)
        assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))  # no atomic sums


def test_a_shared_module_is_refused() -> None:
    cell = Cell(4, 1, older_is_larger=False, pool_norm=False)
    shared = SeparableConv(4, 3, 1, affine=True)
    picks = [Pick(0, 2, shared), Pick(0, 3, shared)]
    with pytest.raises(Unfit, match="share"):
        plan_derived((cell.older, cell.newer), picks, 2, 4, 1, cell.drop_path)


def test_unknown_modules_are_refused() -> None:
    cell = Cell(4, 1, older_is_larger=False, pool_norm=False)
    with pytest.raises(Unfit, match="Conv2d"):
        plan_derived((cell.older, cell.newer), [Pick(0, 2, nn.Conv2d(4, 4, 3, padding=1))], 1, 4, 1, cell.drop_path)
