"""What differs on a CUDA device: captured graphs, generators, the stopwatch, collectives on device memory."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from softcell.engine import checkpoint, loop
from softcell.engine.capture import CapturedStep
from softcell.engine.distributed import World
from softcell.engine.metrics import DivergedError, LossWatch
from softcell.engine.session import resolve_device, rng_state, set_deterministic, set_rng_state
from softcell.engine.timing import Stopwatch
from softcell.nn.stochastic import DropPath
from tests.helpers.engine_launch import results, start_ranks
from tests.helpers.engine_ranks import CASES, norm_case
from tests.helpers.engine_toy import Toy, final_state, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda", 0)
ALONE = World(0, 1, 0, CUDA)


def test_a_captured_drop_follows_its_schedule_and_draws_new_masks() -> None:
    part = DropPath(0.5).to(CUDA)
    x = torch.ones(1000, 2, device=CUDA)
    part.set_fraction(0.0)
    part(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = part(x)
    graph.replay()
    assert torch.equal(y, x)
    part.set_fraction(1.0)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert 0.4 < (first == 0).double().mean().item() < 0.6
    assert not torch.equal(first, y)


def test_a_captured_watch_records_the_first_failure() -> None:
    watch = LossWatch().to(CUDA)
    loss, step = torch.ones((), device=CUDA), torch.zeros((), dtype=torch.int64, device=CUDA)
    watch.update(loss, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        watch.update(loss, step)
        step += 1
    for value in (1.0, float("inf"), float("nan")):
        loss.fill_(value)
        graph.replay()
    failure = watch.failed()
    assert failure is not None
    assert (failure.step, failure.value) == (1, float("inf"))


def test_after_a_failed_recording_steps_draw_what_eager_ones_would() -> None:
    def draws(*, record: bool) -> tuple[list[list[float]], list[str]]:
        torch.manual_seed(3)
        found, notes = torch.zeros(8, 2, 4, device=CUDA), []
        at = [0]

        def good(x: torch.Tensor) -> None:
            found[:, 0].index_copy_(0, x, torch.rand(1, 4, device=CUDA))

        def bad(x: torch.Tensor) -> None:
            found[:, 1].index_copy_(0, x, torch.rand(1, 4, device=CUDA))
            at[0] = int(x)  # reads a value from the device

        steps = [CapturedStep(step, notes.append, warmup=0) if record else step for step in (good, bad)]
        for number in range(8):
            for step in steps:
                step(torch.tensor([number], device=CUDA))
        return found.tolist(), notes

    (mine, notes), (theirs, _) = draws(record=True), draws(record=False)
    assert mine == theirs
    assert len(notes) == 1 and "cannot be captured" in notes[0]


def test_recordings_that_make_room_for_others_can_be_made_again() -> None:
    total, notes = torch.zeros(3, device=CUDA), []

    def step(x: torch.Tensor) -> None:
        total.add_(x)

    recorded = CapturedStep(step, notes.append, warmup=0, kept=1)
    for number in range(12):
        recorded(torch.full((3,), float(number), device=CUDA), key=number // 4 % 2)
    assert total.tolist() == [66.0] * 3 and notes == []


def test_the_generator_of_the_device_is_restored() -> None:
    state = rng_state(CUDA)
    first = torch.rand(5, device=CUDA)
    set_rng_state(state, CUDA)
    assert torch.equal(torch.rand(5, device=CUDA), first)


def test_a_stopwatch_measures_the_device_and_its_memory() -> None:
    a = torch.randn(4096, 4096, device=CUDA)
    watch = Stopwatch(CUDA)
    with watch:
        for _ in range(20):
            a @ a
    assert 0.0 < watch.timing.seconds <= watch.timing.wall_seconds * 1.05
    assert watch.timing.peak_bytes >= 2 * 4096 * 4096 * 4


def test_an_interrupted_run_repeats_an_unbroken_one(tmp_path: Path) -> None:
    def strike(epoch: int, step: int) -> None:
        if (epoch, step) == (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    set_deterministic(True, warn_only=True)
    try:
        loop.run(Toy(ALONE), whole, ALONE, resume=False)
        assert loop.run(Toy(ALONE, before_step=strike), parts, ALONE, resume=False).exit_code == 143
        loop.run(Toy(ALONE), parts, ALONE, resume=True)
    finally:
        set_deterministic(False)
    assert same(final_state(parts), final_state(whole))


def test_a_failure_is_seen_before_anything_is_saved(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="epoch 1 at step 1"):
        loop.run(Toy(ALONE, nan_at=(0, 1)), tmp_path, ALONE, resume=False)
    assert checkpoint.load_latest(tmp_path) is None


def test_normalisation_over_two_processes_works_on_device_memory(tmp_path: Path) -> None:
    ranks = results(start_ranks(2, "engine_ranks", "norm_on_cuda_rank", tmp_path), tmp_path)
    for name, case in CASES.items():
        whole = norm_case(case, nn.BatchNorm2d, None)
        tolerance = {"float32": 1e-4, "far": 1e-7}.get(name, 1e-10)
        for key in ("y", "gradient", "second", "evaluated"):
            mine = torch.cat([rank[name][key] for rank in ranks])
            torch.testing.assert_close(mine, whole[key], rtol=tolerance, atol=tolerance)


def test_a_device_that_is_there_resolves() -> None:
    assert resolve_device("auto").type == "cuda"
    assert resolve_device("cuda:0") == CUDA
