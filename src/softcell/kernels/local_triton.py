# mypy: ignore-errors
"""Triton kernels of `local`: one pass over a neighbourhood forward, two backward; neighbourhoods are never stored.

A program processes BLOCK pixels and all heads: tiles [BLOCK, HB, DB], padded to powers of two. Sums are accumulated in
float32. A neighbour's position contributes q·row + q·column to its logit: products with the extent's rows and columns
are computed once per pixel, not once per neighbour. In the same way gradients of positions need the slopes summed along
the rows and columns of a neighbourhood. They are summed per program and added outside in a fixed order, so results
repeat bit for bit.

A launch runs one attention or several over maps of one size, which are the second index of its programs. KINDS has for
each of them its first line of embeddings, extent, heads, channels of a head, and the latter two padded (HB, DB).
"""

import torch
import triton
import triton.language as tl

WIDE, NARROW = 8, 4
"""Values of a tile per thread, which are loaded at once where heads have a multiple of eight channels; otherwise fewer,
because a thread with several heads or pixels runs out of registers."""
WARPS = 4
"""Warps of a program. The gradients of keys need no sums over pixels: their programs have one warp, which exchanges
values without barriers."""


@triton.jit
def _pixels(
    pixels, height, width, H: tl.constexpr, D: tl.constexpr, B: tl.constexpr, HB: tl.constexpr, DB: tl.constexpr
):
    """Of a program's pixels: number [B], whether it exists, row, column; their heads [1, HB]; channels [HB, DB]."""
    m = tl.program_id(0) * B + tl.arange(0, B)
    head = tl.arange(0, HB)
    within = tl.arange(0, DB)
    channel = head[:, None] * D + within[None, :]
    c_ok = (head < H)[:, None] & (within < D)[None, :]
    return (
        m.to(tl.int64),
        m < pixels,
        (m % (height * width)) // width,
        m % width,
        head[None, :],
        channel[None],
        c_ok[None],
    )


@triton.jit
def _embedding(embeddings_ptr, line, at, ok, C: tl.constexpr):
    """The embedding of a line of neighbours, rows first, then columns: [1, HB, DB], or for every pixel."""
    return tl.load(embeddings_ptr + line * C + at, mask=ok, other=0.0)


@triton.jit
def _by_column(embeddings_ptr, q, at, ok, C: tl.constexpr, K: tl.constexpr):
    """q · embedding of each column, K times [BLOCK, HB]."""
    found = ()
    for b in tl.static_range(K):
        found += (tl.sum(q * _embedding(embeddings_ptr, K + b, at, ok, C), 2),)
    return found


