"""Random architectures within a budget, and the budget that a genotype brings along from its search.

Draws come in the order they have without a budget; those that miss it are passed over. What is left is uniform among
the architectures that meet it, and the same for the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from softcell.arch import Genotype
from softcell.arch.cost import CostTables
from softcell.errors import UserError
from softcell.search.budget import Budget, gaps, shown
from softcell.search.latencies import with_latencies
from softcell.search.recipe import SearchRecipe
from softcell.search.resource import Resource
from softcell.settings import build, convert, to_dict
from softcell.spaces import SPACES, Shape, Space, build_space
from softcell.spaces.costs import count_candidates
from softcell.spaces.registry import trained_space

TRIES = 500
"""Draws per architecture before a budget is given up; to count a large network takes up to a second."""
ABOUT = "budget"
"""The key of a genotype's `about`."""


def next_within(
    budget: Budget, draw: Callable[[int], Genotype], first: int, have: int, way_out: str
) -> tuple[int, Genotype]:
    """The first of `draw(first)`, `draw(first + 1)`, ... that meets the budget, and its number; numbers are from 0.

    have: how many were found before it. What they have left of their tries this one may use too.
    """
    for kind in budget.out_of_reach():
        limit = shown(kind, budget.limits[kind])
        raise UserError(f"a budget of {limit} is out of reach of random architectures: {budget.least(kind)}; {way_out}")
    nearest: Genotype | None = None
    end = max(first + 1, TRIES * (have + 1))
    for number in range(first, end):
        genotype = draw(number)
        if budget.is_met(genotype):
            return number, genotype
        if nearest is None or budget.excess(genotype) < budget.excess(nearest):
            nearest = genotype
    assert nearest is not None
    raise UserError(
        f"none of {end - first} random architectures meets the budget; the nearest has "
        f"{gaps(budget.measure(nearest), budget.limits)} ({budget.sizes()}); {way_out}"
    )


@dataclass(frozen=True)
class Stated:
    """A search's budget as its genotype keeps it: the limits, and the network that was counted.

    `network`: settings of the space; `input`: (channels, height, width); `found`: what the architecture found costs,
    by kind.
    """

    input: tuple[int, ...]
    classes: int
    network: dict[str, Any] = field(default_factory=dict)
    found: dict[str, float] = field(default_factory=dict)
    max_params: float | None = None
    max_flops: float | None = None
    max_latency: float | None = None
    latency_table: str | None = None

    @property
    def resource(self) -> Resource:
        return Resource(
            max_params=self.max_params,
            max_flops=self.max_flops,
            max_latency=self.max_latency,
            latency_table=self.latency_table,
        )

    def missed(self) -> str | None:
        """By how much the architecture found exceeds the budget; None where it meets it."""
        limits = self.resource.budgets()
        return gaps(self.found, {kind: limit for kind, limit in limits.items() if kind in self.found}) or None

    def budget(self, space: str) -> Budget:
        """Counts other architectures of the space as the search counted its own."""
        shape: Any = self.input
        return Budget(self.resource, None, build_space(space, self.network), shape, self.classes, num_epochs=1)

    def costs(self, space: Space) -> CostTables:
        """What the candidates of a space cost, by which the cheapest network is found."""
        shape: Any = self.input
        found = count_candidates(space, shape, self.classes)
        return found if self.latency_table is None else with_latencies(found, self.latency_table)


def stated(recipe: SearchRecipe, shape: Shape, num_classes: int, results: Mapping[str, Any]) -> dict[str, Any]:
    """What the `about` of a genotype says of its search's budget: nothing where none was stated.

    results: of the search, with the cost of the derived network by kind.
    """
    limits = recipe.resource.budgets()
    if not limits:
        return {}
    found = {kind: results[f"derived_{kind}"] for kind in limits}
    return {ABOUT: {**_network(recipe, shape, num_classes), "found": found}}


def counted(recipe: SearchRecipe, shape: Shape, num_classes: int, genotype: Genotype) -> dict[str, Any]:
    """`stated`, of an architecture that is still to be counted."""
    network = _network(recipe, shape, num_classes)
    budget = build(Stated, network, f"genotype.about.{ABOUT}").budget(recipe.space)
    return stated(recipe, shape, num_classes, budget.verdict(genotype)[0])


def counted_network(recipe: SearchRecipe, shape: Shape, num_classes: int) -> tuple[Space, Shape, int]:
    """What a search's budgets are counted on: space at its size, shape of an image, number of classes.

    shape, num_classes: of the search's data, which the recipe may replace by others.
    """
    resource = recipe.resource
    data = recipe.data if resource.sizes is None else resource.sizes
    if resource.sizes is not None and resource.sizes not in SPACES.get(recipe.space).evaluation:
        known = ", ".join(SPACES.get(recipe.space).evaluation) or "none"
        raise UserError(
            f"`resource.sizes` must name sizes of trained networks of space {recipe.space!r} ({known}), got "
            f"{resource.sizes!r}"
        )
    space = trained_space(recipe.space, data, recipe.space_settings, resource.network)
    side = resource.image_size
    return space, shape if side is None else (shape[0], side, side), resource.num_classes or num_classes


def _network(recipe: SearchRecipe, shape: Shape, num_classes: int) -> dict[str, Any]:
    settings, limits = recipe.resource, recipe.resource.budgets()
    names = {"parameters": "max_params", "flops": "max_flops", "latency": "max_latency"}
    result: dict[str, Any] = {names[kind]: limit for kind, limit in limits.items()}
    if "latency" in limits and settings.latency_table is not None:
        # The training may begin in another folder.
        result["latency_table"] = str(Path(settings.latency_table).resolve())
    space, shape, num_classes = counted_network(recipe, shape, num_classes)
    return {**result, "network": to_dict(space), "input": list(shape), "classes": num_classes}


def stated_in(genotype: Genotype) -> Stated | None:
    """The budget that a genotype brings along; None where it knows of none."""
    known = genotype.about.get(ABOUT)
    if known is None:
        return None
    if not isinstance(known, Mapping):
        raise UserError(f"genotype.about.{ABOUT} must be a mapping, got {known!r}")
    found = build(Stated, known, f"genotype.about.{ABOUT}")
    if len(found.input) != 3:
        raise UserError(f"genotype.about.{ABOUT}.input must be [channels, height, width], got {list(found.input)}")
    for kind, cost in found.found.items():
        convert(float, cost, f"genotype.about.{ABOUT}.found.{kind}")
    return found
