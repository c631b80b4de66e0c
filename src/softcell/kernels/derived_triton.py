# mypy: ignore-errors
"""Triton kernels of `derived`. A program handles some rows (pixels) and a block of channels.

A *view* says where a map lies: unit (multiples of rows · c), column, distance of rows. Jobs are rows of small integer
tables; those that read a gradient begin with the seven numbers of `_pull`, those that read a value have the seven of
`_value`.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from softcell.kernels.backend import padded, table
from softcell.kernels.derived import NONE, consumers


@dataclass(frozen=True)
class Blocks:
    """Sizes of blocks and warps, by kernel. `channels`: most channels of an elementwise block."""

    channels: int = 64
    rows: int = 128
    stage_depth: int = 64
    stage_warps: int = 8
    lower_depth: int = 64
    lower_columns: int = 64
    lower_warps: int = 8
    matrix_rows: int = 64
    matrix_side: int = 64
    matrix_warps: int = 8
    depth_elements: int = 1024
    depth_warps: int = 4
    gather_rows: int = 128
    gather_warps: int = 8
    sums_elements: int = 1024
    add_elements: int = 2048


BLOCKS = Blocks()


@triton.jit
def _value(
    job, x_ptr, w_ptr, coefficients_ptr, x_size, image, top, left, m_ok, k, k_ok, height, width, planes,
    C: tl.constexpr, FAN_IN: tl.constexpr, WEIGHTS: tl.constexpr, AFFINE: tl.constexpr,
):  # fmt: skip
    """depthwise(ReLU(z)) [rows, k] in float32; rows are given by image, top and left of their windows."""
    size, dilation, unit, column = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3) * FAN_IN
    distance, source, depth = tl.load(job + 4) * FAN_IN, tl.load(job + 5), tl.load(job + 6) * WEIGHTS
    base = x_ptr + unit.to(tl.int64) * x_size + column
    kernel = w_ptr + depth
    if AFFINE:
        at = coefficients_ptr + source * C + k
        a = tl.load(at, mask=k_ok, other=0.0)
        b = tl.load(at + planes * C, mask=k_ok, other=0.0)
    total = tl.zeros((top.shape[0], k.shape[0]), dtype=tl.float32)
    for r in range(size):
        h = top + r * dilation
        start = (image * height + h) * width
        h_ok = m_ok & (h >= 0) & (h < height)
        for first in range(0, size, 3):
            for i in tl.static_range(3):  # three loads at a time are under way
                s = first + i
                w = left + s * dilation
                ok = (h_ok & (w >= 0) & (w < width) & (s < size))[:, None] & k_ok[None, :]
                x = tl.load(base + (start + w)[:, None] * distance + k[None, :], mask=ok, other=0.0).to(tl.float32)
                if AFFINE:
                    x = x * a[None, :] + b[None, :]
                x = tl.where(ok, tl.maximum(x, 0.0), 0.0)
                weight = tl.load(kernel + (r * size + s) * FAN_IN + k, mask=k_ok & (depth >= 0) & (s < size), other=1.0)
                total += x * weight[None, :]
    return total


@triton.jit
def _pull(
    job, g_ptr, y_ptr, factors_ptr, slopes_ptr, size, m, m_ok, n, n_ok, area, samples, planes, C: tl.constexpr,
    COLUMNS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """∂y [rows, n] in float32: the gradient of a plane before its norm."""
    g_unit, g_column, distance, path = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C, tl.load(job + 3)
    y_unit, plane, column = tl.load(job + 4), tl.load(job + 5), tl.load(job + 6) * COLUMNS
    ok = m_ok[:, None] & n_ok[None, :]
    inner = column + n
    base = g_ptr + g_unit.to(tl.int64) * size + g_column
    g = tl.load(base + m[:, None] * distance + inner[None, :], mask=ok, other=0.0).to(tl.float32)
    if DROPS:
        factor = tl.load(factors_ptr + path * samples + m // area, mask=m_ok & (path >= 0), other=1.0)
        g *= factor[:, None]
    base = y_ptr + y_unit.to(tl.int64) * size
    y = tl.load(base + m[:, None] * C + inner[None, :], mask=ok, other=0.0).to(tl.float32)
    at = slopes_ptr + plane * C + inner
    slope = tl.load(at, mask=n_ok, other=0.0)
    back = tl.load(at + planes * C, mask=n_ok, other=0.0)
    level = tl.load(at + 2 * planes * C, mask=n_ok, other=0.0)
    return tl.where(ok, g * slope[None, :] + y * back[None, :] + level[None, :], 0.0)


@triton.jit(do_not_specialize=["rows", "height", "width", "out_height", "out_width", "planes", "measured"])
def _stages(
    x_ptr, w_ptr, coefficients_ptr, y_ptr, partial_ptr, jobs_ptr, rows, height, width, out_height, out_width, x_size,
    y_size, planes, measured, C: tl.constexpr, FAN_IN: tl.constexpr, WEIGHTS: tl.constexpr, COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, AFFINE: tl.constexpr, STATS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    job = jobs_ptr + tl.program_id(1) * 14
    padding, matrix, columns = tl.load(job + 7), tl.load(job + 8) * WEIGHTS, tl.load(job + 9) * COLUMNS
    unit, plane, column, first = (
        tl.load(job + 10),
        tl.load(job + 11),
        tl.load(job + 12) * COLUMNS,
        tl.load(job + 13) * 16,
    )
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_ok = m < rows
    area = out_height * out_width
    image = m // area
    inside = m - image * area
    top = (inside // out_width) * STRIDE - padding
    left = (inside % out_width) * STRIDE - padding
    n = first + tl.arange(0, BLOCK_N)
    n_ok = n < columns
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, FAN_IN, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        k_ok = k < FAN_IN
        value = _value(
            job, x_ptr, w_ptr, coefficients_ptr, x_size, image, top, left, m_ok, k, k_ok, height, width, planes, C,
            FAN_IN, WEIGHTS, AFFINE,
        )  # fmt: skip
        weight = tl.load(
            w_ptr + matrix + (n * FAN_IN)[None, :] + k[:, None], mask=n_ok[None, :] & k_ok[:, None], other=0.0
        )
        kind = y_ptr.dtype.element_ty
        total = tl.dot(value.to(kind), weight.to(kind), total, input_precision=PRECISION)
    y = total.to(y_ptr.dtype.element_ty)
    at = y_ptr + unit.to(tl.int64) * y_size + (m * C)[:, None] + (column + n)[None, :]
    tl.store(at, y, mask=m_ok[:, None] & n_ok[None, :])
    if STATS:
        value = tl.where(m_ok[:, None], y.to(tl.float32), 0.0)
        count = tl.minimum(rows - tl.program_id(0) * BLOCK_M, BLOCK_M)
        sums = tl.sum(value, 0)
        centred = tl.where(m_ok[:, None], value - (sums / count)[None, :], 0.0)
        to = partial_ptr + (tl.program_id(0) * measured + plane) * C + column + n
        tl.store(to, sums, mask=n_ok)
        tl.store(to + tl.num_programs(0) * measured * C, tl.sum(centred * centred, 0), mask=n_ok)


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
    tl.store(to + 2 * planes * C, variance, mask=c_ok)
    gamma = tl.load(w_ptr + scale + c, mask=c_ok & (scale >= 0), other=1.0)
    beta = tl.load(w_ptr + shift + c, mask=c_ok & (scale >= 0), other=0.0)
    to = coefficients_ptr + plane * C + c
    tl.store(to, gamma * rstd, mask=c_ok)
    tl.store(to + planes * C, beta - mean * gamma * rstd, mask=c_ok)


@triton.jit(do_not_specialize=["begin", "end", "rows", "area", "samples", "planes", "column", "distance"])
def _add_up(
    buffer_ptr, coefficients_ptr, factors_ptr, jobs_ptr, begin, end, rows, area, samples, size, planes, column,
    distance, C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr, DROPS: tl.constexpr,
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
            factor = tl.load(factors_ptr + path * samples + m // area, mask=m_ok & (path >= 0), other=1.0)
            value *= factor[:, None]
        total += value
    to = buffer_ptr + column * C + m[:, None] * (distance * C) + c[None, :]
    tl.store(to, total.to(buffer_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows", "height", "width", "out_height", "out_width", "planes"])
def _pools(
    x_ptr, coefficients_ptr, y_ptr, winners_ptr, partial_ptr, jobs_ptr, rows, height, width, out_height, out_width,
    x_size, y_size, planes, C: tl.constexpr, CB: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    STATS: tl.constexpr,
):  # fmt: skip
    job = jobs_ptr + tl.program_id(1) * 7
    unit, column, distance, source = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C, tl.load(job + 3)
    plane, to_unit, slot = tl.load(job + 4), tl.load(job + 5), tl.load(job + 6)
    largest = slot >= 0
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2) * CB + tl.arange(0, CB)
    c_ok = c < C
    m_ok = m < rows
    area = out_height * out_width
    image = m // area
    inside = m - image * area
    top = (inside // out_width) * STRIDE - 1
    left = (inside % out_width) * STRIDE - 1
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
        here = m_ok & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        ok = here[:, None] & c_ok[None, :]
        row = (image * height + h) * width + w
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


@triton.jit(do_not_specialize=["rows", "rows_each", "area", "samples", "planes", "terms"])
def _arrival_sums(
    buffer_ptr, gradient_ptr, moments_ptr, factors_ptr, partial_ptr, jobs_ptr, rows, rows_each, area, samples, size,
    planes, terms, C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr, DROPS: tl.constexpr,
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
            factor = tl.load(factors_ptr + path * samples + m // area, mask=m_ok & (path >= 0), other=1.0)
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


@triton.jit(do_not_specialize=["rows", "area", "samples", "planes", "height", "width", "out_width"])
def _lower(
    g_ptr, y_ptr, w_ptr, factors_ptr, slopes_ptr, x_ptr, to_ptr, jobs_ptr, rows, area, samples, size, planes, height,
    width, out_width, to_size, C: tl.constexpr, FAN_IN: tl.constexpr, WEIGHTS: tl.constexpr, COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DROPS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """∂ of the depthwise result: ∂y · matrix. MASKED: of the input tensor itself, where it is positive."""
    job = jobs_ptr + tl.program_id(1) * 12
    matrix, columns = tl.load(job + 7) * WEIGHTS, tl.load(job + 8) * COLUMNS
    unit, first, shift = tl.load(job + 9), tl.load(job + 10) * 16, tl.load(job + 11)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_ok = m < rows
    k = first + tl.arange(0, BLOCK_K)
    k_ok = k < FAN_IN
    total = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for n0 in range(0, columns, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        n_ok = n < columns
        dy = _pull(
            job, g_ptr, y_ptr, factors_ptr, slopes_ptr, size, m, m_ok, n, n_ok, area, samples, planes, C, COLUMNS, DROPS
        )
        weight = tl.load(
            w_ptr + matrix + (n * FAN_IN)[:, None] + k[None, :], mask=n_ok[:, None] & k_ok[None, :], other=0.0
        )
        kind = to_ptr.dtype.element_ty
        total = tl.dot(dy.to(kind), weight.to(kind), total, input_precision=PRECISION)
    ok = m_ok[:, None] & k_ok[None, :]
    if MASKED:
        if STRIDE == 1:
            row = m
        else:
            image = m // area
            inside = m - image * area
            h = (inside // out_width) * STRIDE + shift
            w = (inside % out_width) * STRIDE + shift
            ok = ok & ((h < height) & (w < width))[:, None]
            row = (image * height + h) * width + w
        at = row[:, None].to(tl.int64) * FAN_IN + k[None, :]
        x = tl.load(x_ptr + at, mask=ok, other=0.0)
        tl.store(to_ptr + at, tl.where(x > 0, total, 0.0).to(to_ptr.dtype.element_ty), mask=ok)
    else:
        at = to_ptr + unit.to(tl.int64) * to_size + m[:, None] * FAN_IN + k[None, :]
        tl.store(at, total.to(to_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows", "rows_each", "height", "width", "out_height", "out_width", "samples", "planes"])
def _matrix_gradient(
    g_ptr, y_ptr, w_ptr, factors_ptr, slopes_ptr, x_ptr, coefficients_ptr, to_ptr, jobs_ptr, rows, rows_each, height,
    width, out_height, out_width, samples, size, x_size, planes, to_size, C: tl.constexpr, FAN_IN: tl.constexpr,
    WEIGHTS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AFFINE: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    job = jobs_ptr + tl.program_id(0) * 19
    inner = job + 7
    padding, matrix, columns = tl.load(job + 14), tl.load(job + 15) * WEIGHTS, tl.load(job + 16) * COLUMNS
    n = tl.load(job + 17) * 16 + tl.arange(0, BLOCK_N)
    k = tl.load(job + 18) * 16 + tl.arange(0, BLOCK_K)
    n_ok = n < columns
    k_ok = k < FAN_IN
    area = out_height * out_width
    begin = tl.program_id(1) * rows_each
    end = tl.minimum(begin + rows_each, rows)
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in range(begin, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        m_ok = m < end
        image = m // area
        inside = m - image * area
        top = (inside // out_width) * STRIDE - padding
        left = (inside % out_width) * STRIDE - padding
        dy = _pull(
            job, g_ptr, y_ptr, factors_ptr, slopes_ptr, size, m, m_ok, n, n_ok, area, samples, planes, C, COLUMNS, DROPS
        )
        value = _value(
            inner, x_ptr, w_ptr, coefficients_ptr, x_size, image, top, left, m_ok, k, k_ok, height, width, planes, C,
            FAN_IN, WEIGHTS, AFFINE,
        )  # fmt: skip
        kind = y_ptr.dtype.element_ty
        total = tl.dot(tl.trans(dy.to(kind)), value.to(kind), total, input_precision=PRECISION)
    to = to_ptr + tl.program_id(1).to(tl.int64) * to_size + matrix + (n * FAN_IN)[:, None] + k[None, :]
    tl.store(to, total, mask=n_ok[:, None] & k_ok[None, :])


@triton.jit(do_not_specialize=["rows", "rows_each", "height", "width", "out_height", "out_width", "planes"])
def _depth_gradient(
    x_ptr, coefficients_ptr, lowered_ptr, to_ptr, jobs_ptr, rows, rows_each, height, width, out_height, out_width,
    x_size, lowered_size, planes, to_size, C: tl.constexpr, CB: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Three taps of one row of a depthwise kernel: Σ ReLU(z) · ∂ of the depthwise result."""
    job = jobs_ptr + tl.program_id(0) * 12
    size, dilation, unit, column = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3) * C
    distance, source, depth, padding = tl.load(job + 4) * C, tl.load(job + 5), tl.load(job + 6), tl.load(job + 7)
    lowered, r, s, block = tl.load(job + 8), tl.load(job + 9), tl.load(job + 10), tl.load(job + 11)
    c = block * CB + tl.arange(0, CB)
    c_ok = c < C
    a = tl.load(coefficients_ptr + source * C + c, mask=c_ok, other=0.0)
    b = tl.load(coefficients_ptr + (planes + source) * C + c, mask=c_ok, other=0.0)
    base = x_ptr + unit.to(tl.int64) * x_size + column
    d_base = lowered_ptr + lowered.to(tl.int64) * lowered_size
    area = out_height * out_width
    begin = tl.program_id(1) * rows_each
    end = tl.minimum(begin + rows_each, rows)
    first = tl.zeros((BLOCK, CB), dtype=tl.float32)
    second = tl.zeros((BLOCK, CB), dtype=tl.float32)
    third = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        m = start + tl.arange(0, BLOCK)
        m_ok = m < end
        image = m // area
        inside = m - image * area
        h = (inside // out_width) * STRIDE - padding + r * dilation
        left = (inside % out_width) * STRIDE - padding + s * dilation
        h_ok = m_ok & (h >= 0) & (h < height)
        d = tl.load(d_base + m[:, None] * C + c[None, :], mask=m_ok[:, None] & c_ok[None, :], other=0.0).to(tl.float32)
        row = (image * height + h) * width
        for i in tl.static_range(3):
            w = left + i * dilation
            ok = (h_ok & (w >= 0) & (w < width))[:, None] & c_ok[None, :]
            x = tl.load(base + (row + w)[:, None] * distance + c[None, :], mask=ok, other=0.0).to(tl.float32)
            x = x * a[None, :] + b[None, :]
            x = tl.where(ok & (x > 0), x, 0.0) * d
            if i == 0:
                first += x
            elif i == 1:
                second += x
            else:
                third += x
    to = to_ptr + tl.program_id(1).to(tl.int64) * to_size + depth + (r * size + s) * C + c
    tl.store(to, tl.sum(first, 0), mask=c_ok)
    tl.store(to + C, tl.sum(second, 0), mask=c_ok & (s + 1 < size))
    tl.store(to + 2 * C, tl.sum(third, 0), mask=c_ok & (s + 2 < size))


@triton.jit(do_not_specialize=["rows", "height", "width", "out_height", "out_width", "samples", "planes", "terms"])
def _gather(
    x_ptr, coefficients_ptr, moments_ptr, w_ptr, lowered_ptr, dy_ptr, y_ptr, dx_ptr, slopes_ptr, factors_ptr,
    winners_ptr, partial_ptr, sources_ptr, jobs_ptr, others_ptr, rows, height, width, out_height, out_width, samples,
    x_size, dy_size, planes, terms, C: tl.constexpr, CB: tl.constexpr, WEIGHTS: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, DROPS: tl.constexpr, POOLED: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """The gradient of a plane's value: of all convolutions, identities and pools that read it."""
    own = sources_ptr + tl.program_id(1) * 10
    unit, column, distance, source = tl.load(own), tl.load(own + 1) * C, tl.load(own + 2) * C, tl.load(own + 3)
    begin, end, other, last = tl.load(own + 4), tl.load(own + 5), tl.load(own + 6), tl.load(own + 7)
    adds, place = tl.load(own + 8), tl.load(own + 9)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2) * CB + tl.arange(0, CB)
    c_ok = c < C
    m_ok = m < rows
    ok = m_ok[:, None] & c_ok[None, :]
    area = height * width
    image = m // area
    inside = m - image * area
    i = inside // width
    j = inside % width
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for number in range(begin, end):
        job = jobs_ptr + number * 5
        size, dilation, padding = tl.load(job), tl.load(job + 1), tl.load(job + 2)
        depth, lowered = tl.load(job + 3) * WEIGHTS, tl.load(job + 4)
        base = lowered_ptr + lowered.to(tl.int64) * dy_size
        for r in range(size):
            h = i + padding - r * dilation
            h_ok = m_ok & (h >= 0)
            if STRIDE == 2:
                h_ok = h_ok & ((h & 1) == 0)
                h = h >> 1
            h_ok = h_ok & (h < out_height)
            start = (image * out_height + h) * out_width
            for left in range(0, size, 3):
                for step in tl.static_range(3):  # three loads at a time are under way
                    s = left + step
                    w = j + padding - s * dilation
                    w_ok = (w >= 0) & (s < size)
                    if STRIDE == 2:
                        w_ok = w_ok & ((w & 1) == 0)
                        w = w >> 1
                    here = (h_ok & w_ok & (w < out_width))[:, None] & c_ok[None, :]
                    d = tl.load(base + (start + w)[:, None] * C + c[None, :], mask=here, other=0.0).to(tl.float32)
                    weight = tl.load(
                        w_ptr + depth + (r * size + s) * C + c, mask=c_ok & (depth >= 0) & (s < size), other=1.0
                    )
                    total += d * weight[None, :]
    at = unit.to(tl.int64) * x_size + column + m[:, None] * distance + c[None, :]
    y = tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
    a = tl.load(coefficients_ptr + source * C + c, mask=c_ok, other=0.0)
    b = tl.load(coefficients_ptr + (planes + source) * C + c, mask=c_ok, other=0.0)
    total = tl.where(y * a[None, :] + b[None, :] > 0, total, 0.0)
    total += tl.load(dx_ptr + at, mask=ok & (adds > 0), other=0.0).to(tl.float32)
    for number in range(other, last):
        # Seven numbers of a pull and the slot of a pool: -2 for an identity, -1 for an average.
        job = others_ptr + number * 8
        slot = tl.load(job + 7)
        if slot == -2:
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
            for tap in tl.static_range(9):
                h = i + 1 - tap // 3
                w = j + 1 - tap % 3
                here = m_ok & (h >= 0) & (w >= 0)
                if STRIDE == 2:
                    here = here & ((h & 1) == 0) & ((w & 1) == 0)
                    h = h >> 1
                    w = w >> 1
                here = here & (h < out_height) & (w < out_width)
                row = (image * out_height + h) * out_width + w
                dy = _pull(
                    job, dy_ptr, y_ptr, factors_ptr, slopes_ptr, dy_size, row, here, c, c_ok, out_height * out_width,
                    samples, planes, C, C, DROPS,
                )  # fmt: skip
                top = h * STRIDE - 1
                left = w * STRIDE - 1
                tall = tl.minimum(top + 3, height) - tl.maximum(top, 0)
                broad = tl.minimum(left + 3, width) - tl.maximum(left, 0)
                share = 1.0 / tl.maximum(tall * broad, 1).to(tl.float32)
                seen = here[:, None] & c_ok[None, :]
                at_tap = slot.to(tl.int64) * dy_size + (row * C)[:, None] + c[None, :]
                won = tl.load(winners_ptr + at_tap, mask=seen & (slot >= 0), other=9).to(tl.int32)
                total += dy * tl.where(slot >= 0, tl.where(won == tap, 1.0, 0.0), share[:, None])
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
def _units(program):
    """What divides all offsets of weights (at most 16), and all columns and widths of what stages write."""
    stages = [*program.preprocess, *(s for r in program.rounds for s in (*r.first, *r.second))]
    offsets = [s.matrix for s in stages] + [s.depth for s in stages if s.depth != NONE]
    return math.gcd(16, *offsets), math.gcd(program.channels, *(n for s in stages for n in (s.column, s.width)))


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
        self.blocks = BLOCKS
        self.block_c = min(self.blocks.channels, padded(self.c))
        self.tile = self.blocks.rows if self.c <= 128 else self.blocks.rows // 2
        self.norms = {norm.plane: norm for norm in program.norms}
        self.weights_unit, self.columns_unit = _units(program)
        self.given = self.buffer = self.moments = self.coefficients = self.winners = None

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
        self.moments = self.parameters.new_zeros(3, p.planes, c)
        self.coefficients = self._start_coefficients()
        partial = self.parameters.new_empty(2, self.tiles(self.rows), p.planes, c) if self.running is None else None
        early = self.parameters.new_empty(2, self.tiles(self.rows_in), p.inputs, c) if self.running is None else None
        for number, x in enumerate(self.inputs):
            stages = tuple(s for s in p.preprocess if s.source == -1 - number)
            self._run_stages(stages, x, self.given, early, (self.height, self.width), self.rows_in)
        self._measure(early, tuple(range(p.inputs)), self.rows_in)
        for plane in (p.inputs - 1, *p.node_planes):
            if p.is_node(plane):
                self._add_up(plane)
            found = p.round_of(plane)
            if found is None:
                continue
            x = self.given if plane < p.inputs else self.buffer
            size = (self.out_height, self.out_width)
            self._run_stages(found.first, x, self.buffer, partial, size, self.rows)
            self._pool(found.pools, x, partial)
            self._measure(partial, found.measured, self.rows)
            self._run_stages(found.second, self.buffer, self.buffer, partial, size, self.rows)
            self._measure(partial, found.measured_second, self.rows)

    def _start_coefficients(self):
        """[2, planes, c]: 1 and 0 where there is no norm; those of the running statistics where there are such."""
        p, c = self.program, self.c
        found = self.parameters.new_zeros(2, p.planes, c)
        found[0] = 1.0
        if self.running is not None:
            mean, variance = self.running
            rstd = torch.rsqrt(variance + p.eps)
            self.moments = torch.stack([mean, rstd, variance])
            planes = [norm.plane for norm in p.norms]
            scale = self.parameters.new_ones(len(planes), c)
            shift = self.parameters.new_zeros(len(planes), c)
            for i, norm in enumerate(p.norms):
                if norm.scale != NONE:
                    scale[i] = self.parameters[norm.scale : norm.scale + c]
                    shift[i] = self.parameters[norm.shift : norm.shift + c]
            where = table((tuple(planes),), self.device)[0].long()
            a = scale * rstd[where]
            found[0, where] = a
            found[1, where] = shift - mean[where] * a
        return found

    def _value_fields(self, stage):
        depth = self._weights_at(stage.depth)
        if stage.source < 0:
            return stage.size, stage.dilation, 0, 0, 1, 0, depth
        return stage.size, stage.dilation, *self.view(stage.source), stage.source, depth

    def _weights_at(self, offset):
        return offset if offset == NONE else offset // self.weights_unit

    def _run_stages(self, stages, x, y, partial, size, rows):
        """size: that of the output; the input's is that of `x` or of its buffer."""
        if not stages:
            return
        p, c = self.program, self.c
        external = stages[0].source < 0
        height, width = x.shape[1:3] if external else self._size_of(stages[0])
        block_n = min(256, padded(max(stage.width for stage in stages)))
        block_m = self.tile
        jobs = tuple(
            (*self._value_fields(stage), stage.padding, self._weights_at(stage.matrix),
             stage.width // self.columns_unit, self.unit(stage.plane), stage.plane, stage.column // self.columns_unit,
             first // 16)
            for stage in sorted(stages, key=lambda stage: -stage.taps)
            for first in range(0, stage.width, block_n)
        )  # fmt: skip
        _stages[(triton.cdiv(rows, block_m), len(jobs))](
            x, self.parameters, self.coefficients, y, x if partial is None else partial, table(jobs, self.device), rows,
            height, width, size[0], size[1], x.numel() if external else self._plane_size(x), self._plane_size(y),
            p.planes, p.inputs if external else p.planes, C=c, FAN_IN=stages[0].fan_in, WEIGHTS=self.weights_unit,
            COLUMNS=self.columns_unit, STRIDE=stages[0].stride, BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_K=min(self.blocks.stage_depth, padded(stages[0].fan_in)),
            AFFINE=not external, STATS=partial is not None, PRECISION=self.precision, num_warps=self.blocks.stage_warps,
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
        return {"area": self.out_height * self.out_width, "samples": self.n, "DROPS": self.factors is not None}

    def _scales(self):
        return self.parameters if self.factors is None else self.factors

    def _add_up(self, plane):
        p, c = self.program, self.c
        arrivals = p.arrivals[plane - p.inputs]
        jobs = tuple((*self.view(a.plane), a.plane, a.path) for a in arrivals) or ((0, 0, 0, 0, NONE),)
        _, column, distance = self.view(plane)
        block = max(1, self.blocks.add_elements // self.block_c)
        _add_up[(triton.cdiv(self.rows, block), triton.cdiv(c, self.block_c))](
            self.buffer, self.coefficients, self._scales(), table(jobs, self.device), 0, len(arrivals), self.rows,
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
        self.slopes = self.parameters.new_zeros(3, p.planes, c)
        self.slopes[0] = 1.0
        self.parameter_gradient = torch.zeros_like(self.parameters)
        for plane in reversed((p.inputs - 1, *p.node_planes)):
            found = p.round_of(plane)
            if found is not None:
                self._leave(found)
            if p.is_node(plane):
                self._arrive(plane)
        return self.parameter_gradient, self._leave_inputs()

    def _pull_fields(self, plane, column=0):
        """Where the gradient of a plane's value is read: at its node where it has one, else where it was gathered."""
        p = self.program
        place = consumers(p).get(plane)
        if place is None:
            return *self.view(plane), NONE, self.unit(plane), plane, column // self.columns_unit
        j, i = place
        return *self.view(p.inputs + j), p.arrivals[j][i].path, self.unit(plane), plane, column // self.columns_unit

    def _arrive(self, node):
        """Sums over the gradient of a finished node, for the norms of all that arrives there."""
        p, c = self.program, self.c
        planes = tuple(a.plane for a in p.arrivals[node - p.inputs] if a.plane in self.norms and a.plane >= p.inputs)
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
            lowered = self._lower(found.second)
            self._weights(found.second, lowered, self.buffer)
            inner = tuple(stage.source for stage in found.second)
            self._gather(inner, found.second, (), lowered, self.buffer, self.gradient, adds=False, stats=inner)
        x, dx = (self.given, self.given_gradient) if inward else (self.buffer, self.gradient)
        lowered = self._lower(found.first)
        self._weights(found.first, lowered, x)
        stats = found.sources if inward else ()
        self._gather(found.sources, found.first, found.pools, lowered, x, dx, adds=not inward, stats=stats)

    def _lower(self, stages):
        """∂ of the depthwise results [stages, rows, c]."""
        if not stages:
            return None
        p, c = self.program, self.c
        to = torch.empty(len(stages) * self.rows * c, dtype=self.dtype, device=self.device)
        block_k = min(self.blocks.lower_columns, padded(c))
        jobs = tuple(
            (
                *self._pull_fields(s.plane, s.column),
                self._weights_at(s.matrix),
                s.width // self.columns_unit,
                i,
                first // 16,
                0,
            )
            for i, s in enumerate(stages)
            for first in range(0, s.fan_in, block_k)
        )
        _lower[(triton.cdiv(self.rows, self.tile), len(jobs))](
            self.gradient, self.buffer, self.parameters, self._scales(), self.slopes, to, to, table(jobs, self.device),
            self.rows, size=self.rows * c, planes=p.planes, height=0, width=0, out_width=0, to_size=self.rows * c, C=c,
            FAN_IN=c, WEIGHTS=self.weights_unit, COLUMNS=self.columns_unit, STRIDE=1, BLOCK_M=self.tile,
            BLOCK_N=min(self.blocks.lower_depth, padded(c)), BLOCK_K=block_k, MASKED=False,
            PRECISION=self.precision, num_warps=self.blocks.lower_warps, num_stages=1, **self._drops(),
        )  # fmt: skip
        return to

    def _weights(self, stages, lowered, x):
        """Gradients of the stages' matrices and depthwise kernels."""
        if not stages:
            return
        height, width = self._size_of(stages[0])
        self._matrices(
            stages, x, self.gradient, self.buffer, (height, width), (self.out_height, self.out_width), self.rows,
            external=False,
        )  # fmt: skip
        self._depths(stages, lowered, x, (height, width))

    def _matrices(self, stages, x, gradient, y, size_in, size, rows, *, external):
        p, c = self.program, self.c
        block_n = min(self.blocks.matrix_side, padded(max(s.width for s in stages)))
        block_k = min(self.blocks.matrix_side, padded(max(s.fan_in for s in stages)))
        low = min(s.matrix for s in stages)
        high = max(s.matrix + s.width * s.fan_in for s in stages)
        jobs = tuple(
            (*self._pull_fields(s.plane, s.column), *self._value_fields(s), s.padding,
             self._weights_at(s.matrix - low), s.width // self.columns_unit, n // 16, k // 16)
            for s in stages
            for n in range(0, s.width, block_n)
            for k in range(0, s.fan_in, block_k)
        )  # fmt: skip
        splits = max(1, min(triton.cdiv(rows, 512), 1056 // len(jobs), 64))
        each = triton.cdiv(triton.cdiv(rows, splits), 64) * 64
        splits = triton.cdiv(rows, each)
        assert sum(s.width * s.fan_in for s in stages) == high - low  # they lie side by side
        sums = self.parameters.new_empty(splits, high - low)
        _matrix_gradient[(len(jobs), splits)](
            gradient, y, self.parameters, self._scales(), self.slopes, x, self.coefficients, sums,
            table(jobs, self.device), rows, each, size_in[0], size_in[1], size[0], size[1], self.n,
            self._plane_size(y), x.numel() if external else self._plane_size(x), p.planes, high - low, C=c,
            FAN_IN=stages[0].fan_in, WEIGHTS=self.weights_unit, COLUMNS=self.columns_unit, STRIDE=stages[0].stride,
            BLOCK_M=self.blocks.matrix_rows, BLOCK_N=block_n, BLOCK_K=block_k,
            AFFINE=not external, DROPS=self.factors is not None and not external, PRECISION=self.precision,
            num_warps=self.blocks.matrix_warps, num_stages=1,
        )  # fmt: skip
        torch.sum(sums, 0, out=self.parameter_gradient[low:high])

    def _depths(self, stages, lowered, x, size_in):
        p, c = self.program, self.c
        deep = [(i, s) for i, s in enumerate(stages) if s.size > 1]
        if not deep:
            return
        low = min(s.depth for _, s in deep)
        high = max(s.depth + s.fan_in * s.taps for _, s in deep)
        jobs = tuple(
            (s.size, s.dilation, *self.view(s.source), s.source, s.depth - low, s.padding, i, r, first, block)
            for i, s in deep
            for block in range(triton.cdiv(c, self.block_c))
            for r in range(s.size)
            for first in range(0, s.size, 3)
        )
        block = max(1, self.blocks.depth_elements // self.block_c)
        splits = max(1, min(triton.cdiv(self.rows, 256), triton.cdiv(2112, len(jobs)), 64))
        each = triton.cdiv(triton.cdiv(self.rows, splits), block) * block
        splits = triton.cdiv(self.rows, each)
        assert sum(s.fan_in * s.taps for _, s in deep) == high - low  # they lie side by side
        sums = self.parameters.new_empty(splits, high - low)
        _depth_gradient[(len(jobs), splits)](
            x, self.coefficients, lowered, sums, table(jobs, self.device), self.rows, each, size_in[0], size_in[1],
            self.out_height, self.out_width, self._plane_size(x), self.rows * c, p.planes, high - low, C=c,
            CB=self.block_c, STRIDE=deep[0][1].stride, BLOCK=block, num_warps=self.blocks.depth_warps,
        )  # fmt: skip
        torch.sum(sums, 0, out=self.parameter_gradient[low:high])

    def _gather(self, sources, stages, pools, lowered, x, dx, *, adds, stats):
        p, c = self.program, self.c
        own, jobs, others = [], [], []
        for i, source in enumerate(sources):
            begin, other = len(jobs), len(others)
            jobs += [
                (s.size, s.dilation, s.padding, self._weights_at(s.depth), at)
                for at, s in enumerate(stages)
                if s.source == source
            ]
            for j, arrivals in enumerate(p.arrivals):
                for a in arrivals:
                    if a.plane == source and (source < p.inputs or p.is_node(source)):
                        others.append((*self.view(p.inputs + j), a.path, 0, 0, 0, -2))
            others += [(*self._pull_fields(q.plane), q.slot) for q in pools if q.source == source]
            own.append((*self.view(source), source, begin, len(jobs), other, len(others), int(adds), i))
        first = sources[0] < p.inputs
        height, width, rows = (
            (self.height, self.width, self.rows_in) if first else (self.out_height, self.out_width, self.rows)
        )
        stride = p.stride if first else 1
        block = self.blocks.gather_rows
        tiles = triton.cdiv(rows, block)
        partial = self.parameters.new_empty(2, tiles, len(sources), c) if stats else None
        _gather[(tiles, len(own), triton.cdiv(c, self.block_c))](
            x, self.coefficients, self.moments, self.parameters, x if lowered is None else lowered, self.gradient,
            self.buffer, dx, self.slopes, self._scales(), self.winners, self.parameters if partial is None else partial,
            table(tuple(own), self.device), table(tuple(jobs) or ((0,) * 5,), self.device),
            table(tuple(others) or ((0,) * 8,), self.device), rows, height, width, self.out_height, self.out_width,
            self.n, self._plane_size(x), self.rows * c, p.planes, len(sources), C=c, CB=self.block_c,
            WEIGHTS=self.weights_unit, STRIDE=stride,
            BLOCK=block, DROPS=self.factors is not None, POOLED=bool(pools), STATS=partial is not None,
            num_warps=self.blocks.gather_warps,
        )  # fmt: skip
        if partial is not None:
            self._finish_slopes(partial, sources, rows)

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
                    self._weights_at(s.matrix),
                    s.width // self.columns_unit,
                    0,
                    first // 16,
                    -s.padding,
                )
                for s in stages
                for first in range(0, s.fan_in, block_k)
            )
            _lower[(triton.cdiv(self.rows_in, self.tile), len(jobs))](
                self.given_gradient, self.given, self.parameters, self._scales(), self.slopes, x, to,
                table(jobs, self.device), self.rows_in, self.height * self.width, self.n, self._plane_size(self.given),
                p.planes, x.shape[1], x.shape[2], self.width, 0, C=c, FAN_IN=stages[0].fan_in,
                WEIGHTS=self.weights_unit, COLUMNS=self.columns_unit, STRIDE=stride, BLOCK_M=self.tile,
                BLOCK_N=min(self.blocks.lower_depth, padded(c)), BLOCK_K=block_k, DROPS=False, MASKED=True,
                PRECISION=self.precision, num_warps=self.blocks.lower_warps, num_stages=1,
            )  # fmt: skip
            self._matrices(
                stages, x, self.given_gradient, self.given, x.shape[1:3], (self.height, self.width), self.rows_in,
                external=True,
            )  # fmt: skip
            found.append(to.permute(0, 3, 1, 2))
        return found
