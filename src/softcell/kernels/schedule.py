"""When kernels are launched: schedules that are planned once and executed many times, and work on a second stream.

Planning a launch in Python (job tables, block sizes, the checks of Triton's launcher) takes longer than most kernels
run. A `Schedule` is planned from sizes only: it refers to tensors by name instead of holding them, so one schedule runs
on any tensors of these sizes, and its kernels can be compiled before any tensor exists (`warm_up`).

The kernels of a NAS-Bench-201 cell are short and do not fill a large GPU. What the rest of a backward pass does not
wait for runs on a second stream at the same time: inside a schedule by `Schedule.beside`, elsewhere by `alongside`, as
the gradients of a cell's weights do during those of the previous cell. Autograd is aware of the second stream, since
the node that receives such a gradient was created on it (`backward_on_second_stream`): it synchronises the streams
where gradients pass between them.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from softcell.kernels.backend import KeptTable, current_settings, kept_table

Tensors = dict[str, Tensor]

MAX_WAITING = 2
"""Maximum number of cells whose weight gradients may still be running; more would keep their memory longer."""

Waiting = deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]]
"""Tensors that a second stream still reads, and the events after which it no longer does."""

_waiting: dict[int, tuple[int, Waiting]] = {}
"""For each stream: the number of the backward pass, and the work that is still running."""


class Name(str):
    """The name of a tensor in a schedule, used in place of a kernel argument."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class StandIn:
    """The properties of a tensor that Triton's compiler uses."""

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        return self.offset


