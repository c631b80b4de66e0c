"""Kills forked runs of the toy task, at random times and at every file operation; prints one JSON line per trial.

Forking after torch is imported makes a trial cost milliseconds instead of seconds.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from softcell.engine import checkpoint, loop
from tests.helpers.engine_toy import ALONE, Toy, final_state, same

FINISHED, KILLED = "finished", "killed"


def fork_run(folder: Path, delay: float, kill_at: int | None) -> int:
    """Start a run in a child that kills itself just before its file operation number `kill_at`; return its id."""
    child = os.fork()
    if child:
        return child
    try:
        if kill_at is not None:
            die_before_operation(kill_at)
        loop.run(Toy(delay=delay), folder, ALONE, resume=True)
        os._exit(0)
    except BaseException as error:
        print(f"child: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


def die_before_operation(number: int) -> None:
    """Make the process kill itself instead of its `number`-th fsync or rename; counting starts at 0."""
    done = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal done
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return function(*arguments)

        return call

    os.replace = counted(os.replace)
    os.fsync = counted(os.fsync)


def wait(child: int) -> str:
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return KILLED
    assert os.WEXITSTATUS(status) == 0, "the run failed"
    return FINISHED


def at_random_times(folder: Path, rng: random.Random) -> int:
    """Kill runs after random times until one gets through; return how many were killed."""
    kills = 0
    while True:
        child = fork_run(folder, delay=0.002, kill_at=None)
        # Later and later, so that the run comes through in the end.
        time.sleep(rng.uniform(0.0, 0.04 + 0.01 * kills))
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        if wait(child) == FINISHED:
            return kills
        kills += 1


def assert_files_are_not_ahead(folder: Path) -> None:
    """What a reader finds in the files after a kill must be what the checkpoint holds, or the beginning of it."""
    loaded = checkpoint.load_latest(folder)
    history = loaded.state["history"] if loaded else {}
    for file in folder.glob("*.jsonl"):
        lines = file.read_text().splitlines()
        assert lines == history.get(file.stem, [])[: len(lines)], f"{file} is ahead of the checkpoint"


def main(folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    Toy()  # has torch import what it imports late, once for all children
    whole = folder / "whole"
    whole.mkdir()
    assert wait(fork_run(whole, 0.0, None)) == FINISHED
    expected = final_state(whole)

    kills = 0
    rng = random.Random(seed)
    for trial in range(2):
        part = folder / f"random{trial}"
        part.mkdir()
        kills += at_random_times(part, rng)
        assert same(final_state(part), expected), f"random times, trial {trial}"
    print(json.dumps({"trials": "random", "kills": kills}))

    points = 0
    while True:
        part = folder / f"point{points}"
        part.mkdir()
        if wait(fork_run(part, 0.0, points)) == FINISHED:
            break
        assert_files_are_not_ahead(part)
        assert wait(fork_run(part, 0.0, None)) == FINISHED, f"resumed after a kill at operation {points}"
        assert same(final_state(part), expected), f"killed at operation {points}"
        points += 1
    print(json.dumps({"trials": "points", "kills": points}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
