# mypy: ignore-errors
"""Triton kernels of `pool`."""

import triton
import triton.language as tl

from softcell.kernels.backend import table
from softcell.kernels.taps import TILE
from softcell.kernels.taps_triton import await_previous, convolve_launch, convolve_tile, launching

POOL_VALUES = 2048
"""Values of a tile of a pool that shares a launch with convolutions: 16 for each thread of four warps."""


@triton.jit
def _pool_tile(
    number, tile, x_ptr, y_ptr, winners_ptr, partial_ptr, jobs_ptr, rows, height, width, out_height, out_width, x_plane,
    planes, C: tl.constexpr, CB: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, STATS: tl.constexpr,
    LARGEST: tl.constexpr, COPIES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK rows of job `number`."""
    job = jobs_ptr + number * 4
    source, largest, average, slot = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3)
    await_previous(EARLY)
    m = tile * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, CB)
    c_ok = c < C
    m_ok = m < rows
    area = out_height * out_width
    image = m // area
    inside = m - image * area
    top = (inside // out_width) * STRIDE - 1
    left = (inside % out_width) * STRIDE - 1
    base = x_ptr + source.to(tl.int64) * x_plane + c[None, :]
    best = tl.full((BLOCK, CB), float("-inf"), dtype=tl.float32)
    winner = tl.zeros((BLOCK, CB), dtype=tl.int32)
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    count = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in tl.static_range(9):
        h = top + tap // 3
        w = left + tap % 3
        here = m_ok & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        at = base + (((image * height + h) * width + w) * C)[:, None]
        given = tl.load(at, mask=here[:, None] & c_ok[None, :], other=0.0)
        if COPIES and tap == 4:  # the pixel itself, since there are no strides
            own = y_ptr + source * rows.to(tl.int64) * C + (m * C)[:, None] + c[None, :]
            tl.store(own, given, mask=here[:, None] & c_ok[None, :])
        x = given.to(tl.float32)
        total += x
        count += tl.where(here, 1.0, 0.0)
        if LARGEST:  # NaN wins, as in PyTorch
            better = here[:, None] & ((x > best) | (x != x))
            best = tl.where(better, x, best)
            winner = tl.where(better, tap, winner)
    ok = m_ok[:, None] & c_ok[None, :]
    mean = total / tl.maximum(count, 1.0)[:, None]
    inner = (m * C)[:, None] + c[None, :]
    size = rows.to(tl.int64) * C
    if LARGEST:
        tl.store(y_ptr + largest * size + inner, best.to(y_ptr.dtype.element_ty), mask=ok & (largest >= 0))
        tl.store(winners_ptr + slot * size + inner, winner.to(tl.uint8), mask=ok & (largest >= 0))
    tl.store(y_ptr + average * size + inner, mean.to(y_ptr.dtype.element_ty), mask=ok & (average >= 0))
    if STATS:
        present = tl.minimum(rows - tile * BLOCK, BLOCK)
        for which in tl.static_range(2):
            plane = largest if which == 0 else average
            value = best if which == 0 else mean
            value = tl.where(ok, value.to(y_ptr.dtype.element_ty).to(tl.float32), 0.0)
            sums = tl.sum(value, 0)
            centred = tl.where(ok, value - (sums / present)[None, :], 0.0)
            to = partial_ptr + (tile * planes + plane) * C + c
            tl.store(to, sums, mask=c_ok & (plane >= 0))
            tl.store(to + tl.num_programs(0) * planes * C, tl.sum(centred * centred, 0), mask=c_ok & (plane >= 0))


@triton.jit(do_not_specialize=["rows", "height", "width", "out_height", "out_width", "planes"])
def _pool(
    x_ptr, y_ptr, winners_ptr, partial_ptr, jobs_ptr, rows, height, width, out_height, out_width, x_plane, planes,
    C: tl.constexpr, CB: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, STATS: tl.constexpr,
    LARGEST: tl.constexpr, COPIES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _pool_tile(
        tl.program_id(1), tl.program_id(0), x_ptr, y_ptr, winners_ptr, partial_ptr, jobs_ptr, rows, height, width,
        out_height, out_width, x_plane, planes, C, CB, STRIDE, BLOCK, STATS, LARGEST, COPIES, EARLY,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "height", "width", "out_height", "out_width", "planes", "convolutions"])
def _convolve_and_pool(
    x_ptr, w_ptr, y_ptr, partial_ptr, jobs_ptr, rows, height, width, out_height, out_width, x_plane, y_plane, planes,
    pools_ptr, convolutions, C: tl.constexpr, CB: tl.constexpr, CP: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STATS: tl.constexpr,
    PARTS: tl.constexpr, POOL_STATS: tl.constexpr, COPIES: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The first programs along the second axis of the grid convolve, the others compute averages.

    A tile of a convolution is PARTS tiles of a pool, which need fewer registers.
    """
    number = tl.program_id(1)
    if number < convolutions:
        convolve_tile(
            number, x_ptr, w_ptr, y_ptr, partial_ptr, jobs_ptr, rows, height, width, out_height, out_width, x_plane,
            y_plane, planes, C, CB, STRIDE, BLOCK_M, BLOCK_N, BLOCK_K, STATS, PRECISION, EARLY,
        )  # fmt: skip
    else:
        number -= convolutions
        tile = tl.program_id(0) * PARTS + number % PARTS
        _pool_tile(
            number // PARTS, tile, x_ptr, y_ptr, y_ptr, partial_ptr, pools_ptr, rows, height, width, out_height,
            out_width, x_plane, planes, C, CP, STRIDE, BLOCK_M // PARTS, POOL_STATS, False, COPIES, EARLY,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "height", "width", "out_height", "out_width", "samples"])
def _gather_gradient(
    x_ptr, parts_ptr, dy_ptr, dx_ptr, mix_ptr, factors_ptr, winners_ptr, jobs_ptr, identities_ptr, rows, height, width,
    out_height, out_width, dy_plane, samples, C: tl.constexpr, CB: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, POOLED: tl.constexpr, LARGEST: tl.constexpr, DROPS: tl.constexpr,
    MASKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    job = jobs_ptr + tl.program_id(1) * 9
    source, first, count = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    begin, end, adds = tl.load(job + 3), tl.load(job + 4), tl.load(job + 5)
    await_previous(EARLY)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, CB)
    c_ok = c < C
    m_ok = m < rows
    ok = m_ok[:, None] & c_ok[None, :]
    inner = (m * C)[:, None] + c[None, :]
    size = rows.to(tl.int64) * C
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for part in range(first, first + count):
        total += tl.load(parts_ptr + part * size + inner, mask=ok, other=0.0)
    if MASKED:
        x = tl.load(x_ptr + source * size + inner, mask=ok, other=0.0).to(tl.float32)
        total = tl.where(x > 0, total, 0.0)
    to = dx_ptr + source * size + inner
    total += tl.load(to, mask=ok & (adds > 0), other=0.0).to(tl.float32)
    for i in range(begin, end):
        # An identity keeps the resolution, so rows are the same on both sides.
        plane, weight = tl.load(identities_ptr + i * 3), tl.load(mix_ptr + tl.load(identities_ptr + i * 3 + 1))
        g = tl.load(dy_ptr + plane.to(tl.int64) * dy_plane + inner, mask=ok, other=0.0).to(tl.float32)
        if DROPS:
            at = factors_ptr + tl.load(identities_ptr + i * 3 + 2) * samples + m // (height * width)
            g *= tl.load(at, mask=m_ok, other=0.0)[:, None]
        total += weight * g
    if POOLED:
        largest, average, slot = tl.load(job + 6), tl.load(job + 7), tl.load(job + 8)
        area = height * width
        image = m // area
        inside = m - image * area
        row = inside // width + 1
        column = inside % width + 1
        for tap in tl.static_range(9):
            h = row - tap // 3
            w = column - tap % 3
            here = m_ok & (h >= 0) & (w >= 0)
            if STRIDE == 2:
                here = here & ((h & 1) == 0) & ((w & 1) == 0)
                h = h >> 1
                w = w >> 1
            here = here & (h < out_height) & (w < out_width)
            at = (((image * out_height + h) * out_width + w) * C)[:, None] + c[None, :]
            seen = here[:, None] & c_ok[None, :]
            top = h * STRIDE - 1
            left = w * STRIDE - 1
            tall = tl.minimum(top + 3, height) - tl.maximum(top, 0)
            broad = tl.minimum(left + 3, width) - tl.maximum(left, 0)
            share = 1.0 / tl.maximum(tall * broad, 1).to(tl.float32)
            g = tl.load(dy_ptr + average.to(tl.int64) * dy_plane + at, mask=seen & (average >= 0), other=0.0)
            total += g.to(tl.float32) * share[:, None]
            if LARGEST:
                won = tl.load(winners_ptr + slot.to(tl.int64) * dy_plane + at, mask=seen & (largest >= 0), other=9)
                # All values are loaded, winners or not: a mask that differs by channel would split the loads.
                g = tl.load(dy_ptr + largest.to(tl.int64) * dy_plane + at, mask=seen & (largest >= 0), other=0.0)
                total += tl.where(won.to(tl.int32) == tap, g.to(tl.float32), 0.0)
    tl.store(to, total.to(dx_ptr.dtype.element_ty), mask=ok)


def _settings(x):
    c = x.shape[-1]
    return {"C": c, "CB": triton.next_power_of_2(c), **launching()}


def _has_maximum(pools):
    return any(p.largest >= 0 for p in pools)


def pool(x, y, winners, partial, pools, *, copies=False):
    assert not copies or pools[0].stride == 1
    rows = y[0].numel() // y.shape[-1]
    jobs = tuple((p.source, p.largest, p.average, p.slot) for p in pools)
    settings = _settings(x)
    # Statistics are computed per tile. Otherwise wide maps take fewer rows, since a tile does not fit the registers.
    block = TILE if partial is not None else min(TILE, max(1, 8192 // settings["CB"]))
    _pool[(triton.cdiv(rows, block), len(jobs))](
        x, y, winners, y if partial is None else partial, table(jobs, x.device), rows, x.shape[2], x.shape[3],
        y.shape[2], y.shape[3], x[0].numel(), len(y), STRIDE=pools[0].stride, BLOCK=block, STATS=partial is not None,
        LARGEST=_has_maximum(pools), COPIES=copies, num_warps=8, **settings,
    )  # fmt: skip


def convolve_and_pool(x, weights, y, partial, groups, pools, *, measured, copies):
    assert not _has_maximum(pools) and pools[0].stride == groups[0].window.stride
    assert not copies or pools[0].stride == 1
    jobs, arguments, options = convolve_launch(x, weights, y, partial, groups)
    listed = table(tuple((p.source, p.largest, p.average, p.slot) for p in pools), x.device)
    rows, c = y[0].numel() // y.shape[-1], y.shape[-1]
    measured, wide = measured and partial is not None, triton.next_power_of_2(c)
    parts = 1 if measured else min(TILE, max(1, TILE * wide // POOL_VALUES))  # statistics are those of a whole tile
    _convolve_and_pool[(triton.cdiv(rows, TILE), jobs + parts * len(pools))](
        *arguments, listed, jobs, CP=wide, PARTS=parts, POOL_STATS=measured, COPIES=copies, **options,
    )  # fmt: skip


def gather_gradient(x, parts, dy, dx, mix, factors, winners, leaving):
    settings = _settings(x)
    identities, jobs = [], []
    for one in leaving:
        start = len(identities)
        identities += one.identities
        p = one.pool
        pooled = (-1, -1, 0) if p is None else (p.largest, p.average, p.slot)
        jobs.append((one.source, one.first, one.count, start, len(identities), int(one.adds), *pooled))
    rows = x[0].numel() // x.shape[-1]
    block = max(1, 1024 // settings["CB"])
    pools = [one.pool for one in leaving if one.pool is not None]
    _gather_gradient[(triton.cdiv(rows, block), len(jobs))](
        x, parts, dy, dx, mix, mix if factors is None else factors, winners, table(tuple(jobs), x.device),
        table(tuple(identities) or ((0, 0, 0),), x.device), rows, x.shape[2], x.shape[3], dy.shape[2], dy.shape[3],
        dy[0].numel(), x.shape[1], STRIDE=pools[0].stride if pools else 1, BLOCK=block, POOLED=bool(pools),
        DROPS=factors is not None, LARGEST=_has_maximum(pools), MASKED=leaving[0].masked, **settings,
    )  # fmt: skip
