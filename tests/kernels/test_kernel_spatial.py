"""The kernels of sums of spatial attentions against their twin in float64: on a GPU, or by Triton's interpreter.

TRITON_INTERPRET=1 pytest tests/kernels/test_kernel_spatial.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.kernels.backend import triton_kernels
from softcell.kernels.calibrate import spatial_sums, spatial_sums_reference
from tests.helpers.kernel_runs import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
# images, height, width, modules, hidden channels of each
CASES = [(2, 5, 7, 3, 1), (1, 18, 20, 1, 4), (3, 3, 1, 2, 2)]
# The three stages of a NOS search at the paper's batch size.
LARGE = [(64, side, side, 4, r) for side, r in ((32, 1), (16, 2), (8, 4))]
Sizes = tuple[int, int, int, int, int]


def made(case: Sizes) -> list[Tensor]:
    n, height, width, count, r = case
    torch.manual_seed(0)
    return [
        torch.randn(n, height * width, count * r + 2, dtype=torch.float64).relu(),
        torch.randn(count, 3, 3, r, dtype=torch.float64),
        torch.rand(count, dtype=torch.float64),
        torch.randn(count, n, height, width, dtype=torch.float64),
    ]


def outcome(given: list[Tensor], case: Sizes, pull: Tensor, *, plain: bool, adds: bool) -> list[Tensor]:
    """The hidden maps are part of something wider."""
    own = [one.detach().requires_grad_() for one in given[: 4 if adds else 3]]
    run = spatial_sums_reference if plain else spatial_sums
    y = run(own[0][:, :, 2:], own[1], own[2], own[3] if adds else None, case[1:3])
    return [y, *torch.autograd.grad(y, own, pull.to(y.device, y.dtype))]


def error(found: Tensor, true: Tensor) -> float:
    return float((found.detach().double().cpu() - true.detach()).norm() / true.detach().norm())


@pytest.mark.parametrize("case", CASES if INTERPRETED else CASES + LARGE, ids=str)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *([] if INTERPRETED else [torch.bfloat16])], ids=str)
def test_sums_and_gradients_match_the_twin(case: Sizes, adds: bool, dtype: torch.dtype) -> None:
    hidden, gather, weights, before = (one.to(DEVICE, dtype) for one in made(case))
    low = [hidden, gather, weights.float(), before]  # weights of a mix are float32
    exact = [one.to("cpu", torch.float64) for one in low]
    pull = torch.randn(before.shape, dtype=torch.float64).to(dtype).double()
    theirs = outcome(exact, case, pull, plain=True, adds=adds)
    mine = outcome(low, case, pull, plain=False, adds=adds)
    for found, true in zip(mine, theirs, strict=True):
        assert found.shape == true.shape
        assert error(found, true) < (1e-5 if dtype == torch.float32 else 2e-2), error(found, true)
    again = outcome(low, case, pull, plain=False, adds=adds)
    assert all(torch.equal(first, second) for first, second in zip(mine, again, strict=True))


def test_gradients_of_weights_are_computed_only_if_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, asked = triton_kernels("calibrate"), []

    def backward(*given: Any) -> Any:
        asked.append(given[-1])
        return plainly(*given)

    plainly = kernels.spatial_sums_gradient
    monkeypatch.setattr(kernels, "spatial_sums_gradient", backward)
    hidden, gather, weights, _ = (one.to(DEVICE, torch.float32).requires_grad_() for one in made(CASES[0]))
    for wanted, sums in (([hidden], False), ([hidden, gather], True), ([weights], True)):
        found = []
        for run in (spatial_sums, spatial_sums_reference):
            # Parts of something larger, as in a cell: torch does not know it of leaves.
            y = run(hidden[:, :, 2:] * 1, gather * 1, weights * 1, None, CASES[0][1:3])
            found.append(torch.autograd.grad(y.square().sum(), wanted))
        assert asked.pop() == sums
        for mine, true in zip(*found, strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-3, atol=1e-5)


def test_second_derivatives_match_the_twin() -> None:
    found = []
    for run in (spatial_sums, spatial_sums_reference):
        own = [one.to(DEVICE, torch.float32).requires_grad_() for one in made(CASES[0])]
        y = run(own[0][:, :, 2:], own[1], own[2], own[3], CASES[0][1:3])
        first = torch.autograd.grad(y.square().sum(), own, create_graph=True)
        found.append(torch.autograd.grad(sum(part.square().sum() for part in first), own))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.detach().abs().max()))
