"""How long a search or training will take, from some of its own steps; and how many epochs fit into a time."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softcell.engine.task import EpochEnded, Event, OnEvent, Started, Stepped

MOST_SLOWNESS = 4.0
EVALUATION = 0.3
"""A forward pass beside a whole training step, where no end of an epoch was seen."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: to the first step, of an epoch (steps, evaluation, checkpoint), and after the last one."""

    startup: float
    epoch: float
    tail: float = 0.0

    def total(self, epochs: int) -> float:
        return self.startup + epochs * self.epoch + self.tail

    def epochs_in(self, seconds: float) -> int:
        """How many whole epochs fit; may be 0."""
        return max(0, int((seconds - self.startup - self.tail) / max(self.epoch, 1e-6)))


def slowness(began: float) -> float:
    """Seconds of the clock since `began` for one of the processor: 1 on a machine of our own, more on a busy one.

    Bounded, since a process that waits for its disk has used no processor either.
    """
    return min(MOST_SLOWNESS, max(1.0, (time.perf_counter() - began) / max(time.process_time(), 1e-3)))


class _EnoughError(Exception):
    """Ends a probe from within its events."""


class _Watch:
    """Notes when steps and epochs end, until `seconds` of them have been seen."""

    def __init__(self, seconds: float) -> None:
        self.began = time.perf_counter()
        self.seconds = seconds
        self.first: float | None = None  # the end of the first step, which pays for allocation and recording
        self.last = self.began
        self.steps_seen, self.in_steps = 0, 0.0
        self.ends_seen, self.in_ends = 0, 0.0
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
                self._stop_if_enough(now)
            case EpochEnded():
                self.ends_seen, self.in_ends = self.ends_seen + 1, self.in_ends + now - self.last
                self.last = now
                self._stop_if_enough(now)
            case _:
                pass

    def _stop_if_enough(self, now: float) -> None:
        if self.first is not None and self.steps_seen >= 2 and now - self.first >= self.seconds:
            raise _EnoughError

    def pace(self, evaluated: float, tested: float) -> Pace:
        """`evaluated`, `tested`: batches measured after each epoch and after the last, per batch that is learned."""
        assert self.first is not None
        step = self.in_steps / self.steps_seen if self.steps_seen else self.first - self.began
        steps = self.steps_per_epoch * step
        end = self.in_ends / self.ends_seen if self.ends_seen else steps * evaluated * EVALUATION
        return Pace(self.first - self.began, steps + end, steps * tested * EVALUATION + 0.5)


def probe(
    job: Callable[[Path, OnEvent], Any], scratch: Path, seconds: float, *, evaluated: float, tested: float
) -> Pace:
    """Runs `job` in a scratch folder for about `seconds` after its first step, and forgets what it learned."""
    watch = _Watch(seconds)
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        result = job(scratch, watch)
        if getattr(result, "exit_code", 0):
            raise KeyboardInterrupt  # the job took the signal for itself
    except _EnoughError:
        pass
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return watch.pace(evaluated, tested)
