"""NOS written down literally: the modules of Appendix A.1, one sample at a time, and the block of Eq 2-5.

Oracles for `softcell.nn.calibrate` and for mixed cells with calibrating candidates; slow on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def batch_norm(x: Tensor) -> Tensor:
    """Batch statistics without scale and shift, per channel of x [n, c, h, w]."""
    columns = []
    for channel in range(x.shape[1]):
        values = x[:, channel]
        mean = values.mean()
        columns.append((values - mean) / torch.sqrt(((values - mean) ** 2).mean() + 1e-5))
    return torch.stack(columns, dim=1)


def pointwise(x: Tensor, weight: Tensor) -> Tensor:
    """A 1×1 convolution as a sum over channels: x [n, i, h, w], weight [o, i, 1, 1]."""
    return torch.einsum("nihw,oi->nohw", x, weight[:, :, 0, 0])


def channel_attention(x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """AttentionC: [n, c, 1, 1]."""
    mean = x.mean(dim=3, keepdim=True).mean(dim=2, keepdim=True)
    hidden = torch.clamp(pointwise(mean, state["squeeze.weight"]), min=0)
    return 1 / (1 + torch.exp(-pointwise(hidden, state["excite.weight"])))


def spatial_attention(x: Tensor, state: Mapping[str, Tensor], stride: int) -> Tensor:
    """AttentionS: [n, 1, ⌈h/s⌉, ⌈w/s⌉]."""
    hidden = batch_norm(pointwise(x[:, :, ::stride, ::stride], state["squeeze.weight"]))
    y = F.conv2d(torch.clamp(hidden, min=0), state["gather.weight"], padding=1)
    return 1 / (1 + torch.exp(-y))


def dynamic_kernel(x: Tensor, state: Mapping[str, Tensor], size: int) -> Tensor:
    """DynamicF: [n, c, k, k], tap by tap."""
    n, c = x.shape[:2]
    compressed = torch.clamp(batch_norm(pointwise(x, state["compress.weight"])), min=0)
    scores = pointwise(x, state["score.weight"])
    kernels = torch.zeros(n, c, size, size, dtype=x.dtype)
    for sample in range(n):
        taps = []
        for tap in range(size * size):
            exponentials = torch.exp(scores[sample, tap])
            weights = exponentials / exponentials.sum()  # the first softmax runs over h·w
            latent = (compressed[sample] * weights).sum(dim=(1, 2))
            taps.append(state["decode.weight"][:, :, 0, 0] @ latent)
        decoded = torch.stack(taps, dim=1)  # [c, k²]
        exponentials = torch.exp(decoded)
        kernel = exponentials / exponentials.sum(dim=1, keepdim=True)  # the second softmax runs over the k² taps
        kernels[sample] = kernel.view(c, size, size)
    return kernels


def convolve(x: Tensor, kernels: Tensor, dilation: int = 1) -> Tensor:
    """F ⊛ D: a loop over samples, each convolved depthwise with separate kernels."""
    size = kernels.shape[-1]
    padding = dilation * (size - 1) // 2
    outputs = []
    for sample, kernel in zip(x, kernels, strict=True):
        y = F.conv2d(sample[None], kernel[:, None], padding=padding, dilation=dilation, groups=x.shape[1])
        outputs.append(y)
    return torch.cat(outputs)


def first_tier(
    features: Sequence[Tensor], attentions: Sequence[Tensor], kernels: Sequence[Tensor], zero: Tensor
) -> Tensor:
    """The surrogate node F_k' (Eq 2-3) from weighted tensors of the three kinds; `zero` has its shape."""
    total = sum(features, start=zero)
    attended = sum((total * attention for attention in attentions), start=zero)
    convolved = sum((convolve(total, kernel) for kernel in kernels), start=zero)
    return total + attended + convolved


def second_tier(
    x: Tensor,
    features: Sequence[tuple[float, Tensor]],
    attentions: Sequence[tuple[float, Tensor]],
    kernels: Sequence[tuple[float, Tensor]],
) -> Tensor:
    """The inner node F_k in the settled form of Eq 4-5, from weights and unweighted tensors made of x = F_k'."""
    weight = sum(w for w, _ in features)
    base = sum((w * o for w, o in features), start=torch.zeros_like(x)) + (1 - weight) * x
    attended = sum((base * (w * a) for w, a in attentions), start=torch.zeros_like(x))
    convolved = sum((convolve(base, w * d) for w, d in kernels), start=torch.zeros_like(x))
    return base + attended + convolved


def paper_count(nodes: int, operations: int, kept: int) -> int:
    """Π_{n=1}^{nodes} (n+1)n/2 · operations^kept: the number of cells as §4.2 prints it."""
    return math.prod((n + 1) * n // 2 * operations**kept for n in range(1, nodes + 1))
