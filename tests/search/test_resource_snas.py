"""SNAS's resource term: three ways to one expectation, and the authors' released command written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from softcell.arch import Choice, Table, WeightMix
from softcell.arch.mix import masked_softmax
from softcell.methods.snas import concrete
from softcell.search import resolve
from softcell.search.resource import ResourcePenalty, linear_cost, log_cost, policy_cost
from softcell.spaces import build_space
from softcell.spaces.costs import CostTables, count_candidates
from softcell.spaces.darts import CANDIDATES

CELLS = [("normal", 16, 32)] * 2 + [("reduce", 32, 16)] + [("normal", 32, 16)] * 2
CELLS += [("reduce", 64, 8), ("normal", 64, 8), ("normal", 64, 8)]
"""Kind, channels and side of the nodes of the 8 cells on CIFAR-10."""


@pytest.fixture(scope="module")
def costs() -> CostTables:
    return count_candidates(build_space("darts", {"cells": 8, "channels": 16}), (3, 32, 32), 10)


def cost_of(op: str, c: int, y: int, stride: int) -> tuple[int, int, int]:
    """Parameters, FLOPs and memory access of one candidate: y×y outputs of c channels, all sums by hand."""
    read = 4 if stride == 2 else 1  # a map of twice the side has four times the positions
    if op == "none":
        return 0, 0, 0
    if op.endswith("pool_3x3"):
        return 0, 9 * y * y * c, y * y * (read * c + c)
    if op == "skip_connect":
        if stride == 1:
            return 0, 0, 2 * y * y * c
        return c * c, c * c * y * y, 2 * y * y * (4 * c + c // 2) + c * c
    window = 9 if op.endswith("3x3") else 25
    weights = window * c + c * c
    if op.startswith("dil"):
        return weights, weights * y * y, y * y * (read * c + c + c + c) + weights
    return 2 * weights, 2 * weights * y * y, y * y * (read * c + c + 6 * c) + 2 * weights


def edges() -> list[tuple[int, int]]:
    return [(source, target) for target in range(2, 6) for source in range(target)]


def twin(samples: dict[str, list[list[float]]]) -> float:
    """Per edge the mean of three logarithms of the sample's costs, none below 1; normal / 6 + reduce / 2."""
    totals = {"normal": 0.0, "reduce": 0.0}
    for kind, c, y in CELLS:
        for z, (source, _) in zip(samples[kind], edges(), strict=True):
            stride = 2 if kind == "reduce" and source < 2 else 1
            sums = [0.0, 0.0, 0.0]
            for weight, op in zip(z, CANDIDATES, strict=True):
                for i, value in enumerate(cost_of(op, c, y, stride)):
                    sums[i] += weight * value
            totals[kind] += sum(math.log(max(1.0, value)) for value in sums) / 3
    return totals["normal"] / 6 + totals["reduce"] / 2


