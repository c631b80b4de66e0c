"""A space whose tables are ragged: every edge has candidates of its own, one edge has a single one.

Methods and rules that treat padding as a candidate fail on it. It is not registered: it exists for tests only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from softcell.arch import Choice, Genotype, Layout, Mix, StrongestEach, Table
from softcell.errors import UserError
from softcell.nn.candidates import Spec
from softcell.nn.conv import ReLUConvBN
from softcell.nn.norm import BatchNorm2d
from softcell.spaces import Network, Shape, Space, Supernet
from softcell.spaces.base import global_pool
from softcell.spaces.cell import MixedCell, PickedCell
from softcell.spaces.edges import SpecOf

TABLES = (
    Table(
        "same",
        (
            Choice(0, 1, ("none", "skip_connect", "nor_conv_3x3", "avg_pool_3x3")),
            Choice(0, 2, ("nor_conv_1x1",)),
            Choice(1, 2, ("skip_connect", "sep_conv_3x3", "none")),
        ),
        output=(1, 2),
    ),
    Table(
        "smaller",
        (
            Choice(0, 1, ("max_pool_3x3", "skip_connect")),
            Choice(0, 2, ("none", "nor_conv_3x3", "dil_conv_3x3")),
            Choice(1, 2, ("none", "nor_conv_3x3")),
        ),
        output=(1, 2),
    ),
)
SITES = ("same", "smaller", "same")


@dataclass(frozen=True)
class RaggedSpace(Space):
    """Two ragged tables, three sites; the second halves the resolution.

    Example:
        >>> from softcell.testing import RaggedSpace
        >>> space = RaggedSpace(channels=4)
        >>> [len(choice.candidates) for choice in space.layout().tables[0].choices]
        [4, 1, 3]
    """

    name: ClassVar[str] = "ragged"
    channels: int = 4

    def layout(self) -> Layout:
        return Layout(self.name, TABLES, SITES, rule=StrongestEach())

    def supernet(self, shape: Shape, num_classes: int) -> Supernet:
        return RaggedSupernet(self, shape, num_classes)

    def network(
        self,
        genotype: Genotype,
        shape: Shape,
        num_classes: int,
        *,
        search_form: bool = False,
        auxiliary: bool = False,
    ) -> Network:
        if auxiliary:
            raise UserError("networks of this space have no auxiliary tower; set auxiliary=0")
        if set(genotype.cells) != {table.name for table in TABLES}:
            raise UserError(f"a genotype needs the cells 'same' and 'smaller', got {sorted(genotype.cells)}")
        return RaggedNetwork(self, genotype, shape, num_classes, search_form)


def spec_of(space: RaggedSpace, table: str, *, search_form: bool) -> SpecOf:
    def spec(source: int) -> Spec:
        stride = 2 if table == "smaller" and source == 0 else 1
        return Spec(space.channels, stride, affine=not search_form, pool_norm=search_form)

    return spec


def outer_layers(
    space: RaggedSpace, shape: Shape, num_classes: int, *, affine: bool
) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """Stem, projections of each cell's output to the width of the network, and the classifier."""
    c = space.channels
    stem = nn.Sequential(nn.Conv2d(shape[0], c, 3, padding=1, bias=False), BatchNorm2d(c))
    return stem, nn.ModuleList(ReLUConvBN(2 * c, c, 1, affine=affine) for _ in SITES), nn.Linear(c, num_classes)


class RaggedSupernet(Supernet):
    def __init__(self, space: RaggedSpace, shape: Shape, num_classes: int) -> None:
        super().__init__(space, shape, num_classes)
        self.stem, self.post, self.classifier = outer_layers(space, shape, num_classes, affine=False)
        self.cells = nn.ModuleList(
            MixedCell(self.layout.table(name), 1, spec_of(space, name, search_form=True)) for name in SITES
        )

    def features(self, x: Tensor, mix: Mix) -> list[Tensor]:
        stages, x = [], self.stem(x)
        for site, (cell, post) in enumerate(zip(self.cells, self.post, strict=True)):
            if SITES[site] == "smaller":
                stages.append(x)
            x = post(torch.cat(cell([x], mix, site)[1:], dim=1))
        return [*stages, x]

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(global_pool(features))  # type: ignore[no-any-return]


class RaggedNetwork(Network):
    def __init__(
        self, space: RaggedSpace, genotype: Genotype, shape: Shape, num_classes: int, search_form: bool
    ) -> None:
        super().__init__(genotype, shape, num_classes)
        self.stem, self.post, self.classifier = outer_layers(space, shape, num_classes, affine=not search_form)
        self.cells = nn.ModuleList(
            PickedCell(genotype.cells[name], 1, spec_of(space, name, search_form=search_form), self.drop_path)
            for name in SITES
        )

    def features(self, x: Tensor) -> list[Tensor]:
        stages, x = [], self.stem(x)
        for name, cell, post in zip(SITES, self.cells, self.post, strict=True):
            if name == "smaller":
                stages.append(x)
            x = post(torch.cat(cell([x])[1:], dim=1))
        return [*stages, x]

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(global_pool(features))  # type: ignore[no-any-return]
