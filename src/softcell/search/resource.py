"""A resource penalty for any method, and its parts: settings, latency tables, and costs of a mix.

Xie, Zheng, Liu, Lin: SNAS, ICLR 2019, §2.4.

    Eq 9   E[L(Z) + η·C(Z)]                                    the objective; η is a weight
    Eq 10  C(Z) = Σ_edges Z_edge · C(O_edge)                   -> `linear_cost`
    Eq 11  E[C(Z)] = Σ_edges E[Z_edge · C(O_edge)]             -> `linear_cost` of probabilities, `policy_cost`

The costs of candidates are counted in `softcell.spaces.costs` or, for latencies, read from a table of measured times.
They become one term of the loss that trains the architecture,

    weight · cost  +  Σ_budgets multiplier · cost of the budget's kind

where `cost` is read from the method's probabilities or, by Monte Carlo, from the sample of the step, as the authors of
SNAS do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from softcell.arch import Genotype, Layout, Mix, WeightMix
from softcell.engine.manifest import read_mapping
from softcell.errors import UserError, nearest
from softcell.nn.candidates import known_candidates
from softcell.nn.stochastic import draw_uniform
from softcell.settings import not_negative
from softcell.spaces.costs import KINDS, CostTables

Preset = Literal["none", "mild", "moderate", "aggressive"]
Form = Literal["log", "linear"]
Kind = Literal["parameters", "flops", "memory", "latency"]

# The paper's levels have names but no published numbers. 1.5e-3 on the log of a sample's cost is the command in the
# authors' repository, which does not say for which level it is; 'moderate' is our interpretation, and all other
# numbers are ours, chosen so that parameters fall from one level to the next. As the temperature falls, the log of a
# sample's cost pulls up to 7 times as hard towards `none` as the log of the expected cost, hence separate levels.
PRESETS: dict[str, dict[str, float]] = {
    "log of the sample's cost": {"none": 0.0, "mild": 5e-4, "moderate": 1.5e-3, "aggressive": 5e-3},
    "log of the expected cost": {"none": 0.0, "mild": 5e-4, "moderate": 1.5e-3, "aggressive": 5e-3},
    "linear": {"none": 0.0, "mild": 0.1, "moderate": 0.3, "aggressive": 1.0},
}

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}


def quantity(name: str, value: float | str) -> float:
    """`2.5M`, `500k` or a plain number as a number above 0."""
    found = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([kKmMgGbB]?)\s*", str(value))
    try:
        number = float(found[1]) * _UNITS[found[2].lower()] if found else math.nan
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise UserError(f"{name} must be a number above 0, optionally followed by k, M or G (2.5M), got {value!r}")
    return number


@dataclass(frozen=True)
class Resource:
    """Settings of the resource penalty and of budgets.

    `preset`: a weight by name; `weight`: the weight itself (0 only records the expected cost). `form`: `log` as in the
    authors' code, `linear` as in Eq 10, as a share of the most expensive architecture's cost. `estimator`: the cost of
    the step's own sample (`monte-carlo`; in log form what the authors' code does, and the default of SNAS), of the
    probabilities (`expectation`) or by `policy` gradient. `kinds` are averaged. `pooling`: FLOPs of the real layer or
    Eq 38 as `printed`.

    `max_params`, `max_flops` and `max_latency` bound the network that is finally trained on this data, at the sizes
    of its training recipe, with the settings in `network` laid over them; FLOPs are multiply-adds for one image.
    `image_size`, `num_classes` and `sizes` state them for other data than the search's: side of the images, number of
    classes, and the recipe whose sizes are meant (`imagenet`). `latency_table` is a YAML or JSON file of candidate:
    time, or of table: {candidate: time}.
    """

    preset: Preset = "none"
    weight: float | None = None
    form: Form = "log"
    estimator: Literal["expectation", "monte-carlo", "policy"] = "expectation"
    kinds: tuple[Kind, ...] = ("parameters", "flops", "memory")
    pooling: Literal["module", "printed"] = "module"
    max_params: float | str | None = None
    max_flops: float | str | None = None
    max_latency: float | str | None = None
    latency_table: str | None = None
    network: dict[str, Any] = field(default_factory=dict)
    image_size: int | None = None
    num_classes: int | None = None
    sizes: str | None = None

    def __post_init__(self) -> None:
        if self.weight is not None:
            not_negative("resource.weight", self.weight)
        for name, least in (("image_size", 4), ("num_classes", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"`resource.{name} >= {least}` must hold, but got {value}")
        if self.elsewhere and not self.budgets():
            raise UserError(
                "`resource.image_size` (--at-size), `resource.num_classes` and `resource.sizes` define the "
                "network that a budget is counted for: pass a budget too (--max-params, --max-flops)"
            )
        if not self.kinds:
            raise UserError(f"`resource.kinds` must name at least one of {', '.join(KINDS)}, got none")
        if self.form == "log" and self.estimator == "policy":
            raise UserError(
                "`resource.estimator=policy` estimates a linear cost, but the form is log; "
                "add resource.form=linear or keep estimator=expectation"
            )
        if self.latency_table is None and (self.max_latency is not None or "latency" in self.kinds):
            raise UserError(
                "a latency budget needs a table of times: pass its file with --latency-table "
                "(`resource.latency_table`); `softcell latency` measures one"
            )
        if self.latency_table is not None and self.max_latency is None and "latency" not in self.kinds:
            raise UserError(
                "a latency table alone has no effect: add --max-latency (`resource.max_latency`), or `latency` to "
                "`resource.kinds`"
            )
        self.budgets()

    @property
    def is_on(self) -> bool:
        """Whether costs are counted."""
        return self.preset != "none" or self.weight is not None or bool(self.budgets())

    @property
    def elsewhere(self) -> bool:
        """Whether budgets apply to other data than the search's."""
        return any(value is not None for value in (self.image_size, self.num_classes, self.sizes))

    @property
    def eta(self) -> float:
        """The weight of Eq 9."""
        return self.levels[self.preset] if self.weight is None else self.weight

    @property
    def levels(self) -> dict[str, float]:
        """The weights of the presets in this form."""
        if self.form == "linear":
            return PRESETS["linear"]
        sampled = self.estimator == "monte-carlo"
        return PRESETS["log of the sample's cost" if sampled else "log of the expected cost"]

    def budgets(self) -> dict[str, float]:
        """The stated limits by kind of cost."""
        given = {"parameters": self.max_params, "flops": self.max_flops, "latency": self.max_latency}
        names = {"parameters": "max_params", "flops": "max_flops", "latency": "max_latency"}
        return {kind: quantity(f"resource.{names[kind]}", value) for kind, value in given.items() if value is not None}


