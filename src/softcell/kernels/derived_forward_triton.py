# mypy: ignore-errors
"""Triton kernels of `derived` that fill planes: activations, convolutions, pools and sums into nodes.

A program handles some rows (pixels) and a block of channels. A *view* locates a map: unit (multiples of rows ·
c), column, distance of rows. Jobs are rows of small integer tables. ReLU(z), which windows read, is first written
inside a border of zeros: a tap is then a load and a multiplication, with no mask, norm or ReLU.

A program of `_stages` that processes one block loads weights for that block only. At 4 bytes each they are larger than
the block itself from 65 channels on. The program also waits for its job, its loads, its product and its stores one
after the other. The programs of `_point_tiles` loop over blocks of rows instead: weights are loaded once, and the loads
of the next blocks are in flight while a block is multiplied and stored.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["jobs", "length"])
def _start(w_ptr, depths_ptr, state_ptr, jobs_ptr, jobs, length, C: tl.constexpr, BLOCK: tl.constexpr):
    """Transposes depthwise kernels to (tap, channel), and sets the state of planes without a norm."""
    number = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if number < jobs:
        job = jobs_ptr + number * 3
        depth, start, taps = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2)
        ok = i < C * taps
        tl.store(depths_ptr + start + i, tl.load(w_ptr + depth + i % C * taps + i // C, mask=ok), mask=ok)
    else:
        row = number - jobs
        value = tl.where((row == 3) | (row == 5), 1.0, 0.0)  # the first coefficient and the first slope
        tl.store(state_ptr + row * length + i, tl.zeros((BLOCK,), dtype=tl.float32) + value, mask=i < length)


@triton.jit(do_not_specialize=["rows", "planes"])
def _activate(
    x_ptr, coefficients_ptr, to_ptr, jobs_ptr, rows, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BORDER: tl.constexpr,
    x_size, to_size, planes, C: tl.constexpr, PITCH: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ReLU(z) of planes inside a BORDER of zeros, so that windows are read without a mask.

    Channels are padded to PITCH with zeros, so that each pixel begins at a multiple of 16 bytes.
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
    within = tl.minimum(m, rows - 1)  # clamped to an existing row: windows are read without a row mask
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
            # Sums over rows are products with a row of ones, computed by tensor cores instead of hundreds of shuffles.
            one = tl.full((16, BLOCK_M), 1.0, dtype=kind)  # 16 equal rows, the minimum of `tl.dot`
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


@triton.jit(do_not_specialize=["rows", "samples", "planes", "distance"])
def _add_up(
    buffer_ptr, coefficients_ptr, factors_ptr, nodes_ptr, jobs_ptr, rows, AREA: tl.constexpr, samples, size, planes,
    distance, C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Sums into nodes: a node is the sum of its jobs `begin` to `end`, written to `column`, in multiples of c.

    Nodes that are separate maps also begin at a column, behind all rows of the preceding ones.
    """
    node = nodes_ptr + tl.program_id(1) * 3
    begin, end, column = tl.load(node), tl.load(node + 1), tl.load(node + 2)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2) * CB + tl.arange(0, CB)
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
        better = here[:, None] & ((x > best) | (x != x))  # NaN wins, as in PyTorch
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
