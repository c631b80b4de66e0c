"""The executors of cells: one program for a cell or for the outgoing operations of a node, or module by module.

Fused forms run through `softcell.kernels`; one is planned once for every set of live candidates and kept. Node by node,
all outgoing operations of a node run when its value is known. Operations that depend only on the node (pools, identity)
run once for all its outgoing edges. See `softcell.spaces.execution` for the choice.

These classes own no parameters: weights and running statistics stay in the modules, under their names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from softcell.arch import Live, Mix, WeightMix
from softcell.kernels.backend import compute_type, current_settings, runs_triton
from softcell.kernels.cell import Read, readers
from softcell.kernels.norm import scaled
from softcell.nn.calibrate import Calibration, run_calibrations, weights_prepared
from softcell.nn.conv import FactorisedReduction, ReLUFirst
from softcell.nn.norm import recomputed
from softcell.nn.stack import grouped, run_stacked, stack_key
from softcell.spaces._calibration_sums import CalibrationSums, Source, plan_source, weights_of
from softcell.spaces._fused_cell import FusedCell, Norms, prepared
from softcell.spaces._fused_plan import Entry, Form, plan, plan_apart, remembered_form
from softcell.spaces.block import Block, watched
from softcell.spaces.edges import Bottleneck, NodeInputs, PartialChannels, node_value
from softcell.spaces.execution import (
    Execution,
    is_modules_only,
    plan_modules,
    shares_activations,
)
from softcell.spaces.execution import plan as plan_execution

if TYPE_CHECKING:
    from softcell.spaces.cell import MixedCell

T = TypeVar("T")


def run_by_node(
    cell: MixedCell,
    states: Sequence[Tensor],
    mix: Mix,
    site: int,
    factors: Tensor | None,
    execution: Execution = Execution.MODULES,
) -> list[Tensor]:
    """Maps the values of a mixed cell's input nodes to those of all nodes, each [n, c, h, w].

    factors [choices, n]: of drop-path. execution: anything except `FUSED_CELL`.
    """
    values = list(states)
    inputs: dict[int, NodeInputs] = {target: NodeInputs() for target in cell.table.targets}
    executors: dict[int, NodeExecutor] = {}
    rests: dict[int, Tensor] = {}  # values that bypass the candidates, by source
    chosen = functools.cache(lambda: {} if cell.block is None else cell.block.read_weights(mix, site, factors))
    calibrations = _calibration_sums(cell, mix, site, factors, states[0])
    weights = _program_weights(cell, mix, site) if execution is Execution.FUSED_SUMS else None
    for node in range(max(cell.table.targets) + 1):
        if node >= cell.inputs:
            if cell.block is None:
                value = inputs[node].plus(cell.combiner.combine(inputs[node].outputs, mix, site, factors))
            else:
                x = executors[cell.block.residual[node]].value() if node in cell.block.residual else None
                if calibrations is not None:
                    inputs[node].calibrations.extend(calibrations.take(node))
                value = cell.block.value(node, inputs[node], x, chosen, mix, site, factors)
            if cell.partial is None:
                value = node_value(node, value, states[0], cell.spec, cell.bottleneck)
            elif isinstance(mix, WeightMix):
                rest = cell.combiner.sum_bypassed(node, rests, mix, site, factors)
                value = cell.partial.node_value(value, rest, states[0])
            elif value is None:
                value = cell.partial.node_value(None, None, states[0])
            else:  # `_run_modules` passed the outputs of all channels to the mix
                value = cell.partial.shuffle(value)
            # Offsets are 0 and only propagate gradients (`WeightMix`).
            offsets = mix.offsets(site) if isinstance(mix, WeightMix) else None
            if offsets is not None:
                value = value + sum(offsets[choice] for choice in cell.table.incoming(node))
            values.append(value)
        if node in cell.leaving:
            executor = executors[node] = NodeExecutor(values[node], node, cell.partial or cell.bottleneck)
            if cell.partial is not None:
                rests[node] = cell.partial.bypass(values[node], cell.stride_from(node))
            summed, made = False, dict[int, Tensor]()
            if weights is not None:
                summed = run_node_sums(cell, node, executor, mix, site, factors, inputs, weights)
            elif execution is Execution.FUSED_OUTPUTS:
                made = run_node_outputs(cell, node, executor, mix, site)
            rest = None if isinstance(mix, WeightMix) else rests.get(node)
            own = (cell, node, executor, mix, site, factors, inputs, made, rest, calibrations)
            _run_modules(*own, calibrations_only=summed)
            watch = watched(site)
            if watch is not None and watch.source == node:
                watch.made = _all_outputs(cell, watch.choice, executor)
    return values


def _run_modules(
    cell: MixedCell,
    node: int,
    executor: NodeExecutor,
    mix: Mix,
    site: int,
    factors: Tensor | None,
    inputs: Mapping[int, NodeInputs],
    made: Mapping[int, Tensor],
    rest: Tensor | None,
    calibrations: CalibrationSums | None,
    *,
    calibrations_only: bool,
) -> None:
    """Adds the outputs of a node's live outgoing candidates to the inputs of their targets; made: known outputs.

    rest: the values that bypass the candidates, for mixes that combine outputs of all channels themselves.
    calibrations: adds up those whose target is reached.
    """
    live = mix.live(site)
    leaving = [
        (choice, candidate, target, cell.edges.module(entry))
        for entry, choice, candidate, target in cell.leaving[node]
        if live is None or candidate in live[choice]
    ]
    if calibrations_only:
        leaving = [one for one in leaving if isinstance(one[-1], Calibration)]
    width, reached = cell.table.width, cell.reached(live)
    if calibrations is not None and calibrations.add(node, executor.value):
        leaving = [one for one in leaving if not (isinstance(one[-1], Calibration) and one[-2] in reached)]
    again = {choice: mix.recomputes(site, choice) for choice, *_ in leaving}
    # Recomputed choices run one by one below, since a group would keep their activations.
    executor.together(
        module
        for choice, k, target, module in leaving
        if not again[choice] and target in reached and choice * width + k not in made
    )
    outputs: dict[int, dict[int, Tensor | None]] = {}
    for choice, k, _, module in leaving:
        output = made.get(choice * width + k)
        if output is None and module is not None:
            output = executor(module, again=again[choice])
        if rest is not None:
            assert cell.partial is not None
            output = cell.partial.widen(output, rest)
        outputs.setdefault(choice, {})[k] = output
    targets = {choice: target for choice, _, target, _ in leaving}
    combined = {} if cell.block is not None or is_modules_only() else mix.combine_together(site, outputs)
    for choice, own in outputs.items():
        if choice not in combined:
            inputs[targets[choice]].outputs.extend((choice, k, x) for k, x in own.items())
        elif (value := combined[choice]) is not None:
            inputs[targets[choice]].sums.append(scaled(value, factors, choice))


def _all_outputs(cell: MixedCell, choice: int, executor: NodeExecutor) -> dict[int, tuple[Calibration | None, Tensor]]:
    """The output of every candidate of a choice, live or not, and its module if it calibrates."""
    return {
        k: (module if isinstance(module, Calibration) else None, executor(module))
        for entry, own, k, _ in cell.leaving[cell.table.choices[choice].source]
        if own == choice and (module := cell.edges.module(entry)) is not None
    }


class NodeExecutor:
    """Runs modules on one node's value: each module at most once, and the ReLU that most of them start with only once.

    A bottleneck or partial channels narrow the value before the first module runs.
    """

    def __init__(self, x: Tensor, node: int, narrowing: Bottleneck | PartialChannels | None) -> None:
        self._x, self._done = x, dict[int, Tensor]()
        self._node, self._narrowing = node, narrowing
        self._activated: Tensor | None = None

    def __call__(self, module: nn.Module, *, again: bool = False) -> Tensor:
        """again: keep only the input for the backward pass, which runs the module again."""
        key = id(module)
        if key not in self._done:
            self._narrow()
            self._done[key] = self._run(module, again)
        return self._done[key]

    def together(self, modules: Iterable[nn.Module | None]) -> None:
        """Runs modules together if that is possible and faster (`plan_modules`)."""
        grouping, own = plan_modules(self._x), list(modules)
        if grouping.convolutions:
            self._stack(own)
        if grouping.calibrations and any(isinstance(module, Calibration) for module in own):
            self._done |= run_calibrations(own, self.value())

    def _stack(self, modules: Iterable[nn.Module | None]) -> None:
        for own in grouped(modules, stack_key).values():
            if len(own) > 1:
                self._narrow()
                outputs = run_stacked(list(own.values()), self._activate())
                self._done.update(zip(own, outputs, strict=True))

    def value(self) -> Tensor:
        """The input of the modules: the node's value, narrowed if the cell requires it."""
        self._narrow()
        return self._x

    def _narrow(self) -> None:
        if self._narrowing is not None:
            self._x, self._narrowing = self._narrowing.reduce_source(self._node, self._x), None

    def _run(self, module: nn.Module, again: bool) -> Tensor:
        starts = shares_activations() and isinstance(module, ReLUFirst | FactorisedReduction)
        inputs = (self._x, self._activate()) if starts else (self._x,)
        return recomputed(module, *inputs) if again else module(*inputs)

    def _activate(self) -> Tensor:
        if self._activated is None:
            self._activated = torch.relu(self._x)
        return self._activated


