"""Training with a time limit instead of epochs, averaged weights, and the recipe for short budgets.

The clock is a fake: it moves when a test says so, so nothing here depends on the speed of a machine.
"""

import io
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from softcell.app.cli.main import run as command
from softcell.app.progress import Display
from softcell.arch import sample
from softcell.data import load
from softcell.engine import RunFolder, checkpoint, timing
from softcell.engine.optim import AveragedWeights, adamw, rate_in, sgd
from softcell.engine.task import EpochEnded, Event, Finished, Note, Started, Stepped
from softcell.engine.timing import TimeBudget
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe, TrainResult, load_network, resolve, stored_training, train
from softcell.evaluate.recipe import FITTED, fit_data
from softcell.evaluate.teacher import resolve_teacher
from softcell.evaluate.train import augment_of
from softcell.settings import MAX_EPOCHS
from softcell.spaces import build_space
from tests.helpers.engine_toy import Toy
from tests.helpers.search_toys import TINY, training, write_data

GENOTYPE = sample(build_space("nb201", TINY["nb201"]).layout(), 5)
STEPS = 5  # in an epoch: 86 images in batches of 16
TASK, TRAIN = sys.modules["softcell.evaluate.task"], sys.modules["softcell.evaluate.train"]


class Clock:
    """`time.perf_counter` for tests: a step takes `step` seconds, which may change, and nothing else takes any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: Callable[[int], float] = lambda number: 1.0) -> None:
        self.now, self.steps, self.step = 1000.0, 0, step
        self.events: list[Event] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Stepped):
            self.now += self.step(self.steps)
            self.steps += 1

    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.npz", train=96)


def recipe_of(data: Path, **changes: Any) -> TrainRecipe:
    given = training("nb201", data, **{"holdout": 0.1, **changes})
    del given["in"], given["genotype"]
    if "time" in changes and "epochs" not in changes:
        del given["epochs"]
    return resolve(GENOTYPE, given)


def rows(result: TrainResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]


# --- the time limit of a training run ---


def test_a_training_run_stops_on_time_within_an_epoch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    result = train(GENOTYPE, recipe_of(data, time=33.0), tmp_path / "run", on_event=clock)
    assert 0.85 * 33 <= clock.steps <= 33 and clock.steps % STEPS, "in the middle of an epoch"
    assert len(rows(result)) == math.ceil(clock.steps / STEPS) == result.metrics[-1]["epoch"] + 1
    assert "val_accuracy" in rows(result)[-1], "evaluated at the end, however short the epoch"
    manifest = RunFolder.open(result.folder).manifest
    assert manifest["status"] == "finished" and manifest["recipe"]["time"] == 33 and manifest["recipe"]["epochs"] == 0
    assert 0.85 * 33 <= manifest["results"]["time_used"] <= 1.05 * 33
    started = next(event for event in clock.events if isinstance(event, Started))
    assert (started.time, started.num_epochs) == (33, MAX_EPOCHS)
    left = [event.seconds_left for event in clock.events if isinstance(event, Stepped)]
    assert left[0] == 33 and left[-1] == pytest.approx(33 - clock.steps + 1)


def test_a_changing_load_does_not_exceed_the_time(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda number: 0.5 if number < 40 else 2.0)
    began = clock.now
    train(GENOTYPE, recipe_of(data, time=60.0), tmp_path / "run", on_event=clock)
    assert 0.85 * 60 <= clock.now - began <= 1.05 * 60
    assert 55 < clock.steps <= 60


def test_evaluation_is_measured_and_part_of_the_time(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluating an image takes 0.1 s here: 10 held out and 18 test images, 2.8 s of 30 s."""
    clock = Clock(monkeypatch, lambda number: 0.2)
    evaluated: list[float] = []
    real = TASK.measure

    def slow(*arguments: Any) -> Any:
        clock.now += 0.1 * 10
        evaluated.append(clock.now)
        return real(*arguments)

    monkeypatch.setattr(TASK, "measure", slow)
    began = clock.now
    result = train(GENOTYPE, recipe_of(data, time=30.0), tmp_path / "run", on_event=clock)
    after_test = clock.now + 0.1 * 18
    assert 0.9 * 30 <= after_test - began <= 1.03 * 30
    # Each takes a second: 5 % of the time allow for one before the last.
    assert 1 <= len(evaluated) - 1 <= 2
    assert ["val_accuracy" in row for row in rows(result)].count(True) == len(evaluated)


