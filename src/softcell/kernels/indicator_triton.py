# mypy: ignore-errors
"""Triton kernels of `indicator`: a program holds one image of one edge, [PB positions, CB channels], in registers.

FLAT: tokens are whole maps without a norm. `asked` is then a map too, and `positions` holds one number per map,
shift + asked·p_k.

Sums are accumulated in float32. What edges share (weights, positions) gets a row of gradients per image, which are
added up outside in a fixed order, so that results repeat bit for bit.
"""

import torch
import triton
import triton.language as tl

from softcell.kernels.backend import padded
from softcell.kernels.indicator import columns, wide, widths

BLOCK = 256
"""Positions × channels of the IT's map that a program sums over images."""
SAMPLES = 16
"""Images that this program adds at a time."""
SMALL = ["shift_ptr", "itself_ptr", "zeros_ptr", "narrow_bias_ptr"]
"""Pointers to parts of small tensors. Their alignment differs by group and is not worth recompiling."""


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="tf32x3")  # for float32: equally accurate, fewer instructions


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _windows(PB: tl.constexpr, TB: tl.constexpr, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, Q: tl.constexpr):
    """[TB, PB]: whether a position is in a window of the summary."""
    p = tl.arange(0, PB)
    own = (p // W // (H // R)) * Q + (p % W) // (W // Q)
    return tl.arange(0, TB)[:, None] == own[None, :]


@triton.jit
def _token(x, windows, position, here, eps, SHARE: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr):
    """t̂ [TB, CB] of a map [PB, CB], and 1 / its standard deviation; without NORM, the pooled map and 1."""
    small = _dot(windows.to(tl.float32).to(x.dtype), x) * SHARE + position
    token = tl.where(here, small, 0.0)
    rstd = 1.0
    if NORM:
        centred = tl.where(here, small - _total(small) / D, 0.0)
        rstd = 1.0 / tl.sqrt(_total(centred * centred) / D + eps)
        token = centred * rstd
    return token, rstd


@triton.jit
def _one_of(values, k, KB: tl.constexpr):
    # Triton cannot index values in registers.
    return tl.sum(tl.where(tl.arange(0, KB) == k, values, 0.0), 0)


@triton.jit
def _normalise(x, ok, eps, N: tl.constexpr):
    centred = tl.where(ok, x - _total(tl.where(ok, x, 0.0)) / N, 0.0)
    rstd = 1.0 / tl.sqrt(_total(centred * centred) / N + eps)
    return centred * rstd, rstd


@triton.jit(do_not_specialize=["samples"], do_not_specialize_on_alignment=SMALL)
def _forward(
    x_ptr, positions_ptr, asked_ptr, shift_ptr, itself_ptr, zeros_ptr, own_ptr, own_value_ptr, value_ptr, scale1_ptr,
    shift1_ptr, narrow_ptr, narrow_bias_ptr, widen_ptr, widen_bias_ptr, scale2_ptr, shift2_ptr,
    out_ptr, attention_ptr, inside_ptr, normed_ptr, scales_ptr, samples, token_eps, map_eps,
    M: tl.constexpr, Z: tl.constexpr, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, Q: tl.constexpr,
    C: tl.constexpr, INNER: tl.constexpr, PB: tl.constexpr, CB: tl.constexpr, TB: tl.constexpr, IB: tl.constexpr,
    MB: tl.constexpr, ZB: tl.constexpr, NORM: tl.constexpr, FLAT: tl.constexpr, KEEPS: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """AGAIN: the attention is known, and only what the backward pass needs is stored."""
    P: tl.constexpr = H * W
    T: tl.constexpr = R * Q
    number = tl.program_id(0)
    g = number // samples
    p, c, i, t = tl.arange(0, PB), tl.arange(0, CB), tl.arange(0, IB), tl.arange(0, TB)
    ok = (p < P)[:, None] & (c < C)[None, :]
    at = p[:, None] * C + c[None, :]
    here = (t < T)[:, None] & (c < C)[None, :]
    spot = t[:, None] * C + c[None, :]
    kind = x_ptr.dtype.element_ty
    maps = x_ptr + ((g * M * samples + number % samples).to(tl.int64) * (P * C))
    step = samples.to(tl.int64) * (P * C)

    k_map, k_zero = tl.arange(0, MB), tl.arange(0, ZB)
    row = attention_ptr + number * (1 + M + Z)
    if AGAIN:
        to_itself = tl.load(row)
        to_maps = tl.load(row + 1 + k_map, mask=k_map < M, other=0.0)
    else:
        asked = tl.load(asked_ptr + g * (T * C) + spot, mask=here, other=0.0)
        logits = tl.full((MB,), float("-inf"), dtype=tl.float32)
        if FLAT:
            for k in range(M):
                x = tl.load(maps + k * step + at, mask=ok, other=0.0).to(tl.float32)
                logits = tl.where(k_map == k, _total(x * asked) + tl.load(positions_ptr + g * M + k), logits)
        else:
            windows = _windows(PB, TB, H, W, R, Q)
            shift = tl.load(shift_ptr + g)
            for k in range(M):
                x = tl.load(maps + k * step + at, mask=ok, other=0.0)
                position = tl.load(positions_ptr + (g * M + k) * (T * C) + spot, mask=here, other=0.0)
                token, _ = _token(x, windows, position, here, token_eps, R * Q / (H * W), T * C, NORM)
                logits = tl.where(k_map == k, _total(token * asked) + shift, logits)
        itself = tl.load(itself_ptr + g)
        zeros = tl.load(zeros_ptr + g * Z + k_zero, mask=k_zero < Z, other=float("-inf"))
        largest = tl.maximum(tl.maximum(itself, tl.max(logits, 0)), tl.max(zeros, 0))
        to_itself, to_maps, to_zeros = tl.exp(itself - largest), tl.exp(logits - largest), tl.exp(zeros - largest)
        total = to_itself + tl.sum(to_maps, 0) + tl.sum(to_zeros, 0)
        to_itself, to_maps, to_zeros = to_itself / total, to_maps / total, to_zeros / total
        tl.store(row, to_itself)
        tl.store(row + 1 + k_map, to_maps, mask=k_map < M)
        tl.store(row + 1 + M + k_zero, to_zeros, mask=k_zero < Z)

    mixed = tl.zeros((PB, CB), dtype=tl.float32)
    for k in range(M):
        x = tl.load(maps + k * step + at, mask=ok, other=0.0)
        mixed += _one_of(to_maps, k, MB) * x.to(tl.float32)
    square = (c < C)[:, None] & (c < C)[None, :]
    value = tl.load(value_ptr + g * (C * C) + c[:, None] * C + c[None, :], mask=square, other=0.0)
    y = _dot(mixed.to(kind), value)
    y += tl.load(own_ptr + g * (P * C) + at, mask=ok, other=0.0).to(tl.float32)
    y += to_itself * tl.load(own_value_ptr + g * (P * C) + at, mask=ok, other=0.0).to(tl.float32)

    # Rounded to the stored precision, so that the backward pass uses exactly these values.
    to = number.to(tl.int64) * (P * C) + at
    y, rstd1 = _normalise(y, ok, map_eps, P * C)
    y = y.to(kind)
    if KEEPS:
        tl.store(inside_ptr + to, y, mask=ok)
    scale = tl.load(scale1_ptr + g * C + c, mask=c < C, other=0.0).to(tl.float32)
    add = tl.load(shift1_ptr + g * C + c, mask=c < C, other=0.0).to(tl.float32)
    y = y.to(tl.float32) * scale[None, :] + add[None, :]
    slim = (c < C)[:, None] & (i < INNER)[None, :]
    narrow = tl.load(narrow_ptr + g * (C * INNER) + c[:, None] * INNER + i[None, :], mask=slim, other=0.0)
    bias = tl.load(narrow_bias_ptr + g * INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
    inner = tl.maximum(_dot(y.to(kind), narrow) + bias[None, :], 0.0)
    slim = (i < INNER)[:, None] & (c < C)[None, :]
    widen = tl.load(widen_ptr + g * (C * INNER) + i[:, None] * C + c[None, :], mask=slim, other=0.0)
    bias = tl.load(widen_bias_ptr + g * C + c, mask=c < C, other=0.0).to(tl.float32)
    y += _dot(inner.to(kind), widen) + bias[None, :]
    y, rstd2 = _normalise(y, ok, map_eps, P * C)
    y = y.to(kind)
    if KEEPS:
        tl.store(normed_ptr + to, y, mask=ok)
        tl.store(scales_ptr + number, rstd1)
        tl.store(scales_ptr + tl.num_programs(0) + number, rstd2)
    if not AGAIN:
        scale = tl.load(scale2_ptr + g * C + c, mask=c < C, other=0.0).to(tl.float32)
        add = tl.load(shift2_ptr + g * C + c, mask=c < C, other=0.0).to(tl.float32)
        tl.store(out_ptr + to, (y.to(tl.float32) * scale[None, :] + add[None, :]).to(kind), mask=ok)


@triton.jit(do_not_specialize=["samples", "width"], do_not_specialize_on_alignment=SMALL)
def _backward_map(
    dy_ptr, inside_ptr, normed_ptr, scales_ptr, scale1_ptr, shift1_ptr, narrow_ptr, narrow_bias_ptr, widen_ptr,
    scale2_ptr, rows_ptr, dt_ptr, samples, width,
    P: tl.constexpr, C: tl.constexpr, INNER: tl.constexpr, PB: tl.constexpr, CB: tl.constexpr, IB: tl.constexpr,
):  # fmt: skip
    """Propagates the output gradient back to T, through both norms and the feed-forward network."""
    number = tl.program_id(0)
    g = number // samples
    p, c, i = tl.arange(0, PB), tl.arange(0, CB), tl.arange(0, IB)
    c_ok, i_ok = c < C, i < INNER
    ok = (p < P)[:, None] & c_ok[None, :]
    at = number.to(tl.int64) * (P * C) + p[:, None] * C + c[None, :]
    kind = dy_ptr.dtype.element_ty
    row = rows_ptr + number.to(tl.int64) * width
    rstd1, rstd2 = tl.load(scales_ptr + number), tl.load(scales_ptr + tl.num_programs(0) + number)

    dy = tl.load(dy_ptr + at, mask=ok, other=0.0).to(tl.float32)
    normed = tl.load(normed_ptr + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(row + 2 * C + c, tl.sum(dy * normed, 0), mask=c_ok)
    tl.store(row + 3 * C + c, tl.sum(dy, 0), mask=c_ok)
    dy *= tl.load(scale2_ptr + g * C + c, mask=c_ok, other=0.0).to(tl.float32)[None, :]
    dy = rstd2 * (dy - _total(dy) / (P * C) - normed * (_total(dy * normed) / (P * C)))
    dy = tl.where(ok, dy, 0.0)
    tl.store(row + 4 * C + c, tl.sum(dy, 0), mask=c_ok)

    inside = tl.load(inside_ptr + at, mask=ok, other=0.0).to(tl.float32)
    scale = tl.load(scale1_ptr + g * C + c, mask=c_ok, other=0.0).to(tl.float32)
    add = tl.load(shift1_ptr + g * C + c, mask=c_ok, other=0.0).to(tl.float32)
    y = tl.where(ok, inside * scale[None, :] + add[None, :], 0.0).to(kind)
    slim = c_ok[:, None] & i_ok[None, :]
    narrow = tl.load(narrow_ptr + g * (C * INNER) + c[:, None] * INNER + i[None, :], mask=slim, other=0.0)
    bias = tl.load(narrow_bias_ptr + g * INNER + i, mask=i_ok, other=0.0).to(tl.float32)
    inner = tl.maximum(_dot(y, narrow) + bias[None, :], 0.0)
    low = dy.to(kind)
    found = _dot(tl.trans(inner.to(kind)), low)
    to = row + 5 * C + INNER + C * INNER + i[:, None] * C + c[None, :]
    tl.store(to, found, mask=i_ok[:, None] & c_ok[None, :])
    turned = tl.load(widen_ptr + g * (C * INNER) + i[None, :] * C + c[:, None], mask=slim, other=0.0)
    dinner = tl.where(inner > 0.0, _dot(low, turned), 0.0)
    tl.store(row + 5 * C + i, tl.sum(dinner, 0), mask=i_ok)
    found = _dot(tl.trans(y), dinner.to(kind))
    tl.store(row + 5 * C + INNER + c[:, None] * INNER + i[None, :], found, mask=slim)
    turned = tl.load(
        narrow_ptr + g * (C * INNER) + c[None, :] * INNER + i[:, None], mask=i_ok[:, None] & c_ok[None, :], other=0.0
    )
    dy += _dot(dinner.to(kind), turned)

    tl.store(row + c, tl.sum(dy * inside, 0), mask=c_ok)
    tl.store(row + C + c, tl.sum(dy, 0), mask=c_ok)
    dy *= scale[None, :]
    dy = rstd1 * (dy - _total(dy) / (P * C) - inside * (_total(dy * inside) / (P * C)))
    tl.store(dt_ptr + at, dy.to(kind), mask=ok)


@triton.jit(do_not_specialize=["samples", "width"])
def _backward_tokens(
    x_ptr, dx_ptr, dt_ptr, attention_ptr, towards_ptr, positions_ptr, asked_ptr, own_value_ptr, value_ptr, rows_ptr,
    samples, width, token_eps,
    M: tl.constexpr, Z: tl.constexpr, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, Q: tl.constexpr,
    C: tl.constexpr, INNER: tl.constexpr, PB: tl.constexpr, CB: tl.constexpr, TB: tl.constexpr,
    MB: tl.constexpr, ZB: tl.constexpr, NORM: tl.constexpr, FLAT: tl.constexpr, HAS_TOWARDS: tl.constexpr,
):  # fmt: skip
    """Propagates the gradient of T back to the maps, through their sum, the attention and the summaries."""
    P: tl.constexpr = H * W
    T: tl.constexpr = R * Q
    number = tl.program_id(0)
    g = number // samples
    p, c, t = tl.arange(0, PB), tl.arange(0, CB), tl.arange(0, TB)
    ok = (p < P)[:, None] & (c < C)[None, :]
    at = p[:, None] * C + c[None, :]
    here = (t < T)[:, None] & (c < C)[None, :]
    spot = t[:, None] * C + c[None, :]
    kind = x_ptr.dtype.element_ty
    first = (g * M * samples + number % samples).to(tl.int64) * (P * C)
    step = samples.to(tl.int64) * (P * C)
    row = rows_ptr + number.to(tl.int64) * width + (5 * C + INNER + 2 * C * INNER)

    k_map, k_zero = tl.arange(0, MB), tl.arange(0, ZB)
    own = attention_ptr + number * (1 + M + Z)
    to_itself = tl.load(own)
    to_maps = tl.load(own + 1 + k_map, mask=k_map < M, other=0.0)
    to_zeros = tl.load(own + 1 + M + k_zero, mask=k_zero < Z, other=0.0)
    dt = tl.load(dt_ptr + number.to(tl.int64) * (P * C) + at, mask=ok, other=0.0)
    square = (c < C)[:, None] & (c < C)[None, :]
    turned = tl.load(value_ptr + g * (C * C) + c[None, :] * C + c[:, None], mask=square, other=0.0)
    pull = _dot(dt, turned)  # of the sum of the maps
    own_value = tl.load(own_value_ptr + g * (P * C) + at, mask=ok, other=0.0).to(tl.float32)
    on_itself = _total(dt.to(tl.float32) * own_value)
    on_maps = tl.zeros((MB,), dtype=tl.float32)
    on_zeros = tl.zeros((ZB,), dtype=tl.float32)
    mixed = tl.zeros((PB, CB), dtype=tl.float32)
    for k in range(M):
        x = tl.load(x_ptr + first + k * step + at, mask=ok, other=0.0).to(tl.float32)
        on_maps = tl.where(k_map == k, _total(pull * x), on_maps)
        mixed += _one_of(to_maps, k, MB) * x
    tl.store(row + c[:, None] * C + c[None, :], _dot(tl.trans(mixed.to(kind)), dt), mask=square)
    row += C * C
    if HAS_TOWARDS:
        own = towards_ptr + number * (1 + M + Z)
        on_itself += tl.load(own)
        on_maps += tl.load(own + 1 + k_map, mask=k_map < M, other=0.0)
        on_zeros += tl.load(own + 1 + M + k_zero, mask=k_zero < Z, other=0.0)
    mean = to_itself * on_itself + tl.sum(to_maps * on_maps, 0) + tl.sum(to_zeros * on_zeros, 0)
    slopes = to_maps * (on_maps - mean)  # of the logits
    tl.store(row, to_itself * (on_itself - mean))
    tl.store(row + 1 + k_map, slopes, mask=k_map < M)
    tl.store(row + 1 + M + k_zero, to_zeros * (on_zeros - mean), mask=k_zero < Z)

    asked = tl.load(asked_ptr + g * (T * C) + spot, mask=here, other=0.0)
    if FLAT:
        for k in range(M):
            dx = _one_of(slopes, k, MB) * asked + _one_of(to_maps, k, MB) * pull
            tl.store(dx_ptr + first + k * step + at, dx.to(kind), mask=ok)
    else:
        windows = _windows(PB, TB, H, W, R, Q)
        dasked = tl.zeros((TB, CB), dtype=tl.float32)
        positions = row + T * C + 1 + M + Z
        for k in range(M):
            x = tl.load(x_ptr + first + k * step + at, mask=ok, other=0.0)
            position = tl.load(positions_ptr + (g * M + k) * (T * C) + spot, mask=here, other=0.0)
            token, rstd = _token(x, windows, position, here, token_eps, R * Q / (H * W), T * C, NORM)
            slope = _one_of(slopes, k, MB)
            dasked += slope * token
            dtoken = slope * asked
            if NORM:
                dtoken = rstd * (dtoken - _total(dtoken) / (T * C) - token * (_total(dtoken * token) / (T * C)))
            dtoken = tl.where(here, dtoken, 0.0)
            tl.store(positions + k * (T * C) + spot, dtoken, mask=here)
            spread = (dtoken * (R * Q / (H * W))).to(kind)
            dx = _dot(tl.trans(windows.to(tl.float32).to(kind)), spread)
            dx += _one_of(to_maps, k, MB) * pull
            tl.store(dx_ptr + first + k * step + at, dx.to(kind), mask=ok)
        tl.store(row + 1 + M + Z + spot, dasked, mask=here)


@triton.jit(do_not_specialize=["samples", "size", "width", "offset"])
def _backward_asked(
    x_ptr, rows_ptr, asked_ptr, samples, size, width, offset, M: tl.constexpr, BLOCK: tl.constexpr,
    SAMPLES: tl.constexpr,
):  # fmt: skip
    """The gradient of `asked` where tokens are whole maps: the maps weighted by the slopes of their logits, summed."""
    g = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((SAMPLES, BLOCK), dtype=tl.float32)
    for k in range(M):
        for start in range(0, samples, SAMPLES):
            n = start + tl.arange(0, SAMPLES)
            n_ok = n < samples
            slope = tl.load(rows_ptr + (g * samples + n).to(tl.int64) * width + offset + k, mask=n_ok, other=0.0)
            row = ((g * M + k) * samples + n).to(tl.int64) * size
            x = tl.load(x_ptr + row[:, None] + at[None, :], mask=n_ok[:, None] & (at < size)[None, :], other=0.0)
            total += slope[:, None] * x.to(tl.float32)
    tl.store(asked_ptr + g * size + at, tl.sum(total, 0), mask=at < size)


@triton.jit(
    do_not_specialize=["samples", "size", "tokens", "width"],
    do_not_specialize_on_alignment=["own_ptr", "own_value_ptr"],
)
def _backward_own(
    dt_ptr, attention_ptr, own_ptr, own_value_ptr, samples, size, tokens, width,
    BLOCK: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """The gradients of the IT's map and value: sums over images, unweighted and weighted by its self-attention.

    width: numbers between the rows of two edges.
    """
    g = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    plain = tl.zeros((SAMPLES, BLOCK), dtype=tl.float32)
    weighed = tl.zeros((SAMPLES, BLOCK), dtype=tl.float32)
    for start in range(0, samples, SAMPLES):
        n = g * samples + start + tl.arange(0, SAMPLES)
        n_ok = start + tl.arange(0, SAMPLES) < samples
        weight = tl.load(attention_ptr + n * tokens, mask=n_ok, other=0.0)
        ok = n_ok[:, None] & (at < size)[None, :]
        dt = tl.load(dt_ptr + n.to(tl.int64)[:, None] * size + at[None, :], mask=ok, other=0.0).to(tl.float32)
        plain += dt
        weighed += weight[:, None] * dt
    tl.store(own_ptr + g * width + at, tl.sum(plain, 0), mask=at < size)
    tl.store(own_value_ptr + g * width + at, tl.sum(weighed, 0), mask=at < size)


def _sizes(x, laid, form):
    """The compile-time constants of all kernels: all sizes."""
    _, _, h, w, c = x.shape
    (rows, columns), inner = form.sides, laid.narrow.shape[2]
    m, z = laid.positions.shape[1], laid.zeros.shape[1]
    blocks = {"PB": padded(h * w), "CB": padded(c)}
    tokens = {
        **{"M": m, "Z": z, "H": h, "W": w, "R": rows, "Q": columns, "TB": padded(rows * columns)},
        **{"MB": padded(m, 1), "ZB": padded(z, 1), "NORM": form.token_eps is not None, "FLAT": form.is_flat(x)},
    }
    # Two warps keep Triton from using Hopper's `wgmma`, which gave wrong results or an illegal address for rows of 128
    # bytes (64 channels in bfloat16; Triton 3.6, one H200). Narrower rows and float32 are correct with it, and faster.
    warps = 2 if wide(c, x.element_size()) else max(4, min(8, blocks["PB"] * blocks["CB"] // 1024))
    return {"C": c, "INNER": inner, **blocks}, tokens, {"IB": padded(inner)}, warps


def forward(x, laid, form, keeps):
    """Outputs [g, n, h, w, c], attention [g, n, tokens], and tensors for the backward pass, empty without one.

    These are Y and the output before scale and shift, [g, n, h, w, c], and the factors that normalised them, [2, g, n].
    """
    (_, n, h, w, c), g = x.shape, len(laid.positions)
    tokens = 1 + laid.positions.shape[1] + laid.zeros.shape[1]
    out, attention = x.new_empty(g, n, h, w, c), laid.asked.new_empty(g, n, tokens)
    return out, attention, *_run(x, laid, form, out, attention, keeps=keeps, again=False)


def forward_again(x, laid, form, attention):
    """The tensors for the backward pass that `forward` returns, given the attention [g, n, tokens]."""
    return _run(x, laid, form, x, attention, keeps=True, again=True)


def _run(x, laid, form, out, attention, *, keeps, again):
    (_, n, h, w, c), g = x.shape, len(laid.positions)
    common, tokens, inner, warps = _sizes(x, laid, form)
    if tokens["FLAT"] and not again:
        laid = laid._replace(positions=torch.baddbmm(laid.shift, laid.positions, laid.asked))
    kept = [x.new_empty((g, n, h, w, c) if keeps else 0) for _ in range(2)]
    scales = attention.new_empty((2, g, n) if keeps else 0)
    _forward[(g * n,)](
        x, *laid, out, attention, *kept, scales, n, form.token_eps or 0.0, form.map_eps,
        **common, **tokens, **inner, KEEPS=keeps, AGAIN=again, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return *kept, scales


def backward(x, laid, form, attention, inside, normed, scales, dy, towards):
    """The gradients of the maps and, [g, w], of a `vector` of all parameters.

    towards [g, n, tokens]: that of the attention, or None.
    """
    (_, n, h, w, c), (g, m, d) = x.shape, laid.positions.shape
    common, tokens, more, warps = _sizes(x, laid, form)
    count, is_flat, sizes = attention.shape[2], tokens["FLAT"], widths(laid)
    found = attention.new_empty(g, sum(sizes.values()))
    own = columns(found, laid)
    width = own["asked" if is_flat else "own"].storage_offset()  # numbers that are summed over images
    rows = attention.new_empty(g, n, width)
    dt, dx = torch.empty_like(inside), torch.empty_like(x)
    _backward_map[(g * n,)](
        dy, inside, normed, scales, laid.attention_scale, laid.attention_shift, laid.narrow, laid.narrow_bias,
        laid.widen, laid.ffn_scale, rows, dt, n, width, P=h * w, **common, **more, num_warps=warps, num_stages=1,
    )  # fmt: skip
    _backward_tokens[(g * n,)](
        x, dx, dt, attention, attention if towards is None else towards, laid.positions, laid.asked, laid.own_value,
        laid.value, rows, n, width, form.token_eps or 0.0, **common, **tokens, HAS_TOWARDS=towards is not None,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    _backward_own[(triton.cdiv(h * w * c, BLOCK), g)](
        dt, attention, own["own"], own["own_value"], n, h * w * c, count, found.shape[1], BLOCK=BLOCK, SAMPLES=SAMPLES
    )
    torch.sum(rows, 1, out=found[:, :width])
    if is_flat:
        asked, slopes = torch.empty_like(laid.asked), own["shift"][:, :, None]  # slopes of asked·p_k
        _backward_asked[(triton.cdiv(d, BLOCK), g)](
            x, rows, asked, n, d, width, own["shift"].storage_offset(), M=m, BLOCK=BLOCK, SAMPLES=SAMPLES
        )
        own["asked"].copy_(torch.baddbmm(asked, laid.positions.transpose(1, 2), slopes).flatten(1))
        own["positions"].copy_(torch.bmm(slopes, laid.asked.transpose(1, 2)).flatten(1))
    return dx, found
