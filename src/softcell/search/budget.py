"""Budgets: how much the derived network may cost, what it costs, and how a search meets them.

A multiplier per budget is moved once per epoch by dual ascent in its logarithm: up while the derived network exceeds
the budget, slowly down once it is well below, and not at all in between. If the last network still misses the budget,
the last one that met it is taken.

Random architectures within a budget (`next_within`) are drawn in the same order as without one, and those that miss it
are skipped. What is left is uniform among the architectures that meet it, and the same for the same seed.

The genotype of a search with a budget carries it along (`StatedBudget`), so that random architectures can be compared
with it under the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from softcell.arch import Genotype, Layout, Rule, derive_cheapest, derives_cheapest, empty_cells
from softcell.errors import UserError
from softcell.search.recipe import SearchRecipe
from softcell.search.resource import Resource, ResourcePenalty, latency, measured_for, read_latencies, with_latencies
from softcell.settings import build, convert, to_dict
from softcell.spaces import SPACES, Shape, Space, build_space
from softcell.spaces.base import trained_space
from softcell.spaces.costs import CostTables, count_candidates, count_genotype

NAMES = {"parameters": "parameters", "flops": "multiply-adds", "latency": "latency"}

GROWTH = 40.0
"""The logarithm of a multiplier grows by this much over a whole search whose network costs e times its budget."""
MIN_EXCESS = 0.25
"""A violation counts as at least this much, so that a small one is not approached endlessly."""
SLACK = 0.1
"""Within this share below the budget no multiplier moves: the derived network jumps, and would oscillate around it."""
MAX_LOG_STEP = math.log(10.0)
"""No epoch moves a multiplier by more than a factor of 10."""
RELEASE = 0.25
"""A multiplier falls by this share of what it would rise: a budget that is lost takes epochs to be met again."""
FREE = 2 / 3
"""After this share of the epochs no multiplier falls any more: a budget lost then could not be met again."""
RANGE = {"log": (1e-5, 1.0), "linear": (1e-3, 100.0)}
"""Smallest and largest multiplier, by the form of the penalty."""
TRIES = 500
"""Draws per architecture before a budget is given up; counting a large network takes up to a second."""
ABOUT = "budget"
"""The key of a genotype's `about`."""


def next_multiplier(multiplier: float, value: float, limit: float, epoch: int, num_epochs: int, form: str) -> float:
    """The multiplier after the `epoch` (from 0) whose derived network costs `value`, of `limit` allowed."""
    # By its table, a network may have a latency of 0.
    excess = math.log(max(value, 1e-9) / limit)
    if excess > 0:
        direction = max(excess, MIN_EXCESS)
    elif value < (1.0 - SLACK) * limit and epoch + 1 < FREE * num_epochs:
        direction = RELEASE * excess
    else:
        return multiplier
    step = max(-MAX_LOG_STEP, min(MAX_LOG_STEP, GROWTH / num_epochs * direction))
    low, high = RANGE[form]
    return min(high, max(low, multiplier * math.exp(step)))


