"""The claims supported by comparing several found cells with several random ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from softcell.app.baseline import LEVEL, claim, rank_sum

RANDOM = [0.80 + 0.01 * number for number in range(12)]
numbers = st.lists(st.integers(0, 9), min_size=2, max_size=4)


@pytest.mark.parametrize(
    ("found", "random", "p"),
    [
        ([3], [1, 2], 2 / 3),  # the best of three: 1 way of 3, on either side
        ([1], [2, 3], 2 / 3),
        ([5, 6], [1, 2, 3, 4], 2 / 15),  # 1 of 15
        ([4, 6], [1, 2, 3, 5], 2 * 2 / 15),  # ranks 4 + 6; only 5 + 6 is higher
        ([2, 2], [1, 1], 2 / 6),  # mean ranks 3.5 and 1.5: 1 of 6
        ([2, 1], [1, 1], 1.0),  # 3 of 6 ways contain the highest value
        ([1, 1], [1, 1, 1], 1.0),
        ([0.95, 0.96, 0.97], RANDOM, 2 / 455),
        ([0.905, 0.96, 0.97], RANDOM, 4 / 455),  # one of them below one random cell: a second way is as good
    ],
)
def test_the_rank_sum_matches_hand_counted_cases(found: list[float], random: list[float], p: float) -> None:
    assert rank_sum(found, random) == pytest.approx(p)


@settings(deadline=None, max_examples=20)  # the first call imports scipy.stats
@given(numbers, numbers)
def test_the_rank_sum_is_that_of_scipy(first: list[int], second: list[int]) -> None:
    from scipy.stats import PermutationMethod, mannwhitneyu

    def ways(alternative: str) -> float:
        method = PermutationMethod(n_resamples=10_000)  # more than there are: scipy then counts all of them
        return float(mannwhitneyu(first, second, alternative=alternative, method=method).pvalue)

    assert rank_sum(first, second) == pytest.approx(min(1.0, 2 * min(ways("greater"), ways("less"))))
    assert rank_sum(first, second) == rank_sum(second, first)


def test_a_claim_is_made_from_the_level_on_and_in_the_right_direction() -> None:
    high, low = [0.95, 0.96, 0.97], [0.5, 0.6, 0.7]
    assert claim(high, RANDOM).startswith("The 3 found cells are better than the 12 random ones: 96.0% against 85.5%")
    assert "p = 0.0044 " in claim(high, RANDOM)
    assert claim(low, RANDOM).startswith("The 3 found cells are worse than the 12 random ones")
    # 11 ways of 455 are at least as good as this one, and 16 as good as the other: 0.0484 and 0.0703.
    just, short = [0.92, 0.895, 0.896], [0.905, 0.895, 0.896]  # 4 and 5 of 36 comparisons are lost
    assert rank_sum(just, RANDOM) <= LEVEL < rank_sum(short, RANDOM)
    assert "better" in claim(just, RANDOM)
    assert "no difference can be claimed" in claim(short, RANDOM)


def test_a_claim_follows_ranks_even_if_means_disagree() -> None:
    one_far_off = [0.95] * 6 + [0.0]
    assert sum(one_far_off) / 7 < 0.855
    assert "are better than" in claim(one_far_off, RANDOM)
