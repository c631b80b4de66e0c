# mypy: ignore-errors
"""Triton kernels of `derived` whose programs loop over blocks of rows: products with the matrices of stages.

A program that processes one block loads weights for that block only. At 4 bytes each they are larger than the block
itself from 65 channels on. The program also waits for its job, its loads, its product and its stores one after the
other. Here weights are loaded once, and the loads of the next blocks are in flight while a block is multiplied and
stored.
"""

import triton
import triton.language as tl

from softcell.kernels.derived_gradient_triton import _clear_border


@triton.jit(do_not_specialize=["rows", "programs", "measured"])
def _point_tiles(
    x_ptr, w_ptr, y_ptr, partial_ptr, jobs_ptr, rows, programs, x_size, y_size, measured, C: tl.constexpr,
    PITCH: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, STATS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_stages` of depthwise results, dense [rows, PITCH], if a block holds all their channels."""
    job = jobs_ptr + tl.program_id(1) * 5
    source, matrix, unit = tl.load(job).to(tl.int64), tl.load(job + 1) * WEIGHTS, tl.load(job + 2).to(tl.int64)
    plane, n = tl.load(job + 3), tl.load(job + 4) * 16 + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    n_ok = n < C
    kind = y_ptr.dtype.element_ty
    weight = tl.load(w_ptr + matrix + (n * C)[None, :] + k[:, None], mask=n_ok[None, :] & (k < C)[:, None], other=0.0)
    weight = weight.to(kind)
    m = tl.arange(0, BLOCK_M)
    tiles = (rows + BLOCK_M - 1) // BLOCK_M
    for tile in tl.range(tl.program_id(0), tiles, programs, num_stages=STAGES):
        start = tile * BLOCK_M
        m_ok = start + m < rows
        if EVEN:
            m_ok = m < BLOCK_M
        at = x_ptr + source * x_size + start * PITCH + (m * PITCH)[:, None] + k[None, :]
        x = tl.load(at, mask=m_ok[:, None] & (k < PITCH)[None, :], other=0.0)
        total = tl.dot(x, weight, input_precision=PRECISION)
        y = total.to(kind)
        to = y_ptr + unit * y_size + start * C + (m * C)[:, None] + n[None, :]
        tl.store(to, y, mask=m_ok[:, None] & n_ok[None, :])
        if STATS:  # as in `_stages`
            count = tl.minimum(rows - start, BLOCK_M)
            one = tl.full((16, BLOCK_M), 1.0, dtype=kind)
            if not EVEN:
                one = tl.where(m_ok[None, :], one, 0.0).to(kind)
            sums = tl.sum(tl.dot(one, y, input_precision=PRECISION), 0) / 16
            centred = total - (sums / count)[None, :]
            squares = tl.sum(tl.dot(one, (centred * centred).to(kind), input_precision=PRECISION), 0) / 16
            place = partial_ptr + (tile * measured + plane) * C + n
            tl.store(place, sums, mask=n_ok)
            tl.store(place + tiles * measured * C, squares, mask=n_ok)


@triton.jit(do_not_specialize=["rows", "samples", "planes", "programs"])
def _lower_tiles(
    g_ptr, y_ptr, w_ptr, factors_ptr, slopes_ptr, x_ptr, to_ptr, dy_ptr, jobs_ptr, rows, programs, samples, size,
    planes, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BORDER: tl.constexpr, to_size, dy_size, C: tl.constexpr,
    FAN_IN: tl.constexpr, PITCH: tl.constexpr, DY_PITCH: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EXTERNAL: tl.constexpr, PULLED: tl.constexpr,
    ALIGNED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_lower` without strides, if a block holds all columns of ∂y: a program loops over blocks of rows.

    It loads its weights once and prefetches the next rows. The first `programs` programs of a job do this, the others
    write its BORDER of zeros. PULLED: ∂y was already written; otherwise the program writes it, and a block holds all
    channels. EXTERNAL: the output is the gradient of an input tensor. ALIGNED: all blocks of rows are complete and,
    inside a cell, each is within one image.
    """
    job = jobs_ptr + tl.program_id(1) * 10
    matrix, unit, k = tl.load(job + 7) * WEIGHTS, tl.load(job + 8).to(tl.int64), tl.load(job + 9) * 16
    k += tl.arange(0, BLOCK_K)
    n = tl.arange(0, BLOCK_N)
    n_ok = n < C
    kind = to_ptr.dtype.element_ty
    base = to_ptr + unit * to_size
    if BORDER > 0 and tl.program_id(0) >= programs:
        pixel = (tl.program_id(0) - programs) * BLOCK_M
        _clear_border(base, pixel, samples, k, k < PITCH, kind, HEIGHT, WIDTH, BORDER, PITCH, BLOCK_M)
        return
    at = w_ptr + matrix + (n * FAN_IN)[:, None] + k[None, :]
    weight = tl.load(at, mask=n_ok[:, None] & (k < FAN_IN)[None, :], other=0.0)
    weight = weight.to(kind)
    dy_base = dy_ptr + unit * dy_size
    if not PULLED:
        g_unit, g_column, distance, path = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C, tl.load(job + 3)
        y_unit, plane = tl.load(job + 4), tl.load(job + 5)
        g_base = g_ptr + g_unit.to(tl.int64) * size + g_column
        y_base = y_ptr + y_unit.to(tl.int64) * size
        slopes = slopes_ptr + plane * C + n
        slope = tl.load(slopes, mask=n_ok, other=0.0)[None, :]
        back = tl.load(slopes + planes * C, mask=n_ok, other=0.0)[None, :]
        level = tl.load(slopes + 2 * planes * C, mask=n_ok, other=0.0)[None, :]
    wide: tl.constexpr = WIDTH + 2 * BORDER
    area: tl.constexpr = HEIGHT * WIDTH
    inner = tl.arange(0, BLOCK_M)
    for tile in tl.range(tl.program_id(0), (rows + BLOCK_M - 1) // BLOCK_M, programs, num_stages=STAGES):
        start = tile * BLOCK_M
        m = inner
        m_ok = start + inner < rows
        if ALIGNED:  # the whole block exists, within one image
            m_ok = inner < BLOCK_M
        whole = m_ok[:, None] & (n < DY_PITCH)[None, :]
        dy_at = dy_base + start * DY_PITCH + (m * DY_PITCH)[:, None] + n[None, :]
        if PULLED:
            dy = tl.load(dy_at, mask=whole, other=0.0)
        else:
            ok = m_ok[:, None] & n_ok[None, :]
            g = tl.load(g_base + start * distance + (m * distance)[:, None] + n[None, :], mask=ok, other=0.0)
            g = g.to(tl.float32)
            y = tl.load(y_base + start * C + (m * C)[:, None] + n[None, :], mask=ok, other=0.0).to(tl.float32)
            if DROPS:
                factors = factors_ptr + path * samples
                if ALIGNED:
                    g *= tl.load(factors + start // area, mask=path >= 0, other=1.0)
                else:
                    g *= tl.load(factors + (start + m) // area, mask=m_ok & (path >= 0), other=1.0)[:, None]
            dy = (g * slope + y * back + level).to(kind)  # all three are zero beyond the channels
            tl.store(dy_at, dy, mask=whole)
        there = m_ok[:, None] & (k < PITCH)[None, :]
        if EXTERNAL:
            place = start * PITCH + (m * PITCH)[:, None] + k[None, :]
            x = tl.load(x_ptr + place, mask=there, other=0.0)
        total = tl.dot(dy, weight, input_precision=PRECISION)
        if EXTERNAL:
            to = base + place
            total = tl.where(x > 0, total, 0.0)
        elif ALIGNED:
            image = start // area
            line = image * (HEIGHT + 2 * BORDER) + (start - image * area) // WIDTH + BORDER
            to = base + (line * wide + BORDER) * PITCH + ((m // WIDTH * wide + m % WIDTH) * PITCH)[:, None] + k[None, :]
        else:
            image = (start + m) // area
            inside = start + m - image * area
            row = (image * (HEIGHT + 2 * BORDER) + inside // WIDTH + BORDER) * wide + inside % WIDTH + BORDER
            to = base + row[:, None] * PITCH + k[None, :]
        tl.store(to, total.to(kind), mask=there)
