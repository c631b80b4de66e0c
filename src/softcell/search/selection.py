"""Selection of architectures on a trained supernet: by evolution, by strengths within a budget, or one per budget.

Selections by evolution and by strengths work for any method. A selection within a budget serves methods whose strengths
no penalty can change: IT-NAS searches ProxylessNAS's chain by single paths and keeps networks under 600M multiply-adds;
the paper does not say how. Our choice: among the architectures within the budget, the one with the largest sum of
attention over its layers.

A *front* has several architectures of one finished search, one per budget: the strongest that a budget allows.

With probabilities p of the candidates and costs c, in shares of the most expensive one, the strengths

    p · exp(-λ c)

are derived by the rule of the search, for λ from 0 upwards. Where a rule keeps the strongest candidate of each edge,
this maximises log p - λ c summed over the picks: the Lagrangian of "as probable as possible at this cost". A budget
gets the architecture of the smallest λ that meets it, improved edge by edge while it still does. Costs that decide are
those of the real network, counted at the size of its final training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from softcell.arch import Cell, Genotype, Layout, Rule, StrongestEach, derive, empty_cells
from softcell.arch.choice import Pick
from softcell.arch.derive import strongest_within
from softcell.arch.evolve import evolve
from softcell.arch.rules import rows
from softcell.data import Batches
from softcell.engine.distributed import World
from softcell.errors import UserError
from softcell.search.budget import Budget, counted_network, format_cost, state_budget_for
from softcell.search.recipe import SearchRecipe
from softcell.search.resource import Resource
from softcell.search.supernet import Restored, measure_child
from softcell.spaces import Supernet
from softcell.spaces.costs import count_candidates


def evolved(
    recipe: SearchRecipe,
    supernet: Supernet,
    own: Genotype,
    joins: bool,
    weights: Batches,
    held: Batches,
    budget: Budget | None,
    world: World,
    notify: Callable[[str], None],
) -> tuple[Genotype, dict[str, Any]]:
    """The best architecture that evolution finds within the budgets, and a record for `run.json` (SPOS, §3.3).

    The score of an architecture is its child's accuracy on the validation split, with BatchNorm recalibrated on some
    training batches. own: the architecture that the method derives, scored for comparison. joins: whether it is part of
    the first generation, so that the result is at least as good.
    """
    settings = recipe.evolution

    def score(genotype: Genotype) -> float:
        batches = islice(weights.epoch(0), settings.norm_batches)
        return measure_child(supernet, genotype, held.epoch(0), world, recalibrate=batches).accuracy

    def allowed(genotype: Genotype) -> bool:
        return budget is None or budget.is_met(genotype)

    def note(generation: int, best: float, scored: int) -> None:
        notify(
            f"evolution, generation {generation + 1} of {settings.generations}: best {best:.2%} of {scored} measured"
        )

    starts, first = [] if budget is None else budget.cheapest, [own] if joins else []
    try:
        found = evolve(supernet.layout, settings, score, allowed, recipe.seed, starts, first, note)
    except UserError as error:
        notify(f"{error}; selecting without limits")
        found = evolve(supernet.layout, settings, score, lambda genotype: True, recipe.seed, (), first, note)
    about: dict[str, Any] = {
        "split": "validation",
        "accuracy": found.score,
        "accuracy_of_own": found.scored[own] if own in found.scored else score(own),
        "own": own.to_dict()["cells"],
        "measured": len(found.scored),
        "mean_accuracy": sum(found.scored.values()) / len(found.scored),
        "best_by_generation": list(found.history),
    }
    return found.best, {"evolution": about}


def check_selectable(layout: Layout, limits: Mapping[str, float]) -> None:
    """Raises where strengths and costs of single choices do not add up to those of a network, or with two budgets."""
    if not isinstance(layout.rule, StrongestEach) or len(layout.tables) > 1:
        raise UserError(
            f"a selection within a budget takes one candidate for every edge, but space {layout.space} keeps some of "
            "its edges; let evolution select within it (--set evolution.generations=20)"
        )
    if len(limits) > 1:
        raise UserError(
            f"a selection within a budget supports one limit, but got {', '.join(limits)}; state one of them, or let "
            "evolution select (--set evolution.generations=20)"
        )


def strongest_within_budget(
    layout: Layout, strengths: Mapping[str, Tensor], own: Genotype, budget: Budget, notify: Callable[[str], None]
) -> tuple[Genotype, dict[str, Any]]:
    """The genotype within the budget with the largest sum of strengths, and a record for `run.json`.

    strengths: of the one table [choices, width]. own: the strongest one without a budget. Costs are those of whole
    networks that differ in one choice, so they add up exactly where a choice's cost depends only on itself.
    """
    if budget.is_met(own):
        return own, {}
    ((kind, limit),) = budget.limits.items()
    (table,) = layout.tables
    values, picks = rows(table, strengths[table.name]), list(own.cells[table.name].picks)
    total, costs = budget.measure(own)[kind], list[list[float]]()
    never = layout.rule.never_picked if isinstance(layout.rule, StrongestEach) else ()
    allowed = [[k for k, op in enumerate(choice.candidates) if op not in never] for choice in table.choices]
    for i, choice in enumerate(table.choices):
        notify(f"selection within {format_cost(kind, limit)}: counting choice {i + 1} of {len(table)}")
        costs.append(
            [budget.measure(_with(own, table.name, picks, i, choice.candidates[k]))[kind] - total for k in allowed[i]]
        )
    chosen = strongest_within([[values[i][k] for k in allowed[i]] for i in range(len(table))], costs, limit - total)
    found = own
    for i, number in enumerate(chosen):
        found = _with(
            found, table.name, list(found.cells[table.name].picks), i, table.choices[i].candidates[allowed[i][number]]
        )
    changed = sum(a != b for a, b in zip(found.cells[table.name].picks, picks, strict=True))
    return found, {"within_budget": {"own": own.to_dict()["cells"], f"own_{kind}": total, "changed_choices": changed}}


def _with(genotype: Genotype, table: str, picks: list[Pick], number: int, op: str) -> Genotype:
    """The same with another candidate at one choice."""
    changed = [replace(pick, op=op) if i == number else pick for i, pick in enumerate(picks)]
    cell = Cell(tuple(changed), genotype.cells[table].output)
    return replace(genotype, cells={**genotype.cells, table: cell})


Kind = Literal["parameters", "flops"]
OPTIONS: dict[Kind, str] = {"parameters": "max_params", "flops": "max_flops"}
PENALTIES = (0.0, *(2.0**k for k in range(-10, 13)))
"""Values of λ that are tried. At the largest, only costs decide wherever they differ noticeably."""
REFINEMENTS = 8
"""Bisections between the last λ that misses a budget and the first that meets it."""
NORM_BATCHES = 20
"""Training batches over which BatchNorm is recalibrated before a child is measured."""


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """The architecture of one budget: its costs by kind, and the accuracy of its child with the supernet's weights.

    `accuracy` is a share of the validation split, BatchNorm recalibrated; None for a search without labels.
    """

    limit: float
    genotype: Genotype
    costs: Mapping[str, float]
    accuracy: float | None


def derive_front(
    found: Restored, kind: Kind, limits: Sequence[float], *, on_step: Callable[[int, int, str], None] | None = None
) -> list[FrontPoint]:
    """One architecture per limit, the smallest limit first; equal limits count once.

    Raises `UserError` before anything is measured if no architecture meets the smallest limit.
    """
    notify = on_step or (lambda done, total, what: None)
    ordered = sorted(set(limits))
    budget = _budget(found, kind, ordered[0])
    layout, method = found.supernet.layout, found.method
    probabilities = {name: table.detach().double().cpu() for name, table in method.probabilities().items()}
    costs = _shares(found, kind)
    points: list[FrontPoint] = []
    measured: dict[Genotype, float | None] = {}
    for number, limit in enumerate(ordered):
        notify(number, len(ordered), format_cost(kind, limit))

        def meets(genotype: Genotype, limit: float = limit) -> bool:
            return budget.measure(genotype)[kind] <= limit

        own = method.derive()  # not always by its probabilities
        genotype = own if meets(own) else strongest_accepted(layout, probabilities, costs, meets, method.rule)
        if genotype is None:
            # There is one: `_budget` raises if even the cheapest misses the smallest limit.
            genotype = next(one for one in budget.cheapest if meets(one))
        if genotype not in measured:
            measured[genotype] = _accuracy(found, genotype)
        recipe = replace(found.recipe, resource=_resource(found, kind, limit))
        stated = state_budget_for(recipe, found.dataset.shape, found.dataset.num_classes, genotype)
        about = {"method": found.recipe.method, **genotype.about, **stated}
        points.append(FrontPoint(limit, replace(genotype, about=about), budget.measure(genotype), measured[genotype]))
    notify(len(ordered), len(ordered), "")
    return points


def strongest_accepted(
    layout: Layout,
    probabilities: Mapping[str, Tensor],
    costs: Mapping[str, Tensor],
    meets: Callable[[Genotype], bool],
    rule: Rule | None = None,
    without_none: bool = False,
) -> Genotype | None:
    """The architecture that `rule` derives with the smallest penalty on costs that `meets` accepts; None without any.

    probabilities, costs: per table [choices, width]; costs in shares of the largest. Afterwards single choices get more
    probable candidates, largest gain first, wherever the result is still accepted: a common λ alone leaves
    a part of the budget unused. Architectures with an empty cell are not accepted. without_none: at first no edge may
    be `none`.
    """
    common = dict(probabilities)
    if without_none:
        common = {t.name: common[t.name].masked_fill(t.columns("none"), 0.0) for t in layout.tables}
    places = [(table.name, index) for table in layout.tables for index in range(len(table.choices))]

    def at(penalty: float, fixed: Mapping[tuple[str, int], int] = MappingProxyType({})) -> Genotype:
        weighed = {name: p * torch.exp(-penalty * costs[name]) for name, p in common.items()}
        for (name, index), k in fixed.items():
            weighed[name][index] = torch.zeros_like(weighed[name][index])
            weighed[name][index, k] = probabilities[name][index, k]
        return derive(layout, weighed, rule)

    def usable(genotype: Genotype) -> bool:
        return not empty_cells(genotype, layout) and meets(genotype)

    low = 0.0
    for high in PENALTIES:
        best = at(high)
        if usable(best):
            break
        low = high
    else:
        # Where `none` is free and probable, every cheap cell is empty. Without it no cell is.
        return None if without_none else strongest_accepted(layout, probabilities, costs, meets, rule, True)
    for _ in range(REFINEMENTS):
        middle = (low + high) / 2
        if usable(other := at(middle)):
            best, high = other, middle
        else:
            low = middle
    # More probable candidates one by one, the largest gain first.
    fixed: dict[tuple[str, int], int] = {}
    better = []
    for name, index in places:
        row, now = (
            probabilities[name][index],
            int((common[name][index] * torch.exp(-high * costs[name][index])).argmax()),
        )
        gains = row / row[now].clamp_min(torch.finfo(row.dtype).tiny)
        better += [(float(gains[k]), (name, index), k) for k in range(len(row)) if gains[k] > 1.0]
    for _, place, k in sorted(better, key=lambda one: -one[0]):
        if place not in fixed and usable(other := at(high, {**fixed, place: k})):
            best, fixed = other, {**fixed, place: k}
    return best


def _resource(found: Restored, kind: Kind, limit: float) -> Resource:
    """The search's settings of costs, with only this budget."""
    own: dict[str, Any] = {"max_params": None, "max_flops": None, "max_latency": None, "latency_table": None}
    own["kinds"] = tuple(one for one in found.recipe.resource.kinds if one != "latency") or ("parameters",)
    return replace(found.recipe.resource, **{**own, OPTIONS[kind]: limit})


