"""Collectives on two real processes, and a run on two against a run on one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.engine import checkpoint, distributed, loop
from softcell.engine.metrics import redistributed
from softcell.errors import UserError
from tests.helpers.engine_launch import on_ranks
from tests.helpers.engine_ranks import values
from tests.helpers.engine_toy import ALONE, Toy, final_state, same, untimed


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder and the results of two processes, started once for all tests here."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, on_ranks(2, "engine_ranks", "loop_and_collectives_on_rank", folder)


@pytest.fixture
def found(launched: tuple[Path, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [rank["collectives"] for rank in launched[1]]


@pytest.fixture
def runs(launched: tuple[Path, list[dict[str, Any]]]) -> tuple[Path, list[dict[str, Any]]]:
    return launched[0], [rank["loop"] for rank in launched[1]]


def test_a_world_of_one_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = distributed.start("cpu")
    assert world == ALONE
    assert world.is_main
    assert not torch.distributed.is_initialized()
    tensor = torch.tensor([1.0])
    distributed.average_([tensor], world)
    assert distributed.sum_(tensor, world).item() == 1.0
    assert distributed.gather_objects(3, world) == [3]
    distributed.stop()


def test_a_half_set_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"RANK.*torchrun"):
        distributed.start("cpu")


def test_each_rank_knows_its_number_and_device(found: list[dict[str, Any]]) -> None:
    assert [rank["world"] for rank in found] == [(0, 2, 0, "cpu"), (1, 2, 1, "cpu")]


def test_average_is_the_mean_of_every_tensor_in_few_collectives(found: list[dict[str, Any]]) -> None:
    means = [(a + b) / 2 for a, b in zip(values(0), values(1), strict=True)]
    for rank in found:
        for mine, mean in zip(rank["averaged"], means, strict=True):
            torch.testing.assert_close(mine, mean, rtol=0, atol=1e-7 if mine.dtype == torch.float32 else 1e-12)
        # float64: 12 numbers overflow the bucket, the other 6 + 1 share one; float32: 5.
        assert sorted(rank["average_calls"]) == [5, 7, 12]


def test_sum_works_in_place_on_a_view(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert torch.equal(rank["summed"], torch.arange(6.0).reshape(2, 3).t() * 2 + 1)


def test_broadcast_gives_parameters_and_all_buffers_of_rank_0(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert (rank["same_before"], rank["same_after"]) == (False, True)
        assert same(rank["module"], found[0]["module"])
    assert found[1]["module"][-1].dtype == torch.bool or any(t.dtype == torch.bool for t in found[1]["module"])


def test_same_everywhere_compares_bits_and_shapes(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert not rank["same_sign_of_zero"]
        assert not rank["same_shape"]
        assert rank["same_nan"]


def test_objects_flags_and_errors_of_one_rank_reach_all(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["object"] == {"from": 0}
        assert rank["gathered"] == [0, 10]
        assert rank["on_main"] == 5
        assert rank["agreed"] == [0, 1]
        assert rank["error"] == "the disk is full"


def test_two_ranks_on_half_batches_equal_one_on_the_whole(
    runs: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    task = Toy()
    alone = loop.run(task, tmp_path, ALONE, resume=False).metrics
    for rank in runs[1]:
        assert rank["same"]
        for mine, whole in zip(rank["whole"], alone, strict=True):
            assert mine["loss"] == pytest.approx(whole["loss"], rel=1e-10)
            assert mine["samples"] == whole["samples"]
        for weight, expected in zip(rank["weights"], task.net.parameters(), strict=True):
            torch.testing.assert_close(weight, expected.detach(), rtol=0, atol=1e-10)


def test_a_signal_to_one_rank_stops_all_and_the_run_resumes_exactly(
    runs: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, ranks = runs
    for rank in ranks:
        assert rank["interrupted"] == ("interrupted", 143)
        assert untimed(rank["parts"]) == untimed(rank["whole"])
    assert same(final_state(folder / "parts"), final_state(folder / "whole"))


def test_all_ranks_use_the_slowest_clock(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    """Schedules follow the time used, so it must be the same everywhere; it ends after eight steps of 1.25 s."""
    for rank in runs[1]:
        assert rank["used"] == [1.25 * step for step in range(8)]


def test_a_loss_that_diverges_on_one_rank_stops_all_and_keeps_the_checkpoint(
    runs: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, ranks = runs
    assert [rank["diverged"] for rank in ranks] == [(1, 1), (1, 1)]
    loaded = checkpoint.load_latest(folder / "diverged")
    assert loaded is not None
    assert (loaded.state["epoch"], loaded.state["step"]) == (1, 0)


def test_ranks_that_draw_different_numbers_are_found_out(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in runs[1]:
        assert "generators differ" in rank["bad_rng"]
        assert rank["no_signal"] == 0


def test_sums_of_an_unfinished_epoch_are_divided_among_another_number_of_ranks() -> None:
    parts = [
        {"meter": torch.tensor([1.0, 2.0]), "observer": {"credit": torch.tensor([3.0])}},
        {"meter": torch.tensor([10.0, 20.0]), "observer": {"credit": torch.tensor([5.0])}},
    ]
    found = [redistributed(parts, rank) for rank in range(3)]
    # Counts are summed over the ranks, other sums averaged: both as before, whatever the number of ranks.
    assert sum(one["meter"] for one in found).tolist() == [11.0, 22.0]  # type: ignore[union-attr]
    assert [one["observer"]["credit"].item() for one in found] == [4.0, 4.0, 4.0]
