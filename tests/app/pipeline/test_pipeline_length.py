"""What a run derives from the measured speed of its networks: cutout, the decision, and times without start-up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from softcell.app.pipeline import Plan, RunRequest
from softcell.app.pipeline import _competition as competition
from softcell.app.pipeline import _run as module
from softcell.app.pipeline._choose import Choice, first_choice
from softcell.app.pipeline._competition import LONGER
from softcell.app.pipeline._inspect import Inspection
from softcell.app.pipeline._plain import plain_cell
from softcell.app.pipeline._plan import Candidate
from softcell.app.pipeline._summary import Result
from softcell.evaluate.recipe import LONG_EPOCHS, MANY_IMAGES

SIDE, START, USED = 32, 2.0, 400.0
NAMES = ("plain-1", "plain-2", "found", "random-1")


class Screen:
    def print(self, *lines: str) -> None: ...

    def working(self, what: str) -> Any:
        return Nothing()

    def job(self, heading: str) -> Any:
        return Nothing()


class Nothing:
    def __enter__(self) -> Any:
        return lambda *_: None

    def __exit__(self, *_: Any) -> None: ...


def started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Choice, dict[str, Candidate], list[dict[str, Any]]]:
    """A run of 600 s after `USED` of them, its choice, its networks, and its training runs."""
    request = RunRequest("digits", time=600.0)
    plan = Plan.create(folder, request)
    plan.data = "digits"
    began = plan.began
    monkeypatch.setattr("time.perf_counter", lambda: began + USED)
    monkeypatch.setattr("time.process_time", lambda: USED)
    inspection = Inspection("photos", {"a": MANY_IMAGES // 2, "b": MANY_IMAGES // 2}, {}, (SIDE, SIDE, SIDE), 3)
    made = [
        Candidate(name, name.split("-")[0], plain_cell().to_dict(), {"channels": 8}, 1, 1)  # type: ignore[arg-type]
        for name in NAMES
    ]
    choice = first_choice(inspection, request, is_gpu=False, is_resizable=False)
    choice = replace(choice, plain=tuple(made[:2]), epoch=1.0, start=START)
    trained_runs: list[dict[str, Any]] = []

    def train(genotype: Any, recipe: Any, folder: Path, **named: Any) -> Any:
        trained_runs.append({"recipe": recipe, "folder": folder.name, **named})
        rows = [{"epoch": 9, "val_count": 1000, "seconds": 5.0}]
        return SimpleNamespace(exit_code=0, accuracy=0.7 if folder.name == "plain-2" else 0.6, metrics=rows)

    for each in (module, competition):
        monkeypatch.setattr(each, "jobs", SimpleNamespace(train=train))
    return module._Run(plan, Screen()), choice, {each.name: each for each in made}, trained_runs


@pytest.mark.parametrize("ahead", [-1.0, 1.0])
def test_the_final_training_has_cutout_if_its_measured_pace_makes_it_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    run, choice, networks, trained_runs = started(tmp_path / "run", monkeypatch)
    seconds = run.time.end - USED
    epochs = (LONG_EPOCHS + ahead) / (seconds - START)  # per second
    found = {"plain-1": {"epochs": epochs * 10.0, "seconds": 10.0, "accuracies": [0.5]}}
    run.plan.competition = {"rounds": [{"results": found}]}
    run.train(choice, networks["plain-1"])
    recipe = trained_runs[0]["recipe"]
    assert recipe.cutout == (SIDE // 4 if ahead > 0 else 0) and "cutout" not in recipe.auto
    assert recipe.time == pytest.approx(seconds) and "startup" not in trained_runs[0]  # the whole time is a contract
    assert run.plan.training["recipe"]["cutout"] == recipe.cutout  # a resumed run keeps it


def played(run: Any, choice: Choice, networks: dict[str, Candidate], names: tuple[str, ...], **state: Any) -> Any:
    own = {"seconds": 20.0, "seeds": 1, "names": list(names), "results": {}, **state}
    run.plan.competition = {"rounds": [own], "entered": list(names), "held_out": 0.1, "until": 450.0}
    run.contest._round(choice, 1, own, networks)
    return own


def test_training_runs_of_a_round_get_their_seconds_excluding_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, choice, networks, trained_runs = started(tmp_path / "run", monkeypatch)
    played(run, choice, networks, NAMES, is_last=False)
    assert [each["folder"] for each in trained_runs] == list(NAMES)
    assert all(each["startup"] == START and each["recipe"].time == 20.0 for each in trained_runs)
    assert all(each["recipe"].cutout == 0 for each in trained_runs)  # 20 epochs are few
    assert choice.num_train == MANY_IMAGES
    assert [each["recipe"].epochs for each in trained_runs] == [0, 10, 0, 0]  # as many as the largest plain network


def test_a_smaller_plain_network_leaves_before_the_last_round_or_loses_it_to_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, choice, networks, _ = started(tmp_path / "run", monkeypatch)
    first = played(run, choice, networks, NAMES, is_last=False)
    assert first["kept"] == ["plain-1", "found"]  # though plain-2 was the best
    last = played(run, choice, networks, ("plain-1", "plain-2"), is_last=True)
    # 10 epochs in 5 s are 2 per second.
    longer = (run.time.end - USED - START) * 2 / 10
    assert longer > LONGER
    assert last["kept"] == ["plain-1"] and run.plan.competition["winner"] == "plain-1"
    decision = run.plan.competition["decision"]
    assert (decision["rule"], decision["ahead"]) == ("longer", "plain-2")
    assert decision["longer"] == pytest.approx(longer) and decision["lead"] == pytest.approx(0.1)
    assert run.plan.competition["why"] == decision["why"] and "plain-2 was 10.0 points better" in decision["why"]


def test_a_network_that_diverged_says_nothing_about_the_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, choice, *_ = started(tmp_path / "run", monkeypatch)
    run.plan.competition = {"rounds": []}
    assert (
        run.contest._times_longer(choice, [Result("plain-1", (0.0,), 0, 0.0), Result("plain-2", (0.5,), 5, 1.0)]) == 0.0
    )
