"""Short whole runs: completed, and interrupted at many points and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.api import Network
from softcell.app.cli.main import run as softcell
from softcell.app.jobs import JobTime, stop_when_late
from softcell.app.pipeline import Plan, RunRequest, run
from softcell.app.pipeline import _choose as choose
from softcell.app.pipeline import _competition as competition
from softcell.app.pipeline import _run as module
from softcell.app.pipeline import _summary as summary
from softcell.app.pipeline import run as pipeline
from softcell.app.pipeline._inspect import Inspection, OwnModel
from softcell.engine import DivergedError, Failure, RunFolder
from softcell.engine.checkpoint import replace_recipe
from softcell.engine.manifest import new_manifest
from softcell.engine.task import EpochEnded, Event, OnEvent, Started, Stepped
from softcell.errors import UserError
from softcell.search import SearchRecipe
from softcell.text import parse_time
from tests.helpers.pipeline_images import folder

MODULES = (module, competition)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs are capped, so that what is trained does not depend on how fast the machine is."""
    monkeypatch.setattr(module, "MAX_SEARCH_EPOCHS", 2)
    monkeypatch.setattr(module, "MIN_SEARCH_EPOCHS", 1)
    for each in MODULES:
        monkeypatch.setattr(each, "MAX_TRAIN_EPOCHS", 2)
        monkeypatch.setattr(each, "MIN_EPOCHS", 0)
    monkeypatch.setattr(choose, "MIN_EPOCHS", 0)
    monkeypatch.setattr(choose, "MEASURING_BOUNDS", (0.01, 0.01))
    monkeypatch.setattr(module, "OVERRUN", 1e6)
    monkeypatch.setattr(competition, "MAX_SEEDS", 2)
    monkeypatch.setattr("softcell.evaluate.latency.WARM_UP", 0.0)


@pytest.fixture
def no_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """These take seconds each and have separate tests."""
    whole = summary.export

    def export(source: Path, kind: str, *rest: Any, **named: Any) -> None:
        if kind != "onnx":
            whole(source, kind, *rest, **named)

    monkeypatch.setattr(summary, "export", export)


class Screen:
    """Counts what is shown, and stops the run at one of the moments."""

    def __init__(self, stop_at: int | str | None = None, *, stop_in_training: bool = False) -> None:
        self.moment, self.stop_at, self.stop_in_training = 0, stop_at, stop_in_training
        self.lines: list[str] = []
        self.starts: list[tuple[str, int]] = []

    def _tick(self) -> None:
        self.moment += 1
        if self.moment == self.stop_at:
            raise KeyboardInterrupt

    def print(self, *lines: str) -> None:
        self.lines += lines
        self._tick()

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[int, int, str], None]]:
        self._tick()

        def step(done: int, total: int, next_: str) -> None:
            if isinstance(self.stop_at, str) and self.stop_at in what and done == 1:
                raise KeyboardInterrupt

        yield step
        self._tick()

    @contextmanager
    def job(self, heading: str) -> Iterator[OnEvent]:
        self.lines.append(heading)
        self._tick()
        if isinstance(self.stop_at, str) and self.stop_at in heading:
            raise KeyboardInterrupt
        yield self._event

    def _event(self, event: Event) -> None:
        if isinstance(event, Started):
            self.starts.append((self.lines[-1], event.epoch))
        if self.stop_in_training and isinstance(event, EpochEnded) and self.lines[-1].startswith("train"):
            raise KeyboardInterrupt
        self._tick()


def request(data: Path) -> RunRequest:
    return RunRequest(str(data), time=600.0, max_params="25k", random=2, threads=1, image_size=8)