def drawn(costs: CostTables, temperature: float, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """log α near its start, and one sample of it."""
    generator = torch.Generator().manual_seed(seed)
    log_alpha, sample = {}, {}
    for table in costs.layout.tables:
        start = 1.0 + 0.3 * torch.randn(table.shape, generator=generator, dtype=torch.float64)
        uniform = torch.rand(table.shape, generator=generator, dtype=torch.float64)
        log_alpha[table.name] = start.requires_grad_()
        sample[table.name] = concrete(log_alpha[table.name], table.mask(), temperature, uniform)
    return log_alpha, sample


@pytest.mark.parametrize("scale", ["paper", "small"])
def test_the_recipe_of_snas_has_the_authors_form_and_weight(scale: str) -> None:
    resource = resolve({"method": "snas", "scale": scale}).resource
    assert (resource.form, resource.estimator, resource.eta) == ("log", "monte-carlo", 1.5e-3)
    assert set(resource.kinds) == {"parameters", "flops", "memory"}


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.03])
def test_the_penalty_is_the_authors_formula_on_the_step_s_sample(costs: CostTables, temperature: float) -> None:
    """Value against loops over plain numbers; gradient against central differences of those loops."""
    penalty = ResourcePenalty(resolve({"method": "snas", "scale": "paper"}).resource, costs).double()
    log_alpha, sample = drawn(costs, temperature, seed=3)
    probabilities = {name: value.softmax(-1) for name, value in log_alpha.items()}
    found = penalty(probabilities, WeightMix(costs.layout, sample))
    plain = {name: z.tolist() for name, z in sample.items()}
    assert found.item() == pytest.approx(1.5e-3 * twin(plain), rel=1e-12)
    slopes = dict(zip(sample, torch.autograd.grad(found, list(sample.values())), strict=True))
    for name, edge, candidate in (("normal", 0, 0), ("normal", 4, 3), ("reduce", 1, 5), ("reduce", 13, 7)):
        step, sides = 1e-6, []
        for sign in (1, -1):
            moved = {key: [list(row) for row in rows] for key, rows in plain.items()}
            moved[name][edge][candidate] += sign * step
            sides.append(1.5e-3 * twin(moved))
        slope = (sides[0] - sides[1]) / (2 * step)
        assert slopes[name][edge, candidate].item() == pytest.approx(slope, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize(("temperature", "ratio"), [(1.0, 1.0), (0.1, 5.8), (0.03, 7.1)])
def test_a_sample_pulls_harder_towards_none_than_the_expectation_as_the_temperature_falls(
    costs: CostTables, temperature: float, ratio: float
) -> None:
    """-∂/∂ log α of `none` at the uniform start, mean over edges and 1,500 samples, beside that of the expected cost.

    The latter is p(none) = 1/8 at any temperature, as long as no cost is below the floor.
    """
    settings = resolve({"method": "snas", "scale": "paper", "resource": {"weight": 1.0}}).resource
    penalty = ResourcePenalty(settings, costs).double()
    table, sites = costs.layout.table("normal"), len(costs.layout.sites_of("normal"))
    generator = torch.Generator().manual_seed(0)
    rest = {"reduce": torch.zeros(costs.layout.table("reduce").shape, dtype=torch.float64)}
    total, rounds = 0.0, 250
    for _ in range(rounds):  # every cell of the supernet has a sample of its own here: six at once
        log_alpha = torch.ones(sites, *table.shape, dtype=torch.float64, requires_grad=True)
        uniform = torch.rand(log_alpha.shape, generator=generator, dtype=torch.float64)
        z = concrete(log_alpha, table.mask(), temperature, uniform)
        value = penalty({}, WeightMix(costs.layout, {"normal": z, **rest}))
        (slope,) = torch.autograd.grad(value, log_alpha)
        total -= float(slope[..., CANDIDATES.index("none")].sum()) / len(table) / rounds
    assert total / (1 / 8) == pytest.approx(ratio, rel=0.08)
    even = torch.zeros(table.shape, dtype=torch.float64, requires_grad=True)
    expected = ResourcePenalty(
        resolve({"method": "snas", "scale": "paper", "resource": {"weight": 1.0, "estimator": "expectation"}}).resource,
        costs,
    ).double()
    probabilities = {"normal": even.softmax(-1), **rest}
    value = expected(probabilities, WeightMix(costs.layout, probabilities))
    (slope,) = torch.autograd.grad(value, even)
    torch.testing.assert_close(slope[:, 0], torch.full((len(table),), -1 / 8, dtype=torch.float64))


TABLE = Table("cell", (Choice(0, 1, ("a", "b", "c")), Choice(0, 2, ("a", "b")), Choice(1, 2, ("a",))), (2,))
COSTS = torch.tensor(
    [[[0.0, 9.0, 4.0], [2.0, 7.0, 0.0], [3.0, 0.0, 0.0]], [[0.0, 3.0, 1.0], [1.0, 5.0, 0.0], [0.5, 0.0, 0.0]]],
    dtype=torch.float64,
)
"""Two sites; padding is 0."""


def logits() -> Tensor:
    return torch.tensor([[0.3, -0.2, 0.9], [0.1, 1.0, 50.0], [2.0, 50.0, 50.0]], dtype=torch.float64).requires_grad_()


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
