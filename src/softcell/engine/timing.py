"""Durations and peak memory, the time limit of a run, and the faster precision for a device."""

from __future__ import annotations

import itertools
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from softcell.engine.capture import WARMUP
from softcell.engine.distributed import World, agree
from softcell.engine.session import forked_rng, set_threads
from softcell.engine.task import Task
from softcell.errors import UserError
from softcell.files import atomic_write_text
from softcell.machine import usable_cores


@dataclass(frozen=True, slots=True)
class Timing:
    """One measurement.

    `seconds` is the device's own time between the two ends on CUDA (stream order, without the host's delay in
    reading it) and wall time on the CPU; `peak_bytes` is the most that was allocated on CUDA during the
    measurement, and the process's largest resident size ever on the CPU, where the system keeps no other.

    Example:
        >>> from softcell.engine import Timing
        >>> Timing(seconds=0.5, wall_seconds=0.5, cpu_seconds=0.4, peak_bytes=1024).cpu_seconds
        0.4
    """

    seconds: float
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int


class Stopwatch:
    """Context that measures its body; read `timing` afterwards. It can be reused.

    Example:
        >>> import torch
        >>> from softcell.engine import Stopwatch
        >>> with Stopwatch(torch.device("cpu")) as watch:
        ...     total = sum(range(1000))
        >>> watch.timing.seconds >= 0
        True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._timing: Timing | None = None

    @property
    def timing(self) -> Timing:
        """The last measurement."""
        if self._timing is None:
            raise RuntimeError("a Stopwatch has a timing only after its `with` block has ended")
        return self._timing

    def __enter__(self) -> Self:
        self._timing = None
        if self.device.type == "cuda":
            # Work queued earlier must not be counted in.
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._begin.record(torch.cuda.current_stream(self.device))
        elif self.device.type == "mps":
            torch.mps.synchronize()
        self._wall = time.perf_counter()
        self._cpu = time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        if self.device.type == "cuda":
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end.record(torch.cuda.current_stream(self.device))
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        seconds = self._begin.elapsed_time(end) / 1000.0 if self.device.type == "cuda" else wall
        self._timing = Timing(seconds, wall, cpu, self._peak())

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        # The unit differs: kibibytes on Linux, bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class TimeBudget:
    """The time of a run: how much is used, over all its processes, and how much is kept for what follows its steps.

    `used` is set by the loop between two steps, to the same value on all ranks, and `preparing` before the first one.
    Up to `startup` of the seconds before the first step are granted in addition, so that training runs whose networks
    take different times to start have equal times to learn. `later`: how many seconds later than planned the steps may
    end, called between two steps; negative if they must end earlier, because what follows the run takes longer than
    expected. `evaluating` and `saving` are the seconds that evaluation and a checkpoint after the last step will take,
    as measured so far.
    """

    def __init__(self, seconds: float, startup: float = 0.0, later: Callable[[], float] | None = None) -> None:
        self._granted, self._startup, self._later = seconds, startup, later
        self.used = self.preparing = self.evaluating = self.saving = 0.0
        self._before, self._began = 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """The whole time, with the part of the preparation that is granted in addition."""
        return self._granted + min(self._startup, self.preparing)

    def resume(self, state: Mapping[str, float]) -> None:
        """Count from the seconds of earlier processes; the loop adds those since the start of this one."""
        self._before = self.used = state["used"]  # not `elapsed()`, which differs between ranks
        self.preparing = state["preparing"]

    def state_dict(self) -> dict[str, float]:
        return {"used": self.elapsed(), "preparing": self.preparing}

    def elapsed(self) -> float:
        """The seconds used up to now."""
        return self._before + time.perf_counter() - self._began

    @property
    def for_steps(self) -> float:
        """The seconds without those that are kept for evaluation, checkpoint and files.

        At least half: one slow measurement must not end a run, and a time shorter than a test leads to a warning.
        """
        kept = self.evaluating + self.saving + min(MAX_FILE_SECONDS, FILE_SHARE * self.seconds)
        kept -= 0.0 if self._later is None else self._later()
        return self.seconds - min(kept, self.seconds / 2)

    @property
    def progress(self) -> float:
        """The share of the time for steps that is used, 0 to 1, counted from the first step."""
        if self.is_over:
            return 1.0
        return max(0.0, (self.used - self.preparing) / (self.for_steps - self.preparing))

    @property
    def is_over(self) -> bool:
        return self.used >= self.for_steps


MAX_FILE_SECONDS, FILE_SHARE = 0.5, 0.02
"""Weights, predictions and `run.json` are written after the last step: half a second, or this share of a short time."""


class Pace:
    """Estimates the time left from the mean duration of steps and of epoch ends in this process."""

    def __init__(self) -> None:
        self._steps = 0
        self._in_steps = 0.0
        self._ends = 0
        self._in_ends = 0.0
        self._warm = False
        self._last = time.perf_counter()

    def mark(self) -> None:
        """Start measuring from now."""
        self._last = time.perf_counter()

    def stepped(self) -> None:
        """A step has ended. The first one is not counted: it includes allocation, tuning or compilation."""
        seconds = self._since()
        if self._warm:
            self._steps += 1
            self._in_steps += seconds
        self._warm = True

    def ended_epoch(self) -> None:
        """Evaluation and saving after an epoch's last step have ended."""
        self._ends += 1
        self._in_ends += self._since()

    def seconds_left(self, steps: int, epochs: int) -> float | None:
        """Return the time for `steps` more steps and `epochs` more ends of epochs; None while unknown."""
        if self._steps == 0:
            return None
        per_end = self._in_ends / self._ends if self._ends else 0.0
        return steps * self._in_steps / self._steps + epochs * per_end

    def _since(self) -> float:
        now = time.perf_counter()
        seconds = now - self._last
        self._last = now
        return seconds


