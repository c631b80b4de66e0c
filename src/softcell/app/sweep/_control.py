"""Runs jobs through a launcher until each is finished or has failed too often."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from softcell.app.sweep.launch import Handle, Launcher, last_error
from softcell.app.sweep.plan import Job

Notify = Callable[[str, Job, str], None]
"""Called with what happened (`start`, `done`, `retry`, `failed`), the job, and a remark."""


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
) -> Outcome:
    """Runs all unfinished jobs; Ctrl-C stops them, and they save their state.

    A job is finished when its run folders say so, whatever its process returned. A job that ends before that is
    retried up to `retries` times from its last checkpoint.

    Example:
        >>> from softcell.app.sweep import run_sweep
        >>> from softcell.app.sweep.launch import Local
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

    def collect() -> None:
        for name, (job, handle) in list(running.items()):
            if handle.done():
                code = handle.result()
                del running[name]
                if job.is_finished():
                    finished.append(job)
                    notify("done", job, "")
                elif attempts[name] <= retries:
                    notify("retry", job, last_error(job.folder))
                    waiting.append(job)
                else:
                    error = last_error(job.folder) if code else "ended without finishing its runs"
                    failed[name] = (job, attempts[name], error)
                    notify("failed", job, error)

    try:
        while waiting or running:
            while waiting and len(running) < limit:
                job = waiting.popleft()
                attempts[job.name] += 1
                job.write()
                notify("start", job, "")
                running[job.name] = (job, launcher.submit(job))
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
