"""The three spaces of NAS-Bench-1Shot1: parts of NAS-Bench-101 in which weights can be shared.

Zela, Siems, Hutter: NAS-Bench-1Shot1, ICLR 2020. A cell has an input, four or five choice blocks and an output. Every
block chooses an operation and a fixed number of parents among the nodes before it; the output chooses parents among
all of them. A block sums its parents; the output concatenates its parents. Three stacks of three cells,
with max-pooling and twice the width between stacks.

Convolving concatenated maps with a 1×1 kernel equals convolving each map with its part of the kernel and adding the
results. The edges of the output hold those parts, so that supernet and derived network compute the same function, and
an absent parent has no edge. Deviation: the cell's input is projected once, not once for every block that reads it, and
blocks do not divide the output's width among them; channel counts are therefore not exactly those of NAS-Bench-101.

A table has one choice per edge and one per block. Its nodes:

    node 0             input
    nodes 2b-1, 2b     block b: the sum of its parents, and its operation on that sum
    last node          output

An edge from a node to a block's sum has the candidates `none` and `skip_connect`, one to the output `none` and
`link_1x1`: whether the node is a parent. The edge from a block's sum to the block has its operations. The edges into a
node compete (`Table.contests`): as in the authors' code, there is one softmax over the parents of each block and one
over the parents of the output. The rule keeps the parents whose edges are strongest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, prod
from typing import Any, ClassVar

from torch import Tensor, nn

from softcell.arch import Choice, Genotype, Layout, Mix, Pick, Table, TopInputs
from softcell.errors import UserError
from softcell.nn.candidates import Spec, candidate, get_candidate
from softcell.nn.conv import ConvBNReLU
from softcell.nn.norm import BatchNorm2d
from softcell.spaces._affine_cells import RunCell, fused_pass
from softcell.spaces.base import Network, Shape, Space, Supernet, global_pool, register_space
from softcell.spaces.cell import MixedCell, PickedCell
from softcell.spaces.edges import SpecOf
from softcell.spaces.execution import plan_network

OPERATIONS = ("conv_1x1", "conv_3x3", "max_pool_3x3")
GAP, LINK, LAST = "none", "skip_connect", "link_1x1"
STACKS = 3


@candidate("conv_1x1")
def conv_1x1(spec: Spec) -> nn.Module:
    return ConvBNReLU(spec.channels, spec.channels, 1, stride=spec.stride, affine=spec.affine)


@candidate("conv_3x3")
def conv_3x3(spec: Spec) -> nn.Module:
    return ConvBNReLU(spec.channels, spec.channels, 3, stride=spec.stride, affine=spec.affine)


@candidate("link_1x1")
def link_1x1(spec: Spec) -> nn.Module:
    """A part of the 1×1 convolution over concatenated maps: the sum of these parts is that convolution."""
    return nn.Conv2d(spec.channels, spec.channels, 1, spec.stride, bias=False)


@dataclass(frozen=True)
class Parents(TopInputs):
    """Keeps `per_node` inputs of a node, one for other nodes; each with its strongest candidate except `none`."""

    inputs: int = 1
    per_node: tuple[tuple[int, int], ...] = ()

    def _kept(self, table: Table, target: int) -> int:
        return min(dict(self.per_node).get(target, self.inputs), len(table.incoming(target)))

    def complete(self, table: Table, strengths: Tensor, picks: tuple[Pick, ...]) -> tuple[Pick, ...]:
        """Nodes in `per_node` get that number of parents, whichever rule chose the other picks."""
        nodes = dict(self.per_node)
        own = [pick for pick in picks if pick.target not in nodes]
        own += [pick for pick in self(table, strengths) if pick.target in nodes]
        return tuple(sorted(own, key=lambda pick: (pick.target, pick.source)))


@dataclass(frozen=True)
class _OneShot1(Space):
    """Base of the three spaces; `parents` of blocks 1, 2, … and of the output, `published` architectures."""

    parents: ClassVar[tuple[int, ...]]
    published: ClassVar[int]
    small: ClassVar[dict[str, Any]] = {"cells_per_stack": 1, "channels": 8}
    evaluation: ClassVar[dict[str, dict[str, Any]]] = {
        "small": {"cells_per_stack": 1, "channels": 16},
        "cifar": {"cells_per_stack": 3, "channels": 128},
    }

    cells_per_stack: int = 3
    channels: int = 16

    def __post_init__(self) -> None:
        for name in ("cells_per_stack", "channels"):
            if getattr(self, name) < 1:
                raise UserError(f"`{name} >= 1` must hold, but got {name}={getattr(self, name)}")

    @property
    def blocks(self) -> int:
        return len(self.parents) - 1

    @property
    def output(self) -> int:
        return 2 * self.blocks + 1

    def layout(self) -> Layout:
        choices: list[Choice] = []
        before = [0]
        for block in range(1, self.blocks + 1):
            gathered = 2 * block - 1
            choices += [Choice(source, gathered, (GAP, LINK)) for source in before]
            choices.append(Choice(gathered, gathered + 1, OPERATIONS))
            before.append(gathered + 1)
        choices += [Choice(source, self.output, (GAP, LAST)) for source in before]
        rule = Parents(per_node=tuple(zip(self.gathering(), self.parents, strict=True)))
        into = [tuple(i for i, choice in enumerate(choices) if choice.target == node) for node in self.gathering()]
        table = Table("cell", tuple(choices), output=(self.output,), contests=tuple(into))
        return Layout(self.name, (table,), ("cell",) * (STACKS * self.cells_per_stack), rule)

    def gathering(self) -> list[int]:
        """The nodes that have parents: the sums of the blocks, and the output."""
        return [*(2 * block - 1 for block in range(1, self.blocks + 1)), self.output]

    def remarks(self, num_classes: int = 10) -> tuple[str, ...]:
        # Space 3 has 1.3 million architectures, too many to compare for a line of `softcell info`.
        if self.blocks > 4:
            ours = f"raw {raw_count(self.parents):,} (others: python -m softcell.spaces.oneshot1)"
        else:
            found = counts(self.parents)
            ours = f"raw {found.raw:,}, without loose ends {found.connected:,}, up to isomorphism {found.isomorphic:,}"
        return (f"architectures by rule: {ours}; published {self.published:,}, by a rule that is not stated",)

    def supernet(self, shape: Shape, num_classes: int) -> Supernet:
        return OneShot1Supernet(self, shape, num_classes)

    def network(
        self,
        genotype: Genotype,
        shape: Shape,
        num_classes: int,
        *,
        search_form: bool = False,
        auxiliary: bool = False,
    ) -> Network:
        if set(genotype.cells) != {"cell"}:
            raise UserError(f"a genotype of {self.name} needs one cell named 'cell', got {sorted(genotype.cells)}")
        if auxiliary:
            raise UserError("networks of NAS-Bench-1Shot1 have no auxiliary tower; set auxiliary=0")
        for pick in genotype.cells["cell"].picks:
            get_candidate(pick.op)
        return OneShot1Network(self, genotype, shape, num_classes, search_form=search_form)


class Frame(nn.Module):
    """The parts outside the cells: stem, projections of cell inputs, norms of cell outputs, classifier."""

    def __init__(self, space: _OneShot1, shape: Shape, num_classes: int, *, affine: bool) -> None:
        super().__init__()
        widths = [width for width in _stack_widths(space) for _ in range(space.cells_per_stack)]
        self.stem = ConvBNReLU(shape[0], space.channels, 3, affine=affine)
        before = [space.channels, *widths[:-1]]
        self.inputs = nn.ModuleList(ConvBNReLU(a, b, 1, affine=affine) for a, b in zip(before, widths, strict=True))
        self.outputs = nn.ModuleList(nn.Sequential(BatchNorm2d(width, affine=affine), nn.ReLU()) for width in widths)
        # ceil_mode only matters for odd sizes: no pixels are cut off
        self.pool = nn.MaxPool2d(2, 2, ceil_mode=True)
        self.classifier = nn.Linear(widths[-1], num_classes)

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(global_pool(features))  # type: ignore[no-any-return]


def _stack_widths(space: _OneShot1) -> list[int]:
    return [space.channels * 2**stack for stack in range(STACKS)]


def _cell_specs(space: _OneShot1, *, affine: bool) -> list[SpecOf]:
    """One entry per cell; every edge of a cell has stride 1."""

    def spec_of(width: int) -> SpecOf:
        return lambda source: Spec(width, 1, affine=affine)

    return [spec_of(width) for width in _stack_widths(space) for _ in range(space.cells_per_stack)]


class OneShot1Supernet(Supernet):
    def __init__(self, space: _OneShot1, shape: Shape, num_classes: int) -> None:
        super().__init__(space, shape, num_classes)
        self.frame = Frame(space, shape, num_classes, affine=False)
        table = self.layout.tables[0]
        self.cells = nn.ModuleList(MixedCell(table, 1, spec) for spec in _cell_specs(space, affine=False))
        self._per_stack = space.cells_per_stack

    def features(self, x: Tensor, mix: Mix) -> list[Tensor]:
        x = self.frame.stem(x)
        stages = []
        for site, cell in enumerate(self.cells):
            if site and site % self._per_stack == 0:
                stages.append(x)
                x = self.frame.pool(x)
            x = self.frame.outputs[site](cell([self.frame.inputs[site](x)], mix, site)[-1])
        return [*stages, x]

    def head(self, features: Tensor) -> Tensor:
        return self.frame.head(features)


class OneShot1Network(Network):
    needs_dry_pass = True

    def __init__(
        self, space: _OneShot1, genotype: Genotype, shape: Shape, num_classes: int, *, search_form: bool
    ) -> None:
        super().__init__(genotype, shape, num_classes)
        self.frame = Frame(space, shape, num_classes, affine=not search_form)
        self.cells = nn.ModuleList(
            PickedCell(genotype.cells["cell"], 1, spec, self.drop_path)
            for spec in _cell_specs(space, affine=not search_form)
        )
        self._per_stack = space.cells_per_stack

    def features(self, x: Tensor) -> list[Tensor]:
        if not plan_network(x):
            return self._run(x, list(self.cells))
        with fused_pass(self.cells, x, rectified=True) as cells:  # type: ignore[arg-type]
            return self._run(x, cells)

    def has_fused_cells(self) -> list[bool]:
        return [isinstance(cell, PickedCell) and cell.fused_rectified() is not None for cell in self.cells]

    def _run(self, x: Tensor, cells: Sequence[RunCell]) -> list[Tensor]:
        x = self.frame.stem(x)
        stages: list[Tensor] = []
        for site, cell in enumerate(cells):
            if site and site % self._per_stack == 0:
                stages.append(x)
                x = self.frame.pool(x)
            x = self.frame.outputs[site](cell([self.frame.inputs[site](x)])[-1])
        return [*stages, x]

    def head(self, features: Tensor) -> Tensor:
        return self.frame.head(features)


@register_space
@dataclass(frozen=True)
class OneShot1Space1(_OneShot1):
    name: ClassVar[str] = "nb1shot1-1"
    about: ClassVar[str] = "NAS-Bench-1Shot1, space 1: 4 choice blocks, 2 parents for most nodes"
    parents: ClassVar[tuple[int, ...]] = (1, 2, 2, 2, 2)
    published: ClassVar[int] = 6240


@register_space
@dataclass(frozen=True)
class OneShot1Space2(_OneShot1):
    name: ClassVar[str] = "nb1shot1-2"
    about: ClassVar[str] = "NAS-Bench-1Shot1, space 2: 4 choice blocks, output with 3 parents"
    parents: ClassVar[tuple[int, ...]] = (1, 1, 2, 2, 3)
    published: ClassVar[int] = 29160


@register_space
@dataclass(frozen=True)
class OneShot1Space3(_OneShot1):
    name: ClassVar[str] = "nb1shot1-3"
    about: ClassVar[str] = "NAS-Bench-1Shot1, space 3: 5 choice blocks"
    parents: ClassVar[tuple[int, ...]] = (1, 1, 1, 2, 2, 2)
    published: ClassVar[int] = 363648


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of architectures in a space, by three rules.

    raw: operations of all blocks times parents of all nodes. connected: those without loose ends, in which every block
    leads to the output. isomorphic: distinct graphs; loose ends are removed, and graphs that differ only in block order
    are counted once.
    """

    raw: int
    connected: int
    isomorphic: int


