"""Choices, the tables that group them, and the layout of a whole network.

A *choice* is one edge (or layer) with its candidates. Choices that share one matrix of architecture logits form a
*table* (the normal cell, the reduction cell, a chain of layers). A *site* is one place in the network that reads a
table: cell number 3, say. Candidates may differ from choice to choice, so a table is ragged: its matrices are as wide
as its widest choice and `mask` marks the real entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from softcell.errors import UserError

LINK = 1
"""The column of the link of an edge that competes with others."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates of one edge from node `source` to node `target`.

    Example:
        >>> from softcell.arch import Choice
        >>> edge = Choice(source=0, target=2, candidates=("none", "skip_connect", "sep_conv_3x3"))
        >>> str(edge), len(edge.candidates)
        ('0->2', 3)
    """

    source: int
    target: int
    candidates: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.candidates:
            raise UserError(f"a choice needs at least one candidate, but {self.source}->{self.target} has none")
        if len(set(self.candidates)) != len(self.candidates):
            raise UserError(f"candidates of {self.source}->{self.target} must be distinct, got {self.candidates}")

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


# No slots: cached properties need a `__dict__`.
@dataclass(frozen=True)
class Table:
    """Choices that share one logits matrix [choices, width].

    `output` lists the nodes that form the output of a site (concatenated in DARTS cells, one node elsewhere).
    `contests` lists groups of choices, by their indices, that compete with each other: edges into one node, each with
    the candidates `none` and a link. The space keeps a fixed number of them; one softmax runs over their links.

    Example:
        >>> from softcell.arch import Choice, Table
        >>> both = ("none", "skip_connect")
        >>> edges = (Choice(0, 1, both), Choice(0, 2, ("none",)), Choice(1, 2, both))
        >>> table = Table("cell", edges, output=(2,))
        >>> table.shape, table.incoming(2)
        ((3, 2), (1, 2))
        >>> table.mask()  # the second choice has one candidate; its other entry is padding
        tensor([[ True,  True],
                [ True, False],
                [ True,  True]])
    """

    name: str
    choices: tuple[Choice, ...]
    output: tuple[int, ...]
    contests: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.choices:
            raise UserError(f"table {self.name!r} needs at least one choice, got none")
        members = [i for contest in self.contests for i in contest]
        assert len(set(members)) == len(members), "a choice is in at most one contest"
        for own in (self.choices[i].candidates for i in members):
            assert len(own) == LINK + 1 and own[0] == "none", f"only `none` and a link may compete, got {own}"

    def __len__(self) -> int:
        return len(self.choices)

    @cached_property
    def width(self) -> int:
        """The number of candidates of the widest choice."""
        return max(len(choice.candidates) for choice in self.choices)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.choices), self.width

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """Nodes with incoming choices, in ascending order."""
        return tuple(sorted({choice.target for choice in self.choices}))

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Nodes with outgoing choices, in ascending order."""
        return tuple(sorted({choice.source for choice in self.choices}))

    @cached_property
    def contest_of(self) -> dict[int, tuple[int, ...]]:
        """The contest of every choice that is in one."""
        return {choice: contest for contest in self.contests for choice in contest}

    def incoming(self, target: int) -> tuple[int, ...]:
        """Indices of the choices that end in `target`."""
        return tuple(i for i, choice in enumerate(self.choices) if choice.target == target)

    def mask(self, device: torch.device | None = None) -> Tensor:
        """True where an entry is a candidate, False where it is padding: bool [choices, width]."""
        rows = [[k < len(choice.candidates) for k in range(self.width)] for choice in self.choices]
        return torch.tensor(rows, dtype=torch.bool, device=device)

    def columns(self, candidate: str) -> Tensor:
        """True at the entries of `candidate`: bool [choices, width]."""
        rows = [
            [k < len(choice.candidates) and choice.candidates[k] == candidate for k in range(self.width)]
            for choice in self.choices
        ]
        return torch.tensor(rows, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class Pick:
    """One chosen candidate on one edge.

    Example:
        >>> from softcell.arch import Pick
        >>> str(Pick(source=0, target=2, op="skip_connect"))
        'skip_connect(0->2)'
    """

    source: int
    target: int
    op: str

    def __str__(self) -> str:
        return f"{self.op}({self.source}->{self.target})"


Derivation = Callable[[Table, Tensor], tuple[Pick, ...]]
"""Strengths [choices, width] of a table to its picks."""


@dataclass(frozen=True)
class Layout:
    """The tables of a space, and which table each site of a network reads.

    `rule` derives an architecture from strengths; a method may bring its own rule.

    Example:
        >>> from softcell.spaces import build_space
        >>> layout = build_space("darts", {"cells": 8}).layout()
        >>> [table.name for table in layout.tables]
        ['normal', 'reduce']
        >>> layout.sites_of("reduce")
        (2, 5)
    """

    space: str
    tables: tuple[Table, ...]
    sites: tuple[str, ...]
    rule: Derivation
    settings: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.sites) - {table.name for table in self.tables}
        assert not unknown, f"sites read tables that do not exist: {unknown}"

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)

    def sites_of(self, name: str) -> tuple[int, ...]:
        """Site numbers that read table `name`."""
        return tuple(i for i, table in enumerate(self.sites) if table == name)

    def first_sites(self) -> dict[str, int]:
        """The first site of every table that is read at all."""
        return {table.name: self.sites.index(table.name) for table in self.tables if table.name in self.sites}
