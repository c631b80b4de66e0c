"""The kernels that make dynamic kernels against their twin in float64: on a GPU, or on a CPU by Triton's interpreter.

TRITON_INTERPRET=1 pytest tests/kernels/test_kernel_dynamic.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.kernels import calibrate
from softcell.kernels.backend import triton_kernels
from softcell.kernels.calibrate import dynamic_kernels, dynamic_kernels_reference, fits
from tests.helpers.kernel_runs import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
Sizes = tuple[int, int, int, int, tuple[int, ...]]
# images, places, channels, compressed to, taps of each module
CASES: list[Sizes] = [(2, 40, 16, 2, (9, 25)), (3, 35, 5, 1, (9, 9, 25)), (2, 64, 64, 8, (25,)), (1, 3, 33, 4, (1, 9))]
# The three stages of a NOS search: five outgoing edges of a node, at the paper's batch size.
LARGE: list[Sizes] = [(64, side * side, c, c // 8, (9,) * 5 + (25,) * 5) for c, side in ((16, 32), (32, 16), (64, 8))]


def made(case: Sizes) -> list[Tensor]:
    n, places, c, r, taps = case
    torch.manual_seed(0)
    return [
        torch.randn(n, places, c, dtype=torch.float64),
        torch.randn(n, places, len(taps) * r, dtype=torch.float64).relu(),
        torch.randn(sum(taps), c, dtype=torch.float64) * c**-0.5,
        torch.randn(len(taps), c, r, dtype=torch.float64),
    ]


def attentions(case: Sizes, count: int) -> list[Tensor]:
    """Weights of channel attentions of the same map."""
    c, hidden = case[2], max(1, case[2] // 16)
    torch.manual_seed(1)
    weights = (torch.randn(count * hidden, c), torch.randn(count, c, hidden))
    return [3 * one.double() for one in weights] if count else []


def outcome(given: list[Tensor], taps: tuple[int, ...], pull: Tensor, *, plain: bool) -> list[Tensor]:
    own = [one.detach().requires_grad_() for one in given]
    x, compressed, score, decode, *more = own
    y = (dynamic_kernels_reference if plain else dynamic_kernels)(x, compressed, score, decode, taps, *more)
    return [y, *torch.autograd.grad(y, own, pull.to(y.device, y.dtype))]


def error(found: Tensor, true: Tensor) -> float:
    return float((found.detach().double().cpu() - true.detach()).norm() / true.detach().norm())


@pytest.mark.parametrize("case", CASES if INTERPRETED else CASES + LARGE, ids=str)
@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, *([] if INTERPRETED else [torch.bfloat16])], ids=str)
def test_kernels_and_gradients_match_the_twin(case: Sizes, count: int, dtype: torch.dtype) -> None:
    taps = case[-1]
    low = [one.to(DEVICE, dtype) for one in [*made(case), *attentions(case, count)]]
    assert fits(low[0], low[1], taps)
    exact = [one.to("cpu", torch.float64) for one in low]
    pull = torch.randn(case[0], sum(taps) + count, case[2], dtype=torch.float64)
    theirs = outcome(exact, taps, pull, plain=True)
    mine, plain = (outcome(low, taps, pull, plain=how) for how in (False, True))
    assert mine[0].dtype == torch.float32
    sums = [part.sum(1) for part in torch.split(mine[0], [*taps, *([count] if count else [])], 1)][: len(taps)]
    torch.testing.assert_close(torch.stack(sums), torch.ones_like(torch.stack(sums)), msg="kernels sum to 1")
    for found, usual, true in zip(mine, plain, theirs, strict=True):
        bound = 1e-4 if dtype == torch.float32 else 2 * error(usual, true) + 4e-3
        assert error(found, true) < bound, (error(found, true), error(usual, true))
    again = outcome(low, taps, pull, plain=False)
    assert all(torch.equal(first, second) for first, second in zip(mine, again, strict=True))


def test_what_is_compressed_may_be_part_of_something_wider() -> None:
    x, compressed, score, decode = (one.to(DEVICE, torch.float32) for one in made(CASES[0]))
    wide = torch.cat([torch.randn_like(compressed), compressed, torch.randn_like(compressed)], 2)
    part = wide.chunk(3, 2)[1]
    assert not part.is_contiguous()
    both = [dynamic_kernels(x, one, score, decode, CASES[0][-1]) for one in (part, compressed)]
    assert torch.equal(*both)


def test_gradients_of_weights_are_computed_only_if_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, asked = triton_kernels("calibrate"), []

    def backward(*given: Any) -> Any:
        asked.append(given[-1])
        return plainly(*given)

    plainly = kernels.dynamic_kernels_gradient
    monkeypatch.setattr(kernels, "dynamic_kernels_gradient", backward)
    x, compressed, score, decode = (one.to(DEVICE, torch.float32).requires_grad_() for one in made(CASES[0]))
    for wanted, weights in (([x], False), ([x, compressed], False), ([score, decode], True)):
        found = []
        for function in (dynamic_kernels, dynamic_kernels_reference):
            # Parts of something larger, as in a cell: torch does not know it of leaves.
            y = function(x * 1, compressed * 1, score * 1, decode * 1, CASES[0][-1])
            found.append(torch.autograd.grad(y.square().sum(), wanted))
        assert asked.pop() == weights
        for mine, true in zip(*found, strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-3, atol=1e-5)


def test_what_is_compressed_may_be_made_from_the_map_in_second_derivatives_too() -> None:
    x, compressed, score, decode = (one.to(DEVICE, torch.float32) for one in made(CASES[0]))
    wide = torch.randn(x.shape[2], compressed.shape[2], device=DEVICE)
    x.requires_grad_()
    found = []
    for function in (dynamic_kernels, dynamic_kernels_reference):
        y = function(x, torch.relu(x @ wide), score, decode, CASES[0][-1])
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append([first, *torch.autograd.grad(first.square().sum(), x)])
    for mine, true in zip(*found, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-3, atol=1e-3 * float(true.abs().max()))


def test_float32_uses_the_plain_form_if_shared_memory_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [one.to(DEVICE, torch.float32) for one in made((2, 64, 64, 8, (25,)))]
    assert fits(given[0], given[1], (25,))
    monkeypatch.setattr(calibrate, "shared_memory", lambda device: 88_195)  # it takes 88,196 bytes
    assert not fits(given[0], given[1], (25,))


@pytest.mark.parametrize("count", [0, 2])
def test_second_derivatives_match_the_twin(count: int) -> None:
    found = []
    for function in (dynamic_kernels, dynamic_kernels_reference):
        given = [*made(CASES[0]), *attentions(CASES[0], count)]
        own = [one.to(DEVICE, torch.float32).requires_grad_() for one in given]
        x, compressed, score, decode, *more = own
        first = torch.autograd.grad(
            function(x, compressed, score, decode, CASES[0][-1], *more).square().sum(), own, create_graph=True
        )
        found.append(torch.autograd.grad(sum(part.square().sum() for part in first), own))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
