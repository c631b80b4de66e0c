"""Tools that the suites share: small spaces, mixes with known meaning, and assertions that name the contract.

`RaggedSpace` has ragged tables: every edge has its own candidates, one edge has a single one. Methods and rules that
treat padding as a candidate fail on it. It is not registered: it exists for tests only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from softcell.arch import Choice, Genotype, Layout, Live, Mix, StrongestEach, Table, WeightMix, derive, sample
from softcell.errors import UserError
from softcell.nn.candidates import Spec
from softcell.nn.conv import ReLUConvBN
from softcell.nn.norm import BatchNorm2d
from softcell.spaces import SPACES, Network, Shape, Space, Supernet, build_space
from softcell.spaces.base import global_pool
from softcell.spaces.cell import MixedCell, PickedCell
from softcell.spaces.edges import SpecOf

SHAPE: Shape = (3, 9, 7)
"""Odd and not square: code that assumes even or equal sides fails on it."""
NUM_CLASSES = 5
BATCH = 4
SMALLER = {"cells": 3, "cells_per_stage": 1, "channels": 4, "nodes": 3, "depths": (2, 1, 2, 1, 1, 1), "head": 16}
"""The smallest sizes that keep every kind of part of a space; fields that a space does not have are ignored."""

ALIKE = frozenset({"s1", "s2", "s3", "s4", "nb1shot1-1", "nb1shot1-3"})
"""Spaces made of the same parts as another one: suites that go through every combination leave them to `exhaustive`."""

SOFTMAX_AT_HOME = frozenset({"nos", "fullattention"})
"""Spaces whose own method mixes as DARTS does and represents it in the tests."""


def require(holds: bool, contract: str) -> None:
    """Fails with the broken contract, also where Python runs without asserts."""
    if not holds:
        raise AssertionError(contract)


def check_name(check: Callable[..., None]) -> str:
    """The contract in words, for test names.

    Example:
        >>> from softcell.testing import SPACE_CHECKS, check_name
        >>> check_name(SPACE_CHECKS[0])
        'layout_is_consistent'
    """
    return check.__name__


def tiny_space(name: str) -> Space:
    """The registered space `name` in the smallest size that still has all its parts.

    Example:
        >>> from softcell.testing import tiny_space
        >>> tiny_space("darts").channels <= 4
        True
    """
    space = build_space(name, SPACES.get(name).small)
    known = {field.name for field in dataclasses.fields(space)}  # type: ignore[arg-type]
    sizes = {**{k: v for k, v in SMALLER.items() if k in known}, **space.tiny}
    smaller: Space = dataclasses.replace(space, **sizes)  # type: ignore[type-var]
    return smaller


def images(shape: Shape = SHAPE, batch: int = BATCH, seed: int = 0) -> Tensor:
    """[batch, *shape] in float64, the same for the same seed."""
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build_supernet(space: Space, shape: Shape = SHAPE, seed: int = 0) -> Supernet:
    """A supernet in float64 with the weights of `seed`; the caller's random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return space.supernet(shape, NUM_CLASSES).double()


def gather_statistics(supernet: Supernet, x: Tensor) -> None:
    """Runs some training batches, so that evaluation has meaningful running statistics."""
    supernet.train()
    with torch.no_grad():
        for seed in range(2):
            supernet(x + seed, WeightMix(supernet.layout, random_weights(supernet.layout, seed)))


def one_hot(layout: Layout, genotype: Genotype) -> dict[str, Tensor]:
    """Weights [choices, width] that are 1 at every pick of the genotype and 0 elsewhere.

    Example:
        >>> from softcell.arch import notation
        >>> from softcell.spaces import build_space
        >>> from softcell.testing import one_hot
        >>> genotype = notation.parse("|nor_conv_3x3~0|+|none~0|none~1|+|none~0|none~1|skip_connect~2|")
        >>> one_hot(build_space("nb201").layout(), genotype)["cell"].sum(1)  # one candidate per edge
        tensor([1., 1., 1., 1., 1., 1.], dtype=torch.float64)
    """
    weights = {}
    for table in layout.tables:
        entries = torch.zeros(table.shape, dtype=torch.float64)
        for index, candidate in _picked(table, genotype):
            entries[index, candidate] = 1.0
        weights[table.name] = entries
    return weights


def one_hot_live(layout: Layout, genotype: Genotype) -> dict[int, Live]:
    """For every site the candidates that the genotype needs and no other.

    Example:
        >>> from softcell.arch import sample
        >>> from softcell.spaces import build_space
        >>> from softcell.testing import one_hot_live
        >>> layout = build_space("nb201").layout()
        >>> lives = one_hot_live(layout, sample(layout, seed=0))
        >>> len(lives) == len(layout.sites), [len(live) for live in lives[0]]
        (True, [1, 1, 1, 1, 1, 1])
    """
    lives: dict[str, Live] = {}
    for table in layout.tables:
        picked = list(_picked(table, genotype))
        lives[table.name] = tuple(tuple(k for i, k in picked if i == index) for index in range(len(table)))
    return {site: lives[name] for site, name in enumerate(layout.sites)}


def random_weights(layout: Layout, seed: int) -> dict[str, Tensor]:
    """Positive weights [choices, width] whose real entries sum to 1 in each row; padding is 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for table in layout.tables:
        entries = torch.rand(table.shape, generator=generator, dtype=torch.float64) + 0.1
        entries = entries * table.mask()
        weights[table.name] = entries / entries.sum(1, keepdim=True)
    return weights


def some_genotypes(layout: Layout, number: int = 3) -> list[Genotype]:
    """Random architectures, and the emptiest the rule allows: `none` wherever it can be picked."""
    empty = derive(layout, {table.name: table.columns("none").double() for table in layout.tables})
    return [empty, *(sample(layout, seed) for seed in range(number))]


def called_modules(network: nn.Module, run: Callable[[], Any]) -> set[str]:
    """Names of the modules without children that ran during `run()`."""
    called: set[str] = set()
    hooks = []
    for name, module in network.named_modules():
        if next(module.children(), None) is None:
            hooks.append(module.register_forward_hook(lambda *_, name=name: called.add(name)))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return called


def require_close(left: Tensor, right: Tensor, contract: str, tolerance: float = 1e-12) -> None:
    """Fails unless both are equal up to `tolerance`, relative to the larger of 1 and the largest value."""
    require(left.shape == right.shape, f"{contract}: shapes {tuple(left.shape)} and {tuple(right.shape)} differ")
    if left.numel():
        scale = max(1.0, float(right.detach().abs().max()))
        gap = float((left - right).detach().abs().max())
        require(gap <= tolerance * scale, f"{contract}: largest difference {gap:.3g}, allowed {tolerance * scale:.3g}")


def _picked(table: Table, genotype: Genotype) -> Iterator[tuple[int, int]]:
    """(choice, candidate) of every pick of the table's cell."""
    rows = {(choice.source, choice.target): index for index, choice in enumerate(table.choices)}
    for pick in genotype.cells[table.name].picks:
        index = rows[pick.source, pick.target]
        yield index, table.choices[index].candidates.index(pick.op)


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
