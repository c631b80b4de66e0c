"""Plans mixed cells as one program of `softcell.kernels`.

`plan` creates a `FusedCell` from a cell's live candidates, or raises the reason why their modules must run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import nn

from softcell.kernels.cell import Program, Wave
from softcell.kernels.norm import Term
from softcell.kernels.pool import NONE, Pool
from softcell.kernels.taps import Group, Kind, Recipe, Window
from softcell.nn.conv import AveragePool, DilatedConv, FactorisedReduction, ReLUConvBN, SeparableConv
from softcell.spaces._fused_cell import FusedCell, Norms


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
