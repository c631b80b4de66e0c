"""DrNAS: samples by their moments, gradients by closed forms and the Beta distribution, hand-computed values."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from scipy import special, stats
from torch import Tensor
from torch.distributions import Dirichlet, kl_divergence

from softcell.arch import Choice, Layout, StrongestEach, Table, WeightMix
from softcell.errors import UserError
from softcell.methods.drnas import DrNas, DrNasSettings, concentration, divergence, pathwise
from softcell.nn.stochastic import SharedDraws, draw_gamma
from softcell.search import resolve
from softcell.testing import tiny_space
from tests.helpers.search_toys import THREE_EDGES, check_resumed, settings, write_data

TABLE = Table(
    "cell",
    (Choice(0, 1, ("none", "skip_connect")), Choice(0, 2, ("skip_connect", "nor_conv_3x3", "none"))),
    (2,),
)
LAYOUT = Layout("toy", (TABLE,), ("cell", "cell"), StrongestEach())
DRAWS = 100_000
BETA = torch.tensor([0.5, -0.4, 1.2], dtype=torch.float64)
C = torch.tensor([1.5, math.exp(-0.4), 2.2], dtype=torch.float64)  # elu(β) + 1 by hand


def samples(c: Tensor, rows: int = DRAWS) -> Tensor:
    """θ [rows, n] of Dirichlet(c), each row with gradients to a concentration of its own."""
    torch.manual_seed(0)
    wide = c.expand(rows, -1).clone().requires_grad_()
    theta = pathwise(wide, draw_gamma(wide), torch.ones(wide.shape, dtype=torch.bool))
    theta.concentration = wide  # type: ignore[attr-defined]
    return theta


def within_5_errors(values: Tensor, expected: Tensor) -> bool:
    """Whether the mean over rows of values [rows, ...] is `expected`, but for 5 standard errors."""
    error = values.std(0) / len(values) ** 0.5
    return bool(((values.mean(0) - expected).abs() < 5 * error).all())


# --- samples and their gradients ---


def test_the_concentration_is_elu_plus_one_and_never_zero() -> None:
    torch.testing.assert_close(concentration(BETA), C)
    assert concentration(torch.tensor([0.0])).tolist() == [1.0]
    assert concentration(torch.tensor([-200.0])).item() == pytest.approx(1e-6)


def test_samples_have_the_mean_and_covariance_of_the_distribution() -> None:
    theta, total = samples(C).detach(), C.sum()
    torch.testing.assert_close(theta.sum(1), torch.ones(DRAWS, dtype=torch.float64))
    mean = C / total
    assert within_5_errors(theta, mean)
    centred = theta - mean
    covariance = (torch.diag(mean) - torch.outer(mean, mean)) / (total + 1)
    assert within_5_errors(centred[:, :, None] * centred[:, None, :], covariance)


def test_the_gradients_of_the_mean_and_second_moment_match_the_closed_forms() -> None:
    """E θ_0 = c_0 / C and E θ_0² = c_0 (c_0 + 1) / (C (C + 1)), by pathwise gradients of single samples."""
    total = float(C.sum())
    for power in (1, 2):
        theta = samples(C)
        (found,) = torch.autograd.grad(theta[:, 0].pow(power).sum(), theta.concentration)  # type: ignore[attr-defined]
        c = C.clone().requires_grad_()
        moment = c[0] / c.sum() if power == 1 else c[0] * (c[0] + 1) / (c.sum() * (c.sum() + 1))
        (expected,) = torch.autograd.grad(moment, c)
        assert within_5_errors(found, expected)
        assert not within_5_errors(found, 1.1 * expected)  # the test would notice
    assert expected[1] == pytest.approx(-float(C[0] * (C[0] + 1)) * (2 * total + 1) / (total * (total + 1)) ** 2)


@pytest.mark.parametrize("theta_0", [0.03, 0.4, 0.9])
def test_the_pathwise_derivative_keeps_the_quantile_of_the_marginal(theta_0: float) -> None:
    """∂θ_0/∂c_0 = -(∂F/∂c_0) / f of Beta(c_0, C - c_0), by a finite difference of scipy's F; others share the rest."""
    c0, rest = float(C[0]), float(C[1] + C[2])
    theta = torch.tensor([theta_0, 0.25 * (1 - theta_0), 0.75 * (1 - theta_0)], dtype=torch.float64)
    step = 1e-5
    slope = (special.betainc(c0 + step, rest, theta_0) - special.betainc(c0 - step, rest, theta_0)) / (2 * step)
    moved = -slope / stats.beta.pdf(theta_0, c0, rest)
    c = C.clone().requires_grad_()
    sample = pathwise(c, theta, torch.ones(3, dtype=torch.bool))  # shares of numbers that sum to 1 are those numbers
    for j, expected in enumerate((moved, -0.25 * moved, -0.75 * moved)):
        (found,) = torch.autograd.grad(sample[j], c, retain_graph=True)
        assert float(found[0]) == pytest.approx(float(expected), rel=2e-3)


