# mypy: ignore-errors
"""Triton kernel of `library`."""

import triton
import triton.language as tl

from softcell.kernels.taps import TILE
from softcell.kernels.taps_triton import await_previous, launching

COLUMNS = 64
"""Maximum number of channels of a program: a tile of more does not fit the registers."""


@triton.jit(do_not_specialize=["rows", "plane", "planes"])
def _store(
    rows_ptr, y_ptr, partial_ptr, rows, plane, planes, C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STATS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_previous(EARLY)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = (m < rows)[:, None] & (n < C)[None, :]
    at = (m * C)[:, None] + n[None, :]
    value = tl.load(rows_ptr + at, mask=ok, other=0.0)
    tl.store(y_ptr + plane * rows.to(tl.int64) * C + at, value, mask=ok)
    if STATS:
        wide = value.to(tl.float32)
        count = tl.minimum(rows - tl.program_id(0) * BLOCK_M, BLOCK_M)
        total = tl.sum(wide, 0)
        centred = tl.where(ok, wide - (total / count)[None, :], 0.0)
        to = partial_ptr + (tl.program_id(0) * planes + plane) * C + n
        tl.store(to, total, mask=n < C)
        tl.store(to + tl.num_programs(0) * planes * C, tl.sum(centred * centred, 0), mask=n < C)


def store(rows, y, partial, plane):
    c = y.shape[-1]
    block, length = min(COLUMNS, triton.next_power_of_2(c)), y[0].numel() // c
    _store[(triton.cdiv(length, TILE), triton.cdiv(c, block))](
        rows, y, y if partial is None else partial, length, plane, len(y), C=c, BLOCK_M=TILE, BLOCK_N=block,
        STATS=partial is not None, num_warps=8, **launching(),
    )  # fmt: skip
