"""From strengths to an architecture: the rules that spaces and papers derive with.

A rule maps the strengths [choices, width] of one table to its picks. It can also draw a uniform random architecture
and count all of them, so that a random baseline and the size of a space come from the same definition. Ties go to the
lower source and the earlier candidate, so that a derivation never depends on sorting order.
"""

from __future__ import annotations

import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from softcell.arch.choice import Layout, Pick, Table
from softcell.arch.genotype import Cell, Genotype
from softcell.errors import UserError


class Rule(ABC):
    """One way to derive the picks of a table.

    Example:
        >>> from softcell.arch import Choice, Rule, StrongestEach, Table
        >>> table = Table("cell", (Choice(0, 1, ("none", "skip_connect", "conv")),), output=(1,))
        >>> rule: Rule = StrongestEach()
        >>> rule.count(table), len(list(rule.enumerate(table)))
        (3, 3)
    """

    @property
    def never_picked(self) -> tuple[str, ...]:
        """Candidates that are not derived where an edge has others."""
        return ()

    @abstractmethod
    def __call__(self, table: Table, strengths: Tensor) -> tuple[Pick, ...]:
        """strengths [choices, width] to picks, ordered by target, then source."""

    def complete(self, table: Table, strengths: Tensor, picks: tuple[Pick, ...]) -> tuple[Pick, ...]:
        """The picks of a method's own rule with what every architecture of a space with this rule must have."""
        return picks

    @abstractmethod
    def enumerate(self, table: Table) -> Iterator[tuple[Pick, ...]]:
        """Every architecture the rule can derive from the table."""

    @abstractmethod
    def count(self, table: Table) -> int:
        """How many architectures `enumerate` would give, in closed form."""

    @abstractmethod
    def sample(self, table: Table, rng: random.Random) -> tuple[Pick, ...]:
        """One of them, uniformly."""


@dataclass(frozen=True)
class StrongestEach(Rule):
    """The strongest candidate of every choice, `none` among them unless excluded (NAS-Bench-201, chains, SNAS).

    Example:
        >>> import torch
        >>> from softcell.arch import Choice, StrongestEach, Table
        >>> table = Table("cell", (Choice(0, 1, ("none", "skip_connect", "conv")),), output=(1,))
        >>> strengths = torch.tensor([[0.5, 0.2, 0.3]])
        >>> [str(pick) for pick in StrongestEach()(table, strengths)]
        ['none(0->1)']
        >>> [str(pick) for pick in StrongestEach(exclude=("none",))(table, strengths)]
        ['conv(0->1)']
    """

    exclude: tuple[str, ...] = ()

    @property
    def never_picked(self) -> tuple[str, ...]:
        return self.exclude

    def __call__(self, table: Table, strengths: Tensor) -> tuple[Pick, ...]:
        values = rows(table, strengths)
        picks = []
        for choice, row in zip(table.choices, values, strict=True):
            allowed = _allowed(choice.candidates, self.exclude)
            best = max(allowed, key=strongest(row))
            picks.append(Pick(choice.source, choice.target, choice.candidates[best]))
        return tuple(picks)

    def enumerate(self, table: Table) -> Iterator[tuple[Pick, ...]]:
        for combination in itertools.product(*self._options(table)):
            yield tuple(combination)

    def count(self, table: Table) -> int:
        return prod(len(options) for options in self._options(table))

    def sample(self, table: Table, rng: random.Random) -> tuple[Pick, ...]:
        return tuple(rng.choice(options) for options in self._options(table))

    def _options(self, table: Table) -> list[list[Pick]]:
        return [
            [Pick(c.source, c.target, c.candidates[k]) for k in _allowed(c.candidates, self.exclude)]
            for c in table.choices
        ]


