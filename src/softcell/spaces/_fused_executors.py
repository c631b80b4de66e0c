"""Executors of mixed cells through `softcell.kernels`: the whole cell, or what leaves a node, is one program.

A fused form is planned once for every set of live candidates and kept. See `softcell.spaces.execution` for the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from softcell.arch import Live, Mix, WeightMix
from softcell.spaces._fused_cell import FusedCell
from softcell.spaces._fused_plan import Entry, plan, plan_apart, remembered
from softcell.spaces.edges import NodeInputs

if TYPE_CHECKING:
    from softcell.spaces._node_executor import NodeExecutor
    from softcell.spaces.cell import MixedCell


def run_fused_cell(
    cell: MixedCell, states: Sequence[Tensor], mix: Mix, site: int, factors: Tensor | None
) -> list[Tensor]:
    """The values of all nodes of a cell that has a fused form; factors [choices, n]: of drop-path."""
    fused = cell.fused(mix.live(site))
    assert fused is not None and isinstance(mix, WeightMix)
    return fused(states, mix.weights(site).flatten(), factors)


def run_node_sums(
    cell: MixedCell,
    node: int,
    executor: NodeExecutor,
    mix: Mix,
    site: int,
    factors: Tensor | None,
    inputs: Mapping[int, NodeInputs],
) -> bool:
    """Runs the features that leave a node as one program; False where they must run one by one."""
    assert isinstance(mix, WeightMix)
    form = cell.node_sums.of(node, mix.live(site), cell.stride_from(node))
    if form is None:
        return False
    if factors is not None and cell.block is not None:
        factors = cell.block.undropped(factors)
    _, *sums = form.cell([executor.value()], mix.weights(site).flatten(), factors)
    for (target, candidates), value in zip(form.candidates.items(), sums, strict=True):
        inputs[target].sums.append(value)
        inputs[target].summed.update(candidates)
    return True


def run_node_outputs(cell: MixedCell, node: int, executor: NodeExecutor, mix: Mix, site: int) -> dict[int, Tensor]:
    """The outputs of the features that leave a node, from one program, by position in the flattened table.

    Empty where they must run one by one.
    """
    if any(mix.recomputes(site, choice) for _, choice, _, _ in cell.leaving[node]):
        return {}
    form = cell.node_outputs.of(node, mix.live(site), cell.stride_from(node))
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
        """None where the cell must run module by module."""
        return remembered(
            self._known, live, lambda: plan(self._entries_of(live), self._inputs, self._nodes, channels, stride)
        )


@dataclass(frozen=True, slots=True)
class NodeSums:
    """One program of the features that leave a node: a cell, and the candidates in its sums by target."""

    cell: FusedCell
    candidates: Mapping[int, frozenset[int]]


class NodeSumForms:
    """Fused forms for cells that cannot be fused as a whole, one per node.

    There is something between the nodes of such a cell (a bottleneck, a bypass, a calibration), but the features that
    leave one node are a small cell: one input, and one weighted sum per target.
    """

    def __init__(self, features_of: Callable[[int, Live | None], Iterable[tuple[int, Entry]]], channels: int) -> None:
        self._features_of, self._channels = features_of, channels
        self._known: dict[tuple[int, Live | None], NodeSums | None] = {}

    def of(self, node: int, live: Live | None, stride: int) -> NodeSums | None:
        """None where the features must run one by one; `stride` is that of all that leaves the node."""
        return remembered(self._known, (node, live), lambda: self._plan(node, live, stride))

    def _plan(self, node: int, live: Live | None, stride: int) -> NodeSums:
        candidates: dict[int, set[int]] = {}
        entries = []
        for candidate, entry in self._features_of(node, live):
            candidates.setdefault(entry.target, set()).add(candidate)
            entries.append(entry)
        numbers = {target: 1 + i for i, target in enumerate(candidates)}
        own = [replace(entry, source=0, target=numbers[entry.target]) for entry in entries]
        cell = plan(own, 1, 1 + len(numbers), self._channels, stride)
        return NodeSums(cell, {target: frozenset(found) for target, found in candidates.items()})


@dataclass(frozen=True, slots=True)
class NodeOutputs:
    """One program of the candidates that leave a node: a cell, and the number of each output by weight position."""

    cell: FusedCell
    numbers: Mapping[int, int]


class NodeOutputForms:
    """Fused forms for mixes that need every output separately, one per node. Identities are left out: nothing runs."""

    def __init__(self, features_of: Callable[[int, Live | None], Iterable[tuple[int, Entry]]], channels: int) -> None:
        self._features_of, self._channels = features_of, channels
        self._known: dict[tuple[int, Live | None], NodeOutputs | None] = {}

    def of(self, node: int, live: Live | None, stride: int) -> NodeOutputs | None:
        """None where the candidates must run one by one; outputs are numbered by the positions of their weights."""
        return remembered(self._known, (node, live), lambda: self._plan(node, live, stride))

    def _plan(self, node: int, live: Live | None, stride: int) -> NodeOutputs:
        entries = [e for _, e in self._features_of(node, live) if not isinstance(e.module, nn.Identity)]
        cell, numbers = plan_apart((replace(e, source=0) for e in entries), self._channels, stride)
        return NodeOutputs(cell, dict(zip((e.weight for e in entries), numbers, strict=True)))
