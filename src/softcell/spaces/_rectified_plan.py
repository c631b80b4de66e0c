"""Derived cells whose norms and ReLUs follow the convolutions, as programs of `softcell.kernels.cell`.

These are the cells of NAS-Bench-1Shot1. The kernels apply ReLU to what a convolution reads, and a node of a program is
a sum of normalised planes. Two facts make such cells programs all the same:

- The output of convolution, norm and ReLU is a node of its own, with that one input, that stores max(γ·ŷ + β, 0)
  (`Program.rectified`). Drop-path's factors are not negative, so they may be applied before the ReLU.
- The ReLU that convolutions apply changes nothing, since no value that they read is negative: inputs of the cell,
  ReLUs, and maxima, means and sums of them are not. Its gradient mask is left out.

Convolutions without a norm (`link_1x1`) may give negative values. They may only lead to nodes that nothing else reads.

Program nodes are not those of the cell. A node that only repeats another is none, and a sum that has the output of a
ReLU as one of several inputs reads a node that the cell does not have. These classes own no parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from softcell.kernels.cell import Program, Wave
from softcell.kernels.norm import Term
from softcell.kernels.pool import NONE, Pool
from softcell.kernels.taps import Group, Kind, Recipe, Window
from softcell.nn.conv import ConvBNReLU
from softcell.nn.stochastic import DropPath
from softcell.spaces._affine_cells import AffineCell
from softcell.spaces._fused_cell import FusedCell
from softcell.spaces._fused_plan import Unfit, pool_of

Edge = tuple[int, int, nn.Module]
"""Source, target and module of a pick that is not zero."""


def plan_rectified(picks: Iterable[Edge], inputs: int, nodes: int, channels: int, drop_path: DropPath) -> AffineCell:
    """The fused form of a derived cell whose inputs are not negative; raises `Unfit` with the reason if there is none.

    All operations have stride 1. Drop-path's factors are numbered node by node, as modules draw them.
    """
    return _Planner(list(picks), inputs, nodes, channels, drop_path).build()


@dataclass(slots=True)
class _Node:
    """A node of the program. inputs: picks, as (number of the pick, source, choice), or nodes, as (NONE, node, 0)."""

    inputs: list[tuple[int, int, int]] = field(default_factory=list)
    rectified: bool = False


class _Planner:
    def __init__(self, picks: list[Edge], inputs: int, nodes: int, channels: int, drop_path: DropPath) -> None:
        self.picks, self.inputs, self.channels, self.drop_path = picks, inputs, channels, drop_path
        self.nodes = [_Node() for _ in range(inputs)]
        self.number = list(range(inputs))  # of the program's node, by the cell's
        self.paths = 0
        self._check()
        for node in range(inputs, nodes):
            self._add(node)
        self.planes, self.size, self.slots = len(self.nodes), 0, 0
        self.norms: list[tuple[int, nn.BatchNorm2d]] = []
        self.convolutions: list[nn.Conv2d] = []
        self.recipes: list[Recipe] = []
        self.result: dict[int, tuple[int, bool]] = {}  # pick: (its output plane, normed)

    def _check(self) -> None:
        learned = [id(module) for *_, module in self.picks if any(True for _ in module.parameters())]
        if len(set(learned)) < len(learned):
            raise Unfit("edges share a module")
        signed = {target for _, target, module in self.picks if type(module) is nn.Conv2d}
        if any(source in signed for source, *_ in self.picks):
            raise Unfit("a node that may be negative is the input of another")
        norms = [module[1] for *_, module in self.picks if type(module) is ConvBNReLU]
        if not norms:
            raise Unfit("the cell has no convolution with a norm")
        if not all(norm.affine and norm.track_running_stats for norm in norms):
            raise Unfit("a batch-norm has no scale and shift, or keeps no running statistics")
        if len({(norm.eps, norm.momentum) for norm in norms}) > 1:
            raise Unfit("the batch-norms differ in eps or momentum")

    def _add(self, node: int) -> None:
        """Adds the program's nodes for one of the cell."""
        own: list[tuple[int, int, int]] = []
        rectified: list[bool] = []
        for number, (source, target, module) in enumerate(self.picks):
            if target == node:
                dropped = not isinstance(module, nn.Identity)
                self.paths += dropped
                own.append((number, self.number[source], self.paths if dropped else 0))
                rectified.append(type(module) is ConvBNReLU)
        if len(own) == 1 and own[0][2] == 0:  # it repeats another node
            self.number.append(own[0][1])
            return
        if len(own) > 1:
            for i in [i for i, has_relu in enumerate(rectified) if has_relu]:
                self.nodes.append(_Node([own[i]], rectified=True))
                own[i] = NONE, len(self.nodes) - 1, 0
        self.number.append(len(self.nodes))
        self.nodes.append(_Node(own, rectified=rectified == [True]))

    def build(self) -> AffineCell:
        first = [self._wave(tuple(range(self.inputs)))]
        waves = [*first, *(self._wave((node,)) for node in range(self.inputs, len(self.nodes)))]
        kept = tuple(dict.fromkeys(node for node in self.number if node >= self.inputs))
        program = Program(
            self.channels,
            self.inputs,
            len(self.nodes),
            self.planes,
            1,
            self.size,
            self.slots,
            tuple(wave for wave in waves if wave is not None),
            self._terms(),
            self.norms[0][1].eps,
            results=kept,
            rectified=frozenset(i for i, node in enumerate(self.nodes) if node.rectified),
        )
        cell = FusedCell(program, tuple(self.recipes), tuple(self.convolutions), tuple(self.norms))
        returned = {node: self.inputs + i for i, node in enumerate(kept)}
        places = tuple(returned.get(node, node) for node in self.number)
        return AffineCell(cell, self.drop_path, self.paths, places)

    def _wave(self, sources: tuple[int, ...]) -> Wave | None:
        """Assigns planes to all outgoing operations of nodes: those that a norm follows, other convolutions, pools."""
        start = self.planes
        leaving = [
            (number, s) for node in self.nodes for number, s, _ in node.inputs if number != NONE and s in sources
        ]
        convs: dict[tuple[bool, int, Window], list[int]] = {}
        pools: list[tuple[int, int]] = []
        for number, source in leaving:
            module = self.picks[number][2]
            if type(module) in (ConvBNReLU, nn.Conv2d):
                normed = type(module) is ConvBNReLU
                window = self._window(module[0] if normed else module)  # type: ignore[index, arg-type]
                convs.setdefault((not normed, source, window), []).append(number)
            elif not isinstance(module, nn.Identity):
                pools.append((number, source))
        groups, measured = [], start
        for unnormed, source, window in sorted(convs, key=lambda key: key[:2]):
            groups.append(self._group(source, window, convs[unnormed, source, window]))
            measured = measured if unnormed else self.planes
        found = self._pools(pools)
        identities = tuple(self._identities(source) for source in sources)
        if not (groups or found or any(identities)):
            return None
        empty = range(0)
        return Wave(sources, tuple(groups), (), found, empty, range(start, measured), empty, identities)

    def _window(self, conv: nn.Conv2d) -> Window:
        size = conv.kernel_size[0]
        fits = (conv.in_channels, conv.out_channels, conv.groups) == (self.channels, self.channels, 1)
        same = (conv.kernel_size, conv.padding) == ((size, size), (size // 2, size // 2)) and size % 2 == 1
        if not (fits and same and conv.bias is None and (conv.stride, conv.dilation) == ((1, 1), (1, 1))):
            raise Unfit("a convolution has a bias, a stride or another width")
        return Window(size, 1, size // 2, 1)

    def _group(self, source: int, window: Window, members: Sequence[int]) -> Group:
        group = Group(window, source, self.planes, len(members), self.size)
        for number in members:
            module = self.picks[number][2]
            conv = module
            if type(module) is ConvBNReLU:
                conv, norm = module[0], module[1]
                assert isinstance(norm, nn.BatchNorm2d)
                self.norms.append((self.planes, norm))
            assert isinstance(conv, nn.Conv2d)
            self.result[number] = self.planes, conv is not module
            self.convolutions.append(conv)
            self.recipes.append(Recipe(Kind.COPY, window.taps, self.size, self.size, self.size))
            self.planes += 1
            self.size += self.channels * window.taps * self.channels
        return group

    def _pools(self, pools: Sequence[tuple[int, int]]) -> tuple[Pool, ...]:
        """One pool of each kind for a source, whatever the number of its readers: they have no weights."""
        planes: dict[int, dict[bool, int]] = {}
        for number, source in pools:
            module = self.picks[number][2]
            found = pool_of(module)
            if found is None or found[1] is not None:
                raise Unfit(f"{type(module).__name__} has no fused form")
            if found[0].stride not in (1, (1, 1)):
                raise Unfit("a pool has a stride")
            own, largest = planes.setdefault(source, {}), isinstance(found[0], nn.MaxPool2d)
            if largest not in own:
                own[largest] = self.planes
                self.planes += 1
            self.result[number] = own[largest], False
        made = []
        for source, own in planes.items():
            made.append(Pool(source, own.get(True, NONE), own.get(False, NONE), self.slots if True in own else 0, 1))
            self.slots += True in own
        return tuple(made)

    def _identities(self, source: int) -> tuple[tuple[int, int, int], ...]:
        targets = [i for i, node in enumerate(self.nodes) for one in node.inputs if self._is_node(one, source)]
        return tuple((target, 0, 0) for target in targets)

    def _is_node(self, one: tuple[int, int, int], source: int) -> bool:
        number, own, _ = one
        return own == source and (number == NONE or isinstance(self.picks[number][2], nn.Identity))

    def _terms(self) -> tuple[tuple[Term, ...], ...]:
        """Gradients reach the last node first, so it initialises gradients of shared planes; others add to them."""
        scales = {plane: 1 + 2 * i for i, (plane, _) in enumerate(self.norms)}
        seen: set[int] = set()
        found: list[tuple[Term, ...]] = []
        for node in reversed(self.nodes[self.inputs :]):
            terms = []
            for number, source, choice in node.inputs:
                if number not in self.result:
                    terms.append(Term(source, 0, normed=False, through=True))
                    continue
                plane, normed = self.result[number]
                terms.append(Term(plane, scales.get(plane, 0), normed, choice, adds=plane in seen))
                seen.add(plane)
            found.insert(0, tuple(terms))
        return tuple(found)