class Budget:
    """Counts derived networks at the size of their final training, and moves the penalty's multipliers."""

    def __init__(
        self,
        settings: Resource,
        penalty: ResourcePenalty | None,
        space: Space,
        shape: Shape,
        num_classes: int,
        num_epochs: int,
    ) -> None:
        self.limits = settings.budgets()
        self._settings, self._penalty, self._num_epochs = settings, penalty, num_epochs
        self._space, self._shape, self._num_classes = space, shape, num_classes
        self._latencies = None if settings.latency_table is None else read_latencies(settings.latency_table)
        self._known: dict[Genotype, dict[str, float]] = {}
        self._least: dict[str, float] = {}
        self.cheapest: list[Genotype] = []
        self._exact = False
        self.last_met: tuple[int, Genotype] | None = None
        self._taken: int | None = None

    def measure(self, genotype: Genotype) -> dict[str, float]:
        """The costs of a genotype's evaluation network, by kind."""
        if genotype not in self._known:
            cost = count_genotype(self._space, genotype, self._shape, self._num_classes)
            found = {"parameters": float(cost.parameters), "flops": float(cost.multiply_adds)}
            if self._latencies is not None:
                found["latency"] = latency(genotype, self._space.layout(), self._latencies)
            self._known[genotype] = found
        return self._known[genotype]

    def is_met(self, genotype: Genotype) -> bool:
        found = self.measure(genotype)
        return all(found[kind] <= limit for kind, limit in self.limits.items())

    def end_epoch(self, epoch: int, genotype: Genotype) -> dict[str, float]:
        """Updates the multipliers; returns metrics of the derived network."""
        found = self.measure(genotype)
        metrics = {f"derived_{kind}": value for kind, value in found.items()}
        if self._is_usable(genotype):
            self.last_met = epoch, genotype
        for index, (kind, limit) in enumerate(self.limits.items()):
            if self._penalty is None:
                break
            before = float(self._penalty.multipliers[index])
            metrics[f"multiplier_{kind}"] = before
            after = next_multiplier(before, found[kind], limit, epoch, self._num_epochs, self._settings.form)
            self._penalty.multipliers[index].fill_(after)
        return metrics

    def kept(self, genotype: Genotype, notify: Callable[[str], None]) -> Genotype:
        """The architecture found; if it misses the budgets, the last one that met them."""
        if self.last_met is None or self._is_usable(genotype):
            return genotype
        self._taken, earlier = self.last_met
        why = f"misses the budget ({self._gaps(genotype)})" if not self.is_met(genotype) else "has an empty cell"
        notify(
            f"the network of the last epoch {why}: taking the network of epoch {self._taken + 1}, the last one that "
            "met the budget."
        )
        return earlier

    def _is_usable(self, genotype: Genotype) -> bool:
        """Whether it meets the budgets, and not by an empty cell."""
        return self.is_met(genotype) and not empty_cells(genotype, self._space.layout())

    def _gaps(self, genotype: Genotype) -> str:
        return _format_excess(self.measure(genotype), self.limits)

    def excess(self, genotype: Genotype) -> float:
        """The largest cost of a genotype's network as a share of its budget: at most 1 where all are met."""
        found = self.measure(genotype)
        return max(found[kind] / limit for kind, limit in self.limits.items())

    def check_reach(self, notify: Callable[[str], None]) -> None:
        """Raises `UserError` if no architecture meets a budget; only notifies where that is likely but not certain."""
        for kind in self.out_of_reach():
            limit = format_cost(kind, self.limits[kind])
            way_out = f"raise it, or make the network smaller ({self.smaller()})"
            if self._exact:
                raise UserError(f"no architecture meets a budget of {limit}: {self.least(kind)}; {way_out}")
            notify(f"a budget of {limit} may be out of reach: {self.least(kind)}; {way_out}")

    def find_cheapest(self, layout: Layout, costs: CostTables, rule: Rule | None) -> None:
        """Finds the networks that cost least: by costs of candidates, one per kind of cost.

        Pools have FLOPs in the tables and no multiply-adds in a network, so the one with the fewest parameters may have
        the fewest multiply-adds too.
        """
        # Called once for every rule (`build._resource_of`): exact only if the result of each is.
        self._exact = derives_cheapest(layout, rule) and (self._exact or not self.cheapest)
        for kind in ("parameters", "flops", "latency"):
            if kind not in costs.kinds:
                continue
            read = {name: costs.of(kind, name).sum(0) for name in costs.read_tables()}
            unread = {t.name: torch.zeros(t.shape, dtype=torch.float64) for t in layout.tables if t.name not in read}
            found = derive_cheapest(layout, {**read, **unread}, rule)
            if found not in self.cheapest:
                self.cheapest.append(found)
        for kind in self.limits:
            self._least[kind] = min(self.measure(one)[kind] for one in self.cheapest)

    def out_of_reach(self) -> list[str]:
        """Budgets that even the cheapest network misses; none before `find_cheapest`."""
        return [kind for kind, limit in self.limits.items() if self._least.get(kind, 0.0) > limit]

    def least(self, kind: str) -> str:
        """The cost of the cheapest network, in words."""
        least = format_cost(kind, self._least[kind])
        which = "the smallest network" if self._exact else "the smallest network found by the costs of candidates"
        return f"{which} has {least} ({self.sizes()})"

    def warn_of_other_sizes(self, notify: Callable[[str], None]) -> None:
        """Warns if the latency table was measured for another network."""
        if self._settings.latency_table is None:
            return
        own: dict[str, object] = {**to_dict(self._space), "input": list(self._shape)}
        measured = measured_for(self._settings.latency_table)
        other = [key for key, value in measured.items() if key in own and own[key] != value]
        if other:
            differences = ", ".join(f"{key} {measured[key]} there and {own[key]} here" for key in other)
            notify(
                f"{self._settings.latency_table} was measured for a different network from that of this search "
                f"({differences}), so its times may not hold; `softcell latency` with --input, --channels and --set "
                "measures this one"
            )

    def verdict(self, genotype: Genotype) -> tuple[dict[str, object], str | None]:
        """Costs of the derived network for the run's results, and a message where it misses a budget."""
        found = self.measure(genotype)
        results: dict[str, object] = {f"derived_{kind}": value for kind, value in found.items()}
        results["budget_met"] = self.is_met(genotype)
        if self._taken is not None:
            results["derived_from_epoch"] = self._taken
        missed = [kind for kind, limit in self.limits.items() if found[kind] > limit]
        if not missed:
            return results, None
        return results, f"the derived network has {self._gaps(genotype)} ({self.sizes()}). {self._way_out(missed)}"

    def _way_out(self, missed: list[str]) -> str:
        out_of_reach = [kind for kind in self.out_of_reach() if kind in missed]
        if out_of_reach:
            least = " and ".join(format_cost(kind, self._least[kind]) for kind in out_of_reach)
            return (
                f"The smallest network found has {least}: raise the budget, or make the network smaller "
                f"({self.smaller()}, and train with the same)."
            )
        stronger = max(3.0 * self._settings.eta, self._settings.levels["aggressive"])
        return (
            "Search longer (--epochs), start with a stronger penalty (--resource aggressive, or --set "
            f"resource.weight={stronger:g}), let the architecture move faster "
            "(--set architecture.lr=...), or raise the budget."
        )

    def smaller(self) -> str:
        """The setting of this space that makes its networks narrower."""
        known = to_dict(self._space)
        name = next((name for name in ("channels", "width", "cells") if name in known), None)
        return "--set resource.network.SETTING=N" if name is None else f"--set resource.network.{name}=N"

    def sizes(self) -> str:
        """The network that is counted: the whole numbers among its space's settings, and its input."""
        numbers = {key: value for key, value in to_dict(self._space).items() if type(value) is int}
        parts = [f"{key} {value}" for key, value in numbers.items()]
        return ", ".join([*parts, f"input {'x'.join(map(str, self._shape))}"])

    def state_dict(self) -> dict[str, Any]:
        return {"last_met": None if self.last_met is None else (self.last_met[0], self.last_met[1].to_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        known = state["last_met"]
        # An older checkpoint has only the number of the epoch, not its architecture.
        self.last_met = (known[0], Genotype.from_dict(known[1])) if isinstance(known, tuple | list) else None


def _format_excess(found: Mapping[str, float], limits: Mapping[str, float]) -> str:
    """The amounts by which costs exceed their budgets; empty where they do not."""
    return " and ".join(
        f"{format_cost(kind, found[kind])}, {found[kind] / limit - 1:.1%} over the budget of "
        f"{format_limit(kind, limit)}"
        for kind, limit in limits.items()
        if found[kind] > limit
    )


def format_cost(kind: str, value: float) -> str:
    """A cost with its unit, such as `2.53M parameters`."""
    if kind == "latency":
        return f"a latency of {value:.4g}"  # in the unit of the latency table
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit} {NAMES[kind]}"
    return f"{value:g} {NAMES[kind].removesuffix('s') if value == 1 else NAMES[kind]}"


def format_limit(kind: str, value: float) -> str:
    """A limit with its unit, for messages that state a cost of the same kind first."""
    return f"{value:.4g}" if kind == "latency" else format_cost(kind, value)


def next_within(
    budget: Budget, draw: Callable[[int], Genotype], first: int, have: int, way_out: str
) -> tuple[int, Genotype]:
    """The first of `draw(first)`, `draw(first + 1)`, ... that meets the budget, and its number; numbers are from 0.

    have: how many were found before it. It may also use their remaining tries.
    """
    for kind in budget.out_of_reach():
        limit = format_cost(kind, budget.limits[kind])
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
        f"{_format_excess(budget.measure(nearest), budget.limits)} ({budget.sizes()}); {way_out}"
    )


