# mypy: ignore-errors
"""Triton kernels of `dynamic_kernels` and `calibrate`. Sums are accumulated in float32.

Those that make dynamic kernels (`_forward`, `_backward`): a program handles one module's taps, or backward some
positions, of a sample. Those of channel attentions (`_attend`, `_attend_gradient`): a program handles a sample. Those
of spatial attentions (`_look`, `_look_gradient`): a program handles some positions of one module and sample. Every
program writes a row of weight gradients; the rows are added outside in a fixed order, so results repeat bit for bit.
Products have at most 32 rows, or two warps: for larger ones Triton 3.6 uses an instruction that gave wrong results
elsewhere (see `indicator_triton`).

Those that calibrate (`_apply`, `_taps`): a program processes [PLACES, CB channels] of one sample and reads neighbours
in place. Kernels [n, c, k, k] may have any memory layout.
"""

import torch
import triton
import triton.language as tl

from softcell.kernels.backend import padded, table
from softcell.kernels.calibrate import TAPS, starts

DYNAMIC_TILE = 4096
"""Bytes of a tile of positions × channels of `_backward`; twice as many of `_forward`."""
MEAN_TILE = 4096
"""Size of a tile of `_attend`: positions × channels."""
TILE = 2048
"""Approximate size of a tile of `_apply` and `_taps`: positions × channels."""
MAX_GRID = 65_535
"""Programs along the second axis of a grid; CUDA rejects more."""
NUMBERS = ["height", "width", "k_n", "k_c", "k_y", "k_x"]


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="tf32x3")  # for float32: equally accurate, fewer instructions


@triton.jit
def _tile(ptr, rows, columns, row_ok, column_ok, stride):
    """Loads [rows, columns] from memory with a row stride of `stride` values."""
    at = rows[:, None] * stride + columns[None, :]
    return tl.load(ptr + at, mask=row_ok[:, None] & column_ok[None, :], other=0.0)


