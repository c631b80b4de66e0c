"""The memory traffic of a step if every operation reads its inputs and writes its outputs once: the unfused floor."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the bytes of input and output tensors of operations; views move nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_view(func):
            moved = [t for t in tree_leaves((args, kwargs or {}, result)) if isinstance(t, Tensor)]
            self.total += sum(t.numel() * t.element_size() for t in moved)
        return result


def is_view(func: Any) -> bool:
    returned = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returned) or "empty" in func._schema.name


def traffic(step: Callable[[], object]) -> int:
    """Bytes that `step` moves, operation by operation."""
    with _Counter() as counter:
        step()
    return int(counter.total)


def bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy on the device, read and written."""
    source = torch.empty(1 << 28, device=device)
    target = torch.empty_like(source)
    seconds: list[float] = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.numel() * 4 / statistics.median(seconds)
