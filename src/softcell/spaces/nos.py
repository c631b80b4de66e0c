"""The heterogeneous space of Neural Operator Search: DARTS's stack of cells with features, attentions and kernels.

Every inner node is a heterogeneous residual block of two tiers (`softcell.spaces.block`). The first tier goes from all
earlier nodes to a surrogate k', the second from k' to the node k itself. Surrogates are numbered like nodes: after the
inputs 0 and 1 come 2 = surrogate and 3 = node of the first block, 4 and 5 of the second, and so on. With 4 nodes there
are 14 + 4 choices of 11 candidates per kind of cell.

Without attentions and dynamic convolutions there is no second tier: the conventional space, DARTS's cell with 14
choices of 7 candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

from softcell.arch import Cell, Choice, FeaturePairs, Genotype, Layout, Pick, Table, TopInputs
from softcell.arch.genotype import check_forward
from softcell.errors import UserError
from softcell.nn.candidates import Kind, get_candidate
from softcell.spaces.base import Network, Shape, register_space
from softcell.spaces.darts import INPUTS, DartsSpace

FEATURES = (
    "sep_conv_3x3",
    "sep_conv_5x5",
    "dil_conv_3x3",
    "dil_conv_5x5",
    "avg_pool_3x3",
    "max_pool_3x3",
    "skip_connect",
)
ATTENTIONS = ("spatial_attention", "channel_attention")
DYNAMICS = ("dynamic_conv_3x3", "dynamic_conv_5x5")


@register_space
@dataclass(frozen=True)
class NosSpace(DartsSpace):
    """Heterogeneous cells. `features`, `attentions` and `dynamics` name the candidates of each kind; the last two may
    be empty."""

    name: ClassVar[str] = "nos"
    about: ClassVar[str] = (
        "NOS cells: features, attentions and dynamic convolutions in two tiers, 18 edges, 11 candidates"
    )
    small: ClassVar[dict[str, Any]] = {"cells": 3, "channels": 8, "nodes": 2}

    features: tuple[str, ...] = FEATURES
    attentions: tuple[str, ...] = ATTENTIONS
    dynamics: tuple[str, ...] = DYNAMICS
    candidates: tuple[str, ...] = field(init=False, default=())
    partial_channels: int = field(init=False, default=1)
    """Not defined for this space: calibrating candidates are applied to sums of features."""

    def __post_init__(self) -> None:
        if not self.features:
            raise UserError(
                "`features` must name at least one candidate: without a feature there is nothing to calibrate"
            )
        kinds: dict[str, tuple[tuple[str, ...], Kind]] = {
            "features": (self.features, "feature"),
            "attentions": (self.attentions, "attention"),
            "dynamics": (self.dynamics, "kernel"),
        }
        for setting, (names, kind) in kinds.items():
            twice = [op for op in names if names.count(op) > 1]
            if twice:
                raise UserError(f"`{setting}` must name every candidate once, but names {twice[0]!r} twice; drop one")
            for op in names:
                known = get_candidate(op)
                if known.kind != kind:
                    raise UserError(f"`{setting}` takes candidates of kind {kind}, but {op!r} is of kind {known.kind}")
                if known.zero:
                    raise UserError(f"cells of NOS have no {op!r}: a node could be constant zero; leave it out")
        # The dataclass is frozen; these fields follow from others.
        object.__setattr__(self, "candidates", (*self.features, *self.attentions, *self.dynamics))
        super().__post_init__()
        object.__setattr__(self, "about", self._described())

    def _described(self) -> str:
        if self.tiers == 1:
            return "NOS cells with only features, in one tier: the conventional space"
        kinds = ["features", *(["attentions"] if self.attentions else [])]
        kinds += ["dynamic convolutions"] if self.dynamics else []
        listed = f"{', '.join(kinds[:-1])} and {kinds[-1]}"
        edges = sum(INPUTS + earlier + 1 for earlier in range(self.nodes))
        return f"NOS cells: {listed} in two tiers, {edges} edges, {len(self.candidates)} candidates"

    @property
    def tiers(self) -> int:
        return 2 if self.attentions or self.dynamics else 1

    def layout(self) -> Layout:
        base = super().layout()
        rule = FeaturePairs(self.features) if self.tiers == 2 else TopInputs(2, exclude=())
        return Layout(base.space, base.tables, base.sites, rule, settings={"tiers": self.tiers})

    def residual(self, output: tuple[int, ...], genotype: Genotype | None = None) -> tuple[int, ...]:
        """All nodes if there are two tiers: a node calibrates its surrogate."""
        tiers = self.tiers if genotype is None else _tiers_of(genotype)
        return output if tiers == 2 else ()

    def remarks(self, num_classes: int = 10) -> tuple[str, ...]:
        blocks = range(1, self.nodes + 1)
        pairs = prod((n + 1) * n // 2 for n in blocks)
        every, alone = len(self.candidates), len(self.features)
        printed = pairs * every ** (3 * self.nodes)
        features = f"features alone, Π (n+1)n/2 × {alone}²: {pairs * alone ** (2 * self.nodes):.1e}"
        if self.tiers == 1:
            return f"one cell by the paper's formula for {features}", "the count above counts both kinds of cells"
        return (
            f"one cell by the paper's formula, Π (n+1)n/2 × {every}³: {printed:.1e}; {features}",
            "the count above leaves out first tiers without a feature operation, and counts both kinds of cells",
        )

    def network(
        self,
        genotype: Genotype,
        shape: Shape,
        num_classes: int,
        *,
        search_form: bool = False,
        auxiliary: bool = False,
    ) -> Network:
        check_tiers(genotype)
        return super().network(genotype, shape, num_classes, search_form=search_form, auxiliary=auxiliary)

    def _table(self, name: str) -> Table:
        if self.tiers == 1:
            return super()._table(name)
        choices: list[Choice] = []
        inner: list[int] = []
        for _ in range(self.nodes):
            surrogate = INPUTS + 2 * len(inner)
            choices += [Choice(source, surrogate, self.candidates) for source in (*range(INPUTS), *inner)]
            choices.append(Choice(surrogate, surrogate + 1, self.candidates))
            inner.append(surrogate + 1)
        return Table(name, tuple(choices), output=tuple(inner))


def _tiers_of(genotype: Genotype) -> int:
    tiers = genotype.settings.get("tiers", 2)
    if tiers not in (1, 2):
        raise UserError(f"`settings.tiers` of a NOS genotype must be 1 or 2, got {tiers!r}")
    return int(tiers)


def check_tiers(genotype: Genotype) -> None:
    """Raises `UserError` unless edges are those of the genotype's tiers and no node is constant zero.

    With two tiers, edges lead from nodes to surrogates and from surrogates to their nodes; with one, from any node to a
    later one.
    """
    tiers = _tiers_of(genotype)
    for name, cell in genotype.cells.items():
        try:
            check_forward(cell, INPUTS)
        except UserError as error:
            raise UserError(f"cell {name!r}: {error}") from error
        if tiers == 2:
            _check_numbers(name, cell)
        else:
            _check_features(name, cell)
        _check_alive(name, cell, tiers)


def _check_numbers(name: str, cell: Cell) -> None:
    wrong = [node for node in cell.output if not _is_node(node)]
    if wrong:
        raise UserError(f"cell {name!r}: nodes of NOS cells have odd numbers from 3 on, but output names {wrong}")
    for pick in cell.picks:
        if _is_node(pick.target):
            fits = pick.source == pick.target - 1
        else:
            fits = pick.source < INPUTS or _is_node(pick.source)
        if not fits:
            raise UserError(
                f"cell {name!r}: an edge must lead from an input (0, 1) or a node (3, 5, ...) to a surrogate "
                f"(2, 4, ...), or from a surrogate to its node, one higher; got {pick}"
            )


def _check_features(name: str, cell: Cell) -> None:
    for pick in cell.picks:
        kind = get_candidate(pick.op).kind
        if kind != "feature":
            raise UserError(
                f"cell {name!r}: with `settings.tiers` = 1 a cell has only features, but {pick} is of kind {kind}; "
                "cells that calibrate have 2 tiers"
            )


def _check_alive(name: str, cell: Cell, tiers: int) -> None:
    """Requires an input from a live source for every named node: a feature in tier 1, anything in tier 2."""
    alive = set(range(INPUTS))
    named = {*cell.output, *(number for pick in cell.picks for number in (pick.source, pick.target))}
    for node in sorted(named - alive):
        second = tiers == 2 and _is_node(node)
        if any(_gives(pick, second) and pick.source in alive for pick in cell.incoming(node)):
            alive.add(node)
            continue
        what = "surrogate" if tiers == 2 and not second else "node"
        ops = ", ".join(f"{pick.op} from {pick.source}" for pick in cell.incoming(node))
        needed = "an operation other than none" if second else "a feature operation other than none"
        found = f"has {ops}" if ops else "no edge leads to it"
        raise UserError(f"cell {name!r}: {what} {node} would be zero: it needs {needed}, but {found}")


def _gives(pick: Pick, second: bool) -> bool:
    candidate = get_candidate(pick.op)
    return not candidate.zero and (second or candidate.kind == "feature")


def _is_node(number: int) -> bool:
    return number >= INPUTS and (number - INPUTS) % 2 == 1
