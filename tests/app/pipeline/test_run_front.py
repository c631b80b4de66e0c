"""`softcell run` with several budgets: one search, one network per budget, a shared time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from softcell.app.cli.main import run as softcell
from softcell.app.export import trained_folder
from softcell.app.jobs import JobTime
from softcell.app.pipeline import Plan, Row, RunRequest, Summary, run
from softcell.app.pipeline import _choose as choose
from softcell.app.pipeline import _competition as competition
from softcell.app.pipeline import _front as front
from softcell.app.pipeline import _run as module
from softcell.app.pipeline import _summary as summary
from softcell.app.pipeline._choose import Choice
from softcell.app.pipeline._front import MIN_SHARE, PAGE, time_shares
from softcell.app.pipeline._plan import RunTime, TooLittleTimeError, split_budgets
from softcell.engine.task import OnEvent
from softcell.errors import UserError
from tests.helpers.pipeline_images import folder


class Screen:
    """Shows nothing; raises Ctrl-C at the final training of number `stop_at`."""

    def __init__(self, stop_at: int = 0) -> None:
        self.stop_at, self.num_training_runs = stop_at, 0

    def print(self, *lines: str) -> None: ...

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[int, int, str], None]]:
        yield lambda done, total, name: None

    @contextmanager
    def job(self, heading: str) -> Iterator[OnEvent]:
        self.num_training_runs += heading.startswith("train")
        if self.num_training_runs == self.stop_at > 0:
            raise KeyboardInterrupt
        yield lambda event: None


def request(data: Path, budgets: str = "3k,25k") -> RunRequest:
    return RunRequest(str(data), time=600.0, max_params=budgets, random=2, threads=1, image_size=8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("images") / "photos", count=14)


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs each, two networks in a competition, no ONNX files."""
    for name, value in (("MAX_SEARCH_EPOCHS", 2), ("MIN_SEARCH_EPOCHS", 1), ("MAX_TRAIN_EPOCHS", 2)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(competition, "MAX_TRAIN_EPOCHS", 2)
    for each in (module, choose, competition, front):
        monkeypatch.setattr(each, "MIN_EPOCHS", 0)
    monkeypatch.setattr(choose, "MEASURING_BOUNDS", (0.01, 0.01))
    monkeypatch.setattr(module, "OVERRUN", 1e6)
    monkeypatch.setattr(competition, "MAX_SEEDS", 1)
    monkeypatch.setattr(competition, "entrants", lambda candidates, *_: competition.by_importance(candidates)[:2])
    monkeypatch.setattr("softcell.evaluate.latency.WARM_UP", 0.0)
    whole = summary.export
    monkeypatch.setattr(summary, "export", lambda at, to, *a, **b: None if to == "onnx" else whole(at, to, *a, **b))


@pytest.mark.usefixtures("_short")
def test_one_search_gives_a_network_for_every_budget_and_is_resumed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    plan = Plan.create(out, request(data))
    with pytest.raises(KeyboardInterrupt):  # in the final training of the second budget
        run(plan, Screen(stop_at=2))
    first = {file: file.stat().st_mtime_ns for name in ("search", "3k") for file in (out / name).rglob("*")}
    stopped = Plan.open(out)
    spent = {name: Plan.open(out / name) for name in ("3k", "25k")}
    assert [stopped.status, spent["3k"].status, spent["25k"].status] == ["interrupted", "finished", "interrupted"]
    assert stopped.seconds >= sum(part.seconds for part in spent.values()) > 0
    ended = run(stopped, Screen())
    assert ended.exit_code == 0 and ended.front is not None
    assert {file: file.stat().st_mtime_ns for file in first} == first, "what was finished is not made again"
    assert Plan.open(out / "25k").request.time == spent["25k"].request.time

    small, large = ended.front.entries
    assert (small.budget, large.budget) == ("3k", "25k") and ended.summary == large.summary
    for entry in ended.front.entries:
        assert 0 < max(one.parameters for one in entry.summary.entries) <= entry.limit
        assert {one.kind for one in entry.summary.entries} == {"plain", "found", "random"}
        assert (out / entry.budget / "export" / "model.py").is_file()
        assert (out / entry.budget / "report.html").is_file()
    assert small.summary.delivered.parameters < large.summary.delivered.parameters
    assert len(list(out.rglob("search/run.json"))) == 1

    stored = json.loads((out / "front.json").read_text())
    assert [point["folder"] for point in stored["points"]] == ["3k", "25k"] and stored["left_out"] == {}
    page, drawing = (out / "report.html").read_text(), (out / "front.svg").read_text()
    for point in stored["points"]:
        assert f'href="{point["folder"]}/report.html"' in page and f">{point['budget']}</text>" in drawing
        assert all(line in page for line in point["verdict"])

    before = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    assert softcell(["run", "--resume", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "one network per budget, on " in shown and "front.svg" in shown
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == before
    assert trained_folder(out / "3k") == out / "3k" / "train"
    with pytest.raises(UserError, match=r"one network per budget; name the folder of one of them: .*25k.*3k"):
        trained_folder(out)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6))
def test_shares_of_the_time_follow_the_seconds_of_an_epoch(epochs: list[float]) -> None:
    """They sum to 1, none is below the least, and those above it are in proportion."""
    shares, least = time_shares(epochs), MIN_SHARE / len(epochs)
    assert sum(shares) == pytest.approx(1.0) and min(shares) >= least - 1e-9
    pace = [share / seconds for share, seconds in zip(shares, epochs, strict=True) if share > least + 1e-9]
    assert not pace or max(pace) == pytest.approx(min(pace))
    slower = sorted(range(len(epochs)), key=epochs.__getitem__)
    assert [shares[i] for i in slower] == pytest.approx(sorted(shares))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("200k,50k", "must be in increasing order, but got 200k,50k; pass 50k,200k"),
        ("50k,50000", "must differ"),
        ("50k,,1M", "got ''"),
        ("50k,many", "got 'many'"),
        ("50k,-1", "got '-1'"),
        ("50k,../1", "got '../1'"),
    ],
)
def test_wrong_budgets_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert softcell(["run", "--data", "digits", "--max-params", text]) == 2
    error = capsys.readouterr().err
    assert reason in error and "--max-params" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["max_params", "max_flops"])
