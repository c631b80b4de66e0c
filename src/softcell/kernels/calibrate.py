"""Per-sample dynamic kernels (NOS, A.1.2), and how they and attentions are applied to a map (NOS, Eq 3).

`dynamic_kernels` makes the kernels of several modules m that read the same map:

    l = W2 x,  a = softmax_hw(l),  z = a relu(norm(W1 x)),  d = softmax_taps(z W3)

Every module computes k² taps t from x [n, h·w, c], each with one value per channel. In plain PyTorch a module takes ten
operations forward and twenty backward. The Triton kernels loop over the positions in registers, for all modules at
once: one launch forward, one backward and two sums. They keep d, z and one value per tap. Channel attentions of the
same map, σ(W2 relu(W1 mean_hw(x))), take one more launch each way; the gradient of x begins with that of the mean.

`calibrate` computes base ⊙ (1 + A) + base ⊛ D for every sample and channel:

    y[p] = base[p] (1 + a + s[p]) + Σ_t base[p + o_t] d_t

a has one value per channel, s one per position, d one per channel and tap. Plain operations need a dozen launches
forward and two dozen backward. Many of them are copies, since torch needs the samples of such a convolution folded into
its channels. The Triton kernels read channels-last maps directly, with one launch forward and two backward. Attentions
alone run by the same kernels: a is then a kernel of one tap, and with s alone there is no tap.

`spatial_sums` makes the spatial attentions of several modules and adds them, weighted, to the sums of their targets:
one launch each way, where torch takes three forward and six or more backward.

Each has a plain twin named `_reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.kernels.backend import by_twin, is_wanted, padded, runs_triton, shared_memory, triton_kernels

LARGEST = 64
"""Channels of a map and of its compressed form that fit the registers of one program of `dynamic_kernels`."""
TAPS = 32
"""The largest k² of `dynamic_kernels`."""


def fits(x: Tensor, compressed: Tensor, taps: tuple[int, ...]) -> bool:
    """Whether the Triton kernels of `dynamic_kernels` support these sizes on this device."""
    if not runs_triton(x) or x.dtype != compressed.dtype:
        return False
    # As compiled for 16, 32 and 64 channels: 29, 26 and 37 KB in bfloat16, 46, 45 and 88 KB in float32.
    needed = 40_000 if x.element_size() == 2 else 1_500 * padded(x.shape[2], 32)
    small = max(x.shape[2], compressed.shape[2] // len(taps)) <= LARGEST and max(taps) <= TAPS
    return small and needed <= shared_memory(x.device)


def dynamic_kernels(
    x: Tensor,
    compressed: Tensor,
    score: Tensor,
    decode: Tensor,
    taps: tuple[int, ...],
    squeeze: Tensor | None = None,
    excite: Tensor | None = None,
) -> Tensor:
    """All kernels [n, Σ k² + m', c], in float32 or wider, module after module; m' channel attentions are the last.

    x [n, h·w, c]; compressed [n, h·w, m·r], relu(norm(W1 x)) of all modules; score W2 [Σ k², c]; decode W3 [m, c, r];
    taps: k² of each module. squeeze, excite: W1 [m'·h, c] and W2 [m', c, h] of channel attentions.
    """
    if not fits(x, compressed, taps):
        return dynamic_kernels_reference(x, compressed, score, decode, taps, squeeze, excite)
    return _DynamicKernels.apply(taps, x, compressed, score, decode, squeeze, excite)  # type: ignore[no-any-return, no-untyped-call]


def dynamic_kernels_reference(
    x: Tensor,
    compressed: Tensor,
    score: Tensor,
    decode: Tensor,
    taps: tuple[int, ...],
    squeeze: Tensor | None = None,
    excite: Tensor | None = None,
) -> Tensor:
    """The plain twin of `dynamic_kernels`, module by module."""
    exact, found = torch.promote_types(x.dtype, torch.float32), []
    parts = zip(torch.split(score, list(taps)), compressed.chunk(len(taps), 2), decode, strict=True)
    for scores, values, out in parts:
        attention = torch.softmax(torch.matmul(scores, x.transpose(1, 2)), 2)  # [n, k², h·w]
        latent = torch.matmul(attention, values)  # [n, k², r]
        found.append(torch.softmax(torch.matmul(latent, out.t()), 1, dtype=exact))
    if squeeze is not None and excite is not None:
        hidden = F.relu(F.linear(x.mean(1), squeeze)).view(len(x), len(excite), -1)
        y = torch.bmm(hidden.transpose(0, 1), excite.transpose(1, 2))  # [m', n, c]
        found.append(torch.sigmoid(y.transpose(0, 1).to(exact)))
    return torch.cat(found, 1)


def starts(taps: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The first tap of each module, and the number of its taps."""
    return tuple(zip(accumulate(taps, initial=0), taps, strict=False))


class _DynamicKernels(torch.autograd.Function):
    """`dynamic_kernels` by Triton kernels."""

    @staticmethod
    def forward(ctx: Any, taps: tuple[int, ...], *given: Tensor | None) -> Tensor:
        ctx.taps = taps
        made, *kept = triton_kernels("calibrate").dynamic_kernels(*_laid(given, taps))
        ctx.save_for_backward(*given, made, *kept)
        return made  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *given, made, latent, totals, mean, hidden = ctx.saved_tensors
        if torch.is_grad_enabled():  # only the twin supports second derivatives

            def twin(*own: Tensor | None) -> list[Tensor]:
                x, compressed, score, decode, *more = own
                assert x is not None and compressed is not None and score is not None and decode is not None
                return [dynamic_kernels_reference(x, compressed, score, decode, ctx.taps, *more)]

            return None, *by_twin(twin, given, [gradient])
        weights = any(is_wanted(ctx, number) for number in range(2, sum(one is not None for one in given)))
        kept = (made, latent, totals, mean, hidden)  # architecture steps need no gradient of the weights
        return None, *triton_kernels("calibrate").dynamic_kernels_gradient(
            *_laid(given, ctx.taps), *kept, gradient.contiguous(), weights
        )


def _laid(given: Sequence[Tensor | None], taps: tuple[int, ...]) -> tuple[Any, ...]:
    """The arguments of Triton's kernels, without gaps."""
    x, compressed, score, decode, squeeze, excite = given
    assert x is not None and compressed is not None and score is not None and decode is not None
    rows = x.contiguous(), compressed if compressed.stride(2) == 1 else compressed.contiguous()
    more = (None if one is None else one.contiguous() for one in (squeeze, excite))
    return *rows, score.contiguous(), decode.contiguous(), taps, *more


def spatial_sums(
    hidden: Tensor, gather: Tensor, weights: Tensor, before: Tensor | None, size: tuple[int, int]
) -> Tensor:
    """before + w_m σ(W2 * hidden) for each module m [modules, n, h, w], W2 a 3×3 convolution.

    hidden [n, h·w, modules · r]; gather W2 [modules, 3, 3, r]; weights w [modules]; before: like the result, None for
    zeros; size: h and w.
    """
    if not runs_triton(hidden):
        return spatial_sums_reference(hidden, gather, weights, before, size)
    return _SpatialSums.apply(hidden, gather, weights, before, size)  # type: ignore[no-any-return, no-untyped-call]


def spatial_sums_reference(
    hidden: Tensor, gather: Tensor, weights: Tensor, before: Tensor | None, size: tuple[int, int]
) -> Tensor:
    """The plain twin of `spatial_sums`."""
    image = hidden.transpose(1, 2).reshape(len(hidden), -1, *size)
    maps = torch.sigmoid(F.conv2d(image, gather.permute(0, 3, 1, 2), padding=1, groups=len(gather)))
    made = maps.transpose(0, 1) * weights.to(maps.dtype).view(-1, 1, 1, 1)
    return made if before is None else before + made


class _SpatialSums(torch.autograd.Function):
    """`spatial_sums` by Triton kernels."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, gather: Tensor, weights: Tensor, before: Tensor | None, size: tuple[int, int]
    ) -> Tensor:
        given = hidden if hidden.stride(2) == 1 else hidden.contiguous(), gather.contiguous(), weights.contiguous()
        earlier = None if before is None else before.contiguous()
        out, maps = triton_kernels("calibrate").spatial_sums(*given, earlier, size)
        ctx.save_for_backward(hidden, gather, weights, maps)
        ctx.size, ctx.adds = size, before is not None
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gather, weights, maps = ctx.saved_tensors
        back = gradient if ctx.adds else None
        if torch.is_grad_enabled():  # only the twin supports second derivatives

            def twin(*own: Tensor) -> list[Tensor]:
                return [spatial_sums_reference(own[0], own[1], own[2], None, ctx.size)]

            return *by_twin(twin, (hidden, gather, weights), [gradient]), back, None
        given = hidden if hidden.stride(2) == 1 else hidden.contiguous(), gather.contiguous(), weights.contiguous()
        sums = is_wanted(ctx, 1) or is_wanted(ctx, 2)
        dhidden, dgather, dweights = triton_kernels("calibrate").spatial_sums_gradient(
            *given, maps, gradient.contiguous(), sums
        )
        return (
            dhidden,
            dgather.to(gather.dtype) if is_wanted(ctx, 1) else None,
            dweights.to(weights.dtype) if is_wanted(ctx, 2) else None,
            back,
            None,
        )


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
        y = triton_kernels("calibrate").calibrate(rows, channel, spatial, kernels, dilation)
        return y.permute(0, 3, 1, 2)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        base, channel, spatial, kernels = ctx.saved_tensors
        if torch.is_grad_enabled():  # only the twin supports second derivatives

            def twin(own: Tensor, *more: Tensor | None) -> list[Tensor]:
                return [calibrate_reference(own, more[0], more[1], more[2], ctx.dilation).to(own.dtype)]

            return *by_twin(twin, (base, channel, spatial, kernels), [gradient]), None
        dbase, places, taps = triton_kernels("calibrate").calibrate_gradient(
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
