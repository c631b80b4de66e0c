"""Weighted sums and products of large inputs with small weights, with their own backward passes.

The weighted sum that forms a node is out = Σ_k w_k · x_k. Plain autograd computes one product and one sum per candidate
and keeps every product. Here only the inputs are kept, and only if the weights need a gradient (the architecture step).

`product` multiplies many rows by several small matrices at once. The gradient of a small weight reduces tens of
thousands of rows to a small matrix. For batched products, libraries use one thread block per matrix, which took a third
of an IT-NAS step on an H200. Here the rows are split into parts, each a separate product, and the parts are summed.

`scores_by_position` and `diagonal_blocks` are parts of the products of dynamic kernels (`softcell.nn.calibrate`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from softcell.kernels.backend import is_wanted

PARTS = 64
"""Maximum number of parts that the rows of a product are split into; the gradient of a weight is summed over them."""


def weighted_sum(inputs: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Σ weights[k] · inputs[k]; inputs: m tensors of the same shape; weights [m]."""
    assert len(inputs) == weights.shape[0] and len(inputs) > 0
    if torch.compiler.is_compiling():
        # torch.compile fuses the sum itself; reading values below would break its graph and recompile for each length.
        return weighted_sum_reference(inputs, weights)
    result: Tensor = _WeightedSum.apply(weights, *inputs)  # type: ignore[no-untyped-call]
    return result


def weighted_sum_reference(inputs: Sequence[Tensor], weights: Tensor) -> Tensor:
    """The plain twin of `weighted_sum`, differentiated by autograd."""
    total = weights[0] * inputs[0]
    for weight, term in zip(weights[1:], inputs[1:], strict=True):
        total = total + weight * term
    return total


def copies_cheaply(x: Tensor) -> bool:
    """Whether a launch costs more than copying a small tensor."""
    return x.device.type != "cpu"


def small_weighted_sum(inputs: Sequence[Tensor], weights: Tensor) -> Tensor:
    """`weighted_sum` of m small inputs: on a GPU two launches instead of m, and backward two instead of 2m."""
    if len(inputs) == 1 or not copies_cheaply(inputs[0]):
        return weighted_sum(inputs, weights)
    with torch.autocast(inputs[0].device.type, enabled=False):  # the sum has the dtype of its terms
        stacked = torch.stack([*inputs])
        total = torch.mv(stacked.flatten(1).t(), weights.to(stacked.dtype))
    return total.view(inputs[0].shape)


def stacked_sum(x: Tensor, weights: Tensor) -> Tensor:
    """`weighted_sum` of inputs stored in one tensor: x [n, m, c, h, w] and weights [m]; returns [n, c, h, w]."""
    return _StackedSum.apply(x, weights)  # type: ignore[no-any-return, no-untyped-call]


class _StackedSum(torch.autograd.Function):
    """Works on [n, h, w, m, c], the memory layout of maps computed together, channels last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *([x] if ctx.needs_input_grad[1] else []))
        rows = x.permute(0, 3, 4, 1, 2) * weights.to(x.dtype)[:, None]
        return rows.sum(3).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weights, *inputs = ctx.saved_tensors
        grad = grad.permute(0, 2, 3, 1).contiguous()[:, :, :, None]  # the broadcast gradient has its layout
        back = None
        if ctx.needs_input_grad[0]:
            back = (grad * weights.to(grad.dtype)[:, None]).permute(0, 3, 4, 1, 2)
        if not inputs:
            return back, None
        return back, (grad * inputs[0].permute(0, 3, 4, 1, 2)).sum((0, 1, 2, 4), dtype=weights.dtype)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *(inputs if ctx.needs_input_grad[0] else ()))
        if weights.device.type == "cpu":
            first, *rest = weights.tolist()
            total: Tensor = inputs[0] * first
            for scale, term in zip(rest, inputs[1:], strict=True):
                total.add_(term, alpha=scale)
            return total
        # Weights stay on the GPU: reading them on the host would stall the step.
        scales = weights.unbind()
        total = inputs[0] * scales[0]
        for weight, term in zip(scales[1:], inputs[1:], strict=True):
            total = torch.addcmul(total, term, weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, *inputs = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or weights.device.type != "cpu":
            # With create_graph every factor must stay a tensor, or second derivatives would be lost silently.
            scales: Sequence[Any] = weights.unbind()
        else:
            scales = weights.tolist()
        grad_inputs = [grad * scale if want else None for scale, want in zip(scales, wanted, strict=True)]
        grad_weights = None
        if ctx.needs_input_grad[0]:
            if torch.is_grad_enabled() or grad.dtype in (torch.bfloat16, torch.float16):
                products = [(grad * term).sum(dtype=weights.dtype) for term in inputs]
            else:
                products = [torch.dot(*_flat(grad, term)) for term in inputs]
            grad_weights = torch.stack(products).to(weights.dtype)
        return (grad_weights, *grad_inputs)


def _flat(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both as vectors with the same element order: views if their memory layouts match, otherwise copies."""
    if a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last) and not a.is_contiguous():
        a, b = a.permute(0, 2, 3, 1), b.permute(0, 2, 3, 1)
    return a.reshape(-1), b.reshape(-1)


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
        dweight = None
        if is_wanted(ctx, 1):  # architecture steps need no gradient of the weights
            # In the memory order of the weight, which would otherwise be copied.
            turned = weight.transpose(1, 2).is_contiguous()
            dweight = _of_rows(gradient, x).transpose(1, 2) if turned else _of_rows(x, gradient)
        dadded = None
        if ctx.adds and is_wanted(ctx, 2):
            dadded = gradient.sum(1, keepdim=True) if ctx.one_row else gradient
        return dx, dweight, dadded