def test_a_plan_with_other_budgets_than_its_request_names_those_of_the_request(tmp_path: Path, kind: str) -> None:
    plan = Plan.create(tmp_path / "run", RunRequest("digits", **{kind: "50k,1M"}))
    plan.front = {"budgets": ["70k"]}
    plan.save()
    with pytest.raises(UserError, match=r"must have budgets of the request, 50k, 1M$"):
        Plan.open(plan.folder)
    plan.request = RunRequest("digits", **{kind: "1M"})
    plan.save()
    with pytest.raises(UserError, match=r"must have budgets of the request, which has only one$"):
        Plan.open(plan.folder)


def test_budgets_are_read_and_given_once() -> None:
    assert split_budgets("--max-params", " 50k, 200k,1M") == ("50k", "200k", "1M")
    asked = RunRequest("digits", max_flops="1M,2M", max_params="50k")
    assert asked.front() == ("max_flops", ("1M", "2M")) and asked.limits()["multiply_adds"] == 2e6
    assert RunRequest("digits").front() is None and RunRequest("digits", max_params="50k").front() is None
    with pytest.raises(UserError, match="set a single budget for one of them"):
        RunRequest("digits", max_flops="1M,2M", max_params="50k,60k")


def chosen(data: Path, out: Path, monkeypatch: pytest.MonkeyPatch, epoch: float, asked: RunRequest) -> Plan:
    """The plan for a machine whose epochs of the reference network take `epoch` seconds; nothing is trained."""
    monkeypatch.setattr(module._Run, "_measure_search", lambda self, choice: JobTime(1.0, 2.0))
    monkeypatch.setattr(choose.Chooser, "_measure_training", lambda self, choice, settings: (JobTime(0.1, epoch), 1))

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Run, "search", stop)
    plan = Plan.create(out, asked)
    with pytest.raises(KeyboardInterrupt):
        run(plan, Screen())
    return plan


