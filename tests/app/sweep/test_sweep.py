"""Sweeps: the meaning of a file, and which jobs are run, retried, skipped and reported."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import softcell
from softcell.app.cli import report
from softcell.app.cli.main import run as run_command
from softcell.app.process import write_error
from softcell.app.sweep import Job, Outcome, Plan, jobs_of, launch, read_plan, run_sweep
from softcell.app.sweep.launch import Queue, Ray, _Submitted, has_accounting, make_launcher
from softcell.app.sweep.local import Local, commands, last_error
from softcell.app.sweep.plan import ERROR
from softcell.arch import Genotype, sample
from softcell.engine.lock import LOCK, announce
from softcell.errors import UserError
from softcell.spaces import build_space
from softcell.spaces.costs import count_genotype
from tests.helpers.engine_launch import free_port
from tests.helpers.sweep_plans import TINY, plan, pretend


def test_a_file_becomes_methods_times_spaces_times_seeds(tmp_path: Path) -> None:
    file = plan(tmp_path, methods=["darts", "snas"], seeds=[4, 7], only={"snas": {"epochs": 9}}, train=True, random=2)
    jobs = jobs_of(read_plan(file), tmp_path / "out")
    assert [job.name for job in jobs] == [
        "darts-nb201-seed4", "snas-nb201-seed4", "darts-nb201-seed7", "snas-nb201-seed7",
    ]  # fmt: skip
    assert [job.search["epochs"] for job in jobs] == [1, 9, 1, 9]
    assert [job.search["seed"] for job in jobs] == [4, 4, 7, 7]
    assert [job.random for job in jobs] == [2, 0, 2, 0]  # the same random ones serve all methods
    assert jobs[0].search["space_settings"] == {"channels": 2, "cells_per_stage": 1}
    assert jobs[0].train == {"data": "digits", "device": "auto", "seed": 4}
    assert [run.name for run in jobs[0].runs()] == ["search", "train", "random-1", "random-2"]
    assert Plan(("darts",), seeds=3).all_seeds == (0, 1, 2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"methods": ["dart"]}, "did you mean 'darts'"),
        ({"spaces": ["nb2"]}, "no space 'nb2'"),
        ({"methods": []}, "at least one"),
        ({"seeds": [1, 1]}, "duplicate entry 1 in `seeds`"),
        ({"seeds": 0}, "at least 1, but got 0"),
        ({"seeds": -2}, "at least 1, but got -2"),
        ({"seeds": [-1]}, r"`0 <= seed < 2\*\*63` must hold, but got seed=-1"),
        ({"seeds": [2**63]}, "but got seed=9223372036854775808"),
        ({"seeds": 20261116}, r"must be at most 10,000, but got 20261116; write \[20261116\]"),
        ({"random": -1, "train": True}, "`random` must not be negative"),
        ({"search": {"method": "snas"}}, r"sweep\.search: `method` .* `methods: \[snas\]` at the top"),
        ({"search": {"space": "nos"}}, r"sweep\.search: `space` .* `spaces: \[nos\]` at the top"),
        ({"search": {"seed": 4}}, r"sweep\.search: `seed` .* `seeds: \[4\]` at the top"),
        ({"train": {"seed": 0}}, r"sweep\.train: `seed` .* `seeds: \[0\]` at the top"),
        ({"only": {"darts": {"space": "darts"}}}, r"sweep\.only\.darts: `space` .* `spaces: \[darts\]`"),
        (
            {"plugins": ["a.py"], "search": {"plugins": ["b.py"]}},
            r"sweep\.search: `plugins` is already given at the top",
        ),
        ({"method": ["darts"]}, "did you mean 'methods'"),
        ({"search": {"epoch": 3}}, "did you mean 'epochs'"),
        ({"train": {"lr": "fast"}}, "must be a number"),
        ({"only": {"snas": {}}}, "not a method or space"),
        ({"only": {"darts": 3}}, "must be a mapping"),
        ({"random": 2}, "requires `train`"),
    ],
)
def test_a_wrong_file_is_rejected_before_anything_runs(tmp_path: Path, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        jobs_of(read_plan(plan(tmp_path, **settings)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_settings_of_a_method_or_space_are_given_under_its_name(tmp_path: Path) -> None:
    search = {**TINY, "method": {}, "space": {"channels": 4}}
    file = plan(tmp_path, search=search, only={"nb201": {"space": {"channels": 6}}})
    (job,) = jobs_of(read_plan(file), tmp_path / "out")
    assert (job.search["method"], job.search["space"], job.search["seed"]) == ("darts", "nb201", 0)
    assert job.search["space_settings"]["channels"] == 6


@pytest.mark.exhaustive
def test_random_architectures_of_a_sweep_meet_its_budget(tmp_path: Path) -> None:
    """Without it the first one is half as large again."""
    network = {"cells_per_stage": 1, "channels": 4}
    search = {**TINY, "resource": {"max_params": 5000, "network": network}, "method": {"samples": 1}}
    file = plan(tmp_path, methods=["random"], search=search, train={"epochs": 1, "batch_size": 256}, random=2)
    (job,) = jobs_of(read_plan(file), tmp_path / "out")
    outcome = run_sweep([job], Local(1), retries=0, poll=0.02)
    assert [one.name for one in outcome.finished] == [job.name], outcome.failed
    found = [json.loads((run / "run.json").read_text())["results"] for run in job.runs()]
    assert found[0]["budget_met"] is True
    space = build_space("nb201", network)
    for run in job.runs():
        assert count_genotype(space, Genotype.load(run), (1, 8, 8), 10).parameters <= 5000
    free = sample(space.layout(), 1)
    assert count_genotype(space, free, (1, 8, 8), 10).parameters > 7500


def test_no_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_plan(tmp_path / "nothing.yaml")
    with pytest.raises(UserError, match=r"sweep\.yaml"):
        read_plan(tmp_path)


class Fake:
    """A launcher that ends jobs at once; `script` says how often each fails first."""

    at_once: int | None = None

    def __init__(self, script: dict[str, int] | None = None, after: Callable[[], None] = lambda: None) -> None:
        self.script, self.submitted, self.after = dict(script or {}), [], after
        self.open, self.most = 0, 0

    submitted: list[str]

    def close(self) -> None:
        self.is_closed = True

    def submit(self, job: Job) -> Any:
        self.submitted.append(job.name)
        self.open += 1
        self.most = max(self.most, self.open)

        def result() -> int:
            self.open -= 1
            self.after()
            if self.script.get(job.name, 0) > 0:
                self.script[job.name] -= 1
                write_error(job.folder / ERROR, "it broke")
                return 2
            for run in job.runs():
                pretend(run)
            return 0

        return SimpleNamespace(done=lambda: True, result=result, stop=lambda: None)


def jobs(tmp_path: Path, count: int = 3) -> list[Job]:
    return [Job(tmp_path / f"job{k}", {}, None, 0) for k in range(count)]


def test_failed_jobs_are_retried_and_listed_with_their_last_error(tmp_path: Path) -> None:
    fake, notified = Fake({"job0": 1, "job1": 9}), []
    outcome = run_sweep(
        jobs(tmp_path), fake, retries=2, poll=0, notify=lambda *what: notified.append((what[0], what[1].name))
    )
    assert fake.submitted.count("job0") == 2
    assert fake.submitted.count("job1") == 3
    assert {job.name for job in outcome.finished} == {"job0", "job2"}
    (job, attempts, error) = outcome.failed["job1"]
    assert (job.name, attempts, error) == ("job1", 3, "it broke")
    assert notified.count(("retry", "job1")) == 2 and ("failed", "job1") in notified


def test_finished_jobs_are_never_repeated(tmp_path: Path) -> None:
    every = jobs(tmp_path)
    pretend(every[1].folder / "search")
    fake = Fake()
    outcome = run_sweep(every, fake, poll=0)
    assert fake.submitted == ["job0", "job2"]
    assert outcome.earlier == [every[1]]
    again = Fake()
    assert run_sweep(every, again, poll=0).finished == [] and again.submitted == []


def test_the_number_of_concurrent_jobs_is_limited(tmp_path: Path) -> None:
    for limit in (1, 2):
        fake = Fake()
        run_sweep(jobs(tmp_path / str(limit), 5), fake, at_once=limit, poll=0)
        assert fake.most == limit
    free = Fake()
    run_sweep(jobs(tmp_path / "free", 5), free, poll=0)
    assert free.most == 5


def test_a_process_that_claims_success_without_a_run_has_failed(tmp_path: Path) -> None:
    class Liar(Fake):
        def submit(self, job: Job) -> Any:
            return SimpleNamespace(done=lambda: True, result=lambda: 0, stop=lambda: None)

    outcome = run_sweep(jobs(tmp_path, 1), Liar(), retries=0, poll=0)
    assert "without finishing" in outcome.failed["job0"][2]


def test_a_rejected_submission_ends_the_sweep_or_counts_as_a_failed_attempt(tmp_path: Path) -> None:
    class Rejecting(Fake):
        def submit(self, job: Job) -> Any:
            if job.name in ("job0", "job2"):
                self.submitted.append(job.name)
                raise UserError("no partition 'gpus'")
            return super().submit(job)

    first, *rest = jobs(tmp_path)
    with pytest.raises(UserError, match="no partition 'gpus'"):
        run_sweep([first, *rest], Rejecting(), poll=0, pause=0)
    later = Rejecting()
    outcome = run_sweep([*rest, first], later, retries=1, poll=0, pause=0)
    assert outcome.finished == [rest[0]]
    # The first attempt of job2 does not count, since job1 was running.
    assert later.submitted == ["job1", "job2", "job2", "job0", "job2", "job0"]
    assert {name: found[1:] for name, found in outcome.failed.items()} == dict.fromkeys(
        ("job0", "job2"), (2, "no partition 'gpus'")
    )


def test_jobs_beyond_a_limit_of_submissions_wait_for_a_free_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs at a time are accepted; each runs for 60 s, and its place is free 5 s after its end."""
    clock, rejected, ends = SimpleNamespace(now=0.0), list[float](), list[float]()

    class Limited(Fake):
        def submit(self, job: Job) -> Any:
            if sum(clock.now < end + 5 for end in ends) >= 2:
                rejected.append(clock.now)
                raise UserError("QOSMaxSubmitJobPerUserLimit")
            ends.append(end := clock.now + 60)
            handle = super().submit(job)
            return SimpleNamespace(done=lambda: clock.now >= end, result=handle.result, stop=handle.stop)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    said: list[tuple[str, str, str]] = []
    every = jobs(tmp_path, 5)
    outcome = run_sweep(
        every, Limited(), retries=0, notify=lambda *about: said.append((about[0], about[1].name, about[2]))
    )
    assert outcome.finished == every and not outcome.failed
    assert len(ends) == 5 and clock.now < 3 * 60 + 2 * 12
    assert len(rejected) < 25  # it asks a few times per minute, and at once when a job has ended
    waits = [about for about in said if about[0] == "wait"]
    assert waits == [("wait", f"job{k}", "QOSMaxSubmitJobPerUserLimit") for k in (2, 4)], "one notice for each"


