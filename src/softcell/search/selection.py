"""Selection of an architecture on a trained supernet: by evolution, or by strengths within a budget.

Both work for any method. A selection within a budget is for methods whose strengths no penalty can move: IT-NAS
searches ProxylessNAS's chain by single paths and keeps networks under 600M multiply-adds; the paper does not say how.
Settled: among the architectures within the budget the one with the largest sum of attention over its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import Tensor

from softcell.arch import Cell, Genotype, Layout, StrongestEach
from softcell.arch.choice import Pick
from softcell.arch.derive import strongest_within
from softcell.arch.evolve import evolve
from softcell.arch.rules import rows
from softcell.data import Batches
from softcell.engine.distributed import World
from softcell.errors import UserError
from softcell.search.budget import Budget, format_cost
from softcell.search.recipe import SearchRecipe
from softcell.search.validation import measure_child
from softcell.spaces import Supernet


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
            f"a selection within a budget knows one limit, but got {', '.join(limits)}; state one of them, or let "
            "evolution select (--set evolution.generations=20)"
        )


def strongest_within_budget(
    layout: Layout, strengths: Mapping[str, Tensor], own: Genotype, budget: Budget, notify: Callable[[str], None]
) -> tuple[Genotype, dict[str, Any]]:
    """The genotype within the budget with the largest sum of strengths, and a record for `run.json`.

    strengths: of the one table [choices, width]. own: the strongest one without a budget. Costs are those of whole
    networks that differ in one choice, so they add up exactly where a choice's cost depends on itself alone.
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
