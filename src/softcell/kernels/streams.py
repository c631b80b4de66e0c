"""Runs work that the rest of a backward pass does not wait for on a second stream.

The kernels of a NAS-Bench-201 cell are short and do not fill a large GPU; gradients of its weights run at the same time
as the gradients of the previous cell. Autograd is aware of the second stream, since the node that receives such a
gradient was created on it (`backward_on_second_stream`): it synchronises the streams where gradients pass between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from softcell.kernels.schedule import second_stream
from softcell.kernels.settings import current

MAX_WAITING = 2
"""Maximum number of cells whose weight gradients may still be running; more would keep their memory longer."""

Waiting = deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]]
"""Tensors that a second stream still reads, and the events after which it no longer does."""

_waiting: dict[int, tuple[int, Waiting]] = {}
"""For each stream: the number of the backward pass, and the work that is still running."""


def uses_second_stream(device: torch.device) -> bool:
    """Disabled with several ranks: hooks read gradients on the first stream as soon as they are ready."""
    if not current().second_stream or device.type != "cuda":
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
