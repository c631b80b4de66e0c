"""The cells of supernets and derived networks: graphs that mix all candidates of a table, or run a genotype's picks.

Both keep their candidate modules in `Edges` under the same names, so weights can be transferred by name.
`softcell.spaces.execution` selects the executor of a cell.

A chain is a table whose choice i leads from node i to node i + 1. Unlike in cells, width and resolution may change from
node to node. If a layer keeps both, its candidates include their input in the output (a skip is only the input), and
drop-path drops what they add to it. A layer that changes them is never dropped, since it is the only path.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence, Set

from torch import Tensor, nn

from softcell.arch import Cell, Live, Mix, Pick, Table, WeightMix
from softcell.arch.genotype import check_forward
from softcell.errors import UserError
from softcell.kernels.norm import scaled
from softcell.nn.attention import AttentionBlock
from softcell.nn.calibrate import Calibration
from softcell.nn.candidates import Spec
from softcell.nn.fused_blocks import FusedBlocks
from softcell.nn.norm import recomputed
from softcell.nn.stack import run_blocks, run_summed, stackable
from softcell.nn.stochastic import DropPath
from softcell.spaces._affine_cells import AffineCell, plan_affine
from softcell.spaces._derived_plan import DerivedCell, plan_derived
from softcell.spaces._derived_plan import Pick as DerivedPick
from softcell.spaces._executors import (
    FusedForms,
    NodeExecutor,
    NodeForms,
    plan_outputs,
    plan_sums,
    run_by_node,
    run_fused_cell,
)
from softcell.spaces._fused_cell import FusedCell
from softcell.spaces._fused_plan import Entry, Unfit, remembered_form
from softcell.spaces._rectified_plan import plan_rectified
from softcell.spaces._segment_plan import SegmentedCell, is_known, plan_segments
from softcell.spaces.block import Block, calibrates
from softcell.spaces.edges import (
    Bottleneck,
    Combiner,
    Edges,
    Output,
    PartialChannels,
    SpecOf,
    narrowed,
    node_value,
    zeros,
)
from softcell.spaces.edges import total as sum_of
from softcell.spaces.execution import Execution, LayerExecution, plan, plan_layer


class MixedCell(nn.Module):
    """Every candidate of every choice of a table, combined by a mix.

    `spec_of` returns the spec of the candidates of a source. With a `bottleneck` they are narrower by that factor. With
    `partial` they process the first 1 / `partial` of the channels (`PartialChannels`).

    A node is the sum of its features; calibrating candidates are then applied to that sum and added to it (NOS, Eq 3).
    `residual` lists nodes with one incoming choice whose sum is f + (1 - Σ_f w_f)·x, where x is their source: x gets
    the weight not assigned to feature candidates (NOS, Eq 4-5 as implemented here). Drop-path does not apply to that
    sum.

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
        partial: int = 1,
        residual: Collection[int] = (),
    ) -> None:
        super().__init__()
        wide, spec_of = spec_of(0), narrowed(spec_of, bottleneck * partial)
        self.table, self.inputs, self.spec_of = table, inputs, spec_of
        entries = [
            (index, k, Pick(choice.source, choice.target, op))
            for index, choice in enumerate(table.choices)
            for k, op in enumerate(choice.candidates)
        ]
        self.edges = Edges((pick for _, _, pick in entries), spec_of, share_features=share_features)
        self.combiner = Combiner(table)
        # One module per calibrating candidate applies the outputs of all of its modules.
        calibrations = {
            pick.op: module
            for number, (_, _, pick) in enumerate(entries)
            if isinstance(module := self.edges.module(number), Calibration)
        }
        self.block = Block(table, residual, calibrations, self.combiner) if calibrates(table) else None
        self.leaving: dict[int, list[tuple[int, int, int, int]]] = {}  # source: (entry, choice, candidate, target)
        for number, (index, k, pick) in enumerate(entries):
            self.leaving.setdefault(pick.source, []).append((number, index, k, pick.target))
        self.spec = spec_of(0)
        self.bottleneck = (
            None if bottleneck == 1 else Bottleneck(table.sources, table.targets, wide=wide, narrow=self.spec)
        )
        assert partial == 1 or (bottleneck == 1 and self.block is None), "not defined together"
        self.partial = None if partial == 1 else PartialChannels(partial, wide=wide, narrow=self.spec)
        self._drop_path: list[DropPath] = []  # in a list: the supernet owns it
        self._fused_forms = FusedForms(self.live_entries, inputs, max(table.targets) + 1)
        self.node_sums = NodeForms(plan_sums, self.live_features, self.spec.channels)
        self.node_outputs = NodeForms(plan_outputs, self.live_features, self.spec.channels)
        self._targets: Set[int] = frozenset(table.targets)
        self._reached_by_all: Set[int] | None = None

    def use_drop_path(self, drop_path: DropPath | None) -> None:
        """Drops the contribution of each choice by `drop_path`; None removes it."""
        self._drop_path = [] if drop_path is None else [drop_path]

    def drops(self) -> bool:
        """Whether drop-path has a part in the next pass."""
        return bool(self._drop_path) and self.training

    def live_entries(self, live: Live | None) -> Iterator[Entry]:
        """The live candidates, with the positions of their weights in the flattened matrix of a mix."""
        for source, leaving in self.leaving.items():
            for entry, choice, candidate, target in leaving:
                if live is None or candidate in live[choice]:
                    weight = choice * self.table.width + candidate
                    yield Entry(source, target, weight, self.edges.module(entry), choice)

    def live_features(self, node: int, live: Live | None) -> Iterator[tuple[int, Entry]]:
        """The live outgoing features of a node, each with its candidate's number."""
        for entry, choice, candidate, target in self.leaving[node]:
            module = self.edges.module(entry)
            if module is None or isinstance(module, Calibration) or not (live is None or candidate in live[choice]):
                continue
            yield candidate, Entry(node, target, choice * self.table.width + candidate, module, choice)

    def fused(self, live: Live | None) -> FusedCell | None:
        """The fused form of the whole cell for these live candidates, or None."""
        if self.bottleneck is not None or self.partial is not None or self.block is not None:
            return None
        return self._fused_forms.of(live, self.spec.channels, self.spec.stride)

    def stride_from(self, node: int) -> int:
        """The stride of all outgoing operations of a node."""
        return self.spec.stride if node < self.inputs else 1

    def forward(self, states: Sequence[Tensor], mix: Mix, site: int) -> list[Tensor]:
        """Values of the input nodes to those of all nodes, each [n, c, h, w]."""
        factors = self._drop_path[0].factors(states[0], len(self.table)) if self.drops() else None
        execution = plan(self, mix, site, states[0])
        if execution is Execution.FUSED_CELL:
            return run_fused_cell(self, states, mix, site, factors)
        return run_by_node(self, states, mix, site, factors, execution)

    def has_fused_form(self) -> bool:
        """Whether the cell, or the outgoing operations of one of its nodes, would run fused if kernels apply."""
        if self.fused(None) is not None:
            return True
        return any(self.node_sums.of(node, None, self.stride_from(node)) for node in self.leaving)

    def reached(self, live: Live | None) -> Set[int]:
        """Nodes with something to calibrate: input features, or a share of their source.

        Calibrations of other nodes are never used, so their weights must not receive a gradient. If they ran in a
        group, they would receive zeros.
        """
        if self.block is None:
            return self._targets
        if live is None and self._reached_by_all is not None:
            return self._reached_by_all
        reached = {entry.target for node in self.leaving for _, entry in self.live_features(node, live)}
        reached |= self.block.residual.keys()
        if live is None:
            self._reached_by_all = reached
        return reached


