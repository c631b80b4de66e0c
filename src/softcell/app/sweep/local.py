"""The jobs of a sweep on one machine: processes that run their commands, and searches that share a GPU.

Two processes on one GPU wait for each other; runs in one process overlap (`softcell.engine.interleave`), and each gives
the same result as it would alone. With more jobs than GPUs, a sweep therefore starts one process per GPU
(`SharedProcess`) for
all searches on it. It runs `main`: it reads folders of jobs from its standard input and answers with the exit code of
each search, one line of JSON each.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from softcell.app.jobs import draw_search, has_run
from softcell.app.process import explain_failure
from softcell.app.sweep.plan import Job, is_finished
from softcell.engine import resolve_device
from softcell.engine.capture import MAX_SHARING_RUNS
from softcell.engine.interleave import Interleaved, Running
from softcell.engine.lock import LOCK, announce, holder, locked, open_lock, take
from softcell.engine.session import Interrupt
from softcell.engine.task import Event, Note
from softcell.errors import UserError
from softcell.recipes import search_recipe
from softcell.search.run import search_steps

LOG = "log.txt"
BUSY = 75  # as in sysexits.h: try again later


def commands(folder: Path, random: int) -> list[list[str]]:
    """The command lines that a job in `folder` still has to run, without the program.

    A run that was started is resumed; a finished one is skipped.
    """
    result = []
    search, train = folder / "search", folder / "train"
    if not is_finished(search):
        begun = has_run(search)
        start = ["--resume", str(search)] if begun else ["--config", f"{search}.json", "--out", str(search)]
        result.append(["search", *start, "--quiet"])
    if Path(f"{train}.json").is_file():
        beside = [train / f"random-{k}" for k in range(1, random + 1)]
        if not all(is_finished(run) for run in (train, *beside)):
            begun = has_run(train)
            new = [str(search), "--config", f"{train}.json", "--out", str(train)]
            more = ["--random", str(random)] if random else []
            result.append(["train", *(["--resume", str(train)] if begun else new), *more, "--quiet"])
    return result


class Handle(Protocol):
    """A running job."""

    def done(self) -> bool: ...

    def result(self) -> int:
        """The exit code of a job that is done; not 0 if the launcher itself failed."""

    def stop(self) -> None:
        """Asks the job to save and end; a second call ends it at once."""


class Launcher(Protocol):
    """Starts jobs; `at_once` is the default number of concurrent jobs (None: all)."""

    at_once: int | None

    def submit(self, job: Job) -> Handle: ...

    def close(self) -> None:
        """Called after the last job."""


class Work:
    """Runs the commands of a job one after the other; `stop`, from any thread, lets the current one save and end."""

    def __init__(self, folder: str | Path, random: int, environment: Mapping[str, str] | None = None) -> None:
        self._folder, self._random = Path(folder), random
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def run(self) -> int:
        """The exit code of the first command that fails, else 0; all output goes to the job's log."""
        with open(self._folder / LOG, "ab") as log, open(open_lock(self._folder / LOCK), "r+b") as lock:
            if not take(lock.fileno(), self._folder / LOCK):
                who = holder(self._folder / LOCK)
                log.write(f"error: this job is in use by {who}; wait until that ends, or stop it\n".encode())
                return BUSY
            try:
                for words in commands(self._folder, self._random):
                    log.write(f"$ softcell {' '.join(words)}\n".encode())
                    log.flush()
                    code = self._run([sys.executable, "-m", "softcell", *words], log.fileno(), lock.fileno())
                    if code:
                        log.write(f"ended with exit code {code}\n".encode())
                        return code
            except KeyboardInterrupt:  # a cluster cancels a task this way
                self.stop()
                return 130
            except Exception:
                log.write(traceback.format_exc().encode())
                return 1
        return 0

    def _run(self, words: list[str], log: int, lock: int) -> int:
        with self._lock:
            # `stop` may have come from another thread between two commands.
            if self._stopped:
                return 130
            # In a separate session, so that Ctrl-C in a terminal reaches it through `stop` and only once.
            # It holds the lock itself, because it may outlive a sweep that is killed.
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                pass_fds=(lock,),
            )
            announce(lock, self._process.pid)
        try:
            code = self._process.wait()
        except KeyboardInterrupt:
            self.stop()
            code = self._process.wait()
        # Popen reports signal n as -n, shells as 128 + n.
        return 128 - code if code < 0 else code

    def stop(self, now: bool = False) -> None:
        """Asks the current command to save and end; with `now`, kills it."""
        with self._lock:
            self._stopped = True
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGKILL if now else signal.SIGTERM)


def run_job(folder: str, random: int, environment: Mapping[str, str] | None = None) -> int:
    """Called by the worker of a cluster."""
    return Work(folder, random, environment).run()


