"""Compiles the Triton kernels of a step before it runs, in as many processes as there are cores.

The first step of a fused network launches about a hundred different kernels, and Triton compiles each when it is first
launched: one after the other. Here they are known in advance. Worker processes compile them into Triton's cache on
disk, where the first step finds them. There are two ways to find them:

    warm_up           training: the schedules of derived networks list their launches
    warm_up_by_run    searches, and networks without schedules: a dry run of the step, in which nothing is launched;
                      workers compile while it still runs

`workers_ready` starts the workers earlier, if the cache is empty: loading PyTorch and Triton takes them seconds, in
which data and networks can be prepared.

`SOFTCELL_COMPILE_AHEAD=0` disables all of it: kernels are then compiled on first use.
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
"""The folder in Triton's cache with an empty file for everything that a warm-up has compiled."""
LOCK = "lock"
"""The file in that folder that one process at a time holds."""
SWITCH = "SOFTCELL_COMPILE_AHEAD"
MAX_SECONDS = 600.0
"""A worker that takes longer is ended; its kernels are compiled on first use."""
END = b"\xff" * 4
"""In place of a job's number: a worker that reads it ends."""
Notify = Callable[[str], None]


class Compilation(NamedTuple):
    """A kernel, by module and name, and what it is compiled for: Triton's JSON of types, constants and options."""

    module: str
    name: str
    specialization: str


class Target(NamedTuple):
    """The compilation target, as in `triton.backends.compiler.GPUTarget`."""

    backend: str
    arch: int
    warp_size: int


def is_enabled() -> bool:
    """Whether kernels are compiled before they are needed; Triton's interpreter compiles none."""
    return os.environ.get(SWITCH, "1") != "0" and os.environ.get("TRITON_INTERPRET") != "1"


