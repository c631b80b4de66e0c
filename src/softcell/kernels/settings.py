"""How the kernels of fused search cells are launched: sizes of blocks, and what runs on a second stream.

`chosen` holds everywhere. `python -m benchmarks.supernet` compares it with other settings; a captured step keeps those
that it was captured with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class CellSettings:
    """Settings of `kernels.cell`; results differ at most by the order in which sums are formed.

    moments_values, moments_warps: what a program of the kernel that merges statistics reads at once (a multiple of the
    channels), and its warps. sums_values: the same for the sums that gradients of norms and mixes are made of, whose
    rows are cut into at most `splits` parts. reads_ahead: several inputs of a node are read before the first is used.
    second_stream: gradients of weights run on a second stream, since nothing else in a backward pass waits for them: 3
    to 4 % less time per search step on an H200 and the same bits. early_launch: programs of a kernel start while the
    last ones of the kernel before it still run, and wait for its end (programmatic dependent launch, from compute
    capability 9.0 on).
    """

    moments_values: int = 8192
    moments_warps: int = 8
    sums_values: int = 4096
    splits: int = 128
    reads_ahead: bool = True
    second_stream: bool = True
    early_launch: bool = False


chosen = CellSettings()
# Not a context variable: backward passes run in a thread of autograd's and must see it too.
_current = chosen


def current() -> CellSettings:
    return _current


@contextmanager
def cell_settings(**changes: Any) -> Iterator[None]:
    """Within this context fused cells run with these fields changed.

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
