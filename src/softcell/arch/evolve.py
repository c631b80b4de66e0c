"""Evolution of architectures: the selection of single-path one-shot search (SPOS, Guo et al., ECCV 2020, Algorithm 1).

A population starts at random and is replaced generation by generation with children of the best: half of them by
crossover of two, half by mutation of one. Architectures that break a limit are skipped. Parents and children are
described by strengths, from which the space's rule derives, so every child is an architecture of the space.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from softcell.arch.choice import Layout, Table
from softcell.arch.derive import random_architecture
from softcell.arch.genotype import Cell, Genotype
from softcell.errors import UserError

TRIES = 50
"""Attempts to make a child within the limits; after that the generation is smaller."""


@dataclass(frozen=True)
class Evolution:
    """Settings of the evolution; the defaults are SPOS's, `generations` 0 switches it off.

    Each generation has `population` architectures; the `parents` best of all so far have children. `mutation` is the
    probability that a choice of a mutated child is redrawn. `norm_batches` training batches recalibrate batch-norm for
    each architecture that is measured.
    """

    generations: int = 0
    population: int = 50
    parents: int = 10
    mutation: float = 0.1
    norm_batches: int = 20

    def __post_init__(self) -> None:
        for name, least in (("generations", 0), ("population", 2), ("parents", 1), ("norm_batches", 1)):
            if getattr(self, name) < least:
                raise UserError(f"`evolution.{name} >= {least}` must hold, but got {getattr(self, name)}")
        if not 0.0 < self.mutation <= 1.0:
            raise UserError(f"`0 < evolution.mutation <= 1` must hold, but got {self.mutation}")

    @property
    def is_on(self) -> bool:
        return self.generations > 0


@dataclass(frozen=True, slots=True)
class Evolved:
    """The best architecture and its score; all that were scored, in order; the best score after each generation."""

    best: Genotype
    score: float
    scored: dict[Genotype, float]
    history: tuple[float, ...]


def evolve(
    layout: Layout,
    settings: Evolution,
    score: Callable[[Genotype], float],
    allowed: Callable[[Genotype], bool],
    seed: int,
    starts: Sequence[Genotype] = (),
    first: Sequence[Genotype] = (),
    on_generation: Callable[[int, float, int], None] = lambda number, best, scored: None,
) -> Evolved:
    """The architecture of the highest score found; every one is scored once. The same for the same seed.

    starts: architectures to mutate where random ones break the limits, such as the cheapest one.
    first: members of the first generation where they are within the limits, so that the result is no worse than they
        are.
    """
    running = evolving(layout, settings, allowed, seed, starts, first, on_generation)
    try:
        genotype = next(running)
        while True:
            genotype = running.send(score(genotype))
    except StopIteration as end:
        found: Evolved = end.value
        return found


def evolving(
    layout: Layout,
    settings: Evolution,
    allowed: Callable[[Genotype], bool],
    seed: int,
    starts: Sequence[Genotype] = (),
    first: Sequence[Genotype] = (),
    on_generation: Callable[[int, float, int], None] = lambda number, best, scored: None,
) -> Generator[Genotype, float, Evolved]:
    """`evolve` as a generator: yields each architecture and receives its score."""
    # A string is hashed: other uses of the same seed draw from other streams.
    rng, scored = random.Random(f"evolution {seed}"), dict[Genotype, float]()
    history: list[float] = []
    population = [genotype for genotype in dict.fromkeys(first) if allowed(genotype)]
    drawn = settings.population - len(population)
    population += _filled(drawn, lambda: random_architecture(layout, rng), allowed, set(population))
    within = [genotype for genotype in dict.fromkeys(starts) if genotype not in population and allowed(genotype)]
    # Under a tight limit random architectures rarely fit; neighbours of one that fits do more often.
    if len(population) < settings.population and within:
        population += within
        missing = settings.population - len(population)
        population += _filled(missing, lambda: mutate(layout, rng.choice(within), 0.5, rng), allowed, set(population))
    if not population:
        raise UserError("no architecture within the limits was found; raise them, or make the network smaller")
    for generation in range(settings.generations):
        for genotype in population:
            scored[genotype] = yield genotype
        ranked = sorted(scored, key=lambda g: -scored[g])  # stable: the first of equals wins
        history.append(scored[ranked[0]])
        on_generation(generation, history[-1], len(scored))
        if generation + 1 == settings.generations:
            break
        population = _next(layout, settings, ranked[: settings.parents], set(scored), allowed, rng)
        if not population:
            break  # everything within the limits is known
    best = max(scored, key=lambda g: scored[g])
    return Evolved(best, scored[best], scored, tuple(history))


def _next(
    layout: Layout,
    settings: Evolution,
    parents: list[Genotype],
    known: set[Genotype],
    allowed: Callable[[Genotype], bool],
    rng: random.Random,
) -> list[Genotype]:
    """The next generation: half crossed, the rest mutated, and random ones where too few new children are allowed."""
    size = settings.population
    found = _filled(size // 2, lambda: crossover(layout, rng.choice(parents), rng.choice(parents), rng), allowed, known)
    makers = (
        lambda: mutate(layout, rng.choice(parents), settings.mutation, rng),
        lambda: random_architecture(layout, rng),
    )
    for make in makers:
        found += _filled(size - len(found), make, allowed, known | set(found))
    return found


def crossover(layout: Layout, first: Genotype, second: Genotype, rng: random.Random) -> Genotype:
    """A child with each choice from one of its parents, by a fair coin."""
    rows = {}
    for table in layout.tables:
        pair = [_strengths(table, parent.cells[table.name], rng) for parent in (first, second)]
        rows[table.name] = torch.stack([pair[rng.random() < 0.5][i] for i in range(len(table))])
    return _derived(layout, rows)


def mutate(layout: Layout, parent: Genotype, probability: float, rng: random.Random) -> Genotype:
    """A child in which each choice is redrawn with `probability`."""
    rows = {}
    for table in layout.tables:
        strengths = _strengths(table, parent.cells[table.name], rng)
        for i in range(len(table)):
            if rng.random() < probability:
                # 0 to 2, the range of `_strengths`: the row may win against picks of the parent or lose to them.
                strengths[i] = torch.tensor([2.0 * rng.random() for _ in range(table.width)], dtype=torch.float64)
        rows[table.name] = strengths
    return _derived(layout, rows)


def mutate_one(layout: Layout, parent: Genotype, rng: random.Random) -> Genotype:
    """A child that differs from its parent in exactly one choice, drawn at random.

    Under a rule that keeps some edges per node, this replaces one of the node's inputs or its operation. In a space
    with a single architecture, this is the parent itself.
    """
    choices = [(table.name, i) for table in layout.tables for i in range(len(table))]
    strengths = {table.name: _strengths(table, parent.cells[table.name], rng) for table in layout.tables}
    child = parent
    for _ in range(TRIES * len(choices)):
        name, i = rng.choice(choices)
        rows = strengths[name].clone()
        rows[i] = torch.tensor([2.0 * rng.random() for _ in range(rows.shape[1])], dtype=torch.float64)
        child = _derived(layout, {**strengths, name: rows})
        # One new row may change two picks (NOS: a node needs a feature operation). Retry then.
        if _num_changes(parent, child) == 1:
            break
    return child


def _num_changes(first: Genotype, second: Genotype) -> int:
    """How many picks of the first must be replaced, added or removed to get the second."""
    pairs = [(set(cell.picks), set(second.cells[name].picks)) for name, cell in first.cells.items()]
    return sum(max(len(a - b), len(b - a)) for a, b in pairs)


def _strengths(table: Table, cell: Cell, rng: random.Random) -> Tensor:
    """Above 1 at the picks of a cell and below elsewhere, at random in between, so that ties are broken evenly."""
    values = torch.tensor([[rng.random() for _ in range(table.width)] for _ in table.choices], dtype=torch.float64)
    taken = {(pick.source, pick.target, pick.op) for pick in cell.picks}
    for i, choice in enumerate(table.choices):
        for k, op in enumerate(choice.candidates):
            if (choice.source, choice.target, op) in taken:
                values[i, k] += 1.0
    return values


def _derived(layout: Layout, strengths: dict[str, Tensor]) -> Genotype:
    cells = {table.name: Cell(layout.rule(table, strengths[table.name]), table.output) for table in layout.tables}
    return Genotype(layout.space, cells, settings=layout.settings)


def _filled(
    number: int, make: Callable[[], Genotype], allowed: Callable[[Genotype], bool], known: set[Genotype]
) -> list[Genotype]:
    """Up to `number` new and allowed architectures."""
    found: dict[Genotype, None] = {}
    for _ in range(number):
        for _ in range(TRIES):
            genotype = make()
            if genotype not in known and genotype not in found and allowed(genotype):
                found[genotype] = None
                break
        else:
            # Few are left: each further one would take that many attempts.
            break
    return list(found)
