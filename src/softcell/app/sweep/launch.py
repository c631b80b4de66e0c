"""Where jobs run: this machine, a Ray cluster, or Slurm through submitit. None of it is a scheduler of our own."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from softcell.app.sweep.plan import Job
from softcell.app.sweep.work import Work, run_job
from softcell.errors import UserError


class Handle(Protocol):
    """A job under way."""

    def done(self) -> bool: ...

    def result(self) -> int:
        """The exit code of a job that is done; a launcher's own trouble is any code but 0."""

    def stop(self) -> None:
        """Asks the job to save and end; asked again, it ends at once."""


class Launcher(Protocol):
    """Starts jobs; `at_once` is how many it takes at the same time unless the user says otherwise (None: all)."""

    at_once: int | None

    def submit(self, job: Job) -> Handle: ...


class Local:
    """Processes on this machine, `at_once` at the same time; several share its cores and get a GPU each in turn."""

    def __init__(self, at_once: int = 1, environment: Mapping[str, str] | None = None) -> None:
        self.at_once: int | None = at_once
        self._given = dict(environment or {})
        self._slots = list(range(at_once))

    def submit(self, job: Job) -> Handle:
        slot = self._slots.pop(0)
        return _Thread(Work(job.folder, job.random, self._environment(slot)), lambda: self._slots.insert(0, slot))

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
    import torch

    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        return [name for name in told.split(",") if name]
    return [str(k) for k in range(torch.cuda.device_count())]


class _Thread:
    def __init__(self, work: Work, free: Any) -> None:
        self._work, self._free, self._code, self._asked = work, free, 1, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._code = self._work.run()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> int:
        self._thread.join()
        self._free()
        return self._code

    def stop(self) -> None:
        self._work.stop(now=self._asked)
        self._asked = True


class Submitit:
    """Slurm jobs made by submitit; `options` are its parameters, such as `slurm_partition` or `timeout_min`."""

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
            raise UserError(
                f"submitit refuses to start on {cluster!r} with {given or 'no options'}: {error}"
            ) from error

    def submit(self, job: Job) -> Handle:
        return _Submitted(self._executor.submit(run_job, str(job.folder), job.random, self._given))


class _Submitted:
    def __init__(self, job: Any) -> None:
        self._job = job

    def done(self) -> bool:
        return bool(self._job.done())

    def result(self) -> int:
        error = self._job.exception()  # of the scheduler: killed, timed out, node lost
        return 1 if error is not None else int(self._job.result())

    def stop(self) -> None:
        self._job.cancel()


class Ray:
    """Tasks of a Ray cluster; `options` may name its `address`, and say `num_cpus`, `num_gpus` of each job."""

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
            self._remote: Any = ray.remote(max_retries=0, **given)(run_job) if given else ray.remote(run_job)
        except (ConnectionError, RuntimeError, ValueError, TypeError) as error:
            raise UserError(f"Ray refuses to start with {dict(options) or 'no options'}: {error}") from error

    def submit(self, job: Job) -> Handle:
        return _Task(self._ray, self._remote.remote(str(job.folder), job.random, self._environment))


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
    """The launcher of a name: `local`, `slurm` or `ray`. environment: variables that every job is given."""
    if on == "local":
        if options:
            raise UserError(f"--cluster belongs to --on slurm or ray, but got {', '.join(options)} on this machine")
        return Local(at_once or 1, environment)
    return Submitit(out, options, environment) if on == "slurm" else Ray(options, environment)