def test_the_gradient_equals_that_of_torch_s_dirichlet() -> None:
    c = C.clone().requires_grad_()
    torch.manual_seed(3)
    reference = Dirichlet(c).rsample()
    slopes = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    (expected,) = torch.autograd.grad((slopes * reference).sum(), c)
    own = pathwise(c, reference.detach(), torch.ones(3, dtype=torch.bool))
    (found,) = torch.autograd.grad((slopes * own).sum(), c)
    torch.testing.assert_close(found, expected)


def test_padding_and_single_candidates_are_ignored() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    c = torch.tensor([[1.5, 0.7, 99.0], [2.0, 99.0, 99.0]], dtype=torch.float64, requires_grad=True)
    gammas = torch.tensor([[3.0, 1.0, 50.0], [2.0, 50.0, 50.0]])
    theta = pathwise(c, gammas, mask)
    assert theta.tolist() == [[0.75, 0.25, 0.0], [1.0, 0.0, 0.0]]
    (found,) = torch.autograd.grad((theta * torch.tensor([5.0, 1.0, 7.0])).sum(), c)
    narrow = c[0, :2].detach().clone().requires_grad_()
    alone = pathwise(narrow, gammas[0, :2], mask[0, :2])
    (expected,) = torch.autograd.grad((alone * torch.tensor([5.0, 1.0])).sum(), narrow)
    torch.testing.assert_close(found[0, :2], expected)
    assert found[0, :2].all()
    assert not found[0, 2]
    assert not found[1].any()


def test_extreme_concentrations_give_finite_samples_and_gradients() -> None:
    for beta in ([-200.0, -200.0], [-30.0, 0.0], [500.0, -30.0], [500.0, 500.0]):
        for dtype in (torch.float32, torch.float64):
            given = torch.tensor([beta] * 64, dtype=dtype, requires_grad=True)
            c = concentration(given)
            theta = pathwise(c, draw_gamma(c), torch.ones(64, 2, dtype=torch.bool))
            (gradient,) = torch.autograd.grad(theta[:, 0].sum(), given)
            assert theta.isfinite().all() and gradient.isfinite().all()


def test_links_that_compete_share_one_distribution() -> None:
    layout = tiny_space("nb1shot1-1").layout()
    method = DrNas(layout, DrNasSettings())
    torch.manual_seed(0)
    mix = method.relax()
    assert isinstance(mix, WeightMix)
    contested = [table for table in layout.tables if table.contests]
    assert contested
    for table in contested:
        for contest in table.contests:
            assert float(mix.tables[table.name].detach()[list(contest), 1].sum()) == pytest.approx(1.0, abs=1e-6)


# --- the method ---


