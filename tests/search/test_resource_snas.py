"""The resource term of the SNAS authors' released command, written out on the costs of the paper's supernet."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from softcell.arch import WeightMix
from softcell.arch.cost import CostTables
from softcell.methods.snas import concrete
from softcell.search import resolve
from softcell.search.resource import ResourcePenalty
from softcell.spaces import build_space
from softcell.spaces.costs import count_candidates
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
