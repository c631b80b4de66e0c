"""Derivation rules: from the strengths of a table's candidates to its picks.

A rule maps strengths [choices, width] to picks. It also draws uniform random architectures and counts all of them, so
that a random baseline and the size of a space follow from the same definition. Ties go to the lower source and the
earlier candidate: a derivation never depends on sorting order.
"""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from softcell.arch.choice import Choice, Pick, Table
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
        """The picks of a method's own rule completed to an architecture that this rule allows."""
        return picks

    @abstractmethod
    def enumerate(self, table: Table) -> Iterator[tuple[Pick, ...]]:
        """Every architecture the rule can derive from the table."""

    @abstractmethod
    def count(self, table: Table) -> int:
        """The number of architectures that `enumerate` would yield, in closed form."""

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
            allowed = allowed_candidates(choice.candidates, self.exclude)
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
            [Pick(c.source, c.target, c.candidates[k]) for k in allowed_candidates(c.candidates, self.exclude)]
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
                best = max(allowed_candidates(choice.candidates, self.exclude), key=strongest(row))
                # Sorted by strength, then source: ties go to the lower source.
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
            # Subsets of edges weigh as much as the architectures they represent: that makes ragged tables uniform too.
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
            allowed = allowed_candidates(choice.candidates, self.exclude)
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
        # From 1: a node keeps at least one connection.
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
        """(choice, candidate, pick) of all possible inputs of a node, by source, then candidate."""
        found = []
        for index in sorted(table.incoming(target), key=lambda i: table.choices[i].source):
            choice = table.choices[index]
            for k in allowed_candidates(choice.candidates, self.exclude):
                found.append((index, k, Pick(choice.source, target, choice.candidates[k])))
        return found


