"""Average pools whose windows neither overlap nor are padded: means of stride × stride pixels.

torch's own kernels for channels-last maps read value by value; their gradient took 16 times as long on an H200 as the
memory traffic needs. Windows at an odd border are the means of what they have, as with `ceil_mode=True`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.kernels.backend import runs_triton, triton_kernels


def window_mean(x: Tensor, stride: int) -> Tensor:
    """x [n, c, h, w] to the means [n, c, ⌈h/stride⌉, ⌈w/stride⌉]. Uses Triton kernels where available."""
    if not runs_triton(x) or not x.numel():
        return window_mean_reference(x, stride)
    result: Tensor = _WindowMean.apply(x, stride)  # type: ignore[no-untyped-call]
    return result


def window_mean_reference(x: Tensor, stride: int) -> Tensor:
    """The plain twin of `window_mean`."""
    return F.avg_pool2d(x, stride, stride, ceil_mode=True, count_include_pad=False)


class _WindowMean(torch.autograd.Function):
    """Channels-last, also its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: int) -> Tensor:
        ctx.stride, ctx.shape, ctx.dtype = stride, x.shape, x.dtype
        y = triton_kernels("window_mean").forward(x.permute(0, 2, 3, 1).contiguous(), stride)
        return y.permute(0, 3, 1, 2)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        if torch.is_grad_enabled():  # only the twin supports second derivatives
            probe = grad.new_zeros(ctx.shape).requires_grad_()
            y = window_mean_reference(probe, ctx.stride)
            return torch.autograd.grad(y, probe, grad, create_graph=True)[0], None
        rows = grad.permute(0, 2, 3, 1).to(ctx.dtype).contiguous()
        height, width = ctx.shape[2:]
        dx = triton_kernels("window_mean").backward(rows, height, width, ctx.stride)
        return dx.permute(0, 3, 1, 2), None
