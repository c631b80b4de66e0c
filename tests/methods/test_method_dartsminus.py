"""DARTS− by hand-computed values, and against its mixture written out with a separate skip connection."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from softcell.arch import Choice, Layout, StrongestEach, Table, TopInputs, WeightMix
from softcell.errors import UserError
from softcell.methods.dartsminus import DartsMinus, DartsMinusSettings, auxiliary_edges
from softcell.nn.candidates import Spec
from softcell.search import resolve
from softcell.spaces.cell import MixedCell
from softcell.spaces.oneshot1 import OneShot1Space1
from softcell.testing import tiny_space

TABLE = Table(
    "cell",
    (
        Choice(0, 1, ("none", "skip_connect", "nor_conv_3x3")),
        Choice(0, 2, ("skip_connect", "nor_conv_1x1")),
        Choice(1, 2, ("nor_conv_3x3", "none")),
    ),
    (2,),
)
LAYOUT = Layout("toy", (TABLE,), ("cell", "cell"), TopInputs(2))
FULL = Table("cell", (Choice(0, 1, ("none", "skip_connect", "nor_conv_3x3")),), (1,))


def planted(**settings: float) -> DartsMinus:
    """Odds 1:1:2, 1:4 and 1:3; padding has the largest logit of all."""
    method = DartsMinus(LAYOUT, DartsMinusSettings(**settings)).double()
    rows = [[0.0, 0.0, math.log(2)], [0.0, math.log(4), 99.0], [0.0, math.log(3), 99.0]]
    with torch.no_grad():
        method.alpha["cell"].copy_(torch.tensor(rows, dtype=torch.float64))
    return method


def weights_of(method: DartsMinus) -> Tensor:
    mix = method.relax()
    assert isinstance(mix, WeightMix)
    return mix.weights(1)


def test_beta_is_added_to_the_skip_candidate_alone_and_falls_linearly_from_1_to_0() -> None:
    method = planted()
    for progress, beta in ((0.0, 1.0), (0.25, 0.75), (1.0, 0.0)):
        method.begin_epoch(progress)
        expected = [[0.25, 0.25 + beta, 0.5], [0.2 + beta, 0.8, 0], [0.25, 0.75, 0]]
        torch.testing.assert_close(weights_of(method), torch.tensor(expected, dtype=torch.float64))
        assert float(method.gauges()["auxiliary_skip"]) == beta
    method = planted(auxiliary=0.5)
    method.begin_epoch(0.5)
    assert float(method.gauges()["auxiliary_skip"]) == 0.25


def test_an_edge_is_beta_x_plus_the_softmax_mixture_forward_and_in_the_gradient_of_alpha() -> None:
    """The cell computes the mixture with a separate skip connection, values and gradients."""
    torch.manual_seed(0)
    method = DartsMinus(Layout("toy", (FULL,), ("cell",), StrongestEach()), DartsMinusSettings(init_scale=1.0)).double()
    method.begin_epoch(0.3)
    cell = MixedCell(FULL, 1, lambda source: Spec(4, 1, affine=False)).double()
    x = torch.randn(3, 4, 6, 6, dtype=torch.float64)
    probe = torch.randn(3, 4, 6, 6, dtype=torch.float64)
    alpha = method.alpha["cell"]

    found = cell([x], method.relax(), 0)[1]
    gradient = torch.autograd.grad((found**2 * probe).sum(), alpha)[0]

    convolution = cell.edges.module(2)
    assert convolution is not None
    p = torch.softmax(alpha[0], dim=-1)
    expected = 0.7 * x + p[1] * x + p[2] * convolution(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad((expected**2 * probe).sum(), alpha)[0])


def test_at_stride_2_the_auxiliary_skip_is_the_reduction_of_the_skip_candidate() -> None:
    torch.manual_seed(0)
    method = DartsMinus(Layout("toy", (FULL,), ("cell",), StrongestEach()), DartsMinusSettings()).double()
    cell = MixedCell(FULL, 1, lambda source: Spec(4, 2, affine=False)).double()
    x = torch.randn(3, 4, 6, 6, dtype=torch.float64)
    reduction, convolution = cell.edges.module(1), cell.edges.module(2)
    assert reduction is not None and convolution is not None
    p = torch.softmax(method.alpha["cell"][0], dim=-1)
    expected = 1.0 * reduction(x) + p[1] * reduction(x) + p[2] * convolution(x)
    torch.testing.assert_close(cell([x], method.relax(), 0)[1], expected)


def test_the_architecture_is_derived_without_the_auxiliary_skip() -> None:
    method = planted()
    method.begin_epoch(0.0)
    assert weights_of(method)[1].argmax() == 0  # the skip connection weighs most in the supernet
    assert method.probabilities()["cell"][1].tolist() == pytest.approx([0.2, 0.8, 0.0])
    picks = [str(pick) for pick in method.derive().cells["cell"].picks]
    assert "nor_conv_1x1(0->2)" in picks and "nor_conv_3x3(0->1)" in picks


def test_edges_without_a_skip_candidate_are_reported() -> None:
    (remark,) = planted().remarks()
    assert "2 of 3 edges" in remark
    assert not DartsMinus(tiny_space("nb201").layout(), DartsMinusSettings()).remarks()
    assert "0 of" in DartsMinus(tiny_space("s4").layout(), DartsMinusSettings()).remarks()[0]


def test_links_that_compete_for_a_node_get_no_auxiliary_skip() -> None:
    for table in OneShot1Space1().layout().tables:
        assert table.columns("skip_connect").any() or not table.contests
        assert not auxiliary_edges(table)[list(table.contest_of)].any()


def test_the_paper_recipe_matches_darts() -> None:
    recipe = resolve({"method": "darts-minus", "data": "cifar10"})
    assert (recipe.space, recipe.epochs, recipe.batch_size, recipe.regime) == ("darts", 50, 64, "bilevel")
    assert (recipe.weights.lr, recipe.weights.lr_min, recipe.weights.weight_decay) == (0.025, 0.001, 3e-4)
    assert (recipe.architecture.lr, recipe.architecture.weight_decay) == (3e-4, 1e-3)
    assert recipe.method_settings["auxiliary"] == 1.0


def test_a_negative_strength_is_refused() -> None:
    with pytest.raises(UserError, match="auxiliary"):
        DartsMinusSettings(auxiliary=-0.1)