FIXED = "fixed"
"""The key of the time of everything around the candidates."""


def read_latencies(path: str) -> dict[str, object]:
    """A file of candidate: time, or of table: {candidate: time}.

    `fixed` is the time of everything around the candidates; `about` is human-readable (see `softcell latency`).
    """
    data = _read_latency_file(path)
    data.pop("about", None)
    for name, value in data.items():
        rows = value if isinstance(value, Mapping) and name != FIXED else {name: value}
        for op, time in rows.items():
            if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time < math.inf:
                raise UserError(f"{path}: the time of {op!r} must be a number of 0 or more, got {time!r}")
    if not data:
        raise UserError(f"{path}: a latency table must have a time for every candidate, but it is empty")
    return data


def _read_latency_file(path: str) -> dict[str, Any]:
    return read_mapping(path, option="--latency-table", holds="a latency table must be a mapping of candidate: time")


def _check_names(path: str, latencies: Mapping[str, object], layout: Layout) -> None:
    """Raises for unknown names, which are typing errors; known candidates that this search does not use are ignored."""
    tables = {table.name: {op for choice in table.choices for op in choice.candidates} for table in layout.tables}
    own = {op for ops in tables.values() for op in ops}
    for name, value in latencies.items():
        if isinstance(value, Mapping) and name not in tables:
            raise UserError(f"{path}: the space has no table {name!r}; {nearest(name, tables)}")
        for op in value if isinstance(value, Mapping) else [name]:
            if op != FIXED and op not in own and op not in known_candidates():
                raise UserError(f"{path}: there is no candidate {op!r}; {nearest(op, own)}")


