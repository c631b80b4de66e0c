"""Failures that are neither a bug nor bad input, in one sentence: memory that ran out, a process that died."""

from __future__ import annotations

import sys

_ON_CPU = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
_OF_PEERS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL", "ProcessGroup")
_LOWER = (
    "lower --batch-size, --image-size, or the size of the network (--channels and --cells, or --set space.channels=N)"
)


def explain(error: BaseException) -> str | None:
    """What happened and what to do; None for anything else, which keeps its traceback."""
    text = " ".join(str(error).split())
    torch = sys.modules.get("torch")  # an error of torch's comes from a torch that is loaded
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return f"the GPU has not enough free memory for this run; {_LOWER}; with --seeds also --at-once"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(part in text for part in _ON_CPU)):
        return f"this machine has not enough free memory for this run; {_LOWER}"
    if torch is not None and torch.distributed.is_available():
        is_torchs = isinstance(error, torch.distributed.DistError)
        if is_torchs or (isinstance(error, RuntimeError) and any(part in text for part in _OF_PEERS)):
            return (
                "another process of this run has ended or cannot be reached; its own error says why. Start all "
                "processes again with the same command and --resume."
            )
    return None