@dataclass(frozen=True)
class FeaturePairs(Rule):
    """Per node the pair of operations on two edges with the largest sum, at least one of them in `features` (NOS).

    "We retain the top-2 strongest incoming operations with at least one feature transformation operation for the
    first-tier, and the top-1 strongest operation for the second-tier" (§3.3). A first tier without a feature operation
    would be zero: there would be nothing to calibrate. A node with one incoming edge (second tier) keeps its strongest
    candidate of any kind.

    Example:
        >>> import torch
        >>> from softcell.arch import Choice, FeaturePairs, Table
        >>> both = ("conv", "attention")
        >>> table = Table("cell", (Choice(0, 2, both), Choice(1, 2, both)), output=(2,))
        >>> strengths = torch.tensor([[0.1, 0.9], [0.3, 0.7]])  # attention is the strongest on both edges
        >>> [str(pick) for pick in FeaturePairs(features=("conv",))(table, strengths)]
        ['attention(0->2)', 'conv(1->2)']
    """

    features: tuple[str, ...]

    def __call__(self, table: Table, strengths: Tensor) -> tuple[Pick, ...]:
        values = rows(table, strengths)
        picks: list[Pick] = []
        for target in table.targets:
            edges = [(table.choices[i], values[i]) for i in table.incoming(target)]
            if len(edges) == 1:
                choice, row = edges[0]
                picks.append(_pick(choice, _best(choice, row)))
            else:
                picks += self._pair(edges)
        return tuple(picks)

    def _pair(self, edges: Sequence[tuple[Choice, list[float]]]) -> tuple[Pick, ...]:
        found: tuple[float, tuple[Pick, ...]] | None = None
        for (first, a), (second, b) in itertools.combinations(edges, 2):
            for i, j in self._candidates(first, a, second, b):
                strength = a[i] + b[j]
                # Strictly larger: of equally strong pairs the first stays.
                if found is None or strength > found[0]:
                    found = strength, (_pick(first, i), _pick(second, j))
        assert found is not None, "a first tier needs a feature candidate on one of its edges"
        return found[1]

    def _candidates(self, first: Choice, a: list[float], second: Choice, b: list[float]) -> Iterator[tuple[int, int]]:
        """The strongest pairs with a feature on the first edge, and with one on the second: one of them is the best."""
        if self._has_feature(first):
            yield self._best_feature(first, a), _best(second, b)
        if self._has_feature(second):
            yield _best(first, a), self._best_feature(second, b)

    def complete(self, table: Table, strengths: Tensor, picks: tuple[Pick, ...]) -> tuple[Pick, ...]:
        """Another rule's picks with a feature at every first tier, exchanged at the least loss of strength."""
        values = rows(table, strengths)
        result = list(picks)
        for target in table.targets:
            choices = table.incoming(target)
            own = [i for i, pick in enumerate(result) if pick.target == target]
            # A node with one incoming edge is a second tier, where any kind may stay.
            if len(choices) == 1 or not own or any(result[i].op in self.features for i in own):
                continue
            by_source = {table.choices[c].source: c for c in choices}
            loss: dict[int, tuple[float, int]] = {}  # number of a pick: what an exchange loses, and for which candidate
            for i in own:
                c = by_source[result[i].source]
                choice, row = table.choices[c], values[c]
                if self._has_feature(choice):
                    k = self._best_feature(choice, row)
                    loss[i] = row[choice.candidates.index(result[i].op)] - row[k], k
            assert loss, "a first tier needs a feature candidate on one of its edges"
            i = min(loss, key=lambda number: loss[number][0])
            result[i] = _pick(table.choices[by_source[result[i].source]], loss[i][1])
        return tuple(result)

    def enumerate(self, table: Table) -> Iterator[tuple[Pick, ...]]:
        for nodes in itertools.product(*(list(self._node(table, target)) for target in table.targets)):
            yield tuple(itertools.chain.from_iterable(nodes))

    def count(self, table: Table) -> int:
        return prod(sum(self._weights(table, target)) for target in table.targets)

    def sample(self, table: Table, rng: random.Random) -> tuple[Pick, ...]:
        picks: list[Pick] = []
        for target in table.targets:
            subsets = self._subsets(table, target)
            # Pairs of edges weigh as much as the architectures they represent: that makes ragged tables uniform too.
            (subset,) = rng.choices(subsets, self._weights(table, target))
            drawn = _draw(subset, rng)
            # Rejected, not repaired: all pairs with a feature stay equally likely.
            while len(subset) > 1 and not self._has_pick(drawn):
                drawn = _draw(subset, rng)
            picks += drawn
        return tuple(picks)

    def _node(self, table: Table, target: int) -> Iterator[tuple[Pick, ...]]:
        for subset in self._subsets(table, target):
            for picks in itertools.product(*([_pick(c, k) for k in range(len(c.candidates))] for c in subset)):
                if len(subset) == 1 or self._has_pick(picks):
                    yield picks

    def _subsets(self, table: Table, target: int) -> list[tuple[Choice, ...]]:
        choices = [table.choices[i] for i in table.incoming(target)]
        return list(itertools.combinations(choices, min(2, len(choices))))

    def _weights(self, table: Table, target: int) -> list[int]:
        """The number of architectures of each pair of edges: all but those without a feature."""
        result = []
        for subset in self._subsets(table, target):
            everything = prod(len(choice.candidates) for choice in subset)
            without = prod(sum(op not in self.features for op in choice.candidates) for choice in subset)
            result.append(everything if len(subset) == 1 else everything - without)
        return result

    def _has_feature(self, choice: Choice) -> bool:
        return any(op in self.features for op in choice.candidates)

    def _has_pick(self, picks: Sequence[Pick]) -> bool:
        return any(pick.op in self.features for pick in picks)

    def _best_feature(self, choice: Choice, row: list[float]) -> int:
        allowed = [k for k, op in enumerate(choice.candidates) if op in self.features]
        return max(allowed, key=strongest(row))


def rows(table: Table, strengths: Tensor) -> list[list[float]]:
    """Strengths as Python numbers; padding is ignored. NaN raises `UserError`."""
    assert tuple(strengths.shape) == table.shape, f"strengths {tuple(strengths.shape)} for a table of {table.shape}"
    # One copy per table: every number that is read by itself synchronises with the device.
    rows: list[list[float]] = strengths.detach().cpu().double().tolist()
    for choice, row in zip(table.choices, rows, strict=True):
        for name, value in zip(choice.candidates, row, strict=False):
            if value != value:
                raise UserError(f"strength of {name} on {choice} is not a number; the search has diverged")
    return rows


def strongest(row: list[float]) -> Callable[[int], tuple[float, int]]:
    """A sorting key: the stronger candidate, in a tie the earlier one."""
    return lambda k: (row[k], -k)


def allowed_candidates(candidates: tuple[str, ...], exclude: tuple[str, ...]) -> list[int]:
    """Indices of the candidates a rule may pick; where nothing else is left, the excluded ones stay."""
    allowed = [k for k, name in enumerate(candidates) if name not in exclude]
    return allowed or list(range(len(candidates)))


def _best(choice: Choice, row: list[float]) -> int:
    return max(range(len(choice.candidates)), key=strongest(row))


def _pick(choice: Choice, k: int) -> Pick:
    return Pick(choice.source, choice.target, choice.candidates[k])


def _draw(subset: Sequence[Choice], rng: random.Random) -> list[Pick]:
    return [_pick(choice, rng.randrange(len(choice.candidates))) for choice in subset]
