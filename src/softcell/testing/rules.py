"""The contracts of layouts and derivation rules: data only, no network."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from softcell.arch import Choice, Pick, Rule, Table, count
from softcell.nn.candidates import get_candidate
from softcell.spaces import Space
from softcell.testing.tools import require

LIMIT = 3000
"""The most architectures that are enumerated."""


def layout_is_consistent(space: Space) -> None:
    """Sites name tables; edges run forward and are unique, in the order that rules expect."""
    layout = space.layout()
    require(layout.space == space.name, f"the layout of space {space.name!r} says it is of {layout.space!r}")
    names = [table.name for table in layout.tables]
    require(len(set(names)) == len(names), f"tables must have distinct names, got {names}")
    taken = [name for name in names if not name.isidentifier() or name in dir(nn.ParameterDict)]
    require(not taken, f"tables name parameters of methods, so {taken} cannot be their names; choose others")
    require(bool(layout.sites), "a layout needs at least one site")
    unknown = set(layout.sites) - set(names)
    require(not unknown, f"every site must name a table, but {sorted(unknown)} are none")
    for table in layout.tables:
        edges = [(choice.target, choice.source) for choice in table.choices]
        require(all(0 <= source <= target for target, source in edges), f"table {table.name!r}: edges must run forward")
        require(len(set(edges)) == len(edges), f"table {table.name!r}: a genotype names picks by edge, so once each")
        require(edges == sorted(edges), f"table {table.name!r}: choices must be ordered by target, then source")
        nodes = {*table.sources, *table.targets}
        require(
            bool(table.output) and set(table.output) <= nodes and len(set(table.output)) == len(table.output),
            f"table {table.name!r}: output must name nodes once each, got {table.output} of {sorted(nodes)}",
        )
        for choice in table.choices:
            for candidate in choice.candidates:
                get_candidate(candidate)


def mask_tells_candidates_from_padding(space: Space) -> None:
    """The mask of a table is True at exactly the candidates of each choice."""
    for table in space.layout().tables:
        mask = table.mask()
        require(tuple(mask.shape) == table.shape == (len(table.choices), table.width), "mask and table differ in shape")
        for choice, row in zip(table.choices, mask.tolist(), strict=True):
            real = len(choice.candidates)
            require(
                row == [True] * real + [False] * (table.width - real),
                f"table {table.name!r}, {choice}: the mask must be True for {real} candidates, got {row}",
            )
        everything = torch.stack([table.columns(name) for name in _names(table)]).sum(0)
        require(
            torch.equal(everything, mask.long()), f"table {table.name!r}: each real entry must belong to one candidate"
        )


def count_equals_enumeration(space: Space) -> None:
    """The closed form equals the number of enumerated architectures, on small cuts of the space's tables."""
    rule = _rule(space)
    for table in small_cuts(space):
        architectures = list(rule.enumerate(table))
        require(
            len(set(architectures)) == len(architectures), f"enumeration of {_text(table)} gives an architecture twice"
        )
        require(
            rule.count(table) == len(architectures),
            f"{_text(table)}: counted {rule.count(table)} architectures, enumerated {len(architectures)}",
        )
    require(count(space.layout()) >= 1, "a space must hold at least one architecture")


def derivation_equals_brute_force(space: Space) -> None:
    """The rule derives the architecture of the largest summed strength among all that it can derive."""
    rule, generator = _rule(space), torch.Generator().manual_seed(0)
    for table in small_cuts(space):
        architectures = list(rule.enumerate(table))
        for _ in range(4):
            strengths = torch.rand(table.shape, generator=generator, dtype=torch.float64)
            # Whoever reads padding finds the largest value there.
            strengths = torch.where(table.mask(), strengths, 1e9)
            best = max(architectures, key=lambda picks: _strength(table, strengths, picks))
            derived = rule(table, strengths)
            require(
                derived == best,
                f"{_text(table)}: derived {list(map(str, derived))}, but brute force finds {list(map(str, best))}",
            )


def samples_are_architectures_of_the_rule(space: Space) -> None:
    """Random sampling returns enumerated architectures, and eventually each of them."""
    rule, rng = _rule(space), random.Random(0)
    for table in small_cuts(space):
        architectures = set(rule.enumerate(table))
        drawn = {rule.sample(table, rng) for _ in range(40 * min(len(architectures), 25))}
        require(drawn <= architectures, f"{_text(table)}: sampled what the rule cannot derive: {drawn - architectures}")
        if len(architectures) <= 25:
            require(drawn == architectures, f"{_text(table)}: never sampled {architectures - drawn}")


RULE_CHECKS: tuple[Callable[[Space], None], ...] = (
    layout_is_consistent,
    mask_tells_candidates_from_padding,
    count_equals_enumeration,
    derivation_equals_brute_force,
    samples_are_architectures_of_the_rule,
)


def small_cuts(space: Space) -> list[Table]:
    """Ragged pieces of the space's tables, small enough to enumerate all their architectures.

    Each keeps the first nodes of a table and, by turns, one to three of each edge's candidates.
    """
    rule, cuts = _rule(space), []
    for table in space.layout().tables:
        for start in range(3):
            for nodes in range(len(table.targets), 0, -1):
                kept = [choice for choice in table.choices if choice.target in table.targets[:nodes]]
                choices = tuple(
                    Choice(c.source, c.target, c.candidates[: 1 + (start + i) % 3]) for i, c in enumerate(kept)
                )
                cut = Table(table.name, choices, (choices[-1].target,))
                if rule.count(cut) <= LIMIT:
                    cuts.append(cut)
                    break
    return cuts


def _rule(space: Space) -> Rule:
    rule = space.layout().rule
    assert isinstance(rule, Rule), f"the rule of a space must be a softcell.arch.Rule, got {rule!r}"
    return rule


def _names(table: Table) -> list[str]:
    return sorted({name for choice in table.choices for name in choice.candidates})


def _strength(table: Table, strengths: Tensor, picks: Sequence[Pick]) -> float:
    rows = {(choice.source, choice.target): index for index, choice in enumerate(table.choices)}
    total = 0.0
    for pick in picks:
        row = rows[pick.source, pick.target]
        total += float(strengths[row, table.choices[row].candidates.index(pick.op)])
    return total


def _text(table: Table) -> str:
    return ", ".join(f"{choice}:{'|'.join(choice.candidates)}" for choice in table.choices)
