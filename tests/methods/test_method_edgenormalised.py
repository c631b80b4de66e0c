"""Edge normalisation by hand-computed values."""

from __future__ import annotations

import math

import torch

from softcell.arch import Choice, Layout, Table, TopInputs, WeightMix
from softcell.methods.edgenormalised import EdgeNormalised, EdgeNormalisedSettings, edge_groups, edge_weights
from softcell.spaces.oneshot1 import OneShot1Space1
from softcell.testing import tiny_space

TABLE = Table(
    "cell",
    (
        Choice(0, 2, ("skip_connect", "nor_conv_3x3")),
        Choice(0, 3, ("skip_connect", "nor_conv_3x3", "none")),
        Choice(1, 3, ("skip_connect", "nor_conv_3x3")),
        Choice(2, 3, ("skip_connect", "nor_conv_3x3")),
    ),
    (3,),
)
LAYOUT = Layout("toy", (TABLE,), ("cell",), TopInputs(2))


def planted() -> EdgeNormalised:
    """Odds of the edges into node 3 are 1:2:5, those of their candidates 1:1:2, 1:4 and 3:2; node 2 has one edge."""
    method = EdgeNormalised(LAYOUT, EdgeNormalisedSettings()).double()
    rows = [[1, 3, 1e9], [1, 1, 2], [1, 4, 1e9], [3, 2, 1e9]]  # the large ones are padding
    with torch.no_grad():
        method.alpha["cell"].copy_(torch.tensor(rows, dtype=torch.float64).log())
        method.beta["cell"].copy_(torch.tensor([7.0, 0.0, math.log(2), math.log(5)], dtype=torch.float64))
    return method


def test_edges_into_a_node_share_one_softmax_that_multiplies_their_candidates() -> None:
    mix = planted().relax()
    assert isinstance(mix, WeightMix)
    expected = [[0.25, 0.75, 0], [0.25 / 8, 0.25 / 8, 0.5 / 8], [0.4 / 8, 1.6 / 8, 0], [3 / 8, 2 / 8, 0]]
    torch.testing.assert_close(mix.weights(0), torch.tensor(expected, dtype=torch.float64))


def test_the_gradient_of_an_edge_weight_is_that_of_a_softmax() -> None:
    logits = torch.tensor([7.0, 0.0, math.log(2), math.log(5)], dtype=torch.float64, requires_grad=True)
    edge_weights(logits, edge_groups(TABLE))[2].backward()
    # p = (1, 2, 5) / 8 into node 3: ∂p_2/∂β = p_2 (δ - p) at odds 2; the edge into node 2 takes no part.
    expected = torch.tensor([0, -2 / 64, 12 / 64, -10 / 64], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected)


def test_the_derived_inputs_are_the_strongest_by_both_softmaxes() -> None:
    # By α alone node 3 would take inputs 1 (0.8) and 2 (0.6).
    method = planted()
    with torch.no_grad():
        method.beta["cell"][1] = math.log(
            40
        )  # input 0: 0.25 · 40/47 = 0.21, input 1: 0.8 · 2/47 = 0.03, 2: 0.6 · 5/47 = 0.06
    picks = [str(pick) for pick in method.derive().cells["cell"].picks]
    assert picks == ["nor_conv_3x3(0->2)", "skip_connect(0->3)", "skip_connect(2->3)"]


def test_links_that_compete_already_keep_their_weights() -> None:
    for table in OneShot1Space1().layout().tables:
        weights = edge_weights(torch.randn(len(table)), edge_groups(table))
        assert table.contest_of and torch.equal(weights[list(table.contest_of)], torch.ones(len(table.contest_of)))


def test_a_chain_has_no_edges_to_normalise() -> None:
    assert not EdgeNormalised(tiny_space("proxyless").layout(), EdgeNormalisedSettings()).beta
    assert set(EdgeNormalised(tiny_space("darts").layout(), EdgeNormalisedSettings()).beta) == {"normal", "reduce"}
