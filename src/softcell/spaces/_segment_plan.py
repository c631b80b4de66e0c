"""Derived cells that are several fused programs, with modules between them.

An attention or a dynamic kernel is applied to the finished sum of a node's features (NOS), and a module without a
kernel reads a finished node. Either cuts a cell: the operations before the cut are one program of
`softcell.kernels.derived`, the operations that read the result are another. Programs are numbered by *level*, the
number of cuts before them.

    level of an input                       0
    level of a node that is a plain sum     the highest level among its features' sources
    level of a calibrated node              one more, or the level at which all its calibrations are known

All outgoing operations of nodes of one level are one program. Its inputs are the calibrated nodes of that level, and
the contributions of lower levels and of modules to its nodes.

These classes own no parameters: weights and running statistics stay in the modules, under their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softcell.kernels.derived_program import NONE
from softcell.kernels.norm import scaled
from softcell.kernels.schedule import Schedule
from softcell.nn.calibrate import Calibration, calibrated, run_calibrations
from softcell.nn.conv import DilatedConv, FactorisedReduction, ReLUConvBN, SeparableConv
from softcell.nn.stochastic import DropPath
from softcell.spaces._derived_plan import DerivedCell, DerivedPass, Pick, plan_derived
from softcell.spaces._fused_cell import Norms
from softcell.spaces._fused_plan import Unfit, pool_of
from softcell.spaces.edges import total
from softcell.spaces.execution import plan_modules

Key = tuple[str, int, int]
"""A map [n, c, h, w] of a pass: ("node", number, 0); ("base", number, 0), a node before its calibration; ("part",
number, level), the contribution of one level to a node; ("outside", number of the pick, 0), a module output."""


def _node(number: int) -> Key:
    return "node", number, 0


@dataclass(frozen=True, slots=True)
class Segment:
    """A program: the maps that it reads and writes, and its rows of drop-path factors.

    cell: None if nodes are only sums; `sums` then lists the positions of each node's terms among reads and writes.
    """

    cell: DerivedCell | None
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    rows: slice
    sums: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Outside:
    """A pick that runs as a module; row: of the drop-path factors, `NONE` if it is never dropped."""

    number: int
    source: int
    module: nn.Module
    row: int


@dataclass(frozen=True, slots=True)
class Made:
    """A calibration of a node; kept: number of connections that its edge keeps, which share a weight of 1 (`Block`)."""

    source: int
    module: Calibration
    row: int
    kept: int


@dataclass(frozen=True, slots=True)
class Level:
    """Calibrated nodes, each with the map to calibrate; then modules without a kernel; then a program."""

    blocks: tuple[tuple[int, Key, tuple[Made, ...]], ...]
    outside: tuple[Outside, ...]
    segment: Segment | None


@dataclass(frozen=True, slots=True)
class SegmentedCell:
    """Programs and the modules between them. preprocess: modules of the inputs; empty if the first program has them.

    leaving: for each source, all calibrations that read it, which run together. dropped: for each row of drop-path
    factors, the number of the pick that it drops.
    """

    levels: tuple[Level, ...]
    preprocess: tuple[nn.Module, ...]
    leaving: Mapping[int, tuple[Calibration, ...]]
    dropped: tuple[int, ...]
    drop_path: DropPath
    stride: int
    """Of the operations that leave the inputs."""

    @property
    def paths(self) -> int:
        return len(self.dropped)

    @property
    def training(self) -> bool:
        return self.drop_path.training

    @property
    def norms(self) -> Norms:
        """The norms of all programs; plane numbers refer to their program."""
        return [norm for cell in self.programs for norm in cell.norms]

    @property
    def programs(self) -> list[DerivedCell]:
        return [own.segment.cell for own in self.levels if own.segment is not None and own.segment.cell is not None]

    def run(self, shared: DerivedPass, states: Sequence[Tensor], outputs: Collection[int]) -> list[Tensor]:
        """Maps input tensors [n, c_i, h_i, w_i], not preprocessed, to the values of `outputs`, each [n, c, h, w].

        shared: state of all fused cells in this pass of the network.
        """
        return _Run(self, shared, states).values(outputs)

    def schedules(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, *, training: bool
    ) -> list[Schedule]:
        """The launches of the programs of a step, or of a pass in evaluation mode; shapes: of the input tensors."""
        found: list[Schedule] = []
        n, _, height, width = shapes[-1]
        for number, level in enumerate(self.levels):
            if level.segment is not None and level.segment.cell is not None:
                program = level.segment.cell.program
                own = [(n, program.channels, height, width)] * program.inputs if program.is_raw else shapes
                found += level.segment.cell.schedules(own, dtype, device, training=training, apart=True)
            if number == 0:  # operations that leave the inputs stride, in programs and in modules
                height, width = -(-height // self.stride), -(-width // self.stride)
        return found


class _Run:
    """One pass through a cell."""

    def __init__(self, cell: SegmentedCell, shared: DerivedPass, states: Sequence[Tensor]) -> None:
        self._cell, self._shared = cell, shared
        self._factors = shared.factors_of(cell)
        self._short: dict[torch.dtype, Tensor] = {}
        self._states = states
        self._known: dict[Key, Tensor] = {}
        for i, module in enumerate(cell.preprocess):
            self._known[_node(i)] = module(states[i])
        self._dense: dict[Key, Tensor] = {}
        self._made: dict[int, dict[int, Tensor]] = {}  # by source, then by module

    def values(self, outputs: Collection[int]) -> list[Tensor]:
        for level in self._cell.levels:
            for number, base, calibrations in level.blocks:
                made = [(one.module, self._calibration(one)) for one in calibrations]
                self._known[_node(number)] = calibrated(self._of(base), made, at_once=True)
            for one in level.outside:
                output = one.module(self._of(_node(one.source)))
                self._known["outside", one.number, 0] = self._dropped(output, one.row)
            if level.segment is not None:
                self._run_segment(level.segment)
        return [self._known[_node(number)] for number in outputs]

    def _run_segment(self, segment: Segment) -> None:
        if segment is self._cell.levels[0].segment and not self._cell.preprocess:
            values = list(self._states)
        else:
            values = [self._known[key] for key in segment.reads]
        if segment.cell is not None:
            factors = None if self._factors is None or not segment.cell.paths else self._factors[segment.rows]
            nodes = self._shared.run_nodes(segment.cell, values, factors)
        else:
            for terms in segment.sums:
                values.append(total([values[term] for term in terms]))
            nodes = values[len(segment.reads) :]
        self._known.update(zip(segment.writes, nodes, strict=True))

    def _of(self, key: Key) -> Tensor:
        """A map in the layout that is fastest for modules, which a node of a program has anyway."""
        if key not in self._dense:
            self._dense[key] = self._known[key].contiguous(memory_format=torch.channels_last)
        return self._dense[key]

    def _calibration(self, one: Made) -> Tensor:
        if one.source not in self._made:
            modules, x = self._cell.leaving[one.source], self._of(_node(one.source))
            made = run_calibrations(modules, x, least=1) if plan_modules(x).calibrations else {}
            self._made[one.source] = {id(m): made[id(m)] if id(m) in made else m(x) for m in modules}
        output = self._dropped(self._made[one.source][id(one.module)], one.row)
        return output if one.kept == 1 else output / one.kept

    def _dropped(self, x: Tensor, row: int) -> Tensor:
        if row == NONE or self._factors is None:
            return x
        if x.dtype not in self._short:  # converted once, not once for each row
            self._short[x.dtype] = self._factors.to(x.dtype)
        return scaled(x, self._short[x.dtype], row)


def plan_segments(
    preprocess: Sequence[nn.Module],
    picks: Iterable[tuple[int, int, nn.Module]],
    nodes: int,
    channels: int,
    stride: int,
    drop_path: DropPath,
    residual: Mapping[int, int],
) -> SegmentedCell:
    """The fused form of a cell of `nodes` inner nodes; raises `Unfit` with the reason if there is none.

    picks: source, target and module of each that is not zero. residual: for each node, the source that it calibrates if
    it has no features; features of these nodes are never dropped.
    """
    return _Planner(list(preprocess), list(picks), nodes, channels, stride, drop_path, residual).build()


def is_known(module: nn.Module) -> bool:
    """Whether `softcell.kernels.derived` supports this kind of module."""
    kind = type(module)
    if kind is ReLUConvBN:
        return module[1].kernel_size == (1, 1)  # type: ignore[index, no-any-return]
    known = kind in (SeparableConv, DilatedConv, FactorisedReduction, nn.Identity)
    return known or pool_of(module) is not None


class _Planner:
    def __init__(
        self,
        preprocess: list[nn.Module],
        picks: list[tuple[int, int, nn.Module]],
        nodes: int,
        channels: int,
        stride: int,
        drop_path: DropPath,
        residual: Mapping[int, int],
    ) -> None:
        self.preprocess, self.picks, self.inputs = preprocess, picks, len(preprocess)
        self.channels, self.stride, self.drop_path, self.residual = channels, stride, drop_path, residual
        self.nodes = range(self.inputs, self.inputs + nodes)
        self.kept = Counter((source, target) for source, target, _ in picks)
        self.features: dict[int, list[int]] = {node: [] for node in self.nodes}  # numbers of picks, by target
        self.calibrations: dict[int, list[int]] = {node: [] for node in self.nodes}
        for number, (_, target, module) in enumerate(picks):
            (self.calibrations if isinstance(module, Calibration) else self.features)[target].append(number)
        self.dropped: list[int] = []

    def build(self) -> SegmentedCell:
        self._check()
        self._assign_levels()
        segments = [self._segment(level) for level in range(self.num_levels)]
        if not any(one is not None and one.cell is not None and one.cell.norms for one in segments):
            raise Unfit("no operation has a fused form")
        levels = [Level(self._blocks(i), self._outside(i), segment) for i, segment in enumerate(segments)]
        leaving: dict[int, list[Calibration]] = {}
        for level in levels:
            for _, _, made in level.blocks:
                for one in made:
                    leaving.setdefault(one.source, []).append(one.module)
        return SegmentedCell(
            tuple(levels),
            tuple(self.preprocess) if self.is_raw else (),
            {source: tuple(modules) for source, modules in leaving.items()},
            tuple(self.dropped),
            self.drop_path,
            self.stride,
        )

    def _check(self) -> None:
        learned = [id(module) for *_, module in self.picks if module.state_dict()]
        if len(set(learned)) < len(learned):
            raise Unfit("edges share a module")
        for node in self.nodes:
            if self.calibrations[node] and not self.features[node] and node not in self.residual:
                raise Unfit(f"node {node} has nothing to calibrate")

    def _assign_levels(self) -> None:
        """level: for each node, the level of its outgoing operations. ready: the level from which modules can read it.

        done: the level of the program that finishes its sum.
        """
        read = {source for source, _, module in self.picks if isinstance(module, Calibration) or not is_known(module)}
        read |= {source for node, source in self.residual.items() if not self.features[node]}
        # A program returns nodes with the resolution of its output, so it cannot return larger inputs.
        self.is_raw = self.stride != 1 and any(source < self.inputs for source in read)
        self.level = dict.fromkeys(range(self.inputs), 0)
        self.ready = dict.fromkeys(range(self.inputs), 0 if self.is_raw else 1)
        self.done: dict[int, int] = {}
        for node in self.nodes:
            self.done[node] = max((self._level_of(number) for number in self.features[node]), default=0)
            if self.calibrations[node]:
                first = self.done[node] + 1 if self.features[node] else self.ready[self.residual[node]]
                known = (self.ready[self.picks[number][0]] for number in self.calibrations[node])
                # At least 1: the first program of a reduction cell reads maps of another size.
                self.level[node] = self.ready[node] = max(1, first, *known)
            else:
                if not self.features[node] and node in self.residual:
                    self.done[node] = self.ready[self.residual[node]]
                self.level[node], self.ready[node] = self.done[node], self.done[node] + 1
        self.num_levels = 1 + max(*self.level.values(), *self.done.values())
        # Identities into later programs read their source there.
        read |= {s for s, t, module in self.picks if isinstance(module, nn.Identity) and self.done[t] > self.level[s]}
        self.given = [] if self.is_raw else sorted(source for source in read if source < self.inputs)

    def _level_of(self, number: int) -> int:
        """The first program that may read what a feature contributes: its own, or the one after its module."""
        source, _, module = self.picks[number]
        return self.level[source] if is_known(module) else max(1, self.ready[source])

    def _blocks(self, level: int) -> tuple[tuple[int, Key, tuple[Made, ...]], ...]:
        found = []
        for node in self.nodes:
            if self.calibrations[node] and self.level[node] == level:
                base: Key = ("base", node, 0) if self.features[node] else _node(self.residual[node])
                found.append((node, base, tuple(self._calibration(number) for number in self.calibrations[node])))
        return tuple(found)

    def _calibration(self, number: int) -> Made:
        source, target, module = self.picks[number]
        assert isinstance(module, Calibration)
        return Made(source, module, self._row(number), self.kept[source, target])

    def _outside(self, level: int) -> tuple[Outside, ...]:
        found = []
        for number, (source, target, module) in enumerate(self.picks):
            if not isinstance(module, Calibration) and not is_known(module) and self._level_of(number) == level:
                found.append(Outside(number, source, module, NONE if target in self.residual else self._row(number)))
        return tuple(found)

    def _row(self, number: int) -> int:
        self.dropped.append(number)
        return len(self.dropped) - 1

    def _segment(self, level: int) -> Segment | None:
        """The program of a level: the outgoing operations of its nodes, and the sums that form its nodes."""
        inside = [(number, *self.picks[number]) for own in self.features.values() for number in own]
        inside = [one for one in inside if is_known(one[3]) and self.level[one[1]] == level]
        finished = [node for node in self.nodes if self.done[node] == level and self._is_sum(node)]
        given = {node: self._given_to(node, level) for node in finished}
        # A sum that a later program finishes is also a node here, unless it is an identity.
        parts = {t for _, _, t, m in inside if self.done[t] > level and not isinstance(m, nn.Identity)}
        sources = range(self.inputs) if level == 0 else sorted({s for _, s, _, _ in inside if self.calibrations[s]})
        reads = list(dict.fromkeys([*map(_node, sources), *(key for keys in given.values() for key in keys)]))
        places = {key: place for place, key in enumerate(reads)}
        own: list[Pick] = []
        dropped: list[int] = []
        writes: list[Key] = []
        for number in self.given if level == 0 else ():
            own.append(Pick(number, len(reads) + len(writes), nn.Identity()))
            writes.append(_node(number))
        for node in sorted({*finished, *parts}):
            to = len(reads) + len(writes)
            own += [Pick(places[key], to, nn.Identity()) for key in given.get(node, ())]
            for number, source, target, module in inside:
                is_identity = isinstance(module, nn.Identity)
                if target == node and not (node in parts and is_identity):
                    own.append(Pick(places[_node(source)], to, module, dropped=target not in self.residual))
                    dropped += [number] if own[-1].dropped and not is_identity else []
            key: Key = ("part", node, level) if node in parts else _node(node)
            writes.append(("base", node, 0) if node not in parts and self.calibrations[node] else key)
            places.setdefault(writes[-1], to)
        if not writes:
            return None
        rows = slice(len(self.dropped), len(self.dropped) + len(dropped))
        self.dropped += dropped
        return self._program(level, own, tuple(reads), tuple(writes), rows)

    def _is_sum(self, node: int) -> bool:
        """Whether a program computes the node or the sum to calibrate; otherwise it is calibrated without features."""
        return bool(self.features[node]) or not self.calibrations[node]

    def _given_to(self, node: int, level: int) -> list[Key]:
        """The terms that the last program of a node's sum reads: from lower levels, from modules, from its source."""
        if not self.features[node]:
            return [_node(self.residual[node])] if node in self.residual else []
        found: list[Key] = []
        for number in self.features[node]:
            source, _, module = self.picks[number]
            if not is_known(module):
                found.append(("outside", number, 0))
            elif self.level[source] < level and isinstance(module, nn.Identity):
                found.append(_node(source))
            elif self.level[source] < level and ("part", node, self.level[source]) not in found:
                found.append(("part", node, self.level[source]))
        return found

    def _program(
        self, level: int, own: list[Pick], reads: tuple[Key, ...], writes: tuple[Key, ...], rows: slice
    ) -> Segment:
        if level > 0 and all(isinstance(pick.module, nn.Identity) for pick in own):
            sums = [tuple(p.source for p in own if p.target == len(reads) + i) for i in range(len(writes))]
            return Segment(None, reads, writes, rows, tuple(sums))
        before = self.preprocess if level == 0 and not self.is_raw else [None] * len(reads)
        stride = self.stride if level == 0 else 1
        cell = plan_derived(before, own, len(writes), self.channels, stride, self.drop_path)
        assert cell.paths == rows.stop - rows.start
        return Segment(cell, reads, writes, rows)
