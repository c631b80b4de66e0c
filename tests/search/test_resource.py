"""The resource penalty and budgets: hand-computed values, toys with known answers, and searches with every method."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.arch import Cell, Choice, Genotype, Layout, Mix, StrongestEach, Table, TopInputs, WeightMix, derive
from softcell.arch.genotype import reaches_output
from softcell.arch.mix import masked_softmax
from softcell.engine.task import Note
from softcell.errors import UserError
from softcell.methods import METHODS, Method
from softcell.methods.snas import Snas, concrete
from softcell.search import resolve, search
from softcell.search.budget import Budget, counted_network, format_cost, next_multiplier
from softcell.search.resource import (
    PRESETS,
    Resource,
    ResourcePenalty,
    check_steerable,
    latency,
    latency_of,
    quantity,
    read_latencies,
    with_latencies,
)
from softcell.search.steps import Unrolling, bilevel, single_level, unrolled
from softcell.spaces import build_space
from softcell.spaces.base import evaluation_space
from softcell.spaces.costs import CostTables, count_candidates, count_genotype
from tests.helpers.method_kinds import one_of_each_kind
from tests.helpers.search_toys import (
    THREE_EDGES,
    batch,
    check_resumed,
    same,
    settings,
    state_of,
    step_state,
    write_data,
)

DIFFERENTIABLE = [name for name in METHODS if issubclass(kind := METHODS.get(name), Method) and kind.learns]
WITH_LOGITS = [name for name in DIFFERENTIABLE if name != "itnas"]  # its test file has its own

ONE = Table("one", (Choice(0, 1, ("none", "cheap", "dear")),), (1,))
TWO = Table("two", (Choice(0, 1, ("cheap", "dear")),), (1,))
LAYOUT = Layout("toy", (ONE, TWO), ("one", "two", "one"), StrongestEach())


def rows(*values: list[float]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([row], dtype=torch.float64) for row in values)


COSTS = CostTables(
    LAYOUT,
    {
        "parameters": rows([0, 10, 100], [20, 40], [0, 30, 300]),
        "flops": rows([0, 1, 1000], [5, 50], [0, 2, 2000]),
        "memory": rows([0, 7, 8], [9, 9], [0, 7, 8]),
    },
)
P = {
    "one": torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64),
    "two": torch.tensor([[0.5, 0.5]], dtype=torch.float64),
}


def penalty(**given: Any) -> ResourcePenalty:
    return ResourcePenalty(Resource(**given), COSTS).double()


def mix(weights: dict[str, Tensor] = P) -> WeightMix:
    return WeightMix(LAYOUT, weights)


def test_the_log_form_matches_hand_computed_values() -> None:
    """Per kind: mean over the sites of a table, sum over tables; then the mean over kinds, times the weight."""
    parameters = (math.log(27.5) + math.log(82.5)) / 2 + math.log(30)
    flops = (math.log(250.25) + math.log(500.5)) / 2 + math.log(27.5)
    memory = math.log(3.75) + math.log(9)
    assert float(penalty(weight=2.0)(P, mix())) == pytest.approx(2 * (parameters + flops + memory) / 3)
    assert float(penalty(weight=2.0, kinds=("flops",))(P, mix())) == pytest.approx(2 * flops)


def test_the_linear_form_is_a_share_of_the_dearest_architecture() -> None:
    share = (27.5 + 30 + 82.5) / (100 + 40 + 300)
    assert float(penalty(weight=1.0, form="linear", kinds=("parameters",))(P, mix())) == pytest.approx(share)
    dearest = {"one": torch.tensor([[0.0, 0, 1]]).double(), "two": torch.tensor([[0.0, 1]]).double()}
    assert float(penalty(weight=3.0, form="linear")(dearest, mix())) == pytest.approx(3.0)


def test_expected_costs_are_in_their_own_units() -> None:
    assert penalty(weight=0.0).expected(P) == pytest.approx(
        {"parameters": 140.0, "flops": 250.25 + 27.5 + 500.5, "memory": 3.75 + 9 + 3.75}
    )


def test_a_weight_of_0_only_records() -> None:
    assert float(penalty(weight=0.0)(P, mix())) == 0.0
    assert Resource(weight=0.0).is_on
    assert not Resource().is_on


def test_monte_carlo_reads_the_mix_and_the_others_the_probabilities() -> None:
    other = {name: 1.0 - p for name, p in P.items()}
    for form in ("log", "linear"):
        closed = penalty(weight=1.0, form=form)
        sampled = penalty(weight=1.0, form=form, estimator="monte-carlo")
        assert float(sampled(P, mix(other))) == pytest.approx(float(closed(other, mix())))
        assert float(closed(P, mix(other))) == pytest.approx(float(closed(P, mix())))

    class Own(Mix):
        def combine(self, site: int, choice: int, outputs: Any) -> None:
            return None

    with pytest.raises(UserError, match="estimator=expectation"):
        penalty(weight=1.0, estimator="monte-carlo")(P, Own())


def test_monte_carlo_takes_weights_that_differ_by_site() -> None:
    first, third = torch.tensor([[1.0, 0, 0]]).double(), torch.tensor([[0.0, 1, 0]]).double()
    own = {"one": torch.stack([first, third]), "two": P["two"][None]}
    found = penalty(weight=1.0, form="linear", kinds=("parameters",), estimator="monte-carlo")(P, mix(own))
    assert float(found) == pytest.approx((0 + 30 + 30) / 440)


def test_the_policy_gradient_of_the_component_agrees_with_the_closed_form() -> None:
    """The draws of 800 steps, within 5 standard errors."""
    torch.manual_seed(0)
    logits = {name: p.log().clone().requires_grad_() for name, p in P.items()}
    masks = {"one": ONE.mask(), "two": TWO.mask()}

    def gradient(one: ResourcePenalty) -> Tensor:
        p = {name: masked_softmax(value, masks[name]) for name, value in logits.items()}
        return torch.cat([g.flatten() for g in torch.autograd.grad(one(p, mix()), list(logits.values()))])

    drawn = penalty(weight=1.0, form="linear", estimator="policy")
    many = torch.stack([gradient(drawn) for _ in range(800)])
    exact = gradient(penalty(weight=1.0, form="linear"))
    assert (many.mean(0) - exact).abs().le(5 * many.std(0) / len(many) ** 0.5 + 1e-12).all()
    assert exact.abs().max() > 5 * (many.std(0) / len(many) ** 0.5).max()


@pytest.mark.parametrize(
    ("form", "estimator"), [("log", "expectation"), ("log", "monte-carlo"), ("linear", "expectation")]
)
def test_presets_order_the_expected_parameters(form: str, estimator: str) -> None:
    """A task that likes dear candidates, each a little more than the next cheaper one, on the real costs of a space.

    Samples are drawn at a temperature that falls from 1 to 0.03, as in SNAS.
    """
    torch.manual_seed(0)
    costs = count_candidates(build_space("darts", {"cells": 4, "channels": 8}), (3, 16, 16), 10)
    tables = {table.name: table for table in costs.layout.tables}
    found = []
    for preset in ("none", "mild", "moderate", "aggressive"):
        weight = None if preset != "none" else 0.0
        chosen = Resource(preset=preset, weight=weight, form=form, estimator=estimator)  # type: ignore[arg-type]
        one = ResourcePenalty(chosen, costs).double()
        logits = {
            name: torch.zeros(table.shape, dtype=torch.float64, requires_grad=True) for name, table in tables.items()
        }
        optimiser = torch.optim.Adam(list(logits.values()), lr=0.1)
        preferred = {name: costs.of("parameters", name).mean(0).add(1).log() for name in tables}
        for step in range(60):
            p = {name: masked_softmax(value, tables[name].mask()) for name, value in logits.items()}
            temperature = 1.0 - 0.97 * step / 59
            z = {
                name: concrete(value, tables[name].mask(), temperature, torch.rand(value.shape, dtype=torch.float64))
                for name, value in logits.items()
            }
            task = sum(
                -2e-3 * (p[name] * preferred[name]).sum() - 1e-3 * torch.special.entr(p[name]).sum() for name in p
            )
            optimiser.zero_grad()
            (task + one(p, WeightMix(costs.layout, z))).backward()
            optimiser.step()
        found.append(
            one.expected({name: masked_softmax(v, tables[name].mask()) for name, v in logits.items()})["parameters"]
        )
    assert found == sorted(found, reverse=True)
    assert all(later < 0.97 * earlier for earlier, later in itertools.pairwise(found)), found
    weights = Resource(form=form, estimator=estimator).levels  # type: ignore[arg-type]
    assert weights["none"] == 0 < weights["mild"] < weights["moderate"] < weights["aggressive"]


# --- settings ---


@pytest.mark.parametrize(
    ("text", "number"),
    [("2.5M", 2.5e6), ("500m", 5e8), ("10k", 1e4), ("1.5G", 1.5e9), (3e6, 3e6), ("1e6", 1e6), (7, 7)],
)
def test_quantities_are_read_as_people_write_them(text: float | str, number: float) -> None:
    assert quantity("x", text) == (number if text != "500m" else 500e6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_params": "lots"}, r"resource.max_params must be a number above 0.*2.5M.*'lots'"),
        ({"max_params": 0}, "number above 0"),
        ({"max_flops": "-3M"}, "resource.max_flops"),
        ({"max_flops": "1.2.3M"}, "resource.max_flops"),
        ({"weight": -1}, r"resource.weight >= 0"),
        ({"preset": "harsh"}, "none, mild, moderate, aggressive"),
        ({"estimator": "policy", "weight": 1}, "resource.form=linear"),
        ({"max_latency": 3}, "resource.latency_table"),
        ({"kinds": ["latency"]}, "resource.latency_table"),
        ({"latency_table": "times.yaml"}, "--max-latency"),
        ({"kinds": []}, "at least one"),
        ({"image_size": 224}, r"--max-params"),
        ({"image_size": 2, "max_params": 1}, r"resource.image_size >= 4"),
        ({"kinds": ["watts"]}, "parameters, flops, memory, latency"),
        ({"max_parms": "1M"}, "did you mean 'max_params'"),
    ],
)
def test_bad_resource_settings_are_refused_with_the_rule(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve({"resource": given})


def test_a_recipe_with_a_budget_resolves_to_itself() -> None:
    recipe = resolve({"resource": {"max_params": "2.5M", "preset": "mild", "network": {"cells": 8}}})
    assert resolve(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert recipe.resource.budgets() == {"parameters": 2.5e6}
    assert (recipe.resource.eta, Resource(preset="mild", weight=7.0).eta) == (
        PRESETS["log of the expected cost"]["mild"],
        7.0,
    )


def test_a_method_whose_probabilities_cannot_be_steered_is_reported() -> None:
    with pytest.raises(UserError, match="have no gradient"):
        check_steerable(P, "fixed")
    check_steerable({"one": P["one"].clone().requires_grad_()}, "fine")


# --- steps ---


@pytest.mark.parametrize("regime", ["single-level", "bilevel", "unrolled"])
@pytest.mark.parametrize("method", [None, Snas], ids=["darts", "snas"])
def test_the_penalty_moves_the_architecture_and_no_weight(regime: str, method: Any) -> None:
    """The gradient that Adam sees differs by exactly that of the penalty; weights learn as without it."""
    gradients, weights = [], []
    for with_penalty in (False, True):
        one = step_state("nb201", method=method)
        space = build_space("nb201", {"cells_per_stage": 1, "channels": 2})
        costs = count_candidates(space, (1, 8, 8), 3)
        if with_penalty:
            one.resource = ResourcePenalty(Resource(weight=0.5), costs).double()
        caught: list[Tensor] = []
        original = one.architecture_optimiser.step
        one.architecture_optimiser.step = lambda o=original, c=caught, m=one.method: (  # type: ignore[method-assign]
            c.append(torch.cat([p.grad.flatten().clone() for p in m.parameters()])),  # type: ignore[union-attr]
            None,
        )[1]
        torch.manual_seed(3)
        if regime == "single-level":
            single_level(one, *batch(0))
        elif regime == "bilevel":
            bilevel(one, batch(0), batch(1))
        else:
            unrolled(one, batch(0), batch(1), Unrolling())
        gradients.append(caught[0])
        weights.append(one.supernet.state_dict())
        p = one.method.probabilities()
        alone = ResourcePenalty(Resource(weight=0.5), costs).double()(p, WeightMix(space.layout(), p))
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(alone, list(one.method.parameters()))])
    torch.testing.assert_close(gradients[1] - gradients[0], expected, rtol=1e-6, atol=1e-9)
    assert expected.abs().max() > 1e-3
    assert same(weights[0], weights[1])


# --- budgets ---


def test_a_multiplier_rises_above_the_budget_rests_just_below_and_falls_far_below() -> None:
    assert next_multiplier(1e-3, 2.0, 1.0, 0, 100, "log") == pytest.approx(1e-3 * math.exp(0.4 * math.log(2)))
    assert next_multiplier(1e-3, 1.01, 1.0, 0, 100, "log") == pytest.approx(1e-3 * math.exp(0.4 * 0.25)), (
        "at least a quarter"
    )
    assert next_multiplier(1e-3, 1.0, 1.0, 0, 100, "log") == 1e-3
    assert next_multiplier(1e-3, 0.91, 1.0, 0, 100, "log") == 1e-3
    slowly = pytest.approx(1e-3 * math.exp(0.25 * 0.4 * math.log(0.5)))
    assert next_multiplier(1e-3, 0.5, 1.0, 0, 100, "log") == next_multiplier(1e-3, 0.5, 1.0, 65, 100, "log") == slowly
    assert next_multiplier(1e-3, 0.5, 1.0, 66, 100, "log") == 1e-3, "not in the last third"
    assert next_multiplier(1e-3, 2.0, 1.0, 99, 100, "log") > 1e-3
    assert next_multiplier(1e-3, 1e9, 1.0, 0, 1, "log") == pytest.approx(1e-2), "at most a factor of 10"
    assert next_multiplier(0.9, 1e9, 1.0, 0, 1, "log") == 1.0
    assert next_multiplier(1.1e-5, 0.0, 1.0, 0, 10, "log") == 1e-5


def test_numbers_are_shown_with_their_unit() -> None:
    assert format_cost("parameters", 2_534_000) == "2.53M parameters"
    assert format_cost("flops", 5.2e8) == "520M multiply-adds"
    assert format_cost("parameters", 950) == "950 parameters"
    assert format_cost("parameters", 1) == "1 parameter"
    assert format_cost("latency", 3.5) == "a latency of 3.5"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.npz")


def notes_of(events: list[Any]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


NETWORK = {"cells_per_stage": 1, "channels": 4}
UNBIASED = {"beta-darts": {"last_weight": 0.0}, "darts-minus": {"auxiliary": 0.0}}
"""Settings without which a method moves towards or away from dear candidates by itself, within these few steps."""


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        # One of each regime and each kind; the others, which go the same way, in the exhaustive run.
        pytest.param(m, k, marks=[] if (m, k) in (("darts", "params"), ("snas", "flops")) else [pytest.mark.exhaustive])
        for m in WITH_LOGITS
        for k in ("params", "flops")
    ],
)
def test_a_budget_drives_the_search_until_the_derived_network_meets_it(
    method: str, kind: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits start in favour of the dearest candidate everywhere; the budget asks for less than half of its cost."""
    space = build_space("nb201", NETWORK)
    layout = space.layout()
    dear = layout.tables[0].columns("nor_conv_3x3")
    most, least = (
        count_genotype(space, derive(layout, {"cell": sign * dear.double()}, StrongestEach()), (1, 8, 8), 3)
        for sign in (1, -1)
    )
    high, low = (most.parameters, least.parameters) if kind == "params" else (most.multiply_adds, least.multiply_adds)
    limit = low + 0.45 * (high - low)
    chosen = METHODS.get(method)
    original = chosen.__init__

    def favour(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        with torch.no_grad():
            next(self.parameters())[dear] += 2.0

    monkeypatch.setattr(chosen, "__init__", favour)
    slow = {"architecture": {"lr": 0.15, "weight_decay": 0.0}, "child_every": 0, "epochs": 10}
    given = settings("nb201", data, method=method, method_settings=UNBIASED.get(method, {}), **slow)
    name = {"params": "parameters", "flops": "flops"}[kind]
    free = search(
        resolve(given, {"resource": {"preset": "none", f"max_{kind}": "9G", "network": NETWORK}}), tmp_path / "free"
    )
    assert free.metrics[-1][f"derived_{name}"] > limit, "without the budget it stays above"
    events: list[Any] = []
    bound = {"resource": {"preset": "none", f"max_{kind}": limit, "network": NETWORK}}
    result = search(resolve(given, bound), tmp_path / "run", on_event=events.append)
    assert result.genotype is not None
    cost = count_genotype(space, result.genotype, (1, 8, 8), 3)
    found = cost.parameters if kind == "params" else cost.multiply_adds
    assert found <= limit < result.metrics[0][f"derived_{name}"]
    results = json.loads((tmp_path / "run" / "run.json").read_text())["results"]
    assert results["budget_met"] is True
    assert results[f"derived_{name}"] == found
    # Of the last epoch, or of the last one before it that meets the budget and has no empty cell.
    assert found in [row[f"derived_{name}"] for row in result.metrics]
    assert f"multiplier_{name}" in result.metrics[-1]
    assert not [text for text in notes_of(events) if "over the budget" in text]


@pytest.mark.parametrize("method", DIFFERENTIABLE)
def test_a_budget_that_no_architecture_meets_is_refused_before_there_is_a_folder(
    method: str, data: Path, tmp_path: Path
) -> None:
    given = settings("nb201", data, method=method, resource={"max_params": 100, "network": NETWORK})
    with pytest.raises(UserError, match=r"no architecture meets a budget of 100 parameters: the smallest network has"):
        search(resolve(given), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["darts", "snas"])
def test_a_budget_that_is_missed_is_reported_with_the_gap(method: str, data: Path, tmp_path: Path) -> None:
    """The least that can be, and no time to get there."""
    space = build_space("nb201", NETWORK)
    layout = space.layout()
    least = derive(layout, {"cell": layout.tables[0].columns("skip_connect").double()}, StrongestEach())
    limit = count_genotype(space, least, (1, 8, 8), 3).parameters
    events: list[Any] = []
    slow = {"architecture": {"lr": 1e-6, "weight_decay": 0.0}, "epochs": 2}
    given = settings("nb201", data, method=method, **slow, resource={"max_params": limit, "network": NETWORK})
    result = search(resolve(given), tmp_path / "run", on_event=events.append)
    (after,) = (text for text in notes_of(events) if "budget" in text)
    assert result.genotype is not None
    has = count_genotype(space, result.genotype, (1, 8, 8), 3).parameters
    assert has > limit
    assert f"{has / limit - 1:.1%} over the budget of {format_cost('parameters', limit)}" in after
    assert "raise the budget" in after
    multipliers = [row["multiplier_parameters"] for row in result.metrics]
    assert multipliers[-1] > multipliers[0]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["results"]["budget_met"] is False


def test_the_smallest_network_matches_brute_force_if_none_can_be_derived() -> None:
    """All 32 cells with two inner nodes as both kinds of cell, counted; empty cells are no architectures."""
    ops = ("none", "dil_conv_3x3")
    space = build_space("darts", {"cells": 3, "channels": 4, "nodes": 2, "candidates": list(ops)})
    layout, rule = space.layout(), StrongestEach()
    cells = [Cell(picks, (2, 3)) for picks in rule.enumerate(layout.table("normal"))]
    # Nothing reaches node 2 and no input node 3: only the last edge may be there.
    assert sum(not reaches_output(cell, 2) for cell in cells) == 2
    pairs = [Genotype("darts", {"normal": cell, "reduce": cell}) for cell in cells if reaches_output(cell, 2)]
    counts = [count_genotype(space, one, (1, 8, 8), 3) for one in pairs]
    for name, given in (("parameters", {"max_params": 1}), ("flops", {"max_flops": 1})):
        budget = Budget(Resource(**given), None, space, (1, 8, 8), 3, num_epochs=1)
        budget.find_cheapest(layout, count_candidates(space, (1, 8, 8), 3, trained=True), rule)
        least = min(c.parameters if name == "parameters" else c.multiply_adds for c in counts)
        assert budget.least(name).startswith(f"the smallest network has {format_cost(name, least)}")
        with pytest.raises(UserError, match="no architecture meets"):
            budget.check_reach(lambda text: None)


def test_a_cell_of_one_pool_is_smaller_than_an_empty_one() -> None:
    """On digits: an empty cell would hand on four nodes of zeros, one pool a single node."""
    space = evaluation_space("darts", "digits")
    budget = Budget(Resource(max_params="20k"), None, space, (1, 8, 8), 10, num_epochs=1)
    costs = count_candidates(space, (1, 8, 8), 10, trained=True)
    budget.find_cheapest(space.layout(), costs, StrongestEach())
    budget.check_reach(lambda text: pytest.fail(text))
    assert "has 17.4k parameters" in budget.least("parameters")
    for cell in budget.cheapest[0].cells.values():
        assert sum(pick.op != "none" for pick in cell.picks) == 1
    own = Budget(Resource(max_params="20k"), None, space, (1, 8, 8), 10, num_epochs=1)
    own.find_cheapest(space.layout(), costs, None)  # DARTS itself keeps two inputs per node
    with pytest.raises(UserError, match=r"56\.2k parameters"):
        own.check_reach(lambda text: None)


def test_a_budget_can_be_counted_for_other_data_than_the_search_s() -> None:
    """ImageNet's network at 224×224 while searching on CIFAR-10; the search's own candidates stay."""
    resource = {"max_flops": "600M", "image_size": 224, "num_classes": 1000, "sizes": "imagenet"}
    recipe = resolve({"method": "snas", "data": "cifar10", "space_settings": {"nodes": 3}, "resource": resource})
    space, shape, classes = counted_network(recipe, (3, 32, 32), 10)
    assert (shape, classes) == ((3, 224, 224), 1000)
    assert space == build_space("darts", {"cells": 14, "channels": 48, "stem": "imagenet", "nodes": 3})
    plain = resolve({"method": "snas", "data": "cifar10", "resource": {"max_flops": "600M"}})
    assert counted_network(plain, (3, 32, 32), 10) == (evaluation_space("darts", "cifar10"), (3, 32, 32), 10)
    with pytest.raises(UserError, match=r"`resource.sizes` must name sizes .*small, cifar, imagenet"):
        counted_network(resolve({"resource": {**resource, "sizes": "huge"}}), (3, 32, 32), 10)


def test_the_budget_means_the_network_that_training_would_build(data: Path, tmp_path: Path) -> None:
    result = search(resolve(settings("nb201", "digits", epochs=1, resource={"max_params": "1G"})), tmp_path / "run")
    assert result.genotype is not None
    trained = evaluation_space("nb201", "digits")
    assert result.metrics[0]["derived_parameters"] == count_genotype(trained, result.genotype, (1, 8, 8), 10).parameters


@pytest.mark.parametrize("method", one_of_each_kind(DIFFERENTIABLE))
def test_only_recording_costs_changes_nothing_else(method: str, data: Path, tmp_path: Path) -> None:
    own = {"method": method, "epochs": 1, "child_every": 0, "drop_path": 0.0, "space_settings": THREE_EDGES}
    given = settings("nb201", data, **own)
    plain = search(resolve(given, {"resource": {"preset": "none"}}), tmp_path / "plain")
    counted = search(resolve(given, {"resource": {"preset": "none", "weight": 0.0}}), tmp_path / "counted")
    for one, other in zip(plain.metrics, counted.metrics, strict=True):
        assert {k: v for k, v in other.items() if not k.startswith("expected") and k != "seconds"} == {
            k: v for k, v in one.items() if k != "seconds"
        }
    assert same(state_of(tmp_path / "plain")["method"], state_of(tmp_path / "counted")["method"])


def test_multipliers_survive_a_stop(data: Path, tmp_path: Path) -> None:
    limits = {"max_params": 5000, "max_flops": "1M"}
    recipe = resolve(settings("nb201", data, resource={**limits, "network": NETWORK}))
    check_resumed(recipe, tmp_path, 2, 1)


def test_what_belongs_to_a_supernet_is_reported_as_ignored_by_a_sampler(data: Path, tmp_path: Path) -> None:
    events: list[Any] = []
    given = settings("nb201", data, method="random", epochs=1, method_settings={"samples": 1}, drop_path=0.2)
    search(resolve(given, {"child_every": 1}), tmp_path / "run", on_event=events.append)
    assert [text.split("`")[1] for text in notes_of(events)] == ["drop_path", "child_every"]


def test_a_missed_budget_names_the_ways_out_and_the_last_network_that_met_it_is_taken() -> None:
    space = build_space("nb201", NETWORK)
    layout = space.layout()
    found = {
        name: derive(layout, {"cell": layout.tables[0].columns(name).double()}, StrongestEach())
        for name in ("skip_connect", "nor_conv_1x1", "nor_conv_3x3")
    }
    sizes = {name: count_genotype(space, g, (1, 8, 8), 3).parameters for name, g in found.items()}
    costs = count_candidates(space, (1, 8, 8), 3)
    resource = Resource(max_params=float(sizes["nor_conv_1x1"]), weight=0.01)
    one = ResourcePenalty(resource, costs)
    budget = Budget(resource, one, space, (1, 8, 8), 3, num_epochs=10)
    said: list[str] = []
    budget.find_cheapest(layout, costs, None)
    budget.check_reach(said.append)
    assert not said
    assert budget.verdict(found["nor_conv_1x1"])[1] is None, "just met is met"
    budget.end_epoch(4, found["nor_conv_1x1"])
    budget.end_epoch(5, found["nor_conv_3x3"])
    results, message = budget.verdict(found["nor_conv_3x3"])
    assert results["budget_met"] is False and "derived_from_epoch" not in results
    assert message is not None
    for part in ("--epochs", "--resource aggressive", "resource.weight=0.03", "raise the budget"):
        assert part in message
    again = Budget(resource, one, space, (1, 8, 8), 3, num_epochs=10)
    again.load_state_dict(json.loads(json.dumps(budget.state_dict())))
    for each in (budget, again):
        assert each.kept(found["skip_connect"], said.append) == found["skip_connect"] and not said
        assert each.kept(found["nor_conv_3x3"], said.append) == found["nor_conv_1x1"]
        assert "taking the network of epoch 5, the last one that met the budget" in said.pop()
        none = derive(layout, {"cell": layout.tables[0].columns("none").double()}, StrongestEach())
        assert each.is_met(none) and each.kept(none, said.append) == found["nor_conv_1x1"]
        assert "has an empty cell: taking the network of epoch 5" in said.pop()
        results, message = each.verdict(found["nor_conv_1x1"])
        assert results["budget_met"] is True and results["derived_from_epoch"] == 4 and message is None
    tight = Resource(max_params=float(sizes["skip_connect"] - 1))
    cramped = Budget(tight, ResourcePenalty(tight, costs), space, (1, 8, 8), 3, num_epochs=10)
    cramped.find_cheapest(layout, costs, None)
    for name in ("skip_connect", "nor_conv_3x3"):
        message = cramped.verdict(found[name])[1]
        assert message is not None
        assert f"The smallest network found has {format_cost('parameters', sizes['skip_connect'])}" in message
        assert "resource.network.channels=N" in message and "--epochs" not in message
    chain = build_space("proxyless", {"width": 0.25})
    narrow = Budget(tight, None, chain, (3, 32, 32), 3, num_epochs=10)
    assert narrow.smaller() == "--set resource.network.width=N", "a setting that the space has"


# --- latency ---


def test_latencies_come_from_a_file_by_candidate_or_by_table(tmp_path: Path) -> None:
    plain, nested = tmp_path / "plain.yaml", tmp_path / "nested.json"
    plain.write_text("cheap: 0.25\ndear: 1.5\n")
    nested.write_text('{"one": {"cheap": 1, "dear": 4}, "cheap": 0.5, "dear": 2}')
    simple, by_table = with_latencies(COSTS, str(plain)), with_latencies(COSTS, str(nested))
    assert simple.of("latency", "one").tolist() == [[[0.0, 0.25, 1.5]], [[0.0, 0.25, 1.5]]]
    assert by_table.of("latency", "one")[0].tolist() == [[0.0, 1.0, 4.0]]
    assert by_table.of("latency", "two")[0].tolist() == [[0.5, 2.0]]
    with pytest.raises(UserError, match="no time for 'slow'"):
        latency_of(read_latencies(str(plain)), "one", "slow")
    plain.write_text("cheap: 1\ndear: 2\nsep_conv_3x3: 4\nfixed: 1\n")
    assert with_latencies(COSTS, str(plain)).of("latency", "one").any(), "other candidates do no harm"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cheap: fast\n", "'cheap' must be a number"),
        ("cheap: 1\ndear: 2\nfixed: {a: 1}\n", "'fixed' must be a number"),
        ("cheap: 1\ndear: 2\nsep_conf: 3\n", "no candidate 'sep_conf'"),
        ("cheep: 1\ndear: 2\n", "did you mean 'cheap'"),
        ("wun: {cheap: 1}\ncheap: 1\ndear: 2\n", "no table 'wun'"),
        ("[1, 2]", "a latency table must be a mapping"),
        ("", "it is empty"),
        (None, "--latency-table must name"),
    ],
)
def test_a_bad_latency_table_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "times.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=message):
        with_latencies(COSTS, str(file))


