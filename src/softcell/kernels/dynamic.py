"""Per-sample dynamic kernels (NOS, A.1.2) for several modules m that read the same map:

    l = W2 x,  a = softmax_hw(l),  z = a relu(norm(W1 x)),  d = softmax_taps(z W3)

Every module computes k² taps t from x [n, h·w, c], each with one value per channel. In plain PyTorch a module takes ten
operations forward and twenty backward. The Triton kernels loop over the positions in registers, for all modules at
once: one launch forward, one backward and two sums. They keep d, z and one value per tap. `dynamic_kernels_reference`
is the plain twin.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from softcell.kernels.backend import by_twin, is_wanted, padded, runs_triton, shared_memory, triton_kernels

LARGEST = 64
"""Channels of a map and of its compressed form that fit the registers of one program."""
TAPS = 32
"""The largest k²."""


def fits(x: Tensor, compressed: Tensor, taps: tuple[int, ...]) -> bool:
    """Whether the Triton kernels support these sizes on this device."""
    if not runs_triton(x) or x.dtype != compressed.dtype:
        return False
    # As compiled for 16, 32 and 64 channels: 29, 26 and 37 KB in bfloat16, 46, 45 and 88 KB in float32.
    needed = 40_000 if x.element_size() == 2 else 1_500 * padded(x.shape[2], 32)
    small = max(x.shape[2], compressed.shape[2] // len(taps)) <= LARGEST and max(taps) <= TAPS
    return small and needed <= shared_memory(x.device)


def dynamic_kernels(x: Tensor, compressed: Tensor, score: Tensor, decode: Tensor, taps: tuple[int, ...]) -> Tensor:
    """All kernels [n, Σ k², c], in float32 or wider, module after module.

    x [n, h·w, c]; compressed [n, h·w, m·r], relu(norm(W1 x)) of all modules; score W2 [Σ k², c]; decode W3 [m, c, r];
    taps: k² of each module.
    """
    if not fits(x, compressed, taps):
        return dynamic_kernels_reference(x, compressed, score, decode, taps)
    return _DynamicKernels.apply(taps, x, compressed, score, decode)  # type: ignore[no-any-return, no-untyped-call]


def dynamic_kernels_reference(
    x: Tensor, compressed: Tensor, score: Tensor, decode: Tensor, taps: tuple[int, ...]
) -> Tensor:
    """The plain twin of `dynamic_kernels`, module by module."""
    exact, found = torch.promote_types(x.dtype, torch.float32), []
    parts = zip(torch.split(score, list(taps)), compressed.chunk(len(taps), 2), decode, strict=True)
    for scores, values, out in parts:
        attention = torch.softmax(torch.matmul(scores, x.transpose(1, 2)), 2)  # [n, k², h·w]
        latent = torch.matmul(attention, values)  # [n, k², r]
        found.append(torch.softmax(torch.matmul(latent, out.t()), 1, dtype=exact))
    return torch.cat(found, 1)


def starts(taps: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The first tap of each module, and the number of its taps."""
    return tuple(zip(accumulate(taps, initial=0), taps, strict=False))


class _DynamicKernels(torch.autograd.Function):
    """`dynamic_kernels` by Triton kernels."""

    @staticmethod
    def forward(ctx: Any, taps: tuple[int, ...], *given: Tensor) -> Tensor:
        x, compressed, score, decode = given
        rows = x.contiguous(), compressed if compressed.stride(2) == 1 else compressed.contiguous()
        made, latent, totals = triton_kernels("dynamic").forward(*rows, score.contiguous(), decode.contiguous(), taps)
        ctx.save_for_backward(*given, made, latent, totals)
        ctx.taps = taps
        return made  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, compressed, score, decode, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # only the twin supports second derivatives

            def twin(*own: Tensor) -> list[Tensor]:
                return [dynamic_kernels_reference(own[0], own[1], own[2], own[3], ctx.taps)]

            return None, *by_twin(twin, (x, compressed, score, decode), [gradient])
        rows = x.contiguous(), compressed if compressed.stride(2) == 1 else compressed.contiguous()
        weights = is_wanted(ctx, 2) or is_wanted(ctx, 3)  # architecture steps need no gradient of the weights
        return None, *triton_kernels("dynamic").backward(
            *rows, score.contiguous(), decode.contiguous(), ctx.taps, *kept, gradient.contiguous(), weights
        )
