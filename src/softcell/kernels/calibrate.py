"""Applies attentions and per-sample kernels to a map (NOS, Eq 3): base ⊙ (1 + A) + base ⊛ D.

    y[p] = base[p] (1 + a + s[p]) + Σ_t base[p + o_t] d_t

for every sample and channel; a has one value per channel, s one per position, d one per channel and tap. Plain
operations need a dozen launches forward and two dozen backward. Many of them are copies, since torch needs the samples
of such a convolution folded into its channels. The Triton kernels read channels-last maps directly, with one launch
forward and two backward. Attentions alone run by the same kernels: a is then a kernel of one tap, and with s alone
there is no tap. `calibrate_reference` is the twin of `calibrate`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.kernels.backend import by_twin, runs_triton, triton_kernels


def convolve(x: Tensor, kernels: Tensor, dilation: int = 1) -> Tensor:
    """x ⊛ D: convolves every channel of every sample with a separate kernel, with "same" padding.

    x [n, c, h, w] and kernels [n, c, k, k]; returns [n, c, h, w]. The batch is folded into the groups of one
    convolution.
    """
    n, c, height, width = x.shape
    size = kernels.shape[-1]
    folded = x.reshape(1, n * c, height, width)
    weight = kernels.reshape(n * c, 1, size, size).to(x.dtype)
    padding = dilation * (size // 2)
    return F.conv2d(folded, weight, padding=padding, dilation=dilation, groups=n * c).reshape(n, c, height, width)


def calibrate(
    base: Tensor, channel: Tensor | None, spatial: Tensor | None, kernels: Tensor | None, dilation: int = 1
) -> Tensor:
    """Maps base [n, c, h, w], channel [n, c, 1, 1], spatial [n, 1, h, w], kernels [n, c, k, k] to [n, c, h, w]."""
    # torch.compile generates kernels from the plain form; a Triton call here would break its graph.
    if torch.compiler.is_compiling() or not runs_triton(base):
        return calibrate_reference(base, channel, spatial, kernels, dilation)
    if kernels is None:
        if channel is None and spatial is None:
            return base
        channel, kernels = None, channel
    elif kernels.shape[-1] % 2 == 0:
        return calibrate_reference(base, channel, spatial, kernels, dilation)
    return _Calibrate.apply(base, channel, spatial, kernels, dilation)  # type: ignore[no-any-return, no-untyped-call]


def calibrate_reference(
    base: Tensor, channel: Tensor | None, spatial: Tensor | None, kernels: Tensor | None, dilation: int = 1
) -> Tensor:
    """The plain twin of `calibrate`; without kernels it applies only the attentions."""
    # The convolution runs first, so that its backward pass runs last: the gradient of `base` then has the memory layout
    # of `base`. The layout of the convolution would slow down every preceding norm.
    convolved = None if kernels is None else convolve(base, kernels, dilation)
    attentions = [a for a in (channel, spatial) if a is not None]
    value = base
    if attentions:
        # Permuted to [n, h, w, c], so that broadcast sums have the layout of the maps. 1 is added to the smallest
        # tensor.
        first, *rest = (a.permute(0, 2, 3, 1) for a in sorted(attentions, key=lambda one: one.numel()))
        value = base * sum(rest, start=1 + first).permute(0, 3, 1, 2)
    return value if convolved is None else value + convolved


class _Calibrate(torch.autograd.Function):
    """`calibrate` by Triton kernels."""

    @staticmethod
    def forward(
        ctx: Any, base: Tensor, channel: Tensor | None, spatial: Tensor | None, kernels: Tensor | None, dilation: int
    ) -> Tensor:
        ctx.save_for_backward(base, channel, spatial, kernels)
        ctx.dilation = dilation
        rows = base.permute(0, 2, 3, 1).contiguous()
        y = triton_kernels("calibrate").forward(rows, channel, spatial, kernels, dilation)
        return y.permute(0, 3, 1, 2)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        base, channel, spatial, kernels = ctx.saved_tensors
        if torch.is_grad_enabled():  # only the twin supports second derivatives

            def twin(own: Tensor, *more: Tensor | None) -> list[Tensor]:
                return [calibrate_reference(own, more[0], more[1], more[2], ctx.dilation).to(own.dtype)]

            return *by_twin(twin, (base, channel, spatial, kernels), [gradient]), None
        dbase, places, taps = triton_kernels("calibrate").backward(
            base.permute(0, 2, 3, 1).contiguous(),
            channel,
            spatial,
            kernels,
            ctx.dilation,
            gradient.permute(0, 2, 3, 1).contiguous(),
        )
        if kernels is None:
            return dbase.permute(0, 3, 1, 2), None, places.to(spatial.dtype).view(spatial.shape), None, None
        n, c, *_, size = kernels.shape
        return (
            dbase.permute(0, 3, 1, 2),
            # A channel factor is a kernel with a single tap, the centre one.
            None if channel is None else taps[:, size * size // 2].to(channel.dtype).view(channel.shape),
            None if spatial is None else places.to(spatial.dtype).view(spatial.shape),
            taps.view(n, size, size, c).permute(0, 3, 1, 2).to(kernels.dtype),
            None,
        )
