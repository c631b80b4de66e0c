"""Weights of many modules as one vector, made by one copy; in the backward pass by one more each gets its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def as_vector(weight: Tensor) -> Tensor:
    """A weight [c_out, c_in, k, k] as a vector ordered (c_out, tap, c_in): a view of one that is channels-last."""
    return weight.permute(0, 2, 3, 1).reshape(-1)


def like(vector: Tensor, weight: Tensor) -> Tensor:
    """The reverse of `as_vector`: a view, with the weight's strides where its memory has the same order."""
    c_out, c_in, height, width = weight.shape
    if height * width == 1 or c_in == 1:  # any order of the dimensions is the same memory
        offset = vector.storage_offset()
        return vector.as_strided(weight.shape, weight.stride(), offset)
    return vector.view(c_out, height, width, c_in).permute(0, 3, 1, 2)


def owned(vector: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """What stands for each weight in a vector of all of them.

    Each gets memory of its own: whoever clips or averages gradients in place must not meet another's.
    """
    parts = torch.split(vector, [w.numel() for w in weights])
    own = [torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=w.device) for w in weights]
    torch._foreach_copy_(own, [like(part, w) for part, w in zip(parts, weights, strict=True)])
    return own


def flat(weights: Sequence[Tensor]) -> Tensor:
    """Weights [c_out, c_in, k, k] of any sizes, one after the other, each ordered (c_out, tap, c_in): [total]"""
    result: Tensor = _Flat.apply(*weights)  # type: ignore[no-untyped-call]
    return result


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return torch.cat([as_vector(w) for w in weights])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        weights: tuple[Tensor, ...] = ctx.saved_tensors
        if torch.is_grad_enabled():  # a copy in place could not be differentiated once more
            parts = torch.split(gradient, [w.numel() for w in weights])
            shaped = (part.view(w.permute(0, 2, 3, 1).shape) for part, w in zip(parts, weights, strict=True))
            return tuple(part.permute(0, 3, 1, 2) for part in shaped)
        return tuple(owned(gradient.contiguous(), weights))
