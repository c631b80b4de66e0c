"""Cells as graphs: one that mixes all candidates of a table, one that runs the picks of a genotype.

Both keep their candidate modules in `Edges` under the same names, so weights move from one to the other by name. A cell
is evaluated node by node: when a node is known, everything that leaves it runs, and what depends on the node alone
(pools, identity) runs once for all edges that leave it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from softcell.arch import Cell, Live, Mix, Pick, Table, WeightMix
from softcell.arch.genotype import check_forward
from softcell.kernels.mix import small_weighted_sum, weighted_sum
from softcell.kernels.norm import scaled
from softcell.nn.calibrate import Calibration, calibrated
from softcell.nn.candidates import Spec
from softcell.nn.drop import DropPath
from softcell.spaces.block import Block, Output, calibrates
from softcell.spaces.bottleneck import Bottleneck, narrowed
from softcell.spaces.edges import Edges, Runner, SpecOf
from softcell.spaces.fused import Departures, Fused, OutputsApart, literal, serves
from softcell.spaces.fused_plan import Entry

__all__ = ["MixedCell", "PickedCell", "SpecOf"]

Chosen = Mapping[tuple[int, ...], Tensor]
"""Weights that have been read, by their positions in the flattened matrix of a mix."""


@dataclass(slots=True)
class _Arrived:
    """What has reached a node."""

    outputs: list[Output] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)  # of features, weighted (and dropped) already
    summed: set[int] = field(default_factory=set)  # their candidates

    def plus(self, value: Tensor | None) -> Tensor | None:
        """The sums and `value`, the sum of the other features."""
        terms = self.sums if value is None else [*self.sums, value]
        return _total(terms) if terms else None


class MixedCell(nn.Module):
    """Every candidate of every choice of a table, combined by a mix.

    `spec_of` says for which width the cell stands; with a `bottleneck` its candidates are that many times narrower.

    A node is the sum of its features; calibrating candidates are then applied to that sum and added to it (NOS, Eq 3).
    `residual` names nodes with one incoming choice that keep what no feature candidate takes of their source: their
    sum is f + (1 - Σ_f w_f)·x (NOS, Eq 4-5 as settled). Drop-path leaves that sum alone.
    """

    def __init__(
        self,
        table: Table,
        inputs: int,
        spec_of: SpecOf,
        *,
        share_features: bool = False,
        bottleneck: int = 1,
        residual: Collection[int] = (),
    ) -> None:
        super().__init__()
        wide, spec_of = spec_of(0), narrowed(spec_of, bottleneck)
        self.table, self.inputs, self.spec_of = table, inputs, spec_of
        self._block = Block(table, residual) if calibrates(table) else None
        entries = [
            (index, k, Pick(choice.source, choice.target, op))
            for index, choice in enumerate(table.choices)
            for k, op in enumerate(choice.candidates)
        ]
        self.edges = Edges((pick for _, _, pick in entries), spec_of, share_features=share_features)
        # One module of each calibrating candidate: it tells how what all of them make is applied.
        self._calibrations = {
            pick.op: module
            for number, (_, _, pick) in enumerate(entries)
            if isinstance(module := self.edges.module(number), Calibration)
        }
        self._leaving: dict[int, list[tuple[int, int, int, int]]] = {}  # source: (entry, choice, candidate, target)
        for number, (index, k, pick) in enumerate(entries):
            self._leaving.setdefault(pick.source, []).append((number, index, k, pick.target))
        self._spec = spec_of(0)
        self.bottleneck = (
            None if bottleneck == 1 else Bottleneck(table.sources, table.targets, wide=wide, narrow=self._spec)
        )
        self._drop_path: list[DropPath] = []  # a list: the supernet owns it
        self._index_cache: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
        self._fused = Fused(self._entries, inputs, max(table.targets) + 1)
        self._departures = Departures(self._features, self._spec.channels)
        self._apart = OutputsApart(self._features, self._spec.channels)
        self._targets: Set[int] = frozenset(table.targets)
        self._reached_by_all: Set[int] | None = None

    def use_drop_path(self, drop_path: DropPath | None) -> None:
        """Puts what each choice contributes through `drop_path`; None takes it out."""
        self._drop_path = [] if drop_path is None else [drop_path]

    def _drops(self) -> bool:
        return bool(self._drop_path) and self.training

    def _entries(self, live: Live | None) -> Iterator[Entry]:
        """The live candidates, with the positions of their weights in the flattened matrix of a mix."""
        for source, leaving in self._leaving.items():
            for entry, choice, candidate, target in leaving:
                if live is None or candidate in live[choice]:
                    weight = choice * self.table.width + candidate
                    yield Entry(source, target, weight, self.edges.module(entry), choice)

    def _features(self, node: int, live: Live | None) -> Iterator[tuple[int, Entry]]:
        """The live features that leave a node, each with its candidate's number."""
        for entry, choice, candidate, target in self._leaving[node]:
            module = self.edges.module(entry)
            if module is None or isinstance(module, Calibration) or not (live is None or candidate in live[choice]):
                continue
            yield candidate, Entry(node, target, choice * self.table.width + candidate, module, choice)

    def forward(self, states: Sequence[Tensor], mix: Mix, site: int) -> list[Tensor]:
        """Values of the input nodes to those of all nodes, each [n, c, h, w]."""
        live = mix.live(site)
        factors = self._drop_path[0].factors(states[0], len(self.table)) if self._drops() else None
        served = serves(states[0])
        fuses = served and isinstance(mix, WeightMix)
        if fuses and self.bottleneck is None and self._block is None:
            fused = self._fused.of(live, self._spec.channels, self._spec.stride)
            if fused is not None:
                return fused(states, mix.weights(site).flatten(), factors)  # type: ignore[attr-defined]
        values = list(states)
        arrived: dict[int, _Arrived] = {target: _Arrived() for target in self.table.targets}
        runners: dict[int, Runner] = {}
        chosen = self._read_weights(mix, site, factors)
        for node in range(max(self.table.targets) + 1):
            if node >= self.inputs:
                if self._block is None:
                    value = arrived[node].plus(self._combine(arrived[node].outputs, mix, site, factors))
                else:
                    value = self._calibrate(self._block, node, arrived[node], runners, chosen, mix, site, factors)
                values.append(_node(node, value, states[0], self._spec, self.bottleneck))
            if node in self._leaving:
                runners[node] = Runner(values[node], node, self.bottleneck)
                summed = fuses and self._depart_together(node, runners[node], mix, site, factors, arrived)
                made = {} if fuses or not served else self._depart_apart(node, runners[node], mix, site)
                self._depart(node, runners[node], mix, site, factors, arrived, made, calibrations_only=summed)
        return values

    def has_fused_form(self) -> bool:
        """Whether the cell, or what leaves one of its nodes, would run fused where kernels serve."""
        spec = self._spec
        if self.bottleneck is None and self._block is None and self._fused.of(None, spec.channels, spec.stride):
            return True
        strides = {node: spec.stride if node < self.inputs else 1 for node in self._leaving}
        return any(self._departures.of(node, None, stride) for node, stride in strides.items())

    def _depart_together(
        self,
        node: int,
        run: Runner,
        mix: Mix,
        site: int,
        factors: Tensor | None,
        arrived: Mapping[int, _Arrived],
    ) -> bool:
        """Runs the features that leave a node as one program; False where they must run one by one."""
        assert isinstance(mix, WeightMix)
        departure = self._departures.of(node, mix.live(site), self._spec.stride if node < self.inputs else 1)
        if departure is None:
            return False
        if factors is not None and self._block is not None:
            factors = self._block.undropped(factors)
        _, *sums = departure.cell([run.value()], mix.weights(site).flatten(), factors)
        for (target, candidates), value in zip(departure.candidates.items(), sums, strict=True):
            arrived[target].sums.append(value)
            arrived[target].summed |= candidates
        return True

    def _depart_apart(self, node: int, run: Runner, mix: Mix, site: int) -> dict[int, Tensor]:
        """The features that leave a node out of one program, for a mix that wants each by itself.

        By place in the flattened table; none where they must run one by one.
        """
        if any(mix.recomputes(site, choice) for _, choice, _, _ in self._leaving[node]):
            return {}
        apart = self._apart.of(node, mix.live(site), self._spec.stride if node < self.inputs else 1)
        if apart is None:
            return {}
        x = run.value()
        _, *outputs = apart.cell([x])
        return {place: outputs[number] for place, number in apart.numbers.items()}

    def _depart(
        self,
        node: int,
        run: Runner,
        mix: Mix,
        site: int,
        factors: Tensor | None,
        arrived: Mapping[int, _Arrived],
        made: Mapping[int, Tensor],
        *,
        calibrations_only: bool,
    ) -> None:
        live = mix.live(site)
        leaving = [
            (choice, candidate, target, self.edges.module(entry))
            for entry, choice, candidate, target in self._leaving[node]
            if live is None or candidate in live[choice]
        ]
        if calibrations_only:
            leaving = [one for one in leaving if isinstance(one[-1], Calibration)]
        again = {choice: mix.recomputes(site, choice) for choice, *_ in leaving}
        width, reached = self.table.width, self._reached(live)
        run.together(
            module
            for choice, k, target, module in leaving
            if not again[choice] and target in reached and choice * width + k not in made
        )
        outputs: dict[int, dict[int, Tensor | None]] = {}
        for choice, k, _, module in leaving:
            output = made.get(choice * width + k)
            if output is None and module is not None:
                output = run(module, again=again[choice])
            outputs.setdefault(choice, {})[k] = output
        targets = {choice: target for choice, _, target, _ in leaving}
        combined = {} if self._block is not None or literal() else mix.combine_together(site, outputs)
        for choice, own in outputs.items():
            if choice not in combined:
                arrived[targets[choice]].outputs += [(choice, k, x) for k, x in own.items()]
            elif (value := combined[choice]) is not None:
                arrived[targets[choice]].sums.append(scaled(value, factors, choice))

    def _reached(self, live: Live | None) -> Set[int]:
        """Nodes that have something to calibrate: features that arrive, or what they leave over of their source.

        What calibrations send to any other is never used, so that their weights must get no gradient, not even the
        zeros that weights would get which are stacked with others.
        """
        if self._block is None:
            return self._targets
        if live is None and self._reached_by_all is not None:
            return self._reached_by_all
        reached = {entry.target for node in self._leaving for _, entry in self._features(node, live)}
        reached |= self._block.residual.keys()
        if live is None:
            self._reached_by_all = reached
        return reached

    def _combine(self, outputs: list[Output], mix: Mix, site: int, factors: Tensor | None) -> Tensor | None:
        """The value of a node out of all that arrives; with drop-path (factors [choices, n]), choice by choice."""
        if factors is None:
            return self._sum(outputs, mix, site)
        total: Tensor | None = None
        for choice in sorted({choice for choice, _, _ in outputs}):
            value = self._sum([output for output in outputs if output[0] == choice], mix, site)
            if value is not None:
                kept = scaled(value, factors, choice)
                total = kept if total is None else total + kept
        return total

    def _calibrate(
        self,
        block: Block,
        node: int,
        arrived: _Arrived,
        runners: Mapping[int, Runner],
        chosen: Chosen,
        mix: Mix,
        site: int,
        factors: Tensor | None,
    ) -> Tensor | None:
        """The value of a node at which calibrating candidates may arrive (NOS, Eq 2-5)."""
        outputs = arrived.outputs
        if not isinstance(mix, WeightMix):
            for choice in sorted({choice for choice, _, _ in outputs}):
                mix.meet(site, choice, {k: x for c, k, x in outputs if c == choice})
        features, calibrations = block.sorted(outputs)
        if node in block.residual:
            x = runners[block.residual[node]].value()
            base = arrived.plus(self._sum(features, mix, site))
            rest = block.rest(node, arrived.summed | {k for _, k, _ in features}, x, mix, site) * x
            base = rest if base is None else base + rest
        else:
            base = arrived.plus(self._combine(features, mix, site, factors))
        if base is None:
            return None
        made = [
            (self._calibrations[op], one)
            for op, own in calibrations.items()
            if (one := self._sum_calibrations(own, chosen, mix, site, factors)) is not None
        ]
        if literal():
            return _total([base, *(module.applied(base, one) for module, one in made)])
        return calibrated(base, made)

    def _sum_calibrations(
        self, outputs: list[Output], chosen: Chosen, mix: Mix, site: int, factors: Tensor | None
    ) -> Tensor | None:
        """What all modules of one candidate send to a node, by the weights read already where they are among them."""
        present = [x for _, _, x in outputs if x is not None]
        weights = chosen.get(tuple(choice * self.table.width + k for choice, k, _ in outputs))
        if weights is None or len(present) < len(outputs):
            return self._combine(outputs, mix, site, factors)
        return small_weighted_sum(present, weights)

    def _read_weights(self, mix: Mix, site: int, factors: Tensor | None) -> Chosen:
        """The weights of all calibrations at once, where plain weights are all they are combined by."""
        if self._block is None or not isinstance(mix, WeightMix) or mix.is_picked(site):
            return {}
        if factors is not None or literal() or torch.compiler.is_compiling():
            return {}
        return self._block.weights_of_calibrations(mix.weights(site).flatten(), mix.live(site))

    def _sum(self, outputs: list[Output], mix: Mix, site: int) -> Tensor | None:
        if isinstance(mix, WeightMix):
            present = [(choice, candidate, x) for choice, candidate, x in outputs if x is not None]
            if not present:
                return None
            if mix.is_picked(site):
                return _total([x for _, _, x in present])
            weights = mix.weights(site).flatten()
            width = self.table.width
            index = self._index(weights.device, tuple(choice * width + k for choice, k, _ in present))
            return weighted_sum([x for _, _, x in present], weights.index_select(0, index))
        total: Tensor | None = None
        for choice in sorted({choice for choice, _, _ in outputs}):
            own = {k: x for c, k, x in outputs if c == choice}
            value = mix.combine(site, choice, own)
            if value is not None:
                total = value if total is None else total + value
        return total

    def _index(self, device: torch.device, positions: tuple[int, ...]) -> Tensor:
        """Positions as a tensor on the device; kept, since copying them each step would stall a GPU."""
        key = (device, positions)
        if key not in self._index_cache:
            self._index_cache[key] = torch.tensor(positions, device=device)
        return self._index_cache[key]


