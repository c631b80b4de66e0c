"""EnTranNAS and EnTranNAS-DST: Towards Improving the Consistency, Efficiency, and Flexibility of Differentiable Neural
Architecture Search (Yang, You, Li, Wang, Qian, Lin; CVPR 2021, arXiv:2101.11342).

    Eq 4     A = Proj(P): the two strongest of each node           -> the space's rule, every step (`_TransitPlanner`)
    Eq 5     p = softmax(α / τ), τ annealed                        -> `_EngineTransit.softened`
    Eq 6     engine cells Σ p_k o_k(x_i), transit cells Σ_S o_k(x_i) -> `_EngineTransit.relax`
             one weight set per source node and candidate          -> the space's `share_features`
    Eq 7     p̂ = p / max over all connections of a node            -> `connection_normalised`
    Eq 8     q = ReLU(p̂ - t), t = sigmoid(β)                       -> `pruned`, `thresholds`
    Eq 9     q̂ = q / Σ_k q on every edge with a q > 0              -> `operation_normalised`
    Eq 10    S_j = {(i, k) | q̂ > 0}                                -> `Positive`
    Eq 11    L_val + λ · mean over nodes of -log t                 -> `sparsity`, `EnTranNasDst.penalty`
    §2.5     bottleneck                                            -> the space's `bottleneck`

Engine cells (by default the first of each kind) run every candidate and learn; transit cells run the architecture
currently derived, each connection with a coefficient of exactly 1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.arch import Layout, Live, Mix, Pick, Plan, Positive, Rule, Table, WeightMix
from softcell.arch.derive import derive_picks
from softcell.arch.mix import Schedule, live_of, temperature_at
from softcell.errors import UserError
from softcell.methods.base import Masks, Method, Regime, logits_like, register_method
from softcell.methods.parts import Planner
from softcell.nn.candidates import get_candidate, known_candidates
from softcell.settings import not_negative, positive

Engines = Literal["first", "last", "all"] | tuple[int, ...]

# §3, with the experiments, is not available to us: these are the settings of the same authors' other work.
CIFAR_SPACE: dict[str, Any] = {"share_features": True, "bottleneck": 4}  # §2.5: ratio 4 "in our experiments"
CIFAR = {
    "epochs": 50,
    "batch_size": 256,
    "weights": {"lr": 0.1},
    "architecture": {"lr": 6e-4},
    "space_settings": CIFAR_SPACE,
}
IMAGENET = {
    "epochs": 50,
    "batch_size": 1024,
    "split": {"weights": 0.1, "validation": 0.025},  # PC-DARTS's shares
    "weights": {"lr": 0.5, "lr_min": 0.0, "schedule": "linear", "warmup": 5},
    "architecture": {"lr": 6e-4},
    "space_settings": {**CIFAR_SPACE, "stem": "imagenet"},
}
# Found by experiment on CIFAR-10 (docs/papers/entrannas.md, Sparsity): with the defaults of `EnTranNasDstSettings` the
# derived network has 14M parameters, with these 2.7M.
CIFAR_DST: dict[str, Any] = {"sparsity": 1.0, "threshold_speed": 4.0}
ENLARGED = (
    "none", "max_pool_3x3", "avg_pool_3x3", "skip_connect", "nor_conv_1x1", "nor_conv_3x3",
    "sep_conv_3x3", "sep_conv_5x5", "sep_conv_7x7", "dil_conv_3x3", "dil_conv_5x5", "conv_7x1_1x7",
)  # fmt: skip
SMALL = {
    "epochs": 12,
    "batch_size": 64,
    "child_every": 1,
    "weights": {"lr": 0.1},
    "architecture": {"lr": 0.04},
    "space_settings": {"share_features": True},  # no bottleneck: a quarter of its 8 channels would be 2
}


def per_choice(values: Tensor, members: Tensor) -> Tensor:
    """The value of each choice's target node: values [nodes], members bool [nodes, choices], to [choices].

    Every column has one True, so the sum is that one value, to the last bit.
    """
    return torch.where(members, values[:, None], 0.0).sum(0)


def connection_normalised(p: Tensor, members: Tensor) -> Tensor:
    """p̂ (Eq 7): p [choices, width] over the largest of its node; members bool [nodes, choices]."""
    strongest = torch.where(members, p.amax(1), 0.0).amax(1)
    return p / per_choice(strongest, members)[:, None]


def thresholds(beta: Tensor) -> Tensor:
    """t = sigmoid(β), any shape; kept below 1, which it is but for rounding: a node must not lose its last input."""
    return torch.sigmoid(beta).clamp(max=1.0 - torch.finfo(beta.dtype).eps)


def pruned(p_hat: Tensor, t: Tensor, members: Tensor) -> Tensor:
    """q (Eq 8): p̂ [choices, width] above the threshold of its node, t [nodes], and 0 below."""
    return F.relu(above_threshold(p_hat, t, members))


def above_threshold(p_hat: Tensor, t: Tensor, members: Tensor) -> Tensor:
    """p̂ - t [choices, width], negative below the threshold of a node."""
    return p_hat - per_choice(t, members)[:, None]


def operation_normalised(q: Tensor) -> Tensor:
    """q̂ (Eq 9): the coefficients [choices, width] of every kept edge sum to 1, those of other edges are 0."""
    total = q.sum(1, keepdim=True)
    # A removed edge is 0 / 1, not 0 / 0.
    return q / torch.where(total > 0, total, 1.0)


def sparsity(beta: Tensor) -> Tensor:
    """The mean over nodes of -log t (Eq 11): β [nodes] to []."""
    # -log sigmoid(β), finite for every β.
    return F.softplus(-beta).mean()


def engine_sites(layout: Layout, engines: Engines) -> frozenset[int]:
    """The sites that are engines; every table that is read needs one, or it would not learn."""
    read = [table.name for table in layout.tables if table.name in layout.sites]
    if engines == "all":
        return frozenset(range(len(layout.sites)))
    if engines in ("first", "last"):
        end = 0 if engines == "first" else -1
        return frozenset(layout.sites_of(name)[end] for name in read)
    sites = frozenset(int(site) for site in engines)
    if not all(0 <= site < len(layout.sites) for site in sites):
        raise UserError(f"method.engines must name cells 0 to {len(layout.sites) - 1}, got {sorted(sites)}")
    for name in read:
        if not sites & set(layout.sites_of(name)):
            raise UserError(
                f"method.engines must name at least one {name!r} cell, since only engine cells learn; those are "
                f"{list(layout.sites_of(name))}, got {sorted(sites)}"
            )
    return sites


def reaches_output(table: Table, picks: tuple[Pick, ...]) -> bool:
    """Whether the cell's output depends on its inputs."""
    reached = set(table.sources) - set(table.targets)
    for pick in sorted(picks, key=lambda pick: (pick.target, pick.source)):
        if not cuts(pick.op) and pick.source in reached:
            reached.add(pick.target)
    return bool(reached & set(table.output))