@triton.jit(do_not_specialize=["places", "rows", "made_rows", "stride"])
def _forward(
    x_ptr, compressed_ptr, score_ptr, decode_ptr, starts_ptr, made_ptr, latent_ptr, totals_ptr, places, rows, made_rows,
    stride, C: tl.constexpr, R: tl.constexpr, CB: tl.constexpr, RB: tl.constexpr, TB: tl.constexpr, PB: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(0), tl.program_id(1)
    first, taps = tl.load(starts_ptr + 2 * m), tl.load(starts_ptr + 2 * m + 1)
    t, c, r = tl.arange(0, TB), tl.arange(0, CB), tl.arange(0, RB)
    t_ok, c_ok, r_ok = t < taps, c < C, r < R
    kind = x_ptr.dtype.element_ty
    x_ptr += n.to(tl.int64) * places * C
    compressed_ptr += n.to(tl.int64) * places * stride + m * R
    score = _tile(score_ptr, first + t, c, t_ok, c_ok, C)
    largest = tl.full((TB,), -1e30, dtype=tl.float32)
    total = tl.zeros((TB,), dtype=tl.float32)
    latent = tl.zeros((TB, RB), dtype=tl.float32)
    for start in range(0, places, PB):
        p = start + tl.arange(0, PB)
        x = _tile(x_ptr, p, c, p < places, c_ok, C)
        logits = tl.where((p < places)[None, :], _dot(score, tl.trans(x)), -1e30)
        # One-pass (online) softmax: the sums so far are rescaled whenever a larger logit appears.
        larger = tl.maximum(largest, tl.max(logits, 1))
        scale = tl.exp(largest - larger)
        weights = tl.exp(logits - larger[:, None])
        total = total * scale + tl.sum(weights, 1)
        values = _tile(compressed_ptr, p, r, p < places, r_ok, stride)
        latent = latent * scale[:, None] + _dot(weights.to(kind), values)
        largest = larger
    latent = latent / total[:, None]
    row = n * rows + first + t
    tl.store(latent_ptr + row[:, None] * R + r[None, :], latent, mask=t_ok[:, None] & r_ok[None, :])
    tl.store(totals_ptr + row, largest + tl.log(total), mask=t_ok)
    decode = _tile(decode_ptr + m * C * R, c, r, c_ok, r_ok, R)
    made = tl.where(t_ok[:, None], _dot(latent.to(kind), tl.trans(decode)), -1e30)
    made = tl.exp(made - tl.max(made, 0)[None, :])
    made = made / tl.sum(made, 0)[None, :]
    made_row = n * made_rows + first + t
    tl.store(made_ptr + made_row[:, None] * C + c[None, :], made, mask=t_ok[:, None] & c_ok[None, :])


@triton.jit(do_not_specialize=["places", "rows", "made_rows", "stride", "modules"])
def _backward(
    x_ptr, compressed_ptr, score_ptr, decode_ptr, starts_ptr, made_ptr, latent_ptr, totals_ptr, dmade_ptr, start_ptr,
    dx_ptr, dcompressed_ptr, dscore_ptr, ddecode_ptr, places, rows, made_rows, stride, modules,
    C: tl.constexpr, R: tl.constexpr, CB: tl.constexpr, RB: tl.constexpr, TB: tl.constexpr, PB: tl.constexpr,
    WEIGHTS: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    block, n = tl.program_id(0), tl.program_id(1)
    t, c, r = tl.arange(0, TB), tl.arange(0, CB), tl.arange(0, RB)
    c_ok, r_ok = c < C, r < R
    p = block * PB + tl.arange(0, PB)
    p_ok = p < places
    kind = x_ptr.dtype.element_ty
    x_ptr += n.to(tl.int64) * places * C
    dx_ptr += n.to(tl.int64) * places * C
    compressed_ptr += n.to(tl.int64) * places * stride
    dcompressed_ptr += n.to(tl.int64) * places * (modules * R)
    dscore_ptr += (n * tl.num_programs(0) + block).to(tl.int64) * rows * C
    x = _tile(x_ptr, p, c, p_ok, c_ok, C)
    dx = tl.zeros((CB, PB), dtype=tl.float32)
    if STARTS:
        dx += tl.load(start_ptr + n * C + c, mask=c_ok, other=0.0)[:, None]
    for m in range(modules):
        first, taps = tl.load(starts_ptr + 2 * m), tl.load(starts_ptr + 2 * m + 1)
        t_ok = t < taps
        row, made_row = n * rows + first + t, n * made_rows + first + t
        made = _tile(made_ptr, made_row, c, t_ok, c_ok, C)
        dmade = _tile(dmade_ptr, made_row, c, t_ok, c_ok, C).to(tl.float32)
        dtaps = (made * (dmade - tl.sum(made * dmade, 0)[None, :])).to(kind)  # behind W3
        latent = _tile(latent_ptr, row, r, t_ok, r_ok, R)
        decode = _tile(decode_ptr + m * C * R, c, r, c_ok, r_ok, R)
        dlatent = _dot(dtaps, decode)
        if WEIGHTS:
            found = _dot(tl.trans(latent.to(kind)), dtaps)  # [RB, CB], the same in all blocks
            to = ddecode_ptr + ((n * modules + m) * R + r[:, None]) * C + c[None, :]
            tl.store(to, found, mask=r_ok[:, None] & c_ok[None, :] & (block == 0))
        mean = tl.sum(dlatent * latent, 1)
        low = dlatent.to(kind)
        score = _tile(score_ptr, first + t, c, t_ok, c_ok, C)
        totals = tl.load(totals_ptr + row, mask=t_ok, other=0.0)
        weights = tl.exp(_dot(score, tl.trans(x)) - totals[:, None])
        weights = tl.where(t_ok[:, None] & p_ok[None, :], weights, 0.0)
        values = _tile(compressed_ptr + m * R, p, r, p_ok, r_ok, stride)
        slopes = (weights * (_dot(low, tl.trans(values)) - mean[:, None])).to(kind)  # of the logits
        dvalues = _dot(tl.trans(low), weights.to(kind))  # [RB, PB]
        to = dcompressed_ptr + p[None, :] * (modules * R) + m * R + r[:, None]
        tl.store(to, dvalues.to(kind), mask=r_ok[:, None] & p_ok[None, :])
        dx += _dot(tl.trans(score), slopes)
        if WEIGHTS:
            to = dscore_ptr + (first + t)[:, None] * C + c[None, :]
            tl.store(to, _dot(slopes, x), mask=t_ok[:, None] & c_ok[None, :])
    tl.store(dx_ptr + p[None, :] * C + c[:, None], dx.to(kind), mask=c_ok[:, None] & p_ok[None, :])


@triton.jit
def _hidden_tile(ptr, m, h, c, ok, C: tl.constexpr, H: tl.constexpr):
    """W1 of channel attention m: [HB, CB]"""
    return tl.load(ptr + (m * H + h)[:, None] * C + c[None, :], mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _excite_tile(ptr, m, h, c, ok, C: tl.constexpr, H: tl.constexpr):
    """W2 of channel attention m, transposed: [HB, CB]"""
    return tl.load(ptr + (m * C + c)[None, :] * H + h[:, None], mask=ok, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["places", "rows", "made_rows", "modules"])
def _attend(
    x_ptr, squeeze_ptr, excite_ptr, made_ptr, mean_ptr, hidden_ptr, places, rows, made_rows, modules,
    C: tl.constexpr, H: tl.constexpr, CB: tl.constexpr, HB: tl.constexpr, PB: tl.constexpr,
):  # fmt: skip
    """All channel attentions of a sample, written after its taps."""
    n = tl.program_id(0)
    c, h = tl.arange(0, CB), tl.arange(0, HB)
    c_ok, h_ok = c < C, h < H
    ok = h_ok[:, None] & c_ok[None, :]
    x_ptr += n.to(tl.int64) * places * C
    total = tl.zeros((PB, CB), dtype=tl.float32)
    for start in range(0, places, PB):
        p = start + tl.arange(0, PB)
        total += _tile(x_ptr, p, c, p < places, c_ok, C).to(tl.float32)
    mean = tl.sum(total, 0) / places
    tl.store(mean_ptr + n * C + c, mean, mask=c_ok)
    for m in range(modules):
        hidden = tl.sum(_hidden_tile(squeeze_ptr, m, h, c, ok, C, H) * mean[None, :], 1)
        hidden = tl.maximum(hidden, 0.0)
        tl.store(hidden_ptr + (n * modules + m) * H + h, hidden, mask=h_ok)
        y = tl.sum(_excite_tile(excite_ptr, m, h, c, ok, C, H) * hidden[:, None], 0)
        tl.store(made_ptr + (n * made_rows + rows + m) * C + c, 1.0 / (1.0 + tl.exp(-y)), mask=c_ok)


@triton.jit(do_not_specialize=["places", "rows", "made_rows", "modules"])
def _attend_gradient(
    squeeze_ptr, excite_ptr, made_ptr, mean_ptr, hidden_ptr, dmade_ptr, start_ptr, dweights_ptr,
    places, rows, made_rows, modules,
    C: tl.constexpr, H: tl.constexpr, CB: tl.constexpr, HB: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """The gradient of every value of a sample, and those of W1 and W2 [n, 2, m · h · c], in their order."""
    n = tl.program_id(0)
    c, h = tl.arange(0, CB), tl.arange(0, HB)
    c_ok, h_ok = c < C, h < H
    ok = h_ok[:, None] & c_ok[None, :]
    mean = tl.load(mean_ptr + n * C + c, mask=c_ok, other=0.0)
    dmean = tl.zeros((CB,), dtype=tl.float32)
    dweights_ptr += n.to(tl.int64) * (2 * modules * H * C)
    for m in range(modules):
        at = (n * made_rows + rows + m) * C + c
        made = tl.load(made_ptr + at, mask=c_ok, other=0.0)
        dy = tl.load(dmade_ptr + at, mask=c_ok, other=0.0).to(tl.float32) * made * (1.0 - made)
        hidden = tl.load(hidden_ptr + (n * modules + m) * H + h, mask=h_ok, other=0.0)
        dhidden = tl.sum(_excite_tile(excite_ptr, m, h, c, ok, C, H) * dy[None, :], 1)
        dhidden = tl.where(hidden > 0.0, dhidden, 0.0)
        dmean += tl.sum(_hidden_tile(squeeze_ptr, m, h, c, ok, C, H) * dhidden[:, None], 0)
        if WEIGHTS:
            tl.store(dweights_ptr + (m * H + h)[:, None] * C + c[None, :], dhidden[:, None] * mean[None, :], mask=ok)
            to = dweights_ptr + modules * H * C + (m * C + c)[None, :] * H + h[:, None]
            tl.store(to, hidden[:, None] * dy[None, :], mask=ok)
    tl.store(start_ptr + n * C + c, dmean / places, mask=c_ok)


@triton.jit
def _seen(ptr, p, dy, dx, height, width, stride):
    """One value of the positions dy rows below and dx columns to the right; 0 outside the map. [PB]"""
    row, column = p // width + dy, p % width + dx
    inside = (p < height * width) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return tl.load(ptr + (row * width + column) * stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["gather_ptr", "weights_ptr", "samples", "height", "width", "stride"])
def _look(
    hidden_ptr, gather_ptr, weights_ptr, before_ptr, maps_ptr, out_ptr, samples, height, width, stride,
    R: tl.constexpr, BEFORE: tl.constexpr, PB: tl.constexpr,
):  # fmt: skip
    """The spatial attention of one module, some positions of a sample; maps before weights, and the sum."""
    n, t = tl.program_id(1), tl.program_id(2)
    places = height * width
    p = tl.program_id(0) * PB + tl.arange(0, PB)
    ok = p < places
    hidden_ptr += n.to(tl.int64) * places * stride + t * R
    y = tl.zeros((PB,), dtype=tl.float32)
    for tap in range(9):
        for r in range(R):
            weight = tl.load(gather_ptr + (t * 9 + tap) * R + r).to(tl.float32)
            y += weight * _seen(hidden_ptr + r, p, tap // 3 - 1, tap % 3 - 1, height, width, stride)
    made = 1.0 / (1.0 + tl.exp(-y))
    at = (t * samples + n).to(tl.int64) * places + p
    tl.store(maps_ptr + at, made.to(maps_ptr.dtype.element_ty), mask=ok)
    out = made * tl.load(weights_ptr + t).to(tl.float32)
    if BEFORE:
        out += tl.load(before_ptr + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _look_slope(dout_ptr, maps_ptr, p, dy, dx, height, width):
    """The gradient before the sigmoid, without the module's weight. [PB]"""
    made = _seen(maps_ptr, p, dy, dx, height, width, 1)
    return _seen(dout_ptr, p, dy, dx, height, width, 1) * made * (1.0 - made)


@triton.jit(do_not_specialize=["gather_ptr", "weights_ptr", "samples", "height", "width", "stride", "dstride"])
def _look_gradient(
    hidden_ptr, gather_ptr, weights_ptr, maps_ptr, dout_ptr, dhidden_ptr, partial_ptr, samples, height, width, stride,
    dstride, R: tl.constexpr, SUMS: tl.constexpr, PB: tl.constexpr,
):  # fmt: skip
    """The gradient of the hidden map; partial [samples · blocks, modules, 9 · R + 1]: of W2, then of the weight."""
    block, n, t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    places = height * width
    p = block * PB + tl.arange(0, PB)
    ok = p < places
    hidden_ptr += n.to(tl.int64) * places * stride + t * R
    dhidden_ptr += n.to(tl.int64) * places * dstride + t * R
    maps_ptr += (t * samples + n).to(tl.int64) * places
    dout_ptr += (t * samples + n).to(tl.int64) * places
    weight = tl.load(weights_ptr + t).to(tl.float32)
    for r in range(R):
        total = tl.zeros((PB,), dtype=tl.float32)
        for tap in range(9):
            slope = _look_slope(dout_ptr, maps_ptr, p, 1 - tap // 3, 1 - tap % 3, height, width)
            total += tl.load(gather_ptr + (t * 9 + tap) * R + r).to(tl.float32) * slope
        tl.store(dhidden_ptr + p * dstride + r, (total * weight).to(dhidden_ptr.dtype.element_ty), mask=ok)
    if SUMS:
        partial_ptr += ((n * tl.num_programs(0) + block).to(tl.int64) * tl.num_programs(2) + t) * (9 * R + 1)
        slope = _look_slope(dout_ptr, maps_ptr, p, 0, 0, height, width) * weight
        for tap in range(9):
            for r in range(R):
                seen = _seen(hidden_ptr + r, p, tap // 3 - 1, tap % 3 - 1, height, width, stride)
                tl.store(partial_ptr + tap * R + r, tl.sum(slope * seen, 0))
        made = _seen(maps_ptr, p, 0, 0, height, width, 1)
        tl.store(partial_ptr + 9 * R, tl.sum(_seen(dout_ptr, p, 0, 0, height, width, 1) * made, 0))


def _look_sizes(gather, places):
    block = min(256, padded(places, 32))
    return {"R": gather.shape[-1], "PB": block}, triton.cdiv(places, block)


def spatial_sums(hidden, gather, weights, before, size):
    """The sums [modules, n, h, w], and maps [modules, n, h, w] for the backward pass."""
    n, count = len(hidden), len(gather)
    maps = hidden.new_empty((count, n, *size))
    out = torch.empty_like(maps)
    own, blocks = _look_sizes(gather, size[0] * size[1])
    _look[(blocks, n, count)](
        hidden, gather, weights, out if before is None else before, maps, out, n, *size, hidden.stride(1), **own,
        BEFORE=before is not None,
    )  # fmt: skip
    return out, maps


def spatial_sums_gradient(hidden, gather, weights, maps, gradient, sums):
    """The gradients of the hidden map [n, h·w, modules · r], of W2 and of weights; sums: the last two are requested."""
    (count, n, height, width), dhidden = maps.shape, hidden.new_empty(hidden.shape)
    own, blocks = _look_sizes(gather, height * width)
    partial = maps.new_empty((n * blocks, count, 9 * own["R"] + 1) if sums else 0, dtype=torch.float32)
    _look_gradient[(blocks, n, count)](
        hidden, gather, weights, maps, gradient, dhidden, partial, n, height, width, hidden.stride(1),
        dhidden.stride(1), **own, SUMS=sums,
    )  # fmt: skip
    if not sums:
        return dhidden, None, None
    total = partial.sum(0)
    return dhidden, total[:, :-1].reshape(gather.shape), total[:, -1]


def _sizes(x, compressed, taps):
    c, r = x.shape[2], compressed.shape[2] // len(taps)
    return {"C": c, "R": r, "CB": padded(c), "RB": padded(r), "TB": TAPS}


def _attention_sizes(excite):
    _, c, h = excite.shape
    return {"C": c, "H": h, "CB": padded(c, 1), "HB": padded(h, 1)}


def _places(x, sizes, largest):
    """Positions of a tile, a power of two."""
    return max(32, min(128, largest // (sizes["CB"] * x.element_size())))


def dynamic_kernels(x, compressed, score, decode, taps, squeeze, excite):
    """Kernels [n, Σ k² + m, c], and what the backward pass reads.

    Of kernels z [n, Σ k², r] and the softmax statistics [n, Σ k²]; of attentions, or None without them, the mean [n, c]
    and hidden values [n, m · h].
    """
    (n, places, c), rows = x.shape, sum(taps)
    made_rows = rows if excite is None else rows + len(excite)
    sizes = _sizes(x, compressed, taps)
    made = x.new_empty((n, made_rows, c), dtype=torch.float32)
    latent = x.new_empty((n, rows, sizes["R"]), dtype=torch.float32)
    totals = x.new_empty((n, rows), dtype=torch.float32)
    _forward[(len(taps), n)](
        x, compressed, score, decode, table(starts(taps), x.device), made, latent, totals, places, rows, made_rows,
        compressed.stride(1), **sizes, PB=_places(x, sizes, 2 * DYNAMIC_TILE),
    )  # fmt: skip
    if excite is None:
        return made, latent, totals, None, None
    own = _attention_sizes(excite)
    mean = x.new_empty((n, c), dtype=torch.float32)
    hidden = x.new_empty((n, len(excite) * own["H"]), dtype=torch.float32)
    _attend[(n,)](
        x, squeeze, excite, made, mean, hidden, places, rows, made_rows, len(excite), **own,
        PB=max(16, MEAN_TILE // own["CB"]),
    )  # fmt: skip
    return made, latent, totals, mean, hidden


def dynamic_kernels_gradient(
    x, compressed, score, decode, taps, squeeze, excite, made, latent, totals, mean, hidden, dmade, weights
):
    """The gradients of x, of the compressed map and of all weights; None for those not requested or not given."""
    (n, places, c), rows, modules = x.shape, sum(taps), len(taps)
    made_rows = made.shape[1]
    sizes = _sizes(x, compressed, taps)
    tile = _places(x, sizes, DYNAMIC_TILE)
    blocks = triton.cdiv(places, tile)
    start, dweights = made, made.new_empty(0)
    if excite is not None:
        own, start = _attention_sizes(excite), torch.empty_like(mean)
        dweights = made.new_empty((n, 2, excite.numel()) if weights else 0)
        _attend_gradient[(n,)](
            squeeze, excite, made, mean, hidden, dmade, start, dweights, places, rows, made_rows, len(excite), **own,
            WEIGHTS=weights,
        )  # fmt: skip
    dx, dcompressed = torch.empty_like(x), x.new_empty(compressed.shape)
    dscore = made.new_empty((n * blocks, rows, c) if weights else 0)
    ddecode = made.new_empty((n, modules, sizes["R"], c) if weights else 0)
    _backward[(blocks, n)](
        x, compressed, score, decode, table(starts(taps), x.device), made, latent, totals, dmade, start,
        dx, dcompressed, dscore, ddecode, places, rows, made_rows, compressed.stride(1), modules, **sizes, PB=tile,
        WEIGHTS=weights, STARTS=excite is not None, num_warps=2 if sizes["CB"] > 32 or sizes["RB"] > 32 else 4,
    )  # fmt: skip
    if not weights:
        return dx, dcompressed, None, None, None, None
    found = dx, dcompressed, dscore.sum(0).to(score.dtype), ddecode.sum(0).transpose(1, 2).to(decode.dtype)
    if excite is None:
        return *found, None, None
    dsqueeze, dexcite = dweights.sum(0).to(excite.dtype)
    return *found, dsqueeze.view_as(squeeze), dexcite.view_as(excite)


@triton.jit
def _shifted(x_ptr, n, p, c, ok, dy, dx, height, width, C: tl.constexpr):
    """[PLACES, CB]: the values dy rows below and dx columns to the right of each position; 0 outside the map."""
    row, column = p // width + dy, p % width + dx
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    at = ((n * height + row).to(tl.int64) * width + column) * C
    return tl.load(x_ptr + at[:, None] + c[None, :], mask=ok & inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def _factor(channel_ptr, spatial_ptr, n, p, c, places, C: tl.constexpr, CHANNEL: tl.constexpr, SPATIAL: tl.constexpr,
            PLACES: tl.constexpr, CB: tl.constexpr):  # fmt: skip
    """1 + a + s, [PLACES, CB]."""
    factor = tl.full((PLACES, CB), 1.0, dtype=tl.float32)
    if CHANNEL:
        factor += tl.load(channel_ptr + n * C + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if SPATIAL:
        factor += tl.load(spatial_ptr + n * places + p, mask=p < places, other=0.0).to(tl.float32)[:, None]
    return factor


@triton.jit(do_not_specialize=NUMBERS)
def _apply(
    x_ptr, base_ptr, channel_ptr, spatial_ptr, kernels_ptr, y_ptr, places_ptr, height, width, k_n, k_c, k_y, k_x,
    C: tl.constexpr, CB: tl.constexpr, SIZE: tl.constexpr, DILATION: tl.constexpr, CHANNEL: tl.constexpr,
    SPATIAL: tl.constexpr, BACK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Calibrates x. With BACK, x is the output gradient, kernels are flipped, and the gradient of s is computed too."""
    n, places = tl.program_id(1), height * width
    p, c = tl.program_id(0) * PLACES + tl.arange(0, PLACES), tl.arange(0, CB)
    ok = (p < places)[:, None] & (c < C)[None, :]
    at = (n * places + p).to(tl.int64)[:, None] * C + c[None, :]
    x = tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
    y = x * _factor(channel_ptr, spatial_ptr, n, p, c, places, C, CHANNEL, SPATIAL, PLACES, CB)
    if SIZE > 0:
        for t in range(SIZE * SIZE):
            ty, tx = t // SIZE, t % SIZE
            dy, dx = (ty - SIZE // 2) * DILATION, (tx - SIZE // 2) * DILATION
            if BACK:
                dy, dx = -dy, -dx
            at_tap = kernels_ptr + n * k_n + c * k_c + ty * k_y + tx * k_x
            weight = tl.load(at_tap, mask=c < C, other=0.0).to(tl.float32)
            y += weight[None, :] * _shifted(x_ptr, n, p, c, ok, dy, dx, height, width, C)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=ok)
    if BACK and SPATIAL:
        base = tl.load(base_ptr + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(places_ptr + n * places + p, tl.sum(x * base, 1), mask=p < places)


@triton.jit(do_not_specialize=["height", "width"])
def _taps(
    dy_ptr, base_ptr, taps_ptr, height, width,
    C: tl.constexpr, CB: tl.constexpr, SIZE: tl.constexpr, DILATION: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The gradient of one tap of one sample's kernels, summed over all positions: taps [n, k², c]."""
    t, n = tl.program_id(0), tl.program_id(1)
    places = height * width
    c = tl.arange(0, CB)
    dy, dx = (t // SIZE - SIZE // 2) * DILATION, (t % SIZE - SIZE // 2) * DILATION
    total = tl.zeros((PLACES, CB), dtype=tl.float32)
    for start in range(0, places, PLACES):
        p = start + tl.arange(0, PLACES)
        ok = (p < places)[:, None] & (c < C)[None, :]
        gradient = tl.load(dy_ptr + (n * places + p).to(tl.int64)[:, None] * C + c[None, :], mask=ok, other=0.0)
        total += gradient.to(tl.float32) * _shifted(base_ptr, n, p, c, ok, dy, dx, height, width, C)
    tl.store(taps_ptr + (n * SIZE * SIZE + t) * C + c, tl.sum(total, 0), mask=c < C)


def _blocks(c):
    """Channels and positions of a tile."""
    channels = padded(c, 1)
    return {"CB": channels, "PLACES": max(16, TILE // channels)}


def _run(x, base, channel, spatial, kernels, dilation, places=None):
    n, h, w, c = x.shape
    y = torch.empty_like(x)
    # x is a placeholder for pointers that the kernel does not read.
    factors = [x if one is None else one.contiguous() for one in (channel, spatial)]
    taps, strides, size = (x, (0,) * 4, 0) if kernels is None else (kernels, kernels.stride(), kernels.shape[-1])
    blocks = _blocks(c)
    _apply[(triton.cdiv(h * w, blocks["PLACES"]), n)](
        x, base, *factors, taps, y, y if places is None else places, h, w, *strides,
        C=c, **blocks, SIZE=size, DILATION=dilation, CHANNEL=channel is not None,
        SPATIAL=spatial is not None, BACK=places is not None,
    )  # fmt: skip
    return y


def calibrate(x, channel, spatial, kernels, dilation):
    """x [n, h, w, c]; returns a tensor of the same shape."""
    return _run(x, x, channel, spatial, kernels, dilation)


def calibrate_gradient(x, channel, spatial, kernels, dilation, gradient):
    """The gradients of x, of s [n, h·w] (undefined without spatial attention) and of all taps [n, k², c], if any."""
    n, h, w, c = x.shape
    places = x.new_empty((n, h * w), dtype=torch.float32)
    dx = _run(gradient, x, channel, spatial, kernels, dilation, places)
    if kernels is None:
        return dx, places, None
    size, blocks = kernels.shape[-1], _blocks(c)
    # One tap reads no neighbours, so parts of an image may be samples. One program per sample does not fill a GPU.
    parts = _parts(n, h * w, blocks["PLACES"]) if size == 1 else 1
    taps = x.new_empty((n * parts, size * size, c), dtype=torch.float32)
    shape = (h, w) if parts == 1 else (h * w // parts, 1)
    _taps[(size * size, n * parts)](gradient, x, taps, *shape, C=c, **blocks, SIZE=size, DILATION=dilation)
    return dx, places, taps if parts == 1 else taps.view(n, parts, c).sum(1, keepdim=True)


def _parts(samples, places, block):
    """Equal parts of an image, a power of two: as many as leave two blocks of positions or more to each of them.

    All parts of all samples are along the second axis of a grid.
    """
    parts = 1
    while places % (2 * parts) == 0 and places // (2 * parts) >= 2 * block and samples * 2 * parts <= MAX_GRID:
        parts *= 2
    return parts
