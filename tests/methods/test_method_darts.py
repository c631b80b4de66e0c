"""DARTS by hand-computed values."""

from __future__ import annotations

import math

import torch

from softcell.arch import Choice, Layout, Table, TopInputs, WeightMix
from softcell.methods.darts import Darts, DartsSettings

TABLE = Table(
    "cell",
    (
        Choice(0, 3, ("none", "skip_connect")),
        Choice(1, 3, ("skip_connect", "nor_conv_3x3", "none")),
        Choice(2, 3, ("none", "skip_connect")),
    ),
    (3,),
)
LAYOUT = Layout("toy", (TABLE,), ("cell", "cell"), TopInputs(2))


def with_odds(rows: list[list[float]]) -> Darts:
    """Logits whose softmax is each row over its sum; padding gets the largest logit of all."""
    method = Darts(LAYOUT, DartsSettings()).double()
    with torch.no_grad():
        for i, row in enumerate(rows):
            method.alpha["cell"][i] = torch.tensor([math.log(odd) for odd in row] + [99.0] * (3 - len(row)))
    return method


def test_weights_are_the_softmax_of_each_edge_alone_equation_2() -> None:
    method = with_odds([[1, 3], [1, 1, 2], [3, 1]])
    mix = method.relax()
    assert isinstance(mix, WeightMix)
    expected = torch.tensor([[0.25, 0.75, 0], [0.25, 0.25, 0.5], [0.75, 0.25, 0]], dtype=torch.float64)
    for site in (0, 1):
        torch.testing.assert_close(mix.weights(site), expected, rtol=1e-7, atol=1e-7)
        assert not mix.weights(site)[[0, 2], 2].any()


def test_the_two_strongest_edges_are_derived_with_none_left_out() -> None:
    # Strengths without none: edge 0 .75 (skip), edge 1 .4 (skip), edge 2 .45 (skip): the weakest, edge 1, goes.
    picks = with_odds([[1, 3], [8, 2, 10], [11, 9]]).derive().cells["cell"].picks
    assert [str(pick) for pick in picks] == ["skip_connect(0->3)", "skip_connect(2->3)"]


def test_logits_start_near_zero_at_the_given_scale() -> None:
    torch.manual_seed(0)
    wide = Table("cell", tuple(Choice(s, 99, tuple(f"op{k}" for k in range(50))) for s in range(50)), (99,))
    layout = Layout("toy", (wide,), ("cell",), TopInputs(2))
    for scale in (1e-3, 0.5):
        logits = Darts(layout, DartsSettings(scale)).alpha["cell"].detach()
        assert abs(float(logits.std()) / scale - 1) < 0.1
        assert abs(float(logits.mean())) < 0.1 * scale