def test_one_sample_is_shared_by_all_sites_and_by_all_evaluations_of_a_step() -> None:
    method, draws = DrNas(LAYOUT, DrNasSettings()), SharedDraws()
    found = []
    for _ in range(2):
        with draws.evaluation("train"):
            mix = method.relax()
            assert isinstance(mix, WeightMix)
            found.append(mix)
    assert found[0].weights(0) is found[0].weights(1)
    assert torch.equal(found[0].weights(0), found[1].weights(0))
    (gradient,) = torch.autograd.grad(found[1].weights(0)[:, 0].sum(), method.beta["cell"])
    assert gradient[TABLE.mask()].all()  # also where numbers of an earlier evaluation are used
    mix = method.relax()
    assert isinstance(mix, WeightMix)
    assert not torch.equal(mix.weights(0), found[0].weights(0))


def test_the_divergence_matches_torch_and_zero_at_the_anchor() -> None:
    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    c = torch.stack([C, C, C])
    anchor = [kl_divergence(Dirichlet(C[:n]), Dirichlet(torch.ones(n, dtype=torch.float64))) for n in (3, 2)]
    expected = torch.stack([*anchor, torch.zeros((), dtype=torch.float64)])
    torch.testing.assert_close(divergence(c, mask), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(divergence(torch.ones(3, 3, dtype=torch.float64), mask), torch.zeros(3).double())


def test_the_penalty_is_the_weighted_sum_over_edges_and_off_by_default() -> None:
    method = DrNas(LAYOUT, DrNasSettings(kl_weight=0.25, init_scale=0.5)).double()
    mix, c = method.relax(), concentration(method.beta["cell"])
    edges = [kl_divergence(Dirichlet(c[i, :n]), Dirichlet(torch.ones(n).double())) for i, n in ((0, 2), (1, 3))]
    penalty = method.penalty(mix)
    assert penalty is not None
    torch.testing.assert_close(penalty, 0.25 * (edges[0] + edges[1]))
    assert DrNas(LAYOUT, DrNasSettings()).penalty(mix) is None
    with pytest.raises(UserError, match="kl_weight >= 0"):
        DrNasSettings(kl_weight=-1.0)


def test_the_candidate_with_the_largest_mean_is_derived() -> None:
    method = DrNas(LAYOUT, DrNasSettings())
    with torch.no_grad():
        method.beta["cell"].copy_(torch.tensor([[1.0, 2.0, 9.0], [0.5, -1.0, 0.0]]))
    total = 1.5 + math.exp(-1.0) + 1.0
    expected = torch.tensor([[2 / 5, 3 / 5, 0.0], [1.5 / total, math.exp(-1.0) / total, 1.0 / total]])
    torch.testing.assert_close(method.probabilities()["cell"].detach(), expected)
    assert [str(pick) for pick in method.derive().cells["cell"].picks] == ["skip_connect(0->1)", "skip_connect(0->2)"]


@pytest.mark.parametrize(
    ("scale", "space", "epochs", "rates"),
    [("paper", "darts", 50, (0.1, 0.0, 6e-4)), ("nb201", "nb201", 100, (0.025, 0.001, 3e-4))],
)
def test_recipes_match_the_released_code(
    scale: str, space: str, epochs: int, rates: tuple[float, float, float]
) -> None:
    recipe = resolve({"method": "drnas", "space": space, "data": "cifar10", "scale": scale})
    w, a = recipe.weights, recipe.architecture
    assert (recipe.regime, recipe.epochs, recipe.batch_size) == ("bilevel", epochs, 64)
    assert (w.lr, w.lr_min, a.lr) == rates
    assert (w.momentum, w.weight_decay, w.clip) == (0.9, 3e-4, 5.0)
    assert (a.beta1, a.beta2, a.weight_decay, a.clip) == (0.5, 0.999, 1e-3, 0.0)  # 1e-3 is the weight of the l2 term
    assert recipe.method_settings["kl_weight"] == 0.0


@pytest.mark.parametrize("regime", ["bilevel", "unrolled"])
def test_a_search_is_the_same_when_it_is_stopped_and_resumed(regime: str, tmp_path: Path) -> None:
    data = write_data(tmp_path / "toy.npz")
    changes = {"method": "drnas", "regime": regime, "method_settings": {"kl_weight": 1e-3}, "epochs": 2}
    check_resumed(resolve(settings("nb201", data, **changes, space_settings=THREE_EDGES)), tmp_path, 1, 1)