def cuts(op: str) -> bool:
    """Whether the output of a candidate does not depend on its input: zeros, or noise."""
    if op not in known_candidates():
        return op == "none"
    found = get_candidate(op)
    return found.zero or found.blind


def calibrates(op: str) -> bool:
    """Whether a candidate changes features of others, as attentions of NOS do."""
    return op in known_candidates() and get_candidate(op).calibrates


@dataclass(frozen=True)
class EnTranNasSettings:
    """Which cells are engines, and the temperature.

    `engines`: the `first` or the `last` cell of each kind, `all`, or cell numbers such as [0, 2]. `schedule`: how the
    temperature moves from `first_temperature` in the first epoch to `last_temperature` in the last. `init_scale`:
    deviation of the normal distribution that logits start from.
    """

    engines: Engines = "first"
    schedule: Schedule = "exponential"
    first_temperature: float = 1.0
    last_temperature: float = 0.1
    init_scale: float = 1e-3

    def __post_init__(self) -> None:
        positive("method.first_temperature", self.first_temperature)
        positive("method.last_temperature", self.last_temperature)
        not_negative("method.init_scale", self.init_scale)


@dataclass(frozen=True)
class EnTranNasDstSettings(EnTranNasSettings):
    """Those of EnTranNAS, and the thresholds.

    `schedule`: at a constant temperature of 1 the recipe's small steps of α keep strengths so close that a CIFAR-10
    search ends with half of all connections; the annealed one spreads them. `sparsity`: λ of Eq 11. `init_threshold`: β
    at the start; -3 is a threshold of 0.05. `threshold_speed`: the learning rate of β as a multiple of
    `architecture.lr`; at 1 β stays near its start, and λ changes nothing. β has no weight decay. The recipes for CIFAR
    and ImageNet have a `sparsity` of 1 and a `threshold_speed` of 4.
    """

    sparsity: float = 0.1
    init_threshold: float = -3.0
    threshold_speed: float = 3.0

    def __post_init__(self) -> None:
        EnTranNasSettings.__post_init__(self)
        not_negative("method.sparsity", self.sparsity)
        positive("method.threshold_speed", self.threshold_speed)


