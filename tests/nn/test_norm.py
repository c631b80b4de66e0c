"""Batch normalisation shared by two processes against torch's own on the whole batch."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softcell.nn.norm import BatchNorm2d, updates_together
from tests.helpers.engine_launch import on_ranks
from tests.helpers.engine_ranks import CASES, norm_case


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, "engine_ranks", "norm_on_rank", tmp_path_factory.mktemp("norm"))


def close(mine: Tensor, whole: Tensor, case: str) -> None:
    # "far" has a mean of 1e6: torch's own result on it has lost that many digits.
    tolerance = {"float32": 1e-4, "far": 1e-7}.get(case, 1e-10)
    torch.testing.assert_close(mine, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_of_both_orders_match_the_whole_batch(ranks: list[dict[str, Any]], case: str) -> None:
    whole = norm_case(CASES[case], nn.BatchNorm2d, None)
    for name in ("y", "gradient", "second", "evaluated"):
        close(torch.cat([rank[case][name] for rank in ranks]), whole[name], case)
    # A parameter's gradient is the sum of what each rank's part of the batch says.
    for name in ("weight", "bias", "second_weight", "second_bias"):
        if name in whole:
            close(ranks[0][case][name] + ranks[1][case][name], whole[name], case)


@pytest.mark.parametrize("case", CASES)
def test_running_statistics_use_the_global_count_on_every_rank(ranks: list[dict[str, Any]], case: str) -> None:
    whole = norm_case(CASES[case], nn.BatchNorm2d, None)
    states = [name for name in whole if name.startswith("state.")]
    assert states or case == "untracked"
    for name in states:
        assert torch.equal(ranks[0][case][name], ranks[1][case][name])
        close(ranks[0][case][name], whole[name], case)


def test_variance_keeps_its_digits_when_the_mean_is_large(ranks: list[dict[str, Any]]) -> None:
    near, far = (torch.cat([rank[case]["y"] for rank in ranks]) for case in ("affine", "far"))
    # The offset itself costs 1e6 * 2**-53 of each input; a variance from raw squares would lose 1e12 times as much.
    torch.testing.assert_close(far, near, rtol=0, atol=1e-8)


def test_half_precision_is_reduced_in_float32_and_returned_in_half_precision(ranks: list[dict[str, Any]]) -> None:
    for rank, sign in zip(ranks, (-1.0, 1.0), strict=True):
        assert rank["bfloat16"].dtype == torch.bfloat16
        assert torch.equal(rank["bfloat16"], torch.full((2, 1, 2, 2), sign, dtype=torch.bfloat16))


def test_one_value_per_channel_over_all_ranks_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "more than 1 value" in rank["single"]


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_process_gives_torchs_own_bits(options: dict[str, Any], dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, 5, 5, dtype=dtype)
    found = []
    for kind in (BatchNorm2d, nn.BatchNorm2d):
        norm = kind(3, **options).to(dtype)
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        (y**3).sum().backward()
        found.append([y, leaf.grad, norm.eval()(x), *norm.state_dict().values()])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_counts_of_batches_are_the_same_when_they_are_added_together() -> None:
    x = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    found = []
    for context in (nullcontext, updates_together):
        once, twice = BatchNorm2d(2), BatchNorm2d(2)
        with context():
            y = twice(once(twice(x)))
        assert (int(once.num_batches_tracked or 0), int(twice.num_batches_tracked or 0)) == (1, 2)
        found.append([y, *once.buffers(), *twice.buffers()])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
