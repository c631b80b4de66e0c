"""Products of many rows with small weights, several at once, whose gradients use the whole GPU.

The gradient of a small weight is a small matrix out of tens of thousands of rows. For batched products, libraries use
one thread block per matrix, which took a third of an IT-NAS step on an H200. Here the rows are cut into parts, each
a separate product, and the parts are summed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from softcell.kernels.backend import is_wanted

PARTS = 64
"""Maximum number of parts that the rows are cut into; the gradient of a weight is summed over them."""


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, added: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.one_row = added is not None and added.shape[1] == 1
        ctx.adds = added is not None
        return torch.bmm(x, weight) if added is None else torch.baddbmm(added, x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = torch.bmm(gradient, weight.transpose(1, 2)) if is_wanted(ctx, 0) else None
        dweight = _of_rows(x, gradient) if is_wanted(ctx, 1) else None  # in architecture steps weights need no gradient
        dadded = None
        if ctx.adds and is_wanted(ctx, 2):
            dadded = gradient.sum(1, keepdim=True) if ctx.one_row else gradient
        return dx, dweight, dadded


def _of_rows(x: Tensor, gradient: Tensor) -> Tensor:
    """Σ over rows of x [g, rows, c] times gradient [g, rows, d]: [g, c, d]"""
    (g, rows, c), d = x.shape, gradient.shape[2]
    # Parts of one batched product must be equally long.
    parts = math.gcd(rows, PARTS)
    products = torch.bmm(x.reshape(g * parts, -1, c).transpose(1, 2), gradient.reshape(g * parts, -1, d))
    return products.view(g, parts, c, d).sum(1)


def product(x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
    """x [g, rows, c] · weight [g, c, d] + added [g, rows or 1, d], all of one type.

    The weight's gradient is summed in float32 at least, of parts that are rounded to that type.
    """
    assert x.dtype == weight.dtype, f"rows and weights must be of one type, but are {x.dtype} and {weight.dtype}"
    return _Product.apply(x, weight, added)  # type: ignore[no-any-return, no-untyped-call]