def test_the_final_training_runs_of_all_budgets_get_most_of_the_time(data: Path, tmp_path: Path) -> None:
    plan = Plan.create(tmp_path / "run", replace(request(data, "25k,100k"), time=1000.0))
    plan.search, plan.seconds = {"length": "a search"}, 200.0
    plan.front = {"budgets": ["25k", "100k"], "shares": [0.25, 0.75], "cells": [], "left_out": {}}
    choice = Choice("nb201", "snas", None, (1, 8, 8), 8, {}, {})
    total = 0.0
    for number in range(2):
        part = front._part(plan, choice, number)
        total += RunTime(part).share * part.request.time
        plan.seconds += part.request.time
    assert total == pytest.approx(0.6 * 1000.0, rel=0.01)
    plan.seconds = 950.0  # starting and ending take their time, so a training cannot have all of it
    assert RunTime(front._part(plan, choice, 1)).share == front.MAX_TRAINING


def test_budgets_that_the_time_cannot_fill_are_left_out(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(data, "25k,100k,400k")
    fast = chosen(data, tmp_path / "fast", monkeypatch, 0.1, asked).front
    slow = chosen(data, tmp_path / "slow", monkeypatch, 15.0, asked).front
    assert fast is not None and (fast["budgets"], fast["left_out"]) == (["25k", "100k", "400k"], {})
    assert fast["shares"] == sorted(fast["shares"]) and sum(fast["shares"]) == pytest.approx(1.0)
    assert slow is not None and slow["left_out"] and slow["budgets"] + list(slow["left_out"]) == ["25k", "100k", "400k"]


def test_too_little_time_for_all_budgets_is_refused_and_leaves_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(request(data, "3k,25k,100k"), time=60.0)
    with pytest.raises(UserError, match=r"too short for \d budgets?.*use at least --time \d+m, or fewer budgets"):
        chosen(data, tmp_path / "out", monkeypatch, 10.0, asked)
    assert not (tmp_path / "out").exists()


class Job:
    """A run of one budget that trains nothing; there is no time for the budgets in `without_time`."""

    without_time: tuple[str, ...] = ()

    def __init__(self, plan: Plan, screen: Screen) -> None:
        self.plan = plan

    def inspect(self) -> Any: ...
    def read_beside(self, inspection: Any) -> None: ...

    def search(self, choice: Any) -> None:
        self.plan.began -= 100.0  # it took this many seconds

    def choose(self, inspection: Any) -> Choice:
        self.plan.search = {"length": "none"}
        return Choice("nb201", "snas", None, (1, 8, 8), 8, {}, {})

    def whole(self) -> Summary:
        if self.plan.request.max_params in self.without_time:
            raise TooLittleTimeError("too short")
        row = Row("plain-1", "plain", "train", 0.9, 900, 5000, latency=1.5, epochs=50, seconds=9.0)
        found = Summary(row, "it was the best", (), (), 0, count=40, most_frequent=0.5)
        self.plan.summary = found.to_dict()
        self.plan.finish()
        return found


def test_a_budget_without_time_leaves_its_time_to_the_others(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"budgets": ["3k", "25k", "90k"], "shares": [0.25, 0.25, 0.5], "left_out": {}}
    monkeypatch.setattr(front, "_planned", lambda *_: json.loads(json.dumps(state)))
    monkeypatch.setattr(front, "_show_plan", lambda *_: None)
    monkeypatch.setattr(front, "write_report", lambda *_: None)
    monkeypatch.setattr(Job, "without_time", ("25k",))
    plan = Plan.create(tmp_path / "out", request(data, "3k,25k,90k"))
    made = front.run_front(plan, Screen(), Job)
    assert [entry.budget for entry in made.entries] == ["3k", "90k"]
    assert made.left_out == {"25k": "not enough time left"}
    times = {name: Plan.open(tmp_path / "out" / name).request.time for name in ("3k", "25k", "90k")}
    left = 0.99 * 600 - 100 - PAGE
    assert times["3k"] == pytest.approx(left / 4, rel=0.05)
    assert times["25k"] == pytest.approx(left / 3, rel=0.05) and times["90k"] == pytest.approx(left, rel=0.05)
    assert plan.seconds == pytest.approx(100, abs=20)

    monkeypatch.setattr(Job, "without_time", ("3k", "25k", "90k"))
    with pytest.raises(TooLittleTimeError):
        front.run_front(Plan.create(tmp_path / "none", request(data, "3k,25k,90k")), Screen(), Job)