@dataclass(frozen=True)
class StatedBudget:
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
        """The amount by which the architecture found exceeds the budget; None where it meets it."""
        limits = self.resource.budgets()
        return _format_excess(self.found, {kind: limit for kind, limit in limits.items() if kind in self.found}) or None

    def budget(self, space: str) -> Budget:
        """Counts other architectures of the space as the search counted its own."""
        shape: Any = self.input
        return Budget(self.resource, None, build_space(space, self.network), shape, self.classes, num_epochs=1)

    def costs(self, space: Space) -> CostTables:
        """The costs of a space's candidates, used to find the cheapest network."""
        shape: Any = self.input
        found = count_candidates(space, shape, self.classes)
        return found if self.latency_table is None else with_latencies(found, self.latency_table)


def state_budget(recipe: SearchRecipe, shape: Shape, num_classes: int, results: Mapping[str, Any]) -> dict[str, Any]:
    """The budget of a search for the `about` of its genotype; empty without a budget.

    results: of the search, with the cost of the derived network by kind.
    """
    limits = recipe.resource.budgets()
    if not limits:
        return {}
    found = {kind: results[f"derived_{kind}"] for kind in limits}
    return {ABOUT: {**_network(recipe, shape, num_classes), "found": found}}


def state_budget_for(recipe: SearchRecipe, shape: Shape, num_classes: int, genotype: Genotype) -> dict[str, Any]:
    """`state_budget` for an architecture whose costs have not been counted yet."""
    network = _network(recipe, shape, num_classes)
    budget = build(StatedBudget, network, f"genotype.about.{ABOUT}").budget(recipe.space)
    return state_budget(recipe, shape, num_classes, budget.verdict(genotype)[0])


def counted_network(recipe: SearchRecipe, shape: Shape, num_classes: int) -> tuple[Space, Shape, int]:
    """The network that budgets are counted for: space at its size, shape of an image, number of classes.

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
        # The training may start in another folder.
        result["latency_table"] = str(Path(settings.latency_table).resolve())
    space, shape, num_classes = counted_network(recipe, shape, num_classes)
    return {**result, "network": to_dict(space), "input": list(shape), "classes": num_classes}


def stated_budget(genotype: Genotype) -> StatedBudget | None:
    """The budget in a genotype's `about`; None without one."""
    known = genotype.about.get(ABOUT)
    if known is None:
        return None
    if not isinstance(known, Mapping):
        raise UserError(f"genotype.about.{ABOUT} must be a mapping, got {known!r}")
    found = build(StatedBudget, known, f"genotype.about.{ABOUT}")
    if len(found.input) != 3:
        raise UserError(f"genotype.about.{ABOUT}.input must be [channels, height, width], got {list(found.input)}")
    for kind, cost in found.found.items():
        convert(float, cost, f"genotype.about.{ABOUT}.found.{kind}")
    return found
