"""The order of items within the ranks of a layered drawing, chosen to cross few links.

Items are numbers. A link joins an item to one of the next rank. Barycentre sweeps (Sugiyama, Tagawa and Toda 1981),
then swaps of neighbours as long as they help; every step is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

SWEEPS = 12

Neighbours = Sequence[Sequence[int]]


def order(ranks: Sequence[Sequence[int]], left: Neighbours, right: Neighbours) -> list[list[int]]:
    """The ranks in a good order. `left[item]` and `right[item]` list linked items of the rank before and after."""
    best = [list(rank) for rank in ranks]
    fewest = crossings(best, right)
    for first_to_last in (True, False):
        current = [list(rank) for rank in ranks]
        for sweep in range(SWEEPS):
            if fewest == 0:
                return best
            rightwards = (sweep % 2 == 0) == first_to_last
            steps = range(1, len(current)) if rightwards else range(len(current) - 2, -1, -1)
            for rank in steps:
                fixed = current[rank - 1 if rightwards else rank + 1]
                current[rank] = _by_barycentre(current[rank], fixed, left if rightwards else right)
            _swap(current, left, right)
            found = crossings(current, right)
            if found < fewest:
                best, fewest = [list(rank) for rank in current], found
    return best


def crossings(ranks: Sequence[Sequence[int]], right: Neighbours) -> int:
    """How many pairs of links cross."""
    total = 0
    for rank, after in pairwise(ranks):
        place = {item: i for i, item in enumerate(after)}
        seen: list[int] = []
        for item in rank:
            ends = [place[other] for other in right[item]]
            total += sum(1 for end in ends for earlier in seen if earlier > end)
            seen += ends
    return total


def _by_barycentre(rank: list[int], fixed: list[int], neighbours: Neighbours) -> list[int]:
    place = {item: i for i, item in enumerate(fixed)}
    # An item without links keeps its relative place.
    stretch = len(fixed) / max(len(rank), 1)
    centre = {
        item: sum(place[n] for n in neighbours[item]) / len(neighbours[item]) if neighbours[item] else i * stretch
        for i, item in enumerate(rank)
    }
    return sorted(rank, key=lambda item: centre[item])


def _swap(ranks: list[list[int]], left: Neighbours, right: Neighbours) -> None:
    """Swaps neighbours within a rank while that removes crossings."""
    for _ in range(4):
        improved = False
        for index, rank in enumerate(ranks):
            sides = []
            if index > 0:
                sides.append(({item: i for i, item in enumerate(ranks[index - 1])}, left))
            if index + 1 < len(ranks):
                sides.append(({item: i for i, item in enumerate(ranks[index + 1])}, right))
            for i in range(len(rank) - 1):
                gain = 0
                for place, neighbours in sides:
                    upper = [place[n] for n in neighbours[rank[i]]]
                    lower = [place[n] for n in neighbours[rank[i + 1]]]
                    gain += sum((a > b) - (a < b) for a in upper for b in lower)
                if gain > 0:
                    rank[i], rank[i + 1] = rank[i + 1], rank[i]
                    improved = True
        if not improved:
            return
