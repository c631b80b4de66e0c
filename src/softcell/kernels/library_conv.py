"""Convolutions of wide maps by PyTorch's library (cuDNN on a GPU), inside a fused cell.

The kernels of `taps` compute addresses for every tap and suit narrow maps. From 128 channels on, a 3×3 convolution is
limited by matrix products, at which libraries are better. Everything around the convolutions stays fused: a kernel
copies an output to its plane and computes its statistics in the same pass; norm, ReLU, drop-path, sums and pools are as
before. This applies to programs whose convolutions read no negative values, since a library has no ReLU before them.

Input gradients are values of the computation's dtype instead of float32, as those of modules are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.kernels.backend import runs_triton, triton_kernels
from softcell.kernels.taps import Group, Share, tile_moments


def convolve(
    x: Tensor, weights: Tensor, y: Tensor, partial: Tensor | None, groups: Sequence[Group], measured: range
) -> None:
    """`taps.convolve` of values that are not negative. measured: the planes whose statistics are needed."""
    for g in groups:
        for number, kernel in enumerate(_kernels(weights, g, x.shape[-1])):
            output = F.conv2d(_image(x[g.source]), kernel, padding=g.window.padding)
            plane = g.first + number
            store(_rows_last(output), y, partial if plane in measured else None, plane)


def store(rows: Tensor, y: Tensor, partial: Tensor | None, plane: int) -> None:
    """y[plane] = rows, and the statistics of its tiles.

    rows [n, h, w, c]; y [planes, n, h, w, c]; partial [2, tiles, planes, c] as in `taps.convolve`, or None.
    """
    (triton_kernels("library_conv").store if runs_triton(y) else store_reference)(rows, y, partial, plane)


def store_reference(rows: Tensor, y: Tensor, partial: Tensor | None, plane: int) -> None:
    y[plane] = rows
    if partial is not None:
        partial[:, :, plane] = tile_moments(rows[None])[:, :, 0]


def shares(groups: Sequence[Group]) -> list[Share]:
    """One part of the input gradient for each convolution, ordered by source."""
    parts = []
    for g in sorted(groups, key=lambda g: g.source):
        parts += [Share(g, k * g.window.taps, (k + 1) * g.window.taps) for k in range(g.count)]
    return parts


def input_gradient(x: Tensor, dy: Tensor, weights: Tensor, parts: Sequence[Share]) -> Tensor:
    """Part i of the gradient with respect to the input in row i: [parts, n, h, w, c].

    x and dy [planes, n, h, w, c]; weights [size], flat.
    """
    found = []
    for part in parts:
        g = part.group
        number = part.start // g.window.taps
        kernel = list(_kernels(weights, g, x.shape[-1]))[number]
        gradient, _ = _gradients(x[g.source], dy[g.first + number], kernel, g, of_input=True)
        assert gradient is not None
        found.append(_rows_last(gradient))
    if not found:
        return dy.new_empty(0, *x.shape[1:])
    return found[0][None] if len(found) == 1 else torch.stack(found)


def weight_gradient(x: Tensor, dy: Tensor, weights: Tensor, out: Tensor, groups: Sequence[Group]) -> None:
    """out[weights of g] = gradient with respect to g's weights; out [size] float32, flat."""
    c = x.shape[-1]
    targets, found = [], []
    for g in groups:
        for number, kernel in enumerate(_kernels(weights, g, c)):
            _, gradient = _gradients(x[g.source], dy[g.first + number], kernel, g, of_input=False)
            assert gradient is not None
            at = g.offset + number * kernel.numel()
            targets.append(out[at : at + kernel.numel()].view(c, g.window.size, g.window.size, c))
            found.append(gradient.permute(0, 2, 3, 1))
    if found:
        torch._foreach_copy_(targets, found)


def _kernels(weights: Tensor, g: Group, c: int) -> Iterator[Tensor]:
    """Views of the kernels of a group, each [c_out, c_in, size, size]."""
    length = c * g.window.taps * c
    for number in range(g.count):
        at = g.offset + number * length
        yield weights[at : at + length].view(c, g.window.size, g.window.size, c).permute(0, 3, 1, 2)


def _gradients(
    x: Tensor, dy: Tensor, kernel: Tensor, g: Group, *, of_input: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of one convolution: of its input [n, c, h, w], or of its kernel [c_out, c_in, size, size]."""
    padding = [g.window.padding] * 2
    found = torch.ops.aten.convolution_backward(
        *(_image(dy), _image(x), kernel, None, [1, 1], padding, [1, 1], False, [0, 0], 1),
        [of_input, not of_input, False],
    )
    return found[0], found[1]


def _image(plane: Tensor) -> Tensor:
    """[n, h, w, c] as [n, c, h, w], channels-last."""
    return plane.permute(0, 3, 1, 2)


def _rows_last(image: Tensor) -> Tensor:
    """[n, c, h, w] as [n, h, w, c] without gaps: a view of what is channels-last."""
    return image.permute(0, 2, 3, 1).contiguous()
