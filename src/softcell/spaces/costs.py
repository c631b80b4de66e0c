"""What every candidate of a supernet costs, counted once on its real module at its real size.

The supernet is built and run without memory (torch's meta device), so that each cell tells the sizes of its nodes; then
every candidate is counted on its own. Nothing here knows a space or a candidate by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from softcell.arch import Live, WeightMix
from softcell.arch.cost import KINDS, CostTables, Resources, convolution, passing, pooling
from softcell.errors import UserError
from softcell.nn.calibrate import Calibration
from softcell.nn.candidates import get_candidate
from softcell.spaces.base import Shape, Space
from softcell.spaces.cell import MixedCell
from softcell.spaces.count import products_of


def count_candidates(
    space: Space, shape: Shape, num_classes: int, *, printed_pooling: bool = False, trained: bool = False
) -> CostTables:
    """Parameters, FLOPs and memory access of every candidate of every site; `printed_pooling`: Eq 38 to the letter.

    `trained`: as in networks that are trained for good, whose batch-norm has weights; behind pools too, which is the
    larger of their two forms. A candidate whose weights several edges share is counted in full on each of them.
    """
    layout = space.layout()
    cells = cells_with_sizes(space, shape, num_classes)
    counter = _Counter(printed_pooling, trained)
    rows = [counter.cell(*cell) for cell in cells]
    return CostTables(layout, {kind: tuple(row[kind] for row in rows) for kind in KINDS})


def cells_with_sizes(space: Space, shape: Shape, num_classes: int) -> list[tuple[MixedCell, list[torch.Size]]]:
    """For every site its cell, without memory, and the sizes [1, c, h, w] of its nodes for one image."""
    layout = space.layout()
    # Nothing is live: the nodes are zeros of the right size, and no candidate has to run for them.
    idle: dict[int, Live] = {site: ((),) * len(layout.table(name)) for site, name in enumerate(layout.sites)}
    with torch.device("meta"):
        supernet = space.supernet(shape, num_classes).eval()
        mix = WeightMix(layout, {table.name: torch.zeros(table.shape) for table in layout.tables}, idle)
        image = torch.zeros(1, *shape)
    cells: dict[int, tuple[MixedCell, list[torch.Size]]] = {}

    def note(cell: nn.Module, given: tuple[Any, ...], named: dict[str, Any], nodes: list[Tensor]) -> None:
        assert isinstance(cell, MixedCell)
        cells[named["site"] if "site" in named else given[2]] = cell, [node.shape for node in nodes]

    for module in supernet.modules():
        if isinstance(module, MixedCell):
            module.register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        supernet(image, mix)
    missing = sorted(set(range(len(layout.sites))) - set(cells))
    if missing:
        raise UserError(
            f"costs are counted on cells of type MixedCell, but sites {missing} of space {layout.space!r} have none; "
            "switch the resource penalty off (--set resource.preset=none)"
        )
    return [cells[site] for site in range(len(layout.sites))]


class _Counter:
    """Counts candidates, each combination of operation, settings and input size once."""

    def __init__(self, printed_pooling: bool, trained: bool) -> None:
        self._printed, self._trained, self._known = printed_pooling, trained, dict[Any, Resources]()

    def cell(self, cell: MixedCell, nodes: list[torch.Size]) -> dict[str, Tensor]:
        """Per kind [choices, width]."""
        found = {kind: torch.zeros(cell.table.shape, dtype=torch.float64) for kind in KINDS}
        entry = 0
        for row, choice in enumerate(cell.table.choices):
            for column, name in enumerate(choice.candidates):
                module = cell.edges.module(entry)
                entry += 1
                if module is None:
                    continue  # zeros cost nothing
                spec, node = cell.spec_of(choice.source), nodes[choice.source]
                # Behind a bottleneck narrower than the node.
                size = torch.Size([1, spec.c_in, *node[2:]])
                target = torch.Size([1, spec.channels, *nodes[choice.target][2:]])
                key = (name, spec, size, target)
                if key not in self._known:
                    if self._trained:
                        with torch.device("meta"):
                            module = get_candidate(name).build(replace(spec, affine=True, pool_norm=True))
                    alone = count_candidate(module, size, printed_pooling=self._printed)
                    self._known[key] = _with_application(alone, module, size, target)
                for kind, value in self._known[key]._asdict().items():
                    found[kind][row, column] = value
        return found


def count_candidate(module: nn.Module, size: torch.Size, *, printed_pooling: bool = False) -> Resources:
    """What a candidate on the meta device costs on an input of `size` [1, c, h, w].

    Parameters are all that learn. FLOPs are those of convolutions and matrix products, wherever they stand, and of
    pooling layers. Memory access is summed over convolutions, linear and pooling layers; a candidate without any of
    these reads and writes one map and reads its weights.
    """
    layers: list[Resources] = []

    def note(layer: nn.Module, given: tuple[Any, ...], y: Tensor) -> None:
        layers.append(_layer(layer, given[0], y, printed_pooling))

    kinds = (nn.Conv2d, nn.Linear, nn.MaxPool2d, nn.AvgPool2d)
    hooks = [part.register_forward_hook(note) for part in module.modules() if isinstance(part, kinds)]
    x = torch.zeros(size, device="meta")
    was_training = module.training
    module.eval()  # batch-norm refuses to measure a map of one value
    try:
        with products_of(module) as products:
            y = module(x)
    finally:
        module.train(was_training)
        for hook in hooks:
            hook.remove()
    parameters = sum(p.numel() for p in module.parameters())
    pooled = sum(layer.flops for layer in layers if not layer.parameters)
    memory = sum(layer.memory for layer in layers)
    if not layers:
        memory = x.numel() + y.numel() + parameters  # Eq 40
    return Resources(parameters, products() + pooled, memory)


def _with_application(alone: Resources, module: nn.Module, size: torch.Size, target: torch.Size) -> Resources:
    """The costs of a calibrating candidate with those of applying what it makes to the map of its target node."""
    if not isinstance(module, Calibration):
        return alone
    products = FlopCounterMode(display=False)
    base = torch.zeros(target, device="meta")
    with torch.no_grad():
        made = module(torch.zeros(size, device="meta"))
        with products:
            y = module.applied(base, made)
    moved = passing(y.shape[-2], y.shape[-1], base.shape[1], y.shape[1]).memory
    return Resources(alone.parameters, alone.flops + products.get_total_flops() // 2, alone.memory + moved)


def _layer(layer: nn.Module, x: Tensor, y: Tensor, printed_pooling: bool) -> Resources:
    if isinstance(layer, nn.Linear):
        return convolution(y.numel() // layer.out_features, 1, 1, layer.in_features, layer.out_features)
    height, width = y.shape[-2:]
    assert isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d)
    sides = layer.kernel_size if isinstance(layer.kernel_size, tuple) else (layer.kernel_size, layer.kernel_size)
    steps = layer.stride if isinstance(layer.stride, tuple) else (layer.stride, layer.stride)
    window, reduction = sides[0] * sides[1], steps[0] * steps[1]
    if isinstance(layer, nn.Conv2d):
        return convolution(height, width, window, x.shape[1], y.shape[1], layer.groups, reduction=reduction)
    return pooling(height, width, window, x.shape[1], y.shape[1], reduction=reduction, printed=printed_pooling)