class Launch:
    """One kernel launch: a grid and arguments, some of which are names of tensors.

    After the first call the compiled kernel is called directly. Triton's launcher would inspect every argument again
    only to find the same kernel: sizes are constants here, and pointers must be multiples of 16 in every call.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: dict[str, int]) -> None:
        self.kernel, self.options, self.arguments = kernel, options, tuple(arguments)
        self.grid = (*grid, 1, 1)[:3]
        self._tables = [a for a in arguments if isinstance(a, KeptTable)]
        self._template = [a.tensor if isinstance(a, KeptTable) else a for a in arguments]
        self._names = [(i, str(a)) for i, a in enumerate(arguments) if isinstance(a, Name)]
        self._compiled: Callable[..., None] | None = None

    def __call__(self, tensors: Tensors) -> None:
        arguments = self._template.copy()
        for i, name in self._names:
            arguments[i] = tensors[name]
        for kept in self._tables:
            kept.await_copy()
        if self._compiled is not None:
            self._compiled(*arguments)
            return
        found = self.kernel[self.grid](*arguments, **self.options)
        if found is not None:  # the interpreter compiles nothing
            self._compiled = found[self.grid]


@functools.cache
def second_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """A second stream for each stream that forks work, so that independent steps do not wait for each other.

    It has torch's default priority, the lowest; captured steps run on streams of higher priority (`engine.capture`), so
    parallel work yields to the main launches.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def copy_together(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies each second tensor into the first, which has no gaps.

    Tensors without gaps take one launch together. One with gaps would make torch copy the whole list one by one.
    """
    dense = [pair for pair in pairs if pair[1].is_contiguous()]
    if dense:
        torch._foreach_copy_([to for to, _ in dense], [of for _, of in dense])
    for to, of in pairs:
        if not of.is_contiguous():
            to.copy_(of)


class Schedule:
    """Steps on named tensors: allocations, kernel launches, calls, and the release of tensors.

    given: the dtypes of the tensors that a run receives, by name.

    Example:
        >>> import torch
        >>> schedule = Schedule(torch.device("cpu"), {"x": torch.float32})
        >>> y = schedule.new("y", 4, torch.float32, zeroed=True)
        >>> head = schedule.view("head", y, 2)
        >>> tensors = {"x": torch.ones(4)}
        >>> schedule.run(tensors)
        >>> tensors["head"]
        tensor([0., 0.])
    """

    def __init__(self, device: torch.device, given: dict[str, torch.dtype]) -> None:
        self.device = device
        self.types = dict(given)
        self.offsets = dict.fromkeys(given, 0)
        """Offset in bytes of a tensor's first element from a multiple of 16."""
        self.launches: list[Launch] = []
        self._steps: list[Callable[[Tensors], None]] = []
        self._is_beside = False
        self._beside: set[str] = set()  # tensors used by parallel launches, until they are joined
        self._freed_late: list[Name] = []
        self._waiting: list[tuple[list[Launch], Tensors]] = []

    def new(self, name: str, size: int, dtype: torch.dtype, *, zeroed: bool = False) -> Name:
        """Allocate `size` values; they are not initialised unless `zeroed`."""
        make, device = torch.zeros if zeroed else torch.empty, self.device

        def step(tensors: Tensors) -> None:
            tensors[name] = make(size, dtype=dtype, device=device)

        return self._add(name, dtype, 0, step)

    def view(self, name: str, of: Name, start: int) -> Name:
        """The part of a tensor from element `start`."""
        dtype = self.types[of]

        def step(tensors: Tensors) -> None:
            tensors[name] = tensors[of][start:]

        return self._add(name, dtype, self.offsets[of] + start * dtype.itemsize, step)

    def free(self, *names: Name) -> None:
        """Release tensors that no later step reads. Memory used by parallel launches is reused after `join`."""
        self._freed_late += [name for name in names if name in self._beside]
        names = tuple(name for name in names if name not in self._beside)

        def step(tensors: Tensors) -> None:
            for name in names:
                del tensors[name]

        self._steps.append(step)

    def copy(self, jobs: Iterable[tuple[Name, Name, int, int]]) -> None:
        """Copy tensors of any layout into parts of others; jobs: (source, target, start, length)."""
        jobs = list(jobs)

        def step(tensors: Tensors) -> None:
            given = [tensors[of] for of, *_ in jobs]
            places = (tensors[to][start : start + length] for _, to, start, length in jobs)
            copy_together([(to.view(of.shape), of) for to, of in zip(places, given, strict=True)])

        self._steps.append(step)

    def call(self, function: Callable[[Tensor], None], name: Name) -> None:
        """Call `function` with a tensor; it must not synchronise with the device."""

        def step(tensors: Tensors) -> None:
            function(tensors[name])

        self._steps.append(step)

    def table(self, rows: Sequence[tuple[int, ...]]) -> KeptTable:
        return kept_table(tuple(rows), self.device)

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        """Launch `kernel` with arguments as in its definition; other keyword arguments are compiler options."""
        left = kernel.arg_names[len(arguments) :]
        values = (*arguments, *(named.pop(name) for name in left))
        launch = Launch(kernel, grid, values, named)
        if self._is_beside:
            self._beside |= {a for a in values if isinstance(a, Name)}
        self.launches.append(launch)
        self._steps.append(launch)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launches inside run on a second stream, in parallel with everything after them, until `join`.

        They see the results of earlier launches. Until `join`, nothing outside may write what they read or read what
        they write. On a CPU they run at `join`, the latest time possible on a GPU, so that tests without a GPU detect
        violations.
        """
        before, self._steps, self._is_beside = self._steps, [], True
        try:
            yield
        finally:
            within, self._steps, self._is_beside = self._steps, before, False
        launches = [step for step in within if isinstance(step, Launch)]
        self._steps += [step for step in within if not isinstance(step, Launch)]  # the first stream owns the memory

        def step(tensors: Tensors) -> None:
            if self.device.type != "cuda":
                self._waiting.append((launches, dict(tensors)))
                return
            current = torch.cuda.current_stream(self.device)
            second = second_stream(self.device, current.cuda_stream)
            second.wait_stream(current)
            with torch.cuda.stream(second):
                for launch in launches:
                    launch(tensors)

        self._steps.append(step)

    def join(self) -> None:
        """Wait for all launches inside `beside`; the host does not synchronise."""
        if not self._beside:
            return

        def step(tensors: Tensors) -> None:
            if self.device.type != "cuda":
                waiting, self._waiting = self._waiting, []
                for launches, seen in waiting:
                    for launch in launches:
                        launch(seen)
                return
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(second_stream(self.device, current.cuda_stream))

        self._steps.append(step)
        self._beside = set()
        freed, self._freed_late = tuple(self._freed_late), []
        self.free(*freed)

    def stand_ins(self, launch: Launch) -> list[Any]:
        """Launch arguments with dtypes and alignments in place of tensors."""
        found: list[Any] = []
        for a in launch.arguments:
            if isinstance(a, Name):
                found.append(StandIn(self.types[a], self.offsets[a]))
            else:
                found.append(StandIn(torch.int32, 0) if isinstance(a, KeptTable) else a)
        return found

    def run(self, tensors: Tensors) -> None:
        """Run all steps; `tensors` contains the inputs and receives all allocated tensors."""
        for step in self._steps:
            step(tensors)

    def _add(self, name: str, dtype: torch.dtype, offset: int, step: Callable[[Tensors], None]) -> Name:
        self.types[name], self.offsets[name] = dtype, offset
        self._steps.append(step)
        return Name(name)


def uses_second_stream(device: torch.device) -> bool:
    """Disabled with several ranks: hooks read gradients on the first stream as soon as they are ready."""
    if not current_settings().second_stream or device.type != "cuda":
        return False
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


@contextmanager
def backward_on_second_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Autograd nodes created inside this context run their backward pass on the second stream.

    Yields the first stream, which forward passes must select themselves, or None without a second stream.
    """
    if not (uses_second_stream(device) and torch.is_grad_enabled()):
        yield None
        return
    first = torch.cuda.current_stream(device)
    with torch.cuda.stream(second_stream(device, first.cuda_stream)):
        yield first


@contextmanager
def alongside(enabled: bool, *read: Tensor) -> Iterator[None]:
    """Launches inside this context, in a backward pass, run in parallel with everything after it.

    enabled: the result of `uses_second_stream` in the forward pass. read: tensors that the launches read. They must not
    be modified, and their memory is kept until the first stream has waited.
    """
    if not enabled:
        yield
        return
    device = read[0].device
    first = torch.cuda.current_stream(device)
    second = second_stream(device, first.cuda_stream)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        yield
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(second)
    number = torch._C._current_graph_task_id()
    before, waiting = _waiting.get(first.cuda_stream, (number, Waiting()))
    if before != number:  # that pass failed, or this pass is nested in it
        if waiting:
            first.wait_stream(second)
        waiting = Waiting()
    _waiting[first.cuda_stream] = number, waiting
    waiting.append((done, read))
    _wait(first, waiting, MAX_WAITING)

    def join() -> None:
        first.wait_stream(second)
        waiting.clear()

    # Called at the end of this backward pass.
    torch.autograd.Variable._execution_engine.queue_callback(join)


def _wait(first: torch.cuda.Stream, waiting: Waiting, most: int) -> None:
    """Make the stream wait until its second stream reads the tensors of at most `most` calls; release the others."""
    while len(waiting) > most:
        done, _ = waiting.popleft()
        first.wait_event(done)
