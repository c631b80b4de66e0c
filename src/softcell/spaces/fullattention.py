"""The stage-wise space of full-attention NAS: a chain of self-attention blocks, each layer with its own choice.

Zhou, Wang, Huo, Wang: Full-attention based Neural Architecture Search using Context Auto-regression (Tables I and II).

    stem    local SA k3 h8       C    32×32      Five stages of three layers, seven candidates per layer: 7^15 networks.
    stage 1 3 layers             C    32×32      Each stage is a table of its own with one choice per layer; tied
    stage 2 3 layers, stride 2  2C    16×16      (the ablation's cell-based space), stages 1, 3 and 5 read one table and
    stage 3 3 layers            2C    16×16      stages 2 and 4 another: 7^6.
    stage 4 3 layers, stride 2  4C     8×8
    stage 5 3 layers            4C     8×8
    average pool, linear

Non-local attention over an image of 448×448 would be one over 200,704 positions: from 128 pixels on the stem is
followed by average pooling, so that stage 1 is at most 56×56.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from softcell.arch import Choice, Genotype, Layout, Mix, StrongestEach, Table, derive
from softcell.errors import UserError
from softcell.kernels.backend import compute_type
from softcell.nn.attention import EXTENTS, HEADS, AttentionBlock, local_block, local_name
from softcell.nn.candidates import Spec, get_candidate
from softcell.nn.conv import AveragePool
from softcell.nn.fused_blocks import FusedBlocks
from softcell.nn.norm import updates_together
from softcell.nn.stack import block_key, weights_together
from softcell.spaces.base import Network, Shape, Space, Supernet, global_pool, register_space
from softcell.spaces.cell import MixedChain, PickedChain, check_chain
from softcell.spaces.execution import plan_network

CANDIDATES = (*(local_name(k, h) for k in EXTENTS for h in HEADS), "non_local_sa")
WIDTHS = (1, 2, 2, 4, 4)
"""Widths of the stages, in multiples of the initial channels."""
STRIDES = (1, 2, 1, 2, 1)
STEM = (3, 8)
"""Extent and heads of the stem's attention."""
LARGE, LARGEST_STAGE = 128, 56


class Printed(NamedTuple):
    """A count of parameters that the paper prints, and the network it belongs to."""

    where: str
    channels: int
    num_classes: int
    parameters: float


PRINTED = (
    Printed("CIFAR-10, Table III", 96, 10, 2.52e6),
    Printed("CIFAR-10, Table VII", 80, 10, 1.75e6),
    Printed("ImageNet, Table IV", 112, 1000, 4e6),
    # Table V names no width; ImageNet's is the largest that the paper has.
    Printed("CUB-200-2011, Table V", 112, 200, 3.82e6),
)
"""Parameters of the paper's networks."""


