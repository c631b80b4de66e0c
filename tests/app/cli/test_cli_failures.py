"""Out of memory, too many threads and a lost process: one sentence each, never a library's traceback."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from pathlib import Path

import pytest
import torch

import softcell
from softcell.app.cli import train as train_command
from softcell.app.cli.main import explain_failure
from softcell.engine import session
from tests.helpers.cli_calls import CELL, TINY, TINY_TRAIN, Softcell
from tests.helpers.process_groups import ProcessGroups


def test_a_network_that_does_not_fit_into_memory(call: Softcell) -> None:
    answer = call("train", CELL, *TINY_TRAIN, "--channels", "1000000", "--out", "out")
    assert answer.code == 2
    (line,) = answer.error.splitlines()
    assert "not enough free memory" in line and "--batch-size" in line and "channels" in line


def test_gpu_out_of_memory(call: Softcell, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object, **named: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr(train_command, "run_train", fail)
    answer = call("train", CELL)
    assert answer.code == 2
    (line,) = answer.error.splitlines()
    assert "not enough free GPU memory" in line and "--batch-size" in line


def test_bugs_keep_their_traceback(call: Softcell, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object, **named: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(train_command, "run_train", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        call("train", CELL)
    assert explain_failure(ValueError("not enough memory")) is None


def test_threads_beyond_the_cores(call: Softcell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "usable_cores", lambda: 1)
    answer = call("search", *TINY, "--threads", "100000", "--epochs", "1", "--out", "out")
    assert answer.code == 2 and "`threads <= 64` must hold" in answer.error
    with pytest.warns(UserWarning, match="more than the 1 cores.*lower --threads"):
        assert session.set_threads(2) == 2


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_lost_process_is_named_by_the_other(tmp_path: Path, process_groups: ProcessGroups, victim: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    source = str(Path(softcell.__file__).parents[1])
    ranks = [
        process_groups.start(
            [sys.executable, "-m", "softcell", "search", "darts", *TINY, "--epochs", "300", "--out", "run", "-q"],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": source,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )
        for rank in range(2)
    ]
    until = time.monotonic() + 120
    while not (tmp_path / "run" / "checkpoint.bin").exists() and time.monotonic() < until:
        time.sleep(0.1)
    ranks[victim].kill()
    _, error = ranks[1 - victim].communicate(timeout=60)
    assert ranks[1 - victim].returncode == 2
    lines = [line for line in error.splitlines() if "warning" not in line.lower()]
    process = ranks[victim].pid
    expected = rf"error: (rank 1: )?rank {victim} of 2 \(process {process} on \S+\) was killed or crashed\. .*--resume"
    assert len(lines) == 1 and re.match(expected, lines[0]), error
