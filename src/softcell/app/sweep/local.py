"""The jobs of a sweep on one machine: a process for each job, or one for all jobs on a GPU (`app.sweep._shared`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from softcell.app.jobs import has_run
from softcell.app.process import ERROR_FILE, exit_code_of, read_error, write_error
from softcell.app.sweep._shared import SharedProcess, process_settings, runs_on_gpu, trains_shared
from softcell.app.sweep.plan import ERROR, LOG, Job, is_finished
from softcell.engine.lock import LOCK, announce, holder, open_lock, take

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
        error_file = {ERROR_FILE: str(self._folder / ERROR)}
        self._environment = {**os.environ, **(environment or {}), **error_file}
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def run(self) -> int:
        """The exit code of the first command that fails, else 0; all output goes to the job's log."""
        with open(self._folder / LOG, "ab") as log, open(open_lock(self._folder / LOCK), "r+b") as lock:
            if not take(lock.fileno(), self._folder / LOCK):
                reason = f"this job is in use by {holder(self._folder / LOCK)}; wait until that ends, or stop it"
                log.write(f"error: {reason}\n".encode())
                write_error(self._folder / ERROR, reason)
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
            except Exception as error:
                log.write(traceback.format_exc().encode())
                write_error(self._folder / ERROR, f"{type(error).__name__}: {error}")
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
        return exit_code_of(code)

    def stop(self, now: bool = False) -> None:
        """Asks the current command to save and end; with `now`, kills it."""
        with self._lock:
            self._stopped = True
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGKILL if now else signal.SIGTERM)


def run_job(folder: str, random: int, environment: Mapping[str, str] | None = None) -> int:
    """Called by the worker of a cluster."""
    return Work(folder, random, environment).run()


def last_error(folder: Path, code: int) -> str:
    """Why a job's last attempt ended with exit code `code`."""
    return read_error(folder / ERROR) or f"ended with exit code {code} and without an error message"


class Local:
    """Processes on this machine, `at_once` jobs at a time; they share its cores, and its GPUs in turn.

    With more jobs than GPUs, the jobs on one GPU share a process (`SharedProcess`). Jobs that failed there, and
    training runs with a time limit, run in separate processes.
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
        """The process on the slot's GPU that runs a job with others; None if it gets a separate process."""
        gpus, again = _gpus(), job.name in self._tried
        self._tried.add(job.name)
        assert self.at_once is not None
        if again or not gpus or self.at_once <= len(gpus) or not torch.cuda.is_available():
            return None
        if is_finished(job.folder / "search") and not trains_shared(job):
            return None
        if not runs_on_gpu(job.search):
            return None
        gpu, common = gpus[slot % len(gpus)], process_settings(job.search)
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
    """A job in a shared process; `alone` starts the training runs that cannot share it afterwards."""

    def __init__(self, process: SharedProcess, job: Job, alone: Callable[[], Handle]) -> None:
        self._process, self._job, self._alone = process, job, alone
        self._code, self._asked = 1, False
        self._rest: Handle | None = None
        process.submit(job)

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
