"""Launch settings of the kernels of fused search cells: block sizes and the use of a second stream.

`chosen` is the default. `python -m benchmarks.supernet` compares it with other settings; a captured step keeps the
settings of its capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class CellSettings:
    """Settings of `kernels.cell`; results differ at most by the order of summation.

    moments_values, moments_warps: values that a program of the kernel that merges statistics reads at once (a multiple
    of the channels), and its warps. sums_values: the same for the sums in gradients of norms and mixes, whose rows are
    split into at most `splits` parts. reads_ahead: several inputs of a node are read before the first is used.
    second_stream: gradients of weights run on a second stream, since nothing else in a backward pass waits for them;
    this takes 3 to 4 % less time per search step on an H200 and gives the same bits. early_launch: programs of a kernel
    start while the last programs of the previous kernel are still running, and wait for its end (programmatic dependent
    launch, compute capability 9.0 or higher).
    """

    moments_values: int = 8192
    moments_warps: int = 8
    sums_values: int = 4096
    splits: int = 128
    reads_ahead: bool = True
    second_stream: bool = True
    early_launch: bool = False


chosen = CellSettings()
# Not a context variable: backward passes run in an autograd thread and must see it too.
_current = chosen


def current() -> CellSettings:
    return _current


@contextmanager
def cell_settings(**changes: Any) -> Iterator[None]:
    """Changes these fields for fused cells inside this context.

    Example:
        >>> from softcell.kernels.settings import cell_settings, current
        >>> with cell_settings(splits=128):
        ...     current().splits
        128
    """
    global _current
    before, _current = _current, replace(_current, **changes)
    try:
        yield
    finally:
        _current = before
