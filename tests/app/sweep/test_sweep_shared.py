"""Jobs of a sweep that share a GPU's process: which ones do, that each run equals its solo run, and failures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from softcell.app.sweep import Job, jobs_of, read_plan, run_sweep
from softcell.app.sweep._shared import SharedProcess, _steps_of, trains_shared
from softcell.app.sweep.local import Local, last_error
from softcell.app.sweep.plan import ERROR, LOG
from softcell.engine.interleave import drain
from tests.helpers.sweep_plans import TINY, plan, pretend


def rows_of(run: Path, name: str) -> list[dict[str, Any]]:
    """Lines of a run's file, without what is measured."""
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in (run / name).open()]


def test_jobs_on_one_gpu_share_a_process_and_each_run_equals_its_solo_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is simulated: the runs find none and use the CPU, still interleaved."""
    from softcell.api import search, train
    from softcell.app.baseline import draw_random, random_baseline
    from softcell.recipes import search_recipe, train_recipe

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    search_settings = {**TINY, "epochs": 2, "drop_path": 0.2}
    only, trained = {"gdas": {"epochs": 1}}, {"epochs": 1, "threads": 1, "space": TINY["space"]}
    parts = {"search": search_settings, "only": only, "train": trained, "random": 1}
    every = jobs_of(read_plan(plan(tmp_path, methods=["darts", "gdas"], seeds=[4], **parts)), tmp_path / "out")
    outcome = run_sweep(every, Local(2), retries=0, poll=0.02)
    monkeypatch.undo()
    assert {job.name for job in outcome.finished} == {job.name for job in every}, outcome.failed
    for job in every:
        commands_run = [line for line in (job.folder / LOG).read_text().splitlines() if line.startswith("$")]
        assert len(commands_run) == len(job.runs()) and all("in one process with other jobs" in c for c in commands_run)
        alone = tmp_path / "alone" / job.name
        search(recipe=search_recipe(job.search), out=alone)
        for name in ("metrics.jsonl", "architecture.jsonl"):
            assert rows_of(alone, name) == rows_of(job.folder / "search", name), (job.name, name)
        assert (alone / "genotype.json").read_text() == (job.folder / "search" / "genotype.json").read_text()
        assert (job.folder / "search" / "report.html").exists()
        found, recipe = train_recipe(alone, job.train or {})
        train(found, recipe=recipe, out=alone / "train")
        if job.random:
            random_baseline(draw_random(found, recipe, job.random), recipe, alone / "train")
        for run in job.runs()[1:]:
            other = alone / run.relative_to(job.folder)
            assert rows_of(other, "metrics.jsonl") == rows_of(run, "metrics.jsonl"), run
            assert (other / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes(), run
        assert "random-1" in (job.folder / "train" / "report.html").read_text() or not job.random
    first, lost = every[0].folder, every[0].runs()[-1]
    before, kept = rows_of(lost, "metrics.jsonl"), (first / "train" / "run.json").read_bytes()
    shutil.rmtree(lost)
    assert drain(_steps_of(first, 1, True)) == 0
    assert rows_of(lost, "metrics.jsonl") == before
    assert (first / "train" / "run.json").read_bytes() == kept, "what is finished is not repeated"


def test_which_training_runs_share_a_process_with_other_jobs(tmp_path: Path) -> None:
    def shares(train: dict[str, Any] | None, **search: Any) -> bool:
        return trains_shared(Job(tmp_path, search, train, 0))

    assert shares({}) and shares({"device": "cuda"}) and shares({"threads": 1}, threads=1)
    assert shares({}, plugins=["mine.py"])  # those of its search
    assert not shares(None)
    assert not shares({"time": 60.0})  # it would make fewer steps than alone
    assert not shares({"device": "cpu"}) and not shares({}, threads=1) and not shares({"deterministic": True})


def test_a_search_that_fails_in_a_shared_process_is_retried_in_a_separate_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    every = jobs_of(read_plan(plan(tmp_path, seeds=2)), tmp_path / "out")
    submitted: list[tuple[str, str]] = []
    monkeypatch.setattr("softcell.app.sweep.local._Shared", lambda process, job, alone: pretended(job, "shared", 2))
    monkeypatch.setattr("softcell.app.sweep.local._Thread", lambda work: pretended(work, "alone", 0))

    def pretended(what: Any, how: str, code: int) -> Any:
        folder = what.folder if isinstance(what, Job) else what._folder
        submitted.append((folder.name, how))
        if code == 0:
            pretend(folder / "search")
        return SimpleNamespace(done=lambda: True, result=lambda: code, stop=lambda: None)

    outcome = run_sweep(every, Local(2), retries=1, poll=0)
    assert len(outcome.finished) == 2
    first, second = (job.name for job in every)
    assert submitted == [(first, "shared"), (second, "shared"), (first, "alone"), (second, "alone")]


def test_only_searches_that_fit_together_share_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    def sharing(at_once: int, **settings: Any) -> bool:
        return launchers[at_once]._sharing(Job(tmp_path / str(len(names)), settings, None, 0), 0) is not None

    launchers, names = {2: Local(2), 4: Local(4)}, list[int]()
    assert not sharing(2)  # a GPU for each
    launchers[4]._tried.clear()
    assert sharing(4, threads=1)
    for settings in ({"threads": 2}, {"device": "cpu", "threads": 1}, {"deterministic": True, "threads": 1}):
        launchers[4]._tried.clear()
        assert not sharing(4, **settings)
    assert not sharing(4, threads=1)  # the same job again: it failed before
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    launchers[4]._tried.clear()
    assert not sharing(4, threads=1)  # on a CPU separate processes are faster


def test_a_shared_process_reports_failures_and_saves_on_a_signal(tmp_path: Path) -> None:
    process = SharedProcess({"PYTHONPATH": os.pathsep.join(sys.path)}, tmp_path / "log")
    deadline = time.monotonic() + 120

    def wait(condition: Callable[[], object]) -> None:
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert condition(), (tmp_path / "log").read_text()

    (tmp_path / "wrong").mkdir()
    process.submit(Job(tmp_path / "wrong", {}, None, 0))  # its settings are missing
    (tmp_path / "full" / ERROR).mkdir(parents=True)  # its error cannot be written, which must not end the process
    process.submit(Job(tmp_path / "full", {}, None, 0))
    wait(lambda: process.code_of(tmp_path / "full") == 2)
    (job,) = jobs_of(read_plan(plan(tmp_path, search={**TINY, "epochs": 4000})), tmp_path / "out")
    job.write()
    process.submit(job)
    wait(lambda: process.code_of(tmp_path / "wrong") is not None)
    assert process.code_of(tmp_path / "wrong") == 2 and "search.json" in last_error(tmp_path / "wrong", 2)
    wait((job.folder / "search" / "metrics.jsonl").exists)
    process.stop(now=False)
    wait(lambda: process.code_of(job.folder) is not None)
    assert process.code_of(job.folder) == 143
    assert json.loads((job.folder / "search" / "run.json").read_text())["status"] == "interrupted"
    process.close()
    assert process.code_of(tmp_path / "other") == 1  # the process is gone, so nothing runs in it
    assert (tmp_path / "log").read_text() == ""


def test_a_shared_process_that_dies_before_it_reads_a_job_fails_that_job(tmp_path: Path) -> None:
    process = SharedProcess({}, tmp_path / "log")
    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE) as child:
        child.wait()
        polls = iter([None])  # it was alive when it was asked
        process._process = SimpleNamespace(  # type: ignore[assignment]
            poll=lambda: next(polls, child.returncode), wait=child.wait, stdin=child.stdin, returncode=child.returncode
        )
        process.submit(Job(tmp_path / "job", {}, None, 0))
        assert process.code_of(tmp_path / "job") == 1
        process.close()


def test_jobs_of_a_shared_process_that_is_killed_have_the_code_of_the_signal(tmp_path: Path) -> None:
    process = SharedProcess({}, tmp_path / "log")
    for code, expected in ((-9, 137), (0, 1), (3, 3)):
        process._process = SimpleNamespace(poll=lambda code=code: code, returncode=code)  # type: ignore[assignment]
        assert process.code_of(tmp_path / "job") == expected
    process._codes[str(tmp_path / "job")] = 0
    assert process.code_of(tmp_path / "job") == 0, "the job had ended before"