@dataclass(frozen=True)
class TopInputs(Rule):
    """Per node the `inputs` strongest edges, each with its strongest candidate (DARTS: two, `none` excluded).

    An edge is as strong as its strongest allowed candidate. A node with fewer incoming edges keeps all of them.

    Example:
        >>> import torch
        >>> from softcell.arch import Choice, Table, TopInputs
        >>> edges = tuple(Choice(source, 3, ("none", "skip_connect")) for source in range(3))
        >>> table = Table("cell", edges, output=(3,))
        >>> strengths = torch.tensor([[0.7, 0.3], [0.9, 0.1], [0.2, 0.8]])
        >>> [str(pick) for pick in TopInputs(inputs=2)(table, strengths)]
        ['skip_connect(0->3)', 'skip_connect(2->3)']
    """

    inputs: int = 2
    exclude: tuple[str, ...] = ("none",)

    def __post_init__(self) -> None:
        if self.inputs < 1:
            raise UserError(f"`inputs >= 1` must hold, but got inputs={self.inputs}")

    @property
    def never_picked(self) -> tuple[str, ...]:
        return self.exclude

    def __call__(self, table: Table, strengths: Tensor) -> tuple[Pick, ...]:
        values = rows(table, strengths)
        picks: list[Pick] = []
        for target in table.targets:
            ranked = []
            for index in table.incoming(target):
                choice, row = table.choices[index], values[index]
                best = max(_allowed(choice.candidates, self.exclude), key=strongest(row))
                ranked.append((-row[best], choice.source, choice.candidates[best]))
            kept = sorted(ranked)[: self._kept(table, target)]
            picks += sorted((Pick(s, target, op) for _, s, op in kept), key=lambda pick: pick.source)
        return tuple(picks)

    def enumerate(self, table: Table) -> Iterator[tuple[Pick, ...]]:
        for nodes in itertools.product(*(list(self._node(table, target)) for target in table.targets)):
            yield tuple(itertools.chain.from_iterable(nodes))

    def count(self, table: Table) -> int:
        return prod(self._node_count(table, target) for target in table.targets)

    def sample(self, table: Table, rng: random.Random) -> tuple[Pick, ...]:
        picks: list[Pick] = []
        for target in table.targets:
            # Subsets of edges weigh as much as the architectures they stand for: that makes ragged tables uniform too.
            subsets = list(itertools.combinations(self._edges(table, target), self._kept(table, target)))
            weights = [prod(len(options) for options in subset) for subset in subsets]
            (subset,) = rng.choices(subsets, weights)
            picks += [rng.choice(options) for options in subset]
        return tuple(picks)

    def _kept(self, table: Table, target: int) -> int:
        return min(self.inputs, len(table.incoming(target)))

    def _edges(self, table: Table, target: int) -> list[list[Pick]]:
        edges = []
        for index in table.incoming(target):
            choice = table.choices[index]
            allowed = _allowed(choice.candidates, self.exclude)
            edges.append([Pick(choice.source, target, choice.candidates[k]) for k in allowed])
        return sorted(edges, key=lambda options: options[0].source)

    def _node(self, table: Table, target: int) -> Iterator[tuple[Pick, ...]]:
        for subset in itertools.combinations(self._edges(table, target), self._kept(table, target)):
            yield from itertools.product(*subset)

    def _node_count(self, table: Table, target: int) -> int:
        subsets = itertools.combinations(self._edges(table, target), self._kept(table, target))
        return sum(prod(len(options) for options in subset) for subset in subsets)


