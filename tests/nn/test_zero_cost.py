"""Scores of untrained networks: literal sums, closed forms, and networks without a signal."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from softcell.nn.zero_cost import naswot, score_untrained, synflow


def test_naswot_counts_agreeing_relus_one_by_one() -> None:
    torch.manual_seed(0)
    first, second, x = nn.Linear(3, 7), nn.Linear(7, 5), torch.randn(4, 3)
    found = naswot(nn.Sequential(first, nn.ReLU(), second, nn.ReLU()), x)
    hidden = first(x)
    units = torch.cat([hidden, second(hidden.clamp(min=0))], 1) > 0
    kernel = [[sum(a == b for a, b in zip(r, s, strict=True)) for s in units.tolist()] for r in units.tolist()]
    assert found == pytest.approx(math.log(abs(torch.tensor(kernel, dtype=torch.float64).det().item())))


def test_naswot_of_equal_images_is_minus_infinity() -> None:
    assert score_untrained(nn.Sequential(nn.Linear(3, 7), nn.ReLU()), "naswot", torch.ones(2, 3)) == -math.inf


def test_synflow_of_a_linear_chain_is_its_depth_times_its_output() -> None:
    """R is a product of |W|, so Σ θ·∂R/∂θ counts R once per layer."""
    torch.manual_seed(0)
    chain = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    product = torch.ones(1, 4, dtype=torch.float64)
    for layer in chain:
        assert isinstance(layer, nn.Linear)
        product = product @ layer.weight.detach().double().abs().T
    assert score_untrained(chain, "synflow", torch.randn(5, 4)) == pytest.approx(3 * float(product.sum()))
    assert synflow(chain, chain.parameters(), torch.zeros(1, 4, dtype=torch.float64)) == pytest.approx(
        3 * float(product.sum())
    ), "the images' values do not matter"
