"""Compiles the Triton kernels of a step before it runs, with one process per core.

The first step of a fused network launches about a hundred different kernels. Triton compiles each at its first launch,
one after another. Here they are determined in advance, and worker processes compile them into Triton's cache on disk,
where the first step finds them. There are two ways to determine them:

    warm_up           training: the schedules of derived networks list their launches
    warm_up_by_run    searches, and networks without schedules: a dry run of the step, in which nothing is launched;
                      workers compile while it still runs

`workers_ready` starts the workers earlier if the cache is empty: they take seconds to load PyTorch and Triton, while
data and networks are prepared.

`SOFTCELL_COMPILE_AHEAD=0` disables this: kernels are then compiled on first use.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, NamedTuple, Self

from softcell.kernels.schedule import Schedule
from softcell.machine import usable_cores
from softcell.text import count_of

MARKS = "softcell-compiled"
"""The folder in Triton's cache with an empty marker file for each job that a warm-up has compiled."""
LOCK = "lock"
"""The lock file in that folder."""
SWITCH = "SOFTCELL_COMPILE_AHEAD"
MAX_SECONDS = 600.0
"""Workers that take longer are terminated; their kernels are compiled on first use."""
END = b"\xff" * 4
"""Sent in place of a job number: the worker that reads it exits."""
Notify = Callable[[str], None]


class Compilation(NamedTuple):
    """A kernel, by module and name, and its specialization: Triton's JSON of types, constants and options."""

    module: str
    name: str
    specialization: str


class Target(NamedTuple):
    """The compilation target, as in `triton.backends.compiler.GPUTarget`."""

    backend: str
    arch: int
    warp_size: int


def is_enabled() -> bool:
    """Whether kernels are compiled before they are needed; Triton's interpreter compiles nothing."""
    return os.environ.get(SWITCH, "1") != "0" and os.environ.get("TRITON_INTERPRET") != "1"