class _EngineTransit(Method):
    """Engine cells mix by `probabilities`; transit cells run the architecture derived from them."""

    regime: ClassVar[Regime] = "bilevel"
    many_cells: bool = True

    temperature: Tensor

    def __init__(self, layout: Layout, settings: EnTranNasSettings) -> None:
        super().__init__(layout, settings)
        self.engines = engine_sites(layout, settings.engines)
        self.alpha = logits_like(layout, settings.init_scale)
        self.register_buffer("temperature", torch.tensor(settings.first_temperature))
        self.masks = Masks(layout, self.excludes)
        # Never dropped: a captured step keeps reading them.
        self._ones: dict[tuple[Any, ...], Tensor] = {}
        self.planner: _TransitPlanner | None = None
        if len(self.engines) < len(layout.sites):
            self.planner = _TransitPlanner(self, self.probabilities)

    @abstractmethod
    def probabilities(self) -> dict[str, Tensor]:
        """The coefficients of engine cells, per table [choices, width]."""

    def begin_epoch(self, progress: float) -> None:
        s = self.settings
        self.temperature.fill_(temperature_at(progress, s.first_temperature, s.last_temperature, s.schedule))

    def softened(self, table: str) -> Tensor:
        """p [choices, width] (Eq 5)."""
        return self.masks.softmax(table, self.alpha[table], self.temperature)

    def relax(self) -> Mix:
        weights = self.probabilities()
        if self.planner is None:
            return WeightMix(self.layout, weights)
        picked, masked = {}, {}
        for site, live in enumerate(self.planner.current()):
            if live is None:
                continue
            table = self.layout.sites[site]
            if self.planner.widens:
                # Eq 6: a coefficient of 1 for what is derived, 0 for what runs without being derived.
                masked[site] = live, (weights[table] > 0).to(weights[table].dtype)
            else:
                picked[site] = live, self._ones_at(table, live, weights[table])
        return WeightMix(self.layout, weights, picked=picked, masked=masked)  # Eq 6

    def gauges(self) -> dict[str, Tensor]:
        return {"temperature": self.temperature}

    def _ones_at(self, table: str, live: Live, like: Tensor) -> Tensor:
        """1 at live candidates, 0 elsewhere [choices, width]; made once: a step that copies cannot be captured."""
        key = (table, live, like.device, like.dtype)
        if key not in self._ones:
            width = like.shape[1]
            ones = torch.tensor([[float(k in row) for k in range(width)] for row in live], dtype=like.dtype)
            # A copy from memory that is not pinned synchronises with the device.
            if like.is_cuda:
                ones = ones.pin_memory()
            self._ones[key] = ones.to(like.device, non_blocking=True)
        return self._ones[key]