CANDIDATES = ("float32", "bfloat16")
GAIN = 1.1  # bfloat16 must be this much faster: a tie goes to float32
TIMED = 5
BUSY = 2.0  # wall time of a step on one thread, in CPU time
HOPELESS = 5.0  # so much slower is not measured again


def choose_precision(job: str, world: World, make: Callable[[str], Task], notify: Callable[[str], None]) -> str:
    """The precision for `job` on this run's device: found by timing real steps once, remembered per device and job.

    bfloat16 helps where memory traffic and matrix units decide, and costs time where it is emulated, so it is tried.
    The choice is made before a run and becomes part of its recipe: it is made once per run.

    job: the key by which jobs count as equal. make: the task computing in a precision; it is discarded, and the random
    numbers that it draws are given back.
    """
    if world.device.type != "cuda":
        return "float32"
    known = _remembered()
    key = f"{torch.cuda.get_device_name(world.device)}; torch {torch.__version__}; {job}"
    if key in known:
        return known[key]
    if world.size > 1:
        notify("precision=auto: this device has not been timed yet, and timing needs a single process; using float32")
        return "float32"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float32"
    times = {}
    for precision in CANDIDATES:
        with forked_rng(world.device):
            times[precision] = time_steps(make(precision), world.device)
        torch.cuda.empty_cache()
    chosen = "bfloat16" if times["bfloat16"] * GAIN < times["float32"] else "float32"
    each = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in times.items())
    notify(f"precision=auto: one step takes {each} on this device; using {chosen} (remembered in {cache_file()})")
    _remember(key, chosen)
    return chosen


def choose_threads(task: Task, notify: Callable[[str], None], most: float) -> int:
    """One CPU thread or one per core, whichever makes the steps of `task` faster, which is discarded; sets it.

    On a busy machine threads wait for each other, so that two may be slower than one. Both are timed alternately, so
    that a changing load affects both, until about `most` seconds have passed. Only for runs that depend on the
    clock anyway: threads change rounding.
    """
    cores, began = usable_cores(), time.perf_counter()
    if cores == 1:
        return set_threads(1)
    rounds: list[tuple[float, float]] = []
    with torch.random.fork_rng(devices=[]):
        task.begin_epoch(0)
        batches = itertools.cycle(list(itertools.islice(task.batches(0, 0), 2)))

        def seconds(threads: int) -> float:
            set_threads(threads)
            batch, start = next(batches), time.perf_counter()
            task.step(batch)
            return time.perf_counter() - start

        cpu = time.process_time()
        alone = seconds(1)
        if alone > BUSY * (time.process_time() - cpu):
            # A step with all threads would wait for other programs, for seconds where this one took milliseconds.
            notify("threads=auto: other programs use the CPU cores; using 1")
            return set_threads(1)
        while len(rounds) < 1 + TIMED:
            alone, all_ = seconds(1), seconds(cores)
            rounds.append((alone, all_))
            if all_ > HOPELESS * alone or time.perf_counter() - began > most:
                break
    # The first steps include allocation.
    alone, all_ = (statistics.median(column) for column in zip(*(rounds[1:] or rounds), strict=True))
    chosen = cores if all_ * GAIN < alone else 1
    notify(
        f"threads=auto: one step takes {1e3 * alone:.1f} ms with 1 CPU thread and {1e3 * all_:.1f} ms with {cores}; "
        f"using {chosen}"
    )
    return set_threads(chosen)


def time_steps(task: Task, device: torch.device) -> float:
    """Median seconds of a step of a new task, after the steps in which it is captured."""
    task.begin_epoch(0)
    # Made beforehand, so that no decoding of files is timed; small data may have fewer batches than are needed.
    batches = itertools.cycle(list(itertools.islice(task.batches(0, 0), WARMUP + TIMED)))
    # After the eager steps one step is captured and one replayed.
    for batch in itertools.islice(batches, WARMUP + 2):
        task.step(batch)
    seconds = []
    for batch in itertools.islice(batches, TIMED):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        task.step(batch)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def seconds_per_step(task: Task, world: World, most: float) -> float:
    """Seconds of a step of a new task, which is discarded; the same on all ranks.

    The random numbers that it draws are given back. On a CPU, steps are timed for about `most` seconds at most.
    """
    with forked_rng(world.device):
        if world.device.type == "cuda":
            found = time_steps(task, world.device)
        else:
            task.begin_epoch(0)
            batches = itertools.cycle(list(itertools.islice(task.batches(0, 0), 2)))
            task.step(next(batches))  # includes allocation
            times, began = list[float](), time.perf_counter()
            # Ranks wait for each other in a step, so all of them must make the same number.
            while not times or (len(times) < TIMED and (world.size > 1 or time.perf_counter() - began < most)):
                start = time.perf_counter()
                task.step(next(batches))
                times.append(time.perf_counter() - start)
            found = statistics.median(times)
    # At least 1, because callers divide by the result.
    (microseconds,) = agree([max(1, int(1e6 * found))], world)
    return microseconds / 1e6


def cache_file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "softcell" / "precision.json"


def _remembered() -> dict[str, str]:
    """Earlier results; an unreadable file counts as empty."""
    try:
        data: Any = json.loads(cache_file().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict):
        return {}
    return {str(key): value for key, value in data.items() if value in CANDIDATES}


def _remember(key: str, precision: str) -> None:
    file = cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, json.dumps({**_remembered(), key: precision}, indent=2) + "\n")
    except (OSError, UserError):  # `atomic_write_text` turns a failed write into a `UserError`
        pass  # a full disk, or a home folder that is not writable: the next run times again
