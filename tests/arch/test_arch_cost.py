"""Appendix F of SNAS by hand-computed values, and three estimators of one expectation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from softcell.arch import Choice, Layout, StrongestEach, Table
from softcell.arch.cost import CostTables, Resources, convolution, linear_cost, log_cost, passing, policy_cost, pooling
from softcell.arch.mix import masked_softmax

TABLE = Table("cell", (Choice(0, 1, ("a", "b", "c")), Choice(0, 2, ("a", "b")), Choice(1, 2, ("a",))), (2,))
COSTS = torch.tensor(
    [[[0.0, 9.0, 4.0], [2.0, 7.0, 0.0], [3.0, 0.0, 0.0]], [[0.0, 3.0, 1.0], [1.0, 5.0, 0.0], [0.5, 0.0, 0.0]]],
    dtype=torch.float64,
)
"""Two sites; padding is 0."""


def logits() -> Tensor:
    return torch.tensor([[0.3, -0.2, 0.9], [0.1, 1.0, 50.0], [2.0, 50.0, 50.0]], dtype=torch.float64).requires_grad_()


def test_a_convolution_costs_as_equations_35_to_37_say() -> None:
    # 4×5 output, 3×3 window, 6 to 8 channels in 2 groups: 9·6·8/2 = 216 weights.
    assert convolution(4, 5, 9, 6, 8, groups=2) == Resources(216, 20 * 216, 20 * 14 + 216)
    # With stride 2 an input of 8×10 is read for the same output.
    assert convolution(4, 5, 9, 6, 8, groups=2, reduction=4) == Resources(216, 20 * 216, 80 * 6 + 20 * 8 + 216)


def test_pooling_and_passing_cost_as_equations_38_to_40_say() -> None:
    assert pooling(4, 5, 9, 6, 6) == Resources(0, 20 * 9 * 6, 20 * 12)
    assert pooling(4, 5, 9, 6, 6, printed=True) == Resources(0, 20 * 9 * 36, 20 * 12)
    assert pooling(4, 5, 9, 6, 6, reduction=4) == Resources(0, 20 * 9 * 6, 80 * 6 + 20 * 6)
    assert passing(4, 5, 6, 6) == Resources(0, 0, 20 * 12)


def test_costs_are_found_by_table_and_kind() -> None:
    other = Table("other", (Choice(0, 1, ("a", "b")),), (1,))
    unread = Table("unread", (Choice(0, 1, ("a",)),), (1,))
    layout = Layout("toy", (TABLE, other, unread), ("cell", "other", "cell"), StrongestEach())
    rows = (COSTS[0], torch.tensor([[1.0, 2.0]], dtype=torch.float64), COSTS[1])
    tables = CostTables(layout, {"flops": rows})
    assert torch.equal(tables.of("flops", "cell"), COSTS)
    assert tables.of("flops", "other").tolist() == [[[1.0, 2.0]]]
    assert tables.read_tables() == ("cell", "other")
    with pytest.raises(AssertionError, match="one"):
        CostTables(layout, {"flops": rows[:2]})


def test_the_linear_cost_of_a_one_hot_sample_matches_the_architecture() -> None:
    z = torch.tensor([[0, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.float64)
    assert float(linear_cost(z, COSTS)) == (9 + 2 + 3) + (3 + 1 + 0.5)
    per_site = torch.stack([z, torch.tensor([[0, 0, 1], [0, 1, 0], [1, 0, 0]], dtype=torch.float64)])
    assert float(linear_cost(per_site, COSTS)) == (9 + 2 + 3) + (1 + 5 + 0.5)


def test_the_log_form_is_the_mean_over_sites_of_the_sum_of_floored_logarithms() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.9, 0.1, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    first = math.log(9 / 4 + 1) + math.log(1.8 + 0.7) + math.log(3.0)
    second = 0.0 + math.log(0.9 + 0.5) + 0.0  # 3/4 + 1/4 = 1, and 0.5 is floored at 1
    assert float(log_cost(p, COSTS)) == pytest.approx((first + second) / 2)


def test_an_edge_below_the_floor_is_not_pushed_any_further() -> None:
    p = torch.tensor([[0.5, 0.5]], dtype=torch.float64, requires_grad=True)
    log_cost(p, torch.tensor([[[0.5, 1.0]]], dtype=torch.float64)).backward()
    assert not p.grad.any()  # type: ignore[union-attr]


def estimates(draws: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Value and gradient by draw: Monte Carlo with near one-hot concrete samples, and policy gradient."""
    uniform = torch.rand(draws, *TABLE.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise = -torch.log(-torch.log(uniform.clamp(1e-300, 1 - 1e-16)))
    found = {}
    many = logits().detach().expand(draws, *TABLE.shape).clone().requires_grad_()
    z = masked_softmax(many + noise, TABLE.mask(), 0.03)
    values = (z[:, None] * COSTS).sum((1, 2, 3))
    found["monte-carlo"] = values.detach(), torch.autograd.grad(values.sum(), many)[0]
    policy_values, policy_gradients = [], []
    for part in uniform[: draws // 20]:
        one = logits()
        value = policy_cost(masked_softmax(one, TABLE.mask()), COSTS, part[None])
        policy_values.append(value.detach())
        policy_gradients.append(torch.autograd.grad(value, one)[0])
    found["policy"] = torch.stack(policy_values), torch.stack(policy_gradients)
    return found


def test_closed_form_monte_carlo_and_policy_gradient_agree() -> None:
    """Values and gradients within 5 standard errors: by chance less than once in a million runs per number.

    The concrete sample is taken at 0.03, the end of SNAS's schedule: its mean differs from the one-hot one by about the
    temperature squared, far below the errors here. The policy gradient draws one-hot and is unbiased.
    """
    alpha = logits()
    exact = linear_cost(masked_softmax(alpha, TABLE.mask()), COSTS)
    (slope,) = torch.autograd.grad(exact, alpha)
    for name, (values, gradients) in estimates(60_000).items():
        n = len(values)
        assert abs(float(values.mean() - exact.detach())) < 5 * float(values.std()) / n**0.5, name
        error = gradients.std(0) / n**0.5
        assert (gradients.mean(0) - slope).abs().le(5 * error + 1e-12).all(), name
        assert (error[:2, :2] < 0.1 * slope[:2, :2].abs().max()).all(), (
            f"{name}: the errors are small enough to compare"
        )


def test_the_baseline_lowers_the_variance_of_the_policy_gradient() -> None:
    uniform = torch.rand(2000, 1, *TABLE.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    with_baseline, without = [], []
    for part in uniform:
        alpha = logits()
        p = masked_softmax(alpha, TABLE.mask())
        with_baseline.append(torch.autograd.grad(policy_cost(p, COSTS, part), alpha, retain_graph=True)[0])
        winner = (p.log() - torch.log(-torch.log(part[0]))).argmax(-1, keepdim=True)
        plain = (COSTS.sum(0).gather(-1, winner) * p.gather(-1, winner).log()).sum()
        without.append(torch.autograd.grad(plain, alpha)[0])
    spread, wider = torch.stack(with_baseline).std(0), torch.stack(without).std(0)
    assert spread.square().sum() < 0.7 * wider.square().sum()


def test_many_draws_of_the_policy_gradient_are_averaged() -> None:
    uniform = torch.rand(500, *TABLE.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    alpha = logits()
    p = masked_softmax(alpha, TABLE.mask())
    together = policy_cost(p, COSTS, uniform)
    single = torch.stack([policy_cost(p, COSTS, part[None]) for part in uniform]).mean()
    torch.testing.assert_close(together, single)
    torch.testing.assert_close(
        torch.autograd.grad(together, alpha, retain_graph=True)[0], torch.autograd.grad(single, alpha)[0]
    )


def test_padding_is_never_drawn_and_costs_nothing() -> None:
    costs = COSTS.clone()
    costs[:, ~TABLE.mask()] = 1e9
    alpha = logits()
    p = masked_softmax(alpha, TABLE.mask())
    uniform = torch.rand(2000, *TABLE.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert float(policy_cost(p, costs, uniform).detach()) < 100
    assert linear_cost(p, costs).item() == pytest.approx(linear_cost(p, COSTS).item())
    assert torch.autograd.grad(policy_cost(p, costs, uniform), alpha)[0].isfinite().all()