def _of_rows(x: Tensor, gradient: Tensor) -> Tensor:
    """Σ over rows of x [g, rows, c] times gradient [g, rows, d]; returns [g, c, d]."""
    (g, rows, c), d = x.shape, gradient.shape[2]
    # Parts of one batched product must have equal length.
    parts = math.gcd(rows, PARTS)
    products = torch.bmm(x.reshape(g * parts, -1, c).transpose(1, 2), gradient.reshape(g * parts, -1, d))
    return products.view(g, parts, c, d).sum(1)


def product(x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
    """x [g, rows, c] · weight [g, c, d] + added [g, rows or 1, d], all of the same dtype.

    The gradient of the weight is summed in float32 or wider, over parts that are rounded to that dtype.
    """
    assert x.dtype == weight.dtype, f"rows and weights must be of one type, but are {x.dtype} and {weight.dtype}"
    return _Product.apply(x, weight, added)  # type: ignore[no-any-return, no-untyped-call]


def scores_by_position(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [n, h·w, c] and weight [s, c] to [n, s, h·w]: contiguous for a softmax over h·w."""
    return _Scored.apply(rows, weight)  # type: ignore[no-any-return, no-untyped-call]


class _Scored(torch.autograd.Function):
    """Plain autograd would give the rows a channel-by-channel gradient, which slows down everything that adds to it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return torch.bmm(weight.expand(len(rows), -1, -1), rows.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, weight = ctx.saved_tensors
        back = torch.bmm(gradient.transpose(1, 2), weight.expand(len(rows), -1, -1))
        # In architecture steps weights need no gradient.
        return back, torch.bmm(gradient, rows).sum(0) if is_wanted(ctx, 1) else None


Sizes = tuple[tuple[int, int, int], ...]
"""Count, rows and columns of blocks."""


def diagonal_blocks(x: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """Blocks on the diagonal of x [n, Σ count · rows, Σ count · columns]: per size [count, n · columns, rows]."""
    result: tuple[Tensor, ...] = _Blocks.apply(x, sizes)  # type: ignore[no-untyped-call]
    return result


def _diagonal(x: Tensor, sizes: Sizes) -> Iterator[Tensor]:
    """The blocks that `diagonal_blocks` returns, as views [count, n, columns, rows]."""
    row = column = 0
    for count, rows, columns in sizes:
        square = x[:, row : row + count * rows, column : column + count * columns]
        square = square.view(len(x), count, rows, count, columns)
        yield square.diagonal(dim1=1, dim2=3).permute(3, 0, 2, 1)
        row, column = row + count * rows, column + count * columns


class _Blocks(torch.autograd.Function):
    """Plain autograd would fill a whole matrix of zeros for each view; here one is filled for all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.shape = sizes, x.shape
        own = [block.clone(memory_format=torch.contiguous_format) for block in _diagonal(x, sizes)]
        return tuple(block.flatten(1, 2) for block in own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Placed.apply(ctx.shape, ctx.sizes, *gradients), None  # type: ignore[no-untyped-call]


class _Placed(torch.autograd.Function):
    """The reverse of `_Blocks`: puts blocks on the diagonal of a matrix of zeros."""

    @staticmethod
    def forward(ctx: Any, shape: torch.Size, sizes: Sizes, *blocks: Tensor) -> Tensor:
        ctx.sizes = sizes
        x = blocks[0].new_zeros(shape)
        for place, block in zip(_diagonal(x, sizes), blocks, strict=True):
            place.copy_(block.reshape(place.shape))
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *diagonal_blocks(gradient, ctx.sizes)