def test_epochs_remain_a_limit_and_schedules_end_there(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    result = train(GENOTYPE, recipe_of(data, time=1000.0, epochs=3), tmp_path / "run", on_event=clock)
    assert clock.steps == 3 * STEPS and len(result.metrics) == 3
    recipe = result.recipe
    assert result.metrics[-1]["lr"] == pytest.approx(rate_in(14 / 15, 0, recipe.lr, 0.0, "cosine"))


def test_rates_follow_the_time_and_not_the_steps(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 20 quick steps and some slow ones, the rate is that of the time used since the first step."""
    clock = Clock(monkeypatch, lambda number: 0.5 if number < 20 else 4.0)

    def slow(*arguments: Any, **options: Any) -> Any:
        clock.now += 20.0
        return load(*arguments, **options)

    monkeypatch.setattr(TRAIN, "load", slow)
    seen: list[tuple[float, float]] = []
    real = TASK.set_lr

    def noting(optimiser: Any, rate: float) -> None:
        seen.append((clock.now - 1020.0, rate))
        real(optimiser, rate)

    monkeypatch.setattr(TASK, "set_lr", noting)
    recipe = recipe_of(data, time=80.0, warmup=0.1, lr=0.2, holdout=0.0, ema=0.5)
    train(GENOTYPE, recipe, tmp_path / "run", on_event=clock)
    assert 25 < len(seen) < 40
    for used, rate in seen:
        # The time for evaluation is estimated during training, so the end moves by a few seconds.
        bounds = [rate_in(min(1, used / end), 0, 0.2, 0.0, "cosine", warmup=0.1) for end in (50, 60)]
        assert min(bounds) - 1e-9 <= rate <= max(bounds) + 1e-9, used


def test_a_resumed_training_gets_the_rest_of_its_time(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        pass

    clock, recipe = Clock(monkeypatch), recipe_of(data, time=40.0)

    def until_killed(event: Event) -> None:
        clock(event)
        if clock.steps == 22 and isinstance(event, Stepped):
            raise Killed

    with pytest.raises(Killed):
        train(GENOTYPE, recipe, tmp_path / "run", on_event=until_killed)
    loaded = checkpoint.load_latest(tmp_path / "run")
    assert loaded is not None and loaded.state["budget"]["used"] == 20.0, "saved after the fourth epoch"
    clock.now += 1e6  # a night between the two
    clock.steps, again = 0, stored_training(tmp_path / "run", {"time": "40s"})
    assert again[1].time == 40 and again[1].epochs == 0
    result = train(*again, tmp_path / "run", resume=True, on_event=clock)
    assert 0.85 * 40 <= 20 + clock.steps <= 40 and result.exit_code == 0
    assert 0.85 * 40 <= RunFolder.open(result.folder).manifest["results"]["time_used"] <= 1.05 * 40
    # Once more: nothing is left to do.
    before = clock.steps
    train(*again, tmp_path / "run", resume=True, on_event=clock)
    assert clock.steps == before


def test_a_time_for_too_few_epochs_is_warned_of_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    train(GENOTYPE, recipe_of(data, time=20.0), tmp_path / "few", on_event=clock)
    (note,) = clock.notes()
    assert "the time of 0:20 allows for about 3." in note and "fewer than 5" in note and "--channels" in note
    clock = Clock(monkeypatch)
    train(GENOTYPE, recipe_of(data, time=35.0), tmp_path / "enough", on_event=clock)
    assert not clock.notes()
    clock = Clock(monkeypatch, lambda number: 100.0)
    train(GENOTYPE, recipe_of(data, time=35.0), tmp_path / "slow", on_event=clock)
    assert clock.steps == 1 and "about 0.2 epochs" in clock.notes()[0], "one step is always made"


def test_checkpoints_take_a_small_share_of_a_time(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, saved = Clock(monkeypatch, lambda number: 0.1), []
    real = checkpoint.save

    def slow(*arguments: Any) -> None:
        clock.now += 0.06
        saved.append(clock.now)
        real(*arguments)

    monkeypatch.setattr(checkpoint, "save", slow)
    result = train(GENOTYPE, recipe_of(data, time=12.0), tmp_path / "run", on_event=clock)
    assert len(result.metrics) > 20 and len(saved) > 4 and len(saved) * 0.06 <= 0.06 * 12
    assert rows(result) == result.metrics


class Threaded(Toy):
    """A task whose steps take a second with one thread and `with_all` with three."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch, with_all: float, slowness: float = 1.0) -> None:
        super().__init__()
        self.used = 0

        def set_threads(count: int) -> int:  # a fake: tests run on one thread
            self.used = count
            return count

        def advance(epoch: int, step: int) -> None:
            clock.now += with_all if self.used == 3 else 1.0

        self.before_step = advance
        monkeypatch.setattr(time, "process_time", lambda: clock.now / slowness)
        monkeypatch.setattr(timing, "usable_cores", lambda: 3)
        monkeypatch.setattr(timing, "set_threads", set_threads)


@pytest.mark.parametrize(("with_all", "expected"), [(0.4, 3), (0.95, 1), (7.0, 1)])
def test_the_faster_number_of_threads_is_used(monkeypatch: pytest.MonkeyPatch, with_all: float, expected: int) -> None:
    """All three cores must be clearly faster than one."""
    clock, notes = Clock(monkeypatch), []
    task = Threaded(clock, monkeypatch, with_all)
    before = torch.get_rng_state()
    assert timing.choose_threads(task, notes.append, most=60.0) == task.used == expected
    assert torch.equal(torch.get_rng_state(), before), "random numbers are given back"
    assert f"{1e3 * with_all:.1f} ms with 3; using {expected}" in notes[0]
    # Threads that wait for each other are tried once, and timing ends with its time.
    assert clock.now - 1001 == pytest.approx(8 if with_all == 7.0 else 6 * (1 + with_all))
    begun = clock.now
    timing.choose_threads(task, notes.append, most=2.0)
    assert clock.now - begun <= 2.0 + 1 + with_all


def test_on_a_busy_machine_all_threads_are_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, notes = Clock(monkeypatch), []
    task = Threaded(clock, monkeypatch, 0.1, slowness=3.0)
    assert timing.choose_threads(task, notes.append, most=60.0) == task.used == 1
    assert clock.now == 1001 and "other programs use the CPU cores" in notes[0]


def test_only_training_runs_with_a_time_limit_choose_their_threads(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding depends on the number of threads; a training run of fixed length must not depend on the clock."""
    monkeypatch.setattr(TRAIN, "choose_threads", lambda task, notify, most: 7)
    threads = torch.get_num_threads()
    clock = Clock(monkeypatch)
    for changes, expected in (({"time": 5.0}, 7), ({"time": 5.0, "threads": 1}, 1), ({"epochs": 1}, threads)):
        recipe = recipe_of(data, **{"threads": 0, "holdout": 0.0, **changes})
        result = train(GENOTYPE, recipe, tmp_path / "run", overwrite=True, on_event=clock)
        assert result.recipe.threads == expected


def test_threads_are_chosen_even_if_an_epoch_has_fewer_steps_than_are_timed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "BUSY", math.inf)
    monkeypatch.setattr(timing, "HOPELESS", math.inf)
    monkeypatch.setattr(timing, "usable_cores", lambda: 2)
    recipe = recipe_of(data, time=300.0, epochs=1, threads=0)
    notes: list[str] = []
    train(GENOTYPE, recipe, tmp_path / "run", on_event=lambda e: notes.append(e.text) if isinstance(e, Note) else None)
    assert any("threads=auto: one step takes" in note for note in notes)


def test_epochs_of_a_time_are_shown_rarely_and_with_the_time_left() -> None:
    screen = Console(file=io.StringIO(), width=100)
    with Display(screen, "heading") as display:
        display(Started(0, 0, MAX_EPOCHS, 100.0))
        for epoch in range(200):
            display(Stepped(epoch, 1, 1, (epoch + 1) / 200, 100.0 - (epoch + 1) / 2))
            display(EpochEnded(epoch, {"epoch": epoch, "train_loss": 0.5}))
        display(Finished(200, None))
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "heading" and 18 <= len(lines) - 1 <= 21
    assert lines[1].startswith("epoch 10  loss 0.500  1:35 left") and lines[-1].startswith("epoch 200 ")


def test_the_time_is_in_report_and_info(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch, lambda number: 10.0)
    result = train(GENOTYPE, recipe_of(data, time=90.0), tmp_path / "run", on_event=clock)
    manifest = RunFolder.open(result.folder).manifest
    used = round(manifest["results"]["time_used"])
    assert used in (80, 90) and command(["info", str(result.folder)]) == 0
    assert f"1:{used - 60} of 1:30" in capsys.readouterr().out
    page = tmp_path / "report.html"
    assert command(["report", str(result.folder), "--out", str(page)]) == 0
    assert f"1 min {used - 60} s" in page.read_text() and "of 1 min 30 s given" in page.read_text()


# --- settings ---


def test_a_time_is_read_in_every_form_and_replaces_epochs() -> None:
    for given, seconds in (("5m", 300), ("1h30m", 5400), ("90", 90), (90, 90), (0.5, 0.5)):
        recipe = resolve(GENOTYPE, {"recipe": "small", "time": given})
        assert (recipe.time, recipe.epochs) == (seconds, 0)
    stored = resolve(GENOTYPE, {"recipe": "small"}).to_dict()
    assert resolve(GENOTYPE, stored, {"time": "5m"}).epochs == 0, "the epochs of an earlier run do not limit it"
    assert resolve(GENOTYPE, stored, {"time": "5m", "epochs": 7}).epochs == 7
    assert resolve(GENOTYPE, {"time": "5m"}, {"epochs": 7}).epochs == 7
    assert resolve(GENOTYPE, {"recipe": "small", "time": 0}).epochs == 10


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"time": "soon"}, "a duration such as 30m"),
        ({"time": -1}, "`time >= 0`"),
        ({"time": [5]}, "recipe.time must be a number"),
        ({"epochs": 0}, "`epochs >= 1` must hold without `time`"),
        ({"time": 0, "epochs": 0}, "`epochs >= 1` must hold without `time`"),
        ({"time": "5m", "epochs": -1}, "`epochs >= 1`"),
        ({"time": "5m", "recipe": "imagenet"}, "cosine or linear, but got exponential; add --set schedule=cosine"),
        ({"warmup": 0.1}, "a whole number of epochs, but got 0.1"),
        ({"ema": 1.0}, "`0 <= ema < 1`"),
        ({"auto": ["epochs"]}, "may name batch_size, lr, flip, cutout, but got epochs"),
    ],
)
def test_bad_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(GENOTYPE, given)


def test_commands_refuse_bad_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cell = "|nor_conv_3x3~0|+|none~0|none~1|+|skip_connect~0|nor_conv_3x3~1|none~2|"
    assert command(["train", cell, "--time", "5 minutes", "--out", str(tmp_path / "run")]) == 2
    assert "--time must be a duration such as 30m, 90s or 1h30m, got '5 minutes'" in capsys.readouterr().err
    with pytest.raises(UserError, match="a teacher is trained for a number of epochs; leave out time=5m"):
        resolve_teacher("resnet18", {"time": "5m"})


def test_rates_over_a_run_have_a_closed_form() -> None:
    def cosine(p: float) -> float:
        return 0.1 + 0.15 * (1 + math.cos(math.pi * p))

    for p in (0.0, 0.1, 0.3, 0.77, 1.0):
        assert rate_in(p, 0, 0.4, 0.1, "cosine") == pytest.approx(cosine(p))
        assert rate_in(p, 0, 0.4, 0.1, "linear") == pytest.approx(0.4 - 0.3 * p)
        assert rate_in(p, 0, 0.4, 0.1, "cosine", warmup=0.2) == pytest.approx(min(0.4 * p / 0.2, cosine(p)))
        assert rate_in(p, 2.5, 0.4, 0.1, "linear", warmup=5) == pytest.approx(min(0.2, 0.4 - 0.3 * p))
    assert rate_in(0.5, 7, 0.4, 0.1, "linear", warmup=5) == pytest.approx(0.25)


def test_schedules_of_epochs_can_follow_steps(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(TASK, "set_lr", lambda optimiser, rate: seen.append(rate))
    train(GENOTYPE, recipe_of(data, per_step=True, epochs=2, lr=0.4), tmp_path / "run")
    assert seen == pytest.approx([rate_in(step / 10, 0, 0.4, 0.0, "cosine") for step in range(10)])


# --- averaged weights ---


def test_averages_match_their_definition() -> None:
    """By the literal recursion, also for the running statistics of batch normalisation."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3)).double()
    average = AveragedWeights(network, 0.6)
    mean = {name: value.clone() for name, value in network.state_dict().items()}
    optimiser = sgd(network.parameters(), torch.device("cpu"), lr=0.1, momentum=0.9, weight_decay=0.0)
    for step in range(1, 20):
        network(torch.randn(4, 1, 5, 5, dtype=torch.float64)).square().mean().backward()
        optimiser.step()
        average.update()
        decay = min(0.6, (1 + step) / (10 + step))
        for name, value in network.state_dict().items():
            mean[name] = decay * mean[name] + (1 - decay) * value
    own = {name: value.clone() for name, value in network.state_dict().items()}
    with average.applied():
        for name, value in network.state_dict().items():
            if value.is_floating_point():
                torch.testing.assert_close(value, mean[name], rtol=0, atol=1e-12)
                assert not torch.equal(value, own[name]), name
    assert all(torch.equal(value, own[name]) for name, value in network.state_dict().items())
    assert int(own["1.num_batches_tracked"]) == 19, "counts are not averaged"


def test_the_averaged_network_is_what_is_evaluated_and_saved(data: Path, tmp_path: Path) -> None:
    plain = train(GENOTYPE, recipe_of(data, ema=0.0, lr=0.1), tmp_path / "plain")
    averaged = train(GENOTYPE, recipe_of(data, ema=0.9, lr=0.1), tmp_path / "averaged")
    assert [row["train_loss"] for row in plain.metrics] == [row["train_loss"] for row in averaged.metrics]
    assert plain.metrics[0]["val_loss"] != averaged.metrics[0]["val_loss"]
    loaded = checkpoint.load_latest(averaged.folder)
    assert loaded is not None
    state, saved = loaded.state["task"], load_network(averaged.folder).state_dict()
    for name, tensor in state["average"]["tensors"].items():
        assert torch.equal(saved[name], tensor), name
    own = load_network(plain.folder).state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in state["network"].items()), "steps are those without"
    assert int(state["average"]["updates"]) == 3 * STEPS


def test_a_resumed_training_has_the_same_average(data: Path, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    recipe = recipe_of(data, ema=0.9, per_step=True, drop_path=0.2)
    whole = train(GENOTYPE, recipe, tmp_path / "whole")

    def kill(event: Event) -> None:
        if isinstance(event, EpochEnded) and event.epoch == 1:
            raise Killed

    with pytest.raises(Killed):
        train(GENOTYPE, recipe, tmp_path / "broken", on_event=kill)
    resumed = train(GENOTYPE, recipe, tmp_path / "broken", resume=True)
    assert (resumed.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    timeless = [{key: row[key] for key in row if key != "seconds"} for row in whole.metrics]
    assert [{key: row[key] for key in row if key != "seconds"} for row in resumed.metrics] == timeless


FIRST_TEXT = """
allow_empty auxiliary batch_size clip cutout data data_root deterministic device drop_path embedding
engine epochs fused holdout image_size init jitter label_smoothing lr lr_decay lr_every lr_min momentum
nesterov optimiser plugins precision recipe schedule seed space_settings task threads warmup weight_decay
"""
FIRST_SETTINGS = set(FIRST_TEXT.split())
FIRST_SIZES = {"bottleneck", "candidates", "cells_per_stage", "channels", "nodes", "share_features"}
"""The settings of a training run in the NAS-Bench-201 space before time limits existed. Later ones need a default in
`softcell.engine.checkpoint`."""


def test_runs_of_earlier_versions_are_resumed(data: Path, tmp_path: Path) -> None:
    """Their recipes have none of the new settings, neither in `run.json` nor in the checkpoint."""

    class Killed(Exception):
        pass

    def kill(event: Event) -> None:
        if isinstance(event, EpochEnded) and event.epoch == 1:
            raise Killed

    recipe = recipe_of(data)
    whole = train(GENOTYPE, recipe, tmp_path / "whole")
    folder = tmp_path / "old"
    with pytest.raises(Killed):
        train(GENOTYPE, recipe, folder, on_event=kill)
    new = {one.name for one in fields(TrainRecipe)} - FIRST_SETTINGS
    loaded = checkpoint.load_latest(folder)
    assert loaded is not None and "budget" not in loaded.state and "average" not in loaded.state["task"]
    sizes = {f"space_settings.{name}" for name in recipe.space_settings if name not in FIRST_SIZES}
    assert sizes and {"time", "ema", "per_step", "flip", "auto"} <= new
    for name in sizes | new - {"data", "data_root", "plugins", "space_settings"}:
        del loaded.state["identity"]["recipe"][name]
    checkpoint.save(folder, loaded.state)
    stored = json.loads((folder / "run.json").read_text())
    stored["recipe"] = {key: value for key, value in stored["recipe"].items() if key not in new}
    kept = {key: value for key, value in stored["recipe"]["space_settings"].items() if key in FIRST_SIZES}
    stored["recipe"]["space_settings"] = kept
    (folder / "run.json").write_text(json.dumps(stored))
    events: list[Event] = []
    resumed = train(*stored_training(folder, {}), folder, resume=True, on_event=events.append)
    assert not [event for event in events if isinstance(event, Note)]
    assert (resumed.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()


# --- the fast recipe ---


def test_settings_left_to_the_data_are_in_the_run(data: Path, tmp_path: Path) -> None:
    given = {"recipe": "fast", "data": str(data), "epochs": 1, "space_settings": TINY["nb201"]}
    open_, narrow = resolve(GENOTYPE, given), resolve(GENOTYPE, given, {"batch_size": 24, "flip": True})
    assert open_.auto == FITTED and narrow.auto == ("lr", "cutout")
    result = train(GENOTYPE, narrow, tmp_path / "run")
    assert result.recipe.auto == () and result.recipe.batch_size == 24
    stored = stored_training(result.folder, {"recipe": "fast"})[1]
    assert stored == result.recipe, "a resumed training keeps what was chosen"


def test_batch_and_rate_grow_with_the_data() -> None:
    open_ = resolve(GENOTYPE, {"recipe": "fast"})
    found = [fit_data(open_, number, ["cat", "dog"], is_gpu=False) for number in (500, 5_000, 50_000)]
    assert sorted(one.batch_size for one in found) == [one.batch_size for one in found]
    assert found[0].batch_size < found[-1].batch_size and found[0].lr < found[-1].lr
    assert fit_data(open_, 50_000, ["cat"], is_gpu=True).batch_size > found[-1].batch_size
    assert fit_data(resolve(GENOTYPE, {"recipe": "small"}), 5, ["cat"], is_gpu=False).batch_size == 64


def test_characters_are_not_mirrored() -> None:
    open_ = resolve(GENOTYPE, {"recipe": "fast"})
    letters = fit_data(open_, 500, ["a", "b", "c"], is_gpu=False)
    words = fit_data(open_, 500, ["a", "boat"], is_gpu=False)
    assert (letters.flip, words.flip) == (False, None)
    digits = load("digits")
    for flip, expected in ((None, False), (True, True), (False, False)):
        recipe = TrainRecipe(flip=flip)
        assert augment_of(digits, recipe).flip is expected


def test_decay_spares_vectors() -> None:
    layer = torch.nn.Linear(3, 2).double()
    before = layer.bias.detach().clone(), layer.weight.detach().clone()
    optimiser = adamw(layer.parameters(), torch.device("cpu"), lr=0.1, betas=(0.9, 0.999), weight_decay=0.5)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    assert torch.equal(layer.bias, before[0])
    torch.testing.assert_close(layer.weight.detach(), before[1] * (1 - 0.1 * 0.5))


def test_a_budget_keeps_at_most_half_for_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    budget = TimeBudget(100.0)
    assert budget.for_steps == 99.5 and TimeBudget(1.0).for_steps == pytest.approx(0.98)
    budget.evaluating, budget.saving = 7.0, 1.0
    clock.now += 45.0
    assert budget.used == 0.0, "only the loop moves it, on all ranks alike"
    budget.used = budget.elapsed()
    assert budget.progress == pytest.approx(45 / 91.5) and not budget.is_over
    budget.evaluating = 400.0
    assert budget.for_steps == 50.0
    budget.resume({"used": 200.0, "preparing": 4.0})  # of an earlier process
    assert (budget.used, budget.elapsed()) == (200.0, 245.0) and budget.is_over and budget.progress == 1.0
