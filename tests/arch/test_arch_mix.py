"""Mixes and probabilities by hand-computed values."""

from __future__ import annotations

import math

import torch

from softcell.arch import Choice, Layout, StrongestEach, Table, WeightMix
from softcell.arch.mix import entropy, masked_softmax

TABLE = Table("cell", (Choice(0, 1, ("a", "b")), Choice(0, 2, ("a", "b"))), (2,))
OTHER = Table("other", (Choice(0, 1, ("a",)),), (1,))
LAYOUT = Layout("toy", (TABLE, OTHER), ("cell", "other", "cell"), StrongestEach())


def test_sites_of_a_table_share_its_weights_or_read_their_own_in_order() -> None:
    own = torch.arange(8.0).view(2, 2, 2)
    mix = WeightMix(LAYOUT, {"cell": own, "other": torch.ones(1, 1)})
    assert torch.equal(mix.weights(0), own[0])
    assert torch.equal(mix.weights(1), torch.ones(1, 1))
    assert torch.equal(mix.weights(2), own[1])
    shared = WeightMix(LAYOUT, {"cell": own[0], "other": torch.ones(1, 1)})
    assert torch.equal(shared.weights(0), shared.weights(2))


def test_combining_one_choice_sums_weighted_outputs_and_skips_zeros() -> None:
    mix = WeightMix(LAYOUT, {"cell": torch.tensor([[0.5, 2.0], [1.0, 3.0]]), "other": torch.ones(1, 1)})
    x, y = torch.full((1, 1, 1, 1), 10.0), torch.full((1, 1, 1, 1), 100.0)
    assert mix.combine(0, 0, {0: x, 1: y}).item() == 205.0  # type: ignore[union-attr]
    assert mix.combine(0, 1, {0: None, 1: y}).item() == 300.0  # type: ignore[union-attr]
    assert mix.combine(0, 1, {0: None}) is None


def test_a_site_without_a_list_of_live_candidates_runs_all() -> None:
    mix = WeightMix(LAYOUT, {"cell": torch.ones(2, 2), "other": torch.ones(1, 1)}, {2: ((0,), ())})
    assert mix.live(0) is None
    assert mix.live(2) == ((0,), ())


def test_a_detached_mix_has_equal_weights_and_no_gradient() -> None:
    weights = torch.rand(2, 2, requires_grad=True)
    mix = WeightMix(LAYOUT, {"cell": weights, "other": torch.ones(1, 1)}, {0: ((0,), (1,))})
    twin = mix.detach()
    assert torch.equal(twin.weights(2), weights)
    assert not twin.weights(0).requires_grad
    assert not twin.tables["cell"].requires_grad
    assert twin.live(0) == ((0,), (1,))
    assert mix.weights(0).requires_grad


def test_softmax_gives_padding_exactly_zero() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), 50.0], [1.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    p = masked_softmax(logits, mask)
    expected = torch.tensor([[0.25, 0.75, 0.0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    torch.testing.assert_close(p, expected, rtol=0, atol=1e-15)
    assert p[0, 2] == 0.0
    p[0, 0].backward()
    # d p_0 / d logits = p_0 (δ - p): .25 · (.75, -.75); padding gets none.
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[0], torch.tensor([0.1875, -0.1875, 0.0], dtype=torch.float64))


def test_temperature_divides_the_logits() -> None:
    logits, mask = torch.tensor([[0.0, 2.0 * math.log(3.0)]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    expected = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    torch.testing.assert_close(masked_softmax(logits, mask, 2.0), expected)
    torch.testing.assert_close(masked_softmax(logits, mask, torch.tensor(2.0)), expected)


def test_entropy_counts_nothing_for_certainty_and_padding() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.25, 0.25, 0.5]], dtype=torch.float64)
    expected = torch.tensor([math.log(2), 0.0, 1.5 * math.log(2)], dtype=torch.float64)
    torch.testing.assert_close(entropy(p), expected)