class PickedCell(nn.Module):
    """The picks of one genotype cell; a node is the plain sum of its inputs.

    Calibrating candidates are applied to the sum of a node's input features, and added to it. A node in `residual`
    without input features calibrates its source itself; its features are never dropped, since it has no other input.

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
        partial: int = 1,
        residual: Collection[int] = (),
    ) -> None:
        super().__init__()
        check_forward(cell, inputs)
        wide, spec_of = spec_of(0), narrowed(spec_of, bottleneck * partial)
        self.cell, self.inputs = cell, inputs
        self._residual = {pick.target: pick.source for pick in cell.picks if pick.target in residual}
        self.edges = Edges(cell.picks, spec_of, share_features=share_features)
        present = [pick for index, pick in enumerate(cell.picks) if self.edges.module(index) is not None]
        self._kept = Counter((pick.source, pick.target) for pick in present)
        self._drop_path = [drop_path]  # in a list: the network owns it, and it must not be registered in every cell
        self._nodes = max((*cell.targets, *cell.output), default=inputs - 1) + 1
        self.spec = spec_of(0)
        self._known: dict[bool, DerivedCell | SegmentedCell | None] = {}
        self._known_affine: dict[bool, AffineCell | None] = {}  # by whether ReLUs follow the norms
        sources = sorted({pick.source for pick in cell.picks})
        inner = range(inputs, self._nodes)
        self.bottleneck = None if bottleneck == 1 else Bottleneck(sources, inner, wide=wide, narrow=self.spec)
        self.partial = None if partial == 1 else PartialChannels(partial, wide=wide, narrow=self.spec)
        self._stride_of = {node: spec_of(node).stride for node in sources}

    @property
    def drop_path(self) -> DropPath:
        return self._drop_path[0]

    def num_dropped(self) -> int:
        """The number of outputs that drop-path drops in a pass that runs module by module."""
        modules = ((pick, self.edges.module(index)) for index, pick in enumerate(self.cell.picks))
        return sum(module is not None and self._drops(pick.target, module) for pick, module in modules)

    def _drops(self, node: int, module: nn.Module) -> bool:
        # Identities are kept (DARTS), and a residual node has no other input than its features.
        is_kept = isinstance(module, nn.Identity) or node in self._residual
        return isinstance(module, Calibration) or not is_kept

    def forward(self, states: Sequence[Tensor], factors: Tensor | None = None) -> list[Tensor]:
        """Values of the input nodes to those of all nodes, each [n, c, h, w].

        factors [num_dropped, n]: of drop-path, drawn in advance; None: each is drawn when needed.
        """
        rows = iter(range(0 if factors is None else len(factors)))
        values = list(states)
        executors = [NodeExecutor(x, node, self.partial or self.bottleneck) for node, x in enumerate(values)]
        for node in range(self.inputs, self._nodes):
            total: Tensor | None = None
            calibrations: dict[str, tuple[Calibration, Tensor]] = {}
            for index, pick in self._incoming(node):
                module = self.edges.module(index)
                if module is None:
                    continue
                output = executors[pick.source](module)
                if self._drops(node, module):
                    output = self._drop_path[0](output) if factors is None else scaled(output, factors, next(rows))
                if isinstance(module, Calibration):
                    kept = self._kept[pick.source, pick.target]
                    output = output if kept == 1 else output / kept  # as in `Block`
                    made = output + calibrations[pick.op][1] if pick.op in calibrations else output
                    calibrations[pick.op] = module, made
                    continue
                total = output if total is None else total + output
            if total is None and node in self._residual:
                total = executors[self._residual[node]].value()
            base = total
            if base is not None and total is not None:
                for module, made in calibrations.values():
                    total = total + module.applied(base, made)
            if self.partial is None:
                values.append(node_value(node, total, states[0], self.spec, self.bottleneck))
            else:
                values.append(self.partial.node_value(total, self._bypassed(node, values), states[0]))
            executors.append(NodeExecutor(values[-1], node, self.partial or self.bottleneck))
        return values

    def _bypassed(self, node: int, values: Sequence[Tensor]) -> Tensor | None:
        """The sum of everything that bypasses the picks of a node, including zero candidates; None without picks."""
        assert self.partial is not None
        sources = [pick.source for _, pick in self._incoming(node)]
        rests = [self.partial.bypass(values[source], self._stride_of[source]) for source in sources]
        return sum_of(rests) if rests else None

    def fused(self, preprocess: Sequence[nn.Module], channels: int, stride: int) -> DerivedCell | SegmentedCell | None:
        """This cell with its preprocessing modules as one operation, or as several with modules in between.

        None if it runs module by module.
        """
        # A single entry: the picks never change, and `remembered_form` also remembers that there is no fused form.
        return remembered_form(self._known, True, lambda: self._plan(preprocess, channels, stride))

    def _plan(self, preprocess: Sequence[nn.Module], channels: int, stride: int) -> DerivedCell | SegmentedCell:
        picks, nodes, drop_path = self._fusable(), self._nodes - self.inputs, self._drop_path[0]
        if not self._residual and all(is_known(module) for *_, module in picks):
            own = [DerivedPick(*pick) for pick in picks]
            return plan_derived(preprocess, own, nodes, channels, stride, drop_path)
        return plan_segments(preprocess, picks, nodes, channels, stride, drop_path, self._residual)

    def fused_affine(self) -> AffineCell | None:
        """This cell of ReLU-convolution-norm picks as one operation; None if its modules run one by one."""
        return remembered_form(self._known_affine, False, self._plan_affine)

    def _plan_affine(self) -> AffineCell:
        spec, drop_path = self.spec, self._drop_path[0]
        if self._residual:
            raise Unfit("there is a residual between the nodes")
        return plan_affine(self._fusable(), self.inputs, self._nodes, spec.channels, spec.stride, drop_path)

    def fused_rectified(self) -> AffineCell | None:
        """This cell of convolution-norm-ReLU picks as one operation; None if its modules run one by one.

        Its inputs must not be negative.
        """
        return remembered_form(self._known_affine, True, self._plan_rectified)

    def _plan_rectified(self) -> AffineCell:
        if self._residual:
            raise Unfit("there is a residual between the nodes")
        return plan_rectified(self._fusable(), self.inputs, self._nodes, self.spec.channels, self._drop_path[0])

    def _fusable(self) -> list[tuple[int, int, nn.Module]]:
        """Source, target and module of every pick except zeros; raises `Unfit` if nodes also have other inputs."""
        if self.bottleneck is not None or self.partial is not None:
            raise Unfit("there is a bottleneck or a bypass between the nodes")
        modules = ((pick, self.edges.module(index)) for index, pick in enumerate(self.cell.picks))
        return [(pick.source, pick.target, module) for pick, module in modules if module is not None]

    def _incoming(self, node: int) -> Iterator[tuple[int, Pick]]:
        return ((i, pick) for i, pick in enumerate(self.cell.picks) if pick.target == node)


def _keeps_shape(spec: Spec) -> bool:
    """Whether a layer keeps the shape of its input."""
    return spec.stride == 1 and spec.c_in == spec.channels


class MixedChain(MixedCell):
    """Every candidate of every layer, combined by a mix; `spec_of(i)` is the spec of layer i."""

    def __init__(self, table: Table, spec_of: SpecOf) -> None:
        super().__init__(table, 1, spec_of)
        starts = [0]
        for choice in table.choices:
            starts.append(starts[-1] + len(choice.candidates))
        self._starts = starts

    def forward(self, states: Sequence[Tensor], mix: Mix, site: int) -> list[Tensor]:
        """Maps the value of the first node to the values of all nodes."""
        live = mix.live(site)
        factors = self._drop_path[0].factors(states[0], len(self.table)) if self.drops() else None
        values, rows = list(states), functools.cache(lambda: self._rows(mix, site))
        for layer, choice in enumerate(self.table.choices):
            x, spec = values[-1], self.spec_of(layer)
            running = range(len(choice.candidates)) if live is None else live[layer]
            value = self._mixed(layer, running, x, mix, site, rows)
            if value is None:
                value = zeros(x, spec)
            if factors is not None and _keeps_shape(spec):
                value = x + (value - x) * factors[layer].to(x.dtype).view(-1, 1, 1, 1)
            values.append(value)
        return values

    def stacked(self, mix: Mix, site: int, x: Tensor) -> list[list[AttentionBlock]]:
        """The blocks of each layer that runs as one, for inputs like x."""
        live, found = mix.live(site), []
        for layer, choice in enumerate(self.table.choices):
            if plan_layer(mix, site, layer, x) is LayerExecution.STACKED:
                running = range(len(choice.candidates)) if live is None else live[layer]
                found.append(stackable([self.edges.module(self._starts[layer] + k) for k in running]))
        return [blocks for blocks in found if blocks]

    def _rows(self, mix: Mix, site: int) -> Sequence[Tensor]:
        """The weights of each layer, read at once; a selection for each layer costs three launches backward."""
        assert isinstance(mix, WeightMix)
        return mix.weights(site).unbind()

    def _mixed(
        self, layer: int, running: Sequence[int], x: Tensor, mix: Mix, site: int, rows: Callable[[], Sequence[Tensor]]
    ) -> Tensor | None:
        """The combined outputs of the running candidates of a layer; None if there are only zeros. rows: `_rows`."""
        modules = [self.edges.module(self._starts[layer] + k) for k in running]
        again = mix.recomputes(site, layer)
        execution = plan_layer(mix, site, layer, x)
        if execution is LayerExecution.STACKED:
            assert isinstance(mix, WeightMix)
            entries = [(layer, k) for k in running]

            def weights() -> Tensor:
                is_whole_row = list(running) == list(range(self.table.width))
                return rows()[layer] if is_whole_row else self.combiner.weights_of(entries, mix, site)

            value = run_summed(modules, x, weights)
            if value is not None:
                return value
        done = {} if execution is LayerExecution.MODULES else run_blocks(modules, x)
        outputs: list[Output] = []
        for k, module in zip(running, modules, strict=True):
            output = done.get(id(module))
            if output is None and module is not None:
                output = recomputed(module, x) if again else module(x)
            outputs.append((layer, k, output))
        return self.combiner.sum(outputs, mix, site)


class PickedChain(PickedCell):
    """The candidates of each layer that a genotype picks: one, or the sum of several (EnTranNAS-DST)."""

    def __init__(self, cell: Cell, spec_of: SpecOf, drop_path: DropPath) -> None:
        self.layers = check_chain(cell)
        super().__init__(cell, 1, spec_of, drop_path)
        self._keeps = tuple(_keeps_shape(spec_of(layer)) for layer in range(len(self.layers)))

    def num_dropped(self) -> int:
        """The number of layers that drop-path may drop: those that keep the shape of their input."""
        return sum(self._keeps)

    def forward(
        self, states: Sequence[Tensor], factors: Tensor | None = None, blocks: FusedBlocks | None = None
    ) -> list[Tensor]:
        """Values of the first node to those of all nodes, each [n, c, h, w].

        factors [num_dropped, n]: of drop-path, drawn in advance; None: each is drawn when needed. blocks: runs blocks
        with fewer launches.
        """
        rows, values = iter(range(self.num_dropped())), list(states)
        for picks, keeps in zip(self.layers, self._keeps, strict=True):
            x, modules = values[-1], [self.edges.module(pick) for pick in picks]
            row = next(rows) if keeps else None
            if blocks is not None and len(modules) == 1:
                values.append(blocks.run(modules[0], x, None if factors is None or row is None else factors[row]))
                continue
            assert None not in modules  # `check_chain` rejects `none`
            y = sum_of([module(x) if blocks is None else blocks.run(module, x) for module in modules if module])
            # If nothing is dropped, x + (y - x) would only add a rounding error.
            if row is not None and self.training and self._drop_path[0].probability > 0:
                y = x + (self._drop_path[0](y - x) if factors is None else scaled(y - x, factors, row))
            values.append(y)
        return values


def check_chain(cell: Cell) -> tuple[tuple[int, ...], ...]:
    """The pick numbers of every layer; raises `UserError` unless picks lead from node to node and none is missing."""
    layers: list[list[int]] = []
    for number, pick in enumerate(cell.picks):
        if pick.source == len(layers):
            layers.append([])
        if (pick.source, pick.target) != (len(layers) - 1, len(layers)):
            raise UserError(
                f"layers of a chain lead from node to node, one after the other: after layer {len(layers) - 1} comes "
                f"one from node {len(layers)} to node {len(layers) + 1}, but got {pick}"
            )
        if pick.op == "none":
            raise UserError(f"a chain has no `none`: nothing would pass layer {pick.source}")
        layers[-1].append(number)
    return tuple(map(tuple, layers))
