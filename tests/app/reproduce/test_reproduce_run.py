"""Running a plan: stopped in time and resumed bit for bit, records from run folders, errors before hours are spent."""

from __future__ import annotations

import json
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from softcell.app.cli import reproduce as reproduce_command
from softcell.app.cli.main import run as softcell
from softcell.app.jobs import JobTime
from softcell.app.reproduce import run as runs
from softcell.app.reproduce.papers import PAPERS, Paper, PaperTable, Row, Training
from softcell.app.reproduce.plan import Plan, make_plan
from softcell.app.reproduce.record import (
    columns_of,
    make_record,
    table_cells,
    unfinished,
    verdict,
    without_folders,
)
from softcell.app.reproduce.run import kind_of, measured_times, run_plan, status
from softcell.arch import Genotype
from softcell.engine import RunFolder
from softcell.errors import UserError

SIZES = {"cells_per_stage": 1, "channels": 2}
FAST = {"data": "digits", "batch_size": 512, "space_settings": SIZES}


def tiny_plan(folder: Path, epochs: int = 1) -> Plan:
    """Two searches, random cells and one training recipe, all of them tiny."""
    table = PaperTable(
        "1",
        "a table for tests",
        (
            Row("found", "darts", published={"test": "12.3", "search": "45.6"}, repeats=True),
            Row("random", random="nb201"),
        ),
        trainings={"test": Training("test error, %", {**FAST, "recipe": "small", "epochs": 1})},
        columns=("search", "parameters", "cost"),
        compare=("found", "random", "test"),
        seeds=2,
    )
    searches = {"darts": {**FAST, "method": "darts", "space": "nb201", "epochs": epochs}}
    return Plan(Paper("tiny", "Tiny", "", searches, (table,)), (table,), folder)


