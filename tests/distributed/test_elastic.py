"""Runs with a process that is killed, hangs or fails, and runs restarted by torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import softcell
from softcell.app.cli.main import run
from softcell.engine import distributed
from softcell.engine.checkpoint import load_latest
from tests.helpers.cli_calls import CELL, TINY, TINY_TRAIN
from tests.helpers.engine_launch import free_port
from tests.helpers.engine_toy import same, untimed
from tests.helpers.process_groups import ProcessGroups
from tests.helpers.search_forks import Ended, forks

PATIENCE = 2.0
LONG_PATIENCE = 6.0  # long against the delays of a busy machine, for ranks that must not count as lost


def ranks(tmp_path: Path, what: str, victim: int, size: int = 2, patience: float = PATIENCE) -> list[Ended]:
    """How the ranks ended; the victim is ended last, as it may be stopped."""
    jobs = forks().start_ranks(size, tmp_path, "run_watched", lambda rank: (what, victim, patience))
    ended = {rank: job.wait() for rank, job in enumerate(jobs) if rank != victim}
    if what in ("stopped", "starved"):
        jobs[victim].signal(signal.SIGKILL)
    return [ended.get(rank) or jobs[rank].wait() for rank in range(size)]


@pytest.mark.parametrize(
    ("what", "victim", "expected"),
    [
        ("killed", 0, "was killed or crashed."),  # rank 0 hosts the store
        ("killed", 1, "was killed or crashed."),
        ("fails", 0, "failed: the disk is full."),
        ("fails", 1, "failed: the disk is full."),
        pytest.param("stopped", 0, "has not responded", marks=pytest.mark.exhaustive),
        ("stopped", 1, "has not responded"),
        ("starved", 1, "has not responded"),
        ("ending", 0, "was killed or crashed."),
    ],
)
def test_a_lost_rank_ends_the_others_with_its_name(tmp_path: Path, what: str, victim: int, expected: str) -> None:
    began = time.monotonic()
    ended = ranks(tmp_path, what, victim)
    survivor = ended[1 - victim]
    assert survivor.code == 2, survivor.output
    (line,) = [line for line in survivor.output.splitlines() if line.startswith("error:")]
    assert f"rank {victim} of 2 (process " in line and expected in line and "--resume" in line
    assert time.monotonic() - began < 60


def test_only_one_rank_prints_the_message(tmp_path: Path) -> None:
    ended = ranks(tmp_path, "killed", 2, size=3)
    assert [one.code for one in ended[:2]] == [2, 2]
    said = sorted(one.output.split()[-1] for one in ended[:2])
    assert said == ["first", "reported"]


@pytest.mark.parametrize(("what", "which"), [("waits", 1), ("leaves", 0), ("leaves", 1)])
def test_a_rank_that_takes_its_time_or_ends_before_the_others_is_not_lost(
    tmp_path: Path, what: str, which: int
) -> None:
    assert [one.code for one in ranks(tmp_path, what, which, patience=LONG_PATIENCE)] == [0, 0]


@pytest.mark.exhaustive
def test_a_suspended_machine_is_not_a_lost_rank(tmp_path: Path) -> None:
    """A scheduler may stop all processes of a run and continue them later."""
    jobs = forks().start_ranks(2, tmp_path, "run_watched", lambda rank: ("waits", 1, LONG_PATIENCE))
    time.sleep(0.5)
    for job in jobs:
        job.signal(signal.SIGSTOP)
    time.sleep(1.5 * LONG_PATIENCE)
    for job in jobs:
        job.signal(signal.SIGCONT)
    assert [job.wait().code for job in jobs] == [0, 0]


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """Starts commands in this process as torchrun's attempts 0, 1, ... do, with the store of its agent."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCHELASTIC_MAX_RESTARTS", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", str(store.port)),
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
    ):
        monkeypatch.setenv(name, value)

    def call(number: int, *words: str | Path) -> int:
        assert store is not None  # lives as long as the attempts
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        return run([str(word) for word in words])

    return call


def test_a_restarted_search_continues_its_run_and_starts_no_other(attempt, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    command = ("search", *TINY, "--epochs", "1")
    assert distributed.restarted_folder() is None
    assert attempt(0, *command) == 0
    assert attempt(1, *command) == 0
    assert "already finished" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["darts-nb201-digits-1"]


def test_a_restarted_training_does_not_overwrite_its_run(attempt, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    command = ("train", CELL, *TINY_TRAIN, "--out", "out", "--overwrite")
    assert attempt(0, *command) == 0
    began = json.loads((tmp_path / "out" / "run.json").read_text())["created"]
    assert attempt(1, *command) == 0
    assert "already finished" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "run.json").read_text())["created"] == began


def test_a_restart_never_continues_the_run_of_another_launch(attempt, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    command = ("search", *TINY, "--epochs", "1", "--out", "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    for number in (0, 1):
        assert attempt(number, *command) == 2
        assert "needs an empty folder" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.parametrize("rendezvous", [["--standalone"], ["--master-port", "PORT"]])
def test_torchrun_restarts_a_killed_rank_and_the_result_is_bit_for_bit_the_same(
    tmp_path: Path, process_groups: ProcessGroups, rendezvous: list[str]
) -> None:
    def start(out: str, restarts: int) -> subprocess.Popen[str]:
        port = [str(free_port()) if word == "PORT" else word for word in rendezvous]
        launcher = ["-m", "torch.distributed.run", *port, "--nproc-per-node=2", "--max-restarts", str(restarts)]
        command = ["-m", "softcell", "search", *TINY, "--batch-size", "128", "--epochs", "4", "--out", out]
        return process_groups.start(
            [sys.executable, *launcher, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(softcell.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        )

    whole = start("whole", 0)
    output, error = whole.communicate(timeout=300)
    assert whole.returncode == 0, output + error
    broken = start("broken", 1)
    until = time.monotonic() + 120
    while not (tmp_path / "broken" / "checkpoint.bin").exists() and time.monotonic() < until:
        time.sleep(0.02)
    # The second child of torchrun's agent is rank 1.
    children = Path(f"/proc/{broken.pid}/task/{broken.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    output = "".join(broken.communicate(timeout=300))
    assert broken.returncode == 0, output
    assert "was killed or crashed. torchrun restarts all processes" in output and "resuming at epoch" in output
    states = [load_latest(tmp_path / name) for name in ("whole", "broken")]
    assert states[0] is not None and states[1] is not None
    assert same(states[0].state["task"], states[1].state["task"])
    rows = [[json.loads(line) for line in (tmp_path / n / "metrics.jsonl").open()] for n in ("whole", "broken")]
    assert untimed(rows[0]) == untimed(rows[1])