def test_ctrl_c_stops_running_jobs_and_leaves_the_rest_open(tmp_path: Path) -> None:
    stopped = []

    class Slow(Fake):
        def submit(self, job: Job) -> Any:
            def done() -> bool:
                if not stopped:
                    raise KeyboardInterrupt
                return True

            return SimpleNamespace(done=done, result=lambda: 130, stop=lambda: stopped.append(job.name))

    outcome = run_sweep(jobs(tmp_path), Slow(), at_once=2, poll=0)
    assert stopped == ["job0", "job1"]
    assert outcome.interrupted and [job.name for job in outcome.open] == ["job0", "job1", "job2"]


def test_commands_resume_a_started_run(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text("{}")
    search, train = str(tmp_path / "search"), str(tmp_path / "train")
    assert [words[:3] for words in commands(tmp_path, 1)] == [
        ["search", "--config", f"{search}.json"],
        ["train", search, "--config"],
    ]
    pretend(tmp_path / "search", "interrupted")
    assert commands(tmp_path, 1)[0][:3] == ["search", "--resume", search]
    pretend(tmp_path / "search")
    pretend(tmp_path / "train", "failed")
    assert commands(tmp_path, 1) == [["train", "--resume", train, "--random", "1", "--quiet"]]
    pretend(tmp_path / "train")
    assert len(commands(tmp_path, 1)) == 1  # the random one is missing still
    pretend(tmp_path / "train" / "random-1")
    assert commands(tmp_path, 1) == []


def test_settings_that_differ_from_a_run_are_rejected(tmp_path: Path) -> None:
    from softcell.recipes import search_recipe

    file = plan(tmp_path)
    (job,) = jobs_of(read_plan(file), tmp_path / "out")
    pretend(job.folder / "search", recipe=search_recipe({**job.search, "device": "cuda:3"}).to_dict())
    jobs_of(read_plan(file), tmp_path / "out")  # where it ran is no other setting
    changed = plan(tmp_path, search={**TINY, "epochs": 7})
    with pytest.raises(UserError, match="epochs: 1 -> 7"):
        jobs_of(read_plan(changed), tmp_path / "out")
    defaults = plan(tmp_path, search={key: value for key, value in TINY.items() if key != "epochs"})
    with pytest.raises(UserError, match="epochs: 1 ->"):  # a setting that was taken out
        jobs_of(read_plan(defaults), tmp_path / "out")


def test_a_job_is_never_run_twice_at_a_time(tmp_path: Path) -> None:
    import fcntl

    job = Job(tmp_path / "job", TINY, None, 0)
    job.write()
    with open(job.folder / LOCK, "a+b") as held:  # as a process does that outlived its sweep
        fcntl.flock(held, fcntl.LOCK_EX)
        announce(held.fileno(), 4711)
        outcome = run_sweep([job], Local(1), retries=0, poll=0.01)
    assert "in use by process 4711 on" in outcome.failed["job"][2]
    assert not (job.folder / "search").exists()


def test_a_job_gives_its_error_as_data(tmp_path: Path) -> None:
    """The last line of a log may be of any library; the error is what the command raised."""
    job = Job(tmp_path / "job", {**TINY, "method": "darts", "space": "nb201", "epochs": -3}, None, 0)
    outcome = run_sweep([job], Local(1), retries=0, poll=0.02)
    stored = json.loads((job.folder / ERROR).read_text())["error"]
    assert "epochs" in stored and "-3" in stored and outcome.failed["job"][2] == stored


def test_an_error_of_an_earlier_attempt_is_not_shown(tmp_path: Path) -> None:
    class Crashing(Fake):
        def submit(self, job: Job) -> Any:
            assert not (job.folder / ERROR).exists()
            return SimpleNamespace(done=lambda: True, result=lambda: 139, stop=lambda: None)

    (job,) = jobs(tmp_path, 1)
    job.write()
    write_error(job.folder / ERROR, "an old error")
    outcome = run_sweep([job], Crashing(), retries=0, poll=0)
    assert outcome.failed["job0"][2] == "ended with exit code 139 and without an error message"


def test_jobs_on_this_machine_share_its_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert Local(1)._environment(0) == {}
    assert [Local(3)._environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["3", "5", "3"]
    assert int(Local(3)._environment(0)["OMP_NUM_THREADS"]) >= 1


class Slurm:
    """What submitit and Slurm give a sweep; `queued` are the jobs in the queue."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued, self.calls, self._folder = {"7"}, list[str](), tmp_path
        self.works = True
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, words: list[str], **_: Any) -> Any:
        self.calls.append(words[0])
        if words[0] == "sacct":
            return SimpleNamespace(returncode=1, stdout=b"")
        return SimpleNamespace(returncode=0 if self.works else 1, stdout="\n".join(self.queued).encode())

    def job(self, queue: Any) -> Any:
        def unexpected() -> Any:
            raise AssertionError("submitit would call sacct")

        paths = SimpleNamespace(result_pickle=self._folder / "result.pkl")
        return _Submitted(SimpleNamespace(job_id="7", paths=paths, done=unexpected, exception=unexpected), queue)


def test_without_accounting_a_job_that_left_the_queue_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = Slurm(tmp_path, monkeypatch)
    assert not has_accounting()
    job = slurm.job(Queue(interval=0.0))
    assert not job.done()
    slurm.works, slurm.queued = False, set()  # the controller does not answer: nothing is known
    assert not job.done()
    slurm.works = True
    assert job.done() and job.result() == 1  # cancelled, or lost with its node
    assert slurm.calls == ["sacct", "squeue", "squeue", "squeue"]


def test_the_queue_is_queried_every_few_seconds_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(tmp_path, monkeypatch)
    queue = Queue(interval=1000.0)
    first = slurm.job(queue)
    assert not any(first.done() for _ in range(20)) and slurm.calls == ["squeue"]
    slurm.queued = set()
    late = slurm.job(queue)  # submitted after the queue was read
    assert not late.done() and slurm.calls == ["squeue"]


def test_launchers_that_are_missing_or_cannot_start_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"softcell\[slurm\]"):
        make_launcher("slurm", tmp_path, None, {})
    with pytest.raises(UserError, match=r"softcell\[ray\]"):
        make_launcher("ray", tmp_path, None, {})
    with pytest.raises(UserError, match="--cluster requires"):
        make_launcher("local", tmp_path, None, {"num_gpus": 1})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--on", "nothing"), "Invalid value for '--on': 'nothing' is not one of 'local', 'slurm', 'ray'"),
        (("--on", "slurm", "--cluster", "partition"), "--cluster takes key=value (for example timeout_min=60)"),
        (("--cluster", "num_gpus=1"), "--cluster requires --on slurm or ray"),
    ],
)
def test_wrong_options_are_rejected(
    tmp_path: Path, options: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["sweep", str(plan(tmp_path)), "--out", str(tmp_path / "out"), *options]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for out, reason in (
        ("file", "a sweep needs a folder, but {} is a file; choose another --out"),
        (
            "file/deep",
            "a sweep needs a writable folder, but {} cannot be created (Not a directory); choose another --out",
        ),
    ):
        assert run_command(["sweep", str(plan(tmp_path)), "--out", str(tmp_path / out)]) == 2
        assert reason.format(tmp_path / out) in capsys.readouterr().err


def test_torchrun_may_not_start_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_command(["sweep", str(plan(tmp_path)), "--out", str(tmp_path / "out")]) == 2
    assert "run it without torchrun" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_command_that_resumes_a_sweep_names_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("softcell.app.cli.report.make_launcher", lambda *given: Fake(after=interrupt))
    options = ["--on", "slurm", "--cluster", "slurm_partition=gpu", "--cluster", "timeout_min=60"]
    assert run_command(["sweep", str(plan(tmp_path)), "--out", str(tmp_path / "out"), *options]) == 130
    assert f"softcell sweep {tmp_path / 'out'} {' '.join(options)}\n" in capsys.readouterr().out


def test_ray_gets_the_job_and_its_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class RayError(Exception):
        pass

    def remote(*functions: Any, **resources: Any) -> Any:
        seen.append(resources)
        wrap = lambda function: SimpleNamespace(remote=lambda *a: (function.__name__, *a))  # noqa: E731
        return wrap(functions[0]) if functions else wrap

    def get(reference: Any) -> int:
        if "job1" in reference[1]:
            raise RayError
        return 0

    fake = SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda **k: seen.append(k),
        remote=remote,
        wait=lambda references, timeout: (references, []),
        get=get,
        cancel=lambda reference, force: seen.append(force),
        exceptions=SimpleNamespace(RayError=RayError),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    launcher = Ray({"address": "auto", "num_gpus": 1})
    handles = [launcher.submit(job) for job in jobs(tmp_path, 2)]
    assert [handle.done() for handle in handles] == [True, True]
    assert [handle.result() for handle in handles] == [0, 1]  # a task that Ray lost has failed
    handles[0].stop()
    assert seen[0]["address"] == "auto" and seen[1]["num_gpus"] == 1 and seen[2] is False


def start(*words: str | Path, cwd: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(softcell.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "softcell", *map(str, words)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_sweep_is_interrupted_and_resumed(tmp_path: Path) -> None:
    """As a user runs it: one job was finished before, and Ctrl-C comes while the other searches."""
    from softcell.recipes import search_recipe

    file = plan(tmp_path, search={**TINY, "epochs": 4000}, methods=["random", "darts"])
    before, begins = jobs_of(read_plan(file), tmp_path / "runs" / "plan")
    pretend(before.folder / "search", recipe=search_recipe(before.search).to_dict())
    running = start("sweep", file, cwd=tmp_path)
    begun = begins.folder / "search" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not begun.exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    has_begun = begun.exists()
    running.send_signal(signal.SIGINT)  # in any case, or the sweep would run for ever
    out, error = running.communicate(timeout=120)
    assert has_begun, error
    assert (running.returncode, error) == (130, "")
    assert "1 job already finished" in out and "random-nb201-seed0 started" not in out
    assert "Interrupted; 1 of 2 jobs left. Resume with:\n  softcell sweep runs/plan" in out
    assert json.loads((begun.parent / "run.json").read_text())["status"] == "interrupted"
    assert commands(begins.folder, 0)[0][1] == "--resume"
    assert "random in the nb201 space" in (tmp_path / "runs" / "plan" / "report.html").read_text()


def test_the_command_that_resumes_a_sweep_repeats_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, given = plan(tmp_path), list[dict[str, Any]]()

    def launcher(on: str, out: Path, at_once: int | None, options: dict[str, Any], _: Any) -> None:
        given.append({"on": on, "out": out, "at_once": at_once, "options": options})

    def interrupted(every: list[Job], _: Any, **more: Any) -> Outcome:
        given[-1] |= {"retries": more["retries"], "jobs": every}
        return Outcome([], [], {}, every)

    monkeypatch.setattr(report, "make_launcher", launcher)
    monkeypatch.setattr(report, "run_sweep", interrupted)
    options = ["--on", "slurm", "--jobs", "2", "--retries", "0"]
    options += ["--cluster", "slurm_partition=gpu", "--cluster", "comment=two words"]
    assert run_command(["sweep", str(file), "--out", str(tmp_path / "out"), *options]) == 130
    again = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert again[0] == "softcell" and run_command(again[1:]) == 130
    assert given[0] == given[1] and given[0]["options"] == {"slurm_partition": "gpu", "comment": "two words"}
    assert run_command(["sweep", str(file), "--out", str(tmp_path / "plain")]) == 130
    assert capsys.readouterr().out.endswith(f"softcell sweep {tmp_path / 'plain'}\n")


def test_a_choice_made_by_the_run_is_not_a_changed_setting(tmp_path: Path) -> None:
    """A real run, because only those record what "auto" became."""
    from softcell.api import search
    from softcell.recipes import search_recipe

    file = plan(tmp_path)
    (job,) = jobs_of(read_plan(file), tmp_path / "out")
    assert search_recipe(job.search).precision == "auto"
    search(recipe=search_recipe(job.search), out=job.folder / "search")
    assert json.loads((job.folder / "search" / "run.json").read_text())["recipe"]["precision"] == "float32"
    assert jobs_of(read_plan(file), tmp_path / "out") == [job]  # the same command again
    with pytest.raises(UserError, match="batch_size: 256 -> 128"):
        jobs_of(read_plan(plan(tmp_path, search={**TINY, "batch_size": 128})), tmp_path / "out")


def test_submitit_runs_jobs_and_returns_their_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed (the slurm extra)")
    done, lost = jobs(tmp_path, 2)
    done.write()
    pretend(done.folder / "search")
    launcher = make_launcher("slurm", tmp_path / "out", None, {"cluster": "local", "timeout_min": 5})
    handles = [launcher.submit(job) for job in (done, lost)]
    assert [handle.result() for handle in handles] == [0, 1]  # nothing left to do; no folder to work in
    assert all(handle.done() for handle in handles)
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpus' >&2\nexit 1\n")
    for program in ("srun", "sbatch"):
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    rejecting = make_launcher("slurm", tmp_path / "out", None, {"slurm_partition": "gpus"})
    with pytest.raises(UserError, match=r"Slurm did not accept the job job1: .*invalid partition specified: gpus"):
        rejecting.submit(lost)
    (tmp_path / "srun").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm
    for options in ({"cluster": "local", "no_such_option": 1}, {}):
        with pytest.raises(UserError, match="submitit cannot start"):
            make_launcher("slurm", tmp_path / "out", None, options)


def test_an_address_without_a_ray_cluster_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    port = free_port()
    for address in (f"127.0.0.1:{port}", f"ray://localhost:{port}", f"[::1]:{port}", "127.0.0.1:99999"):
        with pytest.raises(UserError, match=re.escape(f"no Ray cluster can be reached at {address}")):
            make_launcher("ray", tmp_path, None, {"address": address})
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(UserError, match="no Ray cluster"):
        make_launcher("ray", tmp_path, None, {})


def test_ray_runs_a_job_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray would write a new token into the home folder, which clusters started later would require.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = pytest.importorskip("ray", reason="Ray is not installed (the ray extra)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (job,) = jobs_of(read_plan(plan(tmp_path)), tmp_path / "out")
    launcher = make_launcher("ray", tmp_path / "out", None, {"num_cpus": 1})
    try:
        assert run_sweep([job], launcher, poll=0.05).finished == [job], last_error(job.folder, 1)
    finally:
        ray.shutdown()


def test_the_files_shown_in_the_documentation_work(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "sweep.md").read_text(encoding="utf-8")
    shown = page.split("```yaml\n")[1:]
    assert shown
    for number, text in enumerate(shown):
        (tmp_path / f"{number}.yaml").write_text(text.partition("```")[0], encoding="utf-8")
        assert len(jobs_of(read_plan(tmp_path / f"{number}.yaml"), tmp_path / "out")) == 9