class _TransitPlanner(Planner):
    """Transit cells run what is derived from the current strengths (Eq 4); engine cells run everything.

    can_widen: strengths are margins, and what has none may run with a weight of zero. Thresholds prune a connection in
    nearly every step of a long stretch of the search, and each plan would need its own CUDA graph.
    """

    def __init__(
        self, method: _EngineTransit, strengths: Callable[[], dict[str, Tensor]], *, can_widen: bool = False
    ) -> None:
        super().__init__()
        self._method, self._layout = method, method.layout
        self._strengths, self._can_widen = strengths, can_widen

    def reading(self) -> Tensor:
        found = self._strengths()
        return torch.cat([found[table.name].flatten() for table in self._layout.tables])

    def plan(self, reading: Tensor) -> Plan:
        # A search that diverges stops because of its loss; until then something has to run.
        return self._by_table(torch.nan_to_num(reading, nan=1.0), self._derived)

    def _by_table(self, reading: Tensor, derive: Callable[[Table, Tensor], Live]) -> Plan:
        pieces = torch.split(reading, [table.shape[0] * table.shape[1] for table in self._layout.tables])
        lives = {
            table.name: derive(table, piece.view(table.shape))
            for table, piece in zip(self._layout.tables, pieces, strict=True)
        }
        engines = self._method.engines
        return tuple(None if site in engines else lives[name] for site, name in enumerate(self._layout.sites))

    @property
    def widens(self) -> bool:
        """Whether the plan that is followed may run more than is derived: that of a captured step."""
        return self._plan is not None and self._can_widen

    def widen(self, plan: Plan, reading: Tensor, before: Plan) -> Plan:
        """`before` while it runs all of `plan` and not much more; else what is above its threshold or just below it."""
        if not self._can_widen:
            return plan
        near = self._by_table(torch.nan_to_num(reading, nan=1.0), _near)
        return tuple(map(_widened, plan, near, before))

    def _derived(self, table: Table, strengths: Tensor) -> Live:
        strengths = strengths.nan_to_num()  # as above: infinite values too
        picks = derive_picks(self._layout, table, strengths, self._method.rule)
        if not reaches_output(table, picks):
            # Deviation: where `none` or noise may be picked a cell can break in two; its transit twins would end all
            # learning, so they run the strongest other candidates until it is whole again.
            whole = strengths
            for op in {op for choice in table.choices for op in choice.candidates if cuts(op)}:
                whole = whole.masked_fill(table.columns(op), -torch.inf)
            picks = derive_picks(self._layout, table, whole, self._method.rule)
        return live_of(table, picks)


def _near(table: Table, strengths: Tensor) -> Live:
    """Connections that a few steps may bring back: p̂ at most 0.05 below the threshold."""
    return tuple(
        tuple(k for k in range(len(choice.candidates)) if float(row[k]) > -0.05)
        for choice, row in zip(table.choices, strengths, strict=True)
    )


def _widened(live: Live | None, near: Live | None, before: Live | None) -> Live | None:
    if live is None or near is None or before is None:
        return live
    enough = all({*now} <= {*then} for now, then in zip(live, before, strict=True))
    wide = tuple(tuple(sorted({*now, *then})) for now, then in zip(live, near, strict=True))
    # Each plan needs its own CUDA graph: keep the last one until another saves a fifth of its connections.
    return before if enough and sum(map(len, wide)) > 0.8 * sum(map(len, before)) else wide


@register_method
class EnTranNas(_EngineTransit):
    """Engine and transit cells; the space's rule derives, at every step."""

    name: ClassVar[str] = "entrannas"
    about: ClassVar[str] = (
        "EnTranNAS: one engine cell per kind learns, all others run the derived cell; shared features"
    )
    Settings: ClassVar[type] = EnTranNasSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": CIFAR,
        "imagenet": IMAGENET,
        "enlarged": {**CIFAR, "space_settings": {**CIFAR_SPACE, "candidates": list(ENLARGED)}},
        "small": SMALL,
    }

    def probabilities(self) -> dict[str, Tensor]:
        return {table.name: self.softened(table.name) for table in self.layout.tables}


