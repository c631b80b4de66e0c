"""Settings that the recipe `fast` chooses by the length of a training run, and times without start-up."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.arch import sample
from softcell.engine import World
from softcell.engine.interleave import drain
from softcell.engine.task import Event, Stepped
from softcell.engine.timing import TIMED, TimeBudget, seconds_per_step
from softcell.evaluate import resolve, stored_training, train
from softcell.evaluate.recipe import FITTED, LONG_EPOCHS, MANY_IMAGES, cutout_side, fit_data, fit_length
from softcell.evaluate.task import TrainTask
from softcell.evaluate.train import train_steps
from softcell.spaces import build_space
from tests.helpers.search_toys import ALONE, TINY, write_data

GENOTYPE = sample(build_space("nb201", TINY["nb201"]).layout(), 5)
TRAIN, RECIPE = sys.modules["softcell.evaluate.train"], sys.modules["softcell.evaluate.recipe"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.npz", train=96)


def test_only_long_training_runs_on_many_images_have_cutout() -> None:
    assert cutout_side(LONG_EPOCHS, MANY_IMAGES, 32) == 8 and cutout_side(math.inf, 10 * MANY_IMAGES, 28) == 7
    assert cutout_side(LONG_EPOCHS - 1, MANY_IMAGES, 32) == 0
    assert cutout_side(math.inf, MANY_IMAGES - 1, 32) == 0
    open_ = resolve(GENOTYPE, {"recipe": "fast"})
    assert open_.auto == FITTED and open_.cutout == 0
    by_data = fit_data(open_, MANY_IMAGES, ["cat"], is_gpu=False)
    assert by_data.auto == ("cutout",), "the number of epochs is not known by then"
    long, short = (fit_length(by_data, epochs, MANY_IMAGES, 32) for epochs in (LONG_EPOCHS, 20))
    assert (long.cutout, short.cutout, long.auto, short.auto) == (8, 0, (), ())
    given = resolve(GENOTYPE, {"recipe": "fast", "cutout": 3})
    assert fit_length(given, LONG_EPOCHS, MANY_IMAGES, 32).cutout == 3, "a cutout that is given is kept"
    cifar = resolve(GENOTYPE, {"recipe": "cifar"})
    assert fit_length(cifar, 20, MANY_IMAGES, 32) == cifar, "other recipes keep theirs"


def cutout_of(data: Path, folder: Path, **length: Any) -> int:
    """The cutout of a training that is ended after its first step."""

    class EndError(Exception):
        pass

    def end(event: Event) -> None:
        if isinstance(event, Stepped):
            raise EndError

    given = {"recipe": "fast", "data": str(data), "space_settings": TINY["nb201"], "threads": 1, **length}
    with pytest.raises(EndError):
        train(GENOTYPE, resolve(GENOTYPE, given), folder, on_event=end)
    return stored_training(folder, {})[1].cutout


@pytest.mark.parametrize(
    ("length", "pace", "is_long"),
    [
        ({"epochs": LONG_EPOCHS}, None, True),
        ({"epochs": LONG_EPOCHS - 1}, None, False),
        ({"epochs": 3, "time": 1000.0}, None, False),  # short anyway: nothing is timed
        ({"time": 1000.0}, 1000.0 / LONG_EPOCHS / 2, True),  # seconds per epoch
        ({"time": 1000.0}, 1000.0 / LONG_EPOCHS * 2, False),
        ({"epochs": LONG_EPOCHS, "time": 1000.0}, 1000.0 / LONG_EPOCHS / 2, True),
        ({"epochs": LONG_EPOCHS, "time": 1000.0}, 1000.0 / LONG_EPOCHS * 2, False),  # the time ends it before
    ],
)
def test_the_length_is_known_from_epochs_or_from_timed_steps(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    length: dict[str, Any],
    pace: float | None,
    is_long: bool,
) -> None:
    steps = 2  # full batches of 32 among 86 images; the others are held out

    def timed(task: Any, world: World, most: float) -> float:
        assert pace is not None, "the number of epochs is enough to know"
        assert task.steps_in(0) == steps and most == 0.02 * length["time"]
        return pace / steps

    monkeypatch.setattr(TRAIN, "seconds_per_step", timed)
    monkeypatch.setattr(RECIPE, "MANY_IMAGES", 86)
    used: list[int] = []

    class Task(TrainTask):
        def __init__(self, *given: Any, **named: Any) -> None:
            used.append(named["train"].augment.cutout)
            super().__init__(*given, **named)

    monkeypatch.setattr(TRAIN, "TrainTask", Task)
    side = 8
    assert cutout_of(data, tmp_path / "run", **length) == used[-1] == (side // 4 if is_long else 0)


def test_training_runs_on_few_images_time_no_steps(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRAIN, "seconds_per_step", lambda *_: pytest.fail("the answer is known"))
    assert cutout_of(data, tmp_path / "run", time=1e6) == 0


class Timed:
    """A task whose steps take `seconds`, the first one more, on a fake clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, self.seconds, self.steps = 50.0, seconds, 0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def begin_epoch(self, epoch: int) -> None:
        torch.rand(3)

    def batches(self, epoch: int, start: int) -> Iterator[int]:
        yield from range(9)

    def step(self, batch: int) -> None:
        self.now += self.seconds + (100.0 if self.steps == 0 else 0.0)
        self.steps += 1
        torch.rand(3)


