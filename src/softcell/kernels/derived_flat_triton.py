# mypy: ignore-errors
"""Triton kernels of `derived` that take values one by one, where columns and channels of a line are one axis.

No thread is idle where a block of channels is not filled, and a program computes the places of its values once for all
its lines. `derived_forward_triton` and `derived_sums_triton` have the same pixel by pixel.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["samples", "planes"])
def _activate_lines(
    x_ptr, coefficients_ptr, to_ptr, jobs_ptr, samples, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BORDER: tl.constexpr,
    x_size, to_size, planes, C: tl.constexpr, PITCH: tl.constexpr, LINES: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """`_activate`, LINES of a map with its border and FLAT values of each."""
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
    """∂y of whole planes, dense [rows, PITCH]: gradients before their norms."""
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
    dy = g * slope[None, :] + y * back[None, :] + level[None, :]  # zero beyond the channels: all three are
    to = to_ptr + tl.program_id(1).to(tl.int64) * to_size + (line * (WIDTH * PITCH))[:, None] + f[None, :]
    tl.store(to, dy.to(to_ptr.dtype.element_ty), mask=exists[:, None] & f_ok[None, :])


@triton.jit(do_not_specialize=["samples", "planes", "distance"])
def _add_up_lines(
    buffer_ptr, coefficients_ptr, factors_ptr, nodes_ptr, jobs_ptr, samples, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    size, planes, distance, C: tl.constexpr, LINES: tl.constexpr, FLAT: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """`_add_up`, LINES of a map and FLAT values of each."""
    node = nodes_ptr + tl.program_id(1) * 3
    begin, end, column = tl.load(node), tl.load(node + 1), tl.load(node + 2)
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    exists = line < samples * HEIGHT
    row = line * WIDTH
    f = tl.program_id(2) * FLAT + tl.arange(0, FLAT)
    f_ok = f < WIDTH * C
    w = f // C
    c = f % C
    ok = exists[:, None] & f_ok[None, :]
    total = tl.zeros((LINES, FLAT), dtype=tl.float32)
    for number in range(begin, end):
        job = jobs_ptr + number * 5
        unit, start, apart = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C
        plane, path = tl.load(job + 3), tl.load(job + 4)
        at = buffer_ptr + unit.to(tl.int64) * size + start + (row * apart)[:, None] + (w * apart + c)[None, :]
        value = tl.load(at, mask=ok, other=0.0).to(tl.float32)
        a = tl.load(coefficients_ptr + plane * C + c, mask=f_ok, other=0.0)
        b = tl.load(coefficients_ptr + (planes + plane) * C + c, mask=f_ok, other=0.0)
        value = value * a[None, :] + b[None, :]
        if DROPS:
            scale = tl.load(factors_ptr + path * samples + line // HEIGHT, mask=exists & (path >= 0), other=1.0)
            value *= scale[:, None]
        total += value
    apart = distance * C
    to = buffer_ptr + column * C + (row * apart)[:, None] + (w * apart + c)[None, :]
    tl.store(to, total.to(buffer_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["samples", "lines_each", "planes", "terms"])
def _arrival_sums_lines(
    buffer_ptr, gradient_ptr, moments_ptr, factors_ptr, partial_ptr, jobs_ptr, samples, lines_each,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, size, planes, terms, C: tl.constexpr, LINES: tl.constexpr,
    FLAT: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """`_arrival_sums` over a part of the lines, LINES at a time; columns are splits of their own."""
    t = tl.program_id(1)
    job = jobs_ptr + t * 7
    g_unit, g_column, distance, path = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C, tl.load(job + 3)
    y_unit, plane = tl.load(job + 4), tl.load(job + 5)
    f = tl.program_id(2) * FLAT + tl.arange(0, FLAT)
    f_ok = f < WIDTH * C
    w = f // C
    c = f % C
    mean = tl.load(moments_ptr + plane * C + c, mask=f_ok, other=0.0)[None, :]
    g_base = gradient_ptr + g_unit.to(tl.int64) * size + g_column + (w * distance + c)[None, :]
    y_base = buffer_ptr + y_unit.to(tl.int64) * size + f[None, :]
    plain = tl.zeros((LINES, FLAT), dtype=tl.float32)
    product = tl.zeros((LINES, FLAT), dtype=tl.float32)
    begin = tl.program_id(0) * lines_each
    end = tl.minimum(begin + lines_each, samples * HEIGHT)
    for start in range(begin, end, LINES):
        line = start + tl.arange(0, LINES)
        exists = line < end
        ok = exists[:, None] & f_ok[None, :]
        g = tl.load(g_base + (line * WIDTH * distance)[:, None], mask=ok, other=0.0).to(tl.float32)
        y = tl.load(y_base + (line * (WIDTH * C))[:, None], mask=ok, other=0.0).to(tl.float32)
        if DROPS:
            scale = tl.load(factors_ptr + path * samples + line // HEIGHT, mask=exists & (path >= 0), other=1.0)
            g *= scale[:, None]
        plain += g
        product += g * (y - mean)
    rstd = tl.load(moments_ptr + (planes + plane) * C + c, mask=f_ok, other=0.0)
    to = partial_ptr + ((tl.program_id(0) * WIDTH + w) * terms + t) * C + c
    tl.store(to, tl.sum(plain, 0), mask=f_ok)
    tl.store(to + tl.num_programs(0) * WIDTH * terms * C, tl.sum(product, 0) * rstd, mask=f_ok)
