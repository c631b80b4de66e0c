"""Parts of a run: choices, budgets, forecasts and verdicts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from softcell.app.cli.main import run as softcell
from softcell.app.pipeline import Plan, RunRequest, parse_time
from softcell.app.pipeline._choose import (
    FEW_EPOCHS,
    GOOD_EPOCHS,
    SIZES,
    Choice,
    best_size,
    explained,
    first_choice,
    held_out_share,
    resized,
    search_recipe,
)
from softcell.app.pipeline._competition import sized
from softcell.app.pipeline._inspect import Inspection, inspect_dataset
from softcell.app.pipeline._plain import plain_cell, plain_networks
from softcell.app.pipeline._plan import FINAL_SHARE, MAX_RESERVED, NEEDED, ONNX, SAFE, Candidate, Load, RunTime
from softcell.arch import sample
from softcell.data import load
from softcell.errors import UserError
from softcell.settings import build, to_dict
from softcell.spaces import build_space
from softcell.spaces.costs import count_genotype


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800), ("90s", 90), ("1h30m", 5400), ("0.5h", 1800)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "-3m", "0s", "1.2.3m", "soon"])
def test_wrong_times_are_rejected(text: str) -> None:
    with pytest.raises(UserError, match="30m"):
        parse_time(text)


def images(side: int = 100, count: int = 1000) -> Inspection:
    return Inspection("photos", {"a": count // 2, "b": count // 2}, {}, (side, side, side), 3)


def first(side: int = 100, **request: Any) -> Choice:
    return first_choice(images(side), RunRequest("x", **request), is_gpu=False, is_resizable=True)


def test_a_choice_is_explained_in_two_lines_and_survives_its_file() -> None:
    plain = Candidate("plain-1", "plain", plain_cell().to_dict(), {"channels": 8}, 1, 1)
    made = replace(first(), plain=(plain,), epoch=0.5)
    made = explained(made, images(), RunRequest("x"))
    assert len(made.why) == 2 and all(made.why) and "resized from a median of 100" in made.why[0]
    assert build(Choice, json.loads(json.dumps(to_dict(made))), "plan") == made


def test_hours_on_a_gpu_change_the_space_and_the_reason_names_measured_accuracies() -> None:
    request = RunRequest("x", time=3 * 3600)
    made = first_choice(images(), request, is_gpu=True, is_resizable=True)
    assert (made.space, made.method) == ("darts", "drnas")
    reason = explained(made, images(), request).why[1]
    record = json.loads((Path(__file__).parents[3] / "results" / "nb201" / "nb201.json").read_text("utf-8"))
    found = {row["arm"]: row for row in record["summary"] if row["data"] == "cifar10"}
    for method in ("drnas", "snas", "darts"):
        assert f"{found[method]['accuracies']['cifar10_test']['mean']:.2f}%" in reason
    drnas, snas, darts = (found[method]["n"] for method in ("drnas", "snas", "darts"))
    assert f"({drnas}, {snas} and {darts} seeds)" in reason


def test_requests_win_over_choices() -> None:
    made = first(space="darts", method="random", image_size=40)
    assert (made.space, made.method, made.shape) == ("darts", "random", (3, 40, 40))


@pytest.mark.parametrize(("median", "size"), [(500, 32), (32, 32), (28, 28), (27, 24), (9, 9)])
def test_images_start_at_32_pixels_and_are_never_enlarged(median: int, size: int) -> None:
    made = first(median)
    assert made.image_size == size
    assert best_size(made, median, 1e9) <= median  # however much time there is
    assert best_size(made, median, 0.0) == min(median, SIZES[0])


def test_the_image_size_follows_the_epochs_that_the_time_allows() -> None:
    made = first(200)  # 32 pixels
    enough = 4 * GOOD_EPOCHS
    assert best_size(made, 200, enough) == 64  # four times the pixels
    assert best_size(made, 200, enough - 1) == 48
    assert best_size(made, 200, FEW_EPOCHS) == 32  # small images are kept as long as they leave some epochs
    assert best_size(made, 200, FEW_EPOCHS - 1) == 28
    assert best_size(resized(made, 64), 200, GOOD_EPOCHS) == 64


@pytest.mark.parametrize(("space", "seeds"), [("nb201", 2), ("darts", 1)])
def test_every_network_meets_the_budget(space: str, seeds: int) -> None:
    made = first(space=space)
    made = replace(made, network={**made.network, "channels": 64})
    limits = {"parameters": 40_000.0, "multiply_adds": 3e6}
    for seed in range(seeds):
        genotype = sample(build_space(space, made.network).layout(), seed)
        settings, cost = sized(made, genotype, 2, limits, 1e12)
        assert cost == count_genotype(build_space(space, settings), genotype, made.shape, 2)
        assert cost.parameters <= 40_000 and cost.multiply_adds <= 3e6
        wider = {**settings, "channels": 2 * settings["channels"]}  # the next width that is in the list anyway
        more = count_genotype(build_space(space, wider), genotype, made.shape, 2)
        assert settings["channels"] == 64 or more.parameters > 40_000 or more.multiply_adds > 3e6
    for _, cost in plain_networks(made.shape, 2, limits):
        assert cost.parameters <= 40_000 and cost.multiply_adds <= 3e6


def test_a_cell_is_not_wider_than_the_chosen_width_nor_larger_than_what_it_is_compared_with() -> None:
    made = first()
    genotype = sample(build_space("nb201", made.network).layout(), 0)
    assert sized(made, genotype, 2, {"parameters": 1e9}, 1e12)[0]["channels"] == made.network["channels"] == 16
    assert sized(made, genotype, 2, {"parameters": 1e9}, 1e5)[1].multiply_adds <= 1e5
    assert sized(made, genotype, 2, {"parameters": 1e9}, 1.0)[0]["channels"] == 1


def test_a_budget_that_no_network_meets_is_rejected() -> None:
    made, limits = first(), RunRequest("x", max_params="10").limits()
    with pytest.raises(UserError, match="fits 10 parameters"):
        sized(made, sample(build_space("nb201", made.network).layout(), 0), 2, limits, 1e12)
    with pytest.raises(UserError, match="no plain residual network fits"):
        plain_networks(made.shape, 2, limits)


def test_without_a_budget_networks_have_two_million_parameters_at_most() -> None:
    assert RunRequest("x").limits() == {"parameters": 2e6}
    assert RunRequest("x", max_flops="9M").limits() == {"multiply_adds": 9e6}
    assert max(cost.parameters for _, cost in plain_networks((3, 16, 16), 2, RunRequest("x").limits())) > 1e6


@pytest.mark.parametrize(("images", "share"), [(20, 0.25), (1200, 0.25), (5000, 0.2), (50_000, 0.1)])
def test_small_datasets_hold_out_a_larger_share(images: int, share: float) -> None:
    assert held_out_share(images) == pytest.approx(share)


def test_requests_are_checked() -> None:
    for wrong in ({"random": 1}, {"max_params": "many"}, {"time": 0.0}, {"seed": -1}):
        with pytest.raises(UserError):
            RunRequest("x", **wrong)  # type: ignore[arg-type]


def test_a_busy_machine_reserves_more_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.create(tmp_path / "run", RunRequest("digits", time=120.0))
    ends = []
    for waited in (0.0, 20.0, 200.0, 1e9):
        monkeypatch.setattr(Load, "_counters", lambda self, waited=waited: (20.0, waited))
        time = RunTime(plan)
        ends.append(time.end)
        assert time.final_from == pytest.approx(time.end - FINAL_SHARE * 120)
    alone, half, most, waiting = ends
    assert alone == pytest.approx(SAFE * 120 - (NEEDED + ONNX))
    assert half == pytest.approx(SAFE * 120 - 2 * (NEEDED + ONNX))
    assert most == pytest.approx(SAFE * 120 - max(MAX_RESERVED * 120, 11 * NEEDED))
    assert waiting == pytest.approx(SAFE * 120 - 30 * NEEDED)  # what is needed is always reserved


def test_the_load_is_that_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, counters = [100.0], [1.0, 0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Load, "_counters", lambda self: tuple(counters))
    load = Load(began=0.0)

    def after(cpu: float, waited: float) -> float:
        for _ in range(10):
            now[0], counters[:] = now[0] + cpu + waited, [counters[0] + cpu, counters[1] + waited]
            found = load.slowness()
        return found

    assert load.slowness() == 1.0
    assert after(cpu=1.0, waited=3.0) == pytest.approx(4.0)
    assert after(cpu=1.0, waited=0.0) == 1.0  # the other programs have ended
    assert after(cpu=1.0, waited=1.0) == pytest.approx(2.0)


def test_the_load_is_measured_without_counters_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr("time.perf_counter", lambda: 30.0)
    monkeypatch.setattr("time.process_time", lambda: 10.0)
    assert Load(began=0.0).slowness() == pytest.approx(3.0)


def test_a_finished_run_spends_no_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.create(tmp_path / "run", RunRequest("digits"))
    monkeypatch.setattr("time.perf_counter", lambda: plan.began + 20.0)
    plan.finish()
    monkeypatch.setattr("time.perf_counter", lambda: plan.began + 50.0)
    again = Plan.open(plan.folder)
    again.began -= 30.0
    assert [plan.used(), again.used()] == pytest.approx([20.0, 20.0])  # the file has rounded seconds


class Silent:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, *lines: str) -> None:
        self.lines += lines


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "random-1/x", None])
def test_training_runs_of_a_plan_stay_inside_its_folder(name: str | None, tmp_path: Path) -> None:
    plan = Plan.create(tmp_path / "run", RunRequest(data="digits"))
    plan.competition = {"candidates": [{"name": name}]}
    plan.save()
    with pytest.raises(UserError, match="random-N"):
        Plan.open(tmp_path / "run")


def test_a_search_of_a_run_ends_at_a_collapse_that_lasts(tmp_path: Path) -> None:
    plan = Plan.create(tmp_path / "run", RunRequest(data="digits", device="cpu"))
    plan.data = "digits"
    choice = first_choice(inspect_dataset(load("digits")), plan.request, is_gpu=False, is_resizable=False)
    collapse = search_recipe(plan, choice, 10).collapse
    assert collapse.stop and collapse.patience == 2


def test_a_foreign_plan_runs_no_plugin_without_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOFTCELL_STATE", str(tmp_path / "state"))
    (tmp_path / "evil_plan.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    request = RunRequest(data="digits", device="cpu")
    plan = Plan.create(tmp_path / "run", request)
    inspection = inspect_dataset(load("digits"))
    choice = first_choice(inspection, request, is_gpu=False, is_resizable=False)
    plan.inspection, plan.choice, plan.data = inspection.to_dict(), to_dict(choice), "digits"
    recipe = {**search_recipe(plan, choice, 1).to_dict(), "plugins": [str(tmp_path / "evil_plan.py")]}
    plan.search = {"recipe": recipe, "expected": 1.0, "length": "1 epoch"}
    plan.save()
    assert softcell(["run", "--resume", str(tmp_path / "run"), "-q"]) == 2
    assert "evil_plan.py" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists() and Plan.open(tmp_path / "run").status == "failed"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["plan.json"]


def test_a_plan_of_the_first_version_is_refused_with_what_stays_usable(tmp_path: Path) -> None:
    plan = Plan.create(tmp_path / "run", RunRequest("digits"))
    state = json.loads((plan.folder / "plan.json").read_text())
    state |= {"version": 1, "wishes": state.pop("request")}
    (plan.folder / "plan.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"earlier version of Softcell and cannot be resumed; start a new run.*export/"):
        Plan.open(plan.folder)
    (plan.folder / "plan.json").write_text(json.dumps({**state, "version": 3}))
    with pytest.raises(UserError, match="version=2"):
        Plan.open(plan.folder)