@contextmanager
def dry_launches(found: Callable[[Compilation], None]) -> Iterator[None]:
    """Within this context no kernel is launched or compiled; `found` receives what has to be compiled, each once.

    Outputs of kernels stay as they were allocated: nothing may depend on their values. Kernels that this process has
    compiled before are not reported, and are not launched either: they could take uninitialised values for indices.
    """
    from triton import knobs  # type: ignore[import-not-found, unused-ignore]
    from triton.runtime.jit import JITFunction  # type: ignore[import-not-found, unused-ignore]

    launch = JITFunction.run
    reported: list[tuple[dict[Any, Any], Any]] = []

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launch(self, *arguments, grid=grid, warmup=True, **options)

    def hook(*, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found(Compilation(fn.module, fn.name, _reduced(compile["specialization_data"])))
        # A placeholder for the compiled kernel: the next launch like this one is then ten times faster.
        compiled = fn.jit_function.device_caches[compile["device"]][0]
        compiled[key] = object()
        reported.append((compiled, key))
        return True  # ends the launch before it compiles

    before = knobs.runtime.jit_cache_hook
    JITFunction.run, knobs.runtime.jit_cache_hook = run, hook
    try:
        yield
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = launch, before
        for compiled, key in reported:
            del compiled[key]


def compilations(schedules: Iterable[Schedule]) -> list[Compilation]:
    """The kernels that schedules need compiled, each once; nothing runs, and no tensor is needed."""
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
    """Compile what the launches of schedules need on the current device; returns how many kernels were missing."""
    return compile_all(compilations(schedules), current_target(), notify=notify) if is_enabled() else 0


def warm_up_by_run(run: Callable[[], None], notify: Notify | None = None) -> int:
    """Compile what `run` launches on the current device; returns how many kernels were missing.

    run: called once within `dry_launches`. If it fails, what it launched before is compiled and the error is raised.
    """
    with _compiler(current_target(), notify=notify) as compiler, dry_launches(compiler.submit):
        run()
    return compiler.num_missing


@contextmanager
def failure_reported(notify: Notify) -> Iterator[None]:
    """Around a warm-up: reports an error instead of raising it, since kernels are compiled on first use too."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        notify(f"kernels were not compiled in parallel ({reason}); they are compiled on first use, one by one")


def compile_all(
    jobs: Iterable[Compilation], target: Target, processes: int | None = None, notify: Notify | None = None
) -> int:
    """Compile into Triton's cache what no earlier warm-up compiled; returns how many kernels that were."""
    with _compiler(target, processes, notify) as compiler:
        for job in jobs:
            compiler.submit(job)
    return compiler.num_missing


_early: Compiler | None = None
"""Its workers run already; the next warm-up takes it."""
MAX_EARLY = 32
"""Workers that are started before it is known how many kernels are missing."""


@contextmanager
def workers_ready(wanted: bool = True) -> Iterator[None]:
    """Within this context workers are started at once if `wanted` and no warm-up has compiled anything yet.

    The first warm-up in the context uses them. If there is none, they end with the context. Where they cannot be
    started, nothing happens: the warm-up itself reports why.
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
    """Whether the cache has no mark. If it has some, few kernels are missing, and their workers start when needed."""
    return all(mark.name == LOCK for mark in _marks().iterdir())


def _compiler(target: Target, processes: int | None = None, notify: Notify | None = None) -> Compiler:
    """The pool whose workers already run, or a new one."""
    global _early
    if _early is None or processes is not None:
        return Compiler(target, processes, notify)
    found, _early = _early, None
    found.assign(target, notify)
    return found


class Compiler:
    """Worker processes that compile kernels into Triton's cache, within a context whose end waits for them.

    Workers start with the first kernels that are submitted and missing, unless `start` was called before. Processes
    that share a cache (ranks, several searches) take turns: the second one finds what the first has compiled. A kernel
    that cannot be compiled is left to its first launch, which reports the reason.

    target: None: given later, by `assign`. processes: maximum number of workers; None: one per core.
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
        """Start up to `most` workers, which then wait for jobs."""
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
            if mark.exists():  # another process has compiled it in the meantime
                return
        folder = self._folder or self._open()
        number, self.num_missing = self.num_missing, self.num_missing + 1
        (folder / str(number)).write_text(json.dumps([self._target, job]))
        # So few bytes go into a pipe at once: no worker reads a part of a number.
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
        """End the workers. wait: for what was submitted."""
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
                    worker.kill()  # does nothing if it has ended
                    worker.wait()
        if self._notify is not None and self.num_missing:
            seconds = time.perf_counter() - self._began
            self._notify(f"compiled {count_of(self.num_missing, 'kernel')} in {seconds:.0f} s")

    def _open(self) -> Path:
        folder = self._folder = Path(self._resources.enter_context(TemporaryDirectory(prefix="softcell-")))
        # All workers read one pipe: the next free one takes the next number.
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
            # One thread each: there is a worker per core.
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )


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


def build_launcher(job: Compilation, kernel: Any, claims: Path) -> None:
    """Build what launches a compiled kernel: a module in C, which Triton builds for every list of argument types.

    claims: a folder in which workers note what they build, so that each is built once.
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
    """A specialization without its key in Triton's cache in memory, which repeats the rest."""
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

    # Triton's hash of the kernel's source and of all functions that it calls.
    source = getattr(importlib.import_module(job.module), job.name).cache_key
    return hashlib.sha256(repr((triton.__version__, source, tuple(target), tuple(job))).encode()).hexdigest()


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Waits until no other process of this machine is in this context; where files cannot be locked, does not wait."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with lock.open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process, however that ends
        yield


def _work(folder: Path) -> None:
    """The main loop of a worker: reads job numbers and compiles the jobs until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches workers too; they end without a traceback
    marks = _marks()
    importlib.import_module("triton.compiler")  # before the first job, for which an early worker still waits
    while (number := os.read(sys.stdin.fileno(), 4)) not in (END, b""):
        target, job = json.loads((folder / str(int.from_bytes(number, "big"))).read_text())
        target, job = Target(*target), Compilation(*job)
        try:
            kernel = compile_one(job, target)
        except Exception as error:  # its first launch reports it in full
            print(f"{job.name} was not compiled ahead: {type(error).__name__}", file=sys.stderr)
            continue
        (marks / _digest(job, target)).touch()
        if target.backend == "cuda":
            with suppress(Exception):  # without a driver or a C compiler; the first launch reports it in full
                build_launcher(job, kernel, folder)


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
