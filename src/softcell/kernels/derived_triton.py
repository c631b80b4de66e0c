# mypy: ignore-errors
"""Triton kernels of `derived`. A program handles some rows (pixels) and a block of channels.

A *view* says where a map lies: unit (multiples of rows · c), column, distance of rows. Jobs are rows of small integer
tables; those that read a gradient begin with the seven numbers of `_pull_rows`.

What windows are read from, ReLU(z) forward and ∂ of the depthwise results backward, is first written within a border of
zeros: a tap is then a load and a multiplication, with no mask, norm or ReLU. Gradients of weights come from that of the
dense kernel depthwise[tap, k] · matrix[n, k], which tensor cores compute.
"""

import functools
import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from softcell.kernels.backend import padded, table
from softcell.kernels.derived import NONE, consumers


@dataclass(frozen=True)
class Blocks:
    """Sizes of blocks and warps, by kernel; `blocks_for` chooses them by width."""

    channels: int = 64  # most channels of an elementwise block
    pitch: int = 8  # what windows are read from has a multiple of it as channels: 8 values of 2 bytes are one load
    stage_rows: int = 128
    stage_depth: int = 32  # channels that are convolved at a time
    input_depth: int = 64
    stage_warps: int = 8
    product_sums: bool = True  # statistics by tensor cores
    lower_rows: int = 128
    lower_depth: int = 32
    lower_columns: int = 64
    lower_warps: int = 8
    weight_rows: int = 64
    weight_side: int = 128  # most columns of either side
    weight_stages: int = 3
    weight_programs: int = 1056
    gather_rows: int = 64
    gather_warps: int = 4
    sums_elements: int = 1024
    add_elements: int = 2048


OVERRIDES: dict[str, int] = {}
"""Fields of `Blocks` that are measured instead of the chosen ones (`benchmarks.derived`)."""


def blocks_for(channels):
    """The rule behind the sizes: 3/4 of a block should be used, and a program should not need all registers.

    A depth of 32 pads 36 channels to 64, one of 16 to 48; four warps then have as much to do per load of weights as
    eight have with 32. From 65 channels on a block has 128 columns, for which 64 rows are enough.
    """
    if channels <= 48 and -channels % 32 > channels // 3:
        found = Blocks(stage_depth=16, stage_warps=4, lower_depth=16)
    elif channels <= 64:
        found = Blocks()
    else:
        found = Blocks(stage_rows=64, lower_rows=128 if channels <= 128 else 64)
    return replace(found, **OVERRIDES)


def side_for(length, most):
    """The side of a block that covers `length`: the largest that pads at most 15 % more than the best."""
    sides = [side for side in (64, 128) if side <= most]
    if length <= 64 or not sides:
        return min(most, padded(length))
    least = min(triton.cdiv(length, side) * side for side in sides)
    return max(side for side in sides if triton.cdiv(length, side) * side <= 1.15 * least)