def decisions(plan: Plan) -> dict[str, Any]:
    """What must not depend on interruptions: who enters, with which architecture and size, and who trains how often.

    Accuracies do depend on them, because schedules follow the clock.
    """
    assert plan.competition is not None
    first = plan.competition["rounds"][0]
    return {
        "candidates": [
            (each["name"], each["settings"], each["genotype"]["cells"]) for each in plan.competition["candidates"]
        ],
        "entered": plan.competition["entered"],
        "epochs": {name: (own["epochs"], len(own["accuracies"])) for name, own in first["results"].items()},
        "seeds": [each["seeds"] for each in plan.competition["rounds"]],
        "recipe": {k: v for k, v in plan.search["recipe"].items() if k != "data"} if plan.search else {},
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = folder(tmp_path_factory.mktemp("images") / "photos", count=14)
    (root / "class-0" / "broken.png").write_bytes(b"no image")
    return root


@pytest.mark.usefixtures("no_onnx")  # the tutorial writes it
def test_a_folder_is_turned_into_a_model_within_the_budget(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--time", "10m", "--max-params", "25k", "--random", "2", "--threads", "1"]
    assert softcell(["run", "--data", str(data), *arguments, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    for words in ("skipped 1 broken file", "space nb201", "method drnas", "plan for 10:00", "competition on ", "wins"):
        assert words in shown, words
    stored = json.loads((out / "summary.json").read_text())
    names = [entry["name"] for entry in stored["entries"]]
    assert names == ["plain-1", "plain-2", "found", "random-1", "random-2"]
    assert all(entry["parameters"] <= 25_000 for entry in stored["entries"])
    first, second = stored["rounds"]
    assert len(first["results"]) == 5 and len(second["results"]) == 2 == second["seeds"]
    assert second["kept"] == [stored["delivered"]["name"]] and set(second["kept"]) < set(first["kept"])
    assert stored["delivered"]["epochs"] == 2 and stored["delivered"]["latency"] > 0
    assert {file.name for file in (out / "export").iterdir()} == {
        "model.py",
        "predict.py",
        "model.json",
        "model.safetensors",
    }
    page = (out / "report.html").read_text()
    assert all(words in page for words in ("Delivered: ", "plain-2", "round 2", "random-2", "held-out training images"))
    assert Network.from_pretrained(out / "export").genotype == Network.from_pretrained(out / "train").genotype
    # The test set is read once, for the delivered network, which is trained on all other images.
    manifests = {file.parent.relative_to(out): json.loads(file.read_text()) for file in out.rglob("run.json")}
    splits = {str(place): made["results"].get("split") for place, made in manifests.items() if made["kind"] == "train"}
    assert splits.pop("train") == "test" and len(splits) == 5 + 2 * 2 and set(splits.values()) == {"holdout"}
    assert not list(out.glob("round-*/*/predictions.safetensors")) and (out / "train/predictions.safetensors").is_file()
    assert set(manifests[Path("train")]["results"]["splits"]) == {"train"}
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    assert softcell(["run", "--resume", str(out)]) == 0  # a finished run only shows its result again
    assert shown.endswith(capsys.readouterr().out)  # the time that it took too
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == before
    assert softcell(["run", "--data", str(data), "--out", str(out)]) == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.usefixtures("no_onnx")
def test_a_run_interrupted_anywhere_is_resumed_to_the_same_decisions(data: Path, tmp_path: Path) -> None:
    wanted = replace(request(data), method="snas")  # the numbers below are of its steps
    whole, screen = Plan.create(tmp_path / "whole", wanted), Screen()
    assert pipeline(whole, screen).summary is not None
    # Before the search, within it, within the competition and the final training; each process gets further.
    plan = Plan.create(tmp_path / "stopped", wanted)
    for at in (1, 3, 9, 12, 6, 10, "round 1", 5, "round 2", 2, None):
        with pytest.raises(KeyboardInterrupt):
            pipeline(plan, Screen(at, stop_in_training=at is None))
        plan = Plan.open(plan.folder)  # as a new process would
        assert plan.status == "interrupted"
    screen = Screen()
    assert pipeline(plan, screen).summary is not None
    heading, epoch = screen.starts[0]
    assert heading.startswith("train") and epoch >= 1  # it resumed the training instead of starting it again
    assert len(screen.starts) == 1 and not any("round" in line for line in screen.lines)
    assert decisions(plan) == decisions(whole)
    assert Plan.open(plan.folder).status == "finished"
    assert not list(plan.folder.glob("measuring*")) and not list(plan.folder.glob("*.tmp"))


SEARCH = JobTime(1.0, 2.0)


def searched(plan: Plan, screen: Screen) -> Any:
    """Runs a plan up to the end of its search."""
    job = module._Run(plan, screen)
    return job.search(job.choose(job.inspect()))


def test_a_slow_search_is_shortened_and_keeps_its_epochs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OVERRUN", 0.0)
    plan, screen = Plan.create(tmp_path / "slow", request(data)), Screen()
    assert searched(plan, screen) is not None
    assert any("shortened from 2 epochs to 1 epoch:" in line for line in screen.lines)
    manifest = json.loads((plan.folder / "search" / "run.json").read_text())
    assert manifest["status"] == "finished" and manifest["recipe"]["epochs"] == 1
    # The chosen precision stays on record, and the search is not said to have changed it.
    assert manifest["recipe"]["precision"] == "float32"
    assert not any("began with other settings" in line for line in screen.lines)
    assert len((plan.folder / "search" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("killed", ["before", "after"])
def test_a_run_killed_while_its_search_is_shortened_is_resumed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    monkeypatch.setattr(module, "OVERRUN", 0.0)

    def kill(*given: Any) -> None:
        if killed == "after":
            replace_recipe(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(module, "replace_recipe", kill)
        with pytest.raises(KeyboardInterrupt):
            searched(Plan.create(tmp_path / "slow", request(data)), Screen())
    plan = Plan.open(tmp_path / "slow")
    assert searched(plan, Screen()) is not None
    manifest = json.loads((plan.folder / "search" / "run.json").read_text())
    assert manifest["status"] == "finished" and manifest["recipe"]["epochs"] == 1
    assert plan.search is not None and plan.search["recipe"]["epochs"] == 1 and "shortened" not in plan.search


@pytest.mark.parametrize(("late_from", "architectures"), [(1, [0, 0]), (3, [0, 0, 1]), (5, [0, 0, 1, 1, 2])])
def test_a_slow_random_search_keeps_the_architectures_it_has(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_from: int, architectures: list[int]
) -> None:
    ended: list[Event] = []

    def slow(shown: OnEvent, is_late: Callable[[], bool], recipe: SearchRecipe) -> OnEvent:
        def event(happened: Event) -> None:
            ended.extend([happened] if isinstance(happened, EpochEnded) else [])
            shown(happened)

        return stop_when_late(event, lambda: len(ended) >= late_from, recipe)

    monkeypatch.setattr(module, "stop_when_late", slow)
    samples = max(1, late_from // 2)  # only those that were evaluated
    plan, screen = Plan.create(tmp_path / "slow", replace(request(data), method="random")), Screen()
    assert searched(plan, screen) is not None
    assert any(f"shortened from 4 architectures of 2 epochs to {samples} arch" in line for line in screen.lines)
    manifest = json.loads((plan.folder / "search" / "run.json").read_text())
    assert manifest["status"] == "finished" and manifest["recipe"]["method_settings"] == {"samples": samples}
    rows = [json.loads(line) for line in (plan.folder / "search" / "metrics.jsonl").read_text().splitlines()]
    assert [row["architecture"] for row in rows] == architectures
    assert sum("val_accuracy" in row for row in rows) == samples


def planned(
    data: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    train: JobTime,
    search: JobTime = SEARCH,
    asked: RunRequest | None = None,
) -> tuple[Plan, Screen]:
    """The plan of a run on a machine whose steps take the given times, and what was shown; nothing is trained."""
    monkeypatch.setattr(module, "MAX_SEARCH_EPOCHS", 150)
    for each in MODULES:
        monkeypatch.setattr(each, "MIN_EPOCHS", 5)
    monkeypatch.setattr(choose, "MIN_EPOCHS", 5)
    monkeypatch.setattr(module, "MIN_SEARCH_EPOCHS", 3)
    monkeypatch.setattr(module._Run, "_measure_search", lambda self, choice: search)
    monkeypatch.setattr(choose.Chooser, "_measure_training", lambda self, choice, settings: (train, 1))
    plan, screen = Plan.create(folder, asked or request(data)), Screen()
    job = module._Run(plan, screen)
    job.choose(job.inspect())
    return plan, screen


def test_the_final_training_keeps_its_share_and_the_search_gets_less_than_a_fifth(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method, networks in (("snas", 1), ("random", 4)):
        asked = replace(request(data), method=method)
        plan, screen = planned(data, tmp_path / method, monkeypatch, train=JobTime(0.1, 0.2), asked=asked)
        assert plan.search is not None
        num = plan.search["recipe"]["epochs"] * networks  # all architectures of a random search count
        assert plan.search["expected"] == 1.0 + 2.0 * num
        job = module._Run(plan, screen)
        between = job.time.final_from - plan.used()
        assert 0.4 * between < plan.search["expected"] < 0.18 * 600
        assert job.time.end - job.time.final_from == pytest.approx(0.6 * 600)
    assert any("4 architectures of" in line for line in screen.lines)


@pytest.mark.parametrize(
    ("epoch", "search", "length"),
    [
        (0.2, JobTime(1.0, 2.0), "epochs, 2.0 s per epoch"),
        (0.2, JobTime(1.0, 60.0), "none: the time is too short for one (3 epochs take 181 s)"),
        (60.0, JobTime(1.0, 2.0), "none: the time is too short for one and a comparison"),
    ],
)
def test_a_search_without_time_for_some_epochs_and_a_comparison_is_left_out(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: float, search: JobTime, length: str
) -> None:
    plan, screen = planned(data, tmp_path / "run", monkeypatch, train=JobTime(0.1, epoch), search=search)
    assert plan.search is not None and ("recipe" in plan.search) == (not length.startswith("none"))
    assert any(length in line for line in screen.lines)
    assert any("competition  none: the time is too short" in line for line in screen.lines) == (epoch == 60.0)
    if length.startswith("none"):
        assert module._Run(plan, screen).search(module.build(module.Choice, plan.choice, "x")) is None


def test_a_slow_machine_gets_smaller_networks_and_too_slow_a_one_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    for epoch in (1.0, 20.0, 60.0):
        plan, _ = planned(data, tmp_path / f"{epoch}", monkeypatch, train=JobTime(0.1, epoch))
        assert plan.choice is not None
        sizes.append(plan.choice["plain"][0]["multiply_adds"])
        assert 5 * plan.choice["epoch"] <= 360.0
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    with pytest.raises(
        UserError, match=r"5 epochs of the smallest plain network take \S+ s here.*at least --time \d+m"
    ):
        planned(data, tmp_path / "slow", monkeypatch, train=JobTime(0.1, 500.0))


def test_the_least_time_that_is_named_is_enough(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = JobTime(0.1, 200.0)
    asked = replace(request(data), time=60.0)
    with pytest.raises(UserError) as caught:
        planned(data, tmp_path / "short", monkeypatch, train=slow, asked=asked)
    named = parse_time(str(caught.value).rsplit(" ", 1)[1])
    plan, _ = planned(data, tmp_path / "enough", monkeypatch, train=slow, asked=replace(asked, time=named))
    assert plan.choice is not None
    with pytest.raises(UserError, match="too short"):
        planned(data, tmp_path / "less", monkeypatch, train=slow, asked=replace(asked, time=0.8 * named))


@pytest.mark.parametrize(
    ("busy", "asked", "threads"),
    [(1.0, 0, 7), (4.0, 0, 1), (1.0, 2, 2), (4.0, 2, 2)],
    ids=["idle", "busy", "2", "2 busy"],
)
def test_threads_are_timed_unless_requested_or_the_machine_is_busy(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: float, asked: int, threads: int
) -> None:
    current = [1]

    def train(genotype: Any, recipe: Any, out: Path, *, on_event: OnEvent) -> None:
        current[0] = (
            recipe.threads or 7
        )  # a training run with a time limit and threads=0 times steps and sets the faster number
        assert recipe.time > 0
        for step in range(1, 100):
            on_event(Stepped(0, step, 100, 0.0, None))

    plan = Plan.create(tmp_path / "run", replace(request(data), threads=asked))
    plan.data = str(data)
    monkeypatch.setattr(module.RunTime, "slowness", busy)
    monkeypatch.setattr(choose, "jobs", SimpleNamespace(train=train))
    monkeypatch.setattr(choose.torch, "get_num_threads", lambda: current[0])
    chooser = choose.Chooser(plan, Screen(), module.RunTime(plan))
    inspection = Inspection("photos", {"a": 5, "b": 5}, {}, (8, 8, 8), 3)
    choice = choose.first_choice(inspection, plan.request, is_gpu=False, is_resizable=True)
    assert chooser._measure_training(choice, {"cells_per_stage": 1, "channels": 4})[1] == threads


def test_a_network_that_diverges_in_the_competition_only_loses(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, screen = planned(data, tmp_path / "run", monkeypatch, train=JobTime(0.1, 0.2))
    job = module._Run(plan, screen)
    rows = [{"epoch": 1, "val_count": 50, "seconds": 1.0}]

    def train(self: Any, choice: Any, candidate: Any, number: int, *_: Any) -> Any:
        if candidate.kind == "plain":
            raise DivergedError(0, Failure(7, float("nan")), tmp_path)
        return SimpleNamespace(accuracy=0.6 if candidate.name == "random-2" else 0.5, metrics=rows)

    monkeypatch.setattr(competition.Contest, "_compete_once", train)
    assert job.contest.winner(a_choice(plan), None, job.inspect()).name == "random-2"
    assert plan.competition is not None
    lost = {"accuracies": [0.0], "epochs": 0, "seconds": 0.0, "diverged": 1}
    assert plan.competition["rounds"][0]["results"]["plain-1"] == lost
    assert any("plain-1: the loss became nan" in line for line in screen.lines)


@pytest.mark.parametrize("diverged", [(), (0,), (1, 2)])
def test_the_pace_of_a_network_does_not_depend_on_seeds_that_diverged(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, diverged: tuple[int, ...]
) -> None:
    plan, screen = planned(data, tmp_path / "run", monkeypatch, train=JobTime(0.1, 0.2))
    job, rows = module._Run(plan, screen), [{"epoch": epoch, "val_count": 50, "seconds": 0.5} for epoch in range(4)]

    def train(self: Any, choice: Any, candidate: Any, number: int, seconds: float, seed: int, *_: Any) -> Any:
        if candidate.name == "plain-1" and seed in diverged:
            raise DivergedError(0, Failure(7, float("nan")), tmp_path)
        return SimpleNamespace(accuracy=0.5, metrics=rows)

    monkeypatch.setattr(competition.Contest, "_compete_once", train)
    choice = a_choice(plan)
    state = {"seconds": 2.0, "seeds": 3, "names": ["plain-1", "plain-2"], "results": {}, "is_last": True}
    plan.competition = {"entered": state["names"], "rounds": [state], "held_out": 0.1}
    job.contest._round(choice, 1, state, {each.name: each for each in choice.plain})
    # 4 epochs of half a second each, whatever happened to the other seeds.
    paces = job.contest.paces(choice)
    assert (paces["plain-1"], paces["plain-2"]) == (2.0, 2.0)


def a_choice(plan: Plan) -> Any:
    return module.build(module.Choice, plan.choice, "plan")


def test_without_time_for_a_competition_the_largest_plain_network_is_trained(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, screen = planned(data, tmp_path / "run", monkeypatch, train=JobTime(0.1, 0.2))
    job, choice = module._Run(plan, screen), a_choice(plan)
    monkeypatch.setattr(competition.Contest, "_compete_once", lambda *_: pytest.fail("there is no time"))
    plan.seconds = job.time.final_from - 0.1  # the search took longer than expected
    winner = job.contest.winner(choice, None, job.inspect())
    assert winner.name == "plain-1" and any("no competition: not enough time" in line for line in screen.lines)


def test_without_a_search_the_competition_gets_a_fifth_of_the_time_at_most(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, screen = planned(data, tmp_path / "run", monkeypatch, train=JobTime(0.1, 0.2))
    job = module._Run(plan, screen)
    before = plan.used()
    state = job.contest.planned(a_choice(plan), None, job.inspect())
    assert before <= state["until"] - 0.2 * 600 <= plan.used()  # and not the time of the search too


def test_a_machine_that_has_become_slow_trains_a_smaller_network_or_stops(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, screen = planned(data, tmp_path / "run", monkeypatch, train=JobTime(0.1, 0.2))
    job, choice = module._Run(plan, screen), a_choice(plan)
    found = {"plain-1": {"epochs": 3, "seconds": 60.0, "accuracies": [0.5]}}
    found["plain-2"] = {"epochs": 3, "seconds": 60.0, "accuracies": [0.5, 0.5]}  # two seeds
    plan.competition = {"rounds": [{"results": found}]}
    choice = replace(choice, plain=choice.plain[:2])
    first = choice.plain[0]
    assert job.contest.affordable(choice, first, 100.0) is first
    assert job.contest.affordable(choice, first, 99.0).name == "plain-2" and plan.competition["winner"] == "plain-2"
    assert "plain-1 replaced by plain-2" in screen.lines[-1]
    with pytest.raises(UserError, match=r"49 s are left for 5 epochs or more, but only 4\.9"):
        job.contest.affordable(choice, first, 49.0)


def training(
    job: Any, monkeypatch: pytest.MonkeyPatch, steps_per_second: dict[str, float]
) -> tuple[list[str], list[float]]:
    """Training runs of 10 steps per epoch, on a fake clock: the networks trained, and the epochs of each."""
    plan, trained, epochs = job.plan, list[str](), list[float]()

    def train(genotype: Any, recipe: Any, folder: Path, *, on_event: OnEvent, later: Any, **_: Any) -> Any:
        folder.mkdir(exist_ok=True)
        trained.append(plan.training["name"])
        epochs.append(0.0)
        end = plan.seconds + recipe.time
        step = 0
        while plan.seconds < end + later():
            plan.seconds += 1 / steps_per_second[trained[-1]]
            step += 1
            epochs[-1] = step / 10
            on_event(Stepped((step - 1) // 10, (step - 1) % 10 + 1, 10, 0.0, None))
        return SimpleNamespace(exit_code=0, accuracy=0.5)

    monkeypatch.setattr(module, "jobs", SimpleNamespace(train=train))
    monkeypatch.setattr(Plan, "used", lambda self: self.seconds)
    return trained, epochs


def test_a_training_run_that_becomes_slow_is_replaced_by_a_smaller_network(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, screen = planned(data, tmp_path / "run", monkeypatch, train=JobTime(0.1, 0.2))
    job, choice = module._Run(plan, screen), a_choice(plan)
    first, second = (replace(each, length=length) for each, length in zip(choice.plain[:2], (1.0, 0.5), strict=True))
    choice = replace(choice, plain=(first, second), start=0.0)
    plan.competition = {"rounds": []}
    trained, epochs = training(job, monkeypatch, {"plain-1": 0.08, "plain-2": 0.16})  # 4.6 and 9.2 epochs
    plan.seconds = 0.0
    job.train(choice, first)
    assert trained == ["plain-1", "plain-2"] and epochs[0] < 2 and epochs[1] >= 5
    assert plan.competition["winner"] == "plain-2" == plan.training["name"]
    assert any("plain-1 replaced by plain-2: the machine is slower" in line for line in screen.lines)
    # Without a smaller network that has enough epochs, the training is completed, and the verdict says so.
    plan.training, plan.seconds = None, 0.0
    trained, epochs = training(job, monkeypatch, {"plain-1": 0.02, "plain-2": 0.04})
    job.train(choice, first)
    assert trained == ["plain-1"] and epochs[0] < 5


def test_a_load_that_rises_in_the_final_training_ends_it_earlier(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, screen = planned(data, tmp_path / "run", monkeypatch, train=JobTime(0.1, 0.2))
    plan.competition, ends = {"rounds": []}, []
    for slow in (1.0, 8.0):
        job, plan.training, plan.seconds = module._Run(plan, screen), None, 0.0
        monkeypatch.setattr(module.RunTime, "slowness", property(lambda self, s=slow: s if plan.training else 1.0))
        training(job, monkeypatch, {"plain-1": 10.0})
        job.train(a_choice(plan), a_choice(plan).plain[0])
        ends.append(plan.seconds)
        assert plan.seconds == pytest.approx(job.time.end, abs=0.2)
    assert ends[1] < ends[0] - 20


def test_the_onnx_file_is_left_out_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, written = Plan.create(tmp_path / "run", RunRequest("digits", time=100.0)), list[str]()
    monkeypatch.setattr(summary, "export", lambda at, to, *_, **__: written.append(to))
    monkeypatch.setattr(summary, "write_report", lambda *_: None)
    for used, has_onnx in ((90.0, True), (99.0, False)):
        screen = Screen()
        written.clear()
        monkeypatch.setattr(Plan, "used", lambda self, used=used: used)
        monkeypatch.setattr(module.RunTime, "slowness", 1.0)
        summary.finish(plan, screen, module.RunTime(plan))
        assert written == ["safetensors", "python", *(["onnx"] if has_onnx else [])]
        assert any("ONNX export skipped: not enough time; `softcell export" in x for x in screen.lines) != has_onnx


def test_a_machine_too_busy_to_measure_on_is_refused_at_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.RunTime, "slowness", 20.0)
    with pytest.raises(UserError, match=r"about 60 s more, .* 20 s: other programs use the CPU cores; .* --time \d+m"):
        planned(data, tmp_path / "run", monkeypatch, train=JobTime(0.1, 0.2), asked=replace(request(data), time=60.0))


@pytest.mark.usefixtures("no_onnx")
def test_a_run_is_resumed_after_its_folder_is_moved(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always_first(images: Tensor) -> Tensor:
        return torch.tensor([1.0, 0.0]).expand(len(images), 2)

    own = OwnModel(Path("mine.onnx"), always_first, (3, 12, 12))
    monkeypatch.setattr(module, "read_own", lambda file: own)
    plan = Plan.create(tmp_path / "first", replace(request(data), beside="mine.onnx"))
    with pytest.raises(KeyboardInterrupt):
        pipeline(plan, Screen(stop_at="round 1"))
    assert json.loads((plan.folder / "plan.json").read_text())["data"] == "data"
    plan.folder.rename(tmp_path / "second")
    first = pipeline(Plan.open(tmp_path / "second"), Screen()).summary
    assert first is not None and first.delivered.folder == str(tmp_path / "second" / "train")
    assert first.beside == summary.Beside("mine.onnx", 0.5)  # half of the test images are of the first class
    manifest = json.loads((tmp_path / "second" / "train" / "run.json").read_text())
    assert manifest["recipe"]["data"] == str((tmp_path / "second" / "data").resolve())
    (tmp_path / "second").rename(tmp_path / "third")
    again = pipeline(Plan.open(tmp_path / "third"), Screen()).summary
    assert again is not None and again.delivered.folder == str(tmp_path / "third" / "train")
    assert replace(again, delivered=first.delivered) == first


def test_a_loss_that_is_not_finite_gives_advice_with_options_of_a_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(recipe: SearchRecipe, out: Path, **_: Any) -> None:
        raise DivergedError(3, Failure(7, float("nan")), out)

    plan = Plan.create(tmp_path / "out", request(data))
    job = module._Run(plan, Screen())
    monkeypatch.setattr(module._Run, "_measure_search", lambda self, choice: JobTime(1.0, 2.0))
    job.choose(job.inspect())
    monkeypatch.setattr(module.jobs, "search", explode)
    with pytest.raises(UserError, match=r"nan in epoch 4 at step 7.*--seed") as caught:
        run(plan, Screen())
    assert "--overwrite" not in str(caught.value) and Plan.open(plan.folder).status == "failed"


@pytest.mark.usefixtures("no_onnx")
def test_the_least_number_of_images_makes_a_run_and_one_less_is_rejected(tmp_path: Path) -> None:
    root = folder(tmp_path / "photos", count=4, side=12)
    assert pipeline(Plan.create(tmp_path / "least", request(root)), Screen()).summary is not None
    (root / "class-1" / "3.png").unlink()
    plan = Plan.create(tmp_path / "few", request(root))
    with pytest.raises(UserError, match=r"2 classes needs at least 8 images, but .* photos has 7 .* add 1 or more"):
        run(plan, Screen())
    assert not plan.folder.exists()


def test_bad_requests_are_rejected_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*words: str | Path) -> str:
        assert softcell(["run", *map(str, words)]) == 2
        return capsys.readouterr().err

    assert "--data" in error()
    assert "30m" in error("--data", "digits", "--time", "soon")
    assert "2.5M" in error("--data", "digits", "--max-params", "few")
    assert "random >= 2" in error("--data", "digits", "--random", "1")
    assert "is not a folder of `softcell run`" in error("--resume", tmp_path)
    search = RunFolder.create(tmp_path / "search", new_manifest("search", {}, 0))
    assert f"resume it with `softcell search --resume {search.path}`" in error("--resume", search.path)
    assert "keeps its settings" in error("--resume", tmp_path, "--time", "3m")
    assert "--resume needs" in error("--resume")
    for wrong, expected in {
        ("--space", "nope"): "no space 'nope'",
        ("--method", "nope"): "no method 'nope'",
        ("--image-size", "3"): "image_size >= 4",
        ("--image-size", "100000"): "4 images of 100000x100000 pixels need 447.0 GiB",
    }.items():
        # The folder is not read: it has no images, which would be another error.
        assert expected in error("--data", tmp_path, *wrong, "--out", tmp_path / "out")
    assert "applies to folders of images" in error("--data", "digits", "--image-size", "16", "--out", tmp_path / "out")
    (tmp_path / "file").write_text("mine")
    assert "is a file; choose another --out" in error("--data", "digits", "--out", tmp_path / "file")
    inside = error("--data", "digits", "--out", tmp_path / "file" / "out")
    assert "cannot be created or read (Not a directory); choose another --out" in inside
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "file").unlink()
    missing = error("--data", tmp_path / "none", "--out", tmp_path / "out")
    assert "existing path" in missing
    assert not (tmp_path / "out").exists()  # a rejected run leaves no folder behind
    (tmp_path / "mine").mkdir()
    error("--data", tmp_path / "none", "--out", tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_time_too_short_for_anything_says_how_much_is_needed(data: Path, tmp_path: Path) -> None:
    plan = Plan.create(tmp_path / "short", replace(request(data), time=1.0))
    with pytest.raises(UserError, match=r"--time 1s is too short: starting.* took \d+ s.*use at least --time \d+[ms]"):
        run(plan, Screen())
    assert not plan.folder.exists()
