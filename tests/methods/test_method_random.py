"""Random search: the requested number of architectures, different for every seed."""

from __future__ import annotations

import pytest

from softcell.errors import UserError
from softcell.methods.random import RandomSearch, RandomSettings
from softcell.testing import RaggedSpace, tiny_space


def test_the_requested_number_of_architectures_is_sampled() -> None:
    assert RandomSearch(RaggedSpace().layout(), RandomSettings(3), seed=0).num_samples == 3
    with pytest.raises(UserError, match="samples=0"):
        RandomSettings(0)


def test_neighbouring_seeds_do_not_share_architectures() -> None:
    layout = tiny_space("darts").layout()
    runs = [
        {RandomSearch(layout, RandomSettings(), seed).propose(number, []) for number in range(20)} for seed in range(3)
    ]
    assert all(len(run) == 20 for run in runs)
    assert not runs[0] & runs[1]
    assert not runs[1] & runs[2]


def test_scores_of_earlier_architectures_change_nothing() -> None:
    sampler = RandomSearch(RaggedSpace().layout(), RandomSettings(), seed=1)
    assert sampler.propose(2, [0.1, 0.9]) == sampler.propose(2, [0.9, 0.1])
