"""Whole runs, short ones: to the end, and stopped at many points and gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pipeline_images import folder

from softcell.api import Network
from softcell.cli.main import run as softcell
from softcell.engine.events import EpochEnded, Event, OnEvent, Started
from softcell.errors import UserError
from softcell.pipeline import Plan, Wishes, ending, run
from softcell.pipeline import run as pipeline

module = __import__("softcell.pipeline.run", fromlist=["_Run"])


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs are capped, so that what is trained does not depend on how fast the machine is."""
    monkeypatch.setattr(module, "MOST_SEARCH_EPOCHS", 2)
    monkeypatch.setattr(module, "MOST_TRAIN_EPOCHS", 2)
    monkeypatch.setattr(module, "PROBE_BOUNDS", (0.01, 0.01))
    monkeypatch.setattr(ending, "LATENCY_ROUNDS", 1)
    monkeypatch.setattr(module, "OVERRUN", 1e6)
    monkeypatch.setattr("softcell.evaluate.latency.WARM_UP", 0.0)


@pytest.fixture
def no_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds each; they have tests of their own."""
    whole = ending.export

    def export(source: Path, kind: str, *rest: Any, **named: Any) -> None:
        if kind != "onnx":
            whole(source, kind, *rest, **named)

    monkeypatch.setattr(ending, "export", export)


class Screen:
    """Counts what is shown, and stops the run at one of the moments."""

    def __init__(self, stop_at: int | None = None, *, stop_in_training: bool = False) -> None:
        self.moment, self.stop_at, self.stop_in_training = 0, stop_at, stop_in_training
        self.lines: list[str] = []
        self.starts: list[tuple[str, int]] = []

    def _tick(self) -> None:
        self.moment += 1
        if self.moment == self.stop_at:
            raise KeyboardInterrupt

    def say(self, *lines: str) -> None:
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
        yield self._event

    def _event(self, event: Event) -> None:
        if isinstance(event, Started):
            self.starts.append((self.lines[-1], event.epoch))
        if self.stop_in_training and isinstance(event, EpochEnded) and self.lines[-1].startswith("train"):
            raise KeyboardInterrupt
        self._tick()


def wishes(data: Path) -> Wishes:
    return Wishes(str(data), time=600.0, random=2, threads=1, image_size=8)


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
    for words in ("1 broken file is left out", "space nb201", "method snas", "plan for 10:00", "worth it"):
        assert words in shown, words
    summary = json.loads((out / "summary.json").read_text())
    everyone = [summary["found"], summary["plain"], *summary["random"]]
    assert len(summary["random"]) == 2
    assert all(each["parameters"] <= 9_000 and each["epochs"] == 2 and each["latency"] > 0 for each in everyone)
    assert {file.name for file in (out / "export").iterdir()} == {"model.py", "model.json", "model.safetensors"}
    page = (out / "report.html").read_text()
    assert all(f"{place}" in page for place in ("search", "plain", "random-2"))
    assert Network.from_pretrained(out / "export").genotype == Network.from_pretrained(out / "train").genotype
    assert softcell(["run", "--resume", str(out)]) == 0  # a finished run shows its result again
    assert "found by search" in capsys.readouterr().out
    assert softcell(["run", "--data", str(data), "--out", str(out)]) == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.usefixtures("no_onnx")
def test_a_run_stopped_anywhere_goes_on_to_the_same_end(data: Path, tmp_path: Path) -> None:
    whole, screen = Plan.create(tmp_path / "whole", wishes(data)), Screen()
    assert pipeline(whole, screen).summary is not None
    # Before the search, within it, within trainings, and between all of them; each process gets further.
    assert screen.moment > 60
    plan = Plan.create(tmp_path / "stopped", wishes(data))
    for at in (1, 3, 9, 12, 6, 14, 12, None):
        with pytest.raises(KeyboardInterrupt):
            pipeline(plan, Screen(at, stop_in_training=at is None))
        plan = Plan.open(plan.folder)  # as a new process would
        assert plan.status == "interrupted"
    screen = Screen()
    assert pipeline(plan, screen).summary is not None
    heading, epoch = screen.starts[0]
    assert heading.startswith("train") and epoch >= 1  # it went on within the training, and did not begin it again
    assert comparable(plan) == comparable(whole)
    assert Plan.open(plan.folder).status == "finished"
    assert not list(plan.folder.glob("measuring*")) and not list(plan.folder.glob("*.tmp"))


@pytest.mark.usefixtures("no_onnx")
def test_a_search_that_has_become_slow_ends_early_and_its_epochs_count(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OVERRUN", 0.0)
    plan, screen = Plan.create(tmp_path / "slow", wishes(data)), Screen()
    assert pipeline(plan, screen).summary is not None
    assert any("ends after 1 of 2 epochs" in line for line in screen.lines)
    manifest = json.loads((plan.folder / "search" / "run.json").read_text())
    assert manifest["status"] == "finished" and manifest["recipe"]["epochs"] == 1
    assert len((plan.folder / "search" / "metrics.jsonl").read_text().splitlines()) == 1
    assert plan.training is not None and plan.training["epochs"] == 2


def test_bad_requests_are_refused_before_anything_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*words: str | Path) -> str:
        assert softcell(["run", *map(str, words)]) == 2
        return capsys.readouterr().err

    assert "--data" in error()
    assert "30m" in error("--data", "digits", "--time", "soon")
    assert "2.5M" in error("--data", "digits", "--max-params", "few")
    assert "random >= 2" in error("--data", "digits", "--random", "1")
    assert "no folder of `softcell run`" in error("--resume", tmp_path)
    assert "keeps what it was asked for" in error("--resume", tmp_path, "--time", "3m")
    assert "--resume needs" in error("--resume")
    missing = error("--data", tmp_path / "none", "--out", tmp_path / "out")
    assert "existing path" in missing
    assert not (tmp_path / "out").exists()  # a run that was refused leaves no folder behind
    (tmp_path / "mine").mkdir()
    error("--data", tmp_path / "none", "--out", tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_time_too_short_for_anything_says_how_much_is_needed(data: Path, tmp_path: Path) -> None:
    plan = Plan.create(tmp_path / "short", Wishes(str(data), time=1.0, threads=1))
    with pytest.raises(UserError, match=r"give at least --time \d+m"):
        run(plan, Screen())
    assert not plan.folder.exists()
