"""Captures a step once as a CUDA graph and replays it: thousands of kernel launches become one.

A captured step is a function only of tensors on the device. It writes its results (weights, optimiser state, meters)
in place, reads its schedules from buffers that are filled in place, and never reads a value back from the device.

If the host decides what a step does (which candidates run), that decision is passed as `key`, and there is one
graph per key. Graphs share one memory pool. When there are too many, all are deleted and captured again on use.

With several processes, collectives of NCCL are captured with the step. Those of another backend run on the host: they
divide the capture into parts, between which they are called (`between_parts`).
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from softcell.engine.distributed import World
from softcell.errors import UserError
from softcell.kernels.backend import KeptTable, captured_tables

Step = Callable[..., None]
Engine = Literal["auto", "eager", "graph"]

# Eager steps before the first capture: in these cuDNN picks its algorithms and optimisers create their state.
WARMUP = 3
# Eager steps with a key before it is captured: a decision that keeps changing is cheaper to run than to capture.
EAGER_STEPS_PER_KEY = 2
MAX_GRAPHS = 16
"""Graphs that a step keeps. A method with more plans than this is not captured (`softcell.search.task`)."""
MAX_COUNTED_KEYS = 1024  # a bound for keys that rarely repeat, of which there may be millions
STREAM_POOL = 32
"""Streams of one priority that torch hands out."""
STREAM_PRIORITIES = (-1, 0)
"""The higher one first: what `kernels.schedule` launches alongside a step may wait for the step."""
MAX_SHARING_RUNS = STREAM_POOL * len(STREAM_PRIORITIES) // 4
"""Runs that can share a device: each needs its own stream and one each for steps, validation and selection."""


class CapturedStep:
    """Calls `step` eagerly a few times, then captures it and replays the graph; each `key` has its own.

    The first calls are real steps of the run, so nothing has to be undone. When capture fails, `notify`
    receives the reason once and the step stays eager.
    """

    failures: ClassVar[int] = 0
    """Number of failed captures in this process, over all steps."""

    def __init__(self, step: Step, notify: Callable[[str], None], warmup: int = WARMUP, kept: int = MAX_GRAPHS) -> None:
        self._step, self._notify, self._left, self._kept = step, notify, warmup, kept
        self._graphs: dict[Hashable, Recording] = {}
        self._tried: OrderedDict[Hashable, int] = OrderedDict()
        self._pool: Any = None
        self._inputs: list[Tensor] = []
        self._side: torch.cuda.Stream | None = None
        self._gave_up, self._known_failures = False, CapturedStep.failures

    def __call__(self, *inputs: Tensor, key: Hashable = None) -> None:
        if self._known_failures != CapturedStep.failures:
            self._forget()
        if self._gave_up:
            self._step(*inputs)
        elif key in self._graphs:
            self._replay(self._graphs[key], *inputs)
        elif self._left > 0 or self._count(key) < EAGER_STEPS_PER_KEY:
            self._left -= 1
            self._count(key, 1)
            self._eager_on_side_stream(*inputs)
        else:
            self._record(key, *inputs)

    def _count(self, key: Hashable, more: int = 0) -> int:
        """How often the step ran eagerly with `key`; the least recently used keys are dropped."""
        # Removed and stored again, so that the key counts as the most recently used.
        self._tried[key] = self._tried.pop(key, 0) + more
        while len(self._tried) > MAX_COUNTED_KEYS:
            self._tried.popitem(last=False)
        return self._tried[key]

    def _eager_on_side_stream(self, *inputs: Tensor) -> None:
        """Run the step on the stream of the capture: what a capture uses must not come from the default stream."""
        current, side = torch.cuda.current_stream(), self._stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._step(*inputs)
        current.wait_stream(side)

    def _stream(self) -> torch.cuda.Stream:
        """The one stream for everything but replays, since every stream caches the memory that was freed on it."""
        if self._side is None:
            self._side = own_stream(self)
        return self._side

    def _replay(self, graph: Recording, *inputs: Tensor) -> None:
        # A graph reads fixed addresses, so the inputs of every step are copied to them.
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        graph.replay()

    def _forget(self) -> None:
        """Delete graphs after a failure anywhere: the random state that they draw from has been replaced."""
        self._drop()
        self._known_failures = CapturedStep.failures

    def _drop(self) -> None:
        """Delete all graphs: the end of one may free what others of the same stream use (`own_stream`)."""
        if self._graphs:
            torch.cuda.synchronize()  # they may still be running
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._pool = None  # torch does not accept a pool again once nothing uses it

    def _record(self, key: Hashable, *inputs: Tensor) -> None:
        if len(self._graphs) >= self._kept:
            self._drop()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._inputs = [tensor.clone() for tensor in inputs]
            torch.cuda.empty_cache()  # frees the memory of eager steps for the graphs
        generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.clone_state()
        graph, reason = Recording(self._pool), None
        try:
            # One pool for all: graphs never run at the same time and read nothing that another left there.
            with _recording(graph, self._stream()):
                self._step(*self._inputs)
        except RuntimeError as error:
            # Ending a failed capture raises too, with a less useful message than the first error.
            reason = str(error.__context__ or error).strip().splitlines()[0]
        if reason is not None:  # outside the handler, which keeps the failed capture's tensors alive
            self._gave_up = True
            CapturedStep.failures += 1
            self._forget()
            self._inputs = []
            # torch still marks the current state as being captured and would refuse to draw from it.
            generator.graphsafe_set_state(state)
            self._notify(f"this step cannot be captured as a CUDA graph ({reason}); using the eager engine")
            self._step(*inputs)
            return
        self._graphs[key] = graph
        self._replay(graph, *inputs)  # capturing executes nothing: this is the step itself


class Recording:
    """A captured step: CUDA graphs of one memory pool, and between them calls on the host."""

    current: ClassVar[Recording | None] = None
    """The one that is being made."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        # Released with the graphs: a search of many architectures captures each, and none reads another's tables.
        self.tables: set[KeptTable] = set()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._calls: list[Callable[[], None]] = []

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        if dist.is_available() and dist.is_initialized():
            # Threads of NCCL call CUDA too; what they do must not end this capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        else:
            graph.capture_begin(pool=self._pool)
        self._graphs.append(graph)

    def end(self) -> None:
        self._graphs[-1].capture_end()

    def divide(self, call: Callable[[], None]) -> None:
        self.end()
        self._calls.append(call)
        self.begin()

    def replay(self) -> None:
        for number, graph in enumerate(self._graphs):
            graph.replay()
            if number < len(self._calls):
                self._calls[number]()

    def reset(self) -> None:
        for graph in self._graphs:
            graph.reset()


