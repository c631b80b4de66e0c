"""Compiles the Triton kernels of a step before it runs, in as many processes as there are cores.

The first step of a fused network launches about a hundred different kernels, and Triton compiles each when it is first
launched: one after the other. Schedules say what a step will launch before it runs. Processes compile all of it into
Triton's cache on disk, where the first step finds it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from softcell.kernels.schedule import Schedule

MARKS = "softcell-compiled"
"""The folder in Triton's cache with an empty file for everything that a warm-up has compiled."""


class Compilation(NamedTuple):
    """A kernel, by module and name, and what it is compiled for: Triton's JSON of types, constants and options."""

    module: str
    name: str
    specialization: str


class Target(NamedTuple):
    """What code is generated for, as in `triton.backends.compiler.GPUTarget`."""

    backend: str
    arch: int
    warp_size: int


def compilations(schedules: Iterable[Schedule]) -> list[Compilation]:
    """What the launches of schedules need compiled, each once; nothing runs, and no tensor is needed."""
    from triton import knobs  # type: ignore[import-not-found, unused-ignore]

    found: dict[Compilation, None] = {}  # in the order of launches

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found[Compilation(fn.module, fn.name, _reduced(compile["specialization_data"]))] = None
        return True  # ends the launch before it compiles

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = hook
    try:
        for schedule in schedules:
            for launch in schedule.launches:
                launch.kernel.run(*schedule.stand_ins(launch), grid=launch.grid, warmup=True, **launch.options)
    finally:
        knobs.runtime.jit_cache_hook = before
    return list(found)


def current_target() -> Target:
    """That of the current device."""
    from triton.runtime import driver  # type: ignore[import-not-found, unused-ignore]

    target = driver.active.get_current_target()
    return Target(target.backend, target.arch, target.warp_size)


def warm_up(schedules: Iterable[Schedule]) -> int:
    """Compile what the launches of schedules need on the current device; returns how many kernels were missing."""
    return compile_all(compilations(schedules), current_target())


def compile_all(jobs: Iterable[Compilation], target: Target, processes: int | None = None) -> int:
    """Compile into Triton's cache what no earlier warm-up compiled; returns how many kernels that were.

    A kernel that cannot be compiled is left to its first launch, which reports the reason.
    """
    marks = _marks()
    left = [job for job in jobs if not (marks / _digest(job, target)).exists()]
    processes = min(processes or os.cpu_count() or 1, len(left))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    running = []
    for number in range(processes):
        worker = subprocess.Popen(
            [sys.executable, "-m", "softcell.kernels.warm_up"], stdin=subprocess.PIPE, env=environment, text=True
        )
        running.append((worker, json.dumps([target, left[number::processes]])))
    for worker, given in running:
        assert worker.stdin is not None
        worker.stdin.write(given)
        worker.stdin.close()
    for worker, _ in running:
        worker.wait()
    return len(left)


def compile_one(job: Compilation, target: Target) -> Any:
    """Triton's compiled kernel; no device is needed."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found, unused-ignore]
    from triton.compiler import ASTSource, compile  # type: ignore[import-not-found, unused-ignore]

    kernel = getattr(importlib.import_module(job.module), job.name)
    given = json.loads(job.specialization)
    constants = dict(zip(map(tuple, given["constant_keys"]), given["constant_vals"], strict=True))
    attributes = dict(zip(map(tuple, given["attrs_keys"]), given["attrs_vals"], strict=True))
    options = {name: _tuples(value) for name, value in given["options"].items()}
    source = ASTSource(kernel, given["signature"], constants, attributes)
    return compile(source, target=GPUTarget(*target), options=options)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


def _reduced(specialization: str) -> str:
    """Without the key of Triton's cache in memory, which says the same again."""
    given = json.loads(specialization)
    del given["key"]
    return json.dumps(given)  # the order of a signature matters


def _marks() -> Path:
    from triton import knobs  # type: ignore[import-not-found, unused-ignore]

    folder = Path(knobs.cache.dir) / MARKS
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _digest(job: Compilation, target: Target) -> str:
    import triton  # type: ignore[import-not-found, unused-ignore]

    source = getattr(importlib.import_module(job.module), job.name).cache_key
    return hashlib.sha256(repr((triton.__version__, source, tuple(target), tuple(job))).encode()).hexdigest()


def _work(target: Target, jobs: Sequence[Compilation]) -> None:
    marks = _marks()
    for job in jobs:
        try:
            compile_one(job, target)
        except Exception as error:  # its first launch reports it in full
            print(f"{job.name} was not compiled ahead: {type(error).__name__}", file=sys.stderr)
        else:
            (marks / _digest(job, target)).touch()


if __name__ == "__main__":
    _target, _jobs = json.load(sys.stdin)
    _work(Target(*_target), [Compilation(*job) for job in _jobs])
