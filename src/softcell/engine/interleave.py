"""Several runs in one process: they take turns step by step, each with its own CUDA stream and random generators.

On a GPU the steps of different runs overlap; one search alone leaves the device half empty. The results of a run are
bit for bit the same as without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from softcell.engine.capture import MAX_SHARING_RUNS, own_stream

K = TypeVar("K")
T = TypeVar("T")
Steps = Generator[None, None, T]
"""The steps of a loop: it pauses after each of them, and returns how it ended."""
Running = Generator[Steps[Any], Any, T]
"""A run: it yields the steps that it needs made, is sent what these return, and returns its own result.

The caller decides whether steps of other runs come in between; the run itself does not notice.
"""


def drain(running: Running[T]) -> T:
    """Makes all steps of a run, without steps of other runs in between, and returns its result.

    The code of the run is not on the stack while steps are made; an error of a step is raised inside the run, so that
    it can record the failure and release what it holds.
    """
    try:
        steps = next(running)
        while True:
            try:
                while True:
                    next(steps)
            except StopIteration as stop:
                outcome = stop.value
            except BaseException as error:
                steps = running.throw(error)
                continue
            steps = running.send(outcome)
    except StopIteration as stop:
        result: T = stop.value
        return result


PER_RUN_STATES: list[Callable[[Any], Any]] = []
"""Further states of the process that each run has for itself: functions that return the current state and install the
one they are given; None leaves it unchanged."""


class RunState:
    """The process state of one run: torch's generators, on CUDA a stream, and `PER_RUN_STATES`."""

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.get_rng_state()
        self._own = [exchange(None) for exchange in PER_RUN_STATES]
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # torch has no default generators before this.
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self._index = torch.cuda.current_device() if device.index is None else device.index
            self._stream = own_stream(self, self._index)
            # A separate state object: a CUDA graph reads the one that was installed when it was captured.
            self._cuda: Any = torch.cuda.default_generators[self._index].clone_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Install this run's state in the process within the context."""
        cpu = torch.get_rng_state()
        torch.set_rng_state(self._cpu)
        outside = [exchange(own) for exchange, own in zip(PER_RUN_STATES, self._own, strict=True)]
        try:
            if self._stream is None:
                yield
            else:
                generator: Any = torch.cuda.default_generators[self._index]
                before = generator.graphsafe_get_state()
                generator.graphsafe_set_state(self._cuda)
                try:
                    with torch.cuda.stream(self._stream):
                        yield
                finally:
                    # Read back, because a failed capture installs another state object (`CapturedStep._record`).
                    self._cuda = generator.graphsafe_get_state()
                    generator.graphsafe_set_state(before)
        finally:
            self._own = [exchange(before) for exchange, before in zip(PER_RUN_STATES, outside, strict=True)]
            self._cpu = torch.get_rng_state()
            torch.set_rng_state(cpu)


@dataclass(slots=True)
class _Job:
    state: RunState
    running: Running[Any]
    steps: Steps[Any] | None = None

    def advance(self) -> None:
        """Makes one step; at the end of the run raises StopIteration with its result."""
        # Here and not in `Interleaved.add`: the set-up of a run draws random numbers, which must be its own.
        if self.steps is None:
            self.steps = next(self.running)
        try:
            next(self.steps)
        except StopIteration as stop:
            self.steps = self.running.send(stop.value)
        except BaseException as error:
            self.steps = self.running.throw(error)


class Interleaved(Generic[K]):
    """Runs that take turns on a device; more may be added at any time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: dict[K, _Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, key: K, start: Callable[[], Running[Any]]) -> None:
        self._jobs[key] = _Job(RunState(self._device), start())

    def turn(self) -> Iterator[tuple[K, Any]]:
        """Makes one step of every run; returns the results of those that ended, or the errors they ended with."""
        for key, job in list(self._jobs.items()):
            try:
                with job.state.active():
                    job.advance()
            except StopIteration as stop:
                del self._jobs[key]
                yield key, stop.value
            except Exception as error:
                del self._jobs[key]
                yield key, error


def interleave(starts: Sequence[Callable[[], Running[T]]], device: torch.device, at_once: int) -> list[T | Exception]:
    """Run all of `starts`, at most `at_once` at a time; return their results, or the errors they ended with, in order.

    A run that fails does not stop the others. At most `MAX_SHARING_RUNS` share a GPU, even if `at_once` is larger.
    """
    if device.type == "cuda":
        at_once = min(at_once, MAX_SHARING_RUNS)
    results: list[T | Exception] = [RuntimeError("not started")] * len(starts)
    waiting = list(enumerate(starts))
    runs: Interleaved[int] = Interleaved(device)
    while waiting or len(runs):
        while waiting and len(runs) < max(1, at_once):
            runs.add(*waiting.pop(0))
        for number, result in runs.turn():
            results[number] = result
    return results
