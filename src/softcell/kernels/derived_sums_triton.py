# mypy: ignore-errors
"""Triton kernels of `derived` that turn sums over rows into the norms' coefficients, forward and backward."""

import triton
import triton.language as tl


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
    square = tl.zeros((BLOCK, CB), dtype=tl.float32)
    # Squares are taken around the mean of the first tile, which is near that of all: one pass, little cancellation.
    near = tl.load(partial_ptr + plane * C + c, mask=c_ok, other=0.0) / tl.minimum(rows, TILE)
    for start in range(0, tiles, BLOCK):
        t = start + tl.arange(0, BLOCK)
        ok = (t < tiles)[:, None] & c_ok[None, :]
        at = partial_ptr + ((t * measured + plane) * C)[:, None] + c[None, :]
        sums = tl.load(at, mask=ok, other=0.0)
        inner = tl.load(at + tiles * measured * C, mask=ok, other=0.0)
        count = tl.maximum(tl.minimum(rows - t * TILE, TILE), 1).to(tl.float32)[:, None]
        off = sums / count - near[None, :]
        total += sums
        square += tl.where(ok, inner + count * off * off, 0.0)
    mean = tl.sum(total, 0) / rows
    variance = tl.maximum(tl.sum(square, 0) / rows - (mean - near) * (mean - near), 0.0)
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
