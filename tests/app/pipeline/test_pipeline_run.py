"""Short whole runs: completed, and interrupted at many points and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from softcell.api import Network
from softcell.app.cli.main import run as softcell
from softcell.app.pipeline import Plan, RunRequest, run, summary, time_budget
from softcell.app.pipeline import run as pipeline
from softcell.app.pipeline.time_budget import JobTime
from softcell.engine import DivergedError, Failure
from softcell.engine.task import EpochEnded, Event, OnEvent, Started
from softcell.errors import UserError
from softcell.search import SearchRecipe
from tests.helpers.pipeline_images import folder

module = __import__("softcell.app.pipeline.run", fromlist=["_Run"])


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs are capped, so that what is trained does not depend on how fast the machine is."""
    monkeypatch.setattr(module, "MOST_SEARCH_EPOCHS", 2)
    monkeypatch.setattr(module, "MOST_TRAIN_EPOCHS", 2)
    monkeypatch.setattr(module, "MEASURING_BOUNDS", (0.01, 0.01))
    monkeypatch.setattr(summary, "LATENCY_ROUNDS", 1)
    monkeypatch.setattr(module, "OVERRUN", 1e6)
    monkeypatch.setattr("softcell.evaluate.latency.WARM_UP", 0.0)


@pytest.fixture
def no_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds each; they have tests of their own."""
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
        yield lambda done, total, next_: None
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
    return RunRequest(str(data), time=600.0, random=2, threads=1, image_size=8)


def comparable(plan: Plan) -> dict[str, Any]:
    """What must not depend on interruptions: accuracies, sizes and architectures."""
    assert plan.training is not None
    rows = [
        {key: value for key, value in job["row"].items() if key not in ("folder", "seconds")}
        for job in plan.training["jobs"]
    ]
    return {"rows": rows, "genotypes": [job["genotype"]["cells"] for job in plan.training["jobs"]]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = folder(tmp_path_factory.mktemp("images") / "photos", count=14)
    (root / "class-0" / "broken.png").write_bytes(b"no image")
    return root


@pytest.mark.usefixtures("no_onnx")  # the tutorial writes it
def test_a_folder_becomes_a_model_within_the_budget(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--time", "10m", "--max-params", "9k", "--random", "2", "--threads", "1"]
    assert softcell(["run", "--data", str(data), *arguments, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    for words in ("skipped 1 broken file", "space nb201", "method snas", "plan for 10:00", "worth it"):
        assert words in shown, words
    stored = json.loads((out / "summary.json").read_text())
    everyone = [stored["found"], stored["plain"], *stored["random"]]
    assert len(stored["random"]) == 2
    assert all(each["parameters"] <= 9_000 and each["epochs"] == 2 and each["latency"] > 0 for each in everyone)
    assert {file.name for file in (out / "export").iterdir()} == {"model.py", "model.json", "model.safetensors"}
    page = (out / "report.html").read_text()
    assert all(f"{place}" in page for place in ("search", "plain", "random-2"))
    assert Network.from_pretrained(out / "export").genotype == Network.from_pretrained(out / "train").genotype
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    assert softcell(["run", "--resume", str(out)]) == 0  # a finished run only shows its result again
    assert shown.endswith(capsys.readouterr().out)  # the time that it took too
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == before
    assert softcell(["run", "--data", str(data), "--out", str(out)]) == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.usefixtures("no_onnx")
def test_a_run_interrupted_anywhere_is_resumed_to_the_same_end(data: Path, tmp_path: Path) -> None:
    whole, screen = Plan.create(tmp_path / "whole", request(data)), Screen()
    assert pipeline(whole, screen).summary is not None
    # Before the search, within it, within trainings, and between all of them; each process gets further.
    assert screen.moment > 60
    plan = Plan.create(tmp_path / "stopped", request(data))
    for at in (1, 3, 9, 12, 6, 14, 12, None):
        with pytest.raises(KeyboardInterrupt):
            pipeline(plan, Screen(at, stop_in_training=at is None))
        plan = Plan.open(plan.folder)  # as a new process would
        assert plan.status == "interrupted"
    screen = Screen()
    assert pipeline(plan, screen).summary is not None
    heading, epoch = screen.starts[0]
    assert heading.startswith("train") and epoch >= 1  # it resumed the training instead of starting it again
    assert comparable(plan) == comparable(whole)
    assert Plan.open(plan.folder).status == "finished"
    assert not list(plan.folder.glob("measuring*")) and not list(plan.folder.glob("*.tmp"))


@pytest.mark.usefixtures("no_onnx")
def test_a_slow_search_is_shortened_and_keeps_its_epochs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OVERRUN", 0.0)
    plan, screen = Plan.create(tmp_path / "slow", request(data)), Screen()
    assert pipeline(plan, screen).summary is not None
    assert any("shortened from 2 epochs to 1 epoch:" in line for line in screen.lines)
    manifest = json.loads((plan.folder / "search" / "run.json").read_text())
    assert manifest["status"] == "finished" and manifest["recipe"]["epochs"] == 1
    assert len((plan.folder / "search" / "metrics.jsonl").read_text().splitlines()) == 1
    assert plan.training is not None and plan.training["epochs"] == 2


@pytest.mark.usefixtures("no_onnx")
@pytest.mark.parametrize(("late_from", "architectures"), [(1, [0, 0]), (3, [0, 0, 1]), (5, [0, 0, 1, 1, 2])])
def test_a_slow_random_search_keeps_the_architectures_it_has(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_from: int, architectures: list[int]
) -> None:
    ended: list[Event] = []

    def slow(shown: OnEvent, is_late: Callable[[], bool], recipe: SearchRecipe) -> OnEvent:
        def event(happened: Event) -> None:
            ended.extend([happened] if isinstance(happened, EpochEnded) else [])
            shown(happened)

        return time_budget.stop_when_late(event, lambda: len(ended) >= late_from, recipe)

    monkeypatch.setattr(module, "stop_when_late", slow)
    samples = max(1, late_from // 2)  # only those that were evaluated
    plan, screen = Plan.create(tmp_path / "slow", replace(request(data), method="random")), Screen()
    assert pipeline(plan, screen).summary is not None
    assert any(f"shortened from 4 architectures of 2 epochs to {samples} arch" in line for line in screen.lines)
    manifest = json.loads((plan.folder / "search" / "run.json").read_text())
    assert manifest["status"] == "finished" and manifest["recipe"]["method_settings"] == {"samples": samples}
    rows = [json.loads(line) for line in (plan.folder / "search" / "metrics.jsonl").read_text().splitlines()]
    assert [row["architecture"] for row in rows] == architectures
    assert sum("val_accuracy" in row for row in rows) == samples
    assert plan.training is not None
    found, *others = (job["genotype"]["cells"] for job in plan.training["jobs"] if job["name"] != "plain")
    assert found not in others


def test_the_plan_of_a_random_search_counts_all_its_architectures(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_SEARCH_EPOCHS", 150)
    monkeypatch.setattr(module._Run, "_measure_search", lambda self, choice: JobTime(1.0, 2.0))
    expected = {}
    for method in ("snas", "random"):
        plan, screen = Plan.create(tmp_path / method, replace(request(data), method=method)), Screen()
        job = module._Run(plan, screen)
        job.choose(job.inspect())
        assert plan.search is not None
        num = plan.search["recipe"]["epochs"] * (4 if method == "random" else 1)
        expected[method] = plan.search["expected"]
        assert expected[method] == 1.0 + 2.0 * num
    share = 0.3 * job.usable
    assert share - 12.0 < expected["random"] <= expected["snas"] <= share
    assert any("4 architectures of" in line for line in screen.lines)


@pytest.mark.usefixtures("no_onnx")
@pytest.mark.parametrize("is_old", [False, True])
def test_a_run_is_resumed_after_its_folder_is_moved(data: Path, tmp_path: Path, is_old: bool) -> None:
    plan = Plan.create(tmp_path / "first", request(data))
    with pytest.raises(KeyboardInterrupt):
        pipeline(plan, Screen(stop_at="random architecture 1"))
    state = json.loads((plan.folder / "plan.json").read_text())
    assert state["data"] == "data" and "folder" not in state["training"]["jobs"][0]["row"]
    if is_old:  # as in plans of older versions
        state["data"] = str((plan.folder / "data").resolve())
        state["training"]["jobs"][0]["row"]["folder"] = str(plan.folder / "train")
        (plan.folder / "plan.json").write_text(json.dumps(state))
    plan.folder.rename(tmp_path / "second")
    moved = Plan.open(tmp_path / "second")
    first = pipeline(moved, Screen()).summary
    assert first is not None and first.found.folder == str(tmp_path / "second" / "train")
    (tmp_path / "second").rename(tmp_path / "third")
    again = pipeline(Plan.open(tmp_path / "third"), Screen()).summary
    assert again is not None and again.plain.folder == str(tmp_path / "third" / "plain")
    assert replace(again, found=first.found, plain=first.plain, random=first.random) == first
    stored = json.loads((tmp_path / "third" / "summary.json").read_text())
    assert [stored[key]["folder"] for key in ("found", "plain")] == ["train", "plain"]


@pytest.mark.usefixtures("no_onnx")
def test_a_run_moved_before_its_search_uses_the_moved_links(data: Path, tmp_path: Path) -> None:
    plan = Plan.create(tmp_path / "first", request(data))
    with pytest.raises(KeyboardInterrupt):
        pipeline(plan, Screen(stop_at="search snas"))
    plan.folder.rename(tmp_path / "second")
    job = module._Run(Plan.open(tmp_path / "second"), Screen())
    job.search(job.choose(job.inspect()))
    manifest = json.loads((tmp_path / "second" / "search" / "run.json").read_text())
    assert manifest["recipe"]["data"] == str((tmp_path / "second" / "data").resolve())


def test_a_loss_that_is_not_finite_gives_advice_with_options_of_a_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(out: Path, **_: Any) -> None:
        raise DivergedError(3, Failure(7, float("nan")), out)

    plan = Plan.create(tmp_path / "out", request(data))
    job = module._Run(plan, Screen())
    monkeypatch.setattr(module._Run, "_measure_search", lambda self, choice: JobTime(1.0, 2.0))
    job.choose(job.inspect())
    monkeypatch.setattr(module.api, "search", explode)
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
    assert "is a file; give another --out" in error("--data", "digits", "--out", tmp_path / "file")
    inside = error("--data", "digits", "--out", tmp_path / "file" / "out")
    assert "cannot be created or read (Not a directory); give another --out" in inside
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "file").unlink()
    missing = error("--data", tmp_path / "none", "--out", tmp_path / "out")
    assert "existing path" in missing
    assert not (tmp_path / "out").exists()  # a rejected run leaves no folder behind
    (tmp_path / "mine").mkdir()
    error("--data", tmp_path / "none", "--out", tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_time_too_short_for_anything_says_how_much_is_needed(data: Path, tmp_path: Path) -> None:
    plan = Plan.create(tmp_path / "short", RunRequest(str(data), time=1.0, threads=1))
    with pytest.raises(UserError, match=r"--time 1s is too short: starting .* took \d+ s.*give at least --time \d+m"):
        run(plan, Screen())
    assert not plan.folder.exists()


def test_a_search_too_long_for_its_share_names_that_share(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module._Run, "_measure_search", lambda self, choice: JobTime(1.0, 100.0))
    plan = Plan.create(tmp_path / "short", RunRequest(str(data), time=200.0, threads=1))
    with pytest.raises(
        UserError, match=r"the shortest search takes 101.0 s here, but only \S+ s of the remaining \d+ s"
    ):
        run(plan, Screen())
