"""Vertical places for ordered ranks: links as straight as the distances between items allow.

Each rank in turn takes the places its linked neighbours ask for, in the least-squares sense, under the constraint that
neighbours within the rank keep their distance: an isotonic regression, solved exactly by pooling adjacent violators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SWEEPS = 16


@dataclass(frozen=True, slots=True)
class Pull:
    """Item wants to lie `shift` below `other`, as strongly as `weight`."""

    other: int
    shift: float
    weight: float


def settle(
    ranks: Sequence[Sequence[int]], pulls: Sequence[Sequence[Pull]], heights: Sequence[float], gap: float
) -> list[float]:
    """The vertical centre of every item; items of a rank are at least `gap` apart and keep their order."""
    centre = [0.0] * len(heights)
    home = {item: r for r, rank in enumerate(ranks) for item in rank}
    offsets = []
    for rank in ranks:
        offset, total = [0.0] * len(rank), 0.0
        for i in range(1, len(rank)):
            total += (heights[rank[i - 1]] + heights[rank[i]]) / 2 + gap
            offset[i] = total
        offsets.append(offset)
        for item, place in zip(rank, offset, strict=True):
            centre[item] = place - total / 2
    for sweep in range(SWEEPS):
        backwards = sweep % 2 == 1
        for r in reversed(range(len(ranks))) if backwards else range(len(ranks)):
            if not ranks[r]:
                continue
            wishes, weights = [], []
            for item in ranks[r]:
                # Early sweeps listen to the side they come from, late ones to both.
                heard = [p for p in pulls[item] if sweep >= 4 or (home[p.other] > r) == backwards]
                weight = sum(p.weight for p in heard)
                wish = sum(p.weight * (centre[p.other] + p.shift) for p in heard)
                wishes.append(wish / weight if heard else centre[item])
                weights.append(weight if heard else 0.01)
            for item, place in zip(ranks[r], _isotonic(wishes, weights, offsets[r]), strict=True):
                centre[item] = place
    return centre


class Straightener:
    """Moves items of a settled drawing onto common horizontals, where their neighbours leave room for it."""

    def __init__(
        self,
        ranks: Sequence[Sequence[int]],
        chains: Sequence[Sequence[int]],
        ports: Sequence[tuple[float, float]],
        heights: Sequence[float],
        gap: float,
    ) -> None:
        self.ranks, self.chains, self.ports, self.heights, self.gap = ranks, chains, ports, heights, gap
        self.home = {item: (r, i) for r, rank in enumerate(ranks) for i, item in enumerate(rank)}

    def room(self, item: int, centre: Sequence[float]) -> tuple[float, float]:
        """How far up and down an item may move."""
        rank, i = self.ranks[self.home[item][0]], self.home[item][1]
        low, high = float("-inf"), float("inf")
        if i > 0:
            low = centre[rank[i - 1]] + (self.heights[rank[i - 1]] + self.heights[item]) / 2 + self.gap
        if i + 1 < len(rank):
            high = centre[rank[i + 1]] - (self.heights[rank[i + 1]] + self.heights[item]) / 2 - self.gap
        return low, high

    def chains_on(self, centre: list[float]) -> None:
        """Lays the inner items of each chain on few horizontals, those that meet a node's port if they can."""
        # The longest chains first: they show their bends the most.
        for link in sorted(range(len(self.chains)), key=lambda i: (-len(self.chains[i]), i)):
            chain = self.chains[link]
            start, end = centre[chain[0]] + self.ports[link][0], centre[chain[-1]] + self.ports[link][1]
            inner = list(chain[1:-1])
            while inner:
                low, high = float("-inf"), float("inf")
                run: list[int] = []
                for item in inner:
                    lower, upper = self.room(item, centre)
                    if max(low, lower) > min(high, upper):
                        break
                    low, high = max(low, lower), min(high, upper)
                    run.append(item)
                if not run:  # rounding left this item without any room: it stays
                    inner = inner[1:]
                    continue
                inner = inner[len(run) :]
                wishes = [end] if not inner else []
                wishes += [start] if run[0] == chain[1] else []
                wishes.append(sum(centre[item] for item in run) / len(run))
                fitting = [wish for wish in wishes if low <= wish <= high]
                level = fitting[0] if fitting else min(max(wishes[-1], low), high)
                for item in run:
                    centre[item] = level

    def nodes_on(self, centre: list[float], reach: float) -> None:
        """Moves a node by up to `reach` onto the only link of one of its sides."""
        for tip, step, side in ((-1, -2, 1), (0, 1, 0)):
            links: dict[int, list[int]] = {}
            for link, chain in enumerate(self.chains):
                links.setdefault(chain[tip], []).append(link)
            for node, mine in links.items():
                if len(mine) != 1:
                    continue
                wish = centre[self.chains[mine[0]][step]] - self.ports[mine[0]][side]
                low, high = self.room(node, centre)
                if low <= wish <= high and abs(wish - centre[node]) <= reach:
                    centre[node] = wish


def _isotonic(wishes: Sequence[float], weights: Sequence[float], offsets: Sequence[float]) -> list[float]:
    """The places nearest to the wishes that grow at least as `offsets` do."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, members
    for wish, weight, offset in zip(wishes, weights, offsets, strict=True):
        mean, total, members = wish - offset, weight, 1
        while blocks and blocks[-1][0] >= mean:
            before, heavy, many = blocks.pop()
            mean = (mean * total + before * heavy) / (total + heavy)
            total, members = total + heavy, members + many
        blocks.append((mean, total, members))
    flat = [mean for mean, _, members in blocks for _ in range(members)]
    return [mean + offset for mean, offset in zip(flat, offsets, strict=True)]
