"""The time of a run: how long a job will take, measured on its own first steps, and ending a search that is late."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from softcell.app.pipeline.plan import Plan
from softcell.engine.task import EpochEnded, Event, OnEvent, Started, Stepped
from softcell.errors import UserError
from softcell.methods import METHODS, Method, UntrainedSampler
from softcell.search import SearchRecipe
from softcell.settings import build
from softcell.spaces import build_space
from softcell.text import clock, count_of

MOST_SLOWNESS = 30.0
READ_EVERY, WINDOW = 0.2, 2.0
"""Seconds between two readings of the load, and CPU seconds over which it is measured: more time on a busy machine."""
ENOUGH_STEPS, ENOUGH_ENDS = 100, 3
"""A measurement ends early after this number of steps and epochs: on a GPU they take less than a second."""
EVALUATION = 0.3
"""Time of a forward pass relative to a training step, assumed if no epoch ended during the measurement."""


class TooLittleTimeError(UserError):
    """The time that is left does not suffice for the fewest epochs of the smallest network."""


@dataclass(frozen=True, slots=True)
class JobTime:
    """Seconds of the start, per epoch (steps, evaluation, checkpoint), and after the last epoch.

    The start is what comes before the first step, and what the first epoch takes longer than others: allocation,
    compilation and the recording of steps.
    """

    startup: float
    epoch: float
    tail: float = 0.0

    def total(self, epochs: int) -> float:
        return self.startup + epochs * self.epoch + self.tail

    def epochs_in(self, seconds: float) -> int:
        """How many whole epochs fit into `seconds`; may be 0."""
        return max(0, int((seconds - self.startup - self.tail) / max(self.epoch, 1e-6)))


MOST_START, MOST_START_GPU = 1.0, 4.0
"""Seconds that are planned for the start of a training, at most, on a CPU and on a GPU, which records its steps."""


def expected_start(measured: JobTime, *, is_gpu: bool) -> float:
    """Seconds before the first step of a training, after a first one was measured.

    The first one also reads the data, initialises the device, compiles kernels and chooses the number of threads.
    """
    return min(measured.startup, MOST_START_GPU if is_gpu else MOST_START)


class Load:
    """How busy the machine is now: seconds per CPU second of this thread, over the last `WINDOW` of its CPU seconds.

    1 on an idle machine, 4 if three others compete for the same core. Linux counts the seconds in which a thread waits
    for a core. They do not include waiting for a disk or for other threads. Elsewhere the wall-clock time of the whole
    process is compared with its CPU time, from `began` on.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._samples = [(0.0, 0.0)]  # CPU seconds and seconds of waiting, each since the start of the thread
        self._found, self._read = 1.0, -math.inf

    def slowness(self) -> float:
        now = time.perf_counter()
        if now - self._read >= READ_EVERY:  # it is asked several times per training step
            self._found, self._read = self._measured(), now
        return self._found

    def _measured(self) -> float:
        cpu, waited = self._counters()
        if cpu - self._samples[-1][0] > WINDOW / 4:
            self._samples = [*self._samples[-3:], (cpu, waited)]
        ran, late = cpu - self._samples[0][0], waited - self._samples[0][1]
        return min(MOST_SLOWNESS, max(1.0, 1.0 + late / max(ran, 1e-3)))

    def _counters(self) -> tuple[float, float]:
        try:
            ran, waited, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
            if int(ran):
                return int(ran) / 1e9, int(waited) / 1e9
        except (OSError, ValueError):
            pass
        cpu = time.process_time()
        return cpu, max(0.0, time.perf_counter() - self._began - cpu)


FINAL_SHARE = 0.6
"""Least share of the time for the final training, unless starting and ending alone take more than the rest."""
SAFE = 0.97
"""Share of the time that is planned; the end of the process takes seconds on a busy machine."""
NEEDED = 1.0
"""CPU seconds for latency, report, weights and Python files after the trainings; a busy machine takes longer."""
ONNX = 3.5
"""CPU seconds of the ONNX export, which is left out if there is no time for it."""
MOST_RESERVED = 0.1
"""Most of the time that is reserved for both, as a share; but `NEEDED` is always reserved."""


