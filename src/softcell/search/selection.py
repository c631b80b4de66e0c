"""Selection within a budget by a method's own strengths, where no penalty can push the search towards it.

IT-NAS searches ProxylessNAS's chain by single paths and keeps networks under 600M multiply-adds; the paper does not say
how. Settled: among the architectures within the budget that with the largest sum of attention over its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from softcell.arch import Cell, Genotype, Layout, StrongestEach
from softcell.arch.choice import Pick
from softcell.arch.derive import strongest_within
from softcell.arch.rules import rows
from softcell.errors import UserError
from softcell.search.budget import Budget, format_cost


def check_selectable(layout: Layout, limits: Mapping[str, float]) -> None:
    """Raises where strengths and costs of single choices do not add up to those of a network, or two budgets hold."""
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
    """The genotype within the budget of the largest sum of strengths, and what is worth keeping of how it was found.

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
