# mypy: ignore-errors
"""Triton kernels of `local`: one pass over a neighbourhood forward, three backward; neighbourhoods are never stored.

A program processes BLOCK pixels and all heads: tiles [BLOCK, HB, DB], padded to powers of two. Sums are accumulated in
float32. Gradients of positions are summed over many tiles per program and added outside in a fixed order, so results
repeat bit for bit.
"""

import torch
import triton
import triton.language as tl

TILE = 1024
"""Approximate number of values in a tile."""
PROGRAMS = 4096
"""Approximate number of programs that share the sums over all pixels: enough to fill a GPU, with small partial sums."""


@triton.jit
def _position(rows_ptr, columns_ptr, embedding, ok, tap, K: tl.constexpr):
    """[HB, DB]: the embedding of a neighbour's row and that of its column, added."""
    row = tl.load(rows_ptr + embedding * K + tap // K, mask=ok, other=0.0)
    column = tl.load(columns_ptr + embedding * K + tap % K, mask=ok, other=0.0)
    return row.to(tl.float32) + column.to(tl.float32)


@triton.jit(do_not_specialize=["pixels", "height", "width"])
def _forward(
    packed_ptr, rows_ptr, columns_ptr, y_ptr, lse_ptr, pixels, height, width,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, HB: tl.constexpr, DB: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = H * D
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.arange(0, HB)
    within = tl.arange(0, DB)
    channel = head[:, None] * D + within[None, :]
    c_ok = (head < H)[:, None] & (within < D)[None, :]
    m_ok = m < pixels
    ok = m_ok[:, None, None] & c_ok[None]
    at = m.to(tl.int64)[:, None, None] * (3 * C) + channel[None]
    q = tl.load(packed_ptr + at, mask=ok, other=0.0).to(tl.float32)
    i = (m % (height * width)) // width
    j = m % width
    # Not -inf: before the first neighbour the scale below would be exp(-inf + inf), which is NaN.
    largest = tl.full((BLOCK, HB), -1e30, dtype=tl.float32)
    total = tl.zeros((BLOCK, HB), dtype=tl.float32)
    y = tl.zeros((BLOCK, HB, DB), dtype=tl.float32)
    for tap in range(K * K):
        down = tap // K - K // 2
        across = tap % K - K // 2
        here = m_ok & (i + down >= 0) & (i + down < height) & (j + across >= 0) & (j + across < width)
        seen = here[:, None, None] & c_ok[None]
        other = packed_ptr + at + (down * width + across) * (3 * C)
        key = tl.load(other + C, mask=seen, other=0.0).to(tl.float32)
        value = tl.load(other + 2 * C, mask=seen, other=0.0).to(tl.float32)
        position = _position(rows_ptr, columns_ptr, channel, c_ok, tap, K)
        logit = tl.sum(q * (key + position[None]), 2)
        # One-pass (online) softmax: the sums so far are rescaled whenever a larger logit appears.
        larger = tl.where(here[:, None], tl.maximum(largest, logit), largest)
        scale = tl.exp(largest - larger)
        weight = tl.where(here[:, None], tl.exp(logit - larger), 0.0)
        total = total * scale + weight
        y = y * scale[:, :, None] + weight[:, :, None] * value
        largest = larger
    # Rows beyond the last pixel have no neighbours; this avoids 0 / 0.
    total = tl.where(m_ok[:, None], total, 1.0)
    y = y / total[:, :, None]
    to = m.to(tl.int64)[:, None, None] * C + channel[None]
    tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=ok)
    place = m.to(tl.int64)[:, None] * H + head[None, :]
    tl.store(lse_ptr + place, largest + tl.log(total), mask=m_ok[:, None] & (head < H)[None, :])


@triton.jit(do_not_specialize=["pixels", "height", "width"])
def _backward_queries(
    packed_ptr, rows_ptr, columns_ptr, y_ptr, lse_ptr, dy_ptr, delta_ptr, out_ptr, pixels, height, width,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, HB: tl.constexpr, DB: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = H * D
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.arange(0, HB)
    within = tl.arange(0, DB)
    channel = head[:, None] * D + within[None, :]
    h_ok = (head < H)[None, :]
    c_ok = (head < H)[:, None] & (within < D)[None, :]
    m_ok = m < pixels
    ok = m_ok[:, None, None] & c_ok[None]
    at = m.to(tl.int64)[:, None, None] * (3 * C) + channel[None]
    own = m.to(tl.int64)[:, None, None] * C + channel[None]
    place = m.to(tl.int64)[:, None] * H + head[None, :]
    q = tl.load(packed_ptr + at, mask=ok, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + own, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + own, mask=ok, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + place, mask=m_ok[:, None] & h_ok, other=0.0)
    delta = tl.sum(dy * y, 2)
    tl.store(delta_ptr + place, delta, mask=m_ok[:, None] & h_ok)
    i = (m % (height * width)) // width
    j = m % width
    dq = tl.zeros((BLOCK, HB, DB), dtype=tl.float32)
    for tap in range(K * K):
        down = tap // K - K // 2
        across = tap % K - K // 2
        here = m_ok & (i + down >= 0) & (i + down < height) & (j + across >= 0) & (j + across < width)
        seen = here[:, None, None] & c_ok[None]
        other = packed_ptr + at + (down * width + across) * (3 * C)
        key = tl.load(other + C, mask=seen, other=0.0).to(tl.float32)
        value = tl.load(other + 2 * C, mask=seen, other=0.0).to(tl.float32)
        key = key + _position(rows_ptr, columns_ptr, channel, c_ok, tap, K)[None]
        weight = tl.exp(tl.where(here[:, None], tl.sum(q * key, 2) - lse, float("-inf")))
        slope = weight * (tl.sum(dy * value, 2) - delta)  # dL/dlogit
        dq += slope[:, :, None] * key
    tl.store(out_ptr + at, dq.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["pixels", "height", "width"])
def _backward_keys(
    packed_ptr, rows_ptr, columns_ptr, lse_ptr, dy_ptr, delta_ptr, out_ptr, pixels, height, width,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, HB: tl.constexpr, DB: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = H * D
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.arange(0, HB)
    within = tl.arange(0, DB)
    channel = head[:, None] * D + within[None, :]
    h_ok = (head < H)[None, :]
    c_ok = (head < H)[:, None] & (within < D)[None, :]
    m_ok = m < pixels
    ok = m_ok[:, None, None] & c_ok[None]
    at = m.to(tl.int64)[:, None, None] * (3 * C) + channel[None]
    own = m.to(tl.int64)[:, None, None] * C + channel[None]
    place = m.to(tl.int64)[:, None] * H + head[None, :]
    key = tl.load(packed_ptr + at + C, mask=ok, other=0.0).to(tl.float32)
    value = tl.load(packed_ptr + at + 2 * C, mask=ok, other=0.0).to(tl.float32)
    i = (m % (height * width)) // width
    j = m % width
    dk = tl.zeros((BLOCK, HB, DB), dtype=tl.float32)
    dv = tl.zeros((BLOCK, HB, DB), dtype=tl.float32)
    for tap in range(K * K):
        # The pixel that has this one as neighbour number `tap`.
        down = K // 2 - tap // K
        across = K // 2 - tap % K
        here = m_ok & (i + down >= 0) & (i + down < height) & (j + across >= 0) & (j + across < width)
        seen = here[:, None, None] & c_ok[None]
        step = down * width + across
        q = tl.load(packed_ptr + at + step * (3 * C), mask=seen, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + own + step * C, mask=seen, other=0.0).to(tl.float32)
        lse = tl.load(lse_ptr + place + step * H, mask=here[:, None] & h_ok, other=0.0)
        delta = tl.load(delta_ptr + place + step * H, mask=here[:, None] & h_ok, other=0.0)
        position = _position(rows_ptr, columns_ptr, channel, c_ok, tap, K)
        logit = tl.sum(q * (key + position[None]), 2)
        weight = tl.exp(tl.where(here[:, None], logit - lse, float("-inf")))
        dv += weight[:, :, None] * dy
        slope = weight * (tl.sum(dy * value, 2) - delta)
        dk += slope[:, :, None] * q
    tl.store(out_ptr + at + C, dk.to(out_ptr.dtype.element_ty), mask=ok)
    tl.store(out_ptr + at + 2 * C, dv.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["pixels", "height", "width", "tiles"])
def _backward_positions(
    packed_ptr, rows_ptr, columns_ptr, lse_ptr, dy_ptr, delta_ptr, partial_ptr, pixels, height, width, tiles,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, HB: tl.constexpr, DB: tl.constexpr,
):  # fmt: skip
    """Σ slope · q of one neighbour, over `tiles` tiles of pixels."""
    C: tl.constexpr = H * D
    program = tl.program_id(0)
    tap = tl.program_id(1)
    down = tap // K - K // 2
    across = tap % K - K // 2
    step = down * width + across
    head = tl.arange(0, HB)
    within = tl.arange(0, DB)
    channel = head[:, None] * D + within[None, :]
    h_ok = (head < H)[None, :]
    c_ok = (head < H)[:, None] & (within < D)[None, :]
    position = _position(rows_ptr, columns_ptr, channel, c_ok, tap, K)
    total = tl.zeros((BLOCK, HB, DB), dtype=tl.float32)
    for tile in range(tiles):
        m = (program * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        i = (m % (height * width)) // width
        j = m % width
        here = (m < pixels) & (i + down >= 0) & (i + down < height) & (j + across >= 0) & (j + across < width)
        seen = here[:, None, None] & c_ok[None]
        at = m.to(tl.int64)[:, None, None] * (3 * C) + channel[None]
        own = m.to(tl.int64)[:, None, None] * C + channel[None]
        place = m.to(tl.int64)[:, None] * H + head[None, :]
        q = tl.load(packed_ptr + at, mask=seen, other=0.0).to(tl.float32)
        key = tl.load(packed_ptr + at + step * (3 * C) + C, mask=seen, other=0.0).to(tl.float32)
        value = tl.load(packed_ptr + at + step * (3 * C) + 2 * C, mask=seen, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + own, mask=seen, other=0.0).to(tl.float32)
        lse = tl.load(lse_ptr + place, mask=here[:, None] & h_ok, other=0.0)
        delta = tl.load(delta_ptr + place, mask=here[:, None] & h_ok, other=0.0)
        logit = tl.sum(q * (key + position[None]), 2)
        weight = tl.exp(tl.where(here[:, None], logit - lse, float("-inf")))
        slope = weight * (tl.sum(dy * value, 2) - delta)
        total += slope[:, :, None] * q
    to = partial_ptr + (program * (K * K) + tap) * C + channel
    tl.store(to, tl.sum(total, 0), mask=c_ok)


def _sizes(packed, rows):
    n, height, width, channels = packed.shape
    heads, d, extent = rows.shape
    assert channels == 3 * heads * d and packed.is_contiguous()
    hb, db = triton.next_power_of_2(heads), triton.next_power_of_2(d)
    block = max(1, TILE // (hb * db))
    settings = {"K": extent, "H": heads, "D": d, "BLOCK": block, "HB": hb, "DB": db}
    return n * height * width, height, width, triton.cdiv(n * height * width, block), settings


def forward(packed, rows, columns):
    """packed [n, h, w, 3·c], embeddings float32 [heads, d, extent]; returns y [n, h, w, c] and lse [n, h, w, heads]."""
    pixels, height, width, programs, settings = _sizes(packed, rows)
    shape = packed.shape[:3]
    y = packed.new_empty(*shape, packed.shape[3] // 3)
    lse = torch.empty(*shape, rows.shape[0], dtype=torch.float32, device=packed.device)
    if pixels:
        _forward[(programs,)](packed, rows, columns, y, lse, pixels, height, width, **settings)
    return y, lse


def backward(packed, rows, columns, y, lse, dy, *, positions=True):
    """Gradients of packed, rows and columns, given that of y [n, h, w, c]; without `positions`, only that of packed."""
    pixels, height, width, programs, settings = _sizes(packed, rows)
    out, delta = torch.empty_like(packed), torch.empty_like(lse)
    heads, d, extent = rows.shape
    about = (pixels, height, width)
    if pixels:
        _backward_queries[(programs,)](packed, rows, columns, y, lse, dy, delta, out, *about, **settings)
        _backward_keys[(programs,)](packed, rows, columns, lse, dy, delta, out, *about, **settings)
    if not positions:
        return out, None, None
    tiles = max(1, programs * extent * extent // PROGRAMS)
    chunks = triton.cdiv(programs, tiles)
    partial = torch.empty(chunks, extent, extent, heads, d, dtype=torch.float32, device=packed.device)
    if pixels:
        _backward_positions[(chunks, extent * extent)](
            packed, rows, columns, lse, dy, delta, partial, *about, tiles, **settings
        )
    summed = partial.sum(0)  # [row, column, heads, d]
    return out, summed.sum(1).permute(1, 2, 0), summed.sum(0).permute(1, 2, 0)