@triton.jit(do_not_specialize=["jobs", "length"])
def _start(w_ptr, depths_ptr, state_ptr, jobs_ptr, jobs, length, C: tl.constexpr, BLOCK: tl.constexpr):
    """Depthwise kernels (channel, tap) as (tap, channel); and the state of planes without a norm, `Run.begin`."""
    number = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if number < jobs:
        job = jobs_ptr + number * 3
        depth, start, taps = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2)
        ok = i < C * taps
        tl.store(depths_ptr + start + i, tl.load(w_ptr + depth + i % C * taps + i // C, mask=ok), mask=ok)
    else:
        row = number - jobs
        value = tl.where((row == 3) | (row == 5), 1.0, 0.0)  # of coefficients and slopes, the first
        tl.store(state_ptr + row * length + i, tl.zeros((BLOCK,), dtype=tl.float32) + value, mask=i < length)


@triton.jit(do_not_specialize=["rows", "planes"])
def _activate(
    x_ptr, coefficients_ptr, to_ptr, jobs_ptr, rows, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BORDER: tl.constexpr,
    x_size, to_size, planes, C: tl.constexpr, PITCH: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ReLU(z) of planes within a BORDER of zeros, so that windows are read without a mask.

    Channels are filled up to PITCH with zeros, so that each pixel begins at a multiple of 16 bytes.
    """
    job = jobs_ptr + tl.program_id(1) * 4
    unit, column, distance, plane = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C, tl.load(job + 3)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2) * CB + tl.arange(0, CB)
    c_ok = c < C
    wide = WIDTH + 2 * BORDER
    area = (HEIGHT + 2 * BORDER) * wide
    image = m // area
    inside = m - image * area
    h = inside // wide - BORDER
    w = inside % wide - BORDER
    m_ok = m < rows
    ok = (m_ok & (h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH))[:, None] & c_ok[None, :]
    row = (image * HEIGHT + h) * WIDTH + w
    base = x_ptr + unit.to(tl.int64) * x_size + column
    x = tl.load(base + row[:, None] * distance + c[None, :], mask=ok, other=0.0).to(tl.float32)
    a = tl.load(coefficients_ptr + plane * C + c, mask=c_ok, other=0.0)
    b = tl.load(coefficients_ptr + (planes + plane) * C + c, mask=c_ok, other=0.0)
    z = tl.where(ok, tl.maximum(x * a[None, :] + b[None, :], 0.0), 0.0)
    to = to_ptr + tl.program_id(1).to(tl.int64) * to_size + (m * PITCH)[:, None] + c[None, :]
    tl.store(to, z.to(to_ptr.dtype.element_ty), mask=m_ok[:, None] & (c < PITCH)[None, :])


@triton.jit
def _pull_rows(
    job, g_ptr, y_ptr, factors_ptr, slopes_ptr, size, m, m_ok, area, samples, C: tl.constexpr, COLUMNS: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """What `_pull` reads rows m from: gradients, values, slopes; and drop-path's factors. Once, before its loop."""
    g_unit, g_column, distance, path = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C, tl.load(job + 3)
    y_unit, plane, column = tl.load(job + 4), tl.load(job + 5), tl.load(job + 6) * COLUMNS
    g_rows = g_ptr + g_unit.to(tl.int64) * size + (g_column + column) + m * distance
    y_rows = y_ptr + y_unit.to(tl.int64) * size + column + m * C
    factor = tl.full(m.shape, 1.0, dtype=tl.float32)
    if DROPS:
        factor = tl.load(factors_ptr + path * samples + m // area, mask=m_ok & (path >= 0), other=1.0)
    return g_rows, y_rows, slopes_ptr + plane * C + column, factor


@triton.jit
def _pull(g_rows, y_rows, slopes, factor, m_ok, n, n_ok, planes, C: tl.constexpr, DROPS: tl.constexpr):
    """∂y [rows, n] in float32: the gradient of a plane before its norm."""
    ok = m_ok[:, None] & n_ok[None, :]
    g = tl.load(g_rows[:, None] + n[None, :], mask=ok, other=0.0).to(tl.float32)
    if DROPS:
        g *= factor[:, None]
    y = tl.load(y_rows[:, None] + n[None, :], mask=ok, other=0.0).to(tl.float32)
    slope = tl.load(slopes + n, mask=n_ok, other=0.0)
    back = tl.load(slopes + planes * C + n, mask=n_ok, other=0.0)
    level = tl.load(slopes + 2 * planes * C + n, mask=n_ok, other=0.0)
    return tl.where(ok, g * slope[None, :] + y * back[None, :] + level[None, :], 0.0)


@triton.jit(do_not_specialize=["rows", "measured"])
def _stages(
    x_ptr, w_ptr, depth_ptr, y_ptr, partial_ptr, jobs_ptr, rows, TALL: tl.constexpr, WIDE: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, x_size, y_size, measured, C: tl.constexpr, FAN_IN: tl.constexpr,
    PITCH: tl.constexpr, WEIGHTS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXTERNAL: tl.constexpr, STATS: tl.constexpr,
    PRODUCTS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """matrix · depthwise(x), and sums over rows for the norm. EXTERNAL: x is an input tensor before its ReLU."""
    job = jobs_ptr + tl.program_id(1) * 11
    source, dilation, shift, padding = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3)
    depth, matrix, columns = tl.load(job + 4) * FAN_IN, tl.load(job + 5) * WEIGHTS, tl.load(job + 6) * COLUMNS
    unit, plane, column = tl.load(job + 7), tl.load(job + 8), tl.load(job + 9) * COLUMNS
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_ok = m < rows
    within = tl.minimum(m, rows - 1)  # a row that exists: windows are read without a mask of rows
    area = OUT_HEIGHT * OUT_WIDTH
    image = within // area
    inside = within - image * area
    h = (inside // OUT_WIDTH) * STRIDE
    w = (inside % OUT_WIDTH) * STRIDE
    row = (image * TALL + h) * WIDE + w + shift
    n = tl.load(job + 10) * 16 + tl.arange(0, BLOCK_N)
    n_ok = n < columns
    base = x_ptr + source.to(tl.int64) * x_size
    kind = y_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, FAN_IN, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        k_ok = k < FAN_IN
        x_ok = (k < PITCH)[None, :]
        if SIZE == 1:
            if EXTERNAL and STRIDE > 1:  # an input tensor has no border
                x_ok = x_ok & ((h - padding < TALL) & (w - padding < WIDE))[:, None]
            value = tl.load(base + row[:, None] * PITCH + k[None, :], mask=x_ok, other=0.0)
            if EXTERNAL:
                value = tl.maximum(value, 0.0)
        else:
            value = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
            for r in range(SIZE):  # not unrolled: the compiler would pass every load through shared memory
                line = base + (row + r * dilation * WIDE)[:, None] * PITCH + k[None, :]
                for s in tl.static_range(SIZE):
                    x = tl.load(line + s * dilation * PITCH, mask=x_ok, other=0.0)
                    weight = tl.load(depth_ptr + depth + (r * SIZE + s) * FAN_IN + k, mask=k_ok, other=0.0)
                    value += x.to(tl.float32) * weight[None, :]
        weight = tl.load(
            w_ptr + matrix + (n * FAN_IN)[None, :] + k[:, None], mask=n_ok[None, :] & k_ok[:, None], other=0.0
        )
        total = tl.dot(value.to(kind), weight.to(kind), total, input_precision=PRECISION)
    y = total.to(kind)
    at = y_ptr + unit.to(tl.int64) * y_size + (m * C)[:, None] + (column + n)[None, :]
    tl.store(at, y, mask=m_ok[:, None] & n_ok[None, :])
    if STATS:
        count = tl.minimum(rows - tl.program_id(0) * BLOCK_M, BLOCK_M)
        if PRODUCTS:
            # Sums over rows are products with a row of ones: a tensor core's, instead of hundreds of shuffles.
            one = tl.full((16, BLOCK_M), 1.0, dtype=kind)  # 16 equal rows, fewer have no product
            if not EVEN:
                one = tl.where(m_ok[None, :], one, 0.0).to(kind)
            sums = tl.sum(tl.dot(one, y, input_precision=PRECISION), 0) / 16
            centred = total - (sums / count)[None, :]
            squares = tl.sum(tl.dot(one, (centred * centred).to(kind), input_precision=PRECISION), 0) / 16
        else:
            value = tl.where(m_ok[:, None], y.to(tl.float32), 0.0)
            sums = tl.sum(value, 0)
            centred = tl.where(m_ok[:, None], value - (sums / count)[None, :], 0.0)
            squares = tl.sum(centred * centred, 0)
        to = partial_ptr + (tl.program_id(0) * measured + plane) * C + column + n
        tl.store(to, sums, mask=n_ok)
        tl.store(to + tl.num_programs(0) * measured * C, squares, mask=n_ok)


@triton.jit(do_not_specialize=["rows", "tiles", "planes", "measured"])
def _finish_moments(
    partial_ptr, w_ptr, moments_ptr, coefficients_ptr, jobs_ptr, rows, tiles, planes, measured, eps, C: tl.constexpr,
    CB: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    job = jobs_ptr + tl.program_id(0) * 3
    plane, scale, shift = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    c = tl.program_id(1) * CB + tl.arange(0, CB)
    c_ok = c < C
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for start in range(0, tiles, BLOCK):
        t = start + tl.arange(0, BLOCK)
        ok = (t < tiles)[:, None] & c_ok[None, :]
        total += tl.load(partial_ptr + ((t * measured + plane) * C)[:, None] + c[None, :], mask=ok, other=0.0)
    mean = tl.sum(total, 0) / rows
    square = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for start in range(0, tiles, BLOCK):
        t = start + tl.arange(0, BLOCK)
        ok = (t < tiles)[:, None] & c_ok[None, :]
        at = partial_ptr + ((t * measured + plane) * C)[:, None] + c[None, :]
        count = tl.maximum(tl.minimum(rows - t * TILE, TILE), 1).to(tl.float32)[:, None]
        off = tl.load(at, mask=ok, other=0.0) / count - mean[None, :]
        inner = tl.load(at + tiles * measured * C, mask=ok, other=0.0)
        square += tl.where(ok, inner + count * off * off, 0.0)
    variance = tl.sum(square, 0) / rows
    rstd = 1.0 / tl.sqrt(variance + eps)
    to = moments_ptr + plane * C + c
    tl.store(to, mean, mask=c_ok)
    tl.store(to + planes * C, rstd, mask=c_ok)
    tl.store(to + 2 * planes * C, variance * (rows / tl.maximum(rows - 1, 1)), mask=c_ok)
    gamma = tl.load(w_ptr + scale + c, mask=c_ok & (scale >= 0), other=1.0)
    beta = tl.load(w_ptr + shift + c, mask=c_ok & (scale >= 0), other=0.0)
    to = coefficients_ptr + plane * C + c
    tl.store(to, gamma * rstd, mask=c_ok)
    tl.store(to + planes * C, beta - mean * gamma * rstd, mask=c_ok)


@triton.jit(do_not_specialize=["planes"])
def _known_moments(
    running_ptr, w_ptr, moments_ptr, coefficients_ptr, jobs_ptr, planes, eps, C: tl.constexpr, BLOCK: tl.constexpr
):
    """What `_finish_moments` writes, from given means and variances."""
    job = jobs_ptr + tl.program_id(0) * 3
    plane, scale, shift = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < C
    mean = tl.load(running_ptr + plane * C + c, mask=ok, other=0.0)
    variance = tl.load(running_ptr + (planes + plane) * C + c, mask=ok, other=1.0)
    rstd = 1.0 / tl.sqrt(variance + eps)
    to = moments_ptr + plane * C + c
    tl.store(to, mean, mask=ok)
    tl.store(to + planes * C, rstd, mask=ok)
    tl.store(to + 2 * planes * C, variance, mask=ok)
    a = tl.load(w_ptr + scale + c, mask=ok & (scale >= 0), other=1.0) * rstd
    b = tl.load(w_ptr + shift + c, mask=ok & (scale >= 0), other=0.0) - mean * a
    tl.store(coefficients_ptr + plane * C + c, a, mask=ok)
    tl.store(coefficients_ptr + (planes + plane) * C + c, b, mask=ok)


@triton.jit(do_not_specialize=["begin", "end", "rows", "samples", "planes", "column", "distance"])
def _add_up(
    buffer_ptr, coefficients_ptr, factors_ptr, jobs_ptr, begin, end, rows, AREA: tl.constexpr, samples, size, planes,
    column, distance, C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * CB + tl.arange(0, CB)
    c_ok = c < C
    m_ok = m < rows
    ok = m_ok[:, None] & c_ok[None, :]
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for i in range(begin, end):
        job = jobs_ptr + i * 5
        unit, start, apart, plane, path = (
            tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3), tl.load(job + 4),
        )  # fmt: skip
        at = buffer_ptr + unit.to(tl.int64) * size + start * C + m[:, None] * (apart * C) + c[None, :]
        value = tl.load(at, mask=ok, other=0.0).to(tl.float32)
        a = tl.load(coefficients_ptr + plane * C + c, mask=c_ok, other=0.0)
        b = tl.load(coefficients_ptr + (planes + plane) * C + c, mask=c_ok, other=0.0)
        value = value * a[None, :] + b[None, :]
        if DROPS:
            factor = tl.load(factors_ptr + path * samples + m // AREA, mask=m_ok & (path >= 0), other=1.0)
            value *= factor[:, None]
        total += value
    to = buffer_ptr + column * C + m[:, None] * (distance * C) + c[None, :]
    tl.store(to, total.to(buffer_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows", "planes"])
def _pools(
    x_ptr, coefficients_ptr, y_ptr, winners_ptr, partial_ptr, jobs_ptr, rows, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, x_size, y_size, planes, C: tl.constexpr,
    CB: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    job = jobs_ptr + tl.program_id(1) * 7
    unit, column, distance, source = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C, tl.load(job + 3)
    plane, to_unit, slot = tl.load(job + 4), tl.load(job + 5), tl.load(job + 6)
    largest = slot >= 0
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2) * CB + tl.arange(0, CB)
    c_ok = c < C
    m_ok = m < rows
    area = OUT_HEIGHT * OUT_WIDTH
    image = m // area
    inside = m - image * area
    top = (inside // OUT_WIDTH) * STRIDE - 1
    left = (inside % OUT_WIDTH) * STRIDE - 1
    a = tl.load(coefficients_ptr + source * C + c, mask=c_ok, other=0.0)
    b = tl.load(coefficients_ptr + (planes + source) * C + c, mask=c_ok, other=0.0)
    base = x_ptr + unit.to(tl.int64) * x_size + column
    best = tl.full((BLOCK, CB), float("-inf"), dtype=tl.float32)
    winner = tl.zeros((BLOCK, CB), dtype=tl.int32)
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    count = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in tl.static_range(9):
        h = top + tap // 3
        w = left + tap % 3
        here = m_ok & (h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH)
        ok = here[:, None] & c_ok[None, :]
        row = (image * HEIGHT + h) * WIDTH + w
        x = tl.load(base + row[:, None] * distance + c[None, :], mask=ok, other=0.0).to(tl.float32)
        x = tl.where(ok, x * a[None, :] + b[None, :], 0.0)
        total += x
        count += tl.where(here, 1.0, 0.0)
        better = here[:, None] & ((x > best) | (x != x))  # a value that is not a number wins, as in PyTorch
        best = tl.where(better, x, best)
        winner = tl.where(better, tap, winner)
    ok = m_ok[:, None] & c_ok[None, :]
    value = tl.where(largest, best, total / tl.maximum(count, 1.0)[:, None])
    inner = (m * C)[:, None] + c[None, :]
    y = value.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + to_unit.to(tl.int64) * y_size + inner, y, mask=ok)
    tl.store(winners_ptr + slot.to(tl.int64) * y_size + inner, winner.to(tl.uint8), mask=ok & largest)
    if STATS:
        value = tl.where(ok, y.to(tl.float32), 0.0)
        present = tl.minimum(rows - tl.program_id(0) * BLOCK, BLOCK)
        sums = tl.sum(value, 0)
        centred = tl.where(ok, value - (sums / present)[None, :], 0.0)
        to = partial_ptr + (tl.program_id(0) * planes + plane) * C + c
        tl.store(to, sums, mask=c_ok)
        tl.store(to + tl.num_programs(0) * planes * C, tl.sum(centred * centred, 0), mask=c_ok)


@triton.jit(do_not_specialize=["rows", "rows_each", "samples", "planes", "terms"])
def _arrival_sums(
    buffer_ptr, gradient_ptr, moments_ptr, factors_ptr, partial_ptr, jobs_ptr, rows, rows_each, AREA: tl.constexpr,
    samples, size, planes, terms, C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g·ŷ of planes that arrive at a node, over a part of the rows."""
    t = tl.program_id(1)
    job = jobs_ptr + t * 7
    g_unit, g_column, distance, path = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C, tl.load(job + 3)
    y_unit, plane = tl.load(job + 4), tl.load(job + 5)
    c = tl.program_id(2) * CB + tl.arange(0, CB)
    c_ok = c < C
    mean = tl.load(moments_ptr + plane * C + c, mask=c_ok, other=0.0)
    rstd = tl.load(moments_ptr + (planes + plane) * C + c, mask=c_ok, other=0.0)
    plain = tl.zeros((BLOCK, CB), dtype=tl.float32)
    product = tl.zeros((BLOCK, CB), dtype=tl.float32)
    begin = tl.program_id(0) * rows_each
    end = tl.minimum(begin + rows_each, rows)
    for start in range(begin, end, BLOCK):
        m = start + tl.arange(0, BLOCK)
        m_ok = m < end
        ok = m_ok[:, None] & c_ok[None, :]
        at = gradient_ptr + g_unit.to(tl.int64) * size + g_column + m[:, None] * distance + c[None, :]
        g = tl.load(at, mask=ok, other=0.0).to(tl.float32)
        if DROPS:
            factor = tl.load(factors_ptr + path * samples + m // AREA, mask=m_ok & (path >= 0), other=1.0)
            g *= factor[:, None]
        y = tl.load(buffer_ptr + y_unit.to(tl.int64) * size + m[:, None] * C + c[None, :], mask=ok, other=0.0)
        plain += g
        product += g * (y.to(tl.float32) - mean[None, :]) * rstd[None, :]
    to = partial_ptr + (tl.program_id(0) * terms + t) * C + c
    tl.store(to, tl.sum(plain, 0), mask=c_ok)
    tl.store(to + tl.num_programs(0) * terms * C, tl.sum(product, 0), mask=c_ok)


@triton.jit(do_not_specialize=["splits", "terms", "planes"])
def _finish_slopes(
    partial_ptr, w_ptr, moments_ptr, slopes_ptr, parameter_gradient_ptr, jobs_ptr, splits, terms, planes, scale,
    C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From Σ g and Σ g·ŷ to ∂y as a linear function of g and y, and to the gradients of scale and shift."""
    job = jobs_ptr + tl.program_id(0) * 4
    place, plane, gamma_at, beta_at = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3)
    c = tl.program_id(1) * CB + tl.arange(0, CB)
    c_ok = c < C
    plain = tl.zeros((BLOCK, CB), dtype=tl.float32)
    product = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for start in range(0, splits, BLOCK):
        s = start + tl.arange(0, BLOCK)
        ok = (s < splits)[:, None] & c_ok[None, :]
        at = partial_ptr + ((s * terms + place) * C)[:, None] + c[None, :]
        plain += tl.load(at, mask=ok, other=0.0)
        product += tl.load(at + splits * terms * C, mask=ok, other=0.0)
    first, second = tl.sum(plain, 0), tl.sum(product, 0)
    tl.store(parameter_gradient_ptr + gamma_at + c, second, mask=c_ok & (gamma_at >= 0))
    tl.store(parameter_gradient_ptr + beta_at + c, first, mask=c_ok & (gamma_at >= 0))
    mean = tl.load(moments_ptr + plane * C + c, mask=c_ok, other=0.0)
    rstd = tl.load(moments_ptr + (planes + plane) * C + c, mask=c_ok, other=0.0)
    gamma = tl.load(w_ptr + gamma_at + c, mask=c_ok & (gamma_at >= 0), other=1.0)
    a = gamma * rstd
    to = slopes_ptr + plane * C + c
    tl.store(to, a, mask=c_ok)
    tl.store(to + planes * C, -a * rstd * second * scale, mask=c_ok)
    tl.store(to + 2 * planes * C, a * (rstd * mean * second - first) * scale, mask=c_ok)


@triton.jit
def _clear_border(
    base, first, samples, k, k_ok, kind: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BORDER: tl.constexpr,
    PITCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zeros into pixels `first`… of the borders of all maps, which begin at `base`."""
    wide: tl.constexpr = WIDTH + 2 * BORDER
    ring: tl.constexpr = wide * (HEIGHT + 2 * BORDER) - HEIGHT * WIDTH
    pixel = first + tl.arange(0, BLOCK)
    image = pixel // ring
    inside = pixel - image * ring
    # First the lines above and below, then what is left and right of the others.
    line, column = inside // wide, inside % wide
    beside = inside - 2 * BORDER * wide
    side = beside % (2 * BORDER)
    outer = beside < 0
    h = tl.where(outer, line + tl.where(line >= BORDER, HEIGHT, 0), BORDER + beside // (2 * BORDER))
    w = tl.where(outer, column, side + tl.where(side >= BORDER, WIDTH, 0))
    row = (image * (HEIGHT + 2 * BORDER) + h) * wide + w
    at = base + row[:, None].to(tl.int64) * PITCH + k[None, :]
    zeros = tl.zeros((BLOCK, k.shape[0]), dtype=kind)
    tl.store(at, zeros, mask=(pixel < samples * ring)[:, None] & k_ok[None, :])


@triton.jit(do_not_specialize=["rows", "samples", "planes"])
def _lower(
    g_ptr, y_ptr, w_ptr, factors_ptr, slopes_ptr, x_ptr, to_ptr, dy_ptr, jobs_ptr, rows, AREA: tl.constexpr, samples,
    size, planes, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    BORDER: tl.constexpr, to_size, dy_size, C: tl.constexpr, FAN_IN: tl.constexpr, PITCH: tl.constexpr,
    DY_PITCH: tl.constexpr, WEIGHTS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DROPS: tl.constexpr, EXTERNAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """∂y, dense, and ∂ of the depthwise result, ∂y · matrix, within a BORDER of zeros.

    EXTERNAL: the latter is the gradient of the input tensor itself, where that is positive.
    """
    job = jobs_ptr + tl.program_id(1) * 12
    matrix, columns = tl.load(job + 7) * WEIGHTS, tl.load(job + 8) * COLUMNS
    unit, first, shift = tl.load(job + 9), tl.load(job + 10) * 16, tl.load(job + 11)
    column = tl.load(job + 6) * COLUMNS
    k = first + tl.arange(0, BLOCK_K)
    k_ok = k < FAN_IN
    kind = to_ptr.dtype.element_ty
    if BORDER > 0:
        tiles = (rows + BLOCK_M - 1) // BLOCK_M
        if tl.program_id(0) >= tiles:
            base = to_ptr + unit.to(tl.int64) * to_size
            pixel = (tl.program_id(0) - tiles) * BLOCK_M
            _clear_border(base, pixel, samples, k, k < PITCH, kind, OUT_HEIGHT, OUT_WIDTH, BORDER, PITCH, BLOCK_M)
            return
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_ok = m < rows
    g_rows, y_rows, slopes, factor = _pull_rows(
        job, g_ptr, y_ptr, factors_ptr, slopes_ptr, size, m, m_ok, AREA, samples, C, COLUMNS, DROPS
    )
    total = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for n0 in range(0, columns, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        n_ok = n < columns
        dy = _pull(g_rows, y_rows, slopes, factor, m_ok, n, n_ok, planes, C, DROPS).to(kind)
        at = dy_ptr + unit.to(tl.int64) * dy_size + (m * DY_PITCH)[:, None] + (column + n)[None, :]
        tl.store(at, dy, mask=m_ok[:, None] & n_ok[None, :] & (first == 0))
        weight = tl.load(
            w_ptr + matrix + (n * FAN_IN)[:, None] + k[None, :], mask=n_ok[:, None] & k_ok[None, :], other=0.0
        )
        total = tl.dot(dy, weight.to(kind), total, input_precision=PRECISION)
    ok = m_ok[:, None] & k_ok[None, :]
    if EXTERNAL and STRIDE == 1:
        row = m
    else:
        image = m // AREA
        inside = m - image * AREA
        h = (inside // OUT_WIDTH) * STRIDE + shift
        w = (inside % OUT_WIDTH) * STRIDE + shift
        if EXTERNAL:
            ok = ok & ((h < HEIGHT) & (w < WIDTH))[:, None]
            row = (image * HEIGHT + h) * WIDTH + w
        else:
            row = (image * (OUT_HEIGHT + 2 * BORDER) + h) * (OUT_WIDTH + 2 * BORDER) + w
    at = row[:, None].to(tl.int64) * PITCH + k[None, :]
    if EXTERNAL:
        x = tl.load(x_ptr + at, mask=ok, other=0.0)
        tl.store(to_ptr + at, tl.where(x > 0, total, 0.0).to(kind), mask=ok)
    else:
        whole = m_ok[:, None] & (k < PITCH)[None, :]  # what is beyond the channels is zero: so are the weights there
        tl.store(to_ptr + unit.to(tl.int64) * to_size + at, total.to(kind), mask=whole)


@triton.jit(do_not_specialize=["rows", "rows_each"])
def _weight_gradient(
    dy_ptr, x_ptr, to_ptr, jobs_ptr, rows, rows_each, TALL: tl.constexpr, WIDE: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, dy_size, x_size, to_size, DY_PITCH: tl.constexpr, FAN_IN: tl.constexpr,
    X_PITCH: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXTERNAL: tl.constexpr, WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ over rows of ∂y[n] · x[tap, k]: the gradient of a dense kernel.

    Taps and channels are one axis of SIZE² · X_PITCH columns, so that a tensor core's block wastes only what is missing
    in its last one. Between the channels of two taps may lie columns of nothing, whose sums are not stored. WHOLE: all
    stages write planes from their first column on. ALIGNED: blocks are whole lines of one image, so that addresses
    differ by one number from block to block.
    """
    job = jobs_ptr + tl.program_id(0) * 10
    unit, column, columns = tl.load(job), tl.load(job + 1) * COLUMNS, tl.load(job + 2) * COLUMNS
    source, dilation, shift, padding = tl.load(job + 3), tl.load(job + 4), tl.load(job + 5), tl.load(job + 6)
    to = tl.load(job + 7)
    n = tl.load(job + 8) * 16 + tl.arange(0, BLOCK_N)
    k = tl.load(job + 9) * 16 + tl.arange(0, BLOCK_K)
    tap = k // X_PITCH
    channel = k % X_PITCH
    away = ((tap // SIZE) * WIDE + tap % SIZE) * dilation * X_PITCH + channel
    k_ok = k < SIZE * SIZE * X_PITCH
    if WHOLE:
        column = 0
    # Columns beyond the last are those of another stage or nothing; a mask of them would make loads narrower.
    n_ok = column + n < DY_PITCH
    area: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    begin = tl.program_id(1) * rows_each
    end = tl.minimum(begin + rows_each, rows)
    dy_base = dy_ptr + unit.to(tl.int64) * dy_size + column
    base = x_ptr + source.to(tl.int64) * x_size
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    inner = tl.arange(0, BLOCK_M)
    dy_at = dy_base + (inner * DY_PITCH)[:, None] + n[None, :]
    places = ((inner // OUT_WIDTH * WIDE + inner % OUT_WIDTH) * STRIDE + shift) * X_PITCH
    x_at = base + places[:, None] + away[None, :]
    for start in range(begin, end, BLOCK_M):
        if ALIGNED:
            image = start // area
            line = (start - image * area) // OUT_WIDTH * STRIDE
            dy = tl.load(dy_at + start * DY_PITCH, mask=n_ok[None, :], other=0.0)
            x = tl.load(x_at + (image * TALL + line) * WIDE * X_PITCH, mask=k_ok[None, :], other=0.0)
        else:
            m = start + inner
            m_ok = m < end
            image = m // area
            inside = m - image * area
            h = (inside // OUT_WIDTH) * STRIDE
            w = (inside % OUT_WIDTH) * STRIDE
            row = (image * TALL + h) * WIDE + w + shift
            ok = m_ok[:, None] & k_ok[None, :]
            if EXTERNAL and STRIDE > 1:
                ok = ok & ((h - padding < TALL) & (w - padding < WIDE))[:, None]
            dy = tl.load(dy_at + start * DY_PITCH, mask=m_ok[:, None] & n_ok[None, :], other=0.0)
            x = tl.load(base + (row * X_PITCH)[:, None] + away[None, :], mask=ok, other=0.0)
        if EXTERNAL:
            x = tl.maximum(x, 0.0).to(x.dtype)
        total = tl.dot(tl.trans(dy), x, total, input_precision=PRECISION)
    at = to_ptr + tl.program_id(1).to(tl.int64) * to_size + to + (n * FAN_IN)[:, None]
    at += (tap * columns * FAN_IN + channel)[None, :]
    tl.store(at, total, mask=(n < columns)[:, None] & (k_ok & (channel < FAN_IN))[None, :])


@triton.jit
def _sum_splits(sums_ptr, to_ptr, jobs_ptr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Σ over the splits of partial sums: of dense kernels into the first split, of matrices into their gradients."""
    job = jobs_ptr + tl.program_id(0) * 6
    start, length, apart, splits = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3)
    i = tl.load(job + 4) * BLOCK + tl.arange(0, BLOCK)
    to = tl.load(job + 5)
    ok = i < length
    total = tl.zeros((SPLITS, BLOCK), dtype=tl.float32)
    for begin in range(0, splits, SPLITS):
        split = begin + tl.arange(0, SPLITS)
        at = sums_ptr + start + (split * apart)[:, None] + i[None, :]
        total += tl.load(at, mask=(split < splits)[:, None] & ok[None, :], other=0.0)
    found = tl.sum(total, 0)
    if to >= 0:
        tl.store(to_ptr + to + i, found, mask=ok)
    else:
        tl.debug_barrier()  # before that, all of the first split has been read
        tl.store(sums_ptr + start + i, found, mask=ok)


@triton.jit
def _finish_weights(
    dense_ptr, w_ptr, depth_ptr, to_ptr, jobs_ptr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """From the gradient of the dense kernel, depthwise[tap, k] · matrix[n, k], to those of its two factors."""
    job = jobs_ptr + tl.program_id(0) * 5
    dense, matrix, depth, start = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3) * C
    taps = tl.load(job + 4)
    n = tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    k_ok = k < C
    ok = (n < C)[:, None] & k_ok[None, :]
    inner = (n * C)[:, None] + k[None, :]
    weight = tl.load(w_ptr + matrix + inner, mask=ok, other=0.0)
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for tap in range(taps):
        gradient = tl.load(dense_ptr + dense + tap * C * C + inner, mask=ok, other=0.0)
        scale = tl.load(depth_ptr + start + tap * C + k, mask=k_ok, other=0.0)
        total += gradient * scale[None, :]
        tl.store(to_ptr + depth + k * taps + tap, tl.sum(gradient * weight, 0), mask=k_ok)
    tl.store(to_ptr + matrix + inner, total, mask=ok)


@triton.jit(do_not_specialize=["rows", "samples", "planes"])
def _pulls(
    g_ptr, y_ptr, factors_ptr, slopes_ptr, to_ptr, jobs_ptr, rows, AREA: tl.constexpr, samples, size, planes,
    C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """∂y of pools, dense."""
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2) * CB + tl.arange(0, CB)
    c_ok = c < C
    m_ok = m < rows
    job = jobs_ptr + tl.program_id(1) * 7
    g_rows, y_rows, slopes, factor = _pull_rows(
        job, g_ptr, y_ptr, factors_ptr, slopes_ptr, size, m, m_ok, AREA, samples, C, C, DROPS
    )
    dy = _pull(g_rows, y_rows, slopes, factor, m_ok, c, c_ok, planes, C, DROPS)
    to = to_ptr + tl.program_id(1).to(tl.int64) * size + (m * C)[:, None] + c[None, :]
    tl.store(to, dy.to(to_ptr.dtype.element_ty), mask=m_ok[:, None] & c_ok[None, :])


@triton.jit(do_not_specialize=["rows", "samples", "planes", "terms"])
def _gather(
    x_ptr, coefficients_ptr, moments_ptr, depth_ptr, lowered_ptr, dy_ptr, pulled_ptr, dx_ptr, factors_ptr,
    winners_ptr, partial_ptr, sources_ptr, jobs_ptr, others_ptr, rows, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, BORDER: tl.constexpr, samples, x_size, dy_size, lowered_size,
    planes, terms, C: tl.constexpr, PITCH: tl.constexpr, CB: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, DROPS: tl.constexpr, POOLED: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """The gradient of a plane's value: of all convolutions, identities and pools that read it.

    SIZE: that of all windows, 0 where they differ. STEP: taps of a line that are read at a time.
    """
    own = sources_ptr + tl.program_id(1) * 10
    unit, column, distance, source = tl.load(own), tl.load(own + 1) * C, tl.load(own + 2) * C, tl.load(own + 3)
    begin, end, other, last = tl.load(own + 4), tl.load(own + 5), tl.load(own + 6), tl.load(own + 7)
    adds, place = tl.load(own + 8), tl.load(own + 9)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2) * CB + tl.arange(0, CB)
    c_ok = c < C
    m_ok = m < rows
    ok = m_ok[:, None] & c_ok[None, :]
    area = HEIGHT * WIDTH
    within = tl.minimum(m, rows - 1)  # a row that exists: windows are read without a mask of rows
    image = within // area
    inside = within - image * area
    i = inside // WIDTH
    j = inside % WIDTH
    tall = OUT_HEIGHT + 2 * BORDER
    wide = OUT_WIDTH + 2 * BORDER
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for number in range(begin, end):
        job = jobs_ptr + number * 5
        size, dilation, padding = tl.load(job), tl.load(job + 1), tl.load(job + 2)
        depth, lowered = tl.load(job + 3) * C, tl.load(job + 4)
        base = lowered_ptr + lowered.to(tl.int64) * lowered_size
        if SIZE > 0:
            size = SIZE
        for r in range(size):
            h = i + padding - r * dilation
            if STRIDE == 1:
                start = (image * tall + h + BORDER) * wide + BORDER
            else:
                h_ok = (h & 1) == 0
                start = (image * tall + (h >> 1) + BORDER) * wide + BORDER
            for left in range(0, size, STEP):
                for step in tl.static_range(STEP):  # that many loads are under way at a time
                    s = left + step
                    w = j + padding - s * dilation
                    here = (c < PITCH)[None, :]
                    if STRIDE == 2:
                        here = here & (h_ok & ((w & 1) == 0))[:, None]
                        w = w >> 1
                    if SIZE == 0:
                        here = here & (s < size)
                    d = tl.load(base + (start + w)[:, None] * PITCH + c[None, :], mask=here, other=0.0).to(tl.float32)
                    if SIZE > 1:  # what is beyond the channels is not stored
                        weight = tl.load(depth_ptr + depth + (r * size + s) * C + c, mask=c_ok)
                    else:
                        weight = tl.load(
                            depth_ptr + depth + (r * size + s) * C + c, mask=c_ok & (depth >= 0) & (s < size), other=1.0
                        )
                    total += d * weight[None, :]
    at = unit.to(tl.int64) * x_size + column + m[:, None] * distance + c[None, :]
    y = tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
    a = tl.load(coefficients_ptr + source * C + c, mask=c_ok, other=0.0)
    b = tl.load(coefficients_ptr + (planes + source) * C + c, mask=c_ok, other=0.0)
    total = tl.where(y * a[None, :] + b[None, :] > 0, total, 0.0)
    total += tl.load(dx_ptr + at, mask=ok & (adds > 0), other=0.0).to(tl.float32)
    for number in range(other, last):
        # Of an identity where its gradient lies and its path; of a pool its number and slot (-1: an average).
        job = others_ptr + number * 6
        if tl.load(job + 5) == -2:
            g_unit, g_column, apart, path = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C, tl.load(job + 3)
            g = tl.load(
                dy_ptr + g_unit.to(tl.int64) * dy_size + g_column + m[:, None] * apart + c[None, :],
                mask=ok,
                other=0.0,
            ).to(tl.float32)
            if DROPS:
                factor = tl.load(factors_ptr + path * samples + image, mask=m_ok & (path >= 0), other=1.0)
                g *= factor[:, None]
            total += g
        elif POOLED:
            pool, slot = tl.load(job + 4), tl.load(job + 5)
            for tap in range(9):
                h = i + 1 - tap // 3
                w = j + 1 - tap % 3
                here = m_ok & (h >= 0) & (w >= 0)
                if STRIDE == 2:
                    here = here & ((h & 1) == 0) & ((w & 1) == 0)
                    h = h >> 1
                    w = w >> 1
                here = here & (h < OUT_HEIGHT) & (w < OUT_WIDTH)
                inner = (((image * OUT_HEIGHT + h) * OUT_WIDTH + w) * C)[:, None] + c[None, :]
                seen = here[:, None] & c_ok[None, :]
                dy = tl.load(pulled_ptr + pool.to(tl.int64) * dy_size + inner, mask=seen, other=0.0).to(tl.float32)
                if slot >= 0:
                    won = tl.load(winners_ptr + slot.to(tl.int64) * dy_size + inner, mask=seen, other=9).to(tl.int32)
                    total += tl.where(won == tap, dy, 0.0)
                else:
                    top = h * STRIDE - 1
                    left = w * STRIDE - 1
                    high = tl.minimum(top + 3, HEIGHT) - tl.maximum(top, 0)
                    broad = tl.minimum(left + 3, WIDTH) - tl.maximum(left, 0)
                    total += dy / tl.maximum(high * broad, 1).to(tl.float32)[:, None]
    g = total.to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + at, g, mask=ok)
    if STATS:
        mean = tl.load(moments_ptr + source * C + c, mask=c_ok, other=0.0)
        rstd = tl.load(moments_ptr + (planes + source) * C + c, mask=c_ok, other=0.0)
        g = tl.where(ok, g.to(tl.float32), 0.0)
        to = partial_ptr + (tl.program_id(0) * terms + place) * C + c
        tl.store(to, tl.sum(g, 0), mask=c_ok)
        normed = (y - mean[None, :]) * rstd[None, :]
        tl.store(to + tl.num_programs(0) * terms * C, tl.sum(g * normed, 0), mask=c_ok)


@functools.cache
def _stages_of(program):
    return (*program.preprocess, *(s for r in program.rounds for s in (*r.first, *r.second)))


@functools.cache
def _units(program):
    """What divides all offsets of matrices (at most 16), and all columns and widths of what stages write."""
    stages = _stages_of(program)
    widths = [n for s in stages for n in (s.column, s.width)]
    return math.gcd(16, *(s.matrix for s in stages)), math.gcd(program.channels, *widths)


@functools.cache
def _first_depth(program):
    """Where depthwise kernels begin in the flat parameters; they lie side by side."""
    return min((s.depth for s in _stages_of(program) if s.depth != NONE), default=0)


@dataclass(frozen=True)
class Read:
    """Maps that stages read, by source: `tall` × `wide` pixels of `pitch` values with a border, `size` values each."""

    tensor: torch.Tensor
    size: int
    pitch: int
    tall: int
    wide: int
    border: int
    sources: dict[int, int]

    def window(self, stage):
        """Which map, dilation, distance from a pixel of the output to its window's first, padding."""
        shift = (self.border - stage.padding) * (self.wide + 1)
        return self.sources[stage.source], stage.dilation, shift, stage.padding


class Lowered(NamedTuple):
    """∂ of depthwise results within a border of zeros, `size` elements each."""

    tensor: torch.Tensor
    size: int
    border: int


class WeightSums(NamedTuple):
    """Partial sums of weight gradients of a group of stages, [splits, length] from `start`; `at`: those of a stage."""

    start: int
    length: int
    splits: int
    rows_each: int
    block_n: int
    block_k: int
    at: tuple[int, ...]


def by_size(stages):
    """Stages in groups of one window size, whose loops the compiler then knows."""
    return [tuple(s for s in stages if s.size == size) for size in sorted({s.size for s in stages}, reverse=True)]


class Run:
    """One forward or backward pass of a program: buffers, and the order in which kernels fill them."""

    def __init__(self, program, parameters, running, factors, inputs):
        self.program, self.parameters, self.running, self.factors, self.inputs = (
            program, parameters, running, factors, inputs,
        )  # fmt: skip
        self.dtype, self.device = inputs[-1].dtype, inputs[-1].device
        n, height, width = inputs[-1].shape[:3]
        self.n, self.height, self.width = n, height, width
        self.out_height, self.out_width = -(-height // program.stride), -(-width // program.stride)
        self.rows_in, self.rows = n * height * width, n * self.out_height * self.out_width
        self.c = program.channels
        self.precision = "tf32x3" if self.dtype == torch.float32 else "tf32"
        self.blocks = blocks_for(self.c)
        self.block_c = min(self.blocks.channels, padded(self.c))
        self.tile = self.blocks.stage_rows
        self.pitch = triton.cdiv(self.c, self.blocks.pitch) * self.blocks.pitch
        self.norms = {norm.plane: norm for norm in program.norms}
        self.weights_unit, self.columns_unit = _units(program)
        self.given = self.buffer = self.winners = self.depths = None

    # Where planes lie.

    def unit(self, plane):
        p = self.program
        if p.is_node(plane):
            return 0
        if plane < p.inputs:
            return p.nodes + plane if p.stride == 1 else plane
        return plane if p.stride == 1 else plane - p.inputs

    def view(self, plane):
        """(unit, column, distance of rows) of a plane; the latter two in multiples of c, which kernels then know."""
        p = self.program
        if p.is_node(plane):
            return 0, plane - p.inputs, p.nodes
        return self.unit(plane), 0, 1

    def units(self):
        p = self.program
        return p.planes if p.stride == 1 else p.planes - p.inputs

    def allocate(self):
        """A buffer of all planes of the output's resolution, and one of the inputs' (the same where none strides)."""
        p, c = self.program, self.c
        buffer = torch.empty(self.units() * self.rows * c, dtype=self.dtype, device=self.device)
        given = (
            buffer if p.stride == 1 else torch.empty(p.inputs * self.rows_in * c, dtype=self.dtype, device=self.device)
        )
        return given, buffer

    def output(self):
        """The nodes side by side, [n, nodes · c, h', w']."""
        p = self.program
        size = self.rows * p.nodes * self.c
        nodes = self.buffer[:size].view(self.n, self.out_height, self.out_width, p.nodes * self.c)
        return nodes.permute(0, 3, 1, 2)

    def tiles(self, rows):
        return triton.cdiv(rows, self.tile)

    # Forward.

    def forward(self):
        p, c = self.program, self.c
        self.given, self.buffer = self.allocate()
        self.winners = torch.empty(p.slots * self.rows * c, dtype=torch.uint8, device=self.device)
        self.begin()
        partial = self.parameters.new_empty(2, self.tiles(self.rows), p.planes, c) if self.running is None else None
        early = self.parameters.new_empty(2, self.tiles(self.rows_in), p.inputs, c) if self.running is None else None
        for number, x in enumerate(self.inputs):
            stages = tuple(s for s in p.preprocess if s.source == -1 - number)
            self._run_stages(stages, self._external(x), self.given, early, (self.height, self.width), self.rows_in)
        self._measure(early, tuple(range(p.inputs)), self.rows_in)
        for plane in (p.inputs - 1, *p.node_planes):
            if p.is_node(plane):
                self._add_up(plane)
            found = p.round_of(plane)
            if found is None:
                continue
            x = self.given if plane < p.inputs else self.buffer
            size = (self.out_height, self.out_width)
            if found.first:
                self._run_stages(found.first, self._activated(found.first, x), self.buffer, partial, size, self.rows)
            self._pool(found.pools, x, partial)
            self._measure(partial, found.measured, self.rows)
            if found.second:
                read = self._activated(found.second, self.buffer)
                self._run_stages(found.second, read, self.buffer, partial, size, self.rows)
            self._measure(partial, found.measured_second, self.rows)

    def begin(self):
        """Depthwise kernels in the kernels' order, and the planes' state [8, planes, c].

        Mean, 1/√(variance + eps) and variance; the two coefficients of the value, 1 and 0 without a norm; the three of
        the gradient, 1, 0 and 0, which the backward pass fills.
        """
        p, c = self.program, self.c
        deep = [s for s in _stages_of(p) if s.depth != NONE]
        jobs = tuple((s.depth, self._depth_at(s), s.taps) for s in deep)
        self.depths = self.parameters.new_empty(sum(s.taps for s in deep) * c)
        self.set_state(self.parameters.new_empty(8, p.planes, c))
        longest = max(p.planes, *(s.taps for s in deep), 1) * c
        _start[(len(jobs) + 8, triton.cdiv(longest, 1024))](
            self.parameters, self.depths, self.state, table(jobs or ((0,) * 3,), self.device), len(jobs), p.planes * c,
            C=c, BLOCK=1024,
        )  # fmt: skip
        if self.running is not None:
            jobs = tuple((norm.plane, norm.scale, norm.shift) for norm in p.norms)
            _known_moments[(len(jobs), triton.cdiv(c, 128))](
                self.running, self.parameters, self.moments, self.coefficients, table(jobs, self.device), p.planes,
                p.eps, C=c, BLOCK=128,
            )  # fmt: skip

    def set_state(self, state):
        self.state, self.moments, self.coefficients, self.slopes = state, state[:3], state[3:5], state[5:]

    def _depth_at(self, stage):
        """Offset of its depthwise kernel among those, in multiples of c."""
        return NONE if stage.depth == NONE else (stage.depth - _first_depth(self.program)) // self.c

    def _activated(self, stages, x):
        """ReLU(z) of what stages read, each plane within a border of zeros that windows reach into."""
        sources = tuple(sorted({s.source for s in stages}))
        border = max(max(s.padding, -s.padding) for s in stages)
        height, width = self._size_of(stages[0])
        tall, wide = height + 2 * border, width + 2 * border
        rows = self.n * tall * wide
        size = rows * self.pitch
        to = torch.empty(len(sources) * size, dtype=self.dtype, device=self.device)
        jobs = tuple((*self.view(source), source) for source in sources)
        block = max(1, self.blocks.add_elements // self.block_c)
        _activate[(triton.cdiv(rows, block), len(sources), triton.cdiv(self.pitch, self.block_c))](
            x, self.coefficients, to, table(jobs, self.device), rows, height, width, border, self._plane_size(x), size,
            self.program.planes, C=self.c, PITCH=self.pitch, CB=self.block_c, BLOCK=block,
        )  # fmt: skip
        return Read(to, size, self.pitch, tall, wide, border, {source: i for i, source in enumerate(sources)})

    def _external(self, x):
        """An input tensor: it has no border."""
        return Read(
            x, x.numel(), x.shape[3], x.shape[1], x.shape[2], 0, {-1 - i: 0 for i in range(self.program.inputs)}
        )

    def _run_stages(self, stages, read, y, partial, size, rows):
        """size: that of the output."""
        for group in by_size(stages):
            self._run_group(group, read, y, partial, size, rows)

    def _run_group(self, stages, read, y, partial, size, rows):
        p, c = self.program, self.c
        external = stages[0].source < 0
        block_n = min(256, padded(max(stage.width for stage in stages)))
        depth = self.blocks.stage_depth if not external else self.blocks.input_depth // (2 if block_n > 128 else 1)
        jobs = tuple(
            (*read.window(stage), self._depth_at(stage), stage.matrix // self.weights_unit,
             stage.width // self.columns_unit, self.unit(stage.plane), stage.plane, stage.column // self.columns_unit,
             first // 16)
            for stage in stages
            for first in range(0, stage.width, block_n)
        )  # fmt: skip
        _stages[(triton.cdiv(rows, self.tile), len(jobs))](
            read.tensor, self.parameters, self.depths, y, y if partial is None else partial, table(jobs, self.device),
            rows, read.tall, read.wide, size[0], size[1], read.size, self._plane_size(y),
            p.inputs if external else p.planes, C=c, FAN_IN=stages[0].fan_in, PITCH=read.pitch,
            WEIGHTS=self.weights_unit, COLUMNS=self.columns_unit, SIZE=stages[0].size, STRIDE=stages[0].stride,
            BLOCK_M=self.tile, BLOCK_N=block_n, BLOCK_K=min(depth, padded(stages[0].fan_in)), EXTERNAL=external,
            STATS=partial is not None, PRODUCTS=bool(self.blocks.product_sums), EVEN=rows % self.tile == 0,
            PRECISION=self.precision,
            num_warps=8 if external else self.blocks.stage_warps,
        )  # fmt: skip

    def _plane_size(self, buffer):
        return (self.rows_in if buffer is self.given and self.program.stride != 1 else self.rows) * self.c

    def _size_of(self, stage):
        """Height and width of what a stage reads."""
        if stage.source < self.program.inputs:
            return self.height, self.width
        return self.out_height, self.out_width

    def _measure(self, partial, planes, rows):
        if partial is None or not planes:
            return
        p, c = self.program, self.c
        jobs = tuple((plane, self.norms[plane].scale, self.norms[plane].shift) for plane in planes)
        block_c = min(16, padded(c))
        _finish_moments[(len(jobs), triton.cdiv(c, block_c))](
            partial, self.parameters, self.moments, self.coefficients, table(jobs, self.device), rows, partial.shape[1],
            p.planes, partial.shape[2], p.eps, C=c, CB=block_c, TILE=self.tile,
            BLOCK=min(256, triton.next_power_of_2(partial.shape[1])),
        )  # fmt: skip

    def _drops(self):
        return {"AREA": self.out_height * self.out_width, "samples": self.n, "DROPS": self.factors is not None}

    def _scales(self):
        return self.parameters if self.factors is None else self.factors

    def _add_up(self, plane):
        p, c = self.program, self.c
        node_inputs = p.node_inputs[plane - p.inputs]
        jobs = tuple((*self.view(a.plane), a.plane, a.path) for a in node_inputs) or ((0, 0, 0, 0, NONE),)
        _, column, distance = self.view(plane)
        block = max(1, self.blocks.add_elements // self.block_c)
        _add_up[(triton.cdiv(self.rows, block), triton.cdiv(c, self.block_c))](
            self.buffer, self.coefficients, self._scales(), table(jobs, self.device), 0, len(node_inputs), self.rows,
            size=self.rows * c, planes=p.planes, column=column, distance=distance, C=c, CB=self.block_c, BLOCK=block,
            **self._drops(),
        )  # fmt: skip

    def _pool(self, pools, x, partial):
        if not pools:
            return
        p, c = self.program, self.c
        first = pools[0].source < p.inputs
        height, width = (self.height, self.width) if first else (self.out_height, self.out_width)
        jobs = tuple((*self.view(q.source), q.source, q.plane, self.unit(q.plane), q.slot) for q in pools)
        stats = partial is not None and any(q.plane in self.norms for q in pools)
        _pools[(self.tiles(self.rows), len(jobs), triton.cdiv(c, self.block_c))](
            x, self.coefficients, self.buffer, self.winners, partial if stats else self.parameters,
            table(jobs, self.device), self.rows, height, width, self.out_height, self.out_width, self._plane_size(x),
            self.rows * c, p.planes, C=c, CB=self.block_c, STRIDE=pools[0].stride, BLOCK=self.tile, STATS=stats,
            num_warps=8,
        )  # fmt: skip

    # Backward.

    def backward(self, arrived):
        """arrived: the output's gradient, [n, h', w', nodes · c]; returns those of the parameters and input tensors."""
        p, c = self.program, self.c
        self.given_gradient, self.gradient = self.allocate()
        size = self.rows * p.nodes * c
        self.gradient[:size].copy_(arrived.view(-1))
        self.parameter_gradient = torch.empty_like(self.parameters)  # kernels write all of it
        self.weighing = self._plan_weights()
        self.sums = self.parameters.new_empty(sum(group.splits * group.length for group in self.weighing.values()))
        for plane in reversed((p.inputs - 1, *p.node_planes)):
            found = p.round_of(plane)
            if found is not None:
                self._leave(found)
            if p.is_node(plane):
                self._arrive(plane)
        found = self._leave_inputs()
        self._finish_weights()
        return self.parameter_gradient, found

    def _pull_fields(self, plane, column=0):
        """Where the gradient of a plane's value is read: at its node where it has one, else where it was gathered."""
        p = self.program
        place = consumers(p).get(plane)
        if place is None:
            return *self.view(plane), NONE, self.unit(plane), plane, column // self.columns_unit
        j, i = place
        return *self.view(p.inputs + j), p.node_inputs[j][i].path, self.unit(plane), plane, column // self.columns_unit

    def _arrive(self, node):
        """Sums over the gradient of a finished node, for the norms of all that arrives there."""
        p, c = self.program, self.c
        planes = tuple(a.plane for a in p.node_inputs[node - p.inputs] if a.plane in self.norms and a.plane >= p.inputs)
        if not planes:
            return
        jobs = tuple(self._pull_fields(plane) for plane in planes)
        blocks = triton.cdiv(c, self.block_c)
        block = max(1, self.blocks.sums_elements // self.block_c)
        splits = max(1, min(triton.cdiv(self.rows, block), triton.cdiv(1056, len(jobs) * blocks)))
        each = triton.cdiv(triton.cdiv(self.rows, splits), block) * block
        splits = triton.cdiv(self.rows, each)
        partial = self.parameters.new_empty(2, splits, len(jobs), c)
        _arrival_sums[(splits, len(jobs), blocks)](
            self.buffer, self.gradient, self.moments, self._scales(), partial, table(jobs, self.device), self.rows,
            each, size=self.rows * c, planes=p.planes, terms=len(jobs), C=c, CB=self.block_c, BLOCK=block,
            **self._drops(),
        )  # fmt: skip
        self._finish_slopes(partial, planes, self.rows)

    def _finish_slopes(self, partial, planes, rows):
        p, c = self.program, self.c
        norms = self.norms
        jobs = tuple((i, plane, norms[plane].scale, norms[plane].shift) for i, plane in enumerate(planes))
        block_c = min(16, padded(c))
        _finish_slopes[(len(jobs), triton.cdiv(c, block_c))](
            partial, self.parameters, self.moments, self.slopes, self.parameter_gradient, table(jobs, self.device),
            partial.shape[1], partial.shape[2], p.planes, 1.0 / rows if self.running is None else 0.0, C=c,
            CB=block_c, BLOCK=min(256, triton.next_power_of_2(partial.shape[1])),
        )  # fmt: skip

    def _leave(self, found):
        """From the gradients of all that leaves a round's sources to those of the sources."""
        p = self.program
        inward = found.sources[0] < p.inputs
        if found.second:
            inner = tuple(stage.source for stage in found.second)
            lowered = self._lower_and_weigh(found.second, self.buffer)
            self._gather(inner, found.second, (), lowered, self.buffer, self.gradient, adds=False, stats=inner)
        x, dx = (self.given, self.given_gradient) if inward else (self.buffer, self.gradient)
        lowered = self._lower_and_weigh(found.first, x) if found.first else Lowered(x, 0, 0)
        stats = found.sources if inward else ()
        self._gather(found.sources, found.first, found.pools, lowered, x, dx, adds=not inward, stats=stats)

    def _lower_and_weigh(self, stages, x):
        """∂ of the depthwise results [stages, n, h' + 2 border, w' + 2 border, c]; and the gradients of weights."""
        p, c = self.program, self.c
        read = self._activated(stages, x)
        pixels = self.n * (self.out_height + 2 * read.border) * (self.out_width + 2 * read.border)
        size, block = pixels * self.pitch, self.blocks.lower_rows
        to = torch.empty(len(stages) * size, dtype=self.dtype, device=self.device)
        dy = torch.empty(len(stages) * self.rows * self.pitch, dtype=self.dtype, device=self.device)
        block_k = min(self.blocks.lower_columns, padded(c))
        jobs = tuple(
            (*self._pull_fields(s.plane, s.column), s.matrix // self.weights_unit, s.width // self.columns_unit, i,
             first // 16, read.border)
            for i, s in enumerate(stages)
            for first in range(0, s.fan_in, block_k)
        )  # fmt: skip
        border = triton.cdiv(pixels - self.rows, block)
        _lower[(triton.cdiv(self.rows, block) + border, len(jobs))](
            self.gradient, self.buffer, self.parameters, self._scales(), self.slopes, to, to, dy,
            table(jobs, self.device), self.rows, size=self.rows * c, planes=p.planes, HEIGHT=0, WIDTH=0,
            OUT_HEIGHT=self.out_height, OUT_WIDTH=self.out_width, BORDER=read.border, to_size=size,
            dy_size=self.rows * self.pitch, C=c, FAN_IN=c, PITCH=self.pitch, DY_PITCH=self.pitch,
            WEIGHTS=self.weights_unit, COLUMNS=self.columns_unit, STRIDE=1, BLOCK_M=block,
            BLOCK_N=min(self.blocks.lower_depth, padded(c)), BLOCK_K=block_k, EXTERNAL=False,
            PRECISION=self.precision, num_warps=self.blocks.lower_warps, num_stages=1, **self._drops(),
        )  # fmt: skip
        self._weigh(stages, read, dy, (self.out_height, self.out_width), self.rows)
        return Lowered(to, size, read.border)

    def _weigh(self, stages, read, dy, size, rows):
        """Partial sums of the gradients of the stages' dense kernels; dy [stages, rows, pitch]."""
        b = self.blocks
        numbered = {stage: i for i, stage in enumerate(stages)}
        for group in by_size(stages):
            plan = self.weighing[group]
            external = group[0].source < 0
            aligned = size[0] * size[1] % b.weight_rows == 0 and b.weight_rows % size[1] == 0
            aligned = aligned and not (external and group[0].stride > 1)  # those need a mask
            jobs = tuple(
                (numbered[s], s.column // self.columns_unit, s.width // self.columns_unit, *read.window(s), at,
                 n // 16, k // 16)
                for s, at in zip(group, plan.at, strict=True)
                for n in range(0, s.width, plan.block_n)
                for k in range(0, s.taps * read.pitch, plan.block_k)
            )  # fmt: skip
            _weight_gradient[(len(jobs), plan.splits)](
                dy, read.tensor, self.sums[plan.start :], table(jobs, self.device), rows, plan.rows_each, read.tall,
                read.wide, size[0], size[1], rows * self.pitch, read.size, plan.length, DY_PITCH=self.pitch,
                FAN_IN=group[0].fan_in, X_PITCH=read.pitch, COLUMNS=self.columns_unit, SIZE=group[0].size,
                STRIDE=group[0].stride, BLOCK_M=b.weight_rows, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
                EXTERNAL=external, WHOLE=self.columns_unit == self.c, ALIGNED=aligned, PRECISION=self.precision,
                num_warps=4 if plan.block_n * plan.block_k <= 2**13 else 8, num_stages=b.weight_stages,
            )  # fmt: skip

    def _plan_weights(self):
        """By group of stages that `_weigh` handles in one launch, where its partial sums lie."""
        p, b = self.program, self.blocks
        found, start = {}, 0
        inputs = [tuple(s for s in p.preprocess if s.source == -1 - i) for i in range(p.inputs)]
        inner = [stages for r in p.rounds for stages in (r.first, r.second)]
        for rows, stages in (*((self.rows_in, s) for s in inputs), *((self.rows, s) for s in inner)):
            for group in by_size(stages):
                external, fan_in = group[0].source < 0, group[0].fan_in
                columns = group[0].taps * (fan_in if external else self.pitch)
                most = b.weight_side if self.dtype == torch.bfloat16 else min(b.weight_side, 64)  # spills beyond it
                block_n = side_for(max(s.width for s in group), most)
                block_k = side_for(columns, most)
                jobs = sum(triton.cdiv(s.width, block_n) for s in group) * triton.cdiv(columns, block_k)
                splits = max(1, min(triton.cdiv(rows, 4 * b.weight_rows), triton.cdiv(b.weight_programs, jobs)))
                each = triton.cdiv(triton.cdiv(rows, splits), b.weight_rows) * b.weight_rows
                splits = triton.cdiv(rows, each)
                at = tuple(accumulate((s.taps * s.width * fan_in for s in group), initial=0))
                found[group] = WeightSums(start, at[-1], splits, each, block_n, block_k, at[:-1])
                start += splits * at[-1]
        return found

    def _finish_weights(self):
        """From partial sums to the gradients of matrices and depthwise kernels, for all stages at once."""
        c, block = self.c, 256
        adding, deep = [], []
        for group, plan in self.weighing.items():
            for s, at in zip(group, plan.at, strict=True):
                length = s.taps * s.width * s.fan_in
                to = NONE if s.size > 1 else s.matrix  # matrices without a depthwise kernel are done then
                adding += [
                    (plan.start + at, length, plan.length, plan.splits, i, to)
                    for i in range(triton.cdiv(length, block))
                ]
                if s.size > 1:
                    deep.append((plan.start + at, s.matrix, s.depth, self._depth_at(s), s.taps))
        _sum_splits[(len(adding),)](
            self.sums, self.parameter_gradient, table(tuple(adding), self.device), SPLITS=8, BLOCK=block
        )
        if not deep:
            return
        block_k = 16 if c <= 64 else 8
        _finish_weights[(len(deep), triton.cdiv(c, block_k))](
            self.sums, self.parameters, self.depths, self.parameter_gradient, table(tuple(deep), self.device), C=c,
            BLOCK_N=padded(c), BLOCK_K=block_k,
        )  # fmt: skip

    def _gather(self, sources, stages, pools, lowered, x, dx, *, adds, stats):
        p, c = self.program, self.c
        own, jobs, others = [], [], []
        for i, source in enumerate(sources):
            begin, other = len(jobs), len(others)
            jobs += [
                (s.size, s.dilation, s.padding, self._depth_at(s), at)
                for at, s in enumerate(stages)
                if s.source == source
            ]
            for j, node_inputs in enumerate(p.node_inputs):
                for a in node_inputs:
                    if a.plane == source and (source < p.inputs or p.is_node(source)):
                        others.append((*self.view(p.inputs + j), a.path, 0, -2))
            others += [(0, 0, 0, 0, number, q.slot) for number, q in enumerate(pools) if q.source == source]
            own.append((*self.view(source), source, begin, len(jobs), other, len(others), int(adds), i))
        first = sources[0] < p.inputs
        height, width, rows = (
            (self.height, self.width, self.rows_in) if first else (self.out_height, self.out_width, self.rows)
        )
        stride = p.stride if first else 1
        pulled = self._pulls(pools)
        sizes = {s.size for s in stages}
        size = sizes.pop() if len(sizes) == 1 else 0
        block = self.blocks.gather_rows // (2 if pools else 1)
        tiles = triton.cdiv(rows, block)
        partial = self.parameters.new_empty(2, tiles, len(sources), c) if stats else None
        _gather[(tiles, len(own), triton.cdiv(c, self.block_c))](
            x, self.coefficients, self.moments, self.depths, lowered.tensor, self.gradient,
            x if pulled is None else pulled, dx, self._scales(), self.winners,
            self.parameters if partial is None else partial, table(tuple(own), self.device),
            table(tuple(jobs) or ((0,) * 5,), self.device), table(tuple(others) or ((0,) * 6,), self.device), rows,
            height, width, self.out_height, self.out_width, lowered.border, self.n,
            self._plane_size(x), self.rows * c, lowered.size, p.planes, len(sources), C=c, PITCH=self.pitch,
            CB=self.block_c, SIZE=size, STEP=size or 3, STRIDE=stride, BLOCK=block, DROPS=self.factors is not None,
            POOLED=bool(pools),
            STATS=partial is not None, num_warps=self.blocks.gather_warps,
        )  # fmt: skip
        if partial is not None:
            self._finish_slopes(partial, sources, rows)

    def _pulls(self, pools):
        if not pools:
            return None
        p, c = self.program, self.c
        to = torch.empty(len(pools) * self.rows * c, dtype=self.dtype, device=self.device)
        jobs = tuple(self._pull_fields(q.plane) for q in pools)
        block = max(1, self.blocks.add_elements // self.block_c)
        _pulls[(triton.cdiv(self.rows, block), len(jobs), triton.cdiv(c, self.block_c))](
            self.gradient, self.buffer, self._scales(), self.slopes, to, table(jobs, self.device), self.rows,
            size=self.rows * c, planes=p.planes, C=c, CB=self.block_c, BLOCK=block, **self._drops(),
        )  # fmt: skip
        return to

    def _leave_inputs(self):
        """Gradients of the input tensors, [n, c_i, h_i, w_i]."""
        p, c = self.program, self.c
        found = []
        for number, x in enumerate(self.inputs):
            stages = tuple(s for s in p.preprocess if s.source == -1 - number)
            stride = stages[0].stride
            to = torch.zeros_like(x) if stride != 1 else torch.empty_like(x)
            block_k = min(self.blocks.lower_columns, padded(stages[0].fan_in))
            jobs = tuple(
                (
                    *self._pull_fields(s.plane, s.column),
                    s.matrix // self.weights_unit,
                    s.width // self.columns_unit,
                    i,
                    first // 16,
                    -s.padding,
                )
                for i, s in enumerate(stages)
                for first in range(0, s.fan_in, block_k)
            )
            dy = torch.empty(len(stages) * self.rows_in * self.pitch, dtype=self.dtype, device=self.device)
            fan_in, block = stages[0].fan_in, self.blocks.lower_rows
            _lower[(triton.cdiv(self.rows_in, block), len(jobs))](
                self.given_gradient, self.given, self.parameters, self._scales(), self.slopes, x, to, dy,
                table(jobs, self.device), self.rows_in, self.height * self.width, self.n, self._plane_size(self.given),
                p.planes, x.shape[1], x.shape[2], self.height, self.width, 0, 0, self.rows_in * self.pitch, C=c,
                FAN_IN=fan_in, PITCH=fan_in, DY_PITCH=self.pitch,
                WEIGHTS=self.weights_unit, COLUMNS=self.columns_unit, STRIDE=stride, BLOCK_M=block,
                BLOCK_N=min(self.blocks.lower_depth, padded(c)), BLOCK_K=block_k, DROPS=False, EXTERNAL=True,
                PRECISION=self.precision, num_warps=self.blocks.lower_warps, num_stages=1,
            )  # fmt: skip
            self._weigh(stages, self._external(x), dy, (self.height, self.width), self.rows_in)
            found.append(to.permute(0, 3, 1, 2))
        return found