@contextmanager
def dry_launches(found: Callable[[Compilation], None]) -> Iterator[None]:
    """Inside this context no kernel is launched or compiled; `found` receives each missing kernel once.

    Kernel outputs remain uninitialised, so nothing may depend on their values. Kernels that this process has already
    compiled are not reported, and not launched either: they could use uninitialised values as indices.
    """
    from triton import knobs  # type: ignore[import-not-found, unused-ignore]
    from triton.runtime.jit import JITFunction  # type: ignore[import-not-found, unused-ignore]

    launch = JITFunction.run
    reported: list[tuple[dict[Any, Any], Any]] = []

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launch(self, *arguments, grid=grid, warmup=True, **options)

    def hook(*, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found(Compilation(fn.module, fn.name, _reduced(compile["specialization_data"])))
        # A placeholder for the compiled kernel, which makes the next launch of this kind ten times faster.
        compiled = fn.jit_function.device_caches[compile["device"]][0]
        compiled[key] = object()
        reported.append((compiled, key))
        return True  # ends the launch before compilation

    before = knobs.runtime.jit_cache_hook
    JITFunction.run, knobs.runtime.jit_cache_hook = run, hook
    try:
        yield
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = launch, before
        for compiled, key in reported:
            del compiled[key]


def compilations(schedules: Iterable[Schedule]) -> list[Compilation]:
    """The kernels that schedules launch, each once; nothing runs, and no tensor is needed."""
    found: dict[Compilation, None] = {}  # in the order of launches
    with dry_launches(lambda job: found.setdefault(job)):
        for schedule in schedules:
            for launch in schedule.launches:
                launch.kernel.run(*schedule.stand_ins(launch), grid=launch.grid, warmup=True, **launch.options)
    return list(found)


def current_target() -> Target:
    """The target of the current device."""
    from triton.runtime import driver  # type: ignore[import-not-found, unused-ignore]

    target = driver.active.get_current_target()
    return Target(target.backend, target.arch, target.warp_size)


def warm_up(schedules: Iterable[Schedule], notify: Notify | None = None) -> int:
    """Compile the kernels of schedules for the current device; returns how many were missing."""
    return compile_all(compilations(schedules), current_target(), notify=notify) if is_enabled() else 0


def warm_up_by_run(run: Callable[[], None], notify: Notify | None = None) -> int:
    """Compile the kernels that `run` launches for the current device; returns how many were missing.

    run: called once inside `dry_launches`. If it fails, the kernels found so far are compiled and the error is raised.
    """
    with _compiler(current_target(), notify=notify) as compiler, dry_launches(compiler.submit):
        run()
    return compiler.num_missing


@contextmanager
def failure_reported(notify: Notify) -> Iterator[None]:
    """Wraps a warm-up: logs an error instead of raising it, since kernels are also compiled on first use."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        notify(f"kernels were not compiled in parallel ({reason}); they are compiled on first use, one by one")


def compile_all(
    jobs: Iterable[Compilation], target: Target, processes: int | None = None, notify: Notify | None = None
) -> int:
    """Compile kernels that no earlier warm-up compiled into Triton's cache; returns their number."""
    with _compiler(target, processes, notify) as compiler:
        for job in jobs:
            compiler.submit(job)
    return compiler.num_missing


_early: Compiler | None = None
"""A pool whose workers are already running; the next warm-up uses it."""
MAX_EARLY = 32
"""Workers started before the number of missing kernels is known."""


@contextmanager
def workers_ready(wanted: bool = True) -> Iterator[None]:
    """Starts workers on entry if `wanted` and no warm-up has compiled anything yet.

    The first warm-up in the context uses them. Otherwise they end with the context. A failure to start them is ignored
    here and reported by the warm-up.
    """
    global _early
    own: Compiler | None = None
    try:
        if wanted and _early is None and is_enabled():
            with suppress(OSError):
                if _is_cold():
                    _early = own = Compiler(None)
                    own.start(MAX_EARLY)
        yield
    finally:
        if own is not None and _early is own:
            _early = None
            own.close()


def _is_cold() -> bool:
    """Whether the cache has no marker file. With some, few kernels are missing, and workers start when needed."""
    return all(mark.name == LOCK for mark in _marks().iterdir())


def _compiler(target: Target, processes: int | None = None, notify: Notify | None = None) -> Compiler:
    """The pool whose workers are already running, or a new one."""
    global _early
    if _early is None or processes is not None:
        return Compiler(target, processes, notify)
    found, _early = _early, None
    found.assign(target, notify)
    return found


class Compiler:
    """Worker processes that compile kernels into Triton's cache; leaving the context waits for them.

    Workers start when the first missing kernel is submitted, unless `start` was called before. Processes that share a
    cache (ranks, several searches) warm up one at a time: the second one finds the kernels of the first. A kernel that
    cannot be compiled is left to its first launch, which reports the reason.

    target: None if set later by `assign`. processes: maximum number of workers; None: one per core.
    """

    def __init__(self, target: Target | None, processes: int | None = None, notify: Notify | None = None) -> None:
        self.num_missing = 0
        self._target, self._notify = target, notify
        self._most = processes or usable_cores()
        self._marks = _marks()
        self._workers: list[subprocess.Popen[bytes]] = []
        self._resources = ExitStack()  # the lock, the folder of jobs, the pipe
        self._is_alone = False
        self._folder: Path | None = None
        self._began = time.perf_counter()

    def start(self, most: int) -> None:
        """Start up to `most` workers, which wait for jobs."""
        folder = self._open()
        for _ in range(min(most, self._most)):
            self._workers.append(self._start(folder))

    def assign(self, target: Target, notify: Notify | None) -> None:
        self._target, self._notify, self._began = target, notify, time.perf_counter()

    def submit(self, job: Compilation) -> None:
        """Have a worker compile `job` unless an earlier warm-up did."""
        assert self._target is not None
        mark = self._marks / _digest(job, self._target)
        if mark.exists():
            return
        if not self._is_alone:
            self._resources.enter_context(_alone(self._marks / LOCK))
            self._is_alone = True
            if mark.exists():  # another process has compiled it meanwhile
                return
        folder = self._folder or self._open()
        number, self.num_missing = self.num_missing, self.num_missing + 1
        (folder / str(number)).write_text(json.dumps([self._target, job]))
        # Writes this small are atomic: no worker reads a partial number.
        os.write(self._queue, number.to_bytes(4, "big"))
        if len(self._workers) < self._most:
            self._workers.append(self._start(folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=self.num_missing > 0 and (kind is None or issubclass(kind, Exception)))

    def close(self, wait: bool = False) -> None:
        """Stop the workers. wait: finish submitted jobs first."""
        with self._resources:
            if self._folder is None:
                return
            os.write(self._queue, END * len(self._workers))
            try:
                if self._notify is not None and self.num_missing:
                    cores = count_of(min(len(self._workers), self.num_missing), "core")
                    self._notify(f"compiling {count_of(self.num_missing, 'kernel')} on {cores}")
                if wait:  # not after Ctrl-C
                    end = time.monotonic() + MAX_SECONDS
                    for worker in self._workers:
                        with suppress(subprocess.TimeoutExpired):
                            worker.wait(max(0.0, end - time.monotonic()))
            finally:
                for worker in self._workers:
                    worker.kill()  # no effect if it has exited
                    worker.wait()
        if self._notify is not None and self.num_missing:
            seconds = time.perf_counter() - self._began
            self._notify(f"compiled {count_of(self.num_missing, 'kernel')} in {seconds:.0f} s")

    def _open(self) -> Path:
        folder = self._folder = Path(self._resources.enter_context(TemporaryDirectory(prefix="softcell-")))
        # All workers read the same pipe: the next idle one takes the next number.
        self._numbers, self._queue = os.pipe()
        for end in (self._numbers, self._queue):
            self._resources.callback(os.close, end)
        return folder

    def _start(self, folder: Path) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(one for one in sys.path if one)
        return subprocess.Popen(
            [sys.executable, "-m", "softcell.kernels.warm_up", str(folder)],
            stdin=self._numbers,
            stdout=subprocess.DEVNULL,
            # One thread each, since there is one worker per core.
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )


def compile_one(job: Compilation, target: Target) -> Any:
    """Compiles one kernel with Triton; no device is needed."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found, unused-ignore]
    from triton.compiler import ASTSource, compile  # type: ignore[import-not-found, unused-ignore]

    kernel = getattr(importlib.import_module(job.module), job.name)
    given = json.loads(job.specialization)
    values = map(_tuples, given["constant_vals"])  # JSON has lists instead of tuples
    constants = dict(zip(map(tuple, given["constant_keys"]), values, strict=True))
    attributes = dict(zip(map(tuple, given["attrs_keys"]), given["attrs_vals"], strict=True))
    options = {name: _tuples(value) for name, value in given["options"].items()}
    source = ASTSource(kernel, given["signature"], constants, attributes)
    return compile(source, target=GPUTarget(*target), options=options)


def build_launcher(job: Compilation, kernel: Any, claims: Path) -> None:
    """Build the launcher of a compiled kernel: a C module, which Triton builds for every list of argument types.

    claims: a folder in which workers mark the launchers they build, so that each is built once.
    """
    from triton.backends.nvidia.driver import CudaLauncher  # type: ignore[import-not-found, unused-ignore]

    given = json.loads(job.specialization)
    types = repr((list(given["signature"].values()), given["constant_keys"]))
    try:
        (claims / hashlib.sha256(types.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return
    CudaLauncher(kernel.src, kernel.metadata)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


def _reduced(specialization: str) -> str:
    """A specialization without its key in Triton's in-memory cache, which repeats the other fields."""
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

    # Triton's hash of the source of the kernel and of all functions that it calls.
    source = getattr(importlib.import_module(job.module), job.name).cache_key
    return hashlib.sha256(repr((triton.__version__, source, tuple(target), tuple(job))).encode()).hexdigest()


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Waits until no other process on this machine is in this context; does not wait if files cannot be locked."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with lock.open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the process ends, for any reason
        yield


def _work(folder: Path) -> None:
    """The main loop of a worker: reads job numbers and compiles these jobs until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C also reaches workers; they exit without a traceback
    marks = _marks()
    importlib.import_module("triton.compiler")  # import before the first job, while an early worker is idle
    while (number := os.read(sys.stdin.fileno(), 4)) not in (END, b""):
        target, job = json.loads((folder / str(int.from_bytes(number, "big"))).read_text())
        target, job = Target(*target), Compilation(*job)
        try:
            kernel = compile_one(job, target)
        except Exception as error:  # the first launch reports the full error
            print(f"{job.name} was not compiled ahead: {type(error).__name__}", file=sys.stderr)
            continue
        (marks / _digest(job, target)).touch()
        if target.backend == "cuda":
            with suppress(Exception):  # no driver or C compiler; the first launch reports the full error
                build_launcher(job, kernel, folder)


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
