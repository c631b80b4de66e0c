# mypy: ignore-errors
"""Triton kernels of `calibrate`: a program processes [PLACES, CB channels] of one sample and reads neighbours in place.

Sums are accumulated in float32. Kernels [n, c, k, k] may have any memory layout.
"""

import torch
import triton
import triton.language as tl

from softcell.kernels.backend import padded

TILE = 2048
"""Approximate size of a tile: positions × channels."""
NUMBERS = ["height", "width", "k_n", "k_c", "k_y", "k_x"]


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


def forward(x, channel, spatial, kernels, dilation):
    """x [n, h, w, c]; returns a tensor of the same shape."""
    return _run(x, x, channel, spatial, kernels, dilation)


def backward(x, channel, spatial, kernels, dilation, gradient):
    """The gradients of x, of s [n, h·w] (undefined without spatial attention) and of all taps [n, k², c], if any."""
    n, h, w, c = x.shape
    places = x.new_empty((n, h * w), dtype=torch.float32)
    dx = _run(gradient, x, channel, spatial, kernels, dilation, places)
    if kernels is None:
        return dx, places, None
    size, blocks = kernels.shape[-1], _blocks(c)
    # One tap reads no neighbours, so parts of an image may be samples. One program per sample does not fill a GPU.
    parts = _parts(h * w, blocks["PLACES"]) if size == 1 else 1
    taps = x.new_empty((n * parts, size * size, c), dtype=torch.float32)
    shape = (h, w) if parts == 1 else (h * w // parts, 1)
    _taps[(size * size, n * parts)](gradient, x, taps, *shape, C=c, **blocks, SIZE=size, DILATION=dilation)
    return dx, places, taps if parts == 1 else taps.view(n, parts, c).sum(1, keepdim=True)


def _parts(places, block):
    """Equal parts of an image, a power of two: as many as leave two blocks of positions or more to each of them."""
    parts = 1
    while places % (2 * parts) == 0 and places // (2 * parts) >= 2 * block:
        parts *= 2
    return parts
