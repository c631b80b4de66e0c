"""Many convolutions over a few images at once, with their batch statistics.

Values are stored in *planes*: a buffer [planes, n, h, w, c] holds one channels-last image batch per plane. A `Group`
convolves the ReLU of one plane with `count` kernels of one window, each of which fills a separate plane, so that the
outgoing edges of a node read it once. A depthwise convolution followed by a pointwise one is a convolution with kernel
pointwise[o, c] · depthwise[c, tap]: on matrix units this is cheaper than the pair and needs no intermediate value, and
the gradients of both factors follow from its weight gradient by the product rule.

`compose` makes these kernels from the factors that modules hold, and `compose_gradient` the gradients of the factors. A
`Recipe` describes one convolution's kernel [c_out, taps, c_in] by the positions of its factors in one flat vector:

    product   pointwise[o, c] · depthwise[c, tap]
    halves    matrix[o, c] at the first tap for the first half of the outputs, at the last tap for the others
    copy      the kernel itself

Every function writes into a given buffer and has a plain PyTorch twin of the same signature named `_reference`, which
is also the CPU path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.kernels.backend import runs_triton, triton_kernels

TILE = 128
"""Rows (pixels) per tile: statistics are computed per tile, then merged."""


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a convolution: size × size taps; h input rows give ⌈h / stride⌉ output rows."""

    size: int
    dilation: int
    padding: int
    stride: int

    @property
    def taps(self) -> int:
        return self.size**2


@dataclass(frozen=True, slots=True)
class Group:
    """`count` convolutions from plane `source` to planes `first`…; weights at `offset`, [count, c_out, taps, c_in]."""

    window: Window
    source: int
    first: int
    count: int
    offset: int