def _budget(found: Restored, kind: Kind, limit: float) -> Budget:
    recipe = replace(found.recipe, resource=_resource(found, kind, limit))
    space, shape, num_classes = counted_network(recipe, found.dataset.shape, found.dataset.num_classes)
    budget = Budget(recipe.resource, None, space, shape, num_classes, num_epochs=1)
    costs = count_candidates(space, shape, num_classes, trained=True)
    budget.find_cheapest(space.layout(), costs, found.method.rule)
    if budget.out_of_reach():
        raise UserError(
            f"no architecture meets a budget of {format_cost(kind, limit)}: {budget.least(kind)}; choose a larger one, "
            f"or search for a smaller network ({budget.smaller()})"
        )
    return budget


def _shares(found: Restored, kind: Kind) -> dict[str, Tensor]:
    """Per table [choices, width] the costs of candidates over all sites, in shares of the largest."""
    space, shape, num_classes = counted_network(found.recipe, found.dataset.shape, found.dataset.num_classes)
    counted = count_candidates(space, shape, num_classes, trained=True)
    costs = {name: counted.of(kind, name).sum(0) for name in counted.read_tables()}
    largest = max(float(table.max()) for table in costs.values()) or 1.0
    layout = found.supernet.layout
    unread = {t.name: torch.zeros(t.shape, dtype=torch.float64) for t in layout.tables if t.name not in costs}
    return {**{name: table / largest for name, table in costs.items()}, **unread}


def _accuracy(found: Restored, genotype: Genotype) -> float | None:
    recipe = found.recipe
    if recipe.objective != "classify":
        return None
    feeds = found.feeds()
    training = islice(feeds.plain(found.dataset.train, found.parts["weights"]).epoch(0), NORM_BATCHES)
    held = feeds.plain(found.dataset.train, found.parts[recipe.measured_split]).epoch(0)
    return measure_child(found.supernet, genotype, held, World(0, 1, 0, found.device), training).accuracy
