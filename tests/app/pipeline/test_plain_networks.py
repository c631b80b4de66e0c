"""The plain networks of a run: costs, expected epochs, and which sizes compete."""

from __future__ import annotations

import itertools

import pytest

from softcell.app.pipeline._choose import plain_sizes
from softcell.app.pipeline._plain import (
    DEEPEST,
    ENOUGH_EPOCHS,
    GPU_FIXED,
    MIN_EPOCHS,
    enough_epochs,
    epoch_seconds,
    plain_cell,
    plain_costs,
    plain_networks,
)
from softcell.app.pipeline._plan import Candidate
from softcell.errors import UserError
from softcell.spaces import build_space
from softcell.spaces.costs import Cost, count_genotype

MILLION = 1_000_000
FAMILY = {
    # (cells per stage, channels): multiply-adds, in millions
    (3, 24): 113,
    (1, 32): 87,
    (2, 24): 81,
    (3, 16): 50,
    (1, 24): 49,
    (2, 16): 36,
    (1, 16): 22,
    (1, 12): 12,
    (1, 8): 6,
}
NETWORKS = [
    ({"cells_per_stage": depth, "channels": channels}, Cost(0, cost * MILLION))
    for (depth, channels), cost in FAMILY.items()
]


def chosen(epochs: float, num_train: int = 50_000, steps: float = 0.0) -> list[tuple[int, int]]:
    """Depth and channels of the plain networks, if all have time for `epochs`; with `steps`, epochs of one million."""
    made = plain_sizes(NETWORKS, lambda cost: epochs + steps / (cost.multiply_adds / MILLION), num_train)
    return [(each.settings["cells_per_stage"], each.settings["channels"]) for each in made]


@pytest.mark.parametrize(("channels", "depth"), [(1, 1), (12, 1), (40, 3)])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 27, 27)])
def test_costs_match_real_networks(channels: int, depth: int, shape: tuple[int, int, int]) -> None:
    space = build_space("nb201", {"cells_per_stage": depth, "channels": channels})
    assert plain_costs(shape, 7)(channels, depth) == count_genotype(space, plain_cell(), shape, 7)


def test_the_family_has_every_depth_from_16_channels_on_and_meets_both_limits() -> None:
    limits = {"parameters": 1e6, "multiply_adds": 1e8}
    found = plain_networks((3, 32, 32), 10, limits)
    sizes = [(settings["cells_per_stage"], settings["channels"]) for settings, _ in found]
    assert set(sizes) == set(FAMILY) - {(3, 24)}  # which has 113 million multiply-adds
    costs = [cost.multiply_adds for _, cost in found]
    assert costs == sorted(costs, reverse=True) and max(costs) <= 1e8
    assert all(cost.parameters <= 1e6 for _, cost in found)
    only = [settings for settings, _ in plain_networks((3, 32, 32), 10, {"parameters": 5000})]
    assert only and all(settings["channels"] < 8 for settings in only)  # if the budget asks for it
    least = plain_costs((3, 32, 32), 10)(1, 1)
    words = f"fits 1 parameter and 5 multiply-adds; the smallest has {least.parameters:,} parameters and "
    with pytest.raises(UserError, match=f"{words}{least.multiply_adds:,} multiply-adds for 32x32 images"):
        plain_networks((3, 32, 32), 10, {"parameters": 1, "multiply_adds": 5})


def test_more_epochs_make_networks_larger_and_deeper() -> None:
    enough = enough_epochs(1, 50_000)
    assert enough == 10  # half a million images
    assert chosen(enough)[0] == (1, 32)
    assert chosen(4 * enough)[0] == (1, 32)  # two cells per stage have fewer multiply-adds
    assert chosen(9 * enough)[0] == (3, 24)
    assert chosen(9 * enough - 1)[0] == (1, 32)
    assert enough_epochs(1, 1000) == ENOUGH_EPOCHS and enough_epochs(DEEPEST, 1000) == 9 * ENOUGH_EPOCHS
    assert enough_epochs(1, 10**9) == MIN_EPOCHS


