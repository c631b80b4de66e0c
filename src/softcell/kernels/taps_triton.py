# mypy: ignore-errors
"""Triton kernels of `taps`: convolutions as matrix products over (tap, channel), rows being pixels.

Column k of the product is tap k // CB and channel k % CB, where CB is the number of channels rounded up to a power of
two. Divisions by small run-time integers are multiplications: x // d = (x · ⌈2¹⁶ / d⌉) >> 16 for the sizes that occur.
Tables hold offsets in units of the channels and columns in units of the block, so that the compiler knows the
divisibility of addresses.

The kernels here, in `norm_triton` and in `pool_triton` support programmatic dependent launch (`await_previous`): a
kernel starts while the previous one in the stream is still running. Launching and starting a kernel takes about as long
as most kernels of a NAS-Bench-201 cell run. With this attribute, programs start as soon as all programs of the previous
kernel have started, and wait for its end before they read anything that it may have written. Tables are read before
this wait: nothing writes them during a step.
"""

import functools
import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from softcell.kernels.backend import current_settings, table
from softcell.kernels.taps import TILE, Share

# Maximum columns of a block, warps and pipeline stages of each kernel, tuned in bfloat16 on an H200.
SHAPES = {"convolve": (128, 4, 3), "input": (64, 4, 3), "weight": (128, 4, 3)}