class RunTime:
    """The time of a whole run: what is reserved for its end, and when the final training begins and ends.

    `for_own`: seconds that measuring the user's own model takes at the end. What is reserved depends on the load and
    changes with it, so that a training ends earlier if its machine becomes busy.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.for_own = plan, 0.0
        self._load = Load(plan.began)

    @property
    def slowness(self) -> float:
        return self._load.slowness()

    @property
    def end(self) -> float:
        """Seconds from the start at which the final training must be over: report and exports follow."""
        return SAFE * self.plan.request.time - self.reserved()

    @property
    def share(self) -> float:
        """Least share of the time for the final training; more in a run for one of several budgets."""
        return float((self.plan.search or {}).get("share", FINAL_SHARE))

    @property
    def final_from(self) -> float:
        """Seconds from the start at which the final training begins at the latest."""
        plan = self.plan
        return self.end - max(self.share * plan.request.time, float((plan.choice or {}).get("final", 0.0)))

    def reserved(self) -> float:
        """Seconds for what follows the final training."""
        slow, whole = self.slowness, NEEDED + ONNX
        most = max(whole, MOST_RESERVED * self.plan.request.time)
        return max(NEEDED * slow, min(whole * slow, most)) + self.for_own

    def has_time_for_onnx(self) -> bool:
        return self.plan.used() + ONNX * self.slowness <= self.plan.request.time

    def used_in_words(self) -> str:
        return f"{clock(self.plan.used())} of {clock(self.plan.request.time)} used"


class _MeasuredError(Exception):
    """Ends a measurement from within an event."""


class _Stopwatch:
    """Times steps and epochs until enough of them, or `seconds`, have passed since the first step.

    Steps of a GPU are asynchronous: only whole epochs are timed exactly, because their metrics are read at the end.
    """

    def __init__(self, seconds: float) -> None:
        self.began = time.perf_counter()
        self.seconds = seconds
        self.first: float | None = None  # end of the first step, which includes allocation and graph capture
        self.last = self.began
        self.steps_seen, self.in_steps = 0, 0.0
        self.in_ends, self.ends = 0.0, list[float]()
        self.steps_per_epoch = 1

    def __call__(self, event: Event) -> None:
        now = time.perf_counter()
        match event:
            case Started():
                self.last = now
            case Stepped():
                self.steps_per_epoch = event.steps
                if self.first is None:
                    self.first = now
                else:
                    self.steps_seen, self.in_steps = self.steps_seen + 1, self.in_steps + now - self.last
                self.last = now
                self._stop_when_measured(now)
            case EpochEnded():
                self.in_ends += now - self.last
                self.ends.append(now)
                self.last = now
                self._stop_when_measured(now)
            case _:
                pass

    def _stop_when_measured(self, now: float) -> None:
        if self.first is None or self.steps_seen < 2:
            return
        if now - self.first >= self.seconds or (self.steps_seen >= ENOUGH_STEPS and len(self.ends) >= ENOUGH_ENDS):
            raise _MeasuredError

    def job_time(self, evaluated: float, tested: float) -> JobTime:
        """`evaluated`, `tested`: batches evaluated after each epoch and after the last, per training batch."""
        assert self.first is not None
        step = self.in_steps / self.steps_seen if self.steps_seen else self.first - self.began
        steps = self.steps_per_epoch * step
        tail = steps * tested * EVALUATION + 0.5
        if len(self.ends) > 1:  # the first epoch includes the start
            epoch = (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)
            return JobTime(max(0.0, self.ends[0] - self.began - epoch), epoch, tail)
        end = self.in_ends if self.ends else steps * evaluated * EVALUATION
        return JobTime(self.first - self.began, steps + end, tail)


def measure_job(
    job: Callable[[Path, OnEvent], Any], scratch: Path, seconds: float, *, evaluated: float, tested: float
) -> JobTime:
    """Runs `job` in a scratch folder for about `seconds` after its first step, then deletes the folder."""
    watch = _Stopwatch(seconds)
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        result = job(scratch, watch)
        if getattr(result, "exit_code", 0):
            raise KeyboardInterrupt  # the job handled the signal itself
    except _MeasuredError:
        pass
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return watch.job_time(evaluated, tested)


SAMPLES = "samples"
"""The setting of a sampler for the number of architectures it proposes."""


class SearchTimeoutError(Exception):
    """A search has exceeded its time; `epochs` of it are done and saved."""

    def __init__(self, epochs: int) -> None:
        super().__init__(epochs)
        self.epochs = epochs


def num_networks(recipe: SearchRecipe) -> int:
    """How many networks a search trains in sequence, each for the recipe's epochs; 1 for a supernet."""
    kind = METHODS.get(recipe.method)
    if issubclass(kind, Method):
        return 1
    layout = build_space(recipe.space, recipe.space_settings).layout()
    settings: Any = build(kind.Settings, recipe.method_settings, f"method {recipe.method}")
    return kind(layout, settings, recipe.seed).num_samples


def describe_length(recipe: SearchRecipe) -> str:
    """`30 epochs`, or `4 architectures of 30 epochs`."""
    epochs = count_of(recipe.epochs, "epoch")
    kind = METHODS.get(recipe.method)
    if issubclass(kind, Method):
        return epochs
    if issubclass(kind, UntrainedSampler):
        return count_of(num_networks(recipe), "untrained network")
    return f"{count_of(num_networks(recipe), 'architecture')} of {epochs}"


def stop_when_late(listener: OnEvent, is_late: Callable[[], bool], recipe: SearchRecipe) -> OnEvent:
    """Forwards events to `listener`; ends a late search after its current epoch, which is saved by then."""
    num_epochs = recipe.epochs * num_networks(recipe)

    def on_event(event: Event) -> None:
        listener(event)
        if isinstance(event, EpochEnded) and event.epoch + 1 < num_epochs and is_late():
            done = event.epoch + 1
            if shortened(recipe, done) != recipe:
                raise SearchTimeoutError(done)

    return on_event


def shortened(recipe: SearchRecipe, done: int) -> SearchRecipe:
    """The recipe of a search that ends as soon as possible after `done` epochs, counted over all its networks."""
    if issubclass(METHODS.get(recipe.method), Method):
        return replace(recipe, epochs=done)
    if SAMPLES not in recipe.method_settings:
        return recipe  # a sampler from a plugin, whose number of proposals cannot be reduced
    complete = done // recipe.epochs
    settings = {**recipe.method_settings, SAMPLES: max(1, complete)}
    # A network is evaluated after its last epoch, so the first network needs one more epoch.
    epochs = recipe.epochs if complete else min(recipe.epochs, done + 1)
    return replace(recipe, epochs=epochs, method_settings=settings)