def raw_count(parents: tuple[int, ...]) -> int:
    """In closed form; node i (from 1) has i nodes before it."""
    operations: int = len(OPERATIONS) ** (len(parents) - 1)
    return operations * prod(comb(i + 1, n) for i, n in enumerate(parents))


def counts(parents: tuple[int, ...]) -> Counts:
    """By enumerating all of them."""
    raw = connected = 0
    labels: dict[object, int] = {}
    graphs: set[tuple[int, ...]] = set()
    output = len(parents)
    for edges in itertools.product(*(itertools.combinations(range(i + 1), n) for i, n in enumerate(parents))):
        kept = _leading(edges, output)
        whole = len(kept) == output - 1
        for ops in itertools.product(range(len(OPERATIONS)), repeat=output - 1):
            raw += 1
            connected += whole
            graphs.add(_canonical(edges, ops, kept, labels))
    return Counts(raw, connected, len(graphs))


def _leading(edges: tuple[tuple[int, ...], ...], output: int) -> tuple[int, ...]:
    """The blocks from which the output is reachable; edges[i] are the parents of node i + 1."""
    reached = {output}
    for node in range(output, 0, -1):
        if node in reached:
            reached |= set(edges[node - 1])
    return tuple(node for node in range(1, output) if node in reached)


def _canonical(
    edges: tuple[tuple[int, ...], ...], ops: tuple[int, ...], kept: tuple[int, ...], labels: dict[object, int]
) -> tuple[int, ...]:
    """A key shared by isomorphic graphs: node labels, refined by those of parents and children until stable.

    This is the Weisfeiler-Leman refinement that NAS-Bench-101 uses to compare graphs; a test checks it by permutations.
    """
    output = len(edges)
    nodes = (0, *kept, output)
    parents = {node: [p for p in edges[node - 1] if p in nodes] if node else [] for node in nodes}
    children: dict[int, list[int]] = {node: [] for node in nodes}
    for node in nodes:
        for parent in parents[node]:
            children[parent].append(node)
    names: dict[int, int] = {0: -1, output: -2, **{block: ops[block - 1] for block in kept}}
    for _ in nodes:
        new = {}
        for node in nodes:
            key = (
                names[node],
                tuple(sorted(names[p] for p in parents[node])),
                tuple(sorted(names[c] for c in children[node])),
            )
            # `labels` is shared by all graphs, so equal keys get equal labels; they start above the operations.
            new[node] = labels.setdefault(key, len(labels) + len(OPERATIONS))
        names = new
    return tuple(sorted(names.values()))


if __name__ == "__main__":
    for number, kind in enumerate((OneShot1Space1, OneShot1Space2, OneShot1Space3), 1):
        found = counts(kind.parents)
        print(
            f"space {number}: raw {found.raw:,}, without loose ends {found.connected:,}, up to isomorphism "
            f"{found.isomorphic:,}; published {kind.published:,}"
        )