@dataclass(frozen=True)
class Positive(Rule):
    """Every candidate of positive strength, any number of them per edge and node (EnTranNAS-DST, Eq 10).

    A node without any keeps its strongest one, so that no architecture has a node without inputs.

    Example:
        >>> import torch
        >>> from softcell.arch import Choice, Positive, Table
        >>> table = Table("cell", (Choice(0, 2, ("pool", "conv")), Choice(1, 2, ("pool", "conv"))), output=(2,))
        >>> [str(pick) for pick in Positive()(table, torch.tensor([[0.4, 0.6], [0.0, 0.0]]))]
        ['pool(0->2)', 'conv(0->2)']
    """

    exclude: tuple[str, ...] = ("none",)

    @property
    def never_picked(self) -> tuple[str, ...]:
        return self.exclude

    def __call__(self, table: Table, strengths: Tensor) -> tuple[Pick, ...]:
        values = rows(table, strengths)
        picks: list[Pick] = []
        for target in table.targets:
            found = [(values[index][k], pick) for index, k, pick in self._connections(table, target)]
            kept = [pick for value, pick in found if value > 0]
            picks += kept or [max(found, key=lambda item: item[0])[1]]  # max gives the first of equals
        return tuple(picks)

    def enumerate(self, table: Table) -> Iterator[tuple[Pick, ...]]:
        for chosen in itertools.product(*(range(1, 1 << n) for n in self._sizes(table))):
            yield self._subsets(table, chosen)

    def count(self, table: Table) -> int:
        return prod((1 << n) - 1 for n in self._sizes(table))

    def sample(self, table: Table, rng: random.Random) -> tuple[Pick, ...]:
        return self._subsets(table, [rng.randrange(1, 1 << n) for n in self._sizes(table)])

    def _sizes(self, table: Table) -> list[int]:
        return [len(self._connections(table, target)) for target in table.targets]

    def _subsets(self, table: Table, chosen: Sequence[int]) -> tuple[Pick, ...]:
        """The picks whose bits are set, node by node."""
        return tuple(
            pick
            for target, bits in zip(table.targets, chosen, strict=True)
            for i, (_, _, pick) in enumerate(self._connections(table, target))
            if bits >> i & 1
        )

    def _connections(self, table: Table, target: int) -> list[tuple[int, int, Pick]]:
        """(choice, candidate, pick) of all that may arrive at a node, by source, then candidate."""
        found = []
        for index in sorted(table.incoming(target), key=lambda i: table.choices[i].source):
            choice = table.choices[index]
            for k in _allowed(choice.candidates, self.exclude):
                found.append((index, k, Pick(choice.source, target, choice.candidates[k])))
        return found


def derive(
    layout: Layout, strengths: Mapping[str, Tensor], rule: Rule | None = None, about: Mapping[str, object] | None = None
) -> Genotype:
    """The genotype that `rule` (by default the space's own) makes of every table's strengths [choices, width].

    Where the space asks more of its architectures than another rule knows of, its own rule completes them.

    Example:
        >>> import torch
        >>> from softcell.arch import derive
        >>> from softcell.spaces import build_space
        >>> layout = build_space("nb201").layout()
        >>> strengths = {table.name: torch.zeros(table.shape) for table in layout.tables}
        >>> strengths["cell"][:, 3] = 1.0
        >>> {pick.op for pick in derive(layout, strengths).cells["cell"].picks}
        {'nor_conv_3x3'}
    """
    cells = {
        table.name: Cell(derive_picks(layout, table, strengths[table.name], rule), table.output)
        for table in layout.tables
    }
    return Genotype(layout.space, cells, settings=layout.settings, about=dict(about or {}))


def derive_picks(layout: Layout, table: Table, strengths: Tensor, rule: Rule | None = None) -> tuple[Pick, ...]:
    """The picks of one table, strengths [choices, width], as `derive` makes them."""
    picks = (rule or layout.rule)(table, strengths)
    if rule is not None and isinstance(layout.rule, Rule):
        picks = layout.rule.complete(table, strengths, picks)
    return picks


def derive_cheapest(layout: Layout, costs: Mapping[str, Tensor], rule: Rule | None = None) -> Genotype:
    """The architecture that costs least among those `rule` derives and whose cells reach their outputs.

    costs: per table [choices, width], what a candidate costs on its edge, none below 0. Where a rule may derive `none`
    on an edge, it is one path from an input to an output node: every further edge and node only adds to the cost.

    Example:
        >>> import torch
        >>> from softcell.arch import derive_cheapest
        >>> from softcell.spaces import build_space
        >>> layout = build_space("nb201").layout()
        >>> costs = {"cell": torch.tensor([[0.0, 1.0, 9.0, 9.0, 9.0]]).expand(layout.tables[0].shape)}
        >>> [str(pick) for pick in derive_cheapest(layout, costs).cells["cell"].picks if pick.op != "none"]
        ['skip_connect(0->3)']
    """
    own, strengths = rule or layout.rule, {}
    for table in layout.tables:
        values = rows(table, costs[table.name])
        kept = _cheapest_path(table, values, own.exclude) if isinstance(own, StrongestEach) else None
        strengths[table.name] = -costs[table.name] if kept is None else kept.to(costs[table.name])
    return derive(layout, strengths, rule)