def test_times_below_1_are_pushed_too(tmp_path: Path) -> None:
    """The logarithm is taken in units of the smallest time, so that the floor at 1 swallows none."""
    file = tmp_path / "times.yaml"
    file.write_text("cheap: 0.001\ndear: 0.004\n")
    one = ResourcePenalty(
        Resource(weight=1.0, kinds=("latency",), latency_table=str(file)), with_latencies(COSTS, str(file))
    )
    found = one.double()({"one": torch.tensor([[0.0, 0, 1]]).double(), "two": torch.tensor([[1.0, 0]]).double()}, mix())
    assert float(found) == pytest.approx(math.log(4.0))


def test_a_latency_budget_is_the_sum_over_all_cells_of_the_trained_network(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "times.yaml"
    file.write_text("skip_connect: 0.5\nnor_conv_1x1: 1\nnor_conv_3x3: 3\navg_pool_3x3: 1\n")
    events: list[Any] = []
    resource = {"max_latency": 3.1, "latency_table": str(file), "network": {"cells_per_stage": 2}}
    result = search(resolve(settings("nb201", data, resource=resource)), tmp_path / "run", on_event=events.append)
    assert result.genotype is not None
    layout = build_space("nb201", {"cells_per_stage": 2}).layout()
    picks = result.genotype.cells["cell"].picks
    expected = 6 * sum(read_latencies(str(file)).get(pick.op, 0.0) for pick in picks)  # type: ignore[misc]
    assert latency(result.genotype, layout, read_latencies(str(file))) == pytest.approx(expected)  # type: ignore[arg-type]
    assert result.metrics[-1]["derived_latency"] == pytest.approx(expected)
    assert result.metrics[-1]["expected_latency"] > 0
    if expected > 3.1:
        assert any("over the budget of 3.1" in text for text in notes_of(events))


def test_a_latency_table_of_another_network_is_refused(tmp_path: Path) -> None:
    space, file, said = build_space("nb201", NETWORK), tmp_path / "times.yaml", []
    times = "skip_connect: 0.5\nnor_conv_1x1: 1\nnor_conv_3x3: 3\navg_pool_3x3: 1\n"
    for about in (
        "channels: 4, input: [1, 8, 8]",
        "channels: 16, input: [1, 8, 8]",
        "channels: 4, input: [3, 8, 8]",
        "",
    ):
        file.write_text(f"about: {{unit: ms, {about}}}\n{times}")
        resource, texts = Resource(max_latency=1e9, latency_table=str(file)), []
        Budget(resource, None, space, (1, 8, 8), 3, num_epochs=1).warn_of_other_sizes(texts.append)
        said.append(" ".join(texts))
    assert said[0] == said[3] == ""
    assert "channels 16 there and 4 here" in said[1] and "input [3, 8, 8] there and [1, 8, 8] here" in said[2]


def test_the_cheapest_architecture_is_sought_by_the_methods_own_rule() -> None:
    """DARTS never derives `none`, SNAS does: what is out of reach for one need not be for the other."""
    assert METHODS.get("darts").rule is None  # type: ignore[union-attr]
    assert isinstance(METHODS.get("snas").rule, StrongestEach)  # type: ignore[union-attr]
    assert isinstance(build_space("darts").layout().rule, TopInputs)
