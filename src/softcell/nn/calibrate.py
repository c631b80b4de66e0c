"""Calibrating candidates: attentions that multiply a feature map, kernels of each sample that are convolved with it.

Neural Operator Search, §3.1 and Appendix A.1. Channel and spatial attention reduce the width 16-fold, the dynamic
kernel 8-fold; a width below that keeps one channel. At stride 2 spatial attention strides itself; channel attention
and dynamic kernels have no resolution and fit any.

    channel attention    sigmoid(W2 relu(W1 mean_hw(x)))                            [n, c, 1, 1]
    spatial attention    sigmoid(W2 * relu(norm(W1 x))), W2 a 3×3 convolution       [n, 1, ⌈h/s⌉, ⌈w/s⌉]
    dynamic kernel       softmax_taps(W3 (relu(norm(W1 x)) softmax_hw(W2 x)ᵀ))     [n, c, k, k]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.kernels.calibrate import calibrate, calibrate_reference, convolve
from softcell.nn.candidates import Spec, candidate
from softcell.nn.norm import BatchNorm2d

ATTENTION_REDUCTION = 16
KERNEL_REDUCTION = 8


def reduced(channels: int, reduction: int) -> int:
    """`channels // reduction`, at least one."""
    return max(1, channels // reduction)


class Calibration(nn.Module, ABC):
    """Computes from a node's value something that is applied to another map.

    It is applied linearly, so the results of several edges are summed and applied once.

    Example:
        >>> import torch
        >>> from softcell.nn import Calibration
        >>> class MeanGate(Calibration):
        ...     def forward(self, x):  # [n, c, h, w] to [n, c, 1, 1]
        ...         return x.mean((2, 3), keepdim=True).sigmoid()
        ...     def applied(self, base, made):
        ...         return base * made
        >>> gate, x = MeanGate(), torch.ones(1, 2, 4, 4)
        >>> gate.applied(2 * x, gate(0 * x))[0, 0, 0, 0]
        tensor(1.)
    """

    @abstractmethod
    def applied(self, base: Tensor, made: Tensor) -> Tensor:
        """Applies the results of modules of this kind to base [n, c, h, w]; returns a map of the same shape."""


class Attention(Calibration):
    """Multiplies: base ⊙ A."""

    def applied(self, base: Tensor, made: Tensor) -> Tensor:
        return base * made


class ChannelAttention(Attention):
    """One factor per channel from the global mean: [n, c, h, w] to [n, c, 1, 1] in (0, 1)."""

    def __init__(self, channels: int, reduction: int = ATTENTION_REDUCTION) -> None:
        super().__init__()
        hidden = reduced(channels, reduction)
        self.squeeze = nn.Conv2d(channels, hidden, 1, bias=False)
        self.excite = nn.Conv2d(hidden, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.mean(x, dim=(2, 3), keepdim=True)
        return torch.sigmoid(self.excite(F.relu(self.squeeze(y))))


class SpatialAttention(Attention):
    """One factor per position: [n, c, h, w] to [n, 1, ⌈h/s⌉, ⌈w/s⌉] in (0, 1)."""

    def __init__(
        self, channels: int, stride: int = 1, reduction: int = ATTENTION_REDUCTION, *, affine: bool = True
    ) -> None:
        super().__init__()
        hidden = reduced(channels, reduction)
        self.squeeze = nn.Conv2d(channels, hidden, 1, stride, bias=False)
        self.norm = BatchNorm2d(hidden, affine=affine)
        self.gather = nn.Conv2d(hidden, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gather(F.relu(self.norm(self.squeeze(x)))))


class DynamicKernel(Calibration):
    """A k×k kernel per sample and channel: [n, c, h, w] to [n, c, k, k]; the taps of each kernel sum to 1.

    Every tap attends to all positions: W2 scores them, a softmax over h·w turns scores into weights (first softmax of
    A.1.2), the compressed map is averaged with them (kernel transform), and W3 reads out the channels (kernel decode),
    normalised over the k² taps (second softmax).
    """

    def __init__(
        self,
        channels: int,
        size: int,
        dilation: int = 1,
        reduction: int = KERNEL_REDUCTION,
        *,
        affine: bool = True,
    ) -> None:
        super().__init__()
        hidden = reduced(channels, reduction)
        self.size, self.dilation = size, dilation
        self.compress = nn.Conv2d(channels, hidden, 1, bias=False)
        self.norm = BatchNorm2d(hidden, affine=affine)
        self.score = nn.Conv2d(channels, size * size, 1, bias=False)
        self.decode = nn.Conv2d(hidden, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, size = x.shape[0], self.size
        compressed = F.relu(self.norm(self.compress(x))).flatten(2)  # [n, c/8, h·w]
        weights = torch.softmax(self.score(x).flatten(2), dim=2)  # [n, k², h·w]
        # Autocast leaves the result of a softmax in float32.
        latent = torch.matmul(compressed, weights.transpose(1, 2).to(compressed.dtype))  # [n, c/8, k²]
        taps = self.decode(latent.reshape(n, -1, size, size)).flatten(2)  # [n, c, k²]
        return torch.softmax(taps, dim=2).reshape(n, -1, size, size)

    def applied(self, base: Tensor, made: Tensor) -> Tensor:
        return convolve(base, made, self.dilation)


def calibrated(base: Tensor, made: Sequence[tuple[Calibration, Tensor]], *, at_once: bool = False) -> Tensor:
    """base + base ⊙ A + Σ base ⊛ D (NOS, Eq 3), where each module applies its own result.

    at_once: without kernels, attentions of base's dtype run in one pass too, where Triton serves; they are then
    rounded once, not after every operation.

    base [n, c, h, w]. Both are linear in the results, so attentions are summed (A of Eq 2), and kernels of one
    dilation too, the smaller in the middle of the larger: this saves memory traffic and launches.
    """
    kernels: dict[int, Tensor] = {}
    attentions: dict[type, Tensor] = {}
    others: list[Tensor] = []
    for module, one in made:
        kind = type(module)
        # A subclass with its own `applied` is not merged: it is called below.
        if isinstance(module, DynamicKernel) and kind.applied is DynamicKernel.applied:
            known = kernels.get(module.dilation)
            kernels[module.dilation] = one if known is None else _centred_sum(known, one)
        elif kind in (ChannelAttention, SpatialAttention):
            attentions[kind] = attentions[kind] + one if kind in attentions else one
        else:
            others.append(module.applied(base, one))
    # The kernel of one dilation runs in one pass with base and attentions; others add a term each.
    *more, last = kernels.items() or ((1, None),)
    others += [convolve(base, kernel, dilation) for dilation, kernel in more]
    channel, spatial = attentions.get(ChannelAttention), attentions.get(SpatialAttention)
    dilation, kernel = last
    alike = all(one is None or one.dtype == base.dtype for one in (channel, spatial))
    if kernel is None and not (at_once and alike):
        value = calibrate_reference(base, channel, spatial, None)
    else:
        value = calibrate(base, channel, spatial, kernel, dilation)
    for term in others:
        value = value + term
    return value


def _centred_sum(a: Tensor, b: Tensor) -> Tensor:
    """Two kernels [n, c, k, k] of odd sizes, the smaller padded with zeros."""
    small, large = (a, b) if a.shape[-1] < b.shape[-1] else (b, a)
    border = (large.shape[-1] - small.shape[-1]) // 2
    return large + (F.pad(small, (border,) * 4) if border else small)


@candidate("spatial_attention", kind="attention")
def spatial_attention(spec: Spec) -> nn.Module:
    """Multiplies by a saliency map (NOS)."""
    return SpatialAttention(spec.channels, spec.stride, affine=spec.affine)


@candidate("channel_attention", kind="attention")
def channel_attention(spec: Spec) -> nn.Module:
    """Multiplies by a factor per channel (NOS)."""
    return ChannelAttention(spec.channels)


@candidate("dynamic_conv_3x3", kind="kernel")
def dynamic_conv_3x3(spec: Spec) -> nn.Module:
    """Convolves with a 3×3 kernel made from each sample (NOS)."""
    return DynamicKernel(spec.channels, 3, affine=spec.affine)


@candidate("dynamic_conv_5x5", kind="kernel")
def dynamic_conv_5x5(spec: Spec) -> nn.Module:
    """Convolves with a 5×5 kernel made from each sample (NOS)."""
    return DynamicKernel(spec.channels, 5, affine=spec.affine)


@candidate("dil_dynamic_conv_3x3", kind="kernel")
def dil_dynamic_conv_3x3(spec: Spec) -> nn.Module:
    """Convolves with a 3×3 kernel of dilation 2 made from each sample, which NOS tries and drops (Table 1)."""
    return DynamicKernel(spec.channels, 3, dilation=2, affine=spec.affine)


@candidate("dil_dynamic_conv_5x5", kind="kernel")
def dil_dynamic_conv_5x5(spec: Spec) -> nn.Module:
    """Convolves with a 5×5 kernel of dilation 2 made from each sample, which NOS tries and drops (Table 1)."""
    return DynamicKernel(spec.channels, 5, dilation=2, affine=spec.affine)
