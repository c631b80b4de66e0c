"""The strongest architecture within a budget, against brute force over all of them."""

import itertools
import random

import pytest

from softcell.arch.derive import strongest_within
from softcell.errors import UserError


def brute_force(strengths: list[list[float]], costs: list[list[float]], limit: float) -> float:
    sums = [
        sum(row[k] for row, k in zip(strengths, chosen, strict=True))
        for chosen in itertools.product(*(range(len(row)) for row in strengths))
        if sum(row[k] for row, k in zip(costs, chosen, strict=True)) <= limit
    ]
    return max(sums)


@pytest.mark.parametrize("seed", range(20))
def test_no_architecture_within_the_budget_is_stronger(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 4) for _ in range(6)]
    strengths = [[rng.random() for _ in range(size)] for size in sizes]
    costs = [[float(rng.randint(0, 9)) for _ in range(size)] for size in sizes]
    least, most = (sum(pick(row) for row in costs) for pick in (min, max))
    for limit in {least, (least + most) / 2, least + 0.2 * (most - least), most}:
        chosen = strongest_within(strengths, costs, limit)
        assert sum(row[k] for row, k in zip(costs, chosen, strict=True)) <= limit
        found = sum(row[k] for row, k in zip(strengths, chosen, strict=True))
        assert found == pytest.approx(brute_force(strengths, costs, limit))


def test_without_need_it_is_the_strongest_of_every_choice() -> None:
    assert strongest_within([[0.1, 0.9], [0.5, 0.4, 0.45]], [[1, 5], [1, 2, 3]], 100) == (1, 0)


def test_in_a_tie_the_cheaper_one_is_taken() -> None:
    assert strongest_within([[0.5, 0.5]], [[3.0, 2.0]], 5) == (1,)


def test_a_budget_that_nothing_meets_is_refused() -> None:
    with pytest.raises(UserError, match="no architecture costs at most 3; the cheapest costs 4"):
        strongest_within([[1.0, 2.0], [1.0]], [[2.0, 3.0], [2.0]], 3)


def test_a_chain_of_21_layers_is_not_enumerated() -> None:
    """7^21 architectures; those that no other beats are few."""
    rng = random.Random(0)
    widths = [w for w, n in ((24, 4), (40, 4), (80, 4), (96, 4), (192, 4), (320, 1)) for _ in range(n)]
    costs = [[w * e * (w + k * k) * 49.0 for e in (3, 6) for k in (3, 5, 7)] + [0.0] for w in widths]
    strengths = [[rng.random() for _ in row] for row in costs]
    chosen = strongest_within(strengths, costs, 0.6 * sum(map(max, costs)))
    assert len(chosen) == 21
