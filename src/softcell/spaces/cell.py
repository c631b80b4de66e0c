"""The cell of a supernet: a graph that mixes all candidates of a table.

It keeps its candidate modules in `Edges` under the names they have in `PickedCell`, which runs the picks of a genotype,
so weights move from one to the other by name. A cell is evaluated node by node: when a node is known, everything that
leaves it runs, and what depends on the node alone (pools, identity) runs once for all edges that leave it. What becomes
of all inputs of a node is in `softcell.spaces._node_inputs` and `softcell.spaces.block`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from torch import Tensor, nn

from softcell.arch import Cell, Live, Mix, Pick, Table, WeightMix
from softcell.arch.genotype import check_forward
from softcell.kernels.norm import scaled
from softcell.nn.calibrate import Calibration
from softcell.nn.stochastic import DropPath
from softcell.spaces._derived_plan import DerivedCell, plan_derived
from softcell.spaces._derived_plan import Pick as DerivedPick
from softcell.spaces._fused_plan import Entry, Unfit
from softcell.spaces._node_inputs import Arrived, Combiner, node_value
from softcell.spaces.block import Block, calibrates, watched
from softcell.spaces.edges import Bottleneck, Edges, Runner, SpecOf, narrowed
from softcell.spaces.fused import Departures, Fused, OutputsApart, literal, remembered, serves


class MixedCell(nn.Module):
    """Every candidate of every choice of a table, combined by a mix.

    `spec_of` says for which width the cell stands; with a `bottleneck` its candidates are that many times narrower.

    A node is the sum of its features; calibrating candidates are then applied to that sum and added to it (NOS, Eq 3).
    `residual` names nodes with one incoming choice that keep what no feature candidate takes of their source: their
    sum is f + (1 - Σ_f w_f)·x (NOS, Eq 4-5 as settled). Drop-path leaves that sum alone.

    Example:
        >>> import torch
        >>> from softcell.arch import Choice, Layout, StrongestEach, Table, WeightMix
        >>> from softcell.nn import Spec
        >>> from softcell.spaces import MixedCell
        >>> table = Table("cell", (Choice(0, 1, ("skip_connect", "nor_conv_3x3")),), output=(1,))
        >>> cell = MixedCell(table, inputs=1, spec_of=lambda source: Spec(channels=4, affine=False))
        >>> layout = Layout("example", (table,), sites=("cell",), rule=StrongestEach())
        >>> x = torch.rand(2, 4, 8, 8)
        >>> skip = WeightMix(layout, {"cell": torch.tensor([[1.0, 0.0]])})
        >>> torch.equal(cell([x], skip, site=0)[-1], x)
        True
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
        entries = [
            (index, k, Pick(choice.source, choice.target, op))
            for index, choice in enumerate(table.choices)
            for k, op in enumerate(choice.candidates)
        ]
        self.edges = Edges((pick for _, _, pick in entries), spec_of, share_features=share_features)
        self._combiner = Combiner(table)
        # One module of each calibrating candidate: it tells how what all of them make is applied.
        calibrations = {
            pick.op: module
            for number, (_, _, pick) in enumerate(entries)
            if isinstance(module := self.edges.module(number), Calibration)
        }
        self._block = Block(table, residual, calibrations, self._combiner) if calibrates(table) else None
        self._leaving: dict[int, list[tuple[int, int, int, int]]] = {}  # source: (entry, choice, candidate, target)
        for number, (index, k, pick) in enumerate(entries):
            self._leaving.setdefault(pick.source, []).append((number, index, k, pick.target))
        self._spec = spec_of(0)
        self.bottleneck = (
            None if bottleneck == 1 else Bottleneck(table.sources, table.targets, wide=wide, narrow=self._spec)
        )
        self._drop_path: list[DropPath] = []  # a list: the supernet owns it
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
        arrived: dict[int, Arrived] = {target: Arrived([], [], set()) for target in self.table.targets}
        runners: dict[int, Runner] = {}
        chosen = {} if self._block is None else self._block.read_weights(mix, site, factors)
        for node in range(max(self.table.targets) + 1):
            if node >= self.inputs:
                if self._block is None:
                    value = arrived[node].plus(self._combiner.combine(arrived[node].outputs, mix, site, factors))
                else:
                    x = runners[self._block.residual[node]].value() if node in self._block.residual else None
                    value = self._block.value(node, arrived[node], x, chosen, mix, site, factors)
                values.append(node_value(node, value, states[0], self._spec, self.bottleneck))
            if node in self._leaving:
                runners[node] = Runner(values[node], node, self.bottleneck)
                summed = fuses and self._depart_together(node, runners[node], mix, site, factors, arrived)
                made = {} if fuses or not served else self._depart_apart(node, runners[node], mix, site)
                self._depart(node, runners[node], mix, site, factors, arrived, made, calibrations_only=summed)
                watch = watched(site)
                if watch is not None and watch.source == node:
                    watch.made = self._made(watch.choice, runners[node])
        return values

    def _made(self, choice: int, run: Runner) -> dict[int, tuple[Calibration | None, Tensor]]:
        """What every candidate of a choice makes of its source, whether it is live or not."""
        return {
            k: (module if isinstance(module, Calibration) else None, run(module))
            for entry, own, k, _ in self._leaving[self.table.choices[choice].source]
            if own == choice and (module := self.edges.module(entry)) is not None
        }

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
        arrived: Mapping[int, Arrived],
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
            arrived[target].summed.update(candidates)
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
        arrived: Mapping[int, Arrived],
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
                arrived[targets[choice]].outputs.extend((choice, k, x) for k, x in own.items())
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


