"""The NAS-Bench-201 space: one cell of four nodes and six edges, five candidates, 15,625 architectures.

Dong, Yang: NAS-Bench-201: Extending the Scope of Reproducible Neural Architecture Search, ICLR 2020. Three stages of
`cells_per_stage` cells at 16, 32 and 64 channels, a residual block with stride 2 between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from torch import Tensor, nn

from softcell.arch import Choice, Genotype, Layout, Mix, StrongestEach, Table
from softcell.errors import UserError
from softcell.kernels.backend import compute_type
from softcell.nn.candidates import Spec, get_candidate
from softcell.nn.conv import ReLUConvBN
from softcell.nn.fused_convs import FusedConvs
from softcell.nn.norm import BatchNorm2d
from softcell.nn.stack import has_hooks
from softcell.spaces._affine_cells import RunCell, fused_pass
from softcell.spaces._executors import mixed_pass
from softcell.spaces.base import Network, Shape, Space, Supernet, global_pool, register_space
from softcell.spaces.cell import MixedCell, PickedCell
from softcell.spaces.edges import SpecOf, check_ratios
from softcell.spaces.execution import plan_around, plan_network

CANDIDATES = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
STAGES = 3


@register_space
@dataclass(frozen=True)
class NB201Space(Space):
    """NAS-Bench-201 cells: `cells_per_stage` in each of three stages, `channels` wide in the first."""

    name: ClassVar[str] = "nb201"
    about: ClassVar[str] = "NAS-Bench-201: 4 nodes, 6 edges, 5 candidates; 15,625 cells with known accuracies"
    small: ClassVar[dict[str, Any]] = {"cells_per_stage": 1, "channels": 8}
    evaluation: ClassVar[dict[str, dict[str, Any]]] = {
        "small": {"cells_per_stage": 1, "channels": 16},
        "cifar": {"cells_per_stage": 5, "channels": 16},
    }
    search_only: ClassVar[frozenset[str]] = frozenset({"share_features", "bottleneck", "partial_channels"})

    cells_per_stage: int = 5
    channels: int = 16
    nodes: int = 4
    candidates: tuple[str, ...] = CANDIDATES
    share_features: bool = False
    """In the supernet one weight set per source node and candidate instead of one per edge (EnTranNAS, Eq 6)."""
    bottleneck: int = 1
    """In the supernet candidates work on this many times fewer channels (EnTranNAS, §2.5: 4); 1: on all of them."""
    partial_channels: int = 1
    """In the supernet candidates work on the first 1/K of the channels, the others bypass them (PC-DARTS: K = 4)."""

    def __post_init__(self) -> None:
        for name, least in (("cells_per_stage", 1), ("channels", 1), ("nodes", 2)):
            if getattr(self, name) < least:
                raise UserError(f"`{name} >= {least}` must hold, but got {name}={getattr(self, name)}")
        check_ratios(self.channels, self.bottleneck, self.partial_channels)
        for op in self.candidates:
            get_candidate(op)

    def layout(self) -> Layout:
        choices = tuple(
            Choice(source, target, self.candidates) for target in range(1, self.nodes) for source in range(target)
        )
        return Layout(
            space=self.name,
            tables=(Table("cell", choices, output=(self.nodes - 1,)),),
            sites=("cell",) * (STAGES * self.cells_per_stage),
            rule=StrongestEach(),
        )

    def supernet(self, shape: Shape, num_classes: int) -> Supernet:
        return NB201Supernet(self, shape, num_classes)

    def network(
        self,
        genotype: Genotype,
        shape: Shape,
        num_classes: int,
        *,
        search_form: bool = False,
        auxiliary: bool = False,
    ) -> Network:
        _check_cell(genotype)
        if auxiliary:
            raise UserError("networks of NAS-Bench-201 have no auxiliary tower; set auxiliary=0")
        return NB201Network(self, genotype, shape, num_classes, search_form=search_form)


def _check_cell(genotype: Genotype) -> None:
    """Raises `UserError` unless there is one cell with one output and no duplicate: parts would be ignored."""
    if set(genotype.cells) != {"cell"}:
        raise UserError(f"a NAS-Bench-201 genotype has one cell, named 'cell', got {sorted(genotype.cells)}")
    cell = genotype.cells["cell"]
    # The last node may have lost all its edges to a learned topology; no node beyond it exists.
    last = max((pick.target for pick in cell.picks), default=0) + 1
    if len(cell.output) != 1 or cell.output[0] > last:
        raise UserError(
            f"a NAS-Bench-201 cell ends in its last node, but this one has edges up to node {last - 1} and the output "
            f"{list(cell.output)}"
        )
    twice = next((pick for pick in cell.picks if cell.picks.count(pick) > 1), None)
    if twice is not None:
        raise UserError(f"a NAS-Bench-201 cell has every operation of an edge once, but {twice} is a duplicate")


class ResidualReduction(nn.Module):
    """The fixed block between stages: two 3×3 convolutions, the first with stride 2, and a pooled 1×1 shortcut."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.first = ReLUConvBN(c_in, c_out, 3, stride=2)
        self.second = ReLUConvBN(c_out, c_out, 3)
        # ceil_mode only matters at odd sizes, where the convolution's output is rounded up too
        self.shortcut = nn.Sequential(
            nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False), nn.Conv2d(c_in, c_out, 1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.second(self.first(x))  # type: ignore[no-any-return]

    def fused(self, x: Tensor, convs: FusedConvs) -> Tensor:
        """The same, x [n, c, h, w], with fewer launches."""
        pool, widen = self.shortcut
        y = convs.run(self.first, x, relu=True)
        return convs.run_activated(self.second, y, shortcut=convs.run(widen, pool(x)))


class Skeleton(nn.Module):
    """Everything around the cells: stem, reductions, last norm and classifier."""

    def __init__(self, space: NB201Space, shape: Shape, num_classes: int) -> None:
        super().__init__()
        widths = [space.channels * 2**stage for stage in range(STAGES)]
        self.stem = nn.Sequential(nn.Conv2d(shape[0], widths[0], 3, padding=1, bias=False), BatchNorm2d(widths[0]))
        self.reductions = nn.ModuleList(ResidualReduction(a, b) for a, b in pairwise(widths))
        self.last = nn.Sequential(BatchNorm2d(widths[-1]), nn.ReLU())
        self.classifier = nn.Linear(widths[-1], num_classes)

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(global_pool(self.last(features)))  # type: ignore[no-any-return]

    def fused_convs(self, x: Tensor) -> FusedConvs | None:
        """What runs stem and reductions in a pass over x [n, c, h, w] with fewer launches; None: module by module."""
        if not (self.training and plan_around(x)):
            return None
        reductions = [m for m in self.reductions if isinstance(m, ResidualReduction)]
        blocks = [block for m in reductions for block in (m.first, m.second, m.shortcut[1])]
        return FusedConvs([self.stem, *blocks], compute_type(x))


def _stage_specs(space: NB201Space, *, affine: bool) -> list[SpecOf]:
    """One entry per cell; every edge of a cell has stride 1."""

    def spec_of(width: int) -> SpecOf:
        return lambda source: Spec(width, 1, affine=affine, pool_norm=False)

    return [spec_of(space.channels * 2**stage) for stage in range(STAGES) for _ in range(space.cells_per_stage)]


class NB201Supernet(Supernet):
    def __init__(self, space: NB201Space, shape: Shape, num_classes: int) -> None:
        super().__init__(space, shape, num_classes)
        self.skeleton = Skeleton(space, shape, num_classes)
        table = self.layout.tables[0]
        self.cells = nn.ModuleList(
            MixedCell(
                table,
                1,
                spec,
                share_features=space.share_features,
                bottleneck=space.bottleneck,
                partial=space.partial_channels,
            )
            for spec in _stage_specs(space, affine=False)
        )
        self._per_stage = space.cells_per_stage

    def features(self, x: Tensor, mix: Mix) -> list[Tensor]:
        convs = self.skeleton.fused_convs(x)
        x = self.skeleton.stem(x) if convs is None else convs.run(self.skeleton.stem, x)
        stages = []
        with mixed_pass(self.cells, mix, x):  # type: ignore[arg-type]
            for site, cell in enumerate(self.cells):
                if site and site % self._per_stage == 0:
                    stages.append(x)
                    reduction = self.skeleton.reductions[len(stages) - 1]
                    assert isinstance(reduction, ResidualReduction)
                    x = reduction(x) if convs is None or has_hooks(reduction) else reduction.fused(x, convs)
                x = cell([x], mix, site)[-1]
        return [*stages, x]

    def head(self, features: Tensor) -> Tensor:
        return self.skeleton.head(features)


class NB201Network(Network):
    needs_dry_pass = True

    def __init__(
        self, space: NB201Space, genotype: Genotype, shape: Shape, num_classes: int, *, search_form: bool
    ) -> None:
        super().__init__(genotype, shape, num_classes)
        self.skeleton = Skeleton(space, shape, num_classes)
        self.cells = nn.ModuleList(
            PickedCell(
                genotype.cells["cell"],
                1,
                spec,
                self.drop_path,
                share_features=space.share_features and search_form,
                bottleneck=space.bottleneck if search_form else 1,
                partial=space.partial_channels if search_form else 1,
            )
            for spec in _stage_specs(space, affine=not search_form)
        )
        self._per_stage = space.cells_per_stage

    def features(self, x: Tensor) -> list[Tensor]:
        x = self.skeleton.stem(x)
        if not plan_network(x):
            return self._run(x, list(self.cells))
        with fused_pass(self.cells, x) as cells:  # type: ignore[arg-type]
            return self._run(x, cells)

    def has_fused_cells(self) -> list[bool]:
        return [isinstance(cell, PickedCell) and cell.fused_affine() is not None for cell in self.cells]

    def _run(self, x: Tensor, cells: Sequence[RunCell]) -> list[Tensor]:
        stages: list[Tensor] = []
        for site, cell in enumerate(cells):
            if site and site % self._per_stage == 0:
                stages.append(x)
                x = self.skeleton.reductions[len(stages) - 1](x)
            x = cell([x])[-1]
        return [*stages, x]

    def head(self, features: Tensor) -> Tensor:
        return self.skeleton.head(features)
