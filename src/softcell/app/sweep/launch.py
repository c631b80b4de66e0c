"""Runs jobs, each as processes on the machine that a launcher chose: this one, a Ray cluster or Slurm.

Slurm is reached through submitit. None of this is a scheduler of our own.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from softcell.app.sweep.plan import Job, is_finished
from softcell.app.sweep.share import LOG, SharedProcess
from softcell.engine.lock import LOCK, announce, holder, open_lock, take
from softcell.engine.runfolder import MANIFEST
from softcell.errors import UserError

BUSY = 75  # as in sysexits.h: try again later


def commands(folder: Path, random: int) -> list[list[str]]:
    """The command lines that a job in `folder` still has to run, without the program.

    A run that was started is resumed; a finished one is skipped.
    """
    result = []
    search, train = folder / "search", folder / "train"
    if not is_finished(search):
        begun = (search / MANIFEST).is_file()
        start = ["--resume", str(search)] if begun else ["--config", f"{search}.json", "--out", str(search)]
        result.append(["search", *start, "--quiet"])
    if Path(f"{train}.json").is_file():
        beside = [train / f"random-{k}" for k in range(1, random + 1)]
        if not all(is_finished(run) for run in (train, *beside)):
            begun = (train / MANIFEST).is_file()
            new = [str(search), "--config", f"{train}.json", "--out", str(train)]
            more = ["--random", str(random)] if random else []
            result.append(["train", *(["--resume", str(train)] if begun else new), *more, "--quiet"])
    return result


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
            if self._stopped:
                return 130
            # In a session of its own, so that Ctrl-C in a terminal reaches it through `stop` and only once.
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
        return 128 - code if code < 0 else code

    def stop(self, now: bool = False) -> None:
        """Asks the current command to save and end; with `now`, kills it."""
        with self._lock:
            self._stopped = True
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGKILL if now else signal.SIGTERM)


def _run_job(folder: str, random: int, environment: Mapping[str, str] | None = None) -> int:
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


class Local:
    """Processes on this machine, `at_once` jobs at a time; they share its cores, and its GPUs in turn.

    With more jobs than GPUs, the searches on one GPU share a process (`softcell.app.sweep.share`). Trainings, and jobs
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
        """The process on the slot's GPU that is to search for a job; None if it gets one of its own."""
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
    """A job whose search runs in a shared process; `alone` starts its trainings afterwards."""

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


class Submitit:
    """Slurm jobs through submitit; `options` are its parameters, such as `slurm_partition` or `timeout_min`."""

    at_once: int | None = None

    def __init__(self, folder: Path, options: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        self._given = dict(environment or {})
        try:
            import submitit
        except ImportError:
            raise UserError("--on slurm needs submitit: pip install 'softcell[slurm]'") from None
        given = dict(options)
        cluster = given.pop("cluster", "slurm")
        try:
            self._executor = submitit.AutoExecutor(folder=folder / "submitit", cluster=cluster)
            self._executor.update_parameters(**{"name": "softcell", **given})
        except (RuntimeError, ValueError, NameError, TypeError, AssertionError) as error:
            raise UserError(f"submitit cannot start on {cluster!r} with {given or 'no options'}: {error}") from error
        self._queue = Queue() if cluster == "slurm" and not has_accounting() else None

    def submit(self, job: Job) -> Handle:
        return _Submitted(self._executor.submit(_run_job, str(job.folder), job.random, self._given), self._queue)

    def close(self) -> None:
        pass


def has_accounting() -> bool:
    """Whether Slurm keeps records of ended jobs, which submitit reads by `sacct`."""
    try:
        return subprocess.run(["sacct", "--noheader"], capture_output=True, check=False, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


class Queue:
    """The jobs in Slurm's queue, for clusters without accounting.

    There submitit would print two warnings every few seconds, and would wait forever for a job that was cancelled or
    whose node was lost: such a job leaves no result.
    """

    def __init__(self, interval: float = 5.0) -> None:
        self._interval, self._asked, self._jobs = interval, -math.inf, None

    _jobs: set[str] | None

    def contains(self, job_id: str, since: float) -> bool:
        """Whether a job that was submitted at `since` (monotonic) waits or runs; True while that is unknown."""
        now = time.monotonic()
        if now - self._asked >= self._interval:
            self._asked = now
            done = subprocess.run(["squeue", "--me", "--noheader", "--format=%A"], capture_output=True, check=False)
            self._jobs = set(done.stdout.decode().split()) if done.returncode == 0 else None
        return self._jobs is None or since >= self._asked or job_id in self._jobs


class _Submitted:
    def __init__(self, job: Any, queue: Queue | None) -> None:
        self._job, self._queue, self._since = job, queue, time.monotonic()

    def done(self) -> bool:
        if self._queue is None or self._has_result():
            return bool(self._job.done())
        return not self._queue.contains(str(self._job.job_id), self._since) and not self._has_result()

    def _has_result(self) -> bool:
        return bool(self._job.paths.result_pickle.exists())

    def result(self) -> int:
        if self._queue is not None and not self._has_result():
            return 1  # cancelled, timed out or lost with its node
        error = self._job.exception()  # from the scheduler: killed, timed out, node lost
        return 1 if error is not None else int(self._job.result())

    def stop(self) -> None:
        self._job.cancel()


class Ray:
    """Tasks on a Ray cluster; `options` may set its `address`, and `num_cpus` and `num_gpus` of each job."""

    at_once: int | None = None

    def __init__(self, options: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})
        try:
            import ray
        except ImportError:
            raise UserError("--on ray needs Ray: pip install 'softcell[ray]'") from None
        given = dict(options)
        self._ray: Any = ray
        try:
            if not ray.is_initialized():
                ray.init(address=given.pop("address", None), log_to_driver=False)
            given.pop("address", None)
            # The sweep retries by itself, from the last checkpoint and as often as it was asked to.
            self._remote: Any = ray.remote(max_retries=0, **given)(_run_job)
        except (ConnectionError, RuntimeError, ValueError, TypeError) as error:
            raise UserError(f"Ray cannot start with {dict(options) or 'no options'}: {error}") from error

    def submit(self, job: Job) -> Handle:
        return _Task(self._ray, self._remote.remote(str(job.folder), job.random, self._environment))

    def close(self) -> None:
        pass


class _Task:
    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference, self._asked = ray, reference, False

    def done(self) -> bool:
        return bool(self._ray.wait([self._reference], timeout=0)[0])

    def result(self) -> int:
        try:
            return int(self._ray.get(self._reference))
        except self._ray.exceptions.RayError:
            return 1

    def stop(self) -> None:
        self._ray.cancel(self._reference, force=self._asked)
        self._asked = True


def make_launcher(
    on: str,
    out: Path,
    at_once: int | None,
    options: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> Launcher:
    """The launcher named `local`, `slurm` or `ray`. environment: extra variables for every job."""
    if on == "local":
        if options:
            raise UserError(f"--cluster requires --on slurm or ray, but got {', '.join(options)} on this machine")
        return Local(at_once or 1, environment)
    return Submitit(out, options, environment) if on == "slurm" else Ray(options, environment)