@triton.jit
def await_previous(EARLY: tl.constexpr):
    """Wait until the previous kernel has finished and its results are visible, and allow the next one to start."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def _has_dependent_launch():
    if os.environ.get("TRITON_INTERPRET") == "1":
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


def launching():
    """Additional launch arguments of a kernel that calls `await_previous`."""
    if current_settings().early_launch and _has_dependent_launch():
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@triton.jit
def convolve_tile(
    number,
    x_ptr,
    w_ptr,
    y_ptr,
    partial_ptr,
    jobs_ptr,
    rows,
    height,
    width,
    out_height,
    out_width,
    x_plane,
    y_plane,
    planes,
    C: tl.constexpr,
    CB: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STATS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """What program `number` along the second axis of the grid computes: a tile of rows of one group."""
    job = jobs_ptr + number * 9
    size, magic, dilation = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    padding, source, first = tl.load(job + 3), tl.load(job + 4), tl.load(job + 5)
    offset, column, columns = tl.load(job + 6) * C, tl.load(job + 7) * BLOCK_N, tl.load(job + 8) * C
    taps = size * size
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_ok = m < rows
    area = out_height * out_width
    image = m // area
    inside = m - image * area
    top = (inside // out_width) * STRIDE - padding
    left = (inside % out_width) * STRIDE - padding
    start = ((image * height + top) * width + left) * C
    n = column + tl.arange(0, BLOCK_N)
    n_ok = n < columns
    x_base = x_ptr + source.to(tl.int64) * x_plane
    w_base = w_ptr + offset
    await_previous(EARLY)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, taps * CB, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        tap = k // CB
        c = k % CB
        row = (tap * magic) >> 16
        down = row * dilation
        right = (tap - row * size) * dilation
        k_ok = (tap < taps) & (c < C)
        h = top[:, None] + down[None, :]
        w = left[:, None] + right[None, :]
        ok = m_ok[:, None] & k_ok[None, :] & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        a = tl.load(x_base + start[:, None] + ((down * width + right) * C + c)[None, :], mask=ok, other=0.0)
        a = tl.where(a > 0, a, 0.0)
        b = tl.load(
            w_base + n[None, :] * (taps * C) + (tap * C + c)[:, None], mask=n_ok[None, :] & k_ok[:, None], other=0.0
        )
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    plane = first + n // C
    c_out = n % C
    y = acc.to(y_ptr.dtype.element_ty)
    target = y_ptr + plane.to(tl.int64)[None, :] * y_plane + (m * C)[:, None] + c_out[None, :]
    tl.store(target, y, mask=m_ok[:, None] & n_ok[None, :])
    if STATS:
        value = tl.where(m_ok[:, None], y.to(tl.float32), 0.0)
        count = tl.minimum(rows - tl.program_id(0) * BLOCK_M, BLOCK_M)
        total = tl.sum(value, 0)
        centred = tl.where(m_ok[:, None], value - (total / count)[None, :], 0.0)
        at = partial_ptr + (tl.program_id(0) * planes + plane) * C + c_out
        tl.store(at, total, mask=n_ok)
        tl.store(at + tl.num_programs(0) * planes * C, tl.sum(centred * centred, 0), mask=n_ok)


@triton.jit(do_not_specialize=["rows", "height", "width", "out_height", "out_width", "planes"])
def _convolve(
    x_ptr,
    w_ptr,
    y_ptr,
    partial_ptr,
    jobs_ptr,
    rows,
    height,
    width,
    out_height,
    out_width,
    x_plane,
    y_plane,
    planes,
    C: tl.constexpr,
    CB: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STATS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    convolve_tile(
        tl.program_id(1),
        x_ptr,
        w_ptr,
        y_ptr,
        partial_ptr,
        jobs_ptr,
        rows,
        height,
        width,
        out_height,
        out_width,
        x_plane,
        y_plane,
        planes,
        C,
        CB,
        STRIDE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        STATS,
        PRECISION,
        EARLY,
    )


@triton.jit(do_not_specialize=["rows", "height", "width", "out_height", "out_width", "planes"])
def _input_gradient(
    dy_ptr,
    w_ptr,
    x_ptr,
    out_ptr,
    partial_ptr,
    jobs_ptr,
    rows,
    height,
    width,
    out_height,
    out_width,
    plane_size,
    out_plane,
    planes,
    C: tl.constexpr,
    CB: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    job = jobs_ptr + tl.program_id(1) * 11
    size, magic, dilation = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    padding, magic_taps, first = tl.load(job + 3), tl.load(job + 4), tl.load(job + 5)
    offset, begin, end = tl.load(job + 6) * C, tl.load(job + 7), tl.load(job + 8)
    out, column = tl.load(job + 9), tl.load(job + 10) * BLOCK_N
    taps = size * size
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_ok = m < rows
    area = height * width
    image = m // area
    inside = m - image * area
    bottom = inside // width + padding
    right = inside % width + padding
    n = column + tl.arange(0, BLOCK_N)
    n_ok = n < C
    dy_base = dy_ptr + first.to(tl.int64) * plane_size
    w_base = w_ptr + offset
    image_start = image * out_height
    await_previous(EARLY)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(begin * CB, end * CB, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        unit = k // CB
        o = k % CB
        which = (unit * magic_taps) >> 16
        tap = unit - which * taps
        row = (tap * magic) >> 16
        k_ok = (unit < end) & (o < C)
        h = bottom[:, None] - (row * dilation)[None, :]
        w = right[:, None] - ((tap - row * size) * dilation)[None, :]
        ok = m_ok[:, None] & k_ok[None, :] & (h >= 0) & (w >= 0)
        if STRIDE == 2:
            ok = ok & ((h & 1) == 0) & ((w & 1) == 0)
            h = h >> 1
            w = w >> 1
        ok = ok & (h < out_height) & (w < out_width)
        at = ((image_start[:, None] + h) * out_width + w) * C + o[None, :]
        a = tl.load(dy_base + (which.to(tl.int64) * plane_size)[None, :] + at, mask=ok, other=0.0)
        b = tl.load(
            w_base + (((which * C + o) * taps + tap) * C)[:, None] + n[None, :],
            mask=k_ok[:, None] & n_ok[None, :],
            other=0.0,
        )
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    at = out.to(tl.int64) * out_plane + (m * C)[:, None] + n[None, :]
    ok = m_ok[:, None] & n_ok[None, :]
    if MASKED:
        x = tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
        g = tl.where(x > 0, acc, 0.0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, g, mask=ok)
        value = tl.where(ok, g.to(tl.float32), 0.0)
        to = partial_ptr + (tl.program_id(0) * planes + out) * C + n
        tl.store(to, tl.sum(value, 0), mask=n_ok)
        tl.store(to + tl.num_programs(0) * planes * C, tl.sum(value * x, 0), mask=n_ok)
    else:
        tl.store(out_ptr + at, acc, mask=ok)


@triton.jit(do_not_specialize=["rows", "rows_each", "height", "width", "out_height", "out_width"])
def _weight_gradient(
    x_ptr,
    dy_ptr,
    out_ptr,
    jobs_ptr,
    rows,
    rows_each,
    height,
    width,
    out_height,
    out_width,
    x_plane,
    dy_plane,
    out_size,
    C: tl.constexpr,
    CB: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    job = jobs_ptr + tl.program_id(0) * 10
    size, magic, dilation = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    padding, source, first = tl.load(job + 3), tl.load(job + 4), tl.load(job + 5)
    offset, channels = tl.load(job + 6) * C, tl.load(job + 8) * C
    o = tl.load(job + 7) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.load(job + 9) * BLOCK_N
    taps = size * size
    o_ok = o < channels
    k = column + tl.arange(0, BLOCK_N)
    tap = k // CB
    c = k % CB
    k_ok = (tap < taps) & (c < C)
    row = (tap * magic) >> 16
    down = row * dilation - padding
    right = (tap - row * size) * dilation - padding
    k_start = (down * width + right) * C + c
    x_base = x_ptr + source.to(tl.int64) * x_plane
    dy_base = dy_ptr + (first + o // C).to(tl.int64) * dy_plane + o % C
    area = out_height * out_width
    begin = tl.program_id(1) * rows_each
    end = tl.minimum(begin + rows_each, rows)
    await_previous(EARLY)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for p0 in range(begin, end, BLOCK_K):
        p = p0 + tl.arange(0, BLOCK_K)
        p_ok = p < end
        image = p // area
        inside = p - image * area
        top = (inside // out_width) * STRIDE
        left = (inside % out_width) * STRIDE
        start = ((image * height + top) * width + left) * C
        a = tl.load(dy_base[:, None] + (p * C)[None, :], mask=o_ok[:, None] & p_ok[None, :], other=0.0)
        h = top[:, None] + down[None, :]
        w = left[:, None] + right[None, :]
        ok = p_ok[:, None] & k_ok[None, :] & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        b = tl.load(x_base + start[:, None] + k_start[None, :], mask=ok, other=0.0)
        b = tl.where(b > 0, b, 0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    target = out_ptr + tl.program_id(1).to(tl.int64) * out_size + offset
    at = (o * (taps * C))[:, None] + (tap * C + c)[None, :]
    tl.store(target + at, acc, mask=o_ok[:, None] & k_ok[None, :])


def _magic(divisor):
    return -(-65536 // divisor)


def _window(g):
    return g.window.size, _magic(g.window.size), g.window.dilation, g.window.padding


def _settings(x):
    channels = x.shape[-1]
    wide = max(16, triton.next_power_of_2(channels))
    # Three tf32 products are as accurate as one in float32. bfloat16 products ignore the setting.
    precision = "tf32x3" if x.dtype == torch.float32 else "tf32"
    return {"C": channels, "CB": wide, "PRECISION": precision, **launching()}


def _cut(total, block):
    return range(triton.cdiv(total, block))


def _columns(largest, limit):
    return max(16, min(limit, triton.next_power_of_2(largest)))


def convolve(x, weights, y, partial, groups):
    jobs, arguments, options = convolve_launch(x, weights, y, partial, groups)
    _convolve[(triton.cdiv(y[0].numel() // y.shape[-1], TILE), jobs)](*arguments, **options)


def convolve_launch(x, weights, y, partial, groups):
    """The number of jobs, and the arguments and options of a launch."""
    c, settings = x.shape[-1], _settings(x)
    most, warps, stages = SHAPES["convolve"]
    block = _columns(max(g.count for g in groups) * c, most if x.dtype != torch.float32 else 64)
    jobs = tuple(
        (*_window(g), g.source, g.first, g.offset // c, column, g.count)
        for g in sorted(groups, key=lambda g: -g.window.taps)
        for column in _cut(g.count * c, block)
    )
    rows = y[0].numel() // c
    arguments = (
        x,
        weights,
        y,
        y if partial is None else partial,
        table(jobs, x.device),
        rows,
        x.shape[2],
        x.shape[3],
        y.shape[2],
        y.shape[3],
        x[0].numel(),
        y[0].numel(),
        len(y),
    )
    options = {
        "STRIDE": groups[0].window.stride,
        "BLOCK_M": TILE,
        "BLOCK_N": block,
        "BLOCK_K": 64 if x.dtype != torch.float32 else 32,
        "STATS": partial is not None,
        "num_warps": warps,
        "num_stages": stages,
        **settings,
    }
    return len(jobs), arguments, options


def _gradient_job(part, out, column, channels):
    g = part.group
    taps = _magic(g.window.taps)
    return (*_window(g), taps, g.first, g.offset // channels, part.start, part.stop, out, column)


def _launch_input_gradient(dy, weights, x, out, partial, jobs, shape, stride, block):
    """shape: of one input plane, [n, h, w, c]."""
    rows = shape[0] * shape[1] * shape[2]
    _input_gradient[(triton.cdiv(rows, TILE), len(jobs))](
        dy,
        weights,
        x,
        out,
        partial,
        table(jobs, dy.device),
        rows,
        shape[1],
        shape[2],
        dy.shape[2],
        dy.shape[3],
        dy[0].numel(),
        rows * shape[3],
        len(dy),
        STRIDE=stride,
        BLOCK_M=TILE,
        BLOCK_N=block,
        BLOCK_K=64 if dy.dtype != torch.float32 else 32,
        MASKED=partial is not out,
        num_warps=SHAPES["input"][1],
        num_stages=SHAPES["input"][2],
        **_settings(dy),
    )


def masked_input_gradient(dy, weights, x, dx, partial, groups):
    c = x.shape[-1]
    block = _columns(c, SHAPES["input"][0])
    ordered = sorted(groups, key=lambda g: -g.window.taps)
    jobs = tuple(
        _gradient_job(Share(g, 0, g.window.taps), g.source, column, c) for g in ordered for column in _cut(c, block)
    )
    _launch_input_gradient(dy, weights, x, dx, partial, jobs, x.shape[1:], 1, block)


def input_gradient(dy, weights, out, parts):
    c = dy.shape[-1]
    block = _columns(c, SHAPES["input"][0])
    ordered = sorted(enumerate(parts), key=lambda item: item[1].start - item[1].stop)
    jobs = tuple(_gradient_job(part, i, column, c) for i, part in ordered for column in _cut(c, block))
    stride = parts[0].group.window.stride
    _launch_input_gradient(dy, weights, dy, out, out, jobs, out.shape[1:], stride, block)


def weight_gradient(x, dy, out, groups):
    c, settings = x.shape[-1], _settings(x)
    most, warps, stages = SHAPES["weight"]
    block_m, block_n = _columns(max(g.count for g in groups) * c, 64), most if x.dtype != torch.float32 else 64
    low = min(g.offset for g in groups)
    high = max(g.offset + _length(g, c) for g in groups)
    jobs = tuple(
        (*_window(g), g.source, g.first, (g.offset - low) // c, channel, g.count, column)
        for g in groups
        for channel in _cut(g.count * c, block_m)
        for column in _cut(g.window.taps * settings["CB"], block_n)
    )
    rows = dy[0].numel() // c
    # 1,056 programs are eight per multiprocessor of an H200.
    splits = max(1, min(triton.cdiv(rows, 512), 1056 // len(jobs), 64))
    each = triton.cdiv(triton.cdiv(rows, splits), 64) * 64
    splits = triton.cdiv(rows, each)
    sums = out.new_empty(splits, high - low)
    _weight_gradient[(len(jobs), splits)](
        x,
        dy,
        sums,
        table(jobs, x.device),
        rows,
        each,
        x.shape[2],
        x.shape[3],
        dy.shape[2],
        dy.shape[3],
        x[0].numel(),
        dy[0].numel(),
        high - low,
        STRIDE=groups[0].window.stride,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=64 if x.dtype != torch.float32 else 32,
        num_warps=warps,
        num_stages=stages,
        **settings,
    )
    if sum(_length(g, c) for g in groups) == high - low:
        torch.sum(sums, dim=0, out=out[low:high])
        return
    total = sums.sum(0)
    for g in groups:  # weights of other groups are in between
        out[g.offset : g.offset + _length(g, c)] = total[g.offset - low : g.offset - low + _length(g, c)]


def _length(g, c):
    return g.count * g.window.taps * c * c
