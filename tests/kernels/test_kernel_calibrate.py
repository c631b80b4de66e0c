"""The kernels that apply attentions and dynamic kernels against their twin: on a GPU, or by Triton's interpreter.

TRITON_INTERPRET=1 pytest tests/kernels/test_kernel_calibrate.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from softcell.kernels.backend import triton_kernels
from softcell.kernels.calibrate import calibrate, calibrate_reference
from tests.helpers.kernel_runs import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
# (n, c, h, w), size of the kernels, dilation, channel attention, spatial attention
CASES = [
    ((3, 5, 6, 7), 3, 1, True, True),
    ((2, 16, 12, 12), 5, 1, True, True),
    ((2, 33, 5, 4), 5, 2, True, False),
    ((2, 8, 1, 3), 3, 2, False, True),
    ((1, 1, 9, 16), 1, 1, False, False),
]
# Attentions alone, on maps that divide into several parts and into one, because they are small or of odd size.
ATTENTIONS = [
    ((3, 5, 32, 32), 0, 1, channel, spatial) for channel, spatial in ((True, False), (False, True), (True, True))
] + [((2, 33, 5, 3), 0, 1, True, True), ((2, 33, 15, 15), 0, 1, True, False)]
# The three stages of a NOS search at the paper's batch size.
LARGE = [((64, c, side, side), 5, 1, True, True) for c, side in ((16, 32), (32, 16), (64, 8))]
# The three stages of a derived NOS network, whose attentions run alone.
LARGE += [
    ((32, c, side, side), 0, 1, *kinds) for c, side in ((36, 32), (144, 8)) for kinds in ((True, False), (False, True))
]


def made(case: tuple[tuple[int, ...], int, int, bool, bool]) -> tuple[list[Tensor | None], int]:
    (n, c, h, w), size, dilation, channel, spatial = case
    torch.manual_seed(0)
    given: list[Tensor | None] = [
        torch.randn(n, h, w, c, dtype=torch.float64).permute(0, 3, 1, 2),
        torch.rand(n, c, 1, 1, dtype=torch.float64) if channel else None,
        torch.rand(n, 1, h, w, dtype=torch.float64) if spatial else None,
        torch.randn(n, size, size, c, dtype=torch.float64).permute(0, 3, 1, 2) if size else None,
    ]
    return given, dilation


def outcome(given: list[Tensor | None], dilation: int, pull: Tensor, *, plain: bool) -> list[Tensor]:
    own = [None if one is None else one.detach().requires_grad_() for one in given]
    base, channel, spatial, kernels = own
    assert base is not None
    y = (calibrate_reference if plain else calibrate)(base, channel, spatial, kernels, dilation)
    wanted = [one for one in own if one is not None]
    return [y, *torch.autograd.grad(y, wanted, pull.to(y.device, y.dtype))]


@pytest.mark.parametrize("case", CASES + ATTENTIONS + LARGE if not INTERPRETED else CASES + ATTENTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *([] if INTERPRETED else [torch.bfloat16])], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_outputs_and_gradients_match_the_twin(
    case: tuple[tuple[int, ...], int, int, bool, bool], dtype: torch.dtype, turned: bool
) -> None:
    given, dilation = made(case)
    if turned and given[3] is not None:
        given[3] = given[3].contiguous()  # kernels may lie in any order
    low = [None if one is None else one.to(DEVICE, dtype) for one in given]
    exact = [None if one is None else one.to("cpu", torch.float64) for one in low]
    assert exact[0] is not None
    pull = torch.randn(exact[0].shape, dtype=torch.float64).to(dtype).double()
    theirs = outcome(exact, dilation, pull, plain=True)
    for mine, true in zip(outcome(low, dilation, pull, plain=False), theirs, strict=True):
        assert mine.dtype == dtype and mine.shape == true.shape
        error = (mine.detach().double().cpu() - true.detach()).norm() / true.detach().norm()
        assert error < (1e-5 if dtype == torch.float32 else 4e-3)


def test_kernels_may_be_more_exact_than_maps() -> None:
    given, dilation = made(CASES[1])
    base, channel, spatial, kernels = (None if one is None else one.to(DEVICE, torch.float32) for one in given)
    assert base is not None and kernels is not None
    y = calibrate(base.bfloat16(), channel, spatial, kernels, dilation)
    assert y.dtype == torch.bfloat16
    true = calibrate_reference(base.bfloat16().float(), channel, spatial, kernels, dilation)
    torch.testing.assert_close(y.float(), true, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("case", [CASES[0], ATTENTIONS[1], ATTENTIONS[3]], ids=str)
def test_second_derivatives_match_the_twin(case: tuple[tuple[int, ...], int, int, bool, bool]) -> None:
    given, dilation = made(case)
    found = []
    for function in (calibrate, calibrate_reference):
        own = [None if one is None else one.to(DEVICE, torch.float32).requires_grad_() for one in given]
        base, channel, spatial, kernels = own
        assert base is not None
        wanted = [one for one in own if one is not None]
        loss = function(base, channel, spatial, kernels, dilation).square().sum()
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        found.append(torch.autograd.grad(sum(part.square().sum() for part in first), wanted))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("samples", "side", "channels"), [(256, 128, 36), (1024, 64, 64), (65_535, 32, 16), (8, 32, 36)]
)
def test_parts_of_images_fit_a_grid(samples: int, side: int, channels: int) -> None:
    """CUDA starts at most 65,535 programs along the second axis of a grid."""
    kernels, places = triton_kernels("calibrate"), side * side
    parts = kernels._parts(samples, places, kernels._blocks(channels)["PLACES"])
    assert places % parts == 0 and samples * parts <= 65_535
    assert parts > 1 or samples > 32_767, "more programs than samples, where a grid has room for them"
