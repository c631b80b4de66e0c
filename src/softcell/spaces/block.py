"""The heterogeneous residual block of Neural Operator Search: a node with features, attentions and kernels as inputs.

Eq 2 sums the inputs by kind, every candidate weighted (Eq 7). Eq 3 applies attentions and kernels to the sum of the
features and adds everything up:

    F_k' = F + F ⊙ A + Σ F ⊛ D

Applications are linear, so outputs of one candidate on several edges are summed first and applied once. A node of the
second tier has one incoming choice, from its surrogate x = F_k'. Deviation: as printed (Eq 4-5) it would be zero
whenever the one operation kept there is not a feature operation. Instead features share its sum with the source:

    base = Σ_f w_f·o_f(x) + (1 - Σ_f w_f)·x          F_k = base + base ⊙ A_k + Σ base ⊛ D_k

so that a single attention gives x + x ⊙ A and a single feature operation gives o_f(x). With weights that do not sum to
1 (several connections of weight 1 each) the share of x is 0 as soon as there is a feature.

Methods that keep connections independently of each other (EnTranNAS-DST) may keep all of a choice, each with a weight
of 1. Sums of features are normed in the next operation; attentions and kernels multiply them, from node to node. So a
calibration weighs 1/m among the m connections that its choice keeps, as it would under equal weights that sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeGuard

import torch
from torch import Tensor

from softcell.arch import Live, Mix, Table, WeightMix
from softcell.kernels.mix import small_weighted_sum
from softcell.nn.calibrate import Calibration, calibrated
from softcell.nn.candidates import get_candidate
from softcell.spaces._calibration_sums import Constants
from softcell.spaces._fused_plan import remembered
from softcell.spaces.edges import Combiner, NodeInputs, Output, total
from softcell.spaces.execution import is_modules_only

Chosen = Mapping[tuple[int, ...], Tensor]
"""Weights by their positions in the flattened matrix of a mix."""


@dataclass(slots=True)
class Watch:
    """Record of one choice at one site while its cell is computed.

    made: by candidate the output of its module, and the module where it calibrates. features, value:
    the sum of the target's features (`base` above) and the target's value, both [n, c, h, w].
    """

    site: int
    choice: int
    source: int
    target: int
    made: dict[int, tuple[Calibration | None, Tensor]] = field(default_factory=dict)
    features: Tensor | None = None
    value: Tensor | None = None

    def added(self) -> dict[int, tuple[Tensor, bool]]:
        """By candidate the map [n, c, h, w] that it adds to the target, without its weight; True: a feature.

        A feature adds o(x) to the sum of the features, which the calibrations of the node read too (True). An attention
        adds base ⊙ A and a kernel base ⊛ D to the node's value (False).
        """
        base = self.features
        if base is None:
            return {}
        return {
            k: (x, True) if module is None else (module.applied(base, x), False) for k, (module, x) in self.made.items()
        }


_watches: list[Watch] = []


@contextmanager
def watching(table: Table, site: int, choice: int) -> Iterator[Watch]:
    """Records one choice of a cell with calibrating candidates; the computation is unchanged."""
    own = table.choices[choice]
    _watches.append(Watch(site, choice, own.source, own.target))
    try:
        yield _watches[-1]
    finally:
        _watches.pop()


def watched(site: int) -> Watch | None:
    """The watch on a choice of this site, if there is one."""
    return _watches[-1] if _watches and _watches[-1].site == site else None


def calibrates(table: Table) -> bool:
    """Whether any candidate of the table is a calibrating one."""
    return any(get_candidate(op).calibrates for choice in table.choices for op in choice.candidates)


class Block:
    """The values of the nodes of a cell with calibrating candidates.

    residual: nodes that keep a share of their source. calibrations: by name one module of each calibrating candidate.
    combiner: sums outputs by a mix.
    """

    def __init__(
        self, table: Table, residual: Collection[int], calibrations: Mapping[str, Calibration], combiner: Combiner
    ) -> None:
        self._table, self._combiner = table, combiner
        self._calibrations = dict(calibrations)
        self._ops = {
            (i, k): op
            for i, choice in enumerate(table.choices)
            for k, op in enumerate(choice.candidates)
            if get_candidate(op).calibrates
        }
        self._choices: dict[int, int] = {}
        for node in residual:
            (self._choices[node],) = table.incoming(node)
        self.residual = {node: table.choices[choice].source for node, choice in self._choices.items()}
        self._positions: dict[Live | None, list[tuple[int, ...]] | None] = {}
        self._columns: dict[tuple[torch.device, int, tuple[int, ...]], Tensor] = {}
        self.constants: Constants = {}
        self._masks: dict[tuple[torch.device, torch.dtype, Hashable], tuple[Tensor, Tensor]] = {}

    def value(
        self,
        node: int,
        inputs: NodeInputs,
        x: Tensor | None,
        chosen: Callable[[], Chosen],
        mix: Mix,
        site: int,
        factors: Tensor | None,
    ) -> Tensor | None:
        """The value [n, c, h, w] of a node with features and calibrations as inputs (Eq 2-5); None: no features.

        x: the source of a residual node, None at others. chosen: reads the weights of calibrations. factors
        [choices, n]: drop-path's.
        """
        outputs = inputs.outputs
        live = mix.live(site) if isinstance(mix, WeightMix) and mix.is_picked(site) else None
        if not isinstance(mix, WeightMix):
            # Before outputs are split by kind: attention compares all candidates of a choice (IT-NAS).
            for choice in sorted({choice for choice, _, _ in outputs}):
                mix.meet(site, choice, {k: one for c, k, one in outputs if c == choice})
        features, calibrations = self.by_kind(outputs if live is None else self._shared(outputs, live))
        if x is not None:
            # `sum`, not `combine`: drop-path never drops the sum of a residual node.
            base = inputs.plus(self._combiner.sum(features, mix, site))
            if not inputs.has_share:
                rest = self.rest(node, inputs.summed | {k for _, k, _ in features}, x, mix, site) * x
                base = rest if base is None else base + rest
        else:
            base = inputs.plus(self._combiner.combine(features, mix, site, factors))
        if base is None:
            return None
        watch = watched(site)
        if watch is not None and watch.target == node:
            base = watch.features = base.view_as(base)  # a sum of one term is that map itself, which others may read
        made = list(inputs.calibrations)
        made += [
            (self._calibrations[op], one)
            for op, own in calibrations.items()
            if (one := self._sum_calibrations(own, chosen(), mix, site, factors)) is not None
        ]
        if is_modules_only():
            # Eq 3 term by term: the twin of `calibrated`.
            value = total([base, *(module.applied(base, one) for module, one in made)])
        else:
            value = calibrated(base, made)
        if watch is not None and watch.target == node:
            value = watch.value = value.view_as(value)
        return value

    def _sum_calibrations(
        self, outputs: list[Output], chosen: Chosen, mix: Mix, site: int, factors: Tensor | None
    ) -> Tensor | None:
        """The weighted sum of the outputs of one candidate at a node; chosen: weights that were read before."""
        present = [x for _, _, x in outputs if x is not None]
        weights = chosen.get(tuple(choice * self._table.width + k for choice, k, _ in outputs))
        if weights is None or len(present) < len(outputs):
            return self._combiner.combine(outputs, mix, site, factors)
        return small_weighted_sum(present, weights)

    def _shared(self, outputs: Sequence[Output], live: Live) -> list[Output]:
        """Outputs that all weigh 1, calibrations divided by how many connections their choice keeps."""
        return [
            (choice, k, x / kept)
            if x is not None and (choice, k) in self._ops and (kept := self._kept(choice, live)) > 1
            else (choice, k, x)
            for choice, k, x in outputs
        ]

    def _kept(self, choice: int, live: Live) -> int:
        names = self._table.choices[choice].candidates
        return sum(not get_candidate(names[k]).zero for k in live[choice])

    def by_kind(self, outputs: Sequence[Output]) -> tuple[list[Output], dict[str, list[Output]]]:
        """Features, and calibrating outputs by their candidate's name."""
        features: list[Output] = []
        calibrations: dict[str, list[Output]] = {}
        for output in outputs:
            op = self._ops.get(output[:2])
            if op is None:
                features.append(output)
            else:
                calibrations.setdefault(op, []).append(output)
        return features, calibrations

    def rest(self, node: int, features: Set[int], x: Tensor, mix: Mix, site: int) -> Tensor | float:
        """The share of the source x: 1 - Σ_f w_f over the live features of the node's choice, at least 0."""
        if not features:
            return 1.0
        choice = self._choices[node]
        # Every picked feature has weight 1, so no share is left for x.
        if isinstance(mix, WeightMix) and mix.is_picked(site):
            return 0.0
        if isinstance(mix, WeightMix):
            weights = mix.weights(site)[choice]
            taken = weights.index_select(0, self._index(weights.device, choice, tuple(sorted(features)))).sum()
        else:
            one = x.new_ones(1, 1, 1, 1)
            # Combining tensors of ones yields the sum of the weights.
            combined = mix.combine(site, choice, dict.fromkeys(features, one))
            taken = torch.zeros_like(one) if combined is None else combined
        return (1.0 - taken).clamp(min=0.0)

    def with_shares(self, weights: Tensor, places: Mapping[int, tuple[Set[int], int]]) -> Tensor:
        """Mixing weights [choices, width] in which identities also carry the share of their source (`rest`).

        places: by residual node its live features, and which of them is the identity. A program that adds up the
        features then adds the share, too.
        """
        key = tuple((self._choices[node], tuple(sorted(own)), k) for node, (own, k) in sorted(places.items()))
        if (weights.device, weights.dtype, key) not in self._masks:
            features, identities = (torch.zeros(weights.shape) for _ in range(2))
            for choice, own, k in key:
                features[choice, list(own)] = 1.0
                identities[choice, k] = 1.0
            self._masks[weights.device, weights.dtype, key] = features.to(weights), identities.to(weights)
        features, identities = self._masks[weights.device, weights.dtype, key]
        taken = (weights * features).sum(1, keepdim=True)
        return torch.addcmul(weights, (1.0 - taken).clamp(min=0.0), identities)

    def sums_at_once(self, mix: Mix, site: int, *, drops: bool) -> TypeGuard[WeightMix]:
        """Whether calibrations are summed by weights that can be read all at once."""
        if not isinstance(mix, WeightMix) or mix.is_picked(site):
            return False
        # With drop-path weights are read choice by choice (`Combiner.combine`).
        return not (drops or is_modules_only() or torch.compiler.is_compiling())

    def read_weights(self, mix: Mix, site: int, factors: Tensor | None) -> Chosen:
        """The weights of all calibrations at once, where the mix is plain weights."""
        if not self.sums_at_once(mix, site, drops=factors is not None):
            return {}
        return self.weights_of_calibrations(mix.weights(site).flatten(), mix.live(site))

    def weights_of_calibrations(self, weights: Tensor, live: Live | None) -> dict[tuple[int, ...], Tensor]:
        """By positions in `weights`, the weights of all calibrations of one candidate at one node.

        weights [choices · width] are read once for all of them: each read costs a launch, and two more backward.
        """
        positions = remembered(self._positions, live, lambda: self._calibration_positions(live))
        if not positions:
            return {}
        chosen = weights.index_select(0, self._index(weights.device, -2, tuple(chain(*positions))))
        return dict(zip(positions, torch.split(chosen, [len(own) for own in positions]), strict=True))

    def _calibration_positions(self, live: Live | None) -> list[tuple[int, ...]]:
        """Positions of the live calibrations, one tuple per node and candidate, ordered by source."""
        by_node: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for (choice, k), op in self._ops.items():
            if live is None or k in live[choice]:
                own = self._table.choices[choice]
                by_node.setdefault((own.target, op), []).append((own.source, choice * self._table.width + k))
        return [tuple(position for _, position in sorted(found)) for found in by_node.values()]

    def undropped(self, factors: Tensor) -> Tensor:
        """Drop-path's factors [choices, n] with ones for the choices whose sums it does not change."""
        if not self._choices:
            return factors
        index = self._index(factors.device, -1, tuple(sorted(self._choices.values())))
        return factors.index_fill(0, index, 1.0)

    def _index(self, device: torch.device, choice: int, columns: tuple[int, ...]) -> Tensor:
        """Columns as a tensor on the device; kept, since copying them each step would stall a GPU."""
        key = (device, choice, columns)
        if key not in self._columns:
            self._columns[key] = torch.tensor(columns, device=device)
        return self._columns[key]
