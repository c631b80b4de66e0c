"""CUDA streams that nobody else in the process has.

torch deals streams out of a pool of 32, and then from its beginning again. Sharing one is harmless for order, but not
for recordings: cuBLAS has one workspace per stream, whose address is recorded. Recordings of two runs that were made on
the same stream and are replayed at once would write into each other's; and since torch 2.12 the end of one recording
frees the workspace of all that were made on its stream (pytorch issue 193402).
"""

from __future__ import annotations

import gc
import weakref

import torch

from softcell.errors import UserError

POOL = 32
"""Streams of one priority that torch deals out."""
PRIORITIES = (0, -1)
AT_ONCE = POOL * len(PRIORITIES) // 4
"""Runs that can share a device: each has a stream, and one for each of its recorders (steps, validation, selection)."""

_taken: set[int] = set()


def own_stream(owner: object, device: int | None = None) -> torch.cuda.Stream:
    """A stream that is `owner`'s alone as long as it lives."""
    stream = _free(device)
    if stream is None:
        gc.collect()  # tasks and their steps know each other: they end when garbage is collected
        stream = _free(device)
    if stream is None:
        raise UserError(
            f"at most {POOL * len(PRIORITIES)} CUDA streams can be had at once, and all are taken: every run that "
            "shares the device needs three or four; let fewer run at once (`--at-once`)"
        )
    handle = int(stream.cuda_stream)
    _taken.add(handle)
    weakref.finalize(owner, _taken.discard, handle)
    return stream


def _free(device: int | None) -> torch.cuda.Stream | None:
    """One that nobody has, None if there is none."""
    for priority in PRIORITIES:
        for _ in range(POOL):
            stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
            if int(stream.cuda_stream) not in _taken:
                return stream
    return None
