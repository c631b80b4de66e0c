"""Sweeps as processes, for tests against real schedulers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import softcell
from tests.helpers.slurm_cluster import until

SEARCH = {
    "data": "digits", "batch_size": 128, "threads": 1, "device": "cpu",
    "space": {"channels": 2, "cells_per_stage": 1}, "epochs": 40,
}  # fmt: skip
"""A search of some seconds; the time to start a process is longer."""


def environment() -> dict[str, str]:
    source = Path(softcell.__file__).parents[1]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PATH": path}


class Sweep:
    """Two methods with two seeds each, on a scheduler."""

    def __init__(self, folder: Path, given: Mapping[str, str], *options: str) -> None:
        self.out, self._folder, self._environment, self._options = (
            folder / "runs" / "plan",
            folder,
            dict(given),
            options,
        )
        plan = {"methods": ["darts", "gdas"], "spaces": ["nb201"], "seeds": 2, "search": SEARCH}
        (folder / "plan.yaml").write_text(json.dumps(plan))

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "softcell", "sweep", "plan.yaml", "--retries", "3", *self._options],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def begun(self, least_epochs: int = 1) -> list[str]:
        """Unfinished searches with at least this many epochs."""
        found = []
        for file in self.out.glob("*/search/metrics.jsonl"):
            status = json.loads((file.parent / "run.json").read_text())["status"]
            if status == "running" and len(file.read_text().splitlines()) >= least_epochs:
                found.append(file.parent.parent.name)
        return found

    def rows(self, job: str) -> list[dict[str, Any]]:
        lines = (self.out / job / "search" / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]

    def check_same_as_here(self, job: str) -> None:
        """The same search without interruption on this machine gives the same numbers."""
        settings = self.out / job / "search.json"
        words = ["search", "--config", str(settings), "--out", f"alone/{job}", "--quiet"]
        subprocess.run([sys.executable, "-m", "softcell", *words], cwd=self._folder, env=environment(), check=True)
        alone = (self._folder / "alone" / job / "metrics.jsonl").read_text().splitlines()
        assert self.rows(job) == [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in alone]


def search_processes(folder: Path) -> list[int]:
    """The processes of searches below `folder` on this machine."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"softcell" in words and b"search" in words and any(str(folder).encode() in word for word in words):
            found.append(int(entry.name))
    return found


def interrupted(sweep: Sweep, jobs_left: Callable[[], object]) -> str:
    """Starts a sweep, sends Ctrl-C in the middle of a search, and returns what it printed."""
    running = sweep.start()
    try:
        until(lambda: sweep.begun() or running.poll() is not None, "a search that has begun", 180)
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 130, output
    assert "Resume with:" in output
    # A scheduler lists a job until its process has exited, which is shortly after the job wrote its result.
    until(lambda: not jobs_left(), "the end of all jobs", 30)
    return output
