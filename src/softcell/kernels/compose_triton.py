# mypy: ignore-errors
"""Triton kernels of `taps.compose`: one program per convolution and block of output channels, or per tap.

Products and sums are computed in float32, whatever the dtype of factors and gradients.
"""

import triton
import triton.language as tl

from softcell.kernels.backend import table


@triton.jit
def _compose(factors_ptr, out_ptr, recipes_ptr, C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr):
    row = recipes_ptr + tl.program_id(0) * 5
    kind, taps, matrix = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    depthwise, target = tl.load(row + 3), tl.load(row + 4)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, CB)
    ok = (o < C)[:, None] & (c < C)[None, :]
    # Values of `Kind`: 0 product, 1 halves, 2 copy.
    dense = tl.load(factors_ptr + matrix + (o * C)[:, None] + c[None, :], mask=ok & (kind < 2), other=0.0).to(
        tl.float32
    )
    for tap in range(taps):
        at = (o * (taps * C))[:, None] + (tap * C + c)[None, :]
        factor = tl.load(factors_ptr + depthwise + c * taps + tap, mask=(c < C) & (kind == 0), other=1.0).to(tl.float32)
        own = tl.where(o < C // 2, 0, taps - 1) == tap
        value = dense * tl.where((kind == 1) & (own == 0), 0.0, 1.0)[:, None] * factor[None, :]
        copied = tl.load(factors_ptr + matrix + at, mask=ok & (kind == 2), other=0.0).to(tl.float32)
        tl.store(out_ptr + target + at, tl.where(kind == 2, copied, value), mask=ok)


@triton.jit
def _matrix_gradient(
    factors_ptr, gradient_ptr, out_ptr, recipes_ptr, C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr
):
    row = recipes_ptr + tl.program_id(0) * 5
    kind, taps, matrix = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    depthwise, target = tl.load(row + 3), tl.load(row + 4)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, CB)
    ok = (o < C)[:, None] & (c < C)[None, :]
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for tap in range(taps):
        at = (o * (taps * C))[:, None] + (tap * C + c)[None, :]
        g = tl.load(gradient_ptr + target + at, mask=ok, other=0.0).to(tl.float32)
        factor = tl.load(factors_ptr + depthwise + c * taps + tap, mask=(c < C) & (kind == 0), other=1.0).to(tl.float32)
        own = tl.where(o < C // 2, 0, taps - 1) == tap
        total += g * tl.where((kind == 1) & (own == 0), 0.0, 1.0)[:, None] * factor[None, :]
        tl.store(out_ptr + matrix + at, g, mask=ok & (kind == 2))
    tl.store(out_ptr + matrix + (o * C)[:, None] + c[None, :], total, mask=ok & (kind < 2))


@triton.jit
def _depthwise_gradient(
    factors_ptr, gradient_ptr, out_ptr, recipes_ptr, C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr
):
    row = recipes_ptr + tl.program_id(0) * 5
    kind, taps, matrix = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    depthwise, target = tl.load(row + 3), tl.load(row + 4)
    tap = tl.program_id(1)
    wanted = (kind == 0) & (tap < taps)
    c = tl.arange(0, CB)
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for start in range(0, C, BLOCK):
        o = start + tl.arange(0, BLOCK)
        ok = (o < C)[:, None] & (c < C)[None, :] & wanted
        g = tl.load(gradient_ptr + target + (o * (taps * C))[:, None] + (tap * C + c)[None, :], mask=ok, other=0.0).to(
            tl.float32
        )
        total += g * tl.load(factors_ptr + matrix + (o * C)[:, None] + c[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + depthwise + c * taps + tap, tl.sum(total, 0), mask=(c < C) & wanted)


def _listed(recipes, device):
    return table(tuple((int(r.kind), r.taps, r.matrix, r.depthwise, r.target) for r in recipes), device)


def _sizes(channels):
    wide = triton.next_power_of_2(channels)
    return {"C": channels, "CB": wide, "BLOCK": min(16, wide)}


def compose(factors, out, recipes, channels):
    sizes = _sizes(channels)
    grid = (len(recipes), triton.cdiv(channels, sizes["BLOCK"]))
    _compose[grid](factors, out, _listed(recipes, factors.device), **sizes)


def compose_gradient(factors, gradient, factor_gradient, recipes, channels):
    sizes, listed = _sizes(channels), _listed(recipes, factors.device)
    grid = (len(recipes), triton.cdiv(channels, sizes["BLOCK"]))
    _matrix_gradient[grid](factors, gradient, factor_gradient, listed, **sizes)
    most = max((r.taps for r in recipes if int(r.kind) == 0), default=0)
    if most:
        _depthwise_gradient[(len(recipes), most)](factors, gradient, factor_gradient, listed, **sizes)
