"""Mixed cells that run as one program of `softcell.kernels`: the program with its modules, and how it is planned.

`plan` creates a `FusedCell` from a cell's live candidates, or raises the reason why their modules must run one by one.
These classes own no parameters: weights and running statistics stay in the modules, under their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from softcell.kernels.cell import Program, Wave, mixed_cell
from softcell.kernels.norm import Term
from softcell.kernels.pool import NONE, Pool
from softcell.kernels.schedule import backward_on_second_stream
from softcell.kernels.shared import SharedRows, shares_norms
from softcell.kernels.taps import Group, Kind, Recipe, Window, compose, compose_gradient, flat_kernels
from softcell.nn.conv import AveragePool, DilatedConv, FactorisedReduction, ReLUConvBN, SeparableConv
from softcell.nn.norm import required, update_running_by_plane
from softcell.nn.stack import as_vector, parts_of
from softcell.spaces.execution import compute_type


class _Flattened(torch.autograd.Function):
    """The flat weights of several cells, and the same in the dtype of computation; see `flat_weights`."""

    @staticmethod
    def forward(
        ctx: Any, cells: Sequence[FusedCell], dtype: torch.dtype, stream: torch.cuda.Stream | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.cells = cells
        ctx.set_materialize_grads(False)
        sizes = [cell.program.size for cell in cells]
        with torch.cuda.stream(stream):
            flat = factors = torch.cat([as_vector(w) for w in weights])
            if not all(cell.are_copies for cell in cells):
                flat = factors.new_empty(sum(sizes))
                for cell, own, out in zip(cells, _by_cell(cells, factors), torch.split(flat, sizes), strict=True):
                    compose(own, out, cell.recipes, cell.program.channels)
            converted = torch.split(flat.to(dtype), sizes)
        ctx.save_for_backward(factors, *weights)
        ctx.mark_non_differentiable(*converted)
        return *torch.split(flat, sizes), *converted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cells: Sequence[FusedCell] = ctx.cells
        factors, *weights = ctx.saved_tensors
        found: list[Tensor | None] = []
        # The converted weights have no gradient.
        for cell, own, gradient in zip(cells, _by_cell(cells, factors), gradients[: len(cells)], strict=True):
            mine = weights[len(found) : len(found) + len(cell.convolutions)]
            found += [None] * len(mine) if gradient is None else cell.weight_gradients(mine, own, gradient)
        return None, None, None, *found


def _by_cell(cells: Sequence[FusedCell], factors: Tensor) -> Sequence[Tensor]:
    """The part of each cell in the concatenated weights of all cells."""
    return torch.split(factors, [sum(w.numel() for w in cell.parameters()) for cell in cells])


@dataclass(frozen=True, slots=True)
class FlatWeights:
    """The weights of a cell as its program reads them: flat [size], and the same in the dtype of computation."""

    flat: Tensor
    converted: Tensor


def flat_weights(cells: Sequence[FusedCell], x: Tensor) -> list[FlatWeights]:
    """The weights of several cells in as few launches as those of one; x: any tensor of the pass."""
    if not cells:
        return []
    dtype = compute_type(x)  # read outside of the context, which disables autocast
    with torch.autocast(x.device.type, enabled=False), backward_on_second_stream(x.device) as stream:
        weights = [w for cell in cells for w in cell.parameters()]
        found = _Flattened.apply(cells, dtype, stream, *weights)  # type: ignore[no-untyped-call]
    return [FlatWeights(*pair) for pair in zip(found[: len(cells)], found[len(cells) :], strict=True)]


_ALIGNED = 16
"""Weights of several cells share a vector only if all sizes are multiples of this, so that kernels read whole words."""

_PREPARED: ContextVar[Mapping[int, FlatWeights]] = ContextVar("prepared_weights", default=MappingProxyType({}))


@contextmanager
def prepared_weights(cells: Sequence[FusedCell], x: Tensor) -> Iterator[None]:
    """Within this context `cells`, all different, read weights that are flattened and converted together."""
    own = [] if any(cell.program.size % _ALIGNED for cell in cells) else cells
    token = _PREPARED.set(dict(zip(map(id, own), flat_weights(own, x), strict=True)))
    try:
        yield
    finally:
        _PREPARED.reset(token)


@dataclass(frozen=True, slots=True)
class FusedCell:
    """A program and the modules it reads."""

    program: Program
    recipes: tuple[Recipe, ...]  # composes the flat weights from the concatenated weights of the convolutions
    convolutions: tuple[nn.Conv2d, ...]
    norms: tuple[tuple[int, nn.BatchNorm2d], ...]  # (plane, its norm), all with the same momentum

    @property
    def training(self) -> bool:
        return self.norms[0][1].training  # all norms of a fused cell have the same mode (`remembered_form`)

    @property
    def are_copies(self) -> bool:
        """Whether the flat weights are the convolutions' weights, in the same order."""
        return all(r.kind is Kind.COPY and r.matrix == r.target for r in self.recipes)

    def __call__(
        self,
        states: Sequence[Tensor],
        mix: Tensor | None = None,
        factors: Tensor | None = None,
        running: Tensor | None = None,
    ) -> list[Tensor]:
        """Maps input nodes [n, c, h, w] and mixing weights, in the form of `mixed_cell`, to the values of all nodes.

        mix: None if every output is returned separately. factors [choices, n]: of drop-path, by choice and sample.
        running [2, planes, c]: running mean and variance by plane, if they are known and norms use them.
        """
        c, device, training = self.program.channels, states[0].device, self.training
        dtype = compute_type(states[0])
        weights = _PREPARED.get().get(id(self)) or flat_weights([self], states[0])[0]
        flat = weights.flat
        with torch.autocast(device.type, enabled=False):
            if training:
                running = None
            elif running is None:
                running = running_by_plane(self.norms, self.program.planes, c)
            mix = flat.detach() if mix is None else mix  # not read in this case, but kernels need a pointer
            mix = mix.to(torch.promote_types(dtype, torch.float32))
            n, _, height, width = states[0].shape
            stride = self.program.stride
            own_rows = n * -(-height // stride) * -(-width // stride)
            shared = SharedRows(own_rows) if training and shares_norms() else None
            own = (self.program, dtype, mix, flat, running, factors)
            nodes, moments = mixed_cell(*own, *states, shared=shared, converted=weights.converted)
            if training:
                rows: int | Tensor = own_rows
                if shared is not None and shared.total is not None:
                    rows = shared.total.clamp(min=2)  # a check would stall the device
                elif own_rows <= 1:
                    raise ValueError(f"training needs more than 1 value per channel, but got {tuple(nodes[0].shape)}")
                update_running_by_plane(self.norms, moments[0], moments[2], rows / (rows - 1))
        return [*states, *nodes]

    def parameters(self) -> list[Tensor]:
        """The convolutions' weights, in the order of the recipes."""
        return [conv.weight for conv in self.convolutions]

    def flatten(self, weights: Sequence[Tensor]) -> Tensor:
        """The flat weights [size] from tensors like `parameters()`, by plain autograd."""
        return flat_kernels(torch.cat([as_vector(w) for w in weights]), self.recipes, self.program.channels)

    def weight_gradients(self, weights: Sequence[Tensor], factors: Tensor, gradient: Tensor) -> list[Tensor]:
        """The gradients of tensors like `parameters()`, concatenated in `factors`, from that of the flat weights."""
        # For second order, weights are composed by plain autograd, since `compose_gradient` has no derivative.
        if torch.is_grad_enabled():
            return list(torch.autograd.grad(self.flatten(weights), weights, gradient, create_graph=True))
        found = gradient.contiguous()
        if not self.are_copies:
            found = torch.empty_like(factors)
            compose_gradient(factors, gradient, found, self.recipes, self.program.channels)
        return parts_of(found, weights)


Norms = Sequence[tuple[int, nn.BatchNorm2d]]
"""(plane, its norm), all with the same momentum."""


def running_by_plane(norms: Norms, planes: int, channels: int) -> Tensor:
    """[2, planes, c]: running mean and variance by plane; the rows of planes without a norm are not read."""
    means = torch.stack([required(m.running_mean) for _, m in norms])
    variances = torch.stack([required(m.running_var) for _, m in norms])
    running = means.new_zeros(2, planes, channels)
    where = _positions(tuple(plane for plane, _ in norms), means.device)
    return running.index_copy_(1, where, torch.stack([means, variances]))


# Cached, since copying an index to the device in each step would stall a GPU.
_POSITIONS: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _positions(planes: tuple[int, ...], device: torch.device) -> Tensor:
    key = (planes, device)
    if key not in _POSITIONS:
        _POSITIONS[key] = torch.tensor(planes, device=device)
    return _POSITIONS[key]


@dataclass(frozen=True, slots=True)
class Entry:
    """One live candidate: its edge, the index of its mixing weight, its module (None: zeros), its choice."""

    source: int
    target: int
    weight: int
    module: nn.Module | None
    choice: int = 0


KEPT = 64
"""The number of fused forms that a cell keeps, one per set of live candidates."""
K = TypeVar("K")
V = TypeVar("V")

_KINDS = (Kind.PRODUCT, Kind.PRODUCT, Kind.PRODUCT, Kind.COPY, Kind.HALVES)  # by the order of a stage


class Unfit(Exception):
    """Why a cell cannot be fused."""


def remembered(known: dict[K, V | None], key: K, make: Callable[[], V]) -> V | None:
    """The cached value for `key`, or None if `make` raises `Unfit`; only the latest `KEPT` values are kept."""
    if key not in known:
        while len(known) >= KEPT:
            known.pop(next(iter(known)))
        try:
            known[key] = make()
        except Unfit:
            known[key] = None
    return known[key]


class Form(Protocol):
    """A fused form of a cell, or of a part of it."""

    @property
    def norms(self) -> Norms: ...


F = TypeVar("F", bound=Form)


def remembered_form(known: dict[K, F | None], key: K, make: Callable[[], F]) -> F | None:
    """The form for `key`; None without one, or while some of its norms are in training mode and others are not.

    A program measures all of its planes or none. Norms may be frozen at any time, so every pass checks this.
    """
    form = remembered(known, key, make)
    return form if form is None or len({norm.training for _, norm in form.norms}) == 1 else None


@dataclass(frozen=True, slots=True)
class _Stage:
    """How a module's convolutions become one kernel: the window, and weights [c, taps, c] composed from `module`."""

    window: Window
    norm: nn.BatchNorm2d
    factors: tuple[nn.Conv2d, ...]
    order: int  # stages of one order and window are stacked together


def _pair(module: nn.Sequential, start: int, order: int) -> _Stage:
    depthwise, pointwise, norm = (module[start + i] for i in range(3))
    assert isinstance(depthwise, nn.Conv2d) and isinstance(pointwise, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
    return _Stage(_window(depthwise), norm, (depthwise, pointwise), order)


def _window(conv: nn.Conv2d) -> Window:
    return Window(conv.kernel_size[0], conv.dilation[0], int(conv.padding[0]), conv.stride[0])


def _stages(module: nn.Module) -> tuple[_Stage, ...] | None:
    """One or two stages for supported convolutions; None for other modules."""
    kind = type(module)
    if kind is SeparableConv:
        return _pair(module, 1, 0), _pair(module, 5, 1)  # type: ignore[arg-type]
    if kind is DilatedConv:
        return (_pair(module, 1, 2),)  # type: ignore[arg-type]
    if kind is ReLUConvBN:
        conv, norm = module[1], module[2]  # type: ignore[index]
        if conv.in_channels != conv.out_channels:
            return None
        return (_Stage(_window(conv), norm, (conv,), 3),)
    if kind is FactorisedReduction:
        even, odd, norm = module.even, module.odd, module.norm
        assert isinstance(odd, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
        if not isinstance(even, nn.Conv2d):  # a single channel
            return None
        # Two pixels of every 2×2 block are read, each by half of the output channels.
        return (_Stage(Window(2, 1, 0, 2), norm, (even, odd), 4),)
    return None


def pool_of(module: nn.Module) -> tuple[nn.MaxPool2d | nn.AvgPool2d, nn.BatchNorm2d | None] | None:
    if type(module) is nn.Sequential and len(module) == 2 and isinstance(module[1], nn.BatchNorm2d):
        inner, norm = module[0], module[1]
    else:
        inner, norm = module, None
    if type(inner) is nn.MaxPool2d and not inner.ceil_mode and inner.dilation == 1:
        fits = (inner.kernel_size, inner.padding) == (3, 1)
    elif type(inner) in (nn.AvgPool2d, AveragePool) and not inner.ceil_mode and inner.divisor_override is None:
        fits = (inner.kernel_size, inner.padding, inner.count_include_pad) == (3, 1, False)
    else:
        return None
    return (inner, norm) if fits else None


def plan(
    entries: Iterable[Entry], inputs: int, nodes: int, channels: int, stride: int, *, affine: bool = False
) -> FusedCell:
    """The fused form of a cell; raises `Unfit` with the reason if there is none. stride: of edges from input nodes.

    affine: all norms have scale and shift, which are the mixing weights; the weights of entries are then 0.
    """
    return _Planner(list(entries), inputs, nodes, channels, stride, affine).build()


def plan_apart(entries: Iterable[Entry], channels: int, stride: int) -> tuple[FusedCell, list[int]]:
    """The fused form of the outgoing modules of one node, with separate outputs, and each module's output number."""
    planner = _Planner(list(entries), 1, 1, channels, stride, False)
    cell = planner.build(apart=True)
    planes = [planner.result[id(entry.module)][0] for entry in planner.entries]
    return cell, [cell.program.results.index(plane) for plane in planes]


class _Planner:
    def __init__(self, entries: list[Entry], inputs: int, nodes: int, channels: int, stride: int, affine: bool) -> None:
        self.entries, self.inputs, self.nodes, self.channels, self.stride = entries, inputs, nodes, channels, stride
        self.affine, self.planes = affine, nodes
        self.norms: list[tuple[int, nn.BatchNorm2d]] = []
        self.kinds: dict[tuple[int, Window], list[_Stage]] = {}
        self.pending: list[tuple[tuple[int, Window], int, int, int, int]] = []  # key, source, first, count, start
        self.result: dict[int, tuple[int, bool]] = {}  # module: (plane of its output, normed)
        self.slots = 0

    def build(self, *, apart: bool = False) -> FusedCell:
        sources = sorted({e.source for e in self.entries if e.module is not None})
        rounds = [tuple(s for s in sources if s < self.inputs), *((s,) for s in sources if s >= self.inputs)]
        drafts = [self._draft(group) for group in rounds if group]
        offsets = self._offsets()
        if not self.kinds:
            raise Unfit("the cell has no convolution")
        groups = {
            (key, source, first): Group(key[1], source, first, count, offsets[key] + start * self._length(key))
            for key, source, first, count, start in self.pending
        }
        waves = tuple(
            Wave(
                sources=sources_,
                first=tuple(groups[g] for g in first),
                second=tuple(groups[g] for g in second),
                pools=pools,
                inner=inner,
                measured=measured,
                measured_second=measured_second,
                identities=tuple(self._identities(s) for s in sources_),
            )
            for sources_, first, second, pools, inner, measured, measured_second in drafts
        )
        eps = self._eps()
        size = sum(len(stages) * self._length(key) for key, stages in self.kinds.items())
        nodes = tuple(range(self.inputs, self.nodes))
        program = Program(
            self.channels,
            self.inputs,
            self.nodes,
            self.planes,
            self.stride,
            size,
            self.slots,
            waves,
            self._terms(),
            eps,
            results=tuple(dict.fromkeys(plane for plane, _ in self.result.values())) if apart else nodes,
            finished=tuple(planes for wave in waves for planes in _outermost(wave)) if apart else (),
        )
        convolutions = [conv for stages in self.kinds.values() for stage in stages for conv in stage.factors]
        return FusedCell(program, self._recipes(), tuple(convolutions), tuple(self.norms))

    def _recipes(self) -> tuple[Recipe, ...]:
        """Factors have the order of the flat weights; a depthwise factor precedes its pointwise factor."""
        recipes, at, target = [], 0, 0
        for (order, window), stages in self.kinds.items():
            for stage in stages:
                sizes = [conv.weight.numel() for conv in stage.factors]
                matrix = at + sizes[0] if _KINDS[order] is Kind.PRODUCT else at
                recipes.append(Recipe(_KINDS[order], window.taps, matrix, at, target))
                at += sum(sizes)
                target += self._length((order, window))
        return tuple(recipes)

    def _draft(self, sources: tuple[int, ...]):  # type: ignore[no-untyped-def]
        """Assigns planes to all outgoing operations of `sources`: two-stage convolutions, other convolutions, pools."""
        modules: dict[int, dict[int, nn.Module]] = {s: {} for s in sources}
        for e in self.entries:
            if e.source in modules and e.module is not None and not isinstance(e.module, nn.Identity):
                modules[e.source].setdefault(id(e.module), e.module)
        convs: dict[tuple[int, Window], dict[int, list[tuple[nn.Module, tuple[_Stage, ...]]]]] = {}
        pooling: dict[int, list[nn.Module]] = {}
        for source, own in modules.items():
            for module in own.values():
                stages = _stages(module)
                if stages is not None:
                    self._check(stages, source)
                    by_source = convs.setdefault((stages[0].order, stages[0].window), {})
                    by_source.setdefault(source, []).append((module, stages))
                elif pool_of(module) is not None:
                    pooling.setdefault(source, []).append(module)
                else:
                    raise Unfit(f"{type(module).__name__} has no fused form")
        first, twice, start = [], [], self.planes
        # Order 0, the first half of separable convolutions, comes first: `inner` is one range of planes.
        for key in sorted(convs, key=lambda key: (key[0], key[1].size, key[1].dilation)):
            for source, members in convs[key].items():
                first.append(self._stack(key, source, [stages[0] for _, stages in members]))
                for i, (module, stages) in enumerate(members):
                    plane = first[-1][2] + i
                    if len(stages) == 2:
                        twice.append((plane, module, stages[1]))
                    else:
                        self.result[id(module)] = (plane, True)
        inner = range(start, start + len(twice))
        pools, measured = self._pools(pooling, start)
        second_start = self.planes
        second = []
        for plane, module, stage in twice:
            second.append(self._stack((stage.order, stage.window), plane, [stage]))
            self.result[id(module)] = (second[-1][2], True)
        return sources, first, second, pools, inner, measured, range(second_start, self.planes)

    def _stack(self, key: tuple[int, Window], source: int, stages: list[_Stage]) -> tuple[tuple[int, Window], int, int]:
        known = self.kinds.setdefault(key, [])
        first = self.planes
        self.pending.append((key, source, first, len(stages), len(known)))
        known.extend(stages)
        self.norms.extend((first + i, stage.norm) for i, stage in enumerate(stages))
        self.planes += len(stages)
        return key, source, first

    def _pools(self, pooling: dict[int, list[nn.Module]], start: int) -> tuple[tuple[Pool, ...], range]:
        """Pools that a norm follows come first, so that all measured planes are one range."""
        places: dict[tuple[int, bool], int] = {}
        measured = range(start, self.planes)
        members = [(source, module) for source, modules in pooling.items() for module in modules]
        for wants_norm in (True, False):
            for source, module in members:
                found = pool_of(module)
                assert found is not None
                inner, norm = found
                if (norm is not None) != wants_norm:
                    continue
                if inner.stride != self._stride(source):
                    raise Unfit(f"an outgoing pool of node {source} has stride {inner.stride}")
                key = (source, isinstance(inner, nn.MaxPool2d))
                if key in places:
                    raise Unfit(f"node {source} has two pools of one kind")
                places[key] = self.planes
                self.result[id(module)] = (self.planes, norm is not None)
                if norm is not None:
                    self.norms.append((self.planes, norm))
                self.planes += 1
            if wants_norm:
                measured = range(start, self.planes)
        pools = []
        for source in pooling:
            largest, average = places.get((source, True), NONE), places.get((source, False), NONE)
            pools.append(Pool(source, largest, average, self.slots if largest != NONE else 0, self._stride(source)))
            self.slots += largest != NONE
        return tuple(pools), measured

    def _stride(self, source: int) -> int:
        return self.stride if source < self.inputs else 1

    def _check(self, stages: tuple[_Stage, ...], source: int) -> None:
        if stages[0].window.stride != self._stride(source):
            raise Unfit(f"an outgoing convolution of node {source} has stride {stages[0].window.stride}")
        if self.affine and len(stages) > 1:
            raise Unfit("a batch-norm between two convolutions has scale and shift")
        for stage in stages:
            weights = [conv.weight for conv in stage.factors]
            if any(conv.bias is not None for conv in stage.factors) or stage.norm.num_features != self.channels:
                raise Unfit("a convolution has a bias or another width")
            assert all(w.shape[0] <= self.channels for w in weights)

    def _identities(self, source: int) -> tuple[tuple[int, int, int], ...]:
        mine = (e for e in self.entries if e.source == source and isinstance(e.module, nn.Identity))
        return tuple((e.target, e.weight, e.choice) for e in mine)

    def _terms(self) -> tuple[tuple[Term, ...], ...]:
        """Gradients reach the last node first, so it initialises gradients of shared planes; others add to them."""
        seen: set[int] = set()
        scales = {plane: 1 + 2 * i for i, (plane, _) in enumerate(self.norms)}
        found: list[tuple[Term, ...]] = []
        for node in reversed(range(self.inputs, self.nodes)):
            terms = []
            for e in self.entries:
                if e.target != node or e.module is None:
                    continue
                if isinstance(e.module, nn.Identity):
                    if self._stride(e.source) != 1:
                        raise Unfit("an outgoing identity of a node has stride 2")
                    terms.append(Term(e.source, e.weight, normed=False, choice=e.choice, through=True))
                    continue
                plane, normed = self.result[id(e.module)]
                if self.affine and normed and plane in seen:
                    raise Unfit("edges share a batch-norm with scale and shift")
                weight = scales[plane] if self.affine and normed else e.weight
                terms.append(Term(plane, weight, normed, e.choice, adds=plane in seen))
                seen.add(plane)
            found.insert(0, tuple(terms))
        return tuple(found)

    def _length(self, key: tuple[int, Window]) -> int:
        return self.channels * key[1].taps * self.channels

    def _offsets(self) -> dict[tuple[int, Window], int]:
        offsets, total = {}, 0
        for key, stages in self.kinds.items():
            offsets[key] = total
            total += len(stages) * self._length(key)
        return offsets

    def _eps(self) -> float:
        """The common value of all norms; it must be the same for all."""
        norms = [norm for _, norm in self.norms]
        if any(n.affine != self.affine or not n.track_running_stats for n in norms):
            others = "no scale and shift" if self.affine else "scale and shift"
            raise Unfit(f"a batch-norm has {others}, or keeps no running statistics")
        if len({(n.eps, n.momentum) for n in norms}) > 1:
            raise Unfit("the batch-norms differ in eps or momentum")
        return norms[0].eps


def _outermost(wave: Wave) -> list[range]:
    """The planes that are followed by a norm."""
    return [planes for planes in (range(wave.inner.stop, wave.measured.stop), wave.measured_second) if planes]