def last_error(folder: Path) -> str:
    """The last error in a job's log."""
    try:
        with open(folder / LOG, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 20_000))
            lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    except OSError:
        return "no log was written"
    begun = max((i for i, line in enumerate(lines) if line.startswith("$ softcell")), default=-1)
    output = lines[begun + 1 :]  # of the last command
    errors = [line for line in output if line.startswith("error:")]
    return errors[-1] if errors else "; ".join(output[-2:]) or "no output"


class Local:
    """Processes on this machine, `at_once` jobs at a time; they share its cores, and its GPUs in turn.

    With more jobs than GPUs, the searches on one GPU share a process (`SharedProcess`). Training runs, and jobs
    that failed there, run in separate processes.
    """

    def __init__(self, at_once: int = 1, environment: Mapping[str, str] | None = None) -> None:
        self.at_once: int | None = at_once
        self._given = dict(environment or {})
        self._slots = list(range(at_once))
        self._shared: dict[str, tuple[SharedProcess, Any]] = {}
        self._tried: set[str] = set()

    def submit(self, job: Job) -> Handle:
        slot = self._slots.pop(0)

        def alone() -> Handle:
            return _Thread(Work(job.folder, job.random, self._environment(slot)))

        shared = self._sharing(job, slot)
        handle = alone() if shared is None else _Shared(shared, job, alone)
        return _Slot(handle, lambda: self._slots.insert(0, slot))

    def _sharing(self, job: Job, slot: int) -> SharedProcess | None:
        """The process on the slot's GPU that is to search for a job; None if it gets a separate process."""
        gpus, again = _gpus(), job.name in self._tried
        self._tried.add(job.name)
        assert self.at_once is not None
        if again or not gpus or self.at_once <= len(gpus) or is_finished(job.folder / "search"):
            return None
        if job.search.get("device", "auto") not in ("auto", "cuda") or not torch.cuda.is_available():
            return None
        gpu = gpus[slot % len(gpus)]
        # Searches in one process must agree on what is set for the whole process.
        common = {key: job.search.get(key) for key in ("deterministic", "threads", "plugins")}
        if gpu not in self._shared:
            environment = {**self._environment(slot), "CUDA_VISIBLE_DEVICES": gpu}
            log = job.folder.parent / f"shared-{gpu}.txt"
            self._shared[gpu] = SharedProcess(environment, log), common
        process, agreed = self._shared[gpu]
        return process if common == agreed else None

    def close(self) -> None:
        """End the processes that wait for further jobs."""
        for process, _ in self._shared.values():
            process.close()

    def _environment(self, slot: int) -> dict[str, str]:
        result = dict(self._given)
        if self.at_once in (None, 1):
            return result
        assert self.at_once is not None
        # Each job would otherwise use all cores, and the jobs would slow each other down.
        if "OMP_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            result["OMP_NUM_THREADS"] = str(max(1, cores // self.at_once))
        gpus = _gpus()
        if len(gpus) > 1:
            result["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        return result


def _gpus() -> list[str]:
    """Names of the CUDA devices that jobs may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(k) for k in range(torch.cuda.device_count())]


class _Slot:
    """A handle that frees its slot when its result is read."""

    def __init__(self, handle: Handle, release: Callable[[], None]) -> None:
        self._handle, self._release = handle, release
        self.done, self.stop = handle.done, handle.stop

    def result(self) -> int:
        self._release()
        return self._handle.result()


class _Thread:
    def __init__(self, work: Work) -> None:
        self._work, self._code, self._asked = work, 1, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._code = self._work.run()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> int:
        self._thread.join()
        return self._code

    def stop(self) -> None:
        self._work.stop(now=self._asked)
        self._asked = True


class _Shared:
    """A job whose search runs in a shared process; `alone` starts its training runs afterwards."""

    def __init__(self, process: SharedProcess, job: Job, alone: Callable[[], Handle]) -> None:
        self._process, self._job, self._alone = process, job, alone
        self._code, self._asked = 1, False
        self._rest: Handle | None = None
        process.submit(job.folder)

    def done(self) -> bool:
        if self._rest is None:
            code = self._process.code_of(self._job.folder)
            if code is None:
                return False
            self._code = code
            # After a stop the training runs are left to the next call of the sweep.
            if code == 0 and not self._asked and commands(self._job.folder, self._job.random):
                self._rest = self._alone()
        return self._rest is None or self._rest.done()

    def result(self) -> int:
        return self._code if self._rest is None else self._rest.result()

    def stop(self) -> None:
        if self._rest is None:
            self._process.stop(now=self._asked)
        else:
            self._rest.stop()
        self._asked = True


class SharedProcess:
    """A process that searches for several jobs on one GPU; it starts with the first job."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._environment, self._log = {**os.environ, **environment}, log
        self._process: subprocess.Popen[bytes] | None = None
        self._codes: dict[str, int] = {}
        self._asked = 0

    def submit(self, folder: Path) -> None:
        if self._process is not None and self._asked:
            self._process.wait()  # it is about to end
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        # The code of an earlier attempt.
        self._codes.pop(str(folder), None)
        try:
            self._process.stdin.write(json.dumps(str(folder)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # It died after `poll`: `code_of` reports that, and the job is retried in a separate process.
            self._process.wait()
            with suppress(BrokenPipeError):  # what was not sent is still in its buffer
                self._process.stdin.close()

    def _start(self) -> None:
        reading, writing = os.pipe()
        self._asked = 0
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from softcell.app.sweep.local import main; main({writing})"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C in a terminal reaches it through `stop` and only once
                pass_fds=(writing,),
            )
        # Only the child may hold this end, or `_listen` would never see that the child has ended.
        os.close(writing)
        threading.Thread(target=self._listen, args=(reading,), daemon=True).start()

    def _listen(self, reading: int) -> None:
        with os.fdopen(reading) as answers:
            for line in answers:
                folder, code = json.loads(line)
                self._codes[folder] = code

    def code_of(self, folder: Path) -> int | None:
        """The exit code of the search in `folder`; None while it runs; 1 if the process died before it ended."""
        process = self._process
        is_gone = process is None or process.poll() is not None  # before the codes are read: it may end in between
        return self._codes.get(str(folder), 1 if is_gone else None)

    def stop(self, now: bool) -> None:
        """Asks all searches to save and end; with `now`, kills the process."""
        if self._process is not None and self._process.poll() is None and (now or not self._asked):
            self._asked += 1
            self._process.send_signal(signal.SIGKILL if now else signal.SIGTERM)

    def close(self) -> None:
        """No job will follow: searches that still run save, and the process ends."""
        if self._process is not None and self._process.stdin is not None:
            self.stop(now=False)
            self._process.stdin.close()
            self._process.wait()


def _search_steps_of(folder: Path) -> Running[int]:
    """The search of the job in `folder`, started or resumed: a run that returns its exit code."""

    def note(event: Event) -> None:
        if isinstance(event, Note):
            _log(folder, f"note: {event.text}")

    search = folder / "search"
    begun = has_run(search)
    # The lock of the job, which `Work` holds for jobs in separate processes.
    with locked(folder):
        _log(folder, f"$ softcell search ({'resumed' if begun else 'new'}, in one process with other jobs)")
        recipe = search_recipe({}, resume_from=search) if begun else search_recipe({}, config=f"{search}.json")
        result = yield from search_steps(recipe, search, resume=begun, on_event=note)
        if result.genotype is not None:
            draw_search(result, again=True)
        return result.exit_code


def _log(folder: Path, text: str) -> None:
    with open(folder / LOG, "a", encoding="utf-8") as log:
        log.write(f"{text}\n")


def serve(requests: int, answers: IO[str]) -> None:
    """Search for the jobs whose folders arrive on the descriptor `requests`, until it is closed and all have ended."""
    runs: Interleaved[Path] = Interleaved(resolve_device("auto"))
    waiting, text, is_open = list[Path](), b"", True
    with Interrupt() as interrupt:
        while is_open or waiting or len(runs):
            is_busy = bool(waiting or len(runs))
            # A handled signal does not end `select`, so an idle process looks for one twice per second.
            if is_open and select.select([requests], [], [], 0.0 if is_busy else 0.5)[0]:
                read = os.read(requests, 65536)
                is_open = bool(read)
                *lines, text = (text + read).split(b"\n")
                waiting += [Path(json.loads(line)) for line in lines]
            while waiting and len(runs) < MAX_SHARING_RUNS:
                folder = waiting.pop(0)
                runs.add(folder, partial(_search_steps_of, folder))
            for folder, result in runs.turn():
                code = result
                if isinstance(result, Exception):
                    reason = str(result) if isinstance(result, UserError) else explain_failure(result)
                    code = 1 if reason is None else 2
                    _log(folder, "".join(traceback.format_exception(result)) if reason is None else f"error: {reason}")
                    _log(folder, f"ended with exit code {code}")
                print(json.dumps([str(folder), code]), file=answers, flush=True)
            if interrupt.signal and not len(runs):
                return


def main(answers: int) -> None:
    """The program of a shared process: requests on standard input, answers on the descriptor `answers`."""
    with os.fdopen(answers, "w") as stream:
        serve(sys.stdin.fileno(), stream)