def accuracies(plan: Plan) -> dict[str, Any]:
    return {
        str(job.folder): RunFolder.open(plan.folder_of(job)).manifest["results"].get(key)
        for job in plan.jobs
        for key in ("accuracy" if job.kind == "train" else "val_accuracy",)
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    plan = tiny_plan(tmp_path_factory.mktemp("whole"))
    ended = run_plan(plan, at_once=3, notify=lambda text: None)
    assert (ended.errors, ended.exit_code, ended.out_of_time) == ({}, 0, False)
    return plan


def test_a_plan_that_is_stopped_and_resumed_elsewhere_gives_the_same_results(
    whole: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, now = tiny_plan(tmp_path / "first"), [0.0]
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def stop_at(event: str) -> Any:
        def notify(text: str) -> None:
            if event in text:
                now[0] += 1e6  # the next step is late

        return notify

    ended = run_plan(plan, minutes=1, notify=stop_at("search darts, seed 1: started"))
    assert ended.out_of_time
    assert ended.exit_code == 0
    assert [status(plan.folder_of(job)) for job in plan.jobs[:2]] == ["finished", "interrupted"]
    assert status(plan.folder_of(plan.jobs[-1])) == "not started"
    record = make_record(plan, plan.tables[0])
    assert not record["complete"]
    assert unfinished(record)[1] == "search darts, seed 1: interrupted after 0 of 1 epochs"

    moved = tiny_plan(tmp_path / "second")  # as if the folder was copied to another machine
    shutil.copytree(plan.folder, moved.folder)
    assert run_plan(moved, minutes=1, notify=stop_at("train darts-1 on digits, seed 0: started")).out_of_time
    assert not run_plan(moved, notify=lambda text: None).out_of_time
    assert accuracies(moved) == accuracies(whole)
    for job in moved.jobs[:2]:
        assert Genotype.load(moved.folder_of(job)).cells == Genotype.load(whole.folder_of(job)).cells


def selecting_plan(folder: Path) -> Plan:
    """One search that selects by perturbation, on three candidates."""
    plan = tiny_plan(folder)
    own = {
        **plan.paper.searches["darts"],
        "select": {"by": "perturbation", "epochs": 0, "images": 64},
        "space_settings": {**SIZES, "candidates": ["skip_connect", "nor_conv_1x1"]},
    }
    table = replace(plan.tables[0], rows=plan.tables[0].rows[:1], trainings={}, compare=None)
    return replace(plan, paper=replace(plan.paper, searches={"darts": own}, tables=(table,)), tables=(table,))


def test_a_selection_by_perturbation_is_stopped_between_rounds_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, now = selecting_plan(tmp_path / "stopped"), [0.0]
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rounds = []

    def notify(text: str) -> None:
        rounds.append(text)
        if "perturbation, 2 of" in text:
            now[0] = 1e6

    ended = run_plan(plan, minutes=1, rows=None, notify=notify)
    assert (ended.out_of_time, ended.errors) == (True, {})
    assert [status(plan.folder_of(job)) for job in plan.jobs] == ["interrupted", "not started"]
    rounds.clear()
    run_plan(plan, notify=notify)
    assert not [text for text in rounds if "seed 0: perturbation, 1 of" in text]  # not repeated
    other = selecting_plan(tmp_path / "whole")
    run_plan(other, notify=lambda text: None)
    assert [Genotype.load(plan.folder_of(job)).cells for job in plan.jobs] == [
        Genotype.load(other.folder_of(job)).cells for job in other.jobs
    ]


def test_a_record_has_every_run_and_the_spread_over_networks_and_seeds(whole: Plan) -> None:
    record = make_record(whole, whole.tables[0], ["softcell", "reproduce", "tiny"])
    found = {key: 1 - value for key, value in accuracies(whole).items() if key.startswith("train")}
    networks = [found[f"train/test/darts-{seed}/seed-0"] for seed in (0, 1)]
    seeds = [found[f"train/test/darts-0/seed-{seed}"] for seed in (0, 1, 2)]
    row = record["rows"][0]
    assert row["networks"]["test"]["values"] == networks
    assert row["networks"]["test"]["mean"] == pytest.approx(statistics.fmean(networks))
    assert row["seeds"]["test"]["std"] == pytest.approx(statistics.stdev(seeds))
    assert record["rows"][1]["networks"]["test"]["n"] == 4
    assert "test" not in record["rows"][1]["seeds"]
    assert record["complete"]
    assert set(record["runs"]) == {str(job.folder) for job in whole.jobs}
    for run in record["runs"].values():
        assert {"command", "seed", "git", "hardware", "versions", "recipe", "results"} <= set(run)
        assert run["results"]["seconds"] > 0
    assert str(whole.folder) not in json.dumps(record)


def test_published_numbers_are_in_separate_columns(whole: Plan) -> None:
    table = whole.tables[0]
    headings, lines = table_cells(table, make_record(whole, table))
    for line in lines:
        for heading, cell in zip(headings, line, strict=True):
            assert (cell in ("12.3", "45.6")) <= heading.startswith("paper: ")
    row = dict(zip(headings, lines[0], strict=True))
    assert row["paper: test error, %"] == "12.3"
    assert row["test error, %"].endswith("(2)")
    assert row["test error, %, seeds of one network"].endswith("(3)")
    assert table_cells(table, None)[1][0][1:] == [
        "not measured",
        "45.6",
        "not measured",
        "not measured",
        "not measured",
        "12.3",
    ]


def with_values(first: list[float], second: list[float]) -> list[dict[str, Any]]:
    return [
        {"name": name, "networks": {"test": {"values": own}} if own else {}}
        for name, own in (("found", first), ("random", second))
    ]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([0.030, 0.031, 0.029], [0.040, 0.041, 0.039, 0.040], "found is better than random"),
        ([0.040, 0.041, 0.039], [0.030, 0.031, 0.029], "found is worse than random"),
        ([0.030, 0.050], [0.035, 0.041], "No difference"),
        ([0.030], [0.040, 0.041], "too few runs"),
        ([], [0.040], "Not measured: found."),
    ],
)
def test_the_verdict_follows_the_test(first: list[float], second: list[float], said: str, tmp_path: Path) -> None:
    assert said in verdict(tiny_plan(tmp_path).tables[0], with_values(first, second))


def test_single_networks_are_compared_over_their_training_seeds() -> None:
    table = PAPERS["nos"].tables[0]
    rows = [
        {"name": name, "networks": {"cifar10": {"values": own[:1]}}, "seeds": {"cifar10": {"values": own}}}
        for name, own in (("+ dynamic 3×3", [0.046, 0.047, 0.046]), ("ResNet-18", [0.050, 0.049, 0.050]))
    ]
    assert "+ dynamic 3×3 is better than ResNet-18" in verdict(table, rows)


