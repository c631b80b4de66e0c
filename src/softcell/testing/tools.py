"""Shared by the suites: small spaces, mixes with known meaning, and assertions that name the contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from softcell.arch import Genotype, Layout, Live, Table, WeightMix, derive, sample
from softcell.spaces import SPACES, Shape, Space, Supernet, build_space

SHAPE: Shape = (3, 9, 7)
"""Odd and not square: code that assumes even or equal sides fails on it."""
NUM_CLASSES = 5
BATCH = 4
SMALLER = {"cells": 3, "cells_per_stage": 1, "channels": 4, "nodes": 3, "depths": (2, 1, 2, 1, 1, 1), "head": 16}
"""The smallest sizes that keep every kind of part of a space; fields that a space does not have are ignored."""

ALIKE = frozenset({"s1", "s2", "s3", "s4", "nb1shot1-1", "nb1shot1-3"})
"""Spaces made of the same parts as another one: suites that go through every combination leave them to `exhaustive`."""

SOFTMAX_AT_HOME = frozenset({"nos", "fullattention"})
"""Spaces whose own method mixes as DARTS does, and stands for it in the tests."""


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