@pytest.mark.parametrize(("seconds", "most", "steps"), [(0.5, 100.0, 1 + TIMED), (0.5, 0.9, 3), (30.0, 0.9, 2)])
def test_the_time_of_a_step_is_measured_without_the_first_one(
    monkeypatch: pytest.MonkeyPatch, seconds: float, most: float, steps: int
) -> None:
    task, world = Timed(monkeypatch, seconds), ALONE
    before = torch.random.get_rng_state()
    assert seconds_per_step(task, world, most) == pytest.approx(seconds)  # type: ignore[arg-type]
    assert task.steps == steps and torch.equal(torch.random.get_rng_state(), before)


def test_a_budget_does_not_count_the_start_up_to_a_limit() -> None:
    for preparing, seconds in ((2.0, 102.0), (3.0, 103.0), (50.0, 103.0)):
        budget = TimeBudget(100.0, startup=3.0)
        assert budget.seconds == 100.0
        budget.used = budget.preparing = preparing  # as the loop does before the first step
        assert budget.seconds == seconds and budget.for_steps == seconds - 0.5
        resumed = TimeBudget(100.0, startup=3.0)
        resumed.resume(budget.state_dict() | {"used": 60.0})
        assert resumed.seconds == seconds
        assert resumed.progress == pytest.approx((60.0 - preparing) / (seconds - 0.5 - preparing))


def test_training_runs_with_different_start_up_times_have_equal_times_for_steps(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, prepare = [1000.0], TRAIN.prepare
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def steps_after(start: float, startup: float) -> int:
        made = 0

        def slow(*given: Any, **named: Any) -> Any:
            now[0] += start
            return prepare(*given, **named)

        def on_event(event: Event) -> None:
            nonlocal made
            if isinstance(event, Stepped):
                now[0], made = now[0] + 1.0, made + 1

        monkeypatch.setattr(TRAIN, "prepare", slow)
        given = {"recipe": "fast", "data": str(data), "space_settings": TINY["nb201"], "threads": 1, "cutout": 0}
        recipe = resolve(GENOTYPE, {**given, "time": 20.0, "test": False})
        drain(train_steps(GENOTYPE, recipe, tmp_path / f"{start}-{startup}", on_event=on_event, startup=startup))
        return made

    fast, slow, much_slower = (steps_after(start, 8.0) for start in (0.0, 8.0, 14.0))
    assert fast == slow >= 17 and fast - much_slower == 6  # what exceeds the allowance is part of the time
    assert fast - steps_after(8.0, 0.0) == 8
