"""Parts of a run: choices, budgets, forecasts and verdicts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from softcell.app.cli.main import run as softcell
from softcell.app.pipeline import Plan, RunRequest, parse_time, time_budget
from softcell.app.pipeline.choose import SIZES, Choice, cheaper, choose, fit, plain_network, search_recipe
from softcell.app.pipeline.inspect import Inspection, inspect_dataset
from softcell.app.pipeline.run import ENDING, MOST_RESERVED, SAFE, _Run
from softcell.app.pipeline.summary import Row, Summary, verdict
from softcell.app.pipeline.time_budget import JobTime, measure_job
from softcell.arch import sample
from softcell.data import load
from softcell.engine.task import EpochEnded, OnEvent, Started, Stepped
from softcell.errors import UserError
from softcell.spaces import build_space
from softcell.spaces.costs import Cost, count_genotype


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800), ("90s", 90), ("1h30m", 5400), ("0.5h", 1800)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "-3m", "0s", "1.2.3m", "soon"])
def test_wrong_times_are_rejected(text: str) -> None:
    with pytest.raises(UserError, match="30m"):
        parse_time(text)


def images(side: int = 100, count: int = 1000) -> Inspection:
    return Inspection("photos", {"a": count // 2, "b": count // 2}, {}, (side, side, side), 3)


def test_a_choice_is_explained_in_two_lines_and_survives_its_file() -> None:
    for is_gpu in (False, True):
        made = choose(images(), RunRequest("x"), is_gpu=is_gpu, is_resizable=True)
        assert len(made.why) == 2 and all(made.why)
        assert Choice.from_dict(made.to_dict()) == made
        assert made.image_size in SIZES


def test_images_are_never_enlarged_and_requests_win() -> None:
    assert choose(images(26), RunRequest("x"), is_gpu=True, is_resizable=True).image_size == 24
    asked = RunRequest("x", space="darts", method="random", image_size=40)
    made = choose(images(), asked, is_gpu=False, is_resizable=True)
    assert (made.space, made.method, made.shape) == ("darts", "random", (3, 40, 40))


def test_cheaper_choices_end() -> None:
    made: Choice | None = choose(images(), RunRequest("x"), is_gpu=False, is_resizable=True)
    seen = []
    while made is not None:
        seen.append((made.shape[1], made.search_space["channels"]))
        made = cheaper(made, is_resizable=True)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == (16, 2)


@pytest.mark.parametrize(("space", "seeds"), [("nb201", 3), ("darts", 1)])
def test_every_network_meets_the_budget(space: str, seeds: int) -> None:
    request = RunRequest("x", max_params="40k", max_flops="3M", space=space)
    made = choose(images(), request, is_gpu=False, is_resizable=True)
    limits = request.limits()
    for seed in range(seeds):
        genotype = sample(build_space(space, made.network).layout(), seed)
        settings = fit(made, genotype, 2, limits)
        cost = count_genotype(build_space(space, settings), genotype, made.shape, 2)
        assert cost.parameters <= 40_000 and cost.multiply_adds <= 3e6
        if settings["channels"] < made.network["channels"]:  # one more would be too many
            wider = {**settings, "channels": settings["channels"] + 1}
            more = count_genotype(build_space(space, wider), genotype, made.shape, 2)
            assert more.parameters > 40_000 or more.multiply_adds > 3e6
    plain, settings = plain_network(cost, made.shape, 2, limits)
    own = count_genotype(build_space("nb201", settings), plain, made.shape, 2)
    assert own.parameters <= 40_000 and own.multiply_adds <= 3e6


def test_a_budget_that_no_network_meets_is_rejected() -> None:
    with pytest.raises(UserError, match="fits 10 parameters"):
        choose(images(), RunRequest("x", max_params="10"), is_gpu=False, is_resizable=True)


@pytest.mark.parametrize("parameters", [3_000, 50_000, 1_000_000])
def test_the_plain_network_is_of_similar_size(parameters: int) -> None:
    genotype, settings = plain_network(Cost(parameters, 0), (3, 16, 16), 10, {})
    found = count_genotype(build_space("nb201", settings), genotype, (3, 16, 16), 10)
    assert abs(found.parameters / parameters - 1) < 0.15


def test_requests_are_checked() -> None:
    for wrong in ({"random": 1}, {"max_params": "many"}, {"time": 0.0}, {"seed": -1}):
        with pytest.raises(UserError):
            RunRequest("x", **wrong)  # type: ignore[arg-type]


def test_job_time_is_measured_from_steps_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time_budget.time, "perf_counter", lambda: now[0])
    ended: list[str] = []

    def job(folder: Path, watch: OnEvent) -> None:
        folder.mkdir()
        now[0] += 3.0  # data is read
        watch(Started(0, 0, 100))
        for epoch in range(100):
            for step in range(4):
                now[0] += 5.0 if epoch == step == 0 else 0.5  # the first step is slow
                watch(Stepped(epoch, step + 1, 4, 0.0, None))
            now[0] += 1.0
            ended.append("epoch")
            watch(EpochEnded(epoch, {}))

    found = measure_job(job, tmp_path / "scratch", 6.0, evaluated=9.0, tested=1.0)
    assert found.startup == pytest.approx(8.0)
    assert found.epoch == pytest.approx(4 * 0.5 + 1.0)
    assert len(ended) < 5 and not (tmp_path / "scratch").exists()
    short = measure_job(job, tmp_path / "scratch", 0.6, evaluated=1.0, tested=0.0)  # no epoch ended
    assert short.epoch == pytest.approx(4 * 0.5 * (1 + time_budget.EVALUATION))


def test_a_busy_machine_reserves_more_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.create(tmp_path / "run", RunRequest("digits", time=120.0))
    monkeypatch.setattr("time.perf_counter", lambda: plan.began + 20.0)
    usable = []
    for used in (20.0, 10.0, 40.0, 1e-9):  # of the processor
        monkeypatch.setattr("time.process_time", lambda used=used: used)
        usable.append(_Run(plan, Silent()).usable)  # type: ignore[arg-type]
    alone, half, two_threads, waiting = usable
    assert alone == two_threads == pytest.approx(SAFE * 120 - ENDING)
    assert half == pytest.approx(SAFE * 120 - 2 * ENDING)
    assert waiting == pytest.approx(SAFE * 120 - MOST_RESERVED)


def test_a_finished_run_spends_no_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.create(tmp_path / "run", RunRequest("digits"))
    monkeypatch.setattr("time.perf_counter", lambda: plan.began + 20.0)
    plan.finish()
    monkeypatch.setattr("time.perf_counter", lambda: plan.began + 50.0)
    again = Plan.open(plan.folder)
    again.began -= 30.0
    assert plan.used() == again.used() == pytest.approx(20.0)


def test_epochs_that_fit_never_exceed_the_time() -> None:
    found = JobTime(2.0, 3.0, 1.0)
    for seconds in (0.0, 3.0, 5.9, 6.0, 100.0):
        epochs = found.epochs_in(seconds)
        assert epochs == 0 or found.total(epochs) <= seconds < found.total(epochs + 1)


class Silent:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, *lines: str) -> None:
        self.lines += lines


@pytest.mark.parametrize(
    ("name", "used", "is_late"),
    [
        ("random-3", 800.0, False),
        ("random-3", 900.0, True),
        ("random-4", 900.0, True),
        ("random-2", 900.0, False),
        ("plain", 2000.0, False),
        ("train", 2000.0, False),
    ],
)
def test_a_random_architecture_that_does_not_fit_is_skipped_but_two_are_kept(
    tmp_path: Path, name: str, used: float, is_late: bool
) -> None:
    plan, screen = Plan.create(tmp_path / "run", RunRequest("digits", time=1000.0, random=4)), Silent()
    plan.seconds = used
    run = _Run(plan, screen)  # type: ignore[arg-type]
    assert run._is_too_late({"name": name, "expected": 80.0}) is is_late
    assert len(screen.lines) == is_late
    (plan.folder / name).mkdir()
    (plan.folder / name / "run.json").write_text("{}")
    assert not run._is_too_late({"name": name, "expected": 80.0})  # a started training is finished


def row(name: str, accuracy: float) -> Row:
    return Row(name, f"runs/x/{name}", accuracy, 1000, 1000, 1.0, 5, 1.0)


def made(found: float, random: tuple[float, ...], plain: float, count: int = 10_000) -> Summary:
    others = tuple(row(f"random-{i}", each) for i, each in enumerate(random))
    return Summary(row("train", found), others, row("plain", plain), count, 0.1)


def test_a_search_was_worth_it_only_beyond_chance() -> None:
    clear, few = made(0.9, (0.8, 0.81), 0.85), made(0.9, (0.8, 0.81), 0.85, count=30)
    assert verdict(clear)[0] and not verdict(few)[0]
    assert "not worth it" in verdict(few)[1][-1]
    assert not verdict(made(0.9, (0.7, 0.95), 0.9))[0]  # within their spread
    worth, lines = verdict(made(0.9, (0.8, 0.81), 0.95))
    assert not worth and "runs/x/plain is better" in lines[-1]
    worth, lines = verdict(made(0.8, (0.9, 0.91), 0.8))
    assert not worth and "runs/x/random-1" in lines[-1]


def test_the_verdict_says_that_a_network_learned_nothing() -> None:
    guessing = dataclasses.replace(made(0.5, (0.5, 0.5), 0.5), most_frequent=0.5)
    assert "nothing useful" in verdict(guessing)[1][-1]


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "random-1/x", None])
def test_trainings_of_a_plan_stay_inside_its_folder(name: str | None, tmp_path: Path) -> None:
    plan = Plan.create(tmp_path / "run", RunRequest(data="digits"))
    plan.training = {"epochs": 1, "jobs": [{"name": name}]}
    plan.save()
    with pytest.raises(UserError, match="random-N"):
        Plan.open(tmp_path / "run")


def test_a_foreign_plan_runs_no_plugin_without_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOFTCELL_STATE", str(tmp_path / "state"))
    (tmp_path / "evil_plan.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    request = RunRequest(data="digits", device="cpu")
    plan = Plan.create(tmp_path / "run", request)
    inspection = inspect_dataset(load("digits"))
    choice = choose(inspection, request, is_gpu=False, is_resizable=False)
    plan.inspection, plan.choice, plan.data = inspection.to_dict(), choice.to_dict(), "digits"
    recipe = {**search_recipe(plan, choice, 1).to_dict(), "plugins": [str(tmp_path / "evil_plan.py")]}
    plan.search = {"recipe": recipe, "expected": 1.0}
    plan.save()
    assert softcell(["run", "--resume", str(tmp_path / "run"), "-q"]) == 2
    assert "evil_plan.py" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists() and Plan.open(tmp_path / "run").status == "failed"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["plan.json"]