@register_space
@dataclass(frozen=True)
class FullAttentionSpace(Space):
    """Five stages of `layers` layers, `channels` wide in the first.

    `tied`: one choice per layer for stages 1, 3 and 5, another for 2 and 4. `repeats`: how many times stages 1, 3 and
    5 are repeated (2: the paper's eight stages). `norm`: batch-norm after each linear layer, or none.
    """

    name: ClassVar[str] = "fullattention"
    about: ClassVar[str] = (
        "full-attention NAS: 15 layers in five stages, local self-attention 3/5/7 × 4/8 heads or non-local"
    )
    small: ClassVar[dict[str, Any]] = {"layers": 1}
    tiny: ClassVar[dict[str, Any]] = {
        "channels": 16,
        "layers": 2,
        "candidates": ("local_sa_k3_h4", "non_local_sa"),
    }
    evaluation: ClassVar[dict[str, dict[str, Any]]] = {
        "small": {"channels": 32, "layers": 1},
        "cifar": {"channels": 96},
        "imagenet": {"channels": 112},
    }

    channels: int = 16
    layers: int = 3
    repeats: int = 1
    tied: bool = False
    norm: Literal["batch", "none"] = "batch"
    candidates: tuple[str, ...] = CANDIDATES

    def __post_init__(self) -> None:
        for name in ("channels", "layers", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"`{name} >= 1` must hold, but got {name}={getattr(self, name)}")
        local = 2 * STEM[1]
        if self.channels % local:
            raise UserError(
                f"`channels` must be a multiple of {local}: the stem's attention has {STEM[1]} heads on half of them, "
                f"but got channels={self.channels}"
            )
        for op in self.candidates:
            if not get_candidate(op).widens:
                raise UserError(
                    f"layers of this space change their width, which {op!r} cannot; candidates: {', '.join(CANDIDATES)}"
                )

    def stages(self) -> tuple[int, ...]:
        """The stages (0 to 4) in the order in which the network runs them."""
        return tuple(s for s, stride in enumerate(STRIDES) for _ in range(self.repeats if stride == 1 else 1))

    def layout(self) -> Layout:
        choices = tuple(Choice(i, i + 1, self.candidates) for i in range(self.layers))
        names = [_table_name(stage, tied=self.tied) for stage in self.stages()]
        tables = tuple(Table(name, choices, (self.layers,)) for name in dict.fromkeys(names))
        return Layout(self.name, tables, tuple(names), StrongestEach())

    def specs(self, layers: int, *, affine: bool) -> list[list[Spec]]:
        """The spec of every layer of every stage."""
        found, before = [], self.channels
        for stage in self.stages():
            own, rows = self.channels * WIDTHS[stage], []
            for layer in range(layers):
                stride = STRIDES[stage] if layer == 0 else 1
                rows.append(Spec(own, stride, affine=affine, channels_in=before, norm=self.norm == "batch"))
                before = own
            found.append(rows)
        return found

    def supernet(self, shape: Shape, num_classes: int) -> Supernet:
        return FullAttentionSupernet(self, shape, num_classes)

    def network(
        self,
        genotype: Genotype,
        shape: Shape,
        num_classes: int,
        *,
        search_form: bool = False,
        auxiliary: bool = False,
    ) -> Network:
        """The genotype sets the number of layers, and whether it is tied."""
        if auxiliary:
            raise UserError("networks of full attention have no auxiliary tower; set auxiliary=0")
        return FullAttentionNetwork(self, genotype, shape, num_classes, search_form=search_form)

    def extremes(self) -> tuple[Genotype, Genotype]:
        """A network of the fewest parameters and one of the most: layers add up, so each is chosen separately."""
        layout, counted = self.layout(), functools.cache(_parameters)  # most layers of a stage are identical
        strengths: dict[str, Tensor] = {}
        for stage, specs in zip(self.stages(), self.specs(self.layers, affine=True), strict=True):
            own = torch.tensor([[counted(op, spec) for op in self.candidates] for spec in specs], dtype=torch.float64)
            name = _table_name(stage, tied=self.tied)
            strengths[name] = strengths[name] + own if name in strengths else own
        return derive(layout, {name: -own for name, own in strengths.items()}), derive(layout, strengths)

    def remarks(self, num_classes: int = 10) -> tuple[str, ...]:
        """Parameters of the paper's networks, and its printed numbers where the space is the paper's.

        num_classes other than 10 applies to the networks for CIFAR.
        """
        own = (self.layers, self.repeats, self.tied, set(self.candidates)) == (3, 1, False, set(CANDIDATES))
        lines = []
        for printed in PRINTED:
            classes = num_classes if printed.num_classes == 10 else printed.num_classes
            space = replace(self, channels=printed.channels)
            least, most = (_total(space, genotype, classes) for genotype in space.extremes())
            line = (
                f"parameters at {printed.channels} channels, {classes} classes: {least:,} to {most:,} over all choices"
            )
            if own and classes == printed.num_classes:
                low, high = (f"{(total - printed.parameters) / 1e6:+.3f}M" for total in (least, most))
                line += f"; the paper prints {printed.parameters / 1e6:.3g}M ({printed.where}): {low} to {high}"
            lines.append(line)
        return tuple(lines)


def _table_name(stage: int, *, tied: bool) -> str:
    if not tied:
        return f"stage{stage + 1}"
    return "normal" if STRIDES[stage] == 1 else "reduction"


def _parameters(op: str, spec: Spec) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in get_candidate(op).build(spec).parameters())


def _total(space: FullAttentionSpace, genotype: Genotype, num_classes: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in space.network(genotype, (3, 32, 32), num_classes).parameters())