class PickedCell(nn.Module):
    """The picks of one genotype cell; a node is the plain sum of what arrives.

    Calibrating candidates are applied to the sum of the features that arrive, and added to it. A node in `residual`
    that no feature reaches calibrates its source itself; what a feature hands such a node is never dropped, being all
    that it gets.

    Example:
        >>> import torch
        >>> from softcell.arch import Cell, Pick
        >>> from softcell.nn import Spec
        >>> from softcell.nn.stochastic import DropPath
        >>> from softcell.spaces import PickedCell
        >>> picked = Cell((Pick(0, 1, "skip_connect"),), output=(1,))
        >>> cell = PickedCell(picked, 1, lambda source: Spec(channels=4), DropPath(0.0))
        >>> x = torch.rand(2, 4, 8, 8)
        >>> torch.equal(cell([x])[-1], x)
        True
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
        present = [pick for index, pick in enumerate(cell.picks) if self.edges.module(index) is not None]
        self._kept = Counter((pick.source, pick.target) for pick in present)
        self._drop_path = [drop_path]  # in a list: the network owns it, and it must not appear once per cell
        self._nodes = max((*cell.targets, *cell.output), default=inputs - 1) + 1
        self._spec = spec_of(0)
        self._known: dict[bool, DerivedCell | None] = {}
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
                    kept = self._kept[pick.source, pick.target]
                    output = output if kept == 1 else output / kept  # as in `block`
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
            values.append(node_value(node, total, states[0], self._spec, self.bottleneck))
            runners.append(Runner(values[-1], node, self.bottleneck))
        return values

    def fused(self, preprocess: Sequence[nn.Module], channels: int, stride: int) -> DerivedCell | None:
        """This cell and the modules that prepare its inputs as one operation; None where they must run one by one."""
        return remembered(self._known, True, lambda: self._plan(preprocess, channels, stride))

    def _plan(self, preprocess: Sequence[nn.Module], channels: int, stride: int) -> DerivedCell:
        if self.bottleneck is not None or self._residual:
            raise Unfit("something stands between the nodes")
        modules = ((pick, self.edges.module(index)) for index, pick in enumerate(self.cell.picks))
        picks = [DerivedPick(pick.source, pick.target, module) for pick, module in modules if module is not None]
        return plan_derived(preprocess, picks, self._nodes - self.inputs, channels, stride, self._drop_path[0])

    def _incoming(self, node: int) -> Iterator[tuple[int, Pick]]:
        return ((i, pick) for i, pick in enumerate(self.cell.picks) if pick.target == node)