def measured_for(path: str) -> Mapping[str, object]:
    """The `about` of a table: sizes of the measured network and of its input; empty for a hand-written table."""
    about = _read_latency_file(path).get("about")
    return about if isinstance(about, Mapping) else {}


def latency_of(latencies: Mapping[str, object], table: str, op: str) -> float:
    """The time of one candidate; `none` takes 0 unless the file says otherwise."""
    own = latencies.get(table)
    rows = own if isinstance(own, Mapping) else latencies
    value = rows.get(op, 0.0 if op == "none" else None)
    if not isinstance(value, int | float):
        raise UserError(
            f"the latency table has no time for {op!r} of table {table!r}; it has {', '.join(map(str, rows))}"
        )
    return float(value)


def latency(genotype: Genotype, layout: Layout, latencies: Mapping[str, object]) -> float:
    """The sum over all sites and picks of the network, and the fixed time."""
    fixed = latencies.get(FIXED, 0.0)
    assert isinstance(fixed, int | float)  # `read_latencies` checks it
    return fixed + sum(
        latency_of(latencies, table, pick.op) for table in layout.sites for pick in genotype.cells[table].picks
    )


def with_latencies(costs: CostTables, path: str) -> CostTables:
    """The costs with the kind `latency` from a file."""
    layout, latencies = costs.layout, read_latencies(path)
    _check_names(path, latencies, layout)
    sites = []
    for name in layout.sites:
        table = layout.table(name)
        rows = torch.zeros(table.shape, dtype=torch.float64)
        for i, choice in enumerate(table.choices):
            for k, op in enumerate(choice.candidates):
                rows[i, k] = latency_of(latencies, name, op)
        sites.append(rows)
    return CostTables(layout, {**costs.kinds, "latency": tuple(sites)})


def linear_cost(weights: Tensor, costs: Tensor) -> Tensor:
    """Eq 10, summed over sites.

    Of one-hot weights this is the cost of an architecture, of a relaxed sample its Monte Carlo estimate. Being linear,
    it is at the probabilities exactly the expectation of Eq 11.

    weights [choices, width] or [sites, choices, width]; costs [sites, choices, width]; returns [].
    """
    return (weights * costs).sum()


def policy_cost(probabilities: Tensor, costs: Tensor, uniform: Tensor) -> Tensor:
    """Eq 11 by policy gradient: the cost of one-hot draws, whose gradient is E[(C - b)·∇ log p(Z)].

    Each edge is credited only with its own cost, since the others' do not affect the expectation of its gradient. The
    baseline b is the edge's expected cost; it lowers the variance and, being the same for all draws, adds no bias.

    probabilities [choices, width]; costs [sites, choices, width]; uniform [draws, choices, width] inside (0, 1);
    returns the mean over the draws, [].
    """
    per_edge = costs.sum(0)
    gumbel = -torch.log(-torch.log(uniform))
    with torch.no_grad():
        winner = (torch.log(probabilities) + gumbel).argmax(-1, keepdim=True)  # padding: log 0, never wins
    draws = winner.shape[0]
    chosen = per_edge.expand(draws, *per_edge.shape).gather(-1, winner)
    log_p = torch.log(probabilities.expand(draws, *probabilities.shape).gather(-1, winner))
    baseline = (probabilities.detach() * per_edge).sum(-1, keepdim=True)
    credit = ((chosen - baseline) * log_p).sum() / draws
    # Eq 11: the value is the cost of the draws, the gradient that of the credit, (C - b)·∇ log p(Z).
    return chosen.sum() / draws + credit - credit.detach()


def log_cost(weights: Tensor, costs: Tensor) -> Tensor:
    """The log form of the authors' code for one kind of cost: Σ_edges ln(max(1, cost)), averaged over sites.

    Of a relaxed sample it is theirs. Of the probabilities it is the logarithm of the expected cost; the expectation of
    the former is below it, and differs from it in gradient too, since a logarithm is not linear.

    weights [choices, width] or [sites, choices, width]; costs [sites, choices, width]; returns [].
    """
    return (weights * costs).sum(-1).clamp(min=1.0).log().sum(-1).mean()