def between_parts(call: Callable[[], None]) -> None:
    """Call it now, or, while a step is being captured, whenever the replay reaches this point.

    What `call` reads and writes must stay where it is; `call` itself keeps it alive. Not for autograd's threads: a
    capture must end in the thread that began it.
    """
    if Recording.current is None:
        call()
    else:
        Recording.current.divide(call)


@contextmanager
def _recording(graph: Recording, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture what runs inside into `graph`.

    Like `torch.cuda.graph`, but cached memory is kept: later steps would have to allocate it again. Garbage collection
    is off inside, since freeing a graph of an earlier run would end the capture.
    """
    collects = gc.isenabled()
    torch.cuda.synchronize()
    gc.disable()
    try:
        with torch.cuda.stream(stream), captured_tables(graph.tables):
            graph.begin()
            Recording.current = graph
            try:
                yield
            finally:
                Recording.current = None
                graph.end()
    finally:
        if collects:
            gc.enable()


def prepare_step(
    step: Step, engine: Engine, world: World, notify: Callable[[str], None], *, divides: bool = False
) -> Step:
    """`step` as the chosen engine runs it; `auto` captures on CUDA devices only.

    divides: all collectives of the step go through `between_parts` where NCCL is not used, so that it can be captured
    with every backend. If a step is not captured, `notify` receives the reason with `graph` and on any GPU.
    """
    if engine == "eager":
        return step
    reason = None
    if world.device.type != "cuda":
        reason = f"graph capture needs a CUDA device, but this run is on {world.device.type}"
    elif world.size > 1 and not divides and dist.get_backend() != "nccl":
        reason = (
            f"steps of several processes with shared norms are captured with NCCL only, but this run uses "
            f"{dist.get_backend()} (norms=local can be captured)"
        )
    if reason is None:
        return CapturedStep(step, notify)
    if engine == "graph" or world.device.type == "cuda":
        notify(f"engine={engine}: {reason}; using the eager engine")
    return step


def once(notify: Callable[[str], None]) -> Callable[[str], None]:
    """Pass only the first text on to `notify`: one reason is enough for the several steps of a run."""
    sent: list[str] = []

    def notify_first(text: str) -> None:
        if not sent:
            sent.append(text)
            notify(text)

    return notify_first


_taken: set[int] = set()


def own_stream(owner: object, device: int | None = None) -> torch.cuda.Stream:
    """A CUDA stream that belongs to `owner` alone as long as it lives.

    torch hands out streams from a pool of 32 and then starts over. Sharing one keeps the order of work but breaks
    graphs: cuBLAS has one workspace per stream, whose address is captured. Graphs of two runs that were captured on
    one stream and are replayed at once would write into the same workspace; and since torch 2.12 the end of one
    graph frees the workspace of all that were made on its stream (pytorch issue 193402).
    """
    stream = _free(device)
    if stream is None:
        gc.collect()  # tasks and steps refer to each other: only the garbage collector frees them
        stream = _free(device)
    if stream is None:
        raise UserError(
            f"a process has {STREAM_POOL * len(STREAM_PRIORITIES)} CUDA streams, and all are in use: every run that "
            "shares the device needs three or four; let fewer runs share it (`--at-once`)"
        )
    handle = int(stream.cuda_stream)
    _taken.add(handle)
    weakref.finalize(owner, _taken.discard, handle)
    return stream


def _free(device: int | None) -> torch.cuda.Stream | None:
    """A stream that is not in use; None if there is none."""
    for priority in STREAM_PRIORITIES:
        # torch hands streams out in rotation: this many requests see every stream of the priority once.
        for _ in range(STREAM_POOL):
            stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
            if int(stream.cuda_stream) not in _taken:
                return stream
    return None


class Readback:
    """Copies small tensors to the host without stalling the device: each copy arrives one call later.

    `exchange` queues a copy of a tensor and returns the one queued before. The device is already busy with work queued
    after that earlier copy, so waiting for it keeps the host at most one step ahead and never leaves the device idle.
    """

    def __init__(self) -> None:
        self._sent: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def exchange(self, value: Tensor) -> Tensor | None:
        """Queue a copy of `value`; return the copy queued by the previous call, or None at the first call."""
        before = self.pending()
        value = value.detach()
        if value.device.type == "cuda":
            # Pinned, since a copy to pageable memory makes the host wait; new, since the caller has the previous one.
            self._sent = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._sent.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._sent, self._event = value.clone(), None
        return before

    def pending(self) -> Tensor | None:
        """The copy that the next `exchange` returns; waits until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._sent

    def restore(self, pending: Tensor | None) -> None:
        """Make `pending` what the next `exchange` returns: for a resumed run."""
        self._sent, self._event = pending, None
