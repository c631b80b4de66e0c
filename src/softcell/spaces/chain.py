"""Chains of layers as cells: one that mixes the candidates of every layer, one that runs the picks of a genotype.

A chain is a table whose choice i leads from node i to node i + 1. Unlike in cells, width and resolution may change from
node to node. Where a layer keeps both, its candidates include their input (a skip is just that), and drop-path drops
what they add to it. A layer that changes them is never dropped: it is the only path.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from softcell.arch import Cell, Mix, Table, WeightMix
from softcell.errors import UserError
from softcell.nn.candidates import Spec
from softcell.nn.norm import recomputed
from softcell.nn.stack import run_alike, run_blocks
from softcell.nn.stochastic import DropPath
from softcell.spaces.cell import MixedCell, PickedCell
from softcell.spaces.edges import Output, SpecOf, zeros
from softcell.spaces.execution import LayerExecution, plan_layer


def keeps_shape(spec: Spec) -> bool:
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
        """The value of the first node to those of all nodes."""
        live = mix.live(site)
        factors = self._drop_path[0].factors(states[0], len(self.table)) if self._drops() else None
        values = list(states)
        for layer, choice in enumerate(self.table.choices):
            x, spec = values[-1], self.spec_of(layer)
            running = range(len(choice.candidates)) if live is None else live[layer]
            value = self._mixed(layer, running, x, mix, site)
            if value is None:
                value = zeros(x, spec)
            if factors is not None and keeps_shape(spec):
                value = x + (value - x) * factors[layer].to(x.dtype).view(-1, 1, 1, 1)
            values.append(value)
        return values

    def _mixed(self, layer: int, running: Sequence[int], x: Tensor, mix: Mix, site: int) -> Tensor | None:
        """The combined outputs of the running candidates of a layer; None: zeros alone."""
        modules = [self.edges.module(self._starts[layer] + k) for k in running]
        again = mix.recomputes(site, layer)
        execution = plan_layer(mix, site, layer, x)
        if execution is LayerExecution.STACKED:
            alike = run_alike(modules, x)
            if alike is not None:
                assert isinstance(mix, WeightMix)
                return self.combiner.sum_alike(alike, [(layer, k) for k in running], mix, site)
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
        self._keeps = tuple(keeps_shape(spec_of(layer)) for layer in range(len(self.layers)))

    def forward(self, states: Sequence[Tensor]) -> list[Tensor]:
        values = list(states)
        for picks, keeps in zip(self.layers, self._keeps, strict=True):
            x, y = values[-1], None
            for pick in picks:
                module = self.edges.module(pick)
                assert module is not None  # `check_chain` refuses `none`
                y = module(x) if y is None else y + module(x)
            assert y is not None
            if keeps and self.training and self._drop_path[0].probability > 0:
                y = x + self._drop_path[0](y - x)
            values.append(y)
        return values


def check_chain(cell: Cell) -> tuple[tuple[int, ...], ...]:
    """For every layer the numbers of its picks; `UserError` unless they lead from node to node and none is missing."""
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
