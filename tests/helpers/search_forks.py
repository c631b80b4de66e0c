"""Real processes that start in milliseconds: a server imports the package once and forks a child for every job.

A job is a function of `search_jobs.py`, called in its own process; it can be killed like any other process. Run as a
script this file is the server: it reads one request per line and answers each with one line of JSON.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "src"
OUTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT = 240.0


@dataclass(frozen=True)
class Ended:
    """How a job ended: its exit code (negative: the signal that killed it), what it returned, what it printed."""

    code: int
    value: Any
    output: str

    def get(self) -> Any:
        assert self.code == 0, f"exit code {self.code}\n{self.output}"
        return self.value


class Job:
    """A running child of the server."""

    def __init__(self, forks: "Forks", pid: int, result: Path) -> None:
        self._forks, self.pid, self._result = forks, pid, result

    def signal(self, number: int) -> None:
        """Not yet reaped by the server, so the number cannot belong to another process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> Ended:
        code = self._forks.ask({"wait": self.pid, "timeout": TIMEOUT})["code"]
        value = json.loads(self._result.read_text()) if code == 0 else None
        return Ended(code, value, self._result.with_suffix(".log").read_text())


class Forks:
    """The client's end of the server."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in OUTER}
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "search_forks.py")],
            env={**environment, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)]), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._count = 0
        self.ask({"wait": None})  # until it has imported everything, or times measured from outside would include that

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        assert line, "the server has died"
        return json.loads(line)

    def close(self) -> None:
        """The server ends when its input does."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def start(self, scratch: Path, function: str, *arguments: Any, environment: dict[str, str] | None = None) -> Job:
        """Call `function` of `search_jobs.py` in a separate process; `scratch` takes its result and output."""
        self._count += 1
        scratch.mkdir(parents=True, exist_ok=True)
        result = scratch / f"job{self._count}.json"
        values = [str(value) if isinstance(value, Path) else value for value in arguments]
        request = {"call": function, "arguments": values, "result": str(result), "environment": environment or {}}
        return Job(self, self.ask(request)["pid"], result)

    def run(self, scratch: Path, function: str, *arguments: Any) -> Any:
        return self.start(scratch, function, *arguments).wait().get()

    def start_ranks(self, size: int, scratch: Path, function: str, arguments: Callable[[int], tuple[Any, ...]]) -> Any:
        """One job per rank, with the variables that torchrun would set."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [
            self.start(
                scratch, function, *arguments(rank), environment={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank in range(size)
        ]

    def until_finished(
        self, scratch: Path, start: Callable[[], list[Job]], number: int, seed: int, longest: float
    ) -> tuple[int, list[Ended]]:
        """Signal jobs at random moments, up to `longest` seconds after their start, until they get through.

        Gives how often they were stopped, and how they ended. The moments come later and later, so there is an end; a
        run that got through at once is not counted as one that was stopped.
        """
        rng = random.Random(seed)
        stops = 0
        while True:
            jobs = start()
            time.sleep(rng.uniform(0.0, longest * (1 + stops / 4)))
            for job in jobs:
                job.signal(number)
            ended = [job.wait() for job in jobs]
            if all(one.code == 0 for one in ended):
                return stops, ended
            for one in ended:
                assert one.code in (-number, 128 + number, 0), f"exit code {one.code}\n{one.output}"
            stops += 1


@functools.cache
def forks() -> Forks:
    """The one server of a test session."""
    server = Forks()
    atexit.register(server.close)
    return server


# --- the server ---


def _child(request: dict[str, Any]) -> int:
    result = Path(request["result"])
    log = os.open(result.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["environment"])
    try:
        value = getattr(importlib.import_module("tests.helpers.search_jobs"), request["call"])(*request["arguments"])
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    result.write_text(json.dumps(value))
    return 0


def _wait(pid: int, timeout: float) -> int:
    end = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 124
        time.sleep(0.005)


def _serve() -> None:
    importlib.import_module("tests.helpers.search_jobs").warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = {"code": 0 if request["wait"] is None else _wait(request["wait"], request["timeout"])}
        else:
            pid = os.fork()
            if pid == 0:
                code = _child(request)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
