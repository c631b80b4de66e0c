# mypy: ignore-errors
"""Triton kernels of `rows`. A program processes a tile of TILE rows × COLUMNS channels; tiles are merged in order."""

import torch
import triton
import triton.language as tl

TILE, COLUMNS = 128, 32
"""Rows and channels of a tile: 32 values for each thread of four warps."""
MERGED = 256
"""Tiles whose sums a program reads at once, of NARROW channels."""
NARROW = 8


@triton.jit
def _tile(rows, C: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows [TILE], channels [COLUMNS], offsets [TILE, COLUMNS] and which of each exist."""
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return m, c, m.to(tl.int64)[:, None] * C + c[None, :], c < C, (m < rows)[:, None] & (c < C)[None, :]


@triton.jit
def _outer(m, c, at, rows, C: tl.constexpr, PART: tl.constexpr):
    """Offsets [TILE, COLUMNS] in maps of PART channels each, one after the other: [C / PART, rows, PART]."""
    if PART == C:
        return at
    return (c // PART)[None, :] * (rows.to(tl.int64) * PART) + m.to(tl.int64)[:, None] * PART + (c % PART)[None, :]


@triton.jit
def _scale(moments_ptr, weight_ptr, bias_ptr, c, ok, C: tl.constexpr, AFFINE: tl.constexpr):
    """Mean, rstd, γ and β of the channels."""
    mean = tl.load(moments_ptr + c, mask=ok, other=0.0)
    rstd = tl.load(moments_ptr + C + c, mask=ok, other=0.0)
    weight = rstd * 0.0 + 1.0
    bias = rstd * 0.0
    if AFFINE:
        weight = tl.load(weight_ptr + c, mask=ok, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + c, mask=ok, other=0.0).to(tl.float32)
    return mean[None, :], rstd[None, :], weight[None, :], bias[None, :]


@triton.jit(do_not_specialize=["rows"])
def _tile_moments(z_ptr, partial_ptr, rows, C: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """partial [2, tiles, c]: sums and centred sums of squares of each tile."""
    _, c, at, c_ok, ok = _tile(rows, C, TILE, COLUMNS)
    z = tl.load(z_ptr + at, mask=ok, other=0.0).to(tl.float32)
    count = tl.minimum(rows - tl.program_id(0) * TILE, TILE).to(tl.float32)
    total = tl.sum(z, 0)
    off = tl.where(ok, z - (total / count)[None, :], 0.0)
    to = partial_ptr + tl.program_id(0) * C + c
    tl.store(to, total, mask=c_ok)
    tl.store(to + tl.num_programs(0) * C, tl.sum(off * off, 0), mask=c_ok)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _merge_moments(
    partial_ptr, moments_ptr, rows, tiles, eps, C: tl.constexpr, TILE: tl.constexpr, MERGED: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """moments [3, c]: mean, 1/√(variance + eps), biased variance (Chan, Golub & LeVeque 1983)."""
    c = tl.program_id(0) * NARROW + tl.arange(0, NARROW)
    total = tl.zeros((MERGED, NARROW), dtype=tl.float32)
    for start in range(0, tiles, MERGED):
        t = start + tl.arange(0, MERGED)
        ok = (t < tiles)[:, None] & (c < C)[None, :]
        total += tl.load(partial_ptr + t[:, None] * C + c[None, :], mask=ok, other=0.0)
    mean = tl.sum(total, 0) / rows
    square = tl.zeros((MERGED, NARROW), dtype=tl.float32)
    for start in range(0, tiles, MERGED):
        t = start + tl.arange(0, MERGED)
        ok = (t < tiles)[:, None] & (c < C)[None, :]
        at = partial_ptr + t[:, None] * C + c[None, :]
        count = tl.maximum(tl.minimum(rows - t * TILE, TILE), 1).to(tl.float32)[:, None]
        off = tl.load(at, mask=ok, other=0.0) / count - mean[None, :]
        inner = tl.load(at + tiles * C, mask=ok, other=0.0)
        square += tl.where(ok, inner + count * off * off, 0.0)
    variance = tl.sum(square, 0) / rows
    tl.store(moments_ptr + c, mean, mask=c < C)
    tl.store(moments_ptr + C + c, 1.0 / tl.sqrt(variance + eps), mask=c < C)
    tl.store(moments_ptr + 2 * C + c, variance, mask=c < C)


@triton.jit(do_not_specialize=["rows", "area"])
def _write(
    z_ptr, moments_ptr, weight_ptr, bias_ptr, shortcut_ptr, factors_ptr, y_ptr, rows, area, C: tl.constexpr,
    PART: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, AFFINE: tl.constexpr, RELU: tl.constexpr,
    SHORTCUT: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    m, c, at, c_ok, ok = _tile(rows, C, TILE, COLUMNS)
    z = tl.load(z_ptr + at, mask=ok, other=0.0).to(tl.float32)
    mean, rstd, weight, bias = _scale(moments_ptr, weight_ptr, bias_ptr, c, c_ok, C, AFFINE)
    y = (z - mean) * rstd * weight + bias
    if RELU:
        y = tl.maximum(y, 0.0)
    if DROPS:
        y *= tl.load(factors_ptr + m // area, mask=m < rows, other=0.0)[:, None]
    if SHORTCUT:
        y += tl.load(shortcut_ptr + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(y_ptr + _outer(m, c, at, rows, C, PART), y.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _pull(
    z_ptr, dy_ptr, factors_ptr, m, at, outer, ok, rows, area, mean, rstd, weight, bias, RELU: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """ẑ, and the gradient of γ·ẑ + β."""
    z = (tl.load(z_ptr + at, mask=ok, other=0.0).to(tl.float32) - mean) * rstd
    g = tl.load(dy_ptr + outer, mask=ok, other=0.0).to(tl.float32)
    if DROPS:
        g *= tl.load(factors_ptr + m // area, mask=m < rows, other=0.0)[:, None]
    if RELU:
        g = tl.where(z * weight + bias > 0.0, g, 0.0)
    return z, g


@triton.jit(do_not_specialize=["rows", "area"])
def _tile_sums(
    z_ptr, dy_ptr, moments_ptr, weight_ptr, bias_ptr, factors_ptr, partial_ptr, rows, area, C: tl.constexpr,
    PART: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, AFFINE: tl.constexpr, RELU: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """partial [2, tiles, c]: sums of g and of g·ẑ of each tile."""
    m, c, at, c_ok, ok = _tile(rows, C, TILE, COLUMNS)
    about = _scale(moments_ptr, weight_ptr, bias_ptr, c, c_ok, C, AFFINE)
    outer = _outer(m, c, at, rows, C, PART)
    z, g = _pull(
        z_ptr, dy_ptr, factors_ptr, m, at, outer, ok, rows, area, about[0], about[1], about[2], about[3], RELU, DROPS
    )
    to = partial_ptr + tl.program_id(0) * C + c
    tl.store(to, tl.sum(g, 0), mask=c_ok)
    tl.store(to + tl.num_programs(0) * C, tl.sum(g * z, 0), mask=c_ok)


@triton.jit(do_not_specialize=["tiles"])
def _merge_sums(partial_ptr, sums_ptr, tiles, C: tl.constexpr, MERGED: tl.constexpr, NARROW: tl.constexpr):
    """sums [2, c] over all tiles."""
    c = tl.program_id(0) * NARROW + tl.arange(0, NARROW)
    first = tl.zeros((MERGED, NARROW), dtype=tl.float32)
    second = tl.zeros((MERGED, NARROW), dtype=tl.float32)
    for start in range(0, tiles, MERGED):
        t = start + tl.arange(0, MERGED)
        ok = (t < tiles)[:, None] & (c < C)[None, :]
        at = partial_ptr + t[:, None] * C + c[None, :]
        first += tl.load(at, mask=ok, other=0.0)
        second += tl.load(at + tiles * C, mask=ok, other=0.0)
    tl.store(sums_ptr + c, tl.sum(first, 0), mask=c < C)
    tl.store(sums_ptr + C + c, tl.sum(second, 0), mask=c < C)


@triton.jit(do_not_specialize=["rows", "area"])
def _write_gradient(
    z_ptr, dy_ptr, moments_ptr, weight_ptr, bias_ptr, factors_ptr, sums_ptr, dz_ptr, rows, area, C: tl.constexpr,
    PART: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, AFFINE: tl.constexpr, RELU: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    m, c, at, c_ok, ok = _tile(rows, C, TILE, COLUMNS)
    about = _scale(moments_ptr, weight_ptr, bias_ptr, c, c_ok, C, AFFINE)
    outer = _outer(m, c, at, rows, C, PART)
    z, g = _pull(
        z_ptr, dy_ptr, factors_ptr, m, at, outer, ok, rows, area, about[0], about[1], about[2], about[3], RELU, DROPS
    )
    means = tl.load(sums_ptr + c, mask=c_ok, other=0.0) / rows
    slopes = tl.load(sums_ptr + C + c, mask=c_ok, other=0.0) / rows
    dz = about[1] * about[2] * (g - means[None, :] - z * slopes[None, :])
    tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=ok)


def _sizes(z):
    n, height, width, c = z.shape
    rows, tiles = n * height * width, triton.cdiv(n * height * width, TILE)
    own = {"C": c, "TILE": TILE, "COLUMNS": COLUMNS}
    merging = {"C": c, "MERGED": MERGED, "NARROW": NARROW}
    return rows, tiles, height * width, (tiles, triton.cdiv(c, COLUMNS)), (triton.cdiv(c, NARROW),), own, merging


def forward(z, weight, bias, shortcut, factors, eps, relu, parts=1):
    """z and shortcut [n, h, w, c], weight and bias [c], factors [n]; returns y and moments [3, c].

    y [parts, n, h, w, c / parts]: the channels of each part are a map of their own.
    """
    rows, tiles, area, grid, columns, own, merging = _sizes(z)
    partial = torch.empty(2, tiles, z.shape[3], dtype=torch.float32, device=z.device)
    moments = torch.empty(3, z.shape[3], dtype=torch.float32, device=z.device)
    part = z.shape[3] // parts
    y = z.new_empty(parts, *z.shape[:3], part)
    _tile_moments[grid](z, partial, rows, **own)
    _merge_moments[columns](partial, moments, rows, tiles, eps, TILE=TILE, **merging)
    kind = {"AFFINE": weight is not None, "RELU": relu, "SHORTCUT": shortcut is not None, "DROPS": factors is not None}
    given = (z if x is None else x for x in (weight, bias, shortcut, factors))  # what is absent is not read
    _write[grid](z, moments, *given, y, rows, area, **own, **kind, PART=part)
    return y, moments


def backward(z, weight, bias, factors, moments, dy, relu):
    """The gradient of z [n, h, w, c], and the sums of g and g·ẑ: those of bias and weight [2, c]; dy like y."""
    rows, tiles, area, grid, columns, own, merging = _sizes(z)
    partial = torch.empty(2, tiles, z.shape[3], dtype=torch.float32, device=z.device)
    sums = torch.empty(2, z.shape[3], dtype=torch.float32, device=z.device)
    dz = torch.empty_like(z)
    kind = {"AFFINE": weight is not None, "RELU": relu, "DROPS": factors is not None, "PART": dy.shape[4]}
    given = (z, dy, moments, *(z if x is None else x for x in (weight, bias, factors)))
    _tile_sums[grid](*given, partial, rows, area, **own, **kind)
    _merge_sums[columns](partial, sums, tiles, **merging)
    _write_gradient[grid](*given, sums, dz, rows, area, **own, **kind)
    return dz, sums