class PickedCell(nn.Module):
    """The picks of one genotype cell; a node is the plain sum of what arrives.

    Calibrating candidates are applied to the sum of the features that arrive, and added to it. A node in `residual`
    that no feature reaches calibrates its source itself; what a feature hands such a node is never dropped, being all
    that it gets.
    """

    def __init__(
        self,
        cell: Cell,
        inputs: int,
        spec_of: SpecOf,
        drop_path: DropPath,
        *,
        share_features: bool = False,
        bottleneck: int = 1,
        residual: Collection[int] = (),
    ) -> None:
        super().__init__()
        check_forward(cell, inputs)
        wide, spec_of = spec_of(0), narrowed(spec_of, bottleneck)
        self.cell, self.inputs = cell, inputs
        self._residual = {pick.target: pick.source for pick in cell.picks if pick.target in residual}
        self.edges = Edges(cell.picks, spec_of, share_features=share_features)
        self._drop_path = [drop_path]  # in a list: the network owns it, and it must not appear once per cell
        self._nodes = max((*cell.targets, *cell.output), default=inputs - 1) + 1
        self._spec = spec_of(0)
        sources = sorted({pick.source for pick in cell.picks})
        inner = range(inputs, self._nodes)
        self.bottleneck = None if bottleneck == 1 else Bottleneck(sources, inner, wide=wide, narrow=self._spec)

    def forward(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Values of the input nodes to those of all nodes, each [n, c, h, w]."""
        values = list(states)
        runners = [Runner(x, node, self.bottleneck) for node, x in enumerate(values)]
        for node in range(self.inputs, self._nodes):
            total: Tensor | None = None
            calibrations: dict[str, tuple[Calibration, Tensor]] = {}
            for index, pick in self._incoming(node):
                module = self.edges.module(index)
                if module is None:
                    continue
                output = runners[pick.source](module)
                if isinstance(module, Calibration):
                    output = self._drop_path[0](output)
                    made = output + calibrations[pick.op][1] if pick.op in calibrations else output
                    calibrations[pick.op] = module, made
                    continue
                if not isinstance(module, nn.Identity) and node not in self._residual:  # DARTS: identity stays
                    output = self._drop_path[0](output)
                total = output if total is None else total + output
            if total is None and node in self._residual:
                total = runners[self._residual[node]].value()
            base = total
            if base is not None and total is not None:
                for module, made in calibrations.values():
                    total = total + module.applied(base, made)
            values.append(_node(node, total, states[0], self._spec, self.bottleneck))
            runners.append(Runner(values[-1], node, self.bottleneck))
        return values

    def _incoming(self, node: int) -> Iterator[tuple[int, Pick]]:
        return ((i, pick) for i, pick in enumerate(self.cell.picks) if pick.target == node)


def _total(terms: Sequence[Tensor]) -> Tensor:
    """Σ terms, all of one shape."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _node(node: int, total: Tensor | None, like: Tensor, spec: Spec, bottleneck: Bottleneck | None) -> Tensor:
    """The value of a node from the sum of what arrives at it, None if nothing does."""
    value = _zeros(like, spec) if total is None else total
    return value if bottleneck is None else bottleneck.arrive(node, value)


def _zeros(like: Tensor, spec: Spec) -> Tensor:
    """The value of a node that nothing reaches: zeros at the resolution of the cell's inner nodes."""
    n, _, height, width = like.shape
    return like.new_zeros(n, spec.channels, -(-height // spec.stride), -(-width // spec.stride))
