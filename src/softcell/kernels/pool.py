"""3×3 pooling over planes [planes, n, h, w, c], and the one pass that sums all parts of a node's gradient.

The maximum and the average of a node read it once. The maximum stores the winning tap (the first of equal values, as in
PyTorch); the average does not count padding. Each function has a plain PyTorch twin named `_reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.kernels.backend import runs_triton, triton_kernels
from softcell.kernels.norm import scaled
from softcell.kernels.taps import Group, convolve_reference, tile_moments

NONE = -1


@dataclass(frozen=True, slots=True)
class Pool:
    """Pools of plane `source`: planes of the maximum and of the average, or NONE.

    `slot` is the position of the winning taps of the maximum.
    """

    source: int
    largest: int
    average: int
    slot: int
    stride: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """All outputs of a node: parts first…first+count-1 of the convolutions' input gradient, its pools, and identities.

    `identities`: (plane of the target node, index of the mixing weight, choice). With weights per channel, the index is
    0: the first row of such a mix is ones. `adds`: accumulate into the node's gradient. `masked`: the convolutions
    read the ReLU of the node.
    """

    source: int
    first: int
    count: int
    identities: tuple[tuple[int, int, int], ...]
    pool: Pool | None
    adds: bool
    masked: bool = True


def pool(
    x: Tensor, y: Tensor, winners: Tensor, partial: Tensor | None, pools: Sequence[Pool], *, copies: bool = False
) -> None:
    """Fills the planes of `pools` in y [planes, n, h', w', c] from x [planes, n, h, w, c].

    winners [slots, n, h', w', c] uint8: the winning tap; partial as in `convolve`. copies: also copy the sources of the
    pools, which have no strides then, to the same planes of y.
    """
    if pools:
        kernel = triton_kernels("pool").pool if runs_triton(x) else pool_reference
        kernel(x, y, winners, partial, pools, copies=copies)


def pool_reference(
    x: Tensor, y: Tensor, winners: Tensor, partial: Tensor | None, pools: Sequence[Pool], *, copies: bool = False
) -> None:
    for p in pools:
        if copies:
            y[p.source] = x[p.source]
        image = x[p.source].permute(0, 3, 1, 2)
        if p.largest != NONE:
            value, where = F.max_pool2d(image, 3, p.stride, 1, return_indices=True)
            y[p.largest] = value.permute(0, 2, 3, 1)
            winners[p.slot] = _tap(where, image.shape[-1], p.stride).permute(0, 2, 3, 1).to(torch.uint8)
        if p.average != NONE:
            y[p.average] = average_pool(image, p.stride).permute(0, 2, 3, 1)
        for plane in (p.largest, p.average):
            if partial is not None and plane != NONE:
                partial[:, :, plane] = tile_moments(y[plane : plane + 1])[:, :, 0]


MAX_TOGETHER = 64
"""Channels up to which averages and convolutions share a launch: more values of a tile do not fit the registers."""


def convolve_and_pool(
    x: Tensor,
    weights: Tensor,
    y: Tensor,
    partial: Tensor | None,
    groups: Sequence[Group],
    pools: Sequence[Pool],
    *,
    measured: bool,
    copies: bool,
) -> None:
    """`convolve` and `pool`, for averages only, by one launch; measured: pools write to `partial`, too."""
    kernel = triton_kernels("pool").convolve_and_pool if runs_triton(x) else convolve_and_pool_reference
    kernel(x, weights, y, partial, groups, pools, measured=measured, copies=copies)


def convolve_and_pool_reference(
    x: Tensor,
    weights: Tensor,
    y: Tensor,
    partial: Tensor | None,
    groups: Sequence[Group],
    pools: Sequence[Pool],
    *,
    measured: bool,
    copies: bool,
) -> None:
    pool_reference(x, y, y, partial if measured else None, pools, copies=copies)
    convolve_reference(x, weights, y, partial, groups)


def gather_gradient(
    x: Tensor,
    parts: Tensor,
    dy: Tensor,
    dx: Tensor,
    mix: Tensor,
    factors: Tensor | None,
    winners: Tensor,
    leaving: Sequence[Leaving],
) -> None:
    """dx[source] = (previous value) + [x > 0] · Σ parts + Σ factors · mix · dy[target] + gradients of the pools.

    Without the factor [x > 0] where `masked` is false, which is the same for all sources. x and dx [planes, n, h, w,
    c]; parts [parts, n, h, w, c], float32 or like x; dy [planes, n, h', w', c]; mix [weights] or [1 + 2 · norms, c];
    factors [choices, n] of drop-path or None.
    """
    if leaving:
        kernel = triton_kernels("pool").gather_gradient if runs_triton(x) else gather_gradient_reference
        kernel(x, parts, dy, dx, mix, factors, winners, leaving)


def gather_gradient_reference(
    x: Tensor,
    parts: Tensor,
    dy: Tensor,
    dx: Tensor,
    mix: Tensor,
    factors: Tensor | None,
    winners: Tensor,
    leaving: Sequence[Leaving],
) -> None:
    for one in leaving:
        image = x[one.source]
        total = parts[one.first : one.first + one.count].sum(0)
        if one.masked:
            total = total * (image > 0)
        if one.adds:
            total = total + dx[one.source]
        for plane, weight, choice in one.identities:
            total = total + scaled(mix[weight] * dy[plane], factors, choice)
        if one.pool is not None:
            total = total + _pool_gradient(image, dy, winners, one.pool)
        dx[one.source] = total.to(dx.dtype)


def _pool_gradient(image: Tensor, dy: Tensor, winners: Tensor, p: Pool) -> Tensor:
    n, _, width, c = image.shape
    total = torch.zeros_like(image)
    if p.largest != NONE:
        rows, columns = (torch.arange(s, device=image.device) for s in dy.shape[2:4])
        tap = winners[p.slot].long()
        row = rows[:, None, None] * p.stride - 1 + tap // 3
        column = columns[None, :, None] * p.stride - 1 + tap % 3
        flat = (row * width + column).flatten(1, 2)
        total.view(n, -1, c).scatter_add_(1, flat, dy[p.largest].flatten(1, 2))
    if p.average != NONE:
        # A backward pass runs with gradients disabled, but this needs them.
        with torch.enable_grad():
            probe = torch.zeros_like(image).permute(0, 3, 1, 2).requires_grad_()
            y = average_pool(probe, p.stride)
        total += torch.autograd.grad(y, probe, dy[p.average].permute(0, 3, 1, 2))[0].permute(0, 2, 3, 1)
    return total


def average_pool(x: Tensor, stride: int) -> Tensor:
    """PyTorch's 3×3 average of [n, c, h, w] without padding in the count.

    The copy to channels-first is needed: on CUDA the gradient of a padded average is wrong for channels-last inputs
    (pytorch issue 188344, in torch 2.11).
    """
    return F.avg_pool2d(x.contiguous(), 3, stride, 1, count_include_pad=False)


def _tap(where: Tensor, width: int, stride: int) -> Tensor:
    """Converts PyTorch's flat indices of maxima [n, c, h', w'] to taps 0…8 of each window."""
    rows, columns = (torch.arange(s, device=where.device) for s in where.shape[-2:])
    row = where // width - (rows[:, None] * stride - 1)
    column = where % width - (columns * stride - 1)
    return row * 3 + column
