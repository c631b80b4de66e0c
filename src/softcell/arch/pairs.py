"""The rule of Neural Operator Search: two inputs per node, at least one of them by a feature operation.

"We retain the top-2 strongest incoming operations with at least one feature transformation operation for the
first-tier, and the top-1 strongest operation for the second-tier" (§3.3). A node without any feature operation would be
zero: there would be nothing to calibrate.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from softcell.arch.choice import Choice, Pick, Table
from softcell.arch.derive import Rule, rows, strongest

Edge = tuple[Choice, list[float]]


@dataclass(frozen=True)
class FeaturePairs(Rule):
    """Per node the pair of operations on two edges with the largest sum, one at least of `features`.

    A node with one incoming edge (second tier) keeps its strongest candidate, whatever it is. Ties go to the lower
    sources, then to the earlier candidates.

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

    def _pair(self, edges: Sequence[Edge]) -> tuple[Pick, ...]:
        found: tuple[float, tuple[Pick, ...]] | None = None
        for (first, a), (second, b) in itertools.combinations(edges, 2):
            for i, j in self._candidates(first, a, second, b):
                strength = a[i] + b[j]
                if found is None or strength > found[0]:
                    found = strength, (_pick(first, i), _pick(second, j))
        assert found is not None, "a first tier needs a feature candidate on one of its edges"
        return found[1]

    def _candidates(self, first: Choice, a: list[float], second: Choice, b: list[float]) -> Iterator[tuple[int, int]]:
        """The best pairs of two edges: a feature on the first, a feature on the second."""
        if self._has_feature(first):
            yield self._best_feature(first, a), _best(second, b)
        if self._has_feature(second):
            yield _best(first, a), self._best_feature(second, b)

    def complete(self, table: Table, strengths: Tensor, picks: tuple[Pick, ...]) -> tuple[Pick, ...]:
        """Another rule's picks with a feature operation at every first tier: the exchange that loses least strength."""
        values = rows(table, strengths)
        result = list(picks)
        for target in table.targets:
            choices = table.incoming(target)
            own = [i for i, pick in enumerate(result) if pick.target == target]
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
            # Pairs of edges weigh as much as the architectures they stand for: that makes ragged tables uniform too.
            (subset,) = rng.choices(subsets, self._weights(table, target))
            drawn = _draw(subset, rng)
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
        """How many architectures each pair of edges stands for: all less those without a feature."""
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


def _best(choice: Choice, row: list[float]) -> int:
    return max(range(len(choice.candidates)), key=strongest(row))


def _pick(choice: Choice, k: int) -> Pick:
    return Pick(choice.source, choice.target, choice.candidates[k])


def _draw(subset: Sequence[Choice], rng: random.Random) -> list[Pick]:
    return [_pick(choice, rng.randrange(len(choice.candidates))) for choice in subset]