def test_more_is_better_for_accuracies() -> None:
    table = next(table for table in PAPERS["fullattention"].tables if table.number == "VI")
    rows = [
        {"name": name, "networks": {"retrieval recall_at_1": {"values": own}}}
        for name, own in (("both phases", [0.6, 0.61]), ("random networks", [0.5, 0.51]))
    ]
    assert "both phases is better" in verdict(table, rows)
    assert list(columns_of(table))[-4:] == [f"retrieval recall_at_{k}" for k in (1, 2, 4, 8)]


def test_a_folder_of_another_plan_is_refused(whole: Plan) -> None:
    with pytest.raises(UserError, match="epochs: 1 -> 2"):
        run_plan(tiny_plan(whole.folder, epochs=2), minutes=0)


def test_times_are_known_from_runs_here_and_unknown_without(whole: Plan, tmp_path: Path) -> None:
    times = measured_times(whole, whole.jobs, measure=False)
    assert set(times) == {"search darts", "train test"}
    assert all(one.epoch > 0 for one in times.values())
    assert measured_times(tiny_plan(tmp_path), [], measure=False) == {}


def test_a_network_with_an_empty_cell_is_recorded_as_not_trainable(
    whole: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "empty_cells", lambda genotype, layout: ["cell"])
    record = make_record(whole, whole.tables[0])
    run = record["runs"]["train/test/darts-0/seed-0"]
    assert run["status"] == "not trainable"
    assert "the cell cell is empty" in run["reason"]


def test_paths_of_this_machine_stay_out_of_records() -> None:
    assert without_folders({"a": ["/home/me/data", "27.3 / 9.2", "run --out /tmp/x/y"]}) == {
        "a": ["DIR/data", "27.3 / 9.2", "run --out DIR/y"]
    }


def test_printing_a_plan_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert softcell(["reproduce"]) == 0
    assert softcell(["reproduce", "snas", "--table", "1", "--small"]) == 0
    printed = capsys.readouterr().out
    assert "drop-path" in printed
    assert "search    snas-mild" in printed
    assert "Nothing was run" in printed
    assert "all steps on digits, with small networks, one epoch per run and fewer seeds" in " ".join(printed.split())
    assert list(tmp_path.iterdir()) == []


def test_the_cost_of_a_plan_and_how_it_is_counted_are_separate_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        reproduce_command, "measured_times", lambda plan, *_: {kind_of(job): JobTime(0.0, 1.0) for job in plan.jobs}
    )
    assert softcell(["reproduce", "snas", "--table", "1", "--small"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("cost "))
    cost, _, rest = line.removeprefix("cost").strip().partition(" ")
    assert cost.replace(":", "").isdigit() and rest == "left, if run one after another on this device"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nobody"], "no plan for a paper 'nobody'"),
        (["snas", "--table", "8"], "--table must be one of"),
        (["snas", "--minutes", "3"], "--minutes applies to running the plan"),
        (["snas", "--table", "3", "--run"], "ImageNet is not available"),
        (["snas", "--table", "1", "--run", "--data-root", "nowhere"], "cifar10"),
        (["snas", "--small", "--run", "--row", "nothing"], "no row contains 'nothing'"),
        (["snas", "--seeds", "1"], "at least 2"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOFTCELL_DATA", str(tmp_path))  # restored after the test, whatever the command sets
    assert softcell(["reproduce", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_command_shows_a_stopped_plan_and_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["softcell", "reproduce", "snas", "--table", "2", "--small", "--run"])
    assert softcell(["reproduce", "snas", "--table", "2", "--small", "--run", "--minutes", "0"]) == 0
    printed = capsys.readouterr().out
    assert "Time is up (--minutes 0); continue with:\n  softcell reproduce snas --table 2 --small --run" in printed
    record = json.loads(Path("runs/reproduce-snas-small/table-2.json").read_text())
    assert record["small"]
    assert not record["complete"]
    assert record["rows"][0]["networks"] == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("paper", "table"), [("snas", "2"), ("nos", "4"), ("nos", "1"), ("fullattention", "VI")])
def test_a_rehearsal_runs_all_steps(paper: str, table: str, tmp_path: Path) -> None:
    assert softcell(["reproduce", paper, "--table", table, "--small", "--run", "--quiet", "--out", str(tmp_path)]) == 0
    plan = make_plan(paper, table, small=True, out=tmp_path)
    assert make_record(plan, plan.tables[0])["complete"]
