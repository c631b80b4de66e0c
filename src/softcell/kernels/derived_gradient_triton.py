# mypy: ignore-errors
"""Triton kernels of `derived` that compute gradients of planes.

Jobs that read a gradient begin with the seven numbers of `_pull_rows`. Gradients of depthwise results are written
inside a border of zeros, like activations (`derived_forward_triton`). `_lower_tiles` is to `_lower` what `_point_tiles`
is to `_stages` there: its programs loop over blocks of rows.
"""

import triton
import triton.language as tl


@triton.jit
def _pull_rows(
    job, g_ptr, y_ptr, factors_ptr, slopes_ptr, size, m, m_ok, area, samples, C: tl.constexpr, COLUMNS: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """Pointers for `_pull` at rows m (gradients, values, slopes) and drop-path factors, prepared before its loop."""
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
    """∂y [rows, n] in float32: the gradient of a plane with respect to the input of its norm."""
    ok = m_ok[:, None] & n_ok[None, :]
    g = tl.load(g_rows[:, None] + n[None, :], mask=ok, other=0.0).to(tl.float32)
    if DROPS:
        g *= factor[:, None]
    y = tl.load(y_rows[:, None] + n[None, :], mask=ok, other=0.0).to(tl.float32)
    slope = tl.load(slopes + n, mask=n_ok, other=0.0)
    back = tl.load(slopes + planes * C + n, mask=n_ok, other=0.0)
    level = tl.load(slopes + 2 * planes * C + n, mask=n_ok, other=0.0)
    return tl.where(ok, g * slope[None, :] + y * back[None, :] + level[None, :], 0.0)


@triton.jit
def _clear_border(
    base, first, samples, k, k_ok, kind: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BORDER: tl.constexpr,
    PITCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes zeros into pixels `first`… of the borders of all maps, which begin at `base`."""
    wide: tl.constexpr = WIDTH + 2 * BORDER
    ring: tl.constexpr = wide * (HEIGHT + 2 * BORDER) - HEIGHT * WIDTH
    pixel = first + tl.arange(0, BLOCK)
    image = pixel // ring
    inside = pixel - image * ring
    # First the lines above and below, then the pixels to the left and right of the other lines.
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
    g_ptr, y_ptr, w_ptr, factors_ptr, slopes_ptr, x_ptr, more_ptr, to_ptr, dy_ptr, jobs_ptr, rows, AREA: tl.constexpr,
    samples, size, planes, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    BORDER: tl.constexpr, to_size, dy_size, C: tl.constexpr, FAN_IN: tl.constexpr, PITCH: tl.constexpr,
    DY_PITCH: tl.constexpr, WEIGHTS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DROPS: tl.constexpr, EXTERNAL: tl.constexpr, PULLED: tl.constexpr,
    WHOLE: tl.constexpr, ADDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Dense ∂y, and the gradient of the depthwise result, ∂y · matrix, inside a BORDER of zeros.

    EXTERNAL: the latter is the gradient of the input tensor itself, masked where the input is not positive; ADDS: plus
    the gradient from another reader. PULLED: ∂y was already written, padded with zeros to DY_PITCH. WHOLE: all stages
    write planes starting at the first column.
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
    if WHOLE:
        column = 0
    dy_rows = dy_ptr + unit.to(tl.int64) * dy_size + (m * DY_PITCH)[:, None] + column
    if not PULLED:
        g_rows, y_rows, slopes, factor = _pull_rows(
            job, g_ptr, y_ptr, factors_ptr, slopes_ptr, size, m, m_ok, AREA, samples, C, COLUMNS, DROPS
        )
    total = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for n0 in range(0, columns, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        n_ok = n < columns
        if PULLED:
            # Columns beyond the last one belong to another stage or are zero, and their weights are zero.
            dy = tl.load(dy_rows + n[None, :], mask=m_ok[:, None] & (column + n < DY_PITCH)[None, :], other=0.0)
        else:
            dy = _pull(g_rows, y_rows, slopes, factor, m_ok, n, n_ok, planes, C, DROPS).to(kind)
            tl.store(dy_rows + n[None, :], dy, mask=m_ok[:, None] & n_ok[None, :] & (first == 0))
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
        total = tl.where(x > 0, total, 0.0)
        if ADDS:
            total += tl.load(more_ptr + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(to_ptr + at, total.to(kind), mask=ok)
    else:
        whole = m_ok[:, None] & (k < PITCH)[None, :]  # zero beyond the channels, and so are the weights
        tl.store(to_ptr + unit.to(tl.int64) * to_size + at, total.to(kind), mask=whole)


@triton.jit(do_not_specialize=["rows", "samples", "planes", "programs"])
def _lower_tiles(
    g_ptr, y_ptr, w_ptr, factors_ptr, slopes_ptr, x_ptr, more_ptr, to_ptr, dy_ptr, jobs_ptr, rows, programs, samples,
    size, planes, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BORDER: tl.constexpr, to_size, dy_size, C: tl.constexpr,
    FAN_IN: tl.constexpr, PITCH: tl.constexpr, DY_PITCH: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EXTERNAL: tl.constexpr, PULLED: tl.constexpr,
    ALIGNED: tl.constexpr, DROPS: tl.constexpr, ADDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_lower` without strides, if a block holds all columns of ∂y: a program loops over blocks of rows.

    It loads its weights once and prefetches the next rows. The first `programs` programs of a job do this, the others
    write its BORDER of zeros. PULLED: ∂y was already written; otherwise the program writes it, and a block holds all
    channels. EXTERNAL: the output is the gradient of an input tensor; ADDS: plus that from another reader. ALIGNED: all
    blocks of rows are complete and, inside a cell, each is within one image.
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
            if ADDS:
                more = tl.load(more_ptr + place, mask=there, other=0.0)
        total = tl.dot(dy, weight, input_precision=PRECISION)
        if EXTERNAL:
            to = base + place
            total = tl.where(x > 0, total, 0.0)
            if ADDS:
                total += more.to(tl.float32)
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


@triton.jit(do_not_specialize=["rows", "samples", "planes"])
def _pulls(
    g_ptr, y_ptr, factors_ptr, slopes_ptr, to_ptr, jobs_ptr, rows, AREA: tl.constexpr, samples, size, planes,
    C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Dense ∂y of pools."""
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


@triton.jit
def _from_window(
    total, h, w, tap, ok, base, winners, image, c, largest: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Adds the gradient that window (h, w) of a pool passes to the pixel at its `tap`."""
    seen = ok & (h >= 0) & (w >= 0) & (h < OUT_HEIGHT) & (w < OUT_WIDTH)
    inner = ((image * OUT_HEIGHT + h) * OUT_WIDTH + w) * C + c
    dy = tl.load(base + inner, mask=seen, other=0.0).to(tl.float32)
    if largest:
        won = tl.load(winners + inner, mask=seen, other=9).to(tl.int32)
        total += tl.where(won == tap, dy, 0.0)
    else:
        top = h * STRIDE - 1
        left = w * STRIDE - 1
        high = tl.minimum(top + 3, HEIGHT) - tl.maximum(top, 0)
        broad = tl.minimum(left + 3, WIDTH) - tl.maximum(left, 0)
        total += dy / tl.maximum(high * broad, 1).to(tl.float32)
    return total


@triton.jit
def _from_pool(
    total, pool, slot, image, i, j, c, ok, pulled_ptr, winners_ptr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, dy_size, C: tl.constexpr, STRIDE: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Adds the gradient of a pool: a maximum if it has a slot, otherwise an average.

    TOGETHER: for a maximum with stride 2, a pixel is in at most 2 × 2 windows, which are loaded at the same time.
    """
    base = pulled_ptr + pool.to(tl.int64) * dy_size
    winners = winners_ptr + slot.to(tl.int64) * dy_size
    if slot >= 0:
        if TOGETHER and STRIDE == 2:
            for number in tl.static_range(4):
                h = ((i + 1) >> 1) - number // 2
                w = ((j + 1) >> 1) - number % 2
                down = i + 1 - 2 * h
                across = j + 1 - 2 * w
                within = ok & (down < 3) & (across < 3)
                total = _from_window(
                    total, h, w, down * 3 + across, within, base, winners, image, c, True, HEIGHT, WIDTH, OUT_HEIGHT,
                    OUT_WIDTH, C, STRIDE,
                )  # fmt: skip
        else:
            for tap in range(9):
                h, w, within = _window_of(i, j, tap, ok, STRIDE)
                total = _from_window(
                    total, h, w, tap, within, base, winners, image, c, True, HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, C,
                    STRIDE,
                )  # fmt: skip
    else:
        for tap in range(9):
            h, w, within = _window_of(i, j, tap, ok, STRIDE)
            total = _from_window(
                total, h, w, tap, within, base, winners, image, c, False, HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, C,
                STRIDE,
            )  # fmt: skip
    return total


@triton.jit
def _window_of(i, j, tap, ok, STRIDE: tl.constexpr):
    """The window of a pool whose `tap` is pixel (i, j), and whether it exists."""
    h = i + 1 - tap // 3
    w = j + 1 - tap % 3
    if STRIDE == 2:
        return h >> 1, w >> 1, ok & ((h & 1) == 0) & ((w & 1) == 0)
    else:
        return h, w, ok


@triton.jit
def _complete(
    total, own, m, image, i, j, c, ok, a, b, x_ptr, dy_ptr, pulled_ptr, dx_ptr, factors_ptr, winners_ptr, others_ptr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, samples, x_size,
    dy_size, C: tl.constexpr, STRIDE: tl.constexpr, DROPS: tl.constexpr, POOLED: tl.constexpr, TOGETHER: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """Applies ReLU's mask to `total`, adds earlier terms, identities and pools, stores the result, returns it with y.

    ADDS: earlier terms are the gradient of a node as it arrived; the result is stored elsewhere. total: sum over the
    convolutions. m, image, i, j, c: pixel, its image, line, column and channel, which broadcast to the shape of
    `total`; ok: mask of those that exist. a, b: the coefficients of the plane's value.
    """
    unit, column, distance = tl.load(own), tl.load(own + 1) * C, tl.load(own + 2) * C
    other, last = tl.load(own + 6), tl.load(own + 7)
    at = unit.to(tl.int64) * x_size + column + m * distance + c
    y = tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
    total = tl.where(y * a + b > 0, total, 0.0)
    if ADDS:
        total += tl.load(dx_ptr + at, mask=ok, other=0.0).to(tl.float32)
    for number in range(other, last):
        # For an identity: the address of its gradient, and its path. For a pool: its number and slot (-1: an average).
        job = others_ptr + number * 6
        if tl.load(job + 5) == -2:
            g_unit, g_column, apart, path = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C, tl.load(job + 3)
            g = tl.load(dy_ptr + g_unit.to(tl.int64) * dy_size + g_column + m * apart + c, mask=ok, other=0.0)
            g = g.to(tl.float32)
            if DROPS:
                g *= tl.load(factors_ptr + path * samples + image, mask=(image < samples) & (path >= 0), other=1.0)
            total += g
        elif POOLED:
            pool, slot = tl.load(job + 4), tl.load(job + 5)
            total = _from_pool(
                total, pool, slot, image, i, j, c, ok, pulled_ptr, winners_ptr, HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH,
                dy_size, C, STRIDE, TOGETHER,
            )  # fmt: skip
    g = total.to(dx_ptr.dtype.element_ty)
    if ADDS:
        at = tl.load(own + 9).to(tl.int64) * x_size + tl.load(own + 10) * C + m * (tl.load(own + 11) * C) + c
    tl.store(dx_ptr + at, g, mask=ok)
    return tl.where(ok, g.to(tl.float32), 0.0), y


@triton.jit(do_not_specialize=["rows", "samples", "planes", "terms"])
def _gather(
    x_ptr, coefficients_ptr, moments_ptr, depth_ptr, lowered_ptr, dy_ptr, pulled_ptr, dx_ptr, factors_ptr,
    winners_ptr, partial_ptr, sources_ptr, jobs_ptr, others_ptr, rows, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, BORDER: tl.constexpr, samples, x_size, dy_size, lowered_size,
    planes, terms, C: tl.constexpr, PITCH: tl.constexpr, CB: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, DROPS: tl.constexpr, POOLED: tl.constexpr, STATS: tl.constexpr,
    TOGETHER: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """The gradient of a plane's value, from all convolutions, identities and pools that read it.

    SIZE: the size of all windows, 0 if they differ. STEP: taps of a line that are loaded at a time.
    """
    own = sources_ptr + tl.program_id(1) * 12
    begin, end = tl.load(own + 4), tl.load(own + 5)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2) * CB + tl.arange(0, CB)
    c_ok = c < C
    m_ok = m < rows
    ok = m_ok[:, None] & c_ok[None, :]
    area = HEIGHT * WIDTH
    within = tl.minimum(m, rows - 1)  # clamped to an existing row: windows are read without a row mask
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
                for step in tl.static_range(STEP):  # number of loads in flight
                    s = left + step
                    w = j + padding - s * dilation
                    here = (c < PITCH)[None, :]
                    if STRIDE == 2:
                        here = here & (h_ok & ((w & 1) == 0))[:, None]
                        w = w >> 1
                    if SIZE == 0:
                        here = here & (s < size)
                    d = tl.load(base + (start + w)[:, None] * PITCH + c[None, :], mask=here, other=0.0).to(tl.float32)
                    if SIZE > 1:  # values beyond the channels are not stored
                        weight = tl.load(depth_ptr + depth + (r * size + s) * C + c, mask=c_ok)
                    else:
                        weight = tl.load(
                            depth_ptr + depth + (r * size + s) * C + c, mask=c_ok & (depth >= 0) & (s < size), other=1.0
                        )
                    total += d * weight[None, :]
    source, place = tl.load(own + 3), tl.load(own + 8)
    a = tl.load(coefficients_ptr + source * C + c, mask=c_ok, other=0.0)[None, :]
    b = tl.load(coefficients_ptr + (planes + source) * C + c, mask=c_ok, other=0.0)[None, :]
    g, y = _complete(
        total, own, m[:, None], image[:, None], i[:, None], j[:, None], c[None, :], ok, a, b, x_ptr, dy_ptr, pulled_ptr,
        dx_ptr, factors_ptr, winners_ptr, others_ptr, HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, samples, x_size, dy_size, C,
        STRIDE, DROPS, POOLED, TOGETHER, ADDS,
    )  # fmt: skip
    if STATS:
        mean = tl.load(moments_ptr + source * C + c, mask=c_ok, other=0.0)
        rstd = tl.load(moments_ptr + (planes + source) * C + c, mask=c_ok, other=0.0)
        to = partial_ptr + (tl.program_id(0) * terms + place) * C + c
        tl.store(to, tl.sum(g, 0), mask=c_ok)
        normed = (y - mean[None, :]) * rstd[None, :]
        tl.store(to + tl.num_programs(0) * terms * C, tl.sum(g * normed, 0), mask=c_ok)
