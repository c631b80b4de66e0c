# mypy: ignore-errors
"""Triton kernels of `derived` that process whole lines of maps, where the others work pixel by pixel.

Without strides `_stage_lines` and `_gather_lines` replace `_stages` and `_gather`: four consecutive lines share the
values that their windows read.

`_activate_lines` and `_pull_lines` are elementwise. They treat the columns and channels of a line as one axis: no
thread is idle when a block of channels is only partly filled, and a program computes the positions of its values once
for all its lines. Sums into nodes and sums over their gradients were slower this way than pixel by pixel
(benchmarks/NOTES.md, row 20).
"""

import triton
import triton.language as tl

from softcell.kernels.derived_gradient_triton import _complete, _from_pool


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


@triton.jit
def _column(
    t0, t1, t2, t3, at, start, line, mask, weights, c_ok, s, last: tl.constexpr, STRAIGHT: tl.constexpr,
    C: tl.constexpr, SIZE: tl.constexpr, DILATION: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    """Column s of the windows of four lines; see `_windows`."""
    column = weights + s * C
    w0 = tl.load(column, mask=c_ok, other=0.0)[None, :]
    w1 = tl.load(column + SIZE * C, mask=c_ok, other=0.0)[None, :]
    w2 = tl.load(column + 2 * SIZE * C, mask=c_ok, other=0.0)[None, :]
    w3, w4, w5, w6 = w2, w2, w2, w2
    if SIZE > 3:
        w3 = tl.load(column + 3 * SIZE * C, mask=c_ok, other=0.0)[None, :]
        w4 = tl.load(column + 4 * SIZE * C, mask=c_ok, other=0.0)[None, :]
    if SIZE > 5:
        w5 = tl.load(column + 5 * SIZE * C, mask=c_ok, other=0.0)[None, :]
        w6 = tl.load(column + 6 * SIZE * C, mask=c_ok, other=0.0)[None, :]
    for v in tl.static_range(4 + (SIZE - 1) * DILATION):
        below = line + v
        if last > 0:
            below = tl.minimum(below, last)
        x = tl.load(at + (start + below * STRAIGHT)[:, None], mask=mask[None, :], other=0.0).to(tl.float32)
        for r in tl.static_range(SIZE):
            weight = (w0, w1, w2, w3, w4, w5, w6)[r]
            # In the forward pass, tap r of line l reads line l + r · DILATION, counted from the topmost one.
            if v == (r if FORWARD else SIZE - 1 - r) * DILATION:
                t0 += x * weight
            if v == (r if FORWARD else SIZE - 1 - r) * DILATION + 1:
                t1 += x * weight
            if v == (r if FORWARD else SIZE - 1 - r) * DILATION + 2:
                t2 += x * weight
            if v == (r if FORWARD else SIZE - 1 - r) * DILATION + 3:
                t3 += x * weight
    return t0, t1, t2, t3


@triton.jit
def _windows(
    t0, t1, t2, t3, base, start, line, f, mask, weights, c_ok, last: tl.constexpr, STRAIGHT: tl.constexpr,
    PITCH: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr, DILATION: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    """Adds the windows of four consecutive lines to t0…t3 [sites, values]; shared values are read once.

    start, line [sites]: offset of a site's map plus its column, and the line that its topmost tap reads. f, mask
    [values]: offsets of values from there. weights, c_ok [values]: addresses of their weights, and the mask of those
    that exist. FORWARD: a convolution, otherwise its transpose. STRAIGHT: number of values between lines. last: the
    last line of a map if some sites have fewer than four lines (the missing ones read it instead and are not stored); 0
    if all sites are complete.
    """
    step: tl.constexpr = (DILATION if FORWARD else -DILATION) * PITCH
    at = base + f[None, :]
    # Not unrolled: otherwise registers hold the values of all columns, and the compiler moves each through shared
    # memory.
    for s in range(SIZE):
        t0, t1, t2, t3 = _column(
            t0, t1, t2, t3, at + s * step, start, line, mask, weights, c_ok, s, last, STRAIGHT, C, SIZE, DILATION,
            FORWARD,
        )  # fmt: skip
    return t0, t1, t2, t3


@triton.jit(do_not_specialize=["measured"])
def _stage_lines(
    x_ptr, w_ptr, depth_ptr, y_ptr, partial_ptr, kept_ptr, jobs_ptr, TALL: tl.constexpr, WIDE: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, x_size, y_size, kept_size, measured, C: tl.constexpr,
    PITCH: tl.constexpr, WEIGHTS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, DILATION: tl.constexpr,
    SITES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STATS: tl.constexpr, KEEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`_stages` without strides, for groups of four lines and windows of one size: SITES of four pixels each.

    The pixels of a site are vertically adjacent. DILATION: that of all windows, 0 if it is 1 or 2. KEEPS: also write
    depthwise results, dense [jobs, rows, PITCH].
    """
    job = jobs_ptr + tl.program_id(1) * 11
    source, dilation, shift = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    depth, matrix, columns = tl.load(job + 4) * C, tl.load(job + 5) * WEIGHTS, tl.load(job + 6) * COLUMNS
    unit, plane, column = tl.load(job + 7), tl.load(job + 8), tl.load(job + 9) * COLUMNS
    site = tl.program_id(0) * SITES + tl.arange(0, SITES)
    image = site // (HEIGHT // 4 * WIDTH)
    inside = site % (HEIGHT // 4 * WIDTH)
    line = inside // WIDTH * 4
    w = inside % WIDTH
    start = (image * (TALL * WIDE) + w + shift) * PITCH
    straight: tl.constexpr = WIDE * PITCH
    n = tl.load(job + 10) * 16 + tl.arange(0, BLOCK_N)
    n_ok = n < columns
    base = x_ptr + source.to(tl.int64) * x_size
    kind = y_ptr.dtype.element_ty
    y0 = tl.zeros((SITES, BLOCK_N), dtype=tl.float32)
    y1, y2, y3 = y0, y0, y0
    for k0 in range(0, C, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        k_ok = k < C
        mask = k < PITCH
        t0 = tl.zeros((SITES, BLOCK_K), dtype=tl.float32)
        t1, t2, t3 = t0, t0, t0
        weights = depth_ptr + depth + k
        if DILATION > 0:
            t0, t1, t2, t3 = _windows(
                t0, t1, t2, t3, base, start, line, k, mask, weights, k_ok, 0, straight, PITCH, C, SIZE, DILATION, True
            )  # fmt: skip
        elif dilation == 1:
            t0, t1, t2, t3 = _windows(
                t0, t1, t2, t3, base, start, line, k, mask, weights, k_ok, 0, straight, PITCH, C, SIZE, 1, True,
            )  # fmt: skip
        else:
            t0, t1, t2, t3 = _windows(
                t0, t1, t2, t3, base, start, line, k, mask, weights, k_ok, 0, straight, PITCH, C, SIZE, 2, True,
            )  # fmt: skip
        weight = tl.load(w_ptr + matrix + (n * C)[None, :] + k[:, None], mask=n_ok[None, :] & k_ok[:, None], other=0.0)
        weight = weight.to(kind)
        if KEEPS:
            row = (image * HEIGHT + line) * WIDTH + w
            to = kept_ptr + tl.program_id(1).to(tl.int64) * kept_size + (row * PITCH)[:, None] + k[None, :]
            tl.store(to, t0.to(kind), mask=mask[None, :])
            tl.store(to + WIDTH * PITCH, t1.to(kind), mask=mask[None, :])
            tl.store(to + 2 * WIDTH * PITCH, t2.to(kind), mask=mask[None, :])
            tl.store(to + 3 * WIDTH * PITCH, t3.to(kind), mask=mask[None, :])
        y0 = tl.dot(t0.to(kind), weight, y0, input_precision=PRECISION)
        y1 = tl.dot(t1.to(kind), weight, y1, input_precision=PRECISION)
        y2 = tl.dot(t2.to(kind), weight, y2, input_precision=PRECISION)
        y3 = tl.dot(t3.to(kind), weight, y3, input_precision=PRECISION)
    m = (image * HEIGHT + line) * WIDTH + w
    at = y_ptr + unit.to(tl.int64) * y_size + (m * C)[:, None] + (column + n)[None, :]
    tl.store(at, y0.to(kind), mask=n_ok[None, :])
    tl.store(at + WIDTH * C, y1.to(kind), mask=n_ok[None, :])
    tl.store(at + 2 * WIDTH * C, y2.to(kind), mask=n_ok[None, :])
    tl.store(at + 3 * WIDTH * C, y3.to(kind), mask=n_ok[None, :])
    if STATS:
        sums = tl.sum((y0 + y1) + (y2 + y3), 0)
        mean = (sums / (4 * SITES))[None, :]
        squares = (y0 - mean) * (y0 - mean) + (y1 - mean) * (y1 - mean)
        squares += (y2 - mean) * (y2 - mean) + (y3 - mean) * (y3 - mean)
        to = partial_ptr + (tl.program_id(0) * measured + plane) * C + column + n
        tl.store(to, sums, mask=n_ok)
        tl.store(to + tl.num_programs(0) * measured * C, tl.sum(squares, 0), mask=n_ok)


@triton.jit(do_not_specialize=["samples"])
def _depthwise_lines(
    x_ptr, depth_ptr, to_ptr, jobs_ptr, TALL: tl.constexpr, WIDE: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, samples, x_size, to_size, C: tl.constexpr, PITCH: tl.constexpr, SIZE: tl.constexpr,
    DILATION: tl.constexpr, GROUPS: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """depthwise(x) without strides, dense [rows, PITCH]: GROUPS of four lines, FLAT values of a line each.

    Columns and channels are one axis, as in `_gather_lines`. DILATION: that of all windows, 0 if it is 1 or 2.
    """
    job = jobs_ptr + tl.program_id(1) * 4
    source, dilation, inset = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    groups: tl.constexpr = (HEIGHT + 3) // 4
    g = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    g_ok = g < samples * groups
    image = tl.minimum(g // groups, samples - 1)
    i = g % groups * 4
    f = tl.program_id(2) * FLAT + tl.arange(0, FLAT)
    f_ok = f < WIDTH * PITCH
    c = f % PITCH
    c_ok = f_ok & (c < C)
    straight: tl.constexpr = WIDE * PITCH
    start = image * (TALL * straight)
    last: tl.constexpr = TALL - 1 if HEIGHT % 4 else 0
    weights = depth_ptr + tl.load(job + 3) * C + c
    base = x_ptr + source.to(tl.int64) * x_size
    line = i + inset
    left = f + inset * PITCH
    t0 = tl.zeros((GROUPS, FLAT), dtype=tl.float32)
    t1, t2, t3 = t0, t0, t0
    if DILATION > 0:
        t0, t1, t2, t3 = _windows(
            t0, t1, t2, t3, base, start, line, left, f_ok, weights, c_ok, last, straight, PITCH, C, SIZE, DILATION, True
        )
    elif dilation == 1:
        t0, t1, t2, t3 = _windows(
            t0, t1, t2, t3, base, start, line, left, f_ok, weights, c_ok, last, straight, PITCH, C, SIZE, 1, True
        )
    else:
        t0, t1, t2, t3 = _windows(
            t0, t1, t2, t3, base, start, line, left, f_ok, weights, c_ok, last, straight, PITCH, C, SIZE, 2, True
        )
    kind = to_ptr.dtype.element_ty
    row = (image * HEIGHT + i) * (WIDTH * PITCH)
    at = to_ptr + tl.program_id(1).to(tl.int64) * to_size + row[:, None] + f[None, :]
    for number in tl.static_range(4):
        ok = (g_ok & (i + number < HEIGHT))[:, None] & f_ok[None, :]
        tl.store(at + number * (WIDTH * PITCH), (t0, t1, t2, t3)[number].to(kind), mask=ok)


@triton.jit
def _at_line(
    x_ptr, dx_ptr, places, distance, g_ok, i, c_ok, number: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """A plane's y in line `number` of groups of four, and the gradient accumulated so far."""
    ok = (g_ok & (i + number < HEIGHT))[:, None] & c_ok[None, :]
    at = places + number * WIDTH * distance
    y = tl.load(x_ptr + at, mask=ok, other=0.0)
    d = tl.zeros_like(y)
    if ADDS:
        d = tl.load(dx_ptr + at, mask=ok, other=0.0)
    return y, d


@triton.jit
def _complete_lines(
    t0, t1, t2, t3, y0, y1, y2, y3, d0, d1, d2, d3, own, row, image, i, j, c, g_ok, c_ok, a, b, dy_ptr, pulled_ptr,
    dx_ptr, factors_ptr, winners_ptr, others_ptr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, samples, x_size, dy_size,
    C: tl.constexpr, DROPS: tl.constexpr, POOLED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """`_complete` for four lines, whose loads are in flight at the same time."""
    other, last = tl.load(own + 6), tl.load(own + 7)
    ok0 = g_ok[:, None] & c_ok[None, :]
    ok1 = (g_ok & (i + 1 < HEIGHT))[:, None] & c_ok[None, :]
    ok2 = (g_ok & (i + 2 < HEIGHT))[:, None] & c_ok[None, :]
    ok3 = (g_ok & (i + 3 < HEIGHT))[:, None] & c_ok[None, :]
    t0 = tl.where(y0.to(tl.float32) * a + b > 0, t0, 0.0) + d0.to(tl.float32)
    t1 = tl.where(y1.to(tl.float32) * a + b > 0, t1, 0.0) + d1.to(tl.float32)
    t2 = tl.where(y2.to(tl.float32) * a + b > 0, t2, 0.0) + d2.to(tl.float32)
    t3 = tl.where(y3.to(tl.float32) * a + b > 0, t3, 0.0) + d3.to(tl.float32)
    for number in range(other, last):
        job = others_ptr + number * 6
        if tl.load(job + 5) == -2:
            g_unit, g_column, apart, path = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C, tl.load(job + 3)
            at = dy_ptr + g_unit.to(tl.int64) * dy_size + g_column + (row * apart)[:, None] + (j * apart + c)[None, :]
            factor = tl.full(i.shape, 1.0, dtype=tl.float32)
            if DROPS:
                factor = tl.load(factors_ptr + path * samples + image, mask=g_ok & (path >= 0), other=1.0)
            g0 = tl.load(at, mask=ok0, other=0.0)
            g1 = tl.load(at + WIDTH * apart, mask=ok1, other=0.0)
            g2 = tl.load(at + 2 * WIDTH * apart, mask=ok2, other=0.0)
            g3 = tl.load(at + 3 * WIDTH * apart, mask=ok3, other=0.0)
            t0 += g0.to(tl.float32) * factor[:, None]
            t1 += g1.to(tl.float32) * factor[:, None]
            t2 += g2.to(tl.float32) * factor[:, None]
            t3 += g3.to(tl.float32) * factor[:, None]
        elif POOLED:
            pool, slot = tl.load(job + 4), tl.load(job + 5)
            images, columns, channels = image[:, None], j[None, :], c[None, :]
            t0 = _from_pool(
                t0, pool, slot, images, i[:, None], columns, channels, ok0, pulled_ptr, winners_ptr, HEIGHT, WIDTH,
                HEIGHT, WIDTH, dy_size, C, 1, False,
            )  # fmt: skip
            t1 = _from_pool(
                t1, pool, slot, images, i[:, None] + 1, columns, channels, ok1, pulled_ptr, winners_ptr, HEIGHT, WIDTH,
                HEIGHT, WIDTH, dy_size, C, 1, False,
            )  # fmt: skip
            t2 = _from_pool(
                t2, pool, slot, images, i[:, None] + 2, columns, channels, ok2, pulled_ptr, winners_ptr, HEIGHT, WIDTH,
                HEIGHT, WIDTH, dy_size, C, 1, False,
            )  # fmt: skip
            t3 = _from_pool(
                t3, pool, slot, images, i[:, None] + 3, columns, channels, ok3, pulled_ptr, winners_ptr, HEIGHT, WIDTH,
                HEIGHT, WIDTH, dy_size, C, 1, False,
            )  # fmt: skip
    kind = dx_ptr.dtype.element_ty
    first: tl.constexpr = 9 if ADDS else 0
    distance = tl.load(own + first + 2) * C
    at = dx_ptr + tl.load(own + first).to(tl.int64) * x_size + tl.load(own + first + 1) * C
    at = at + (row * distance)[:, None] + (j * distance + c)[None, :]
    r0, r1, r2, r3 = t0.to(kind), t1.to(kind), t2.to(kind), t3.to(kind)
    tl.store(at, r0, mask=ok0)
    tl.store(at + WIDTH * distance, r1, mask=ok1)
    tl.store(at + 2 * WIDTH * distance, r2, mask=ok2)
    tl.store(at + 3 * WIDTH * distance, r3, mask=ok3)
    t0, t1 = tl.where(ok0, r0.to(tl.float32), 0.0), tl.where(ok1, r1.to(tl.float32), 0.0)
    t2, t3 = tl.where(ok2, r2.to(tl.float32), 0.0), tl.where(ok3, r3.to(tl.float32), 0.0)
    return t0, t1, t2, t3


@triton.jit(do_not_specialize=["samples", "planes", "terms"])
def _gather_lines(
    x_ptr, coefficients_ptr, moments_ptr, depth_ptr, lowered_ptr, dy_ptr, pulled_ptr, dx_ptr, factors_ptr,
    winners_ptr, partial_ptr, sources_ptr, jobs_ptr, others_ptr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    BORDER: tl.constexpr, samples, x_size, dy_size, lowered_size, planes, terms, C: tl.constexpr, PITCH: tl.constexpr,
    SIZE: tl.constexpr, DILATION: tl.constexpr, GROUPS: tl.constexpr, FLAT: tl.constexpr, DROPS: tl.constexpr,
    POOLED: tl.constexpr, STATS: tl.constexpr, TOGETHER: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """`_gather` without strides, for windows of one size: GROUPS of four lines, FLAT values of a line each.

    Columns and channels are one axis, so no thread is idle when a block of channels is only partly filled; four lines
    share the values that their windows have in common. DILATION: that of all windows, 0 if it is 1 or 2. TOGETHER: the
    values of the four lines and their accumulated gradients are loaded before the windows, not line by line after them.
    """
    own = sources_ptr + tl.program_id(1) * 12
    begin, end = tl.load(own + 4), tl.load(own + 5)
    groups: tl.constexpr = (HEIGHT + 3) // 4
    g = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    g_ok = g < samples * groups
    image = tl.minimum(g // groups, samples - 1)
    i = g % groups * 4
    f = tl.program_id(2) * FLAT + tl.arange(0, FLAT)
    f_ok = f < WIDTH * PITCH
    j = f // PITCH
    c = f % PITCH
    c_ok = f_ok & (c < C)
    straight: tl.constexpr = (WIDTH + 2 * BORDER) * PITCH
    start = image * ((HEIGHT + 2 * BORDER) * straight)
    last: tl.constexpr = HEIGHT + 2 * BORDER - 1 if HEIGHT % 4 else 0
    t0 = tl.zeros((GROUPS, FLAT), dtype=tl.float32)
    t1, t2, t3 = t0, t0, t0
    if TOGETHER:
        distance = tl.load(own + 2) * C
        row = (image * HEIGHT + i) * WIDTH
        places = tl.load(own).to(tl.int64) * x_size + tl.load(own + 1) * C + (row * distance)[:, None]
        places += (j * distance + c)[None, :]
        y0, d0 = _at_line(x_ptr, dx_ptr, places, distance, g_ok, i, c_ok, 0, HEIGHT, WIDTH, ADDS)
        y1, d1 = _at_line(x_ptr, dx_ptr, places, distance, g_ok, i, c_ok, 1, HEIGHT, WIDTH, ADDS)
        y2, d2 = _at_line(x_ptr, dx_ptr, places, distance, g_ok, i, c_ok, 2, HEIGHT, WIDTH, ADDS)
        y3, d3 = _at_line(x_ptr, dx_ptr, places, distance, g_ok, i, c_ok, 3, HEIGHT, WIDTH, ADDS)
    for number in range(begin, end):
        job = jobs_ptr + number * 5
        dilation, padding = tl.load(job + 1), tl.load(job + 2)
        weights = depth_ptr + tl.load(job + 3) * C + c
        base = lowered_ptr + tl.load(job + 4).to(tl.int64) * lowered_size
        line = i + padding + BORDER - (SIZE - 1) * dilation
        left = f + (padding + BORDER) * PITCH
        if DILATION > 0:
            t0, t1, t2, t3 = _windows(
                t0, t1, t2, t3, base, start, line, left, f_ok, weights, c_ok, last, straight, PITCH, C, SIZE, DILATION,
                False,
            )  # fmt: skip
        elif dilation == 1:
            t0, t1, t2, t3 = _windows(
                t0, t1, t2, t3, base, start, line, left, f_ok, weights, c_ok, last, straight, PITCH, C, SIZE, 1, False,
            )  # fmt: skip
        else:
            t0, t1, t2, t3 = _windows(
                t0, t1, t2, t3, base, start, line, left, f_ok, weights, c_ok, last, straight, PITCH, C, SIZE, 2, False,
            )  # fmt: skip
    source, place = tl.load(own + 3), tl.load(own + 8)
    a = tl.load(coefficients_ptr + source * C + c, mask=c_ok, other=0.0)[None, :]
    b = tl.load(coefficients_ptr + (planes + source) * C + c, mask=c_ok, other=0.0)[None, :]
    sums = tl.zeros((GROUPS, FLAT), dtype=tl.float32)
    products = sums
    mean = tl.load(moments_ptr + source * C + c, mask=c_ok, other=0.0)[None, :]
    rstd = tl.load(moments_ptr + (planes + source) * C + c, mask=c_ok, other=0.0)
    if TOGETHER:
        t0, t1, t2, t3 = _complete_lines(
            t0, t1, t2, t3, y0, y1, y2, y3, d0, d1, d2, d3, own, row, image, i, j, c, g_ok, c_ok, a, b, dy_ptr,
            pulled_ptr, dx_ptr, factors_ptr, winners_ptr, others_ptr, HEIGHT, WIDTH, samples, x_size, dy_size, C, DROPS,
            POOLED, ADDS,
        )  # fmt: skip
        if STATS:
            sums = (t0 + t1) + (t2 + t3)
            products = t0 * (y0 - mean) + t1 * (y1 - mean) + (t2 * (y2 - mean) + t3 * (y3 - mean))
    else:
        for number in tl.static_range(4):
            total = (t0, t1, t2, t3)[number]
            h = (i + number)[:, None]
            m = (image[:, None] * HEIGHT + h) * WIDTH + j[None, :]
            ok = (g_ok & (i + number < HEIGHT))[:, None] & c_ok[None, :]
            total, y = _complete(
                total, own, m, image[:, None], h, j[None, :], c[None, :], ok, a, b, x_ptr, dy_ptr, pulled_ptr, dx_ptr,
                factors_ptr, winners_ptr, others_ptr, HEIGHT, WIDTH, HEIGHT, WIDTH, samples, x_size, dy_size, C, 1,
                DROPS, POOLED, False, ADDS,
            )  # fmt: skip
            if STATS:
                sums += total
                products += total * (y - mean)
    if STATS:
        # Each column of a line is a separate split: sums over the pixels of one channel are not contiguous here.
        to = partial_ptr + ((tl.program_id(0) * WIDTH + j) * terms + place) * C + c
        tl.store(to, tl.sum(sums, 0), mask=c_ok)
        tl.store(to + tl.num_programs(0) * WIDTH * terms * C, tl.sum(products, 0) * rstd, mask=c_ok)
