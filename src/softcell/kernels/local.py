"""Local self-attention over k × k pixels, without a copy of any neighbourhood.

    y_ij = Σ_ab softmax_ab( q_ij · k_ab + q_ij · r_{a-i,b-j} ) v_ab,   (a, b) over the pixels around (i, j) in the image

The k² neighbours are k² shifted views, whose logits are written one after another. The backward pass recomputes the
logits, so only q, k and v are kept, for any extent. On a GPU (`attend_packed`) neighbours stay in registers and logits
are never stored; the result and one value per pixel and head are kept as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from softcell.kernels.backend import by_twin, is_wanted, runs_triton, table, triton_kernels

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
        heads, _, extent = rows.shape
        # [lines, c], so that a thread loads the channels of a line at once.
        lines = torch.cat([one.float().permute(2, 0, 1) for one in (rows, columns)]).flatten(1)
        y, lse = triton_kernels("local").forward(inner[None], lines, ((extent, heads),))
        ctx.save_for_backward(packed, rows, columns, y, lse, lines)
        return y[0].permute(0, 3, 1, 2)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        packed, rows, columns, y, lse, lines = ctx.saved_tensors
        if torch.is_grad_enabled():  # only the twin supports second derivatives
            dpacked, drows, dcolumns = by_twin(lambda *own: [_plainly(*own)], (packed, rows, columns), [grad])
            return dpacked, drows, dcolumns
        heads, d, extent = rows.shape
        inner = packed.permute(0, 2, 3, 1).contiguous()[None]
        dy = grad.permute(0, 2, 3, 1).to(packed.dtype).contiguous()[None]
        wanted = is_wanted(ctx, 1) or is_wanted(ctx, 2)  # architecture steps need no gradient of these
        given = (inner, lines, y, lse, dy, ((extent, heads),))
        out, partial = triton_kernels("local").backward(*given, positions=wanted)
        dpacked = out[0].permute(0, 3, 1, 2)
        if not wanted:
            return dpacked, None, None
        # In the memory order of parameters, which autograd would otherwise copy.
        sums = triton_kernels("local").summed(partial, extent).view(2, heads, d, extent)
        return dpacked, sums[0].to(rows.dtype), sums[1].to(columns.dtype)


Kinds = tuple[tuple[int, int], ...]
"""The extent and the heads of each of several attentions."""
Layers = tuple[tuple[Kinds, int], ...]
"""Attentions of several layers, and the channels c of each layer."""


@dataclass(slots=True)
class Room:
    """Memory for the gradient that `divided` returns; `attend_together` writes its first part."""

    gradient: Tensor | None = None

    def taken(self, count: int, first: Tensor) -> Tensor | None:
        """The memory, if its beginning is `first`."""
        gradient, self.gradient = self.gradient, None
        is_first = gradient is not None and gradient[: len(first)].data_ptr() == first.data_ptr()
        return gradient if is_first and gradient is not None and len(gradient) == count else None


def divided(packed: Tensor, count: int, room: Room) -> tuple[Tensor, ...]:
    """Views of packed [attentions, n, h, w, 3·c]: the first `count`, then queries, keys and values of each other one.

    In the backward pass gradients of the others are written behind those of the first ones, into `room` if possible.
    """
    result: tuple[Tensor, ...] = _Divided.apply(packed, count, room)  # type: ignore[no-untyped-call]
    return result


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, count: int, room: Room) -> tuple[Tensor, ...]:
        ctx.count, ctx.room = count, room
        return packed[:count], *(part for one in packed[count:].unbind() for part in one.chunk(3, -1))

    @staticmethod
    def backward(ctx: Any, first: Tensor, *others: Tensor) -> tuple[Tensor, None, None]:
        parts = [others[i : i + 3] for i in range(0, len(others), 3)]
        total = len(first) + len(parts)
        whole = None if torch.is_grad_enabled() else ctx.room.taken(total, first)
        if whole is None:
            return torch.cat([first, *(torch.cat(own, -1)[None] for own in parts)]), None, None
        for one, own in zip(whole[len(first) :].unbind(), parts, strict=True):
            torch.cat(own, -1, out=one)
        return whole, None, None


def attend_together(
    packed: Tensor, embeddings: Tensor, kinds: Kinds, others: Sequence[Tensor] = (), room: Room | None = None
) -> Tensor:
    """Several attentions over maps of one size, by one launch each way and kernel where Triton is available.

    packed [attentions, n, h, w, 3·c]; embeddings [Σ 2 · c · extent]: rows and columns [heads, d, extent] of each, one
    after the other. Returns [attentions, n, h, w, c] with the results [n, h, w, c] of `others` behind them. room: that
    of `divided`, if packed is from there.
    """
    if not runs_triton(packed):
        return attend_together_reference(packed, embeddings, kinds, others)
    (lines,) = in_lines(embeddings, ((kinds, packed.shape[-1] // 3),))
    return attend_by_lines(packed, lines, kinds, others, room)


def attend_by_lines(
    packed: Tensor, lines: Tensor, kinds: Kinds, others: Sequence[Tensor] = (), room: Room | None = None
) -> Tensor:
    """`attend_together` with the embeddings that `in_lines` returns."""
    if not runs_triton(packed):
        return attend_together_reference(packed, _in_vector(lines, kinds), kinds, others)
    result: Tensor = _Together.apply(packed, lines, kinds, room, *others)  # type: ignore[no-untyped-call]
    return result


def in_lines(embeddings: Tensor, layers: Layers) -> tuple[Tensor, ...]:
    """Embeddings of several layers as kernels read them, in float32 or wider: of each [Σ 2 · extent, c].

    embeddings: those of `attend_together` of each layer, one after the other.
    """
    result: tuple[Tensor, ...] = _Lines.apply(embeddings, layers)  # type: ignore[no-untyped-call]
    return result


class _Lines(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, layers: Layers) -> tuple[Tensor, ...]:
        ctx.layers, ctx.dtype = layers, embeddings.dtype
        exact = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        lines = exact.index_select(0, table((_orders(layers)[0],), embeddings.device)[0])
        sizes = [sum(2 * c * extent for extent, _ in kinds) for kinds, c in layers]
        return tuple(own.view(-1, c) for own, (_, c) in zip(torch.split(lines, sizes), layers, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        flat = torch.cat([own.reshape(-1) for own in gradients])
        return flat.index_select(0, table((_orders(ctx.layers)[1],), flat.device)[0]).to(ctx.dtype), None


def _in_vector(lines: Tensor, kinds: Kinds) -> Tensor:
    """The reverse of `in_lines`."""
    return lines.reshape(-1).index_select(0, table((_order(kinds, lines.shape[1])[1],), lines.device)[0])


def attend_together_reference(
    packed: Tensor, embeddings: Tensor, kinds: Kinds, others: Sequence[Tensor] = ()
) -> Tensor:
    """The plain twin of `attend_together`."""
    c = packed.shape[-1] // 3
    parts = torch.split(embeddings, [2 * c * extent for extent, _ in kinds])
    found = []
    for own, part, (extent, heads) in zip(packed, parts, kinds, strict=True):
        rows, columns = part.view(2, heads, -1, extent)
        found.append(_plainly(own.permute(0, 3, 1, 2), rows, columns).permute(0, 2, 3, 1))
    return torch.stack([*found, *others])


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, lines: Tensor, kinds: Kinds, room: Room | None, *others: Tensor) -> Tensor:
        ctx.kinds, ctx.room, ctx.others = kinds, room, len(others)
        count, c = len(packed), packed.shape[-1] // 3
        packed = packed.contiguous()
        every = packed.new_empty(count + len(others), *packed.shape[1:-1], c)
        _, lse = triton_kernels("local").forward(packed, lines, kinds, out=every[:count])
        for place, other in zip(every[count:].unbind(), others, strict=True):
            place.copy_(other)
        ctx.save_for_backward(packed, lines, every, lse)
        return every

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed, lines, every, lse = ctx.saved_tensors
        count = len(packed)
        rest = grad[count:].unbind()
        if torch.is_grad_enabled():

            def twin(*own: Tensor | None) -> list[Tensor]:
                own_packed, own_lines = own
                assert own_packed is not None and own_lines is not None
                return [attend_together_reference(own_packed, _in_vector(own_lines, ctx.kinds), ctx.kinds)]

            dpacked, dlines = by_twin(twin, (packed, lines), [grad[:count]])
            return dpacked, dlines, None, None, *rest
        wanted = is_wanted(ctx, 1)
        whole = packed.new_empty(count + ctx.others, *packed.shape[1:])
        if ctx.room is not None:
            ctx.room.gradient = whole
        dy = grad[:count].to(packed.dtype).contiguous()
        given = (packed, lines, every[:count], lse, dy, ctx.kinds)
        out, partial = triton_kernels("local").backward(*given, positions=wanted, out=whole[:count])
        dlines = triton_kernels("local").summed(partial) if wanted else None
        return out, dlines, None, None, *rest


@functools.cache
def _orders(layers: Layers) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`_order` of several layers, one after the other."""
    found: tuple[list[int], list[int]] = ([], [])
    for kinds, c in layers:
        start = len(found[0])
        for places, own in zip(found, _order(kinds, c), strict=True):
            places += [start + place for place in own]
    return tuple(found[0]), tuple(found[1])


@functools.cache
def _order(kinds: Kinds, c: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Places of embeddings [c, extent] in lines [extent, c], rows and columns of each attention; and the reverse."""
    to_lines, start = [], 0
    for extent, _ in kinds:
        for _ in range(2):
            to_lines += [start + channel * extent + line for line in range(extent) for channel in range(c)]
            start += c * extent
    to_vector = [0] * len(to_lines)
    for place, source in enumerate(to_lines):
        to_vector[source] = place
    return tuple(to_lines), tuple(to_vector)