def tiles(rows: int) -> int:
    return -(-rows // TILE)


def convolve(x: Tensor, weights: Tensor, y: Tensor, partial: Tensor | None, groups: Sequence[Group]) -> None:
    """y[planes of g] = convolution of max(x[g.source], 0).

    x [planes, n, h, w, c]; weights [size], flat; y [planes, n, h', w', c]; partial [2, tiles, planes, c] float32: sums
    and centred sums of squares per tile of rows, for all written planes.
    """
    if groups:
        (triton_kernels("taps").convolve if runs_triton(x) else convolve_reference)(x, weights, y, partial, groups)


def convolve_reference(x: Tensor, weights: Tensor, y: Tensor, partial: Tensor | None, groups: Sequence[Group]) -> None:
    for g in groups:
        out = apply_group(x[g.source], weights, g, y.shape[2:4])
        y[g.first : g.first + g.count] = out
        if partial is not None:
            partial[:, :, g.first : g.first + g.count] = tile_moments(y[g.first : g.first + g.count])


def masked_input_gradient(
    dy: Tensor, weights: Tensor, x: Tensor, dx: Tensor, partial: Tensor, groups: Sequence[Group]
) -> None:
    """dx[g.source] = [x > 0] · convolutionᵀ(dy[g.first]), for groups of one convolution with stride 1 each.

    All buffers are [planes, n, h, w, c]; partial [2, tiles, planes, c] float32 receives the sums of dx and of dx · x
    per tile of rows, needed for the gradient of the norm before the ReLU.
    """
    if groups:
        kernel = triton_kernels("taps").masked_input_gradient if runs_triton(x) else masked_input_gradient_reference
        kernel(dy, weights, x, dx, partial, groups)


def masked_input_gradient_reference(
    dy: Tensor, weights: Tensor, x: Tensor, dx: Tensor, partial: Tensor, groups: Sequence[Group]
) -> None:
    for g in groups:
        assert g.count == 1 and g.window.stride == 1
        dx[g.source] = (_transposed(dy, weights, g, x.shape[1:]) * (x[g.source] > 0)).to(dx.dtype)
        partial[:, :, g.source] = tile_sums(x[g.source], dx[g.source], partial.dtype)


@dataclass(frozen=True, slots=True)
class Share:
    """A part of an input gradient: taps `start`…`stop` (counted over the group's convolutions) of one group."""

    group: Group
    start: int
    stop: int


def shares(groups: Sequence[Group], rows: int, channels: int) -> list[Share]:
    """Splits input gradients into parts that run in parallel if there are few rows; ordered by source."""
    busy = 264  # two programs per multiprocessor of a large GPU
    columns = -(-channels // 64)
    found = []
    for g in sorted(groups, key=lambda g: g.source):
        total = g.count * g.window.taps
        parts = max(1, min(total * channels // 512, -(-busy // (tiles(rows) * columns * len(groups)))))
        edges = [total * i // parts for i in range(parts + 1)]
        found += [Share(g, a, b) for a, b in pairwise(edges) if a < b]
    return found


def input_gradient(dy: Tensor, weights: Tensor, out: Tensor, parts: Sequence[Share]) -> None:
    """out[i] = part i of the gradient with respect to the input, before the ReLU's mask.

    dy [planes, n, h', w', c]; out [parts, n, h, w, c] float32.
    """
    if parts:
        kernel = triton_kernels("taps").input_gradient if runs_triton(dy) else input_gradient_reference
        kernel(dy, weights, out, parts)


def input_gradient_reference(dy: Tensor, weights: Tensor, out: Tensor, parts: Sequence[Share]) -> None:
    channels = dy.shape[-1]
    for i, part in enumerate(parts):
        g = part.group
        wanted = torch.zeros(g.count, 1, g.window.taps, 1, dtype=weights.dtype, device=weights.device)
        wanted.view(-1)[part.start : part.stop] = 1
        size = g.count * channels * g.window.taps * channels
        own = weights[g.offset : g.offset + size].view(g.count, channels, g.window.taps, channels) * wanted
        alone = Group(g.window, 0, g.first, g.count, 0)
        out[i] = _transposed(dy, own.flatten(), alone, out.shape[1:])


def weight_gradient(x: Tensor, dy: Tensor, out: Tensor, groups: Sequence[Group]) -> None:
    """out[weights of g] = gradient with respect to g's weights; x and dy as in `convolve`, out [size] float32, flat."""
    if groups:
        kernel = triton_kernels("taps").weight_gradient if runs_triton(x) else weight_gradient_reference
        kernel(x, dy, out, groups)


def weight_gradient_reference(x: Tensor, dy: Tensor, out: Tensor, groups: Sequence[Group]) -> None:
    channels = x.shape[-1]
    for g in groups:
        size = g.count * channels * g.window.taps * channels
        # A backward pass runs with gradients disabled, but this needs them.
        with torch.enable_grad():
            probe = torch.zeros(size, dtype=x.dtype, device=x.device, requires_grad=True)
            moved = Group(g.window, g.source, g.first, g.count, 0)
            y = apply_group(x[g.source].detach(), probe, moved, dy.shape[2:4])
        (gradient,) = torch.autograd.grad(y, probe, dy[g.first : g.first + g.count])
        out[g.offset : g.offset + size] = gradient


def apply_group(image: Tensor, weights: Tensor, g: Group, size: Sequence[int], *, relu: bool = True) -> Tensor:
    """One group with PyTorch's convolution: image [n, h, w, c]; returns [count, n, h', w', c]; differentiable."""
    (n, height, width, c), window = image.shape, g.window
    count = g.count * c * window.taps * c
    kernel = weights[g.offset : g.offset + count].view(g.count * c, window.size, window.size, c).permute(0, 3, 1, 2)
    x = image.permute(0, 3, 1, 2)
    reach = (window.size - 1) * window.dilation + 1
    # Padding after the last row and column; negative if the last window ends before them.
    after = [
        (s - 1) * window.stride + reach - length - window.padding
        for s, length in zip(size, (height, width), strict=True)
    ]
    x = F.pad(x.relu() if relu else x, (window.padding, after[1], window.padding, after[0]))
    y = F.conv2d(x, kernel, stride=window.stride, dilation=window.dilation)
    return y.view(n, g.count, c, *size).permute(1, 0, 3, 4, 2)


def tile_moments(y: Tensor) -> Tensor:
    """Sums and centred sums of squares per tile of rows, [2, tiles, planes, c], of [planes, n, h, w, c]."""
    planes, c = y.shape[0], y.shape[-1]
    rows = y.reshape(planes, -1, c).to(torch.promote_types(y.dtype, torch.float32))
    found = []
    for chunk in torch.split(rows, TILE, dim=1):
        total = chunk.sum(1)
        centred = chunk - total[:, None] / chunk.shape[1]
        found.append(torch.stack([total, centred.square().sum(1)]))
    return torch.stack(found, dim=1)


def tile_sums(y: Tensor, dy: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of dy and of dy · y per tile of rows, [2, tiles, c], of [n, h, w, c], computed in `dtype`."""
    wide = dy.flatten(0, 2).to(dtype)
    both = torch.stack([wide, wide * y.flatten(0, 2)])
    return F.pad(both, (0, 0, 0, -len(wide) % TILE)).view(2, -1, TILE, y.shape[-1]).sum(2)


def _transposed(dy: Tensor, weights: Tensor, g: Group, shape: Sequence[int]) -> Tensor:
    """The gradient of `apply_group`, without its ReLU, with respect to its image."""
    with torch.enable_grad():
        image = torch.zeros(tuple(shape), dtype=dy.dtype, device=dy.device, requires_grad=True)
        y = apply_group(image, weights.detach(), g, dy.shape[2:4], relu=False)
    return torch.autograd.grad(y, image, dy[g.first : g.first + g.count])[0]


class Kind(IntEnum):
    """How a kernel follows from its factors; see the top of this file."""

    PRODUCT = 0
    HALVES = 1
    COPY = 2


@dataclass(frozen=True, slots=True)
class Recipe:
    """One convolution's kernel from its factors. All offsets are positions in flat vectors.

    matrix: offset of the pointwise factor, the halves' matrix or the kernel; depthwise: of [c, taps]; target: of the
    kernel.
    """

    kind: Kind
    taps: int
    matrix: int
    depthwise: int
    target: int


def compose(factors: Tensor, out: Tensor, recipes: Sequence[Recipe], channels: int) -> None:
    """Writes kernels to out [size] from factors [any], both flat."""
    kernel = triton_kernels("compose").compose if runs_triton(factors) else compose_reference
    kernel(factors, out, recipes, channels)


def compose_reference(factors: Tensor, out: Tensor, recipes: Sequence[Recipe], channels: int) -> None:
    for r in recipes:
        size = channels * r.taps * channels
        out[r.target : r.target + size] = _kernel(factors, r, channels).flatten()


def compose_gradient(
    factors: Tensor, gradient: Tensor, factor_gradient: Tensor, recipes: Sequence[Recipe], channels: int
) -> None:
    """Writes factor_gradient, laid out like `factors`, from the gradient [size] of `compose`'s result."""
    kernel = triton_kernels("compose").compose_gradient if runs_triton(factors) else compose_gradient_reference
    kernel(factors, gradient, factor_gradient, recipes, channels)


def compose_gradient_reference(
    factors: Tensor, gradient: Tensor, factor_gradient: Tensor, recipes: Sequence[Recipe], channels: int
) -> None:
    # A backward pass runs with gradients disabled, but this needs them.
    with torch.enable_grad():
        probe = factors.detach().requires_grad_()
        kernels = [_kernel(probe, r, channels).flatten() for r in recipes]
    given = [gradient[r.target : r.target + len(k)] for r, k in zip(recipes, kernels, strict=True)]
    factor_gradient.copy_(torch.autograd.grad(kernels, probe, given)[0])


def _kernel(factors: Tensor, r: Recipe, c: int) -> Tensor:
    """The kernel [c_out, taps, c_in]; differentiable."""
    if r.kind is Kind.COPY:
        return factors[r.matrix : r.matrix + c * r.taps * c].view(c, r.taps, c)
    matrix = factors[r.matrix : r.matrix + c * c].view(c, 1, c)
    if r.kind is Kind.PRODUCT:
        return matrix * factors[r.depthwise : r.depthwise + c * r.taps].view(c, r.taps).t()[None]
    where = torch.zeros(c, r.taps, 1, dtype=factors.dtype, device=factors.device)
    where[: c // 2, 0] = 1
    where[c // 2 :, -1] = 1
    return matrix * where


def flat_kernels(factors: Tensor, recipes: Sequence[Recipe], channels: int) -> Tensor:
    """`compose` in plain PyTorch, for derivatives of any order."""
    return torch.cat([_kernel(factors, r, channels).flatten() for r in sorted(recipes, key=lambda r: r.target)])