def test_a_shallow_network_is_preferred_to_a_deep_one_of_about_the_same_cost() -> None:
    small = [each for each in NETWORKS if each[1].multiply_adds <= 50 * MILLION]
    made = plain_sizes(small, lambda cost: 1e6, 50_000)
    assert made[0].settings == {"cells_per_stage": 1, "channels": 24}  # not 3 cells of 16 channels


def test_smaller_networks_are_shallower_and_have_about_half_the_cost() -> None:
    assert chosen(1e6) == [(3, 24), (1, 24), (1, 16)]
    wider = [({"cells_per_stage": 2, "channels": 40}, Cost(0, 224 * MILLION)), *NETWORKS]
    sizes = [each.settings["cells_per_stage"] for each in plain_sizes(wider, lambda cost: 1e6, 50_000)]
    assert sizes == [2, 1, 1]  # not 3 cells of 24 channels, with half the multiply-adds
    made = plain_sizes(NETWORKS, lambda cost: 1e15 / cost.multiply_adds, 1000)
    for larger, smaller in itertools.pairwise(made):
        assert smaller.multiply_adds <= 0.6 * larger.multiply_adds
        assert smaller.length == pytest.approx(smaller.multiply_adds / made[0].multiply_adds)  # as many epochs
    assert made[0].length == 1.0 and [each.name for each in made] == ["plain-1", "plain-2", "plain-3"]


def test_with_little_time_the_network_is_small_and_with_too_little_there_is_none() -> None:
    # Epochs are proportional to 1 / multiply-adds: `steps` of the network of one million.
    assert chosen(0, steps=10 * 49)[0] == (1, 24)  # the largest that has 10 epochs
    assert chosen(0, steps=10 * 6 - 1) == [(1, 8)]  # the smallest, if even that has few
    assert chosen(0, steps=MIN_EPOCHS * 6) == [(1, 8)]
    assert chosen(0, steps=MIN_EPOCHS * 6 - 1) == []


def test_forecasts_of_a_cpu_grow_more_slowly_than_multiply_adds() -> None:
    reference = Cost(0, 16)
    assert epoch_seconds(2.0, reference, reference, is_gpu=False) == 2.0
    assert epoch_seconds(2.0, reference, Cost(0, 4), is_gpu=False) == pytest.approx(1.0)  # the square root
    assert epoch_seconds(2.0, reference, Cost(0, 64), is_gpu=False) == pytest.approx(2.0 * 4**0.9)


def test_forecasts_of_a_gpu_have_a_fixed_and_a_proportional_part() -> None:
    reference = Cost(0, 100)
    assert epoch_seconds(2.0, reference, reference, is_gpu=True) == pytest.approx(2.0)
    smaller, larger = (epoch_seconds(2.0, reference, Cost(0, cost), is_gpu=True) for cost in (50, 300))
    assert smaller == pytest.approx(2.0 - 0.5 * 2.0 * (1 - GPU_FIXED))
    assert larger == pytest.approx(2.0 + 2.0 * 2.0 * (1 - GPU_FIXED))
    # Seconds per epoch on an H200 with 22, 49 and 87 million multiply-adds: never too short, at most a third too long.
    for cost, measured in ((49_030_080, 0.303), (86_869_248, 0.351)):
        forecast = epoch_seconds(0.244, Cost(0, 21_938_816), Cost(0, cost), is_gpu=True)
        assert measured <= forecast < 1.34 * measured


def test_a_gpu_gets_a_larger_network_than_a_cpu_that_takes_as_long_for_the_reference() -> None:
    def largest(*, is_gpu: bool) -> Candidate:
        reference = Cost(0, 22 * MILLION)
        return plain_sizes(NETWORKS, lambda cost: 288 / epoch_seconds(0.8, reference, cost, is_gpu=is_gpu), 50_000)[0]

    assert largest(is_gpu=True).settings == {"cells_per_stage": 3, "channels": 24}  # 288 / 1.79 s > 90 epochs
    assert largest(is_gpu=False).settings == {"cells_per_stage": 1, "channels": 32}  # 288 / 3.49 s < 90 epochs
