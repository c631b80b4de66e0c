"""Crossing reduction and vertical placement against brute force and closed forms."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softcell.app.report.order import crossings, order
from softcell.app.report.place import Pull, _isotonic, settle


def random_graph(seed: int) -> tuple[list[list[int]], list[list[int]], list[list[int]], list[tuple[int, int]]]:
    rng = random.Random(seed)
    ranks, total = [], 0
    for _ in range(3):
        size = rng.randint(2, 4)
        ranks.append(list(range(total, total + size)))
        total += size
    links = [(a, b) for first, second in pairwise(ranks) for a in first for b in second if rng.random() < 0.45]
    left: list[list[int]] = [[a for a, b in links if b == item] for item in range(total)]
    right: list[list[int]] = [[b for a, b in links if a == item] for item in range(total)]
    return ranks, left, right, links


@pytest.mark.parametrize("seed", range(20))
def test_crossings_counts_what_brute_force_counts(seed: int) -> None:
    ranks, _, right, links = random_graph(seed)
    home = {item: (r, i) for r, rank in enumerate(ranks) for i, item in enumerate(rank)}
    count = 0
    for (a, b), (c, d) in combinations(links, 2):
        same = home[a][0] == home[c][0]
        count += same and (home[a][1] - home[c][1]) * (home[b][1] - home[d][1]) < 0
    assert crossings(ranks, right) == count


def test_order_comes_close_to_the_fewest_crossings() -> None:
    found = fewest = given_order = 0
    for seed in range(12):
        ranks, left, right, _ = random_graph(seed)
        best = order(ranks, left, right)
        assert [sorted(rank) for rank in best] == ranks
        assert crossings(best, right) <= crossings(ranks, right)
        found += crossings(best, right)
        given_order += crossings(ranks, right)
        fewest += min(crossings(choice, right) for choice in product(*(list(permutations(r)) for r in ranks)))
    assert fewest <= found <= fewest + 2
    assert found < given_order / 2


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 5), st.integers(0, 20)), min_size=1, max_size=8))
def test_isotonic_equals_the_min_max_formula(rows: list[tuple[int, int, int]]) -> None:
    wishes, weights = [float(row[0]) for row in rows], [float(row[1]) for row in rows]
    offsets = [float(sum(row[2] for row in rows[: i + 1])) for i in range(len(rows))]
    level = [wish - offset for wish, offset in zip(wishes, offsets, strict=True)]

    def mean(j: int, k: int) -> float:
        return sum(level[i] * weights[i] for i in range(j, k + 1)) / sum(weights[j : k + 1])

    n = len(rows)
    expected = [max(min(mean(j, k) for k in range(i, n)) for j in range(i + 1)) + offsets[i] for i in range(n)]
    assert _isotonic(wishes, weights, offsets) == pytest.approx(expected)


def test_settle_keeps_order_and_distance_and_straightens_a_lone_link() -> None:
    ranks = [[0, 1], [2, 3, 4], [5]]
    pulls = [[Pull(4, 0, 1)], [], [Pull(5, 0, 1)], [], [Pull(0, 0, 1)], [Pull(2, 0, 1)]]
    heights = [30.0, 30.0, 20.0, 20.0, 20.0, 30.0]
    centre = settle(ranks, pulls, heights, gap=10.0)
    assert centre[1] - centre[0] >= 40 - 1e-9
    assert centre[3] - centre[2] >= 30 - 1e-9
    assert centre[4] - centre[3] >= 30 - 1e-9
    assert centre[0] == pytest.approx(centre[4])
    assert centre[5] == pytest.approx(centre[2])
