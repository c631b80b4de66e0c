"""The DARTS space: cells with two inputs and four inner nodes, each connected to all nodes before it.

Liu, Simonyan, Yang: DARTS: Differentiable Architecture Search, ICLR 2019. Reduction cells are at 1/3 and 2/3 of the
depth and double the width; all normal cells share one table, all reduction cells another. In the supernet (and in a
network in search form) batch-norm inside cells has no scale and shift and pools are followed by batch-norm; in an
evaluation network batch-norm is affine and pools have none.

Where `none` can be derived (SNAS), a node may lose all its inputs. Deviation: an evaluation network omits such a
node, since its zeros would only cost the layers that read them. The authors of SNAS keep it as zeros, and have affine
batch-norm after pools; `vanished="zeros"` with `pool_norm=True` builds their network.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from softcell.arch import Cell, Choice, Genotype, Layout, Mix, Table, TopInputs
from softcell.arch.genotype import alive
from softcell.errors import UserError
from softcell.kernels.backend import compute_type
from softcell.kernels.schedule import Schedule
from softcell.nn.calibrate import Calibration
from softcell.nn.candidates import Spec, get_candidate
from softcell.nn.conv import AuxiliaryHead, FactorisedReduction, ReLUConvBN, concatenated, dense_gradient
from softcell.nn.fused_convs import FusedConvs
from softcell.nn.norm import BatchNorm2d, updates_together
from softcell.nn.stack import has_hooks
from softcell.spaces._derived_plan import DerivedCell, DerivedPass
from softcell.spaces._executors import mixed_pass
from softcell.spaces._segment_plan import SegmentedCell
from softcell.spaces.base import Network, Shape, Space, Supernet, global_pool, register_space
from softcell.spaces.cell import MixedCell, PickedCell
from softcell.spaces.edges import SpecOf, check_ratios
from softcell.spaces.execution import plan_around, plan_network

CANDIDATES = (
    "none",
    "max_pool_3x3",
    "avg_pool_3x3",
    "skip_connect",
    "sep_conv_3x3",
    "sep_conv_5x5",
    "dil_conv_3x3",
    "dil_conv_5x5",
)
INPUTS = 2


@register_space
@dataclass(frozen=True)
class DartsSpace(Space):
    """DARTS cells: `cells` of them, `channels` wide at the start, with `nodes` inner nodes each."""

    name: ClassVar[str] = "darts"
    about: ClassVar[str] = "DARTS cells: 2 inputs, 4 inner nodes, 14 edges, 8 candidates; normal and reduction cell"
    tiny: ClassVar[dict[str, Any]] = {"nodes": 2}
    small: ClassVar[dict[str, Any]] = {"cells": 4, "channels": 8}
    evaluation: ClassVar[dict[str, dict[str, Any]]] = {
        "small": {"cells": 5, "channels": 16},
        "cifar": {"cells": 20, "channels": 36},
        "imagenet": {"cells": 14, "channels": 48, "stem": "imagenet"},
    }
    has_auxiliary: ClassVar[bool] = True
    search_only: ClassVar[frozenset[str]] = frozenset({"share_features", "bottleneck", "partial_channels"})

    cells: int = 8
    channels: int = 16
    nodes: int = 4
    candidates: tuple[str, ...] = CANDIDATES
    stem: Literal["cifar", "imagenet"] = "cifar"
    stem_multiplier: int = 3
    share_features: bool = False
    """In the supernet, one set of weights per source node and candidate instead of one per edge (EnTranNAS, Eq 6)."""
    bottleneck: int = 1
    """In the supernet, candidates work on this many times fewer channels (EnTranNAS, §2.5: 4); 1: on all of them."""
    partial_channels: int = 1
    """In the supernet, candidates work on the first 1/K of the channels; the others bypass them (PC-DARTS: K = 4)."""
    vanished: Literal["dropped", "zeros"] = "dropped"
    """In the evaluation network, a node that no input reaches is omitted, or kept as zeros (the authors of SNAS)."""
    pool_norm: bool = False
    """In the evaluation network, pools are followed by affine batch-norm (the authors of SNAS), as in supernets."""

    def __post_init__(self) -> None:
        if self.cells < 3:
            raise UserError(f"`cells >= 3` must hold (reduction cells are at 1/3 and 2/3), but got cells={self.cells}")
        for name, least in (("channels", 1), ("nodes", 1), ("stem_multiplier", 1)):
            if getattr(self, name) < least:
                raise UserError(f"`{name} >= {least}` must hold, but got {name}={getattr(self, name)}")
        check_ratios(self.channels, self.bottleneck, self.partial_channels)
        for op in self.candidates:
            get_candidate(op)

    def edge_candidates(self, table: str, source: int, target: int) -> tuple[str, ...]:
        """The candidates of one edge; spaces with other candidates per edge override only this."""
        return self.candidates

    def residual(self, output: tuple[int, ...], genotype: Genotype | None = None) -> tuple[int, ...]:
        """Those of a cell's output nodes that calibrate a surrogate (`softcell.spaces.block`): none in DARTS."""
        return ()

    def layout(self) -> Layout:
        return Layout(
            space=self.name,
            tables=(self._table("normal"), self._table("reduce")),
            sites=tuple("reduce" if self.reduces(i) else "normal" for i in range(self.cells)),
            rule=TopInputs(2, exclude=("none",)),
        )

    def reduces(self, cell: int) -> bool:
        return cell in (self.cells // 3, 2 * self.cells // 3)

    def supernet(self, shape: Shape, num_classes: int) -> Supernet:
        return DartsSupernet(self, shape, num_classes)

    def network(
        self,
        genotype: Genotype,
        shape: Shape,
        num_classes: int,
        *,
        search_form: bool = False,
        auxiliary: bool = False,
    ) -> Network:
        for name in ("normal", "reduce"):
            if name not in genotype.cells:
                raise UserError(
                    f"a genotype for cells like those of DARTS needs a {name!r} cell, got {sorted(genotype.cells)}"
                )
        return DartsNetwork(self, genotype, shape, num_classes, search_form=search_form, auxiliary=auxiliary)

    def _table(self, name: str) -> Table:
        last = INPUTS + self.nodes
        choices = tuple(
            Choice(source, target, self.edge_candidates(name, source, target))
            for target in range(INPUTS, last)
            for source in range(target)
        )
        return Table(name, choices, output=tuple(range(INPUTS, last)))


class Stem(nn.Module):
    """From pixels to the two inputs of the first cell."""

    def __init__(self, space: DartsSpace, in_channels: int) -> None:
        super().__init__()
        width = space.channels
        self.second: nn.Module | None = None
        if space.stem == "cifar":
            self.channels = space.stem_multiplier * width
            self.first: nn.Module = nn.Sequential(
                nn.Conv2d(in_channels, self.channels, 3, padding=1, bias=False), BatchNorm2d(self.channels)
            )
        else:
            self.channels = width
            half = max(1, width // 2)
            self.first = nn.Sequential(
                nn.Conv2d(in_channels, half, 3, stride=2, padding=1, bias=False),
                BatchNorm2d(half),
                nn.ReLU(),
                nn.Conv2d(half, width, 3, stride=2, padding=1, bias=False),
                BatchNorm2d(width),
            )
            self.second = nn.Sequential(
                nn.ReLU(), nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False), BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first(x)
        return first, first if self.second is None else self.second(first)

    def blocks(self) -> list[nn.Module]:
        """What `FusedConvs` runs: a stem of one convolution and its norm."""
        return [self.first] if self.second is None else []

    def fused(self, x: Tensor, convs: FusedConvs) -> tuple[Tensor, Tensor]:
        """The same with fewer launches; x: images [n, c, h, w]."""
        if self.second is not None or has_hooks(self):
            first, second = self(x)
            return first, second
        first = convs.run(self.first, x)
        return first, first


@dataclass(frozen=True, slots=True)
class CellPlan:
    """The position of one cell: its table, width, the widths of its two inputs, and whether the older one is larger."""

    table: str
    width: int
    widths: tuple[int, int]
    older_is_larger: bool

    @property
    def reduces(self) -> bool:
        return self.table == "reduce"


def plan_cells(space: DartsSpace, stem_channels: int, outputs: dict[str, int]) -> list[CellPlan]:
    """Widths and strides cell by cell; `outputs` is the number of nodes each kind of cell concatenates."""
    plans: list[CellPlan] = []
    older = newer = stem_channels
    width, older_is_larger = space.channels, space.stem == "imagenet"  # that stem halves between its two outputs
    for i in range(space.cells):
        reduces = space.reduces(i)
        table = "reduce" if reduces else "normal"
        width = 2 * width if reduces else width
        plans.append(CellPlan(table, width, (older, newer), older_is_larger))
        older, newer, older_is_larger = newer, width * outputs[table], reduces
    return plans


def spec_of(plan: CellPlan, *, search_form: bool, pool_norm: bool = False) -> SpecOf:
    """Stride 2 only on edges from the input nodes of a reduction cell; pool_norm: of evaluation networks."""

    def spec(source: int) -> Spec:
        stride = 2 if plan.reduces and source < INPUTS else 1
        return Spec(plan.width, stride, affine=not search_form, pool_norm=search_form or pool_norm)

    return spec


class Preprocess(nn.Module):
    """Brings a cell's two inputs to its width, and the older one to the resolution of the newer."""

    def __init__(self, plan: CellPlan, *, affine: bool) -> None:
        super().__init__()
        older, newer = plan.widths
        self.older: nn.Module = (
            FactorisedReduction(older, plan.width, affine=affine)
            if plan.older_is_larger
            else ReLUConvBN(older, plan.width, 1, affine=affine)
        )
        self.newer = ReLUConvBN(newer, plan.width, 1, affine=affine)

    def forward(self, older: Tensor, newer: Tensor) -> tuple[Tensor, Tensor]:
        return self.older(older), self.newer(newer)

    def fused(self, older: Tensor, newer: Tensor, convs: FusedConvs) -> tuple[Tensor, Tensor]:
        """The same with fewer launches; older and newer: maps [n, c, h, w]."""
        return convs.run(self.older, older), convs.run(self.newer, newer)


class DartsSupernet(Supernet):
    """Stem, cells that mix all candidates, global pooling and a linear classifier."""

    def __init__(self, space: DartsSpace, shape: Shape, num_classes: int) -> None:
        super().__init__(space, shape, num_classes)
        self.stem = Stem(space, shape[0])
        outputs = {table.name: len(table.output) for table in self.layout.tables}
        self.plans = plan_cells(space, self.stem.channels, outputs)
        self.pre = nn.ModuleList(Preprocess(plan, affine=False) for plan in self.plans)
        self.cells = nn.ModuleList(
            MixedCell(
                self.layout.table(plan.table),
                INPUTS,
                spec_of(plan, search_form=True),
                share_features=space.share_features,
                bottleneck=space.bottleneck,
                partial=space.partial_channels,
                residual=space.residual(self.layout.table(plan.table).output),
            )
            for plan in self.plans
        )
        self.classifier = nn.Linear(self.plans[-1].width * outputs[self.plans[-1].table], num_classes)

    def features(self, x: Tensor, mix: Mix) -> list[Tensor]:
        convs = self._fused_convs(x)
        older, newer = self.stem(x) if convs is None else self.stem.fused(x, convs)
        stages: list[Tensor] = []
        with mixed_pass(self.cells, mix, newer):  # type: ignore[arg-type]
            for site, (plan, pre, cell) in enumerate(zip(self.plans, self.pre, self.cells, strict=True)):
                if plan.reduces:
                    stages.append(newer)
                assert isinstance(pre, Preprocess)
                given = pre(older, newer) if convs is None or has_hooks(pre) else pre.fused(older, newer, convs)
                nodes = cell(given, mix, site)
                older, newer = newer, torch.cat([nodes[n] for n in self.layout.table(plan.table).output], dim=1)
        return [*stages, newer]

    def _fused_convs(self, x: Tensor) -> FusedConvs | None:
        """What runs stem and preprocessing in a pass over x [n, c, h, w] with fewer launches; None: as modules."""
        if not (self.training and plan_around(x)):
            return None
        blocks = [block for pre in self.pre for block in pre.children()]
        return FusedConvs([*self.stem.blocks(), *blocks], compute_type(x))

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(global_pool(features))  # type: ignore[no-any-return]


class DartsNetwork(Network):
    """The network of a DARTS genotype.

    In search form a vanished node (SNAS can drop all its edges) is zeros in the concatenation, as in the supernet; in
    the evaluation form it is omitted, with everything that only it feeds, unless `vanished` is "zeros".
    """

    def __init__(
        self,
        space: DartsSpace,
        genotype: Genotype,
        shape: Shape,
        num_classes: int,
        *,
        search_form: bool,
        auxiliary: bool,
    ) -> None:
        super().__init__(genotype, shape, num_classes)
        whole = search_form or space.vanished == "zeros"
        used: dict[str, Cell] = {name: cell if whole else alive(cell, INPUTS) for name, cell in genotype.cells.items()}
        self.stem = Stem(space, shape[0])
        self._outputs = {name: cell.output for name, cell in used.items()}
        outputs = {name: len(nodes) for name, nodes in self._outputs.items()}
        self.plans = plan_cells(space, self.stem.channels, outputs)
        self.pre = nn.ModuleList(Preprocess(plan, affine=not search_form) for plan in self.plans)
        self.cells = nn.ModuleList(
            PickedCell(
                used[plan.table],
                INPUTS,
                spec_of(plan, search_form=search_form, pool_norm=space.pool_norm),
                self.drop_path,
                share_features=space.share_features and search_form,
                bottleneck=space.bottleneck if search_form else 1,
                partial=space.partial_channels if search_form else 1,
                residual=space.residual(genotype.cells[plan.table].output, genotype),
            )
            for plan in self.plans
        )
        self.classifier = nn.Linear(self.plans[-1].width * outputs[self.plans[-1].table], num_classes)
        # Attentions and dynamic kernels have Triton kernels that no schedule lists.
        self.needs_dry_pass = any(isinstance(module, Calibration) for module in self.cells.modules())
        self._tower_after = 2 * space.cells // 3
        if auxiliary:
            plan = self.plans[self._tower_after]
            self.auxiliary = AuxiliaryHead(plan.width * outputs[plan.table], num_classes, stem=space.stem)

    def features(self, x: Tensor) -> list[Tensor]:
        return self._trace(x)[0]

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(global_pool(features))  # type: ignore[no-any-return]

    def forward_with_auxiliary(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        stages, middle = self._trace(x)
        return self.head(stages[-1]), None if self.auxiliary is None else self.auxiliary(middle)

    def _trace(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        older, newer = self.stem(x)
        stages: list[Tensor] = []
        middle = newer  # what the tower reads
        later = [newer] * self._later_readers(-1)
        fused = [self._fused(i) if plan_network(newer) else None for i in range(len(self.plans))]
        forms = [cell for cell in fused if cell is not None]
        shared = DerivedPass(forms, newer)
        with updates_together() if forms else nullcontext():
            for i, plan in enumerate(self.plans):
                if plan.reduces:
                    stages.append(newer)
                own = 0 if self._passes(i + 1, fused) else self._later_readers(i)
                found = self._run_cell(i, fused, shared, older, newer, 1 + own)
                if self._passes(i, fused):
                    later = [found.pop()] * self._later_readers(i - 1)
                if i - 1 == self._tower_after and self.auxiliary is not None:
                    middle = later[-1]
                older = later[0] if later else newer
                newer, *later = found
        shared.finish()
        if self._tower_after + 1 == len(self.plans):
            middle = later[-1] if later else newer
        return [*stages, newer], middle

    def _later_readers(self, number: int) -> int:
        """Readers of a cell's output (-1: the stem's) besides the next cell or the classifier.

        The cell after the next one, then the tower.
        """
        has_tower = self.auxiliary is not None and number == self._tower_after
        return (number + 2 < len(self.plans)) + has_tower

    def _passes(self, number: int, fused: Sequence[DerivedCell | SegmentedCell | None]) -> bool:
        """Whether a cell passes its newer input on to later readers, so that the cell adds their gradients to its own.

        Autograd would add them by a launch of its own.
        """
        return number < len(fused) and isinstance(fused[number], DerivedCell) and self._later_readers(number - 1) > 0

    def schedules(self, batch: int, dtype: torch.dtype, *, training: bool) -> list[Schedule]:
        """The launches of fused cells for a batch of images, so that kernels can be compiled before the first step."""
        device = self.classifier.weight.device
        with torch.device("meta"), torch.no_grad():
            stem = copy.deepcopy(self.stem).to("meta")
            older, newer = (tuple(x.shape) for x in stem(torch.empty(batch, *self.shape)))
        found: list[Schedule] = []
        forms = [self._fused(i) for i in range(len(self.plans))]
        for i, (plan, fused) in enumerate(zip(self.plans, forms, strict=True)):
            if isinstance(fused, DerivedCell):
                passes = self._passes(i, forms)
                found += fused.schedules((older, newer), dtype, device, training=training, passes=passes)
            elif fused is not None:
                found += fused.schedules((older, newer), dtype, device, training=training)
            stride = 2 if plan.reduces else 1
            size = (-(-length // stride) for length in newer[2:])
            older, newer = newer, (batch, plan.width * len(self._outputs[plan.table]), *size)
        return found

    def has_fused_cells(self) -> list[bool]:
        return [self._fused(number) is not None for number in range(len(self.plans))]

    def _fused(self, number: int) -> DerivedCell | SegmentedCell | None:
        plan, pre, cell = self.plans[number], self.pre[number], self.cells[number]
        assert isinstance(pre, Preprocess) and isinstance(cell, PickedCell)
        return cell.fused((pre.older, pre.newer), plan.width, 2 if plan.reduces else 1)

    def _run_cell(
        self,
        number: int,
        forms: Sequence[DerivedCell | SegmentedCell | None],
        shared: DerivedPass,
        older: Tensor,
        newer: Tensor,
        readers: int,
    ) -> list[Tensor]:
        """The concatenated output of one cell, [n, c, h, w], once for each of its readers.

        They are the next cell or the classifier, then the cell after it, then the tower. A cell that `_passes` its
        newer input on returns that as the last one.
        """
        plan, fused, passes = self.plans[number], forms[number], self._passes(number, forms)
        outputs = self._outputs[plan.table]
        if fused is None:
            nodes = self.cells[number](self.pre[number](older, newer))
            return [torch.cat([dense_gradient(nodes[n]) for n in outputs], dim=1)] * readers
        if isinstance(fused, SegmentedCell):
            return concatenated(fused.run(shared, (older, newer), outputs), readers)
        # The program concatenates all inner nodes. A genotype may name fewer of them, or another order.
        if outputs == tuple(range(INPUTS, INPUTS + fused.program.nodes)):
            return shared.run(fused, (older, newer), readers, passes=passes)
        out, *passed = shared.run(fused, (older, newer), passes=passes)
        parts = torch.split(out, plan.width, dim=1)
        return [*concatenated([parts[n - INPUTS] for n in outputs], readers), *passed]