class Skeleton(nn.Module):
    """Everything around the stages: stem and classifier."""

    def __init__(self, space: FullAttentionSpace, shape: Shape, num_classes: int) -> None:
        super().__init__()
        spec = Spec(space.channels, channels_in=shape[0], norm=space.norm == "batch")
        self.stem = local_block(spec, *STEM)
        side = max(shape[1:])
        by = -(-side // LARGEST_STAGE) if side >= LARGE else 1
        self.shrink = AveragePool(by, by, ceil_mode=True, count_include_pad=False) if by > 1 else nn.Identity()
        self.classifier = nn.Linear(space.channels * WIDTHS[-1], num_classes)

    def begin(self, x: Tensor) -> Tensor:
        return self.shrink(self.stem(x))  # type: ignore[no-any-return]

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(global_pool(features))  # type: ignore[no-any-return]


def _last_of_resolution(stages: tuple[int, ...]) -> tuple[bool, ...]:
    """For every stage whether the next one has another resolution, or there is none."""
    return tuple(i + 1 == len(stages) or STRIDES[stages[i + 1]] > 1 for i in range(len(stages)))


class FullAttentionSupernet(Supernet):
    def __init__(self, space: FullAttentionSpace, shape: Shape, num_classes: int) -> None:
        super().__init__(space, shape, num_classes)
        self.skeleton = Skeleton(space, shape, num_classes)
        specs = space.specs(space.layers, affine=False)
        self.cells = nn.ModuleList(
            MixedChain(self.layout.table(name), rows.__getitem__)
            for name, rows in zip(self.layout.sites, specs, strict=True)
        )
        self._is_last = _last_of_resolution(space.stages())

    def features(self, x: Tensor, mix: Mix) -> list[Tensor]:
        x = self.skeleton.begin(x)
        chains = [cell for cell in self.cells if isinstance(cell, MixedChain)]
        found = []
        with weights_together([own for site, cell in enumerate(chains) for own in cell.stacked(mix, site, x)], x):
            for site, cell in enumerate(chains):
                x = cell([x], mix, site)[-1]
                if self._is_last[site]:
                    found.append(x)
        return found

    def head(self, features: Tensor) -> Tensor:
        return self.skeleton.head(features)


class FullAttentionNetwork(Network):
    def __init__(
        self, space: FullAttentionSpace, genotype: Genotype, shape: Shape, num_classes: int, *, search_form: bool
    ) -> None:
        super().__init__(genotype, shape, num_classes)
        stages = space.stages()
        tied = set(genotype.cells) == {"normal", "reduction"}
        names = [_table_name(stage, tied=tied) for stage in stages]
        if set(genotype.cells) != set(names):
            raise UserError(
                f"a genotype of full attention needs the cells {', '.join(dict.fromkeys(names))} (or normal and "
                f"reduction, tied), got {sorted(genotype.cells)}"
            )
        layers = {len(check_chain(cell)) for cell in genotype.cells.values()}
        if len(layers) != 1:
            raise UserError(f"all stages of full attention have equally many layers, but got {sorted(layers)}")
        for cell in genotype.cells.values():
            for pick in cell.picks:
                if not get_candidate(pick.op).widens:
                    raise UserError(f"layers of full attention change their width, which {pick.op!r} cannot")
        self.skeleton = Skeleton(space, shape, num_classes)
        specs = space.specs(layers.pop(), affine=not search_form)
        self.cells = nn.ModuleList(
            PickedChain(genotype.cells[name], rows.__getitem__, self.drop_path)
            for name, rows in zip(names, specs, strict=True)
        )
        self._is_last = _last_of_resolution(stages)

    def features(self, x: Tensor) -> list[Tensor]:
        if not (self.training and plan_network(x)):
            return self._run(self.skeleton.begin(x), list(self.cells))
        blocks = FusedBlocks([m for m in self.modules() if isinstance(m, AttentionBlock)], compute_type(x))
        chains = [cell for cell in self.cells if isinstance(cell, PickedChain)]
        counts = [cell.num_dropped() for cell in chains]
        factors: Sequence[Tensor | None] = [None] * len(counts)
        if self.drop_path.probability > 0:
            factors = torch.split(self.drop_path.factors(x, sum(counts)), counts)
        runs = [functools.partial(cell, factors=own, blocks=blocks) for cell, own in zip(chains, factors, strict=True)]
        with updates_together():
            return self._run(self.skeleton.shrink(blocks.run(self.skeleton.stem, x)), runs)

    def _run(self, x: Tensor, cells: Sequence[Callable[[list[Tensor]], list[Tensor]]]) -> list[Tensor]:
        found = []
        for cell, is_last in zip(cells, self._is_last, strict=True):
            x = cell([x])[-1]
            if is_last:
                found.append(x)
        return found

    def has_fused_cells(self) -> list[bool]:
        """All layers of a cell train fused if they have norms; evaluation runs module by module."""
        return [
            all(block_key(m) is not None for m in cell.modules() if isinstance(m, AttentionBlock))
            for cell in self.cells
        ]

    def head(self, features: Tensor) -> Tensor:
        return self.skeleton.head(features)
