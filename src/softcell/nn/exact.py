"""Matrix products that keep the precision of their factors under autocast, in the backward pass, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _ExactProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        with torch.autocast(a.device.type, enabled=False):
            return torch.matmul(a, b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        of_a, of_b = ctx.needs_input_grad
        return (
            exact_product(gradient, b.transpose(-2, -1)).sum_to_size(a.shape) if of_a else None,
            exact_product(a.transpose(-2, -1), gradient).sum_to_size(b.shape) if of_b else None,
        )


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., r, k] · b [..., k, c], where leading dimensions are broadcast.

    Disabling autocast around torch's product is not enough: a step computes gradients under autocast, which would round
    both factors of their products to bfloat16.

    Example:
        >>> import torch
        >>> from softcell.nn.exact import exact_product
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     exact_product(torch.tensor([[1.001]]), torch.tensor([[1.0]]))
        tensor([[1.0010]])
    """
    return _ExactProduct.apply(a, b)  # type: ignore[no-any-return, no-untyped-call]
