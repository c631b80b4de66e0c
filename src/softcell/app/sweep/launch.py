"""Runs the jobs of a sweep until each is finished or has failed too often: on this machine, Slurm or a Ray cluster.

Slurm is reached through submitit. Softcell has no scheduler of its own.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softcell.app.sweep.local import Handle, Launcher, Local, last_error, run_job
from softcell.app.sweep.plan import ERROR, Job
from softcell.errors import UserError

Notify = Callable[[str, Job, str], None]
"""Called with what happened (`start`, `wait`, `done`, `retry`, `failed`), the job, and a remark."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a sweep ended.

    earlier: jobs that were finished before it began. failed: by name, with the number of attempts and the last error.
    open: jobs that are left after an interruption.

    Example:
        >>> from softcell.app.sweep import Outcome
        >>> outcome = Outcome(earlier=[], finished=[], failed={}, open=[])
        >>> len(outcome.failed)
        0
    """

    earlier: list[Job]
    finished: list[Job]
    failed: dict[str, tuple[Job, int, str]]
    open: list[Job]

    @property
    def interrupted(self) -> bool:
        return bool(self.open)


def run_sweep(
    jobs: Sequence[Job],
    launcher: Launcher,
    *,
    at_once: int | None = None,
    retries: int = 1,
    notify: Notify = lambda what, job, remark: None,
    poll: float = 0.2,
    pause: float = 10.0,
) -> Outcome:
    """Runs all unfinished jobs; Ctrl-C stops them, and they save their state.

    A job is finished according to its run folders, regardless of what its process returned. A job that ends before that
    is retried up to `retries` times from its last checkpoint.

    A `UserError` of the first submission ends the sweep. After a later one, nothing is submitted until a job ends or
    `pause` seconds are over. It is a failed attempt only if no job of the sweep has been running for `pause` seconds:
    clusters limit how many jobs a user may submit, and need a moment to free the place of a job that has ended.

    Example:
        >>> from softcell.app.sweep import run_sweep
        >>> from softcell.app.sweep.local import Local
        >>> run_sweep([], Local()).finished  # no jobs, nothing to run
        []
    """
    earlier = [job for job in jobs if job.is_finished()]
    waiting = deque(job for job in jobs if job not in earlier)
    limit = at_once or launcher.at_once or len(waiting)
    attempts = {job.name: 0 for job in jobs}
    running: dict[str, tuple[Job, Handle]] = {}
    finished: list[Job] = []
    failed: dict[str, tuple[Job, int, str]] = {}
    notified: set[str] = set()  # of waiting jobs that the cluster did not accept
    last_end = blocked_until = -math.inf

    def collect() -> None:
        nonlocal last_end, blocked_until
        for name, (job, handle) in list(running.items()):
            if handle.done():
                last_end, blocked_until = time.monotonic(), -math.inf
                # Read exactly once: on this machine it also frees the job's slot.
                code = handle.result()
                del running[name]
                if job.is_finished():
                    finished.append(job)
                    notify("done", job, "")
                else:
                    fail(job, last_error(job.folder, code) if code else "ended without finishing its runs")

    def fail(job: Job, error: str) -> None:
        if attempts[job.name] <= retries:
            notify("retry", job, error)
            waiting.append(job)
        else:
            failed[job.name] = (job, attempts[job.name], error)
            notify("failed", job, error)

    try:
        while waiting or running:
            while waiting and len(running) < limit and time.monotonic() >= blocked_until:
                job = waiting.popleft()
                is_first = not any(attempts.values())
                attempts[job.name] += 1
                job.write()
                (job.folder / ERROR).unlink(missing_ok=True)
                try:
                    running[job.name] = (job, launcher.submit(job))
                    notify("start", job, "")
                except UserError as error:
                    if is_first:
                        raise
                    now = time.monotonic()
                    blocked_until = now + pause
                    if running or now - last_end < pause:
                        attempts[job.name] -= 1
                        waiting.appendleft(job)
                        if job.name not in notified:
                            notified.add(job.name)
                            notify("wait", job, str(error))
                    else:
                        fail(job, str(error))
                    break  # the others would be rejected, too
            time.sleep(poll)
            collect()
    except KeyboardInterrupt:
        left = [job for job, _ in running.values()]
        _stop([handle for _, handle in running.values()], poll)
        still = [job for job in left if not job.is_finished()]
        finished += [job for job in left if job.is_finished()]
        return Outcome(earlier, finished, failed, [*still, *waiting])
    finally:
        launcher.close()
    return Outcome(earlier, finished, failed, [])


def _stop(handles: Sequence[Handle], poll: float) -> None:
    """Waits for all to save and end; a second Ctrl-C ends them at once."""
    for handle in handles:
        handle.stop()
    try:
        while not all(handle.done() for handle in handles):
            time.sleep(poll)
    except KeyboardInterrupt:
        for handle in handles:
            handle.stop()


class Submitit:
    """Slurm jobs through submitit; `options` are its parameters, such as `slurm_partition` or `timeout_min`."""

    at_once: int | None = None

    def __init__(self, folder: Path, options: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        self._given = dict(environment or {})
        try:
            import submitit
        except ImportError:
            raise UserError("--on slurm needs submitit: pip install 'softcell[slurm]'") from None
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        self._rejections = (FailedJobError, FailedSubmissionError)
        given = dict(options)
        cluster = given.pop("cluster", "slurm")
        try:
            self._executor = submitit.AutoExecutor(folder=folder / "submitit", cluster=cluster)
            self._executor.update_parameters(**{"name": "softcell", **given})
        except (RuntimeError, ValueError, NameError, TypeError, AssertionError) as error:
            raise UserError(f"submitit cannot start on {cluster!r} with {given or 'no options'}: {error}") from error
        self._queue = Queue() if cluster == "slurm" and not has_accounting() else None

    def submit(self, job: Job) -> Handle:
        try:
            submitted = self._executor.submit(run_job, str(job.folder), job.random, self._given)
        except self._rejections as error:
            raise UserError(f"Slurm did not accept the job {job.name}: {error}") from error
        return _Submitted(submitted, self._queue)

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
        # A job that was submitted after the last look cannot be in it.
        return self._jobs is None or since >= self._asked or job_id in self._jobs


class _Submitted:
    def __init__(self, job: Any, queue: Queue | None) -> None:
        self._job, self._queue, self._since = job, queue, time.monotonic()

    def done(self) -> bool:
        if self._queue is None or self._has_result():
            return bool(self._job.done())
        # Read again, because the result may have been written before the job left the queue.
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
        _require_listening(str(given.get("address") or os.environ.get("RAY_ADDRESS", "")))
        try:
            if not ray.is_initialized():
                ray.init(address=given.pop("address", None), log_to_driver=False)
            given.pop("address", None)
            # The sweep itself retries, from the last checkpoint and as often as requested.
            self._remote: Any = ray.remote(max_retries=0, **given)(run_job)
        except (ConnectionError, RuntimeError, ValueError, TypeError) as error:
            raise UserError(f"Ray cannot start with {dict(options) or 'no options'}: {error}") from error

    def submit(self, job: Job) -> Handle:
        return _Task(self._ray, self._remote.remote(str(job.folder), job.random, self._environment))

    def close(self) -> None:
        pass


def _require_listening(address: str) -> None:
    """Raise at once if no process listens at host:port; Ray would try to connect for several minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):  # auto, local or none
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"no Ray cluster can be reached at {address}: {error}; start one by `ray start`") from error


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
        # The first call raises KeyboardInterrupt in the task, which then saves; only the second one kills it.
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
