"""Local self-attention over k × k pixels, without a copy of any neighbourhood.

    y_ij = Σ_ab softmax_ab( q_ij · k_ab + q_ij · r_{a-i,b-j} ) v_ab,   (a, b) over the pixels around (i, j) in the image

The k² neighbours are k² shifted views, whose logits are written one after another. The backward pass recomputes the
logits, so only q, k and v are kept, for any extent. On a GPU (`attend_packed`) neighbours stay in registers and logits
are never stored; the result and one value per pixel and head are kept as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from softcell.kernels.backend import by_twin, is_wanted, runs_triton, triton_kernels

Window = tuple[Any, ...]
"""An index into the last two axes of a map."""


def shifted(extent: int, height: int, width: int) -> Iterator[tuple[int, Window, Window]]:
    """For each neighbour, the pixels that have it and its position relative to them, as windows of equal size."""
    reach = extent // 2
    for number in range(extent * extent):
        dy, dx = number // extent - reach, number % extent - reach
        top, bottom = max(0, -dy), min(height, height - dy)
        left, right = max(0, -dx), min(width, width - dx)
        if top < bottom and left < right:
            own = (..., slice(top, bottom), slice(left, right))
            yield number, own, (..., slice(top + dy, bottom + dy), slice(left + dx, right + dx))


def local_logits(q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Logits [n, heads, k², h, w] in float32 or wider; -inf for neighbours outside the image."""
    n, heads, _, height, width = q.shape
    extent = rows.shape[-1]
    by_row = torch.einsum("nedhw,edk->nekhw", q, rows)
    by_column = torch.einsum("nedhw,edk->nekhw", q, columns)
    exact = torch.promote_types(q.dtype, torch.float32)
    logits = torch.full(
        (n, heads, extent * extent, height, width), -torch.inf, dtype=exact, device=q.device
    )  # every pixel is a neighbour of itself, so no softmax is empty
    for number, own, other in shifted(extent, height, width):
        dots = (q[own] * k[other]).sum(2, dtype=exact)
        positions = by_row[:, :, number // extent][own] + by_column[:, :, number % extent][own]
        logits[:, :, number][own] = dots + positions
    return logits


class _LocalAttention(torch.autograd.Function):
    """Forward and backward pass; the latter uses differentiable operations, so second derivatives are correct too."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, rows, columns)
        weights = torch.softmax(local_logits(q, k, rows, columns), 2)
        y = torch.zeros(v.shape, dtype=weights.dtype, device=v.device)
        for number, own, other in shifted(rows.shape[-1], q.shape[-2], q.shape[-1]):
            y[own] += weights[:, :, number, None][own] * v[other]
        return y.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        q, k, v, rows, columns = ctx.saved_tensors
        extent, (height, width) = rows.shape[-1], q.shape[-2:]
        weights = torch.softmax(local_logits(q, k, rows, columns), 2)
        pulls = torch.zeros_like(weights)  # dL/dweights
        dv = torch.zeros(v.shape, dtype=weights.dtype, device=v.device)
        for number, own, other in shifted(extent, height, width):
            pulls[:, :, number][own] = (grad[own] * v[other]).sum(2, dtype=weights.dtype)
            dv[other] += weights[:, :, number, None][own] * grad[own]
        slopes = weights * (pulls - (weights * pulls).sum(2, keepdim=True))  # dL/dlogits, 0 outside the image
        dq, dk = torch.zeros_like(dv), torch.zeros_like(dv)
        for number, own, other in shifted(extent, height, width):
            slope = slopes[:, :, number, None][own]
            dq[own] += slope * k[other]
            dk[other] += slope * q[own]
        grid = slopes.unflatten(2, (extent, extent))  # type: ignore[no-untyped-call]
        by_row, by_column = grid.sum(3).to(q.dtype), grid.sum(2).to(q.dtype)
        dq = dq + torch.einsum("nekhw,edk->nedhw", by_row, rows) + torch.einsum("nekhw,edk->nedhw", by_column, columns)
        drows = torch.einsum("nekhw,nedhw->edk", by_row, q)
        dcolumns = torch.einsum("nekhw,nedhw->edk", by_column, q)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), drows.to(rows.dtype), dcolumns.to(columns.dtype)


def attend_by_shifts(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """q, k, v [n, heads, d, h, w] and embeddings [heads, d, extent]; returns [n, heads, d, h, w]."""
    result: Tensor = _LocalAttention.apply(q, k, v, rows, columns)  # type: ignore[no-untyped-call]
    return result


def unpacked(packed: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Splits [n, 3·c, h, w] (all queries, then all keys, then all values) into q, k and v [n, heads, d, h, w]."""
    n, channels, height, width = packed.shape
    q, k, v = (part.reshape(n, heads, channels // (3 * heads), height, width) for part in packed.chunk(3, 1))
    return q, k, v


def attend_packed(packed: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Queries, keys and values [n, 3·c, h, w]; returns [n, c, h, w]. Uses Triton kernels where available."""
    if runs_triton(packed):
        result: Tensor = _Fused.apply(packed, rows, columns)  # type: ignore[no-untyped-call]
        return result
    return _plainly(packed, rows, columns)


def _plainly(packed: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The plain twin of `attend_packed`."""
    n, _, height, width = packed.shape
    embeddings = (rows.to(packed.dtype), columns.to(packed.dtype))
    return attend_by_shifts(*unpacked(packed, rows.shape[0]), *embeddings).reshape(n, -1, height, width)


class _Fused(torch.autograd.Function):
    """`attend_packed` by Triton kernels, channels-last."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        inner = packed.permute(0, 2, 3, 1).contiguous()
        exact = [t.float() for t in (rows, columns)]
        y, *kept = triton_kernels("local").forward(inner, *exact)
        ctx.save_for_backward(packed, rows, columns, y, *kept)
        return y.permute(0, 3, 1, 2)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        packed, rows, columns, y, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # only the twin supports second derivatives
            dpacked, drows, dcolumns = by_twin(lambda *own: [_plainly(*own)], (packed, rows, columns), [grad])
            return dpacked, drows, dcolumns
        inner = packed.permute(0, 2, 3, 1).contiguous()
        dy = grad.permute(0, 2, 3, 1).to(packed.dtype).contiguous()
        wanted = is_wanted(ctx, 1) or is_wanted(ctx, 2)  # architecture steps need no gradient of these
        out, drows, dcolumns = triton_kernels("local").backward(inner, y, *kept, dy, positions=wanted)
        if not wanted:
            return out.permute(0, 3, 1, 2), None, None
        return out.permute(0, 3, 1, 2), drows.to(rows.dtype), dcolumns.to(columns.dtype)
