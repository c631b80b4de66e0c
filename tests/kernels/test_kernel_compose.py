"""Flat kernels from the factors that modules hold: the twin against the modules, Triton's kernels against the twin.

The first needs nothing, the second a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.kernels.backend import has_triton, triton_kernels
from softcell.kernels.taps import Kind, Recipe, compose_gradient_reference, compose_reference
from softcell.nn.conv import DilatedConv, FactorisedReduction, ReLUConvBN, SeparableConv
from softcell.spaces._fused_plan import Entry, plan
from tests.helpers.kernel_cells import build_cell, fuse

DEVICE = "cuda"
CHANNELS = (5, 8, 16, 32, 64)
# Taps of 3×3 and 5×5 depthwise convolutions, of a 2×2 block, of dense 1×1 and 3×3 convolutions.
SHAPES = (
    (Kind.PRODUCT, 9),
    (Kind.PRODUCT, 25),
    (Kind.HALVES, 4),
    (Kind.COPY, 1),
    (Kind.PRODUCT, 9),
    (Kind.COPY, 9),
    (Kind.HALVES, 4),
)


def recipes_of(channels: int, shapes: tuple[tuple[Kind, int], ...] = SHAPES) -> tuple[tuple[Recipe, ...], int, int]:
    """Recipes one after the other, as cells have them, and the lengths of the factors and of the kernels."""
    recipes, at, target = [], 0, 0
    for kind, taps in shapes:
        depthwise = channels * taps if kind is Kind.PRODUCT else 0
        recipes.append(Recipe(kind, taps, at + depthwise, at, target))
        at += depthwise + channels * channels * (taps if kind is Kind.COPY else 1)
        target += channels * taps * channels
    return tuple(recipes), at, target


# --- the twin against the modules ---


def kernel_of(flat: Tensor, recipe: Recipe, channels: int) -> Tensor:
    """[c_out, c_in, k, k], the layout of `F.conv2d`."""
    side = round(recipe.taps**0.5)
    size = channels * recipe.taps * channels
    return flat[recipe.target : recipe.target + size].view(channels, side, side, channels).permute(0, 3, 1, 2)


MODULES: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "separable 3×3": (lambda c: SeparableConv(c, 3, 1, affine=False), 1),
    "separable 5×5, stride 2": (lambda c: SeparableConv(c, 5, 2, affine=False), 2),
    "dilated 3×3": (lambda c: DilatedConv(c, 3, 1, affine=False), 1),
    "dense 1×1": (lambda c: ReLUConvBN(c, c, 1, affine=False), 1),
    "dense 3×3": (lambda c: ReLUConvBN(c, c, 3, affine=False), 1),
    "reduction": (lambda c: FactorisedReduction(c, c, affine=False), 2),
}


def before_the_norm(module: nn.Module, x: Tensor) -> Tensor:
    """What the module's own (first) convolutions give."""
    if isinstance(module, FactorisedReduction):
        assert module.even is not None
        return torch.cat([module.even(x.relu()), module.odd(x.relu()[:, :, 1:, 1:])], dim=1)
    assert isinstance(module, nn.Sequential)
    return nn.Sequential(*list(module)[: 2 if isinstance(module, ReLUConvBN) else 3])(x)


@pytest.mark.parametrize("channels", [2, 5, 8])
@pytest.mark.parametrize("name", list(MODULES))
def test_a_composed_kernel_convolves_as_the_module_does(name: str, channels: int) -> None:
    make, stride = MODULES[name]
    torch.manual_seed(0)
    module = make(channels).double()
    fused = plan([Entry(0, 1, 0, module)], 1, 2, channels, stride)
    recipe, weights = fused.recipes[0], fused.parameters()
    window = fused.program.waves[0].first[0].window
    factors = torch.cat([w.permute(0, 2, 3, 1).reshape(-1) for w in weights]).detach()
    flat = torch.full((fused.program.size,), torch.nan, dtype=torch.float64)
    compose_reference(factors, flat, fused.recipes, channels)
    assert flat.isfinite().all(), "every place is written"
    kernel = kernel_of(flat, recipe, channels).requires_grad_()
    x = torch.randn(2, channels, 6, 8, dtype=torch.float64)
    mine = F.conv2d(x.relu(), kernel, stride=stride, padding=window.padding, dilation=window.dilation)
    theirs = before_the_norm(module, x)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)

    # The gradient of the flat kernels, brought back to the factors, is that of the modules' own weights.
    slope = torch.randn_like(theirs)
    expected = torch.autograd.grad(theirs, weights, slope, allow_unused=True)  # None: a second stage
    (given,) = torch.autograd.grad(mine, kernel, slope)
    gradient = torch.zeros_like(flat)
    kernel_of(gradient, recipe, channels).copy_(given)
    found = torch.empty_like(factors)
    compose_gradient_reference(factors, gradient, found, fused.recipes, channels)
    for part, weight, own in zip(found.split([w.numel() for w in weights]), weights, expected, strict=True):
        as_weight = part.view(weight.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
        torch.testing.assert_close(as_weight, torch.zeros_like(weight) if own is None else own, rtol=1e-12, atol=1e-12)


def test_these_recipes_match_those_of_cells() -> None:
    """Kinds and taps that the comparison below covers are all that planning makes."""
    found = {
        (recipe.kind, recipe.taps)
        for space, number in (("darts", 0), ("darts", 1), ("shared", 1), ("nb201", 0))
        for recipe in fuse(build_cell(space, number)).recipes
    }
    assert found == set(SHAPES)


# --- Triton's kernels against the twin ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(not has_triton(), reason="needs Triton")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("channels", CHANNELS)
def test_the_kernels_equal_their_twins_in_float64(channels: int, dtype: torch.dtype, tolerance: float) -> None:
    """Weights are float32 in any precision of a run; bfloat16 comes from networks cast as a whole.

    Products and sums are formed in float32 and rounded once, by at most half a unit of bfloat16: 2⁻⁹ of the value.
    """
    torch.manual_seed(0)
    recipes, given, made = recipes_of(channels)
    factors = torch.randn(given, device=DEVICE).to(dtype)
    gradient = torch.randn(made, device=DEVICE).to(dtype)
    out, found = torch.full_like(gradient, torch.nan), torch.full_like(factors, torch.nan)
    triton_kernels("compose").compose(factors, out, recipes, channels)
    triton_kernels("compose").compose_gradient(factors, gradient, found, recipes, channels)
    exact, slope = factors.double().cpu(), gradient.double().cpu()
    expected, expected_gradient = torch.empty_like(slope), torch.empty_like(exact)
    compose_reference(exact, expected, recipes, channels)
    compose_gradient_reference(exact, slope, expected_gradient, recipes, channels)
    for r in recipes:  # one by one: a large kernel must not hide a small one
        own = slice(r.target, r.target + channels * r.taps * channels)
        assert _far(out[own], expected[own]) <= tolerance, r
    for recipe, following in zip(recipes, [*(r.depthwise for r in recipes[1:]), given], strict=True):
        for own in (slice(recipe.depthwise, recipe.matrix), slice(recipe.matrix, following)):
            if own.start < own.stop:
                assert _far(found[own], expected_gradient[own]) <= tolerance, recipe


def _far(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double().cpu() - theirs).norm() / theirs.norm())
