"""Products whose values and gradients are those of their factors' precision, whatever autocast says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.methods.itnas.transformer import LiteTransformer
from softcell.nn.exact import exact_product
from softcell.nn.objective import ProxyNCA

SHAPES = [((4, 5), (5, 3)), ((2, 4, 5), (2, 5, 3)), ((2, 4, 5), (5, 1)), ((4, 5), (2, 5, 3)), ((3, 1, 4, 5), (2, 5, 6))]


@pytest.mark.parametrize(("first", "second"), SHAPES)
def test_gradients_are_those_of_a_product(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (first, second))
    torch.testing.assert_close(exact_product(a, b), a @ b, rtol=0, atol=0)
    assert torch.autograd.gradcheck(exact_product, (a, b))
    assert torch.autograd.gradgradcheck(exact_product, (a, b))
    assert torch.autograd.grad(exact_product(a, b.detach()).sum(), a)[0].shape == first


def gradients(run: Callable[[], Tensor], leaves: list[Tensor], *, autocast: bool) -> list[Tensor]:
    """Of the values of `run`, as a step computes them: the backward pass, too, is within autocast."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = run()
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)]


def require_equal(run: Callable[[], Tensor], leaves: list[Tensor]) -> None:
    found, expected = (gradients(run, leaves, autocast=autocast) for autocast in (True, False))
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)


def test_autocast_changes_neither_values_nor_gradients() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 8, 16, requires_grad=True), torch.randn(2, 16, 8, requires_grad=True)
    require_equal(lambda: exact_product(a, b), [a, b])
    found, expected = (gradients(lambda: a @ b, [a, b], autocast=autocast) for autocast in (True, False))
    assert not torch.equal(found[1], expected[1]), "torch's product is rounded"


@pytest.mark.parametrize("pool", [4, 3, None])  # windows of one size, of several, and whole maps
def test_attention_of_float32_maps_is_exact_under_autocast(pool: int | None) -> None:
    torch.manual_seed(0)
    module = LiteTransformer((4, 8, 8), 3, pool=pool, width=16)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    maps = {k: torch.randn(5, 4, 8, 8, requires_grad=True) for k in (0, 2)}
    own = [module.query.weight, module.key.weight, module.positions, module.indicator, *maps.values()]
    require_equal(lambda: module.attend({**maps, 1: None}), own)


def test_distances_to_proxies_are_exact_under_autocast() -> None:
    torch.manual_seed(0)
    criterion, x = ProxyNCA(5, 16), torch.randn(6, 16, requires_grad=True)
    labels: Any = torch.tensor([0, 1, 2, 3, 4, 0])
    require_equal(lambda: criterion(x, labels), [x, criterion.proxies])
