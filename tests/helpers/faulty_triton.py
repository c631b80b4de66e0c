# mypy: ignore-errors
"""Kernels with mistakes that their results do not show in Triton's interpreter."""

import triton
import triton.language as tl


@triton.jit
def reads_beyond(x_ptr, y_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(y_ptr + i, tl.load(x_ptr + i), mask=i < SIZE - 1)


@triton.jit
def races(x_ptr, y_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    before = tl.load(y_ptr + i, mask=tl.program_id(0) > 0, other=0.0)
    tl.store(y_ptr + i, before + tl.load(x_ptr + tl.program_id(0) * SIZE + i))
