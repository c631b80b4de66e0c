# mypy: ignore-errors
"""Elementwise Triton kernels of `derived` that treat the columns and channels of a line as one axis.

No thread is idle when a block of channels is only partly filled, and a program computes the positions of its values
once for all its lines. Sums into nodes and sums over their gradients were slower this way than pixel by pixel
(benchmarks/NOTES.md, row 20).
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["samples", "planes"])
def _activate_lines(
    x_ptr, coefficients_ptr, to_ptr, jobs_ptr, samples, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BORDER: tl.constexpr,
    x_size, to_size, planes, C: tl.constexpr, PITCH: tl.constexpr, LINES: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """`_activate` for LINES of a map including its border, FLAT values of each."""
    job = jobs_ptr + tl.program_id(1) * 4
    unit, column, distance, plane = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C, tl.load(job + 3)
    wide: tl.constexpr = WIDTH + 2 * BORDER
    tall: tl.constexpr = HEIGHT + 2 * BORDER
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    image = line // tall
    h = line % tall - BORDER
    exists = line < samples * tall
    f = tl.program_id(2) * FLAT + tl.arange(0, FLAT)
    f_ok = f < wide * PITCH
    w = f // PITCH - BORDER
    c = f % PITCH
    c_ok = f_ok & (c < C) & (w >= 0) & (w < WIDTH)
    ok = (exists & (h >= 0) & (h < HEIGHT))[:, None] & c_ok[None, :]
    base = x_ptr + unit.to(tl.int64) * x_size + column
    row = (image * HEIGHT + h) * WIDTH
    x = tl.load(base + (row * distance)[:, None] + (w * distance + c)[None, :], mask=ok, other=0.0).to(tl.float32)
    a = tl.load(coefficients_ptr + plane * C + c, mask=c_ok, other=0.0)
    b = tl.load(coefficients_ptr + (planes + plane) * C + c, mask=c_ok, other=0.0)
    z = tl.where(ok, tl.maximum(x * a[None, :] + b[None, :], 0.0), 0.0)
    to = to_ptr + tl.program_id(1).to(tl.int64) * to_size + (line * (wide * PITCH))[:, None] + f[None, :]
    tl.store(to, z.to(to_ptr.dtype.element_ty), mask=exists[:, None] & f_ok[None, :])


@triton.jit(do_not_specialize=["samples", "planes"])
def _pull_lines(
    g_ptr, y_ptr, factors_ptr, slopes_ptr, to_ptr, jobs_ptr, samples, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, size,
    planes, to_size, C: tl.constexpr, PITCH: tl.constexpr, LINES: tl.constexpr, FLAT: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """∂y of whole planes, dense [rows, PITCH]: gradients with respect to the inputs of their norms."""
    job = jobs_ptr + tl.program_id(1) * 7
    g_unit, g_column, distance, path = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C, tl.load(job + 3)
    y_unit, plane = tl.load(job + 4), tl.load(job + 5)
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    exists = line < samples * HEIGHT
    f = tl.program_id(2) * FLAT + tl.arange(0, FLAT)
    f_ok = f < WIDTH * PITCH
    w = f // PITCH
    c = f % PITCH
    c_ok = f_ok & (c < C)
    ok = exists[:, None] & c_ok[None, :]
    row = line * WIDTH
    g_rows = g_ptr + g_unit.to(tl.int64) * size + g_column + (row * distance)[:, None]
    y_rows = y_ptr + y_unit.to(tl.int64) * size + (row * C)[:, None]
    g = tl.load(g_rows + (w * distance + c)[None, :], mask=ok, other=0.0).to(tl.float32)
    y = tl.load(y_rows + (w * C + c)[None, :], mask=ok, other=0.0).to(tl.float32)
    if DROPS:
        g *= tl.load(factors_ptr + path * samples + line // HEIGHT, mask=exists & (path >= 0), other=1.0)[:, None]
    slope = tl.load(slopes_ptr + plane * C + c, mask=c_ok, other=0.0)
    back = tl.load(slopes_ptr + (planes + plane) * C + c, mask=c_ok, other=0.0)
    level = tl.load(slopes_ptr + (2 * planes + plane) * C + c, mask=c_ok, other=0.0)
    dy = g * slope[None, :] + y * back[None, :] + level[None, :]  # all three are zero beyond the channels
    to = to_ptr + tl.program_id(1).to(tl.int64) * to_size + (line * (WIDTH * PITCH))[:, None] + f[None, :]
    tl.store(to, dy.to(to_ptr.dtype.element_ty), mask=exists[:, None] & f_ok[None, :])