@triton.jit
def _attend(
    packed_ptr, embeddings_ptr, y_ptr, lse_ptr, pixels, height, width,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, HB: tl.constexpr, DB: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = H * D
    m, m_ok, i, j, head, channel, c_ok = _pixels(pixels, height, width, H, D, BLOCK, HB, DB)
    ok = m_ok[:, None, None] & c_ok
    at = m[:, None, None] * (3 * C) + channel
    q = tl.load(packed_ptr + at, mask=ok, other=0.0).to(tl.float32)
    # Read for every pixel: a smaller tensor would have another layout, and be exchanged through shared memory.
    everywhere = m[:, None, None] * 0 + channel
    by_column = _by_column(embeddings_ptr, q, everywhere, ok, C, K)
    # Not -inf: before the first neighbour the scale below would be exp(-inf + inf), which is NaN.
    largest = tl.full((BLOCK, HB), -1e30, dtype=tl.float32)
    total = tl.zeros((BLOCK, HB), dtype=tl.float32)
    y = tl.zeros((BLOCK, HB, DB), dtype=tl.float32)
    for a in range(K):
        down = a - K // 2
        row_ok = m_ok & (i + down >= 0) & (i + down < height)
        by_row = tl.sum(q * _embedding(embeddings_ptr, a, everywhere, ok, C), 2)
        line = packed_ptr + at + (down * width - K // 2) * (3 * C)
        # One-pass (online) softmax: the sums so far are rescaled whenever a row contains a larger logit.
        larger = largest
        logits = ()
        for b in tl.static_range(K):
            here = row_ok & (j + (b - K // 2) >= 0) & (j + (b - K // 2) < width)
            key = tl.load(line + (b * 3 + 1) * C, mask=here[:, None, None] & c_ok, other=0.0).to(tl.float32)
            logit = tl.where(here[:, None], tl.sum(q * key, 2) + by_row + by_column[b], float("-inf"))
            larger = tl.maximum(larger, logit)
            logits += (logit,)
        scale = tl.exp(largest - larger)
        total = total * scale
        y = y * scale[:, :, None]
        for b in tl.static_range(K):
            here = row_ok & (j + (b - K // 2) >= 0) & (j + (b - K // 2) < width)
            value = tl.load(line + (b * 3 + 2) * C, mask=here[:, None, None] & c_ok, other=0.0).to(tl.float32)
            weight = tl.exp(logits[b] - larger)
            total += weight
            y += weight[:, :, None] * value
        largest = larger
    # Rows beyond the last pixel have no neighbours; this avoids 0 / 0.
    total = tl.where(m_ok[:, None], total, 1.0)
    y = y / total[:, :, None]
    tl.store(y_ptr + m[:, None, None] * C + channel, y.to(y_ptr.dtype.element_ty), mask=ok)
    tl.store(lse_ptr + m[:, None] * H + head, largest + tl.log(total), mask=m_ok[:, None] & (head < H))


@triton.jit
def _queries(
    packed_ptr, embeddings_ptr, y_ptr, lse_ptr, dy_ptr, delta_ptr, out_ptr, partial_ptr, pixels, height, width,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, HB: tl.constexpr, DB: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """The gradient of queries; with POSITIONS also Σ slope · q over the program's pixels, by row and by column."""
    C: tl.constexpr = H * D
    m, m_ok, i, j, head, channel, c_ok = _pixels(pixels, height, width, H, D, BLOCK, HB, DB)
    ok = m_ok[:, None, None] & c_ok
    at = m[:, None, None] * (3 * C) + channel
    own = m[:, None, None] * C + channel
    place = m[:, None] * H + head
    h_ok = m_ok[:, None] & (head < H)
    q = tl.load(packed_ptr + at, mask=ok, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + own, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + own, mask=ok, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + place, mask=h_ok, other=0.0)
    delta = tl.sum(dy * y, 2)
    tl.store(delta_ptr + place, delta, mask=h_ok)
    everywhere = m[:, None, None] * 0 + channel
    by_column = _by_column(embeddings_ptr, q, everywhere, ok, C, K)
    dq = tl.zeros((BLOCK, HB, DB), dtype=tl.float32)
    down_columns = ()  # slopes summed down each column
    for _ in tl.static_range(K):
        down_columns += (tl.zeros((BLOCK, HB), dtype=tl.float32),)
    lines = partial_ptr + channel
    for a in range(K):
        down = a - K // 2
        row_ok = m_ok & (i + down >= 0) & (i + down < height)
        row = _embedding(embeddings_ptr, a, everywhere, ok, C)
        by_row = tl.sum(q * row, 2) - lse
        line = packed_ptr + at + (down * width - K // 2) * (3 * C)
        along = tl.zeros((BLOCK, HB), dtype=tl.float32)  # slopes summed along this row
        summed = ()
        for b in tl.static_range(K):
            here = row_ok & (j + (b - K // 2) >= 0) & (j + (b - K // 2) < width)
            seen = here[:, None, None] & c_ok
            key = tl.load(line + (b * 3 + 1) * C, mask=seen, other=0.0).to(tl.float32)
            value = tl.load(line + (b * 3 + 2) * C, mask=seen, other=0.0).to(tl.float32)
            logit = tl.sum(q * key, 2) + by_row + by_column[b]
            weight = tl.exp(tl.where(here[:, None], logit, float("-inf")))
            slope = weight * (tl.sum(dy * value, 2) - delta)  # dL/dlogit
            dq += slope[:, :, None] * key
            along += slope
            summed += (down_columns[b] + slope,)
        down_columns = summed
        dq += along[:, :, None] * row
        if POSITIONS:
            tl.store(lines + a * C, tl.sum(along[:, :, None] * q, 0)[None], mask=c_ok)
    for b in tl.static_range(K):
        dq += down_columns[b][:, :, None] * _embedding(embeddings_ptr, K + b, everywhere, ok, C)
        if POSITIONS:
            tl.store(lines + (K + b) * C, tl.sum(down_columns[b][:, :, None] * q, 0)[None], mask=c_ok)
    tl.store(out_ptr + at, dq.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _keys(
    packed_ptr, embeddings_ptr, lse_ptr, dy_ptr, delta_ptr, out_ptr, pixels, height, width,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, HB: tl.constexpr, DB: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = H * D
    m, m_ok, i, j, head, channel, c_ok = _pixels(pixels, height, width, H, D, BLOCK, HB, DB)
    ok = m_ok[:, None, None] & c_ok
    at = m[:, None, None] * (3 * C) + channel
    own = m[:, None, None] * C + channel
    place = m[:, None] * H + head
    key = tl.load(packed_ptr + at + C, mask=ok, other=0.0).to(tl.float32)
    value = tl.load(packed_ptr + at + 2 * C, mask=ok, other=0.0).to(tl.float32)
    everywhere = m[:, None, None] * 0 + channel
    dk = tl.zeros((BLOCK, HB, DB), dtype=tl.float32)
    dv = tl.zeros((BLOCK, HB, DB), dtype=tl.float32)
    for a in range(K):
        # The pixels that have this one in row `a` of their neighbours, in column `b` below.
        down = K // 2 - a
        row_ok = m_ok & (i + down >= 0) & (i + down < height)
        of_row = key + _embedding(embeddings_ptr, a, everywhere, ok, C)
        for b in tl.static_range(K):
            across = K // 2 - b
            here = row_ok & (j + across >= 0) & (j + across < width)
            seen = here[:, None, None] & c_ok
            step = down * width + across
            q = tl.load(packed_ptr + at + step * (3 * C), mask=seen, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + own + step * C, mask=seen, other=0.0).to(tl.float32)
            lse = tl.load(lse_ptr + place + step * H, mask=here[:, None] & (head < H), other=0.0)
            delta = tl.load(delta_ptr + place + step * H, mask=here[:, None] & (head < H), other=0.0)
            logit = tl.sum(q * (of_row + _embedding(embeddings_ptr, K + b, everywhere, ok, C)), 2)
            weight = tl.exp(tl.where(here[:, None], logit - lse, float("-inf")))
            dv += weight[:, :, None] * dy
            slope = weight * (tl.sum(dy * value, 2) - delta)
            dk += slope[:, :, None] * q
    tl.store(out_ptr + at + C, dk.to(out_ptr.dtype.element_ty), mask=ok)
    tl.store(out_ptr + at + 2 * C, dv.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["pixels", "height", "width"])
def _forward(
    packed_ptr, embeddings_ptr, y_ptr, lse_ptr, pixels, height, width, KINDS: tl.constexpr, C: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for v in tl.static_range(len(KINDS)):
        if tl.program_id(1) == v:
            before = pixels.to(tl.int64) * v
            _attend(
                packed_ptr + before * (3 * C), embeddings_ptr + KINDS[v][0] * C, y_ptr + before * C,
                lse_ptr + before * HEADS, pixels, height, width, KINDS[v][1], KINDS[v][2], KINDS[v][3], BLOCK,
                KINDS[v][4], KINDS[v][5],
            )  # fmt: skip


@triton.jit(do_not_specialize=["pixels", "height", "width"])
def _backward_queries(
    packed_ptr, embeddings_ptr, y_ptr, lse_ptr, dy_ptr, delta_ptr, out_ptr, partial_ptr, pixels, height, width,
    KINDS: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    for v in tl.static_range(len(KINDS)):
        if tl.program_id(1) == v:
            before = pixels.to(tl.int64) * v
            partial = partial_ptr + (tl.program_id(0).to(tl.int64) * LINES + KINDS[v][0]) * C
            _queries(
                packed_ptr + before * (3 * C), embeddings_ptr + KINDS[v][0] * C, y_ptr + before * C,
                lse_ptr + before * HEADS, dy_ptr + before * C, delta_ptr + before * HEADS,
                out_ptr + before * (3 * C), partial, pixels, height, width, KINDS[v][1], KINDS[v][2], KINDS[v][3],
                BLOCK, KINDS[v][4], KINDS[v][5], POSITIONS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["pixels", "height", "width"])
def _backward_keys(
    packed_ptr, embeddings_ptr, lse_ptr, dy_ptr, delta_ptr, out_ptr, pixels, height, width, KINDS: tl.constexpr,
    C: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for v in tl.static_range(len(KINDS)):
        if tl.program_id(1) == v:
            before = pixels.to(tl.int64) * v
            _keys(
                packed_ptr + before * (3 * C), embeddings_ptr + KINDS[v][0] * C, lse_ptr + before * HEADS,
                dy_ptr + before * C, delta_ptr + before * HEADS, out_ptr + before * (3 * C), pixels, height, width,
                KINDS[v][1], KINDS[v][2], KINDS[v][3], BLOCK, KINDS[v][4], KINDS[v][5],
            )  # fmt: skip


@triton.jit(do_not_specialize=["programs"])
def _sum_programs(
    partial_ptr, sums_ptr, programs, N: tl.constexpr, C: tl.constexpr, EXTENT: tl.constexpr, MERGED: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """sums [N] of partial [programs, N]. EXTENT: extent of a single attention, whose sums are [2, C, EXTENT]; or 0."""
    n = tl.program_id(0) * NARROW + tl.arange(0, NARROW)
    total = tl.zeros((MERGED, NARROW), dtype=tl.float32)
    for start in range(0, programs, MERGED):
        t = start + tl.arange(0, MERGED)
        ok = (t < programs)[:, None] & (n < N)[None, :]
        total += tl.load(partial_ptr + t.to(tl.int64)[:, None] * N + n[None, :], mask=ok, other=0.0)
    to = n
    if EXTENT > 0:
        line = n // C
        to = (line // EXTENT) * (C * EXTENT) + (n % C) * EXTENT + line % EXTENT
    tl.store(sums_ptr + to, tl.sum(total, 0), mask=n < N)


def _sizes(packed, kinds, warps, values):
    """Arguments and settings of a launch: one program per block of pixels and attention."""
    count, n, height, width, channels = packed.shape
    c = channels // 3
    assert channels == 3 * c and count == len(kinds) and packed.is_contiguous()
    own, line = [], 0
    for extent, heads in kinds:
        own.append((line, extent, heads, c // heads, triton.next_power_of_2(heads), triton.next_power_of_2(c // heads)))
        line += 2 * extent
    block = max(1, 32 * warps * values // max(hb * db for *_, hb, db in own))
    most = max(heads for _, heads in kinds)
    settings = {"KINDS": tuple(own), "C": c, "HEADS": most, "BLOCK": block, "num_warps": warps}
    pixels = n * height * width
    return (pixels, height, width), (triton.cdiv(pixels, block), count), settings


def _values(c, kinds):
    return WIDE if any(c // heads % 8 == 0 for _, heads in kinds) else NARROW


def forward(packed, embeddings, kinds, out=None):
    """Several attentions over maps of one size. kinds: the extent and heads of each.

    packed [attentions, n, h, w, 3·c] and embeddings float32 [lines, c], of each attention those of its extent's rows,
    then its columns. Returns y [attentions, n, h, w, c], in `out` if given, and, for `backward`, lse [attentions, n·h·w
    · most heads].
    """
    c = packed.shape[-1] // 3
    about, grid, settings = _sizes(packed, kinds, WARPS, _values(c, kinds))
    y = packed.new_empty(*packed.shape[:-1], c) if out is None else out
    lse = torch.empty(len(kinds), about[0] * settings["HEADS"], dtype=torch.float32, device=packed.device)
    if about[0]:
        _forward[grid](packed, embeddings, y, lse, *about, **settings)
    return y, lse


def backward(packed, embeddings, y, lse, dy, kinds, *, positions=True, out=None):
    """The gradient of packed, in `out` if given, from that of y; with `positions` also that of embeddings [programs,
    lines, c], to be summed over programs, otherwise None.
    """
    lines, c = embeddings.shape
    out, delta = torch.empty_like(packed) if out is None else out, torch.empty_like(lse)
    about, grid, settings = _sizes(packed, kinds, WARPS, _values(c, kinds))
    partial = torch.empty(grid[0] if positions else 0, lines, c, dtype=torch.float32, device=packed.device)
    if about[0]:
        given = (packed, embeddings, y, lse, dy, delta, out, partial, *about)
        _backward_queries[grid](*given, **settings, LINES=lines, POSITIONS=positions)
        about, grid, settings = _sizes(packed, kinds, 1, NARROW if any(c // heads <= 2 for _, heads in kinds) else WIDE)
        _backward_keys[grid](packed, embeddings, lse, dy, delta, out, *about, **settings)
    return out, partial if positions else None


def summed(partial, extent=0):
    """The sum of partial [programs, lines, c] over programs: [lines, c], or of one attention [2, c, extent]."""
    programs, lines, c = partial.shape
    sums = torch.empty((2, c, extent) if extent else (lines, c), dtype=torch.float32, device=partial.device)
    # A program waits for one load after the other, so it reads many rows at once.
    merged = 1024 if programs > 256 else 256
    settings = {"N": lines * c, "C": c, "EXTENT": extent, "MERGED": merged, "NARROW": 8, "num_warps": merged // 128}
    _sum_programs[(triton.cdiv(lines * c, 8),)](partial, sums, programs, **settings)
    return sums
