"""Costs and output shapes, measured on real modules: of a network, and of every candidate of a supernet.

For candidates the supernet is built and run without memory (torch's meta device), which yields the sizes of all nodes;
then every candidate is counted separately. Nothing here depends on the name of a space or a candidate.

Layers cost as in SNAS (Xie, Zheng, Liu, Lin; ICLR 2019), Appendix F. H×W is the size of a layer's output, f×k its
window, I and O its input and output channels, g its groups, s its stride.

    Eq 35  parameters of a convolution  f·k·I·O/g              -> `convolution`
    Eq 36  FLOPs of a convolution       H·W·f·k·I·O/g
    Eq 37  memory access                H·W·(s²·I+O) + f·k·I·O/g
    Eq 38  FLOPs of pooling             H·W·f·k·I·O as printed  -> `pooling`
    Eq 39  FLOPs of a skip connection   0                      -> `passing`
    Eq 40  memory access of both        H·W·(s²·I+O)

Eq 37 and 40 are printed without s²: their H×W is one size for input and output. A layer of stride 2 reads a map of four
times the size of the one it writes, and the authors' code counts it that way.

One multiplication with one addition counts as one FLOP, as in Eq 36; others call that a multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from softcell.arch import Genotype, Layout, Live, Mix, WeightMix
from softcell.engine.session import forked_rng
from softcell.errors import UserError
from softcell.nn.attention import Attention, shifts_only
from softcell.nn.calibrate import Calibration
from softcell.nn.candidates import get_candidate
from softcell.spaces.base import Shape, Space, Supernet
from softcell.spaces.cell import MixedCell
from softcell.spaces.execution import modules_only

KINDS = ("parameters", "flops", "memory")


@dataclass(frozen=True, slots=True)
class Cost:
    """`parameters` are learnable numbers; `multiply_adds` those of convolutions and matrix products for one image.

    Example:
        >>> from torch import nn
        >>> from softcell.evaluate import count_module
        >>> count_module(nn.Conv2d(3, 8, 3, bias=False), (3, 10, 10))  # 8 * 3 * 3 * 3 weights at 8 * 8 positions
        Cost(parameters=216, multiply_adds=13824)
    """

    parameters: int
    multiply_adds: int

    @property
    def megabytes(self) -> float:
        """Size of the weights in float32."""
        return self.parameters * 4 / 1e6


class Resources(NamedTuple):
    """Costs of one layer or candidate for one image."""

    parameters: int = 0
    flops: int = 0
    memory: int = 0


def convolution(
    height: int, width: int, window: int, c_in: int, c_out: int, groups: int = 1, *, reduction: int = 1
) -> Resources:
    """A convolution without bias; height and width are its output's, `window` is f·k and `reduction` s²."""
    weights = window * c_in * c_out // groups  # Eq 35
    memory = height * width * (reduction * c_in + c_out) + weights  # Eq 37
    return Resources(weights, height * width * weights, memory)  # Eq 36


def pooling(
    height: int, width: int, window: int, c_in: int, c_out: int, *, reduction: int = 1, printed: bool = False
) -> Resources:
    """A pooling layer; sizes as for `convolution`.

    Deviation: a real pooling layer reads f·k values per output value, so H·W·f·k·O; Eq 38 has an additional factor I;
    `printed` includes it.
    """
    flops = height * width * window * c_out * (c_in if printed else 1)  # Eq 38
    return Resources(0, flops, height * width * (reduction * c_in + c_out))  # Eq 40


def passing(height: int, width: int, c_in: int, c_out: int) -> Resources:
    """A skip connection: nothing is computed, but the map is read and written (Eq 39, 40)."""
    return Resources(0, 0, height * width * (c_in + c_out))


@dataclass(frozen=True)
class CostTables:
    """By kind of cost, for every site of a layout the cost of each candidate: float64 [choices, width], padding 0."""

    layout: Layout
    kinds: Mapping[str, tuple[Tensor, ...]]

    def __post_init__(self) -> None:
        for kind, sites in self.kinds.items():
            shapes = [self.layout.table(name).shape for name in self.layout.sites]
            assert [tuple(costs.shape) for costs in sites] == shapes, f"{kind}: one [choices, width] per site"

    def of(self, kind: str, table: str) -> Tensor:
        """[sites of the table, choices, width]"""
        return torch.stack([self.kinds[kind][site] for site in self.layout.sites_of(table)])

    def read_tables(self) -> tuple[str, ...]:
        """Names of the tables that some site reads."""
        return tuple(table.name for table in self.layout.tables if table.name in self.layout.sites)


