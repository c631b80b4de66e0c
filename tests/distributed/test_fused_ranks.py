"""Fused cells, norms and gradient buckets on two real processes, each against a slow twin."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.search.steps import StepState
from softcell.spaces import Bound
from softcell.spaces.execution import modules_only
from tests.helpers.engine_launch import on_ranks
from tests.helpers.fused_ranks import (
    CELLS,
    SHARED,
    SIZE,
    TWICE,
    cell_step,
    one_step,
    part_of,
    result_of,
    toy,
)
from tests.helpers.search_toys import batch, step_state

TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes give, started once for all tests here."""
    folder = tmp_path_factory.mktemp("ranks")
    return on_ranks(2, "fused_ranks", "everything_on_rank", folder)


def close(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# --- fused cells ---


@pytest.mark.parametrize(("case", "variant"), SHARED)
def test_fused_cells_with_shared_norms_equal_modules_on_the_whole_batch(
    ranks: list[dict[str, Any]], case: str, variant: str
) -> None:
    found = [rank["cells"][f"shared {case} {variant}"] for rank in ranks]
    with modules_only():
        expected = cell_step(case, variant, slice(0, SIZE))
    tolerance = 1e-5 if variant == "dropping" else 1e-9  # drop-path's factors are float32
    close(torch.cat([rank["y"] for rank in found]), expected["y"], tolerance)
    for rank in found:
        close(rank["buffers"], expected["buffers"], tolerance)
    for order in ("first", "second") if (case, variant) == TWICE else ("first",):
        total = [a + b for a, b in zip(found[0][order], found[1][order], strict=True)]
        scale = max(float(one.abs().max()) for one in expected[order])
        torch.testing.assert_close(total, expected[order], rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("case", list(CELLS))
def test_fused_cells_with_local_norms_equal_a_process_that_has_only_this_part(
    ranks: list[dict[str, Any]], case: str
) -> None:
    for number, rank in enumerate(ranks):
        with modules_only():
            expected = cell_step(case, "summed", part_of(number))
        found = rank["cells"][f"local {case}"]
        for key in expected:
            close(found[key], expected[key], 1e-9)


@pytest.mark.parametrize("case", list(CELLS))
def test_norms_that_run_together_share_a_collective(ranks: list[dict[str, Any]], case: str) -> None:
    together, one_by_one = ranks[0]["cells"]["collectives"][case]
    assert 0 < together < one_by_one


def test_local_norms_send_nothing(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["cells"]["collectives"]["local"] == 0


# --- buckets ---


def test_means_of_gradients_match_all_ranks(ranks: list[dict[str, Any]]) -> None:
    own = []
    for rank in range(2):
        weights, loss, watched = toy(rank)
        own.append(torch.autograd.grad(loss, [*weights, watched], allow_unused=True))
    for rank, mine in zip(ranks, own, strict=True):
        found = rank["buckets"]
        for mean, a, b in zip(found["means"], *own, strict=False):
            if a is None or not a.numel():
                assert mean is None or not mean.numel()
            else:
                close(mean, (a + b) / 2, 1e-6 if a.dtype is torch.float32 else TOLERANCE)
        close(found["local"][0], mine[0])
        close(found["watched"][0], mine[-1])
        assert torch.equal(found["also"], torch.full((3,), 0.5))


def test_buckets_start_during_the_backward_pass_and_have_one_dtype(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["buckets"]
    assert found["events"][0] == "collective", "before the gradient of the first layer, which is the last one"
    assert "last gradient" in found["events"]
    # 12 of the float32 weight and 3 of `also` fill one bucket at the end; 4 in float64 wait for the next 144.
    assert sorted(found["sizes"]) == [15, 108, 148]
    assert found["hooks"][1:] == [0] * 5, "no hook stays on a weight"


def test_means_have_the_memory_layout_of_their_weights(ranks: list[dict[str, Any]]) -> None:
    assert all(ranks[0]["buckets"]["layouts"])


def test_gradients_of_a_rank_can_be_differentiated_again(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        weights, loss, _ = toy(number)
        first = torch.autograd.grad(loss, weights[:2], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), weights[:2])
        close(rank["buckets"]["second"], list(second))


# --- whole steps ---


def test_clipped_steps_of_second_order_with_shared_norms_equal_one_process(ranks: list[dict[str, Any]]) -> None:
    state = step_state("nb201", clip_architecture=0.01, clip_weights=0.1)
    one_step(state, "unrolled", slice(0, SIZE))
    for rank in ranks:
        close(rank["steps"]["shared unrolled"], result_of(state))


@pytest.mark.parametrize("regime", ["single-level", "bilevel"])
def test_steps_with_local_norms_equal_averaged_gradients_of_the_parts(ranks: list[dict[str, Any]], regime: str) -> None:
    """The twin evaluates part after part on copies of the supernet and averages gradients and statistics by hand."""
    state = step_state("nb201", clip_architecture=0.01, clip_weights=0.1)
    for _ in range(2):
        step_by_hand(state, regime)
    for rank in ranks:
        close(rank["steps"][f"local {regime}"], result_of(state))


def step_by_hand(state: StepState, regime: str) -> None:
    weights, architecture = list(state.supernet.parameters()), list(state.method.parameters())
    copies = [copy.deepcopy(state.supernet) for _ in range(2)]

    def learn(batches: tuple[Tensor, Tensor], by_architecture: bool, by_weights: bool) -> None:
        sums: list[Tensor] = []
        for number, supernet in enumerate(copies):
            with torch.no_grad():
                for target, source in zip(supernet.parameters(), weights, strict=True):
                    target.copy_(source)
            images, labels = (x[part_of(number)] for x in batches)
            loss = state.objective(Bound(supernet, state.method.relax()), images, labels).loss
            found = torch.autograd.grad(loss, [*supernet.parameters(), *architecture], allow_unused=True)
            pairs = zip(found, [*weights, *architecture], strict=True)
            found = [torch.zeros_like(w) if g is None else g for g, w in pairs]
            sums = [a + b / 2 for a, b in zip(sums, found, strict=True)] if sums else [g / 2 for g in found]
        for is_on, parameters, gradients, optimiser, clip in (
            (by_weights, weights, sums[: len(weights)], state.weight_optimiser, state.clip_weights),
            (
                by_architecture,
                architecture,
                sums[len(weights) :],
                state.architecture_optimiser,
                state.clip_architecture,
            ),
        ):
            if is_on:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                torch.nn.utils.clip_grad_norm_(parameters, clip)
                optimiser.step()
                optimiser.zero_grad()

    if regime == "single-level":
        learn(batch(1), True, True)
    else:
        learn(batch(2), True, False)
        learn(batch(1), False, True)
    with torch.no_grad():
        for name, buffer in state.supernet.named_buffers():
            parts = [dict(own.named_buffers())[name] for own in copies]
            buffer.copy_((parts[0] + parts[1]) / 2 if buffer.is_floating_point() else parts[0])


def test_local_norms_leave_all_ranks_equal_and_differ_from_shared_ones(ranks: list[dict[str, Any]]) -> None:
    for regime in ("single-level", "bilevel", "unrolled"):
        first, second = (rank["steps"][f"local {regime}"] for rank in ranks)
        assert all(torch.equal(first[name], second[name]) for name in first), regime
    shared = ranks[0]["steps"]["shared unrolled"]
    assert any(not torch.allclose(first[name], shared[name]) for name in first)


def test_training_with_local_norms_equals_distributed_data_parallel(ranks: list[dict[str, Any]]) -> None:
    """But for running statistics: ours are the means over the ranks, where that one keeps or copies a rank's own."""
    theirs = [rank["training"]["theirs"] for rank in ranks]
    for rank in ranks:
        for name, value in rank["training"]["ours"].items():
            mean = (theirs[0][name] + theirs[1][name]) / 2 if "running" in name else theirs[0][name]
            close(value, mean)
