"""Dropping: its law, its schedule, and its independence of the number of processes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from softcell.nn.stochastic import Dropout, DropPath, drop_path, dropout
from tests.helpers.engine_launch import on_ranks
from tests.helpers.engine_ranks import DROP_SHAPE, dropped


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[torch.Tensor]]:
    return on_ranks(2, "engine_ranks", "drop_on_rank", tmp_path_factory.mktemp("drop"))


def test_two_ranks_drop_what_one_drops(ranks: list[list[torch.Tensor]]) -> None:
    torch.manual_seed(2)
    *whole, after = dropped(torch.arange(1.0, 49.0, dtype=torch.float64).reshape(DROP_SHAPE))
    assert any((part == 0).any() for part in whole)
    for index, expected in enumerate(whole):
        assert torch.equal(torch.cat([rank[index] for rank in ranks]), expected)
    for rank in ranks:
        assert torch.equal(rank[-1], after)


@settings(max_examples=50, deadline=None)
@given(probability=st.floats(0.0, 1.0), seed=st.integers(0, 1000), tensor=st.booleans())
def test_samples_are_kept_whole_and_scaled_or_dropped(probability: float, seed: int, tensor: bool) -> None:
    torch.manual_seed(seed)
    x = torch.rand(16, 2, 3, dtype=torch.float64) + 1.0
    y = drop_path(x, torch.tensor(probability, dtype=torch.float64) if tensor else probability, training=True)
    for before, after in zip(x, y, strict=True):
        if after.any():
            torch.testing.assert_close(after, before / (1.0 - probability), rtol=1e-12, atol=0)
    if probability == 1.0:
        assert not y.any()


@pytest.mark.parametrize("function", [drop_path, dropout])
def test_the_fraction_dropped_is_the_probability_and_the_mean_stays(function: Any) -> None:
    torch.manual_seed(0)
    y = function(torch.ones(20000, 1), 0.3, training=True)
    assert (y == 0).double().mean().item() == pytest.approx(0.3, abs=0.015)
    assert y.mean().item() == pytest.approx(1.0, abs=0.025)


def test_dropout_drops_elements_and_drop_path_samples() -> None:
    x = torch.ones(50, 40)
    zeros = [(function(x, 0.5, training=True) == 0).double().mean(1) for function in (drop_path, dropout)]
    assert set(zeros[0].tolist()) == {0.0, 1.0}
    assert zeros[1].min() > 0.0
    assert zeros[1].max() < 1.0


@pytest.mark.parametrize("module", [DropPath(0.0), Dropout(0.0), DropPath(0.5).eval(), Dropout(0.5).eval()])
def test_what_drops_nothing_returns_its_input_and_draws_nothing(module: nn.Module) -> None:
    x = torch.ones(4, 2)
    before = torch.get_rng_state()
    assert module(x) is x
    assert drop_path(x, 0.0, training=True) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_a_schedule_fills_a_buffer_in_place_that_is_not_saved() -> None:
    net = nn.Sequential(DropPath(0.2), nn.ReLU(), DropPath(0.4), Dropout(0.5))
    parts = [part for part in net if isinstance(part, DropPath)]
    buffers = [part.current for part in parts]
    for part in parts:
        part.set_fraction(0.25)
    assert parts[0].current is buffers[0]
    assert [round(buffer.item(), 6) for buffer in buffers] == [0.05, 0.1]
    assert net[3].current.item() == 0.5
    assert net.state_dict() == {}


def test_a_schedule_that_starts_at_zero_draws_as_it_will_later() -> None:
    """A graph captured in the first epoch, where the fraction is 0, must hold the dropping too."""
    part = DropPath(0.5)
    part.set_fraction(0.0)
    x = torch.ones(4, 2)
    before = torch.get_rng_state()
    assert torch.equal(part(x), x)
    assert not torch.equal(torch.get_rng_state(), before)


def test_bfloat16_drops_the_same_samples_as_float32() -> None:
    torch.manual_seed(1)
    full = drop_path(torch.ones(64, 1), 0.5, training=True)
    torch.manual_seed(1)
    half = drop_path(torch.ones(64, 1, dtype=torch.bfloat16), 0.5, training=True)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.float(), full)


def test_values_out_of_range_are_refused() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"probability=1\.5"):
        drop_path(x, 1.5, training=True)
    with pytest.raises(ValueError, match=r"probability=-0\.1"):
        DropPath(-0.1)
    with pytest.raises(ValueError, match="fraction=2"):
        DropPath(0.1).set_fraction(2.0)