class _WithoutNorms(TorchFunctionMode):
    """Batch-norm on the meta device returns its input: it has no products and keeps the shape.

    torch computes its shape in many Python steps, which take two fifths of the counting time.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _products_of(module: nn.Module) -> Iterator[Callable[[], int]]:
    """Counts the multiply-adds of `module` within the context; call the yielded function for the sum.

    torch counts convolutions and matrix products; attention over shifted maps counts itself (`uncounted`).
    """
    uncounted: list[int] = []

    def note(layer: nn.Module, given: tuple[Any, ...], y: Tensor) -> None:
        assert isinstance(layer, Attention)
        uncounted.append(y.shape[0] * layer.uncounted(y.shape[-2], y.shape[-1]))

    hooks = [part.register_forward_hook(note) for part in module.modules() if isinstance(part, Attention)]
    counter = FlopCounterMode(display=False)
    try:
        # torch does not count its fused attention for CPUs.
        with torch.no_grad(), shifts_only(), sdpa_kernel(SDPBackend.MATH), _WithoutNorms(), counter:
            # Two operations, one multiplication and one addition, are one multiply-add.
            yield lambda: counter.get_total_flops() // 2 + sum(uncounted)
    finally:
        for hook in hooks:
            hook.remove()


def count_module(network: nn.Module, shape: Shape) -> Cost:
    """Costs of any module that maps one image [1, c, h, w] to logits; the module is not changed.

    Example:
        >>> from torch import nn
        >>> from softcell.evaluate import count_module
        >>> count_module(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), (1, 8, 8))
        Cost(parameters=650, multiply_adds=640)
    """
    was_training = network.training
    network.eval()
    parameter = next(network.parameters())
    image = torch.zeros(1, *shape, device=parameter.device, dtype=parameter.dtype)
    with _products_of(network) as products:
        network(image)
    network.train(was_training)
    return Cost(sum(p.numel() for p in network.parameters()), products())


def count_genotype(space: Space, genotype: Genotype, shape: Shape, num_classes: int) -> Cost:
    """Costs of the evaluation network of a genotype, without the auxiliary tower; its weights take no memory.

    Example:
        >>> from softcell.arch import notation
        >>> from softcell.evaluate import count_genotype
        >>> from softcell.spaces import build_space
        >>> cell = notation.parse("|nor_conv_3x3~0|+|none~0|none~1|+|none~0|skip_connect~1|none~2|")
        >>> count_genotype(build_space("nb201"), cell, shape=(3, 32, 32), num_classes=10).parameters
        316346
    """
    with torch.device("meta"):
        network = space.network(genotype, shape, num_classes)
    return count_module(network, shape)


def count_candidates(
    space: Space, shape: Shape, num_classes: int, *, printed_pooling: bool = False, trained: bool = False
) -> CostTables:
    """Parameters, FLOPs and memory access of every candidate of every site; `printed_pooling`: Eq 38 as printed.

    `trained`: as in evaluation networks, whose batch-norm has weights; also after pools, which is the larger of their
    two forms. A candidate whose weights several edges share is counted in full on each of them.
    """
    layout = space.layout()
    cells = cells_with_sizes(space, shape, num_classes)
    counter = _Counter(printed_pooling, trained)
    rows = [counter.cell(*cell) for cell in cells]
    return CostTables(layout, {kind: tuple(row[kind] for row in rows) for kind in KINDS})


def cells_with_sizes(space: Space, shape: Shape, num_classes: int) -> list[tuple[MixedCell, list[torch.Size]]]:
    """For every site its cell, without memory, and the sizes [1, c, h, w] of its nodes for one image."""
    layout = space.layout()
    # No candidate is live or runs: the nodes are zeros of the right size.
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
    with torch.no_grad(), _WithoutNorms():
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
                # `MixedCell` numbers its entries choice by choice, in this order.
                module = cell.edges.module(entry)
                entry += 1
                if module is None:
                    continue  # zeros cost nothing
                spec, node = cell.spec_of(choice.source), nodes[choice.source]
                # After a bottleneck, narrower than the node.
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
    """Costs of a candidate on the meta device for an input of `size` [1, c, h, w].

    Parameters are all learnable numbers. FLOPs are those of convolutions, matrix products and pooling layers.
    Memory access is summed over convolutions, linear and pooling layers; a candidate without any of these reads and
    writes one map and reads its weights.
    """
    layers: list[Resources] = []

    def note(layer: nn.Module, given: tuple[Any, ...], y: Tensor) -> None:
        layers.append(_layer(layer, given[0], y, printed_pooling))

    kinds = (nn.Conv2d, nn.Linear, nn.MaxPool2d, nn.AvgPool2d)
    hooks = [part.register_forward_hook(note) for part in module.modules() if isinstance(part, kinds)]
    x = torch.zeros(size, device="meta")
    was_training = module.training
    module.eval()  # batch-norm rejects a map of one value
    try:
        with _products_of(module) as products:
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
    """The costs of a calibrating candidate plus those of applying its output to the map of its target node."""
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


@dataclass(frozen=True)
class OutputShapes:
    """The shapes [c, h, w] of a choice's outputs by candidate; None for zeros.

    `in_parts`: they are combined kind by kind, since features and calibrating candidates meet (`Mix.meet`).
    """

    by_candidate: Mapping[int, Shape | None]
    in_parts: bool

    def feature(self) -> Shape | None:
        """The largest shape, which a feature map has."""
        found = [shape for shape in self.by_candidate.values() if shape is not None]
        return max(found, key=lambda shape: shape[0] * shape[1] * shape[2]) if found else None


Shapes = Mapping[tuple[int, int], OutputShapes]
"""By site and choice."""


class _Probe(Mix):
    """Records the shapes of outputs and combines them to their mean."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], OutputShapes] = {}

    def meet(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> None:
        self.seen[site, choice] = OutputShapes(_shapes(outputs), True)

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        if (site, choice) not in self.seen:
            self.seen[site, choice] = OutputShapes(_shapes(outputs), False)
        present = [x for x in outputs.values() if x is not None]
        return torch.stack(present).mean(0) if present else None


def _shapes(outputs: Mapping[int, Tensor | None]) -> dict[int, Shape | None]:
    return {k: None if x is None else (x.shape[1], x.shape[2], x.shape[3]) for k, x in outputs.items()}


@torch.no_grad()
def output_shapes(supernet: Supernet) -> Shapes:
    """The shapes of all outputs, from one pass of a single image; the supernet is not changed.

    It runs module by module: kernels for one image would be compiled for this pass alone.
    """
    probe, reference = _Probe(), next(supernet.parameters())
    image = torch.zeros(1, *supernet.shape, device=reference.device, dtype=reference.dtype)
    was_training = supernet.training
    supernet.eval()
    with modules_only(), forked_rng(reference.device):  # candidates of users may draw in evaluation too
        supernet(image, probe)
    supernet.train(was_training)
    return probe.seen
