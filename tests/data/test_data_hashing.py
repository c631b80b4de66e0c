"""The hash against a big-integer twin, a published SplitMix64 value and chi-square tests."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from softcell.data.hashing import absorb, hash_words, permutation, shift_right, to_integer, to_uniform

WORD = (1 << 64) - 1
int64s = st.integers(-(1 << 63), (1 << 63) - 1)


def reference(*values: int, state: int = 0) -> int:
    """The hash of a chain of values, in Python integers, as unsigned."""
    for value in values:
        z = (state + 0x9E3779B97F4A7C15 + value) & WORD
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        state = z ^ (z >> 31)
    return state


def test_the_first_word_is_the_published_first_output_of_splitmix64_with_seed_zero():
    assert reference(0) == 0xE220A8397B1DCDAF
    assert absorb(0, 0) & WORD == 0xE220A8397B1DCDAF
    assert absorb(torch.tensor(0), 0).item() & WORD == 0xE220A8397B1DCDAF


@given(int64s, st.integers(0, 63))
@settings(deadline=None)
def test_shift_right_fills_with_zeros(word, bits):
    expected = (word & WORD) >> bits
    assert shift_right(torch.tensor(word), bits).item() & WORD == expected if bits else True


@given(int64s, int64s, st.lists(int64s, min_size=1, max_size=4))
@settings(deadline=None)
def test_words_equal_big_integer_arithmetic(seed, epoch, positions):
    words = hash_words(seed, epoch, torch.tensor(positions), 3)
    for row, position in enumerate(positions):
        for stream in range(3):
            assert words[row, stream].item() & WORD == reference(seed, epoch, position, stream)


@given(int64s, st.integers(0, 1000))
@settings(deadline=None)
def test_ints_and_tensors_give_the_same_words(seed, epoch):
    positions = torch.arange(5)
    expected = hash_words(seed, epoch, positions, 4)
    assert torch.equal(hash_words(torch.tensor(seed), torch.tensor(epoch), positions, 4), expected)
    assert torch.equal(hash_words(seed, torch.tensor(epoch, dtype=torch.int32), positions, 4), expected)
    assert torch.equal(hash_words(seed, epoch, positions, 2), expected[:, :2])


def samples(kind: str) -> torch.Tensor:
    """30,000 words along one of the four inputs of the hash, the others fixed."""
    num = 30_000
    if kind == "position":
        return hash_words(3, 5, torch.arange(num), 1)[:, 0]
    if kind == "stream":
        return hash_words(3, 5, torch.tensor([7]), num)[0]
    grid = range(num // 10)
    if kind == "epoch":
        return torch.cat([hash_words(3, epoch, torch.arange(10), 1)[:, 0] for epoch in grid])
    return torch.cat([hash_words(seed, 5, torch.arange(10), 1)[:, 0] for seed in grid])


@pytest.mark.parametrize("kind", ["position", "stream", "epoch", "seed"])
def test_integers_are_uniform_and_successive_ones_independent(kind):
    numbers = to_integer(samples(kind), 9).numpy()
    assert numbers.min() == 0 and numbers.max() == 8
    assert stats.chisquare(np.bincount(numbers, minlength=9)).pvalue > 1e-4
    pairs = np.zeros((9, 9))
    np.add.at(pairs, (numbers[:-1:2], numbers[1::2]), 1)
    assert stats.chi2_contingency(pairs).pvalue > 1e-4


def test_uniform_numbers_are_uniform_and_below_one():
    values = to_uniform(samples("position"))
    assert values.dtype == torch.float32 and values.min() >= 0 and values.max() < 1
    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-4
    assert to_uniform(torch.tensor(-1)).item() < 1  # all bits set


@given(st.integers(0, 300), int64s, st.integers(0, 100))
@settings(deadline=None)
def test_permutation_is_one(length, seed, epoch):
    assert torch.equal(permutation(seed, epoch, length, "test").sort().values, torch.arange(length))


def test_permutation_is_sorted_by_the_reference_hash():
    seed = reference(*b"test", state=1)
    expected = sorted(range(50), key=lambda p: (reference(seed, 2, p, 0) + (1 << 63)) & WORD)
    assert permutation(1, 2, 50, "test").tolist() == expected


def test_permutations_of_other_seeds_epochs_and_purposes_differ():
    orders = {
        tuple(permutation(seed, epoch, 20, purpose).tolist())
        for seed in range(10)
        for epoch in range(10)
        for purpose in ("order", "split")
    }
    assert len(orders) == 200
