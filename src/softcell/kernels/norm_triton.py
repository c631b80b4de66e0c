# mypy: ignore-errors
"""Triton kernels of `norm`. A program processes rows (pixels) × all channels, rounded up to a power of two CB."""

import triton
import triton.language as tl

from softcell.kernels.backend import current_settings, table
from softcell.kernels.taps import TILE
from softcell.kernels.taps_triton import await_previous, launching

UNROLL = 4


@triton.jit(do_not_specialize=["rows", "tiles", "planes", "first"])
def _finish_moments(
    partial_ptr, moments_ptr, rows, tiles, planes, first, eps, C: tl.constexpr, CB: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_previous(EARLY)
    plane = first + tl.program_id(0)
    c = tl.arange(0, CB)
    c_ok = c < C
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for start in range(0, tiles, BLOCK):
        t = start + tl.arange(0, BLOCK)
        ok = (t < tiles)[:, None] & c_ok[None, :]
        total += tl.load(partial_ptr + ((t * planes + plane) * C)[:, None] + c[None, :], mask=ok, other=0.0)
    mean = tl.sum(total, 0) / rows
    square = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for start in range(0, tiles, BLOCK):
        t = start + tl.arange(0, BLOCK)
        ok = (t < tiles)[:, None] & c_ok[None, :]
        at = partial_ptr + ((t * planes + plane) * C)[:, None] + c[None, :]
        count = tl.maximum(tl.minimum(rows - t * TILE, TILE), 1).to(tl.float32)[:, None]
        off = tl.load(at, mask=ok, other=0.0) / count - mean[None, :]
        inner = tl.load(at + tiles * planes * C, mask=ok, other=0.0)
        square += tl.where(ok, inner + count * off * off, 0.0)
    variance = tl.sum(square, 0) / rows
    to = moments_ptr + plane * C + c
    tl.store(to, mean, mask=c_ok)
    tl.store(to + planes * C, 1.0 / tl.sqrt(variance + eps), mask=c_ok)
    tl.store(to + 2 * planes * C, variance, mask=c_ok)


@triton.jit(do_not_specialize=["rows", "planes", "first"])
def _normalise(
    y_ptr, moments_ptr, rows, planes, first, C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_previous(EARLY)
    plane = first + tl.program_id(1)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, CB)
    ok = (m < rows)[:, None] & (c < C)[None, :]
    mean = tl.load(moments_ptr + plane * C + c, mask=c < C, other=0.0)
    rstd = tl.load(moments_ptr + (planes + plane) * C + c, mask=c < C, other=0.0)
    at = y_ptr + plane.to(tl.int64) * rows * C + (m * C)[:, None] + c[None, :]
    y = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    tl.store(at, ((y - mean[None, :]) * rstd[None, :]).to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows", "tiles", "planes", "first"])
def _gradient_sums(
    y_ptr, dy_ptr, partial_ptr, rows, tiles, planes, first, C: tl.constexpr, CB: tl.constexpr, TILE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_previous(EARLY)
    tile = tl.program_id(0)
    plane = first + tl.program_id(1)
    m = tile * TILE + tl.arange(0, TILE)
    c = tl.arange(0, CB)
    ok = (m < rows)[:, None] & (c < C)[None, :]
    at = plane.to(tl.int64) * rows * C + (m * C)[:, None] + c[None, :]
    y = tl.load(y_ptr + at, mask=ok, other=0.0).to(tl.float32)
    g = tl.load(dy_ptr + at, mask=ok, other=0.0).to(tl.float32)
    to = partial_ptr + (tile * planes + plane) * C + c
    tl.store(to, tl.sum(g, 0), mask=c < C)
    tl.store(to + tiles * planes * C, tl.sum(g * y, 0), mask=c < C)


@triton.jit(do_not_specialize=["tiles", "planes", "first"])
def _finish_sums(
    partial_ptr, sums_ptr, tiles, planes, first, C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_previous(EARLY)
    plane = first + tl.program_id(0)
    slot = tl.program_id(1)
    c = tl.arange(0, CB)
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for start in range(0, tiles, BLOCK):
        t = start + tl.arange(0, BLOCK)
        ok = (t < tiles)[:, None] & (c < C)[None, :]
        total += tl.load(
            partial_ptr + (((slot * tiles + t) * planes + plane) * C)[:, None] + c[None, :], mask=ok, other=0.0
        )
    tl.store(sums_ptr + (slot * planes + plane) * C + c, tl.sum(total, 0), mask=c < C)


@triton.jit(do_not_specialize=["rows", "planes", "first"])
def _normalise_gradient(
    y_ptr, dy_ptr, moments_ptr, sums_ptr, rows, planes, first, scale, C: tl.constexpr, CB: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_previous(EARLY)
    plane = first + tl.program_id(1)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, CB)
    c_ok = c < C
    ok = (m < rows)[:, None] & c_ok[None, :]
    rstd = tl.load(moments_ptr + (planes + plane) * C + c, mask=c_ok, other=0.0)
    mean_g = tl.load(sums_ptr + plane * C + c, mask=c_ok, other=0.0) * scale
    mean_gy = tl.load(sums_ptr + (planes + plane) * C + c, mask=c_ok, other=0.0) * scale
    at = plane.to(tl.int64) * rows * C + (m * C)[:, None] + c[None, :]
    y = tl.load(y_ptr + at, mask=ok, other=0.0).to(tl.float32)
    g = tl.load(dy_ptr + at, mask=ok, other=0.0).to(tl.float32)
    g = (g - mean_g[None, :] - y * mean_gy[None, :]) * rstd[None, :]
    tl.store(dy_ptr + at, g.to(dy_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_terms", "rows", "area", "samples", "planes", "node"])
def _combine(
    buffer_ptr, moments_ptr, mix_ptr, factors_ptr, terms_ptr, num_terms, rows, area, samples, planes, node,
    C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, DROPS: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, BY_CHANNEL: tl.constexpr, RECTIFIED: tl.constexpr,
):  # fmt: skip
    await_previous(EARLY)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, CB)
    c_ok = c < C
    ok = (m < rows)[:, None] & c_ok[None, :]
    at = (m * C)[:, None] + c[None, :]
    size = rows.to(tl.int64) * C
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    shift = tl.zeros((CB,), dtype=tl.float32)
    for t in range(0, num_terms, UNROLL):
        # Everything is loaded before the first value is used, so that loads do not wait for each other.
        if AHEAD and not BY_CHANNEL:
            rows_read = ()
            for i in tl.static_range(UNROLL):
                row = terms_ptr + (t + i) * 5
                rows_read += ((tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)),)
            read = ()
            for i in tl.static_range(UNROLL):
                plane, at_weight, normed, counts = rows_read[i]
                read += ((
                    tl.load(buffer_ptr + plane * size + at, mask=ok, other=0.0),
                    tl.load(moments_ptr + plane * C + c, mask=c_ok & (normed > 0), other=0.0),
                    tl.load(moments_ptr + (planes + plane) * C + c, mask=c_ok & (normed > 0), other=1.0),
                    tl.load(mix_ptr + at_weight) * counts.to(tl.float32),
                ),)  # fmt: skip
            for i in tl.static_range(UNROLL):
                value, mean, rstd, weight = read[i]
                scale = weight * rstd
                if DROPS:
                    choice = tl.load(terms_ptr + (t + i) * 5 + 4)
                    factor = tl.load(factors_ptr + choice * samples + m // area, mask=m < rows, other=0.0)
                    inner = (value.to(tl.float32) - mean[None, :]) * scale[None, :]
                    total += tl.where(weight == 0.0, 0.0, inner) * factor[:, None]
                else:
                    total += tl.where(weight == 0.0, 0.0, value.to(tl.float32)) * scale[None, :]
                    shift += mean * scale
        else:
            for i in tl.static_range(UNROLL):
                row = terms_ptr + (t + i) * 5
                plane, normed = tl.load(row), tl.load(row + 2)
                if BY_CHANNEL:
                    own, used = mix_ptr + tl.load(row + 1) * C + c, tl.load(row + 3).to(tl.float32)
                    weight = tl.load(own, mask=c_ok, other=0.0) * used
                    bias = tl.load(own + C, mask=c_ok & (normed > 0), other=0.0) * used
                else:
                    weight = tl.load(mix_ptr + tl.load(row + 1)) * tl.load(row + 3).to(tl.float32)
                mean = tl.load(moments_ptr + plane * C + c, mask=c_ok & (normed > 0), other=0.0)
                rstd = tl.load(moments_ptr + (planes + plane) * C + c, mask=c_ok & (normed > 0), other=1.0)
                value = tl.load(buffer_ptr + plane * size + at, mask=ok, other=0.0).to(tl.float32)
                scale = weight * rstd
                if DROPS:
                    factor = tl.load(factors_ptr + tl.load(row + 4) * samples + m // area, mask=m < rows, other=0.0)
                    inner = (value - mean[None, :]) * scale[None, :]
                    if BY_CHANNEL:
                        total += (inner + bias[None, :]) * factor[:, None]
                    else:
                        total += tl.where(weight == 0.0, 0.0, inner) * factor[:, None]
                elif BY_CHANNEL:
                    total += value * scale[None, :]
                    shift += mean * scale - bias
                else:
                    total += tl.where(weight == 0.0, 0.0, value) * scale[None, :]
                    shift += mean * scale
    to = buffer_ptr + node * size + at
    total -= shift[None, :]
    if RECTIFIED:
        total = tl.where(total < 0, 0.0, total)  # NaN stays
    tl.store(to, total.to(buffer_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_terms", "rows", "rows_each", "area", "samples", "planes", "node"])
def _combine_sums(
    buffer_ptr, gradient_ptr, arrived_ptr, moments_ptr, mix_ptr, factors_ptr, partial_ptr, terms_ptr, num_terms, rows,
    rows_each, area, samples, planes, node, C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr, DROPS: tl.constexpr,
    BOTH: tl.constexpr, RECTIFIED: tl.constexpr, ARRIVES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1)
    c = tl.arange(0, CB)
    c_ok = c < C
    row = terms_ptr + t * 5
    plane, normed, plain, choice = tl.load(row), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    await_previous(EARLY)
    mean = tl.load(moments_ptr + plane * C + c, mask=c_ok & (normed > 0), other=0.0)
    rstd = tl.load(moments_ptr + (planes + plane) * C + c, mask=c_ok & (normed > 0), other=1.0)
    if RECTIFIED:
        own = mix_ptr + tl.load(row + 1) * C + c
        weight, bias = tl.load(own, mask=c_ok, other=0.0), tl.load(own + C, mask=c_ok, other=0.0)
    size = rows.to(tl.int64) * C
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    alone = tl.zeros((BLOCK, CB), dtype=tl.float32)
    begin = tl.program_id(0) * rows_each
    end = tl.minimum(begin + rows_each, rows)
    for start in range(begin, end, BLOCK):
        m = start + tl.arange(0, BLOCK)
        ok = (m < end)[:, None] & c_ok[None, :]
        at = (m * C)[:, None] + c[None, :]
        if ARRIVES:
            copied = tl.load(arrived_ptr + at, mask=ok, other=0.0)
            is_last = t == tl.num_programs(1) - 1
            tl.store(gradient_ptr + node * size + at, copied, mask=ok & is_last)
            g = copied.to(tl.float32)
        else:
            g = tl.load(gradient_ptr + node * size + at, mask=ok, other=0.0).to(tl.float32)
        if DROPS:
            g *= tl.load(factors_ptr + choice * samples + m // area, mask=m < end, other=0.0)[:, None]
        y = tl.load(buffer_ptr + plane * size + at, mask=ok & (plain == 0), other=0.0).to(tl.float32)
        if RECTIFIED:  # computed again from what is read anyway, so that the node's value is not read
            g = tl.where((y - mean[None, :]) * (rstd * weight)[None, :] + bias[None, :] > 0, g, 0.0)
        total += g * tl.where(plain > 0, 1.0, (y - mean[None, :]) * rstd[None, :])
        if BOTH:
            alone += g
    to = partial_ptr + (tl.program_id(0) * num_terms + t) * C + c
    tl.store(to, tl.sum(total, 0), mask=c_ok)
    if BOTH:
        tl.store(to + C, tl.sum(alone, 0), mask=c_ok)


@triton.jit(do_not_specialize=["num_terms", "splits"])
def _combine_finish(
    partial_ptr, sums_ptr, mix_gradient_ptr, terms_ptr, num_terms, splits, C: tl.constexpr, CB: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_previous(EARLY)
    t = tl.program_id(0)
    c = tl.arange(0, CB)
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for start in range(0, splits, BLOCK):
        s = start + tl.arange(0, BLOCK)
        ok = (s < splits)[:, None] & (c < C)[None, :]
        total += tl.load(partial_ptr + ((s * num_terms + t) * C)[:, None] + c[None, :], mask=ok, other=0.0)
    sums = tl.sum(total, 0)
    tl.store(sums_ptr + t * C + c, sums, mask=c < C)
    row = terms_ptr + t * 5
    tl.store(mix_gradient_ptr + tl.load(row + 1), tl.sum(sums, 0), mask=tl.load(row + 3) == 0)


@triton.jit(do_not_specialize=["num_terms", "splits"])
def _combine_finish_by_channel(
    partial_ptr, sums_ptr, mix_gradient_ptr, jobs_ptr, num_terms, splits, C: tl.constexpr, CB: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # Without drop-path, several β share one Σg. The first jobs are these sums, in order, and store them.
    t, weight = tl.load(jobs_ptr + tl.program_id(0) * 2), tl.load(jobs_ptr + tl.program_id(0) * 2 + 1)
    await_previous(EARLY)
    c = tl.arange(0, CB)
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for start in range(0, splits, BLOCK):
        s = start + tl.arange(0, BLOCK)
        ok = (s < splits)[:, None] & (c < C)[None, :]
        total += tl.load(partial_ptr + ((s * num_terms + t) * C)[:, None] + c[None, :], mask=ok, other=0.0)
    sums = tl.sum(total, 0)
    tl.store(sums_ptr + t * C + c, sums, mask=(c < C) & (tl.program_id(0) == t))
    tl.store(mix_gradient_ptr + weight * C + c, sums, mask=(c < C) & (weight >= 0))


@triton.jit(do_not_specialize=["rows", "area", "samples", "planes", "node"])
def _combine_write(
    buffer_ptr, gradient_ptr, moments_ptr, mix_ptr, factors_ptr, sums_ptr, terms_ptr, rows, area, samples, planes, node,
    scale, C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr, DROPS: tl.constexpr, BY_CHANNEL: tl.constexpr,
    RECTIFIED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = terms_ptr + tl.program_id(1) * 7
    plane, own, normed = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    adds, t, choice, plain = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    await_previous(EARLY)
    if not BY_CHANNEL:
        weight = tl.load(mix_ptr + own)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, CB)
    c_ok = c < C
    if BY_CHANNEL:
        weight = tl.load(mix_ptr + own * C + c, mask=c_ok, other=0.0)
    ok = (m < rows)[:, None] & c_ok[None, :]
    at = (m * C)[:, None] + c[None, :]
    size = rows.to(tl.int64) * C
    used = c_ok & (normed > 0)
    mean = tl.load(moments_ptr + plane * C + c, mask=used, other=0.0)
    rstd = tl.load(moments_ptr + (planes + plane) * C + c, mask=used, other=1.0)
    mean_g = tl.load(sums_ptr + plain * C + c, mask=used, other=0.0) * scale
    mean_gy = tl.load(sums_ptr + t * C + c, mask=used, other=0.0) * scale
    g = tl.load(gradient_ptr + node * size + at, mask=ok, other=0.0).to(tl.float32)
    if DROPS:
        g *= tl.load(factors_ptr + choice * samples + m // area, mask=m < rows, other=0.0)[:, None]
    read = ok & (normed > 0) if BY_CHANNEL else ok
    y = tl.load(buffer_ptr + plane * size + at, mask=read, other=0.0).to(tl.float32)
    if RECTIFIED:
        bias = tl.load(mix_ptr + (own + 1) * C + c, mask=c_ok, other=0.0)
        g = tl.where((y - mean[None, :]) * (rstd * weight)[None, :] + bias[None, :] > 0, g, 0.0)
    inner = g - mean_g[None, :] - (y - mean[None, :]) * (rstd * mean_gy)[None, :]
    result = inner * (weight * rstd)[None, :]
    to = gradient_ptr + plane * size + at
    result += tl.load(to, mask=ok & (adds > 0), other=0.0).to(tl.float32)
    tl.store(to, result.to(gradient_ptr.dtype.element_ty), mask=ok)


def _sizes(x):
    c = x.shape[-1]
    return {"C": c, "CB": triton.next_power_of_2(c), **launching()}, x[0].numel() // c


def _rows(settings, elements):
    return max(1, elements // settings["CB"])


def finish_moments(partial, rows, moments, planes, eps):
    settings, own = _sizes(moments)[0], current_settings()
    block = min(_rows(settings, own.moments_values), triton.next_power_of_2(partial.shape[1]))
    _finish_moments[(len(planes),)](
        partial, moments, rows, partial.shape[1], moments.shape[1], planes.start, eps, TILE=TILE, BLOCK=block,
        num_warps=own.moments_warps, **settings,
    )  # fmt: skip


def normalise(y, moments, planes):
    settings, rows = _sizes(y)
    block = _rows(settings, 2048)
    grid = (triton.cdiv(rows, block), len(planes))
    _normalise[grid](y, moments, rows, len(y), planes.start, BLOCK=block, **settings)


def gradient_sums(y, dy, partial, planes):
    settings, rows = _sizes(y)
    tiles = partial.shape[1]
    warps = min(32, max(4, settings["CB"] // 16))  # wide tiles do not fit the registers of fewer warps
    _gradient_sums[(tiles, len(planes))](
        y, dy, partial, rows, tiles, len(y), planes.start, TILE=TILE, num_warps=warps, **settings
    )


def normalise_gradient(partial, y, dy, moments, planes, *, by_batch):
    settings, rows = _sizes(y)
    sums = moments.new_empty(2, len(y), y.shape[-1])
    block = min(_rows(settings, 2048), triton.next_power_of_2(partial.shape[1]))
    _finish_sums[(len(planes), 2)](partial, sums, partial.shape[1], len(y), planes.start, BLOCK=block, **settings)
    block = _rows(settings, 2048)
    grid = (triton.cdiv(rows, block), len(planes))
    scale = 1.0 / rows if by_batch else 0.0
    _normalise_gradient[grid](y, dy, moments, sums, rows, len(y), planes.start, scale, BLOCK=block, **settings)


def _dropping(buffer, factors):
    """The arguments of a kernel that depend on drop-path."""
    area = buffer.shape[2] * buffer.shape[3]
    return {"area": area, "samples": buffer.shape[1], "DROPS": factors is not None}


def combine(buffer, moments, mix, factors, node, terms, *, rectified=False):
    if not terms:
        buffer[node].zero_()
        return
    settings, rows = _sizes(buffer)
    listed = [(t.plane, t.weight, int(t.normed), 1, t.choice) for t in terms]
    # Padded to a multiple of UNROLL with terms of weight 0.
    listed += [(*listed[0][:3], 0, 0)] * (-len(listed) % UNROLL)
    block = _rows(settings, 1024)
    _combine[(triton.cdiv(rows, block),)](
        buffer, moments, mix, mix if factors is None else factors, table(tuple(listed), buffer.device), len(terms),
        rows, planes=len(buffer), node=node, BLOCK=block, UNROLL=UNROLL, AHEAD=current_settings().reads_ahead,
        num_warps=4, BY_CHANNEL=mix.dim() == 2, RECTIFIED=rectified, **settings, **_dropping(buffer, factors),
    )  # fmt: skip


def combine_gradient(
    buffer, gradient, moments, mix, factors, mix_gradient, node, terms, *, by_batch, merge=None, rectified=False,
    arrived=None,
):  # fmt: skip
    if not terms:
        return
    assert not rectified or (len(terms) == 1 and terms[0].normed and mix.dim() == 2)
    settings, rows = _sizes(buffer)
    c, device = buffer.shape[-1], buffer.device
    # The rows after the terms are sums of the gradient itself, one per factor that scales it.
    choices = sorted({t.choice for t in terms}) if factors is not None else [0]
    plain = {choice: len(terms) + i for i, choice in enumerate(choices)}
    reduced = (
        *((t.plane, t.weight, int(t.normed), 0, t.choice) for t in terms),
        *((node, 0, 0, 1, choice) for choice in choices),
    )
    scales, drops = mix if factors is None else factors, _dropping(buffer, factors)
    own = current_settings()
    block = _rows(settings, own.sums_values)
    # The sum of a single input and its plain sum are computed in one pass.
    both = len(terms) == 1 and terms[0].normed and mix.dim() == 2
    # Several programs per multiprocessor.
    splits = max(1, min(triton.cdiv(rows, block), own.splits, triton.cdiv(33 * own.splits, len(reduced))))
    each = triton.cdiv(triton.cdiv(rows, splits), block) * block
    splits = triton.cdiv(rows, each)
    partial = moments.new_empty(splits, len(reduced), c)
    sums = moments.new_empty(len(reduced), c)
    listed = table(reduced, device)
    _combine_sums[(splits, 1 if both else len(reduced))](
        buffer, gradient, gradient if arrived is None else arrived, moments, mix, scales, partial, listed, len(reduced),
        rows, each, planes=len(buffer), node=node, BLOCK=block, BOTH=both, RECTIFIED=rectified,
        ARRIVES=arrived is not None, **settings, **drops,
    )  # fmt: skip
    small = min(_rows(settings, own.sums_values), triton.next_power_of_2(splits))
    shape = (len(reduced), splits)
    if mix.dim() == 1:
        _combine_finish[(len(reduced),)](partial, sums, mix_gradient, listed, *shape, BLOCK=small, **settings)
    else:
        jobs = [(i, t.weight if t.normed else -1) for i, t in enumerate(terms)]
        jobs += [(own, -1) for own in plain.values()]
        jobs += [(plain.get(t.choice, len(terms)), t.weight + 1) for t in terms if t.normed]
        listed = table(tuple(jobs), device)
        _combine_finish_by_channel[(len(jobs),)](partial, sums, mix_gradient, listed, *shape, BLOCK=small, **settings)
    if merge is not None and by_batch:
        sums = merge(sums)
    written = tuple(
        (t.plane, t.weight, int(t.normed), int(t.adds), i, t.choice, plain.get(t.choice, len(terms)))
        for i, t in enumerate(terms)
        if not t.through
    )
    if written:
        scale = 1.0 / rows if by_batch else 0.0
        _write_gradients(buffer, gradient, moments, mix, factors, sums, node, written, scale, rectified=rectified)


def distribute_gradient(buffer, gradient, moments, mix, factors, node, terms):
    written = tuple((t.plane, t.weight, 0, int(t.adds), 0, t.choice, 0) for t in terms)
    # No sums are read for terms without norms, but the kernel needs a pointer.
    _write_gradients(buffer, gradient, moments, mix, factors, moments, node, written, 0.0)


def _write_gradients(buffer, gradient, moments, mix, factors, sums, node, written, scale, *, rectified=False):
    settings, rows = _sizes(buffer)
    block = _rows(settings, 2048)
    _combine_write[(triton.cdiv(rows, block), len(written))](
        buffer, gradient, moments, mix, mix if factors is None else factors, sums, table(written, buffer.device), rows,
        planes=len(buffer), node=node, scale=scale, BLOCK=block, BY_CHANNEL=mix.dim() == 2, RECTIFIED=rectified,
        **settings, **_dropping(buffer, factors),
    )  # fmt: skip
