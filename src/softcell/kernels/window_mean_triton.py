# mypy: ignore-errors
"""Triton kernels of `window_mean`. A program processes a tile of ROWS pixels × COLUMNS channels of what it writes."""

import torch
import triton
import triton.language as tl

VALUES = 2048
"""Values of a tile: 16 for each thread of four warps."""
WIDEST = 64
"""Channels of a tile at most."""


@triton.jit
def _tile(pixels, height, width, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of a tile of maps [n, height, width, C]: sample, row and column [ROWS, 1], channels, offsets and which exist."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sample = (m // (height * width)).to(tl.int64)
    at = m.to(tl.int64)[:, None] * C + c[None, :]
    ok = (m < pixels)[:, None] & (c < C)[None, :]
    return sample[:, None], ((m // width) % height)[:, None], (m % width)[:, None], c[None, :], at, ok


@triton.jit
def _count(i, j, height, width, S: tl.constexpr):
    """Pixels of the window (i, j)."""
    return (tl.minimum(S, height - i * S) * tl.minimum(S, width - j * S)).to(tl.float32)


@triton.jit(do_not_specialize=["pixels", "height", "width"])
def _means(
    x_ptr, y_ptr, pixels, height, width, S: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """pixels: of y."""
    down, across = tl.cdiv(height, S), tl.cdiv(width, S)
    sample, i, j, c, at, ok = _tile(pixels, down, across, C, ROWS, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for a in tl.static_range(S):
        for b in tl.static_range(S):
            here = ok & (i * S + a < height) & (j * S + b < width)
            place = ((sample * height + i * S + a) * width + j * S + b) * C + c
            total += tl.load(x_ptr + place, mask=here, other=0.0).to(tl.float32)
    y = total / _count(i, j, height, width, S)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["pixels", "height", "width"])
def _spread(
    dy_ptr, dx_ptr, pixels, height, width, S: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """pixels: of dx."""
    down, across = tl.cdiv(height, S), tl.cdiv(width, S)
    sample, row, column, c, at, ok = _tile(pixels, height, width, C, ROWS, COLUMNS)
    i, j = row // S, column // S
    dy = tl.load(dy_ptr + ((sample * down + i) * across + j) * C + c, mask=ok, other=0.0).to(tl.float32)
    dx = dy / _count(i, j, height, width, S)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=ok)


def _launch(kernel, given, out, height, width, stride):
    *_, c = out.shape
    columns = min(WIDEST, triton.next_power_of_2(c))
    own = {"C": c, "ROWS": VALUES // columns, "COLUMNS": columns}
    pixels = out.numel() // c
    grid = (triton.cdiv(pixels, own["ROWS"]), triton.cdiv(c, columns))
    kernel[grid](given, out, pixels, height, width, S=stride, **own)
    return out


def forward(x, stride):
    """x [n, h, w, c] without gaps to [n, ⌈h/stride⌉, ⌈w/stride⌉, c]."""
    n, height, width, c = x.shape
    y = torch.empty(n, -(-height // stride), -(-width // stride), c, dtype=x.dtype, device=x.device)
    return _launch(_means, x, y, height, width, stride)


def backward(dy, height, width, stride):
    """dy without gaps; returns the gradient of maps of height × width pixels."""
    dx = torch.empty(dy.shape[0], height, width, dy.shape[3], dtype=dy.dtype, device=dy.device)
    return _launch(_spread, dy, dx, height, width, stride)
