"""β-DARTS by hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch

from softcell.arch import Choice, Layout, Table, TopInputs, WeightMix
from softcell.errors import UserError
from softcell.methods.betadarts import BetaDarts, BetaDartsSettings, beta_decay
from softcell.search import resolve

RAGGED = Table("normal", (Choice(0, 2, ("none", "skip_connect", "nor_conv_3x3")), Choice(1, 2, ("none", "a"))), (2,))
OTHER = Table("reduce", (Choice(0, 1, ("none", "skip_connect")),), (1,))
LAYOUT = Layout("toy", (RAGGED, OTHER), ("normal", "reduce"), TopInputs(2))


def planted(**settings: float) -> BetaDarts:
    """Odds 1:2:3 and 1:4 (padding has the largest logit of all) in one table, 1:1 in the other."""
    method = BetaDarts(LAYOUT, BetaDartsSettings(**settings)).double()
    with torch.no_grad():
        method.alpha["normal"].copy_(
            torch.tensor([[0.0, math.log(2), math.log(3)], [0.0, math.log(4), 99.0]], dtype=torch.float64)
        )
        method.alpha["reduce"].zero_()
    return method


def test_beta_decay_is_the_mean_smooth_maximum_of_the_edges() -> None:
    method = planted()
    found = beta_decay(method.alpha["normal"], method.masks["normal"])
    assert found.item() == pytest.approx((math.log(6) + math.log(5)) / 2)


def test_the_penalty_adds_the_tables_and_is_weighted_linearly_from_0_to_50() -> None:
    method = planted()
    value = (math.log(6) + math.log(5)) / 2 + math.log(2)
    for progress, weight in ((0.0, 0.0), (0.25, 12.5), (1.0, 50.0)):
        method.begin_epoch(progress)
        assert method.penalty(method.relax()).item() == pytest.approx(weight * value)
        assert float(method.gauges()["beta_decay_weight"]) == weight
    method = planted(first_weight=2.0, last_weight=4.0)
    method.begin_epoch(0.5)
    assert method.penalty(method.relax()).item() == pytest.approx(3 * value)


def test_the_gradient_of_beta_decay_is_the_softmax_and_leaves_padding_alone() -> None:
    method = planted()
    method.begin_epoch(1.0)
    method.penalty(method.relax()).backward()
    found = method.alpha["normal"].grad
    expected = 25 * torch.tensor([[1 / 6, 2 / 6, 3 / 6], [1 / 5, 4 / 5, 0]], dtype=torch.float64)  # 50 / 2 edges
    torch.testing.assert_close(found, expected)


def test_edges_that_compete_count_as_one_softmax_over_their_links() -> None:
    # Odds of the links 3:5 in one softmax, without their `none`. The first edge is separate, with odds 1:1:2.
    logits = torch.tensor([[0, 0, math.log(2)], [7, math.log(3), 9], [7, math.log(5), 9]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False], [True, True, False]])
    logits.requires_grad_()
    found = beta_decay(logits, mask, torch.tensor([[False, True, True]]))
    assert found.item() == pytest.approx((math.log(4) + math.log(8)) / 2)
    found.backward()
    expected = torch.tensor([[1 / 8, 1 / 8, 2 / 8], [0, 3 / 16, 0], [0, 5 / 16, 0]], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected)


def test_the_mix_matches_darts_at_any_weight() -> None:
    method = planted()
    method.begin_epoch(1.0)
    mix = method.relax()
    assert isinstance(mix, WeightMix)
    expected = torch.tensor([[1 / 6, 2 / 6, 3 / 6], [1 / 5, 4 / 5, 0]], dtype=torch.float64)
    torch.testing.assert_close(mix.weights(0), expected)


def test_the_recipe_matches_the_released_command_without_weight_decay() -> None:
    recipe = resolve({"method": "beta-darts", "data": "cifar10"})
    assert (recipe.space, recipe.epochs, recipe.batch_size, recipe.regime) == ("nb201", 100, 64, "bilevel")
    assert (recipe.space_settings["cells_per_stage"], recipe.space_settings["channels"]) == (5, 16)
    weights, architecture = recipe.weights, recipe.architecture
    assert (weights.lr, weights.lr_min, weights.momentum, weights.weight_decay) == (0.025, 0.001, 0.9, 3e-4)
    assert (architecture.lr, architecture.beta1, architecture.beta2) == (3e-4, 0.5, 0.999)
    assert (recipe.method_settings["first_weight"], recipe.method_settings["last_weight"]) == (0.0, 50.0)
    for scale in ("small", "paper"):
        assert resolve({"method": "beta-darts", "scale": scale}).architecture.weight_decay == 0.0


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(UserError, match="last_weight"):
        BetaDartsSettings(last_weight=-1.0)
