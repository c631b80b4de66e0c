"""Budgets: how much the derived network may cost, what it costs, and how hard the search is pushed to meet it.

A multiplier per budget is moved once per epoch by dual ascent in its logarithm: up while the derived network exceeds
the budget, slowly down once it is well below, and not at all in between. Should the last network miss the budget all
the same, the last one that met it is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from softcell.arch import Genotype, Layout, Rule, derive_cheapest, derives_cheapest, empty_cells
from softcell.arch.cost import CostTables
from softcell.errors import UserError
from softcell.search.latencies import latency, measured_for, read_latencies
from softcell.search.resource import Resource, ResourcePenalty
from softcell.settings import to_dict
from softcell.spaces import Shape, Space
from softcell.spaces.costs import count_genotype

NAMES = {"parameters": "parameters", "flops": "multiply-adds", "latency": "latency"}

GROWTH = 40.0
"""The logarithm of a multiplier grows by this much over a whole search whose network costs e times its budget."""
LEAST = 0.25
"""A violation counts as at least this much, so that a small one is not approached for ever."""
SLACK = 0.1
"""Within this share below the budget nothing is pushed: the derived network jumps, and would swing around it."""
MOST = math.log(10.0)
"""No epoch moves a multiplier by more than a factor of 10."""
RELEASE = 0.25
"""A multiplier falls by this share of what it would rise: what was let go takes epochs to be caught again."""
FREE = 2 / 3
"""After this share of the epochs no multiplier falls any more: there would be no time left to catch it."""
RANGE = {"log": (1e-5, 1.0), "linear": (1e-3, 100.0)}


def moved(multiplier: float, value: float, limit: float, epoch: int, num_epochs: int, form: str) -> float:
    """The multiplier after the `epoch` (from 0) whose derived network costs `value`, of `limit` allowed."""
    excess = math.log(max(value, 1e-9) / limit)
    if excess > 0:
        direction = max(excess, LEAST)
    elif value < (1.0 - SLACK) * limit and epoch + 1 < FREE * num_epochs:
        direction = RELEASE * excess
    else:
        return multiplier
    step = max(-MOST, min(MOST, GROWTH / num_epochs * direction))
    low, high = RANGE[form]
    return min(high, max(low, multiplier * math.exp(step)))


class Budget:
    """Measures derived networks at the size they are trained at for good, and moves the penalty's multipliers."""

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
        """What the evaluation network of a genotype costs, by kind."""
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
        """Moves the multipliers; gives metrics of the derived network."""
        found = self.measure(genotype)
        metrics = {f"derived_{kind}": value for kind, value in found.items()}
        if self._is_usable(genotype):
            self.last_met = epoch, genotype
        for index, (kind, limit) in enumerate(self.limits.items()):
            if self._penalty is None:
                break
            before = float(self._penalty.multipliers[index])
            metrics[f"multiplier_{kind}"] = before
            after = moved(before, found[kind], limit, epoch, self._num_epochs, self._settings.form)
            self._penalty.multipliers[index].fill_(after)
        return metrics

    def kept(self, genotype: Genotype, notify: Callable[[str], None]) -> Genotype:
        """The architecture found, or the last one that met the budgets, where this one does not."""
        if self.last_met is None or self._is_usable(genotype):
            return genotype
        self._taken, earlier = self.last_met
        why = f"misses the budget ({self._gaps(genotype)})" if not self.is_met(genotype) else "has an empty cell"
        notify(
            f"the network of the last epoch {why}: taking that of epoch {self._taken + 1}, the last one that met the "
            "budget."
        )
        return earlier

    def _is_usable(self, genotype: Genotype) -> bool:
        """Whether it meets the budgets, and not by an empty cell."""
        return self.is_met(genotype) and not empty_cells(genotype, self._space.layout())

    def _gaps(self, genotype: Genotype) -> str:
        return gaps(self.measure(genotype), self.limits)

    def excess(self, genotype: Genotype) -> float:
        """The largest cost of a genotype's network as a share of its budget: at most 1 where all are met."""
        found = self.measure(genotype)
        return max(found[kind] / limit for kind, limit in self.limits.items())

    def check_reach(self, notify: Callable[[str], None]) -> None:
        """Raises `UserError` where no architecture meets a budget; says so where that is likely but not certain."""
        for kind in self.out_of_reach():
            limit, way_out = shown(kind, self.limits[kind]), f"raise it, or make the network smaller ({self.smaller()})"
            if self._exact:
                raise UserError(f"no architecture meets a budget of {limit}: {self.least(kind)}; {way_out}")
            notify(f"a budget of {limit} may be out of reach: {self.least(kind)}; {way_out}")

    def look_for_cheapest(self, layout: Layout, costs: CostTables, rule: Rule | None) -> None:
        """Finds the networks that cost least: by costs of candidates, one per kind of cost.

        Pools have FLOPs in the tables and no multiply-adds in a network, so the one with the fewest parameters may have
        the fewest multiply-adds too.
        """
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
        """Budgets that even the cheapest network misses, where it has been looked for."""
        return [kind for kind, limit in self.limits.items() if self._least.get(kind, 0.0) > limit]

    def least(self, kind: str) -> str:
        """What the cheapest network costs, for people to read."""
        least = shown(kind, self._least[kind])
        which = "the smallest network" if self._exact else "the smallest network found by the costs of candidates"
        return f"{which} has {least} ({self.sizes()})"

    def warn_of_other_sizes(self, notify: Callable[[str], None]) -> None:
        """Says so where times were measured for another network."""
        if self._settings.latency_table is None:
            return
        own: dict[str, object] = {**to_dict(self._space), "input": list(self._shape)}
        measured = measured_for(self._settings.latency_table)
        other = [key for key, value in measured.items() if key in own and own[key] != value]
        if other:
            differences = ", ".join(f"{key} {measured[key]} there and {own[key]} here" for key in other)
            notify(
                f"{self._settings.latency_table} was measured for another network than this search is for "
                f"({differences}), so its times may not hold; `softcell latency` with --input, --channels and --set "
                "measures this one"
            )

    def verdict(self, genotype: Genotype) -> tuple[dict[str, object], str | None]:
        """For the run's results, what was allowed and what came out; and a message where a budget was missed."""
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
            least = " and ".join(shown(kind, self._least[kind]) for kind in out_of_reach)
            return (
                f"The smallest network found has {least}: raise the budget, or make the network smaller "
                f"({self.smaller()}, and train with the same)."
            )
        return (
            "Search longer (--epochs), start with a stronger pressure (--resource aggressive, or --set "
            f"resource.weight={_stronger(self._settings):g}), let the architecture move faster "
            "(--set architecture.lr=...), or raise the budget."
        )

    def smaller(self) -> str:
        """The setting of this space that makes its networks narrower."""
        known = to_dict(self._space)
        name = next((name for name in ("channels", "width", "cells") if name in known), None)
        return "--set resource.network.SETTING=N" if name is None else f"--set resource.network.{name}=N"

    def sizes(self) -> str:
        """The network that is meant: the whole numbers among its space's settings, and its input."""
        numbers = {key: value for key, value in to_dict(self._space).items() if type(value) is int}
        parts = [f"{key} {value}" for key, value in numbers.items()]
        return ", ".join([*parts, f"input {'x'.join(map(str, self._shape))}"])

    def state_dict(self) -> dict[str, Any]:
        return {"last_met": None if self.last_met is None else (self.last_met[0], self.last_met[1].to_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        known = state["last_met"]
        # An older checkpoint has the number of the epoch alone: its architecture cannot be taken again.
        self.last_met = (known[0], Genotype.from_dict(known[1])) if isinstance(known, tuple | list) else None


def gaps(found: Mapping[str, float], limits: Mapping[str, float]) -> str:
    """By how much costs exceed their budgets; nothing where they do not."""
    return " and ".join(
        f"{shown(kind, found[kind])}, {found[kind] / limit - 1.0:.1%} over the budget of {shown(kind, limit)}"
        for kind, limit in limits.items()
        if found[kind] > limit
    )


def shown(kind: str, value: float) -> str:
    """`2.53M parameters`"""
    if kind == "latency":
        return f"a latency of {value:.4g}"  # in the unit of the table, which is its maker's
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit} {NAMES[kind]}"
    return f"{value:g} {NAMES[kind]}"


def _stronger(settings: Resource) -> float:
    return max(3.0 * settings.eta, settings.levels["aggressive"])