def derives_cheapest(layout: Layout, rule: Rule | None = None) -> bool:
    """Whether what `derive_cheapest` gives is known to be the minimum: costs are sums over the picks of these rules.

    Example:
        >>> from softcell.arch import derives_cheapest
        >>> from softcell.spaces import build_space
        >>> derives_cheapest(build_space("nb201").layout()), derives_cheapest(build_space("nos").layout())
        (True, False)
    """
    space_rule = layout.rule
    completed = rule is not None and isinstance(space_rule, Rule) and type(space_rule).complete is not Rule.complete
    return isinstance(rule or space_rule, StrongestEach | TopInputs | Positive) and not completed


def _cheapest_path(table: Table, costs: list[list[float]], exclude: tuple[str, ...]) -> Tensor:
    """Strengths [choices, width], 1 for what is kept: the cheapest path to an output node, elsewhere `none`."""
    least: list[tuple[float, int]] = []  # by choice: what the cheapest operation adds, and which it is
    none: list[int | None] = []
    for choice, row in zip(table.choices, costs, strict=True):
        allowed = _allowed(choice.candidates, exclude)
        nothing = next((k for k in allowed if choice.candidates[k] == "none"), None)
        best = min((k for k in allowed if k != nothing), key=lambda k: (row[k], k), default=None)
        # An edge that cannot be `none` is there anyway.
        least.append((math.inf, 0) if best is None else (0.0 if nothing is None else row[best], best))
        none.append(nothing)
    paths: dict[int, tuple[float, tuple[int, ...]]] = {
        node: (0.0, ()) for node in (*table.sources, *table.output) if node not in table.targets
    }
    for target in table.targets:
        arriving = [
            (paths[source][0] + least[index][0], (*paths[source][1], index))
            for index in table.incoming(target)
            if (source := table.choices[index].source) in paths and least[index][0] < math.inf
        ]
        if arriving:
            paths[target] = min(arriving)
    kept = min((paths[node] for node in table.output if node in paths), default=(0.0, ()))[1]
    strengths = torch.zeros(table.shape, dtype=torch.float64)
    for index, (nothing, (_, best)) in enumerate(zip(none, least, strict=True)):
        strengths[index, best if index in kept or nothing is None else nothing] = 1.0
    return strengths


def sample(layout: Layout, seed: int) -> Genotype:
    """A uniformly random architecture of the space; the same for the same seed on every machine.

    Example:
        >>> from softcell.arch import sample
        >>> from softcell.spaces import build_space
        >>> layout = build_space("nb201").layout()
        >>> sample(layout, seed=1) == sample(layout, seed=1)
        True
    """
    rng = random.Random(seed)
    rule = layout.rule
    assert isinstance(rule, Rule)
    cells = {table.name: Cell(rule.sample(table, rng), table.output) for table in layout.tables}
    return Genotype(layout.space, cells, settings=layout.settings, about={"method": "random", "seed": seed})


def count(layout: Layout) -> int:
    """The number of architectures of the space.

    Example:
        >>> from softcell.arch import count
        >>> from softcell.spaces import build_space
        >>> count(build_space("nb201").layout())
        15625
    """
    rule = layout.rule
    assert isinstance(rule, Rule)
    return prod(rule.count(table) for table in layout.tables)


def rows(table: Table, strengths: Tensor) -> list[list[float]]:
    """Strengths as Python numbers; padding is simply never looked at. A value that is no number is refused."""
    assert tuple(strengths.shape) == table.shape, f"strengths {tuple(strengths.shape)} for a table of {table.shape}"
    rows: list[list[float]] = strengths.detach().double().cpu().tolist()
    for choice, row in zip(table.choices, rows, strict=True):
        for name, value in zip(choice.candidates, row, strict=False):
            if value != value:
                raise UserError(f"strength of {name} on {choice} is not a number; the search has diverged")
    return rows


def strongest(row: list[float]) -> Callable[[int], tuple[float, int]]:
    """A sorting key: the stronger candidate, in a tie the earlier one."""
    return lambda k: (row[k], -k)


def _allowed(candidates: tuple[str, ...], exclude: tuple[str, ...]) -> list[int]:
    """Indices of the candidates a rule may pick; where nothing else is left, the excluded ones stay."""
    allowed = [k for k, name in enumerate(candidates) if name not in exclude]
    return allowed or list(range(len(candidates)))