class ResourcePenalty(nn.Module):
    """The penalty as a function of a method's probabilities, with its weight and multipliers in buffers.

    Multipliers are filled in place, so that a captured step reads the new values.
    """

    multipliers: Tensor

    def __init__(self, settings: Resource, costs: CostTables) -> None:
        super().__init__()
        self.settings, self.tables = settings, costs.read_tables()
        self.kinds = tuple(costs.kinds)
        self.budgets = tuple(settings.budgets())
        for kind in self.kinds:
            for table in self.tables:
                self.register_buffer(f"{kind}_{table}", costs.of(kind, table), persistent=False)
        # The cost that a linear cost is a share of, and the unit of its logarithm, by kind.
        # 1 where every candidate is free: a share of nothing is undefined.
        self._whole = {kind: sum(float(c.amax(-1).sum()) for c in costs.kinds[kind]) or 1.0 for kind in self.kinds}
        self._unit = {kind: _smallest(costs, kind) if kind == "latency" else 1.0 for kind in self.kinds}
        start = settings.levels["mild"]
        self.register_buffer("multipliers", torch.full((len(self.budgets),), start))

    def forward(self, probabilities: Mapping[str, Tensor], mix: Mix) -> Tensor:
        """probabilities: per table [choices, width]; returns the term to add to the loss, []."""
        weights = self._weights(probabilities, mix)
        terms = []
        if self.settings.eta > 0:
            own = [self._cost(kind, weights) for kind in self.settings.kinds]
            terms.append(self.settings.eta * torch.stack(own).mean())
        terms += [
            multiplier * self._cost(kind, weights)
            for multiplier, kind in zip(self.multipliers.unbind(), self.budgets, strict=True)
        ]
        return torch.stack(terms).sum() if terms else next(iter(weights.values())).new_zeros(())

    @torch.no_grad()
    def expected(self, probabilities: Mapping[str, Tensor]) -> dict[str, float]:
        """E[C] of Eq 11 by kind, in parameters, FLOPs and values moved, over the candidates of the whole supernet."""
        return {
            kind: float(sum(linear_cost(probabilities[table], self._of(kind, table)) for table in self.tables))
            for kind in self.kinds
        }

    def _weights(self, probabilities: Mapping[str, Tensor], mix: Mix) -> Mapping[str, Tensor]:
        if self.settings.estimator != "monte-carlo":
            return probabilities
        if not isinstance(mix, WeightMix):
            raise UserError(
                "resource.estimator=monte-carlo reads the weights of the mix, but this method combines feature maps "
                "itself; use estimator=expectation"
            )
        return mix.tables

    def _cost(self, kind: str, weights: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([self._table_cost(kind, table, weights[table]) for table in self.tables]).sum()

    def _table_cost(self, kind: str, table: str, weights: Tensor) -> Tensor:
        costs = self._of(kind, table)
        if self.settings.form == "log":
            return log_cost(weights, costs / self._unit[kind])
        costs = costs / self._whole[kind]
        if self.settings.estimator == "policy":
            return policy_cost(weights, costs, _inside(draw_uniform(1, *weights.shape, device=weights.device)))
        return linear_cost(weights, costs)

    def _of(self, kind: str, table: str) -> Tensor:
        return self.get_buffer(f"{kind}_{table}")


def check_steerable(probabilities: Mapping[str, Tensor], method: str) -> None:
    """Raises if a method's probabilities have no gradient: a penalty on them would have no effect."""
    if not any(p.requires_grad for p in probabilities.values()):
        raise UserError(
            f"a resource penalty works through a method's probabilities, but those of {method!r} have no gradient; "
            "leave out the resource settings, or state a budget and let evolution select within it "
            "(--set evolution.generations=20)"
        )


def _smallest(costs: CostTables, kind: str) -> float:
    """The smallest cost above 0: in this unit, no logarithm of a cost is negative."""
    positive = [float(site[site > 0].min()) for site in costs.kinds[kind] if bool((site > 0).any())]
    return min(positive, default=1.0)


def _inside(uniform: Tensor) -> Tensor:
    """Uniform numbers clamped away from 0 and 1, where a Gumbel variable is infinite."""
    return uniform.clamp(torch.finfo(uniform.dtype).tiny, 1.0 - torch.finfo(uniform.dtype).eps)