@register_method
class EnTranNasDst(_EngineTransit):
    """Engine and transit cells with a learned topology: every connection above its node's threshold is derived."""

    name: ClassVar[str] = "entrannas-dst"
    about: ClassVar[str] = "EnTranNAS-DST: learned thresholds decide how many connections each node keeps"
    excludes: ClassVar[tuple[str, ...]] = ("none",)
    rule: ClassVar[Rule] = Positive()
    is_distribution: ClassVar[bool] = False
    Settings: ClassVar[type] = EnTranNasDstSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {**CIFAR, "method_settings": CIFAR_DST},
        "imagenet": {**IMAGENET, "method_settings": CIFAR_DST},
        "enlarged": {
            **CIFAR,
            "method_settings": CIFAR_DST,
            "space_settings": {**CIFAR_SPACE, "candidates": list(ENLARGED[1:])},
        },
        "small": SMALL,
    }

    def __init__(self, layout: Layout, settings: EnTranNasDstSettings) -> None:
        super().__init__(layout, settings)
        self.beta = nn.ParameterDict(
            {t.name: nn.Parameter(torch.full((len(t.targets),), settings.init_threshold)) for t in layout.tables}
        )
        for table in layout.tables:
            members = torch.zeros(len(table.targets), len(table), dtype=torch.bool)
            for row, target in enumerate(table.targets):
                members[row, list(table.incoming(target))] = True
            self.register_buffer(f"members_{table.name}", members, persistent=False)
        ops = {op for table in layout.tables for choice in table.choices for op in choice.candidates}
        # Where a candidate cuts, a plan may need one that has no weight (`_derived`); calibrations act on all features.
        if self.planner is not None and not any(cuts(op) or calibrates(op) for op in ops - {*self.excludes}):
            self.planner = _TransitPlanner(self, self.margins, can_widen=True)

    def probabilities(self) -> dict[str, Tensor]:
        """q̂; an edge that is pruned away has 0 throughout."""
        return {name: operation_normalised(q) for name, q in self._pruned().items()}

    def occupancy(self, mix: Mix | None = None) -> dict[str, Tensor]:
        """1 for derived connections, 0 for others; the gradient is that of p + q.

        Not q̂: an edge's coefficients sum to 1 for any number of connections, each of full cost. Through q a cost
        raises thresholds, through p it moves each edge to cheaper candidates, the last of a node included.
        """
        found = {}
        for name, q in self._pruned().items():
            way = self.softened(name) + q
            found[name] = (q > 0).to(q.dtype) + (way - way.detach())
        return found

    def margins(self) -> dict[str, Tensor]:
        """p̂ - t: positive exactly where q̂ is, negative below the threshold."""
        return self._per_table(above_threshold)

    def _pruned(self) -> dict[str, Tensor]:
        """q (Eq 7 and 8), per table [choices, width]."""
        return self._per_table(pruned)

    def _per_table(self, compare: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
        found = {}
        for table in self.layout.tables:
            members = self.get_buffer(f"members_{table.name}")
            p_hat = connection_normalised(self.softened(table.name), members)
            found[table.name] = compare(p_hat, thresholds(self.beta[table.name]), members)
        return found

    def penalty(self, mix: Mix) -> Tensor | None:
        """λ · mean over all nodes of -log t (Eq 11)."""
        if self.settings.sparsity == 0:
            return None
        return sparsity(torch.cat([*self.beta.values()])) * float(self.settings.sparsity)

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        return [
            {"params": [*self.alpha.values()], "lr": lr, "weight_decay": weight_decay},
            {"params": [*self.beta.values()], "lr": lr * self.settings.threshold_speed, "weight_decay": 0.0},
        ]

    @torch.no_grad()
    def gauges(self) -> dict[str, Tensor]:
        """In addition to the temperature: the threshold of every node, and the connections per node of every table."""
        found = super().gauges()
        coefficients = self.probabilities()
        for table in self.layout.tables:
            t = thresholds(self.beta[table.name])
            found |= {f"threshold_{table.name}_{node}": t[i] for i, node in enumerate(table.targets)}
            found[f"connections_{table.name}"] = (coefficients[table.name] > 0).sum() / len(table.targets)
        return found
