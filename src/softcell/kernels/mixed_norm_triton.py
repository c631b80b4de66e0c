# mypy: ignore-errors
"""Triton kernels of `mixed_norm`. A program processes a tile of TILE rows × COLUMNS channels of one block or of all.

z has rows of one block after the other, [K, rows, C], or with JOINED those of all blocks together, [rows, K, C].
"""

import torch
import triton
import triton.language as tl

from softcell.kernels.block_norm_triton import MERGED, NARROW, _merge_moments

COLUMNS = 32
"""Channels of a tile at most."""
OF_ONE, OF_ALL = 4096, 2048
"""Values of a tile in programs that process one block, and in those that loop over all of them; four warps."""


@triton.jit
def _tile(rows, C: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows [TILE], channels [COLUMNS], offsets in a map [rows, C], which channels and which values exist."""
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return m, c, m.to(tl.int64)[:, None] * C + c[None, :], c < C, (m < rows)[:, None] & (c < C)[None, :]


@triton.jit
def _place(m, c, k, rows, K: tl.constexpr, C: tl.constexpr, JOINED: tl.constexpr):
    """Offsets [TILE, COLUMNS] of block k in z."""
    if JOINED:
        at = m.to(tl.int64)[:, None] * (K * C) + k * C
    else:
        at = m.to(tl.int64)[:, None] * C + k * rows.to(tl.int64) * C
    return at + c[None, :]


@triton.jit(do_not_specialize=["rows"])
def _tile_moments(
    z_ptr, partial_ptr, rows, K: tl.constexpr, C: tl.constexpr, JOINED: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """partial [2, tiles, K, C]: sums and centred sums of squares of each tile of block `program_id(2)`."""
    k = tl.program_id(2)
    m, c, _, c_ok, ok = _tile(rows, C, TILE, COLUMNS)
    z = tl.load(z_ptr + _place(m, c, k, rows, K, C, JOINED), mask=ok, other=0.0).to(tl.float32)
    count = tl.minimum(rows - tl.program_id(0) * TILE, TILE).to(tl.float32)
    total = tl.sum(z, 0)
    off = tl.where(ok, z - (total / count)[None, :], 0.0)
    to = partial_ptr + (tl.program_id(0) * K + k) * C + c
    tl.store(to, total, mask=c_ok)
    tl.store(to + tl.num_programs(0) * K * C, tl.sum(off * off, 0), mask=c_ok)


@triton.jit
def _normalised(z_ptr, moments_ptr, m, c, k, rows, c_ok, ok, K: tl.constexpr, C: tl.constexpr, JOINED: tl.constexpr):
    """ẑ of block k [TILE, COLUMNS], and rstd [1, COLUMNS]."""
    mean = tl.load(moments_ptr + k * C + c, mask=c_ok, other=0.0)[None, :]
    rstd = tl.load(moments_ptr + (K + k) * C + c, mask=c_ok, other=0.0)[None, :]
    z = tl.load(z_ptr + _place(m, c, k, rows, K, C, JOINED), mask=ok, other=0.0).to(tl.float32)
    return (z - mean) * rstd, rstd


@triton.jit(do_not_specialize=["rows"])
def _write(
    z_ptr, moments_ptr, weights_ptr, shortcut_ptr, y_ptr, rows, K: tl.constexpr, C: tl.constexpr,
    JOINED: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, SHORTCUT: tl.constexpr,
):  # fmt: skip
    m, c, at, c_ok, ok = _tile(rows, C, TILE, COLUMNS)
    y = tl.zeros((TILE, COLUMNS), dtype=tl.float32)
    sum_of_weights = 0.0
    for k in tl.static_range(K):
        weight = tl.load(weights_ptr + k)
        sum_of_weights += weight
        z, _ = _normalised(z_ptr, moments_ptr, m, c, k, rows, c_ok, ok, K, C, JOINED)
        y += weight * z
    if SHORTCUT:
        y += sum_of_weights * tl.load(shortcut_ptr + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows"])
def _tile_sums(
    z_ptr, moments_ptr, shortcut_ptr, dy_ptr, partial_ptr, rows, K: tl.constexpr, C: tl.constexpr,
    JOINED: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, SHORTCUT: tl.constexpr,
):  # fmt: skip
    """partial [tiles, K + 2, C]: sums of g·ẑ of block `program_id(2)`; block 0 also has those of g and g·shortcut."""
    k = tl.program_id(2)
    m, c, at, c_ok, ok = _tile(rows, C, TILE, COLUMNS)
    g = tl.load(dy_ptr + at, mask=ok, other=0.0).to(tl.float32)
    z, _ = _normalised(z_ptr, moments_ptr, m, c, k, rows, c_ok, ok, K, C, JOINED)
    to = partial_ptr + tl.program_id(0) * ((K + 2) * C) + c
    tl.store(to + k * C, tl.sum(g * z, 0), mask=c_ok)
    if k == 0:
        tl.store(to + K * C, tl.sum(g, 0), mask=c_ok)
        if SHORTCUT:
            x = tl.load(shortcut_ptr + at, mask=ok, other=0.0).to(tl.float32)
            tl.store(to + (K + 1) * C, tl.sum(g * x, 0), mask=c_ok)
        else:
            tl.store(to + (K + 1) * C, tl.sum(g, 0) * 0.0, mask=c_ok)


@triton.jit(do_not_specialize=["tiles"])
def _merge_sums(partial_ptr, sums_ptr, tiles, C: tl.constexpr, MERGED: tl.constexpr, NARROW: tl.constexpr):
    """sums [C] of partial [tiles, C]."""
    c = tl.program_id(0) * NARROW + tl.arange(0, NARROW)
    total = tl.zeros((MERGED, NARROW), dtype=tl.float32)
    for start in range(0, tiles, MERGED):
        t = start + tl.arange(0, MERGED)
        ok = (t < tiles)[:, None] & (c < C)[None, :]
        total += tl.load(partial_ptr + t[:, None] * C + c[None, :], mask=ok, other=0.0)
    tl.store(sums_ptr + c, tl.sum(total, 0), mask=c < C)


@triton.jit
def _write_weights(sums_ptr, dweights_ptr, K: tl.constexpr, C: tl.constexpr, ALL: tl.constexpr):
    """The gradients of the weights, by the first program. ALL: C padded to a power of two."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        c = tl.arange(0, ALL)
        of_shortcut = tl.load(sums_ptr + (K + 1) * C + c, mask=c < C, other=0.0)
        for k in tl.static_range(K):
            own = tl.load(sums_ptr + k * C + c, mask=c < C, other=0.0)
            tl.store(dweights_ptr + k, tl.sum(own + of_shortcut, 0))


@triton.jit(do_not_specialize=["rows"])
def _write_gradients(
    z_ptr, moments_ptr, weights_ptr, sums_ptr, dy_ptr, dz_ptr, dweights_ptr, dshortcut_ptr, rows, K: tl.constexpr,
    C: tl.constexpr, JOINED: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, ALL: tl.constexpr,
    MAPS: tl.constexpr, WEIGHTS: tl.constexpr, SHORTCUT: tl.constexpr,
):  # fmt: skip
    m, c, at, c_ok, ok = _tile(rows, C, TILE, COLUMNS)
    g = tl.load(dy_ptr + at, mask=ok, other=0.0).to(tl.float32)
    if MAPS:
        mean = (tl.load(sums_ptr + K * C + c, mask=c_ok, other=0.0) / rows)[None, :]
        for k in tl.static_range(K):
            z, rstd = _normalised(z_ptr, moments_ptr, m, c, k, rows, c_ok, ok, K, C, JOINED)
            slope = (tl.load(sums_ptr + k * C + c, mask=c_ok, other=0.0) / rows)[None, :]
            dz = tl.load(weights_ptr + k) * rstd * (g - mean - z * slope)
            place = _place(m, c, k, rows, K, C, JOINED)
            tl.store(dz_ptr + place, dz.to(dz_ptr.dtype.element_ty), mask=ok)
    if SHORTCUT:
        sum_of_weights = 0.0
        for k in tl.static_range(K):
            sum_of_weights += tl.load(weights_ptr + k)
        tl.store(dshortcut_ptr + at, (sum_of_weights * g).to(dshortcut_ptr.dtype.element_ty), mask=ok)
    if WEIGHTS:
        _write_weights(sums_ptr, dweights_ptr, K, C, ALL)


def _sizes(z, values):
    """Rows, tiles and grid of a launch, and its settings; values: of a tile."""
    k, n, height, width, c = z.shape
    columns = min(COLUMNS, triton.next_power_of_2(c))
    rows, tile = n * height * width, values // columns
    own = {"K": k, "C": c, "JOINED": not z.is_contiguous(), "TILE": tile, "COLUMNS": columns}
    return rows, triton.cdiv(rows, tile), triton.cdiv(c, columns), own


def forward(z, weights, shortcut, eps):
    """z [k, n, h, w, c] in one of the two layouts, weights [k] float32, shortcut [n, h, w, c] or None.

    Returns y [n, h, w, c] and moments [3, k, c]: mean, 1/√(variance + eps), biased variance.
    """
    k, *shape = z.shape
    c = shape[-1]
    rows, tiles, columns, own = _sizes(z, OF_ONE)
    partial = torch.empty(2, tiles, k * c, dtype=torch.float32, device=z.device)
    moments = torch.empty(3, k, c, dtype=torch.float32, device=z.device)
    _tile_moments[(tiles, columns, k)](z, partial, rows, **own)
    merging = {"C": k * c, "TILE": own["TILE"], "MERGED": MERGED, "NARROW": NARROW}
    _merge_moments[(triton.cdiv(k * c, NARROW),)](partial, moments, rows, tiles, eps, **merging)
    y = z.new_empty(shape)
    rows, tiles, columns, own = _sizes(z, OF_ALL)
    given = (z, moments, weights, z if shortcut is None else shortcut, y)  # what is absent is not read
    _write[(tiles, columns)](*given, rows, **own, SHORTCUT=shortcut is not None)
    return y, moments


def backward(z, weights, shortcut, moments, dy, of_maps, of_weights, of_shortcut):
    """The gradients of z, the weights and the shortcut, each None unless wanted; dy [n, h, w, c]."""
    k, *shape = z.shape
    c = shape[-1]
    dz = torch.empty_like(z) if of_maps else None
    dweights = torch.empty(k, dtype=torch.float32, device=z.device) if of_weights else None
    dshortcut = dy.new_empty(shape) if of_shortcut else None
    rows, tiles, columns, own = _sizes(z, OF_ONE)
    partial = torch.empty(tiles, k + 2, c, dtype=torch.float32, device=z.device)
    sums = torch.empty(k + 2, c, dtype=torch.float32, device=z.device)
    has_shortcut = shortcut is not None
    given = (z, moments, shortcut if has_shortcut else z, dy, partial)
    if of_maps or of_weights:
        _tile_sums[(tiles, columns, k)](*given, rows, **own, SHORTCUT=has_shortcut and of_weights)
        merging = {"C": (k + 2) * c, "MERGED": MERGED, "NARROW": NARROW}
        _merge_sums[(triton.cdiv((k + 2) * c, NARROW),)](partial, sums, tiles, **merging)
    rows, tiles, columns, own = _sizes(z, OF_ALL)
    wanted = {"MAPS": of_maps, "WEIGHTS": of_weights, "SHORTCUT": of_shortcut}
    out = (dy if one is None else one for one in (dz, dweights, dshortcut))  # what is not wanted is not written
    if any(wanted.values()):
        all_channels = {"ALL": triton.next_power_of_2(c)}
        _write_gradients[(tiles, columns)](z, moments, weights, sums, dy, *out, rows, **own, **all_channels, **wanted)
    return dz, dweights, dshortcut