class _Weights(NamedTuple):
    """The mixing weights [choices · width] of the programs of a cell, and the residual nodes whose share they hold."""

    flat: Tensor
    shares: Collection[int]


_KNOWN: ContextVar[dict[Hashable, tuple[Tensor, Any]] | None] = ContextVar("known", default=None)
"""What is made of the weights of a mix, which all cells of a kind share in a pass."""


def _once(weights: Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """`make()`, once in a pass of all cells for these weights of a mix and this key."""
    known = _KNOWN.get()
    if known is None:
        return make()
    if (id(weights), key) not in known:
        known[id(weights), key] = weights, make()  # with the tensor itself, so that no other gets its id
    found: T = known[id(weights), key][1]
    return found


def _program_weights(cell: MixedCell, mix: Mix, site: int) -> _Weights:
    """The weights of the programs that add up the features of nodes."""
    assert isinstance(mix, WeightMix)
    own, live = mix.weights(site), mix.live(site)
    places = {} if cell.block is None else dict(_identities(cell, cell.block, live))
    block = cell.block
    if block is None or not places:
        return _Weights(own.flatten(), ())
    key = cell.table.name, live, tuple(sorted(places.items()))
    return _once(own, key, lambda: _Weights(block.with_shares(own, places).flatten(), places))


def _identities(cell: MixedCell, block: Block, live: Live | None) -> Iterator[tuple[int, tuple[frozenset[int], int]]]:
    """Residual nodes whose live features are one program with an identity, these features, and the identity."""
    for node, source in block.residual.items():
        form = cell.node_sums.of(source, live, cell.stride_from(source))
        if form is None or node not in form.candidates:
            continue
        for k, entry in cell.live_features(source, live):
            if entry.target == node and type(entry.module) is nn.Identity:
                yield node, (form.candidates[node], k)
                break


def _programs(cell: MixedCell, mix: Mix, site: int, x: Tensor) -> Iterator[FusedCell]:
    """The programs that a cell will run: of the whole cell, or of the sums or the outputs of its nodes."""
    execution, live = plan_execution(cell, mix, site, x), mix.live(site)
    if execution is Execution.FUSED_CELL and (whole := cell.fused(live)) is not None:
        yield whole
    elif execution is Execution.FUSED_SUMS:
        forms = (cell.node_sums.of(node, live, cell.stride_from(node)) for node in cell.leaving)
        yield from (form.cell for form in forms if form is not None)
    elif execution is Execution.FUSED_OUTPUTS:
        separate = (_separate_outputs(cell, node, mix, site) for node in cell.leaving)
        yield from (form.cell for form in separate if form is not None)


def _separate_outputs(cell: MixedCell, node: int, mix: Mix, site: int) -> NodeOutputs | None:
    """The program of the outgoing features of a node with separate outputs; None if they must run one by one."""
    # The program keeps all outputs for the backward pass, which defeats recomputation.
    if any(mix.recomputes(site, choice) for _, choice, _, _ in cell.leaving[node]):
        return None
    return cell.node_outputs.of(node, mix.live(site), cell.stride_from(node))


MOST_FORMS = 64
"""Sets of live calibrations of a cell whose sums are formed at once (`spaces._calibration_sums`)."""


def _sources(cell: MixedCell, mix: Mix, site: int, *, drops: bool, x: Tensor) -> dict[int, Source]:
    """The calibrations that leave the nodes of a cell, where a GPU adds them to all sums at once; x: an input node."""
    block = cell.block
    if block is None or not block.sums_at_once(mix, site, drops=drops) or watched(site) is not None:
        return {}
    if not runs_triton(x) or any(mix.recomputes(site, choice) for choice in range(len(cell.table))):
        return {}
    live, width, sources = mix.live(site), cell.table.width, dict[int, Source]()
    reached = cell.reached(live)
    for node, leaving in cell.leaving.items():
        edges = [
            (module, target, choice * width + k)
            for entry, choice, k, target in leaving
            if (live is None or k in live[choice]) and target in reached
            if isinstance(module := cell.edges.module(entry), Calibration)
        ]
        source = plan_source(edges) if edges else None
        if source is not None:
            sources[node] = source
    # Constants of a form stay, since captured steps read them. Drawn candidates rarely repeat: they run one by one.
    forms = tuple(source.form for source in sources.values())
    if len(block.constants) >= MOST_FORMS and all(known[0] != forms for known in block.constants):
        return {}
    return sources


def _calibration_sums(
    cell: MixedCell, mix: Mix, site: int, factors: Tensor | None, x: Tensor
) -> CalibrationSums | None:
    """The sums of calibrations of a cell in this pass, where a GPU forms them at once; x: an input node."""
    sources, block = _sources(cell, mix, site, drops=factors is not None, x=x), cell.block
    if not sources or block is None:
        return None
    assert isinstance(mix, WeightMix)
    own, dtype, forms = mix.weights(site), compute_type(x), tuple(source.form for source in sources.values())
    weights = _once(own, (forms, dtype), lambda: weights_of(own.flatten(), forms, dtype, block.constants))
    return CalibrationSums(dict(zip(sources, zip(sources.values(), weights, strict=True), strict=True)))


@contextmanager
def mixed_pass(cells: Sequence[MixedCell], mix: Mix, x: Tensor) -> Iterator[None]:
    """Within this context, which a pass of all cells of a supernet needs only for speed, cells share launches.

    Weights of programs and of calibrations are flattened and converted, running statistics of programs collected, and
    gradients of mixing weights summed, together. x: any tensor of the batch, [n, ...].
    """
    sites, programs = list[int](), list[FusedCell]()
    for site, cell in enumerate(cells):
        programs += _programs(cell, mix, site, x)
        if plan_execution(cell, mix, site, x) is Execution.FUSED_CELL and cell.fused(mix.live(site)) is not None:
            sites.append(site)
    calibrations = [
        source.modules
        for site, cell in enumerate(cells)
        for source in _sources(cell, mix, site, drops=cell.drops(), x=x).values()
    ]
    read = _READ.set(_read_together(mix, sites) if current_settings().mixes_together else {})
    known = _KNOWN.set({})
    try:
        with prepared(programs, x), weights_prepared(calibrations, x):
            yield
    finally:
        _KNOWN.reset(known)
        _READ.reset(read)


_READ: ContextVar[dict[int, Read] | None] = ContextVar("read", default=None)
"""The mixing weights of the sites that the pass of a supernet has not reached yet."""


def _read_together(mix: Mix, sites: Iterable[int]) -> dict[int, Read]:
    """The weights of those sites that read the same table as another one."""
    if not isinstance(mix, WeightMix):
        return {}
    by_table: dict[int, list[int]] = {}
    for site in sites:
        by_table.setdefault(id(mix.weights(site)), []).append(site)
    found: dict[int, Read] = {}
    for own in by_table.values():
        if len(own) > 1:
            found |= zip(own, readers(mix.weights(own[0]).flatten(), len(own)), strict=True)
    return found


def run_fused_cell(
    cell: MixedCell, states: Sequence[Tensor], mix: Mix, site: int, factors: Tensor | None
) -> list[Tensor]:
    """The values of all nodes of a cell that has a fused form; factors [choices, n]: of drop-path."""
    fused = cell.fused(mix.live(site))
    assert fused is not None and isinstance(mix, WeightMix)
    # Each reader has room for one gradient, so a cell that runs again reads the table itself.
    read = (_READ.get() or {}).pop(site, None)
    if read is None:
        return fused(states, mix.weights(site).flatten(), factors)
    return fused(states, read.mix, factors, read.room)


def run_node_sums(
    cell: MixedCell,
    node: int,
    executor: NodeExecutor,
    mix: Mix,
    site: int,
    factors: Tensor | None,
    inputs: Mapping[int, NodeInputs],
    weights: _Weights,
) -> bool:
    """Runs the outgoing features of a node as one program; returns False if they must run one by one."""
    form = cell.node_sums.of(node, mix.live(site), cell.stride_from(node))
    if form is None:
        return False
    if factors is not None and cell.block is not None:
        factors = cell.block.undropped(factors)
    _, *sums = form.cell([executor.value()], weights.flat, factors)
    for (target, candidates), value in zip(form.candidates.items(), sums, strict=True):
        inputs[target].sums.append(value)
        inputs[target].summed.update(candidates)
        inputs[target].has_share = target in weights.shares
    return True


def run_node_outputs(cell: MixedCell, node: int, executor: NodeExecutor, mix: Mix, site: int) -> dict[int, Tensor]:
    """The outputs of the outgoing features of a node, from one program, by position in the flattened table.

    Empty if they must run one by one.
    """
    form = _separate_outputs(cell, node, mix, site)
    if form is None:
        return {}
    _, *outputs = form.cell([executor.value()])
    return {position: outputs[number] for position, number in form.numbers.items()}


class FusedForms:
    """The fused forms of one cell as a whole, one per set of live candidates; the latest are kept."""

    def __init__(self, entries_of: Callable[[Live | None], Iterable[Entry]], inputs: int, nodes: int) -> None:
        self._entries_of, self._inputs, self._nodes = entries_of, inputs, nodes
        self._known: dict[Live | None, FusedCell | None] = {}

    def of(self, live: Live | None, channels: int, stride: int) -> FusedCell | None:
        """None if the cell must run module by module."""
        return remembered_form(
            self._known, live, lambda: plan(self._entries_of(live), self._inputs, self._nodes, channels, stride)
        )


@dataclass(frozen=True, slots=True)
class NodeSums:
    """One program of the outgoing features of a node: a cell, and the candidates in its sums by target."""

    cell: FusedCell
    candidates: Mapping[int, frozenset[int]]

    @property
    def norms(self) -> Norms:
        return self.cell.norms


@dataclass(frozen=True, slots=True)
class NodeOutputs:
    """One program of the outgoing candidates of a node: a cell, and the number of each output by weight position."""

    cell: FusedCell
    numbers: Mapping[int, int]

    @property
    def norms(self) -> Norms:
        return self.cell.norms


Features = Iterable[tuple[int, Entry]]
"""Outgoing features of a node: candidates and their entries."""
F = TypeVar("F", bound=Form)


class NodeForms(Generic[F]):
    """Fused forms of the outgoing features of single nodes, one per node and set of live candidates.

    For cells that cannot be fused as a whole, since they have operations between their nodes (a bottleneck, a bypass, a
    calibration), and for mixes that need every output. make: `plan_sums` or `plan_outputs`.
    """

    def __init__(
        self,
        make: Callable[[Features, int, int], F],
        features_of: Callable[[int, Live | None], Features],
        channels: int,
    ) -> None:
        self._make, self._features_of, self._channels = make, features_of, channels
        self._known: dict[tuple[int, Live | None], F | None] = {}

    def of(self, node: int, live: Live | None, stride: int) -> F | None:
        """None if the features must run one by one; `stride` applies to all outgoing operations of the node."""
        return remembered_form(
            self._known, (node, live), lambda: self._make(self._features_of(node, live), self._channels, stride)
        )


def plan_sums(features: Features, channels: int, stride: int) -> NodeSums:
    """A small cell with one input and one weighted sum per target."""
    candidates: dict[int, set[int]] = {}
    entries = []
    for candidate, entry in features:
        candidates.setdefault(entry.target, set()).add(candidate)
        entries.append(entry)
    numbers = {target: 1 + i for i, target in enumerate(candidates)}
    own = [replace(entry, source=0, target=numbers[entry.target]) for entry in entries]
    cell = plan(own, 1, 1 + len(numbers), channels, stride)
    return NodeSums(cell, {target: frozenset(found) for target, found in candidates.items()})


def plan_outputs(features: Features, channels: int, stride: int) -> NodeOutputs:
    """Every output separately, numbered by the positions of their weights. Identities are skipped: nothing runs."""
    entries = [entry for _, entry in features if not isinstance(entry.module, nn.Identity)]
    cell, numbers = plan_apart((replace(entry, source=0) for entry in entries), channels, stride)
    return NodeOutputs(cell, dict(zip((entry.weight for entry in entries), numbers, strict=True)))
