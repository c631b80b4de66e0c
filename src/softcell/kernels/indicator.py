"""An indicator token attends to maps and combines them (IT-NAS, Eq 3-4), for several edges g at once.

    t̂_k = LN(pool(X_k) + p_k),  l_k = asked·t̂_k + shift,  a = softmax([l_0, l_1 … l_m, l of zeros])
    T   = X_0 + (a_0 X_0 + Σ_k a_k X_k) W_v,  Y = LN(T),  output = LN(Y + FFN(Y))

In plain PyTorch this takes about twenty operations forward and fifty backward, most of them over whole maps. The Triton
kernels hold an image of an edge in registers: one launch forward and three backward. The backward pass keeps the maps,
the attention, and Y and the output before scale and shift. `indicate_reference` is the plain twin of `indicate`.

Where tokens are whole maps without a norm (`Form.is_flat`), the position adds asked·p_k to a logit, whatever the image:
the kernels then need no positions and no pooling, and a fourth launch sums the gradient of `asked`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.kernels.backend import by_twin, padded, runs_triton, shared_memory, triton_kernels
from softcell.kernels.mix import product

LARGEST = 2**15
"""Maximum bytes of a map, its sides rounded up to powers of two, that fit the registers of one program."""
TOKENS = 16
"""Maximum number of positions of a summary: products that pool more need more shared memory than any GPU has.

Whole maps without a norm (`Form.is_flat`) are not pooled.
"""


class Laid(NamedTuple):
    """The stacked parameters of g Lite-Transformers in a step; each attends to m maps of d pooled values.

    asked, shift: a normalised token t̂ has the logit asked·t̂ + shift; pooled values are channels-last here, like the
    maps. itself, zeros: the logits of the IT and of zero tokens. Fields from `own` on have the precision of the maps.
    """

    positions: Tensor  # [g, m, d]
    asked: Tensor  # [g, d, 1]
    shift: Tensor  # [g, 1, 1]
    itself: Tensor  # [g, 1]
    zeros: Tensor  # [g, zero tokens]
    own: Tensor  # [g, 1, h·w·c], the IT's map
    own_value: Tensor  # [g, 1, h·w·c], the value of the IT's map
    value: Tensor  # [g, c, c], multiplied from the right
    attention_scale: Tensor  # [g, 1, 1, c], of the norm that follows
    attention_shift: Tensor
    narrow: Tensor  # [g, c, inner]
    narrow_bias: Tensor  # [g, 1, inner]
    widen: Tensor  # [g, inner, c]
    widen_bias: Tensor  # [g, 1, c]
    ffn_scale: Tensor  # [g, 1, 1, c]
    ffn_shift: Tensor


UNREAD = ("shift", "itself", "zeros")
"""Fields that the backward pass does not read."""
COLUMNS = (
    *("attention_scale", "attention_shift", "ffn_scale", "ffn_shift", "widen_bias", "narrow_bias", "narrow", "widen"),
    *("value", "itself", "shift", "zeros", "asked", "positions", "own", "own_value"),
)
"""The order of the fields in a `vector`: what the kernels sum over images comes first."""


def widths(laid: Laid) -> dict[str, int]:
    """The length of each field in a `vector`, in its order; `shift` is repeated for every map."""
    found = {name: getattr(laid, name)[0].numel() for name in COLUMNS}
    return {**found, "shift": laid.positions.shape[1]}


def vector(laid: Laid) -> Tensor:
    """All parameters of each edge as one vector [g, w].

    Its gradient is one tensor for all fields, whereas each field of its own costs a few launches per group of edges.
    """
    shift = laid.shift.flatten(1).expand(-1, laid.positions.shape[1])
    return torch.cat([getattr(laid._replace(shift=shift), name).flatten(1) for name in COLUMNS], 1)


def columns(given: Tensor, laid: Laid) -> dict[str, Tensor]:
    """The fields of a vector [g, w], each [g, columns]; laid: gives their sizes."""
    own = widths(laid)
    return dict(zip(own, torch.split(given, list(own.values()), 1), strict=True))


class Form(NamedTuple):
    """Non-tensor arguments: the sides of the summaries, and the epsilons of the token and map norms.

    token_eps: None if tokens are not normalised; t̂ is then pool(X) + p.
    """

    sides: tuple[int, int]
    token_eps: float | None
    map_eps: float

    def is_flat(self, x: Tensor) -> bool:
        """Whether the tokens of maps [g·m, n, h, w, c] are the maps themselves, without a norm."""
        return self.token_eps is None and self.sides == tuple(x.shape[2:4])


def indicate(x: Tensor, laid: Laid, form: Form, whole: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Maps [g·m, n, h, w, c], m per edge, to outputs [g, n, h, w, c] and attention [g, n, 1 + m + zeros].

    whole: the `vector` of `laid`, if its parameters get their gradients through it; `laid` has none then.
    """
    if runs_kernels(x, form):
        given = (x, *laid) if whole is None else (x, whole)
        keeps = torch.is_grad_enabled() and any(one.requires_grad for one in given)
        return _Indicate.apply(form, keeps, x, whole, *laid)  # type: ignore[no-any-return, no-untyped-call]
    return indicate_reference(x, laid if whole is None else _unpacked(whole, laid), form)


def indicate_again(maps: Sequence[Tensor], laid: Laid, form: Form, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """`indicate` of separate maps [n, h, w, c]; keeps only them and the attention. Requires `runs_kernels`.

    The backward pass stacks and combines the maps again, which needs no logits and stores no output.
    """
    return _IndicateAgain.apply(form, whole, *laid, *maps)  # type: ignore[no-any-return, no-untyped-call]


def _unpacked(whole: Tensor, like: Laid) -> Laid:
    """The reverse of `vector`, in the shapes and dtypes of `like`."""
    own = columns(whole, like)
    own["shift"] = own["shift"][:, :1]  # all are equal
    return Laid(*(own[name].reshape(one.shape).to(one.dtype) for name, one in zip(Laid._fields, like, strict=True)))


def runs_kernels(x: Tensor, form: Form) -> bool:
    """Whether `indicate` runs the Triton kernels for maps like x [g·m, n, h, w, c]."""
    # torch.compile generates kernels from the plain form; a Triton call here would break its graph.
    return fits(x, form) and not torch.compiler.is_compiling()


def fits(x: Tensor, form: Form) -> bool:
    """Whether the Triton kernels support these maps on this device: summary windows divide the map, and a map fits."""
    (_, _, h, w, c), (rows, columns) = x.shape, form.sides
    if not runs_triton(x) or h % rows or w % columns or (rows * columns > TOKENS and not form.is_flat(x)):
        return False
    places, channels, size = padded(h * w), padded(c), x.element_size()
    bytes_of_map = places * channels * size
    # As compiled: up to 3 maps (bfloat16) or 6 (float32, with three tf32 products each) and the value weight.
    needed = (3 if size == 2 else 6) * bytes_of_map + channels * channels * size
    return bytes_of_map <= (LARGEST // 4 if wide(c, size) else LARGEST) and needed <= shared_memory(x.device)


def wide(channels: int, size: int) -> bool:
    """Whether 16-bit maps have rows of 128 bytes; they are then limited to two warps and a quarter of the size."""
    return size == 2 and padded(channels) * size >= 128


def indicate_reference(x: Tensor, laid: Laid, form: Form) -> tuple[Tensor, Tensor]:
    """The plain twin of `indicate`."""
    return indicate_by(pooled(x, form.sides, laid.positions.dtype), x, laid, form)


def pooled(x: Tensor, sides: tuple[int, int], exact: torch.dtype) -> Tensor:
    """Means [g·m, n, d] in `exact` over windows of maps [g·m, n, h, w, c]; channels-last, so no copy is needed."""
    (count, n, h, w, c), (rows, columns) = x.shape, sides
    parts = x.view(count, n, rows, h // rows, columns, w // columns, c)
    return parts.mean(dim=(3, 5), dtype=exact).flatten(2)


def indicate_by(small: Tensor, x: Tensor, laid: Laid, form: Form) -> tuple[Tensor, Tensor]:
    """`indicate_reference`, given the summaries [g·m, n, d] of the maps."""
    g, m = laid.positions.shape[:2]
    _, n, h, w, c = x.shape
    small = small.view(g, m, n, -1)
    tokens = normalised_tokens(small + laid.positions[:, :, None], form.token_eps)
    logits = torch.baddbmm(laid.shift, tokens.view(g, m * n, -1), laid.asked).view(g, m, n)
    before, after = (part[:, :, None].expand(-1, -1, n) for part in (laid.itself, laid.zeros))
    attention = torch.softmax(torch.cat([before, logits, after], dim=1), dim=1)  # Eq 4, [g, tokens, n]
    to_itself, to_maps, _ = torch.split(attention.to(x.dtype), [1, m, laid.zeros.shape[1]], dim=1)
    total = (x.view(g, m, n, h * w, c) * to_maps[..., None, None]).sum(1)
    # W_v X_0 (the IT's value) and X_0 (the residual) are the same for all images.
    base = torch.baddbmm(laid.own, to_itself.transpose(1, 2), laid.own_value)  # [g, n, h·w·c]
    total = product(total.view(g, -1, c), laid.value, base.view(g, -1, c)).view(g, n, h * w, c)
    total = _normalised(total, laid.attention_scale, laid.attention_shift, form.map_eps)
    inner = product(total.view(g, -1, c), laid.narrow, laid.narrow_bias)
    more = product(torch.relu(inner), laid.widen, laid.widen_bias)
    total = _normalised(total + more.view_as(total), laid.ffn_scale, laid.ffn_shift, form.map_eps)
    return total.view(g, n, h, w, c), attention.transpose(1, 2)


def normalised_tokens(x: Tensor, eps: float | None) -> Tensor:
    """t̂ [..., d] of pooled values plus positions [..., d]: normalised without scale and shift, or unchanged."""
    return x if eps is None else F.layer_norm(x, x.shape[-1:], eps=eps)


def _normalised(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """LayerNorm of [g, n, h·w, c] over each image."""
    return scaled_and_shifted(F.layer_norm(x, x.shape[2:], eps=eps), scale, shift)


class _Indicate(torch.autograd.Function):
    """`indicate` by Triton kernels; keeps: whether a backward pass will follow."""

    @staticmethod
    def forward(
        ctx: Any, form: Form, keeps: bool, x: Tensor, whole: Tensor | None, *laid: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, attention, *kept = triton_kernels("indicator").forward(x.contiguous(), _dense(laid), form, keeps)
        ctx.form = form
        ctx.set_materialize_grads(False)  # the gradient of the attention is rarely needed
        # The original tensors: second derivatives would not flow through copies.
        ctx.save_for_backward(x, whole, *laid, attention, *kept)
        return out, attention

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, towards: Tensor | None) -> tuple[Tensor | None, ...]:
        x, whole, *rest = ctx.saved_tensors
        laid, (attention, *kept) = Laid(*rest[: len(Laid._fields)]), rest[len(Laid._fields) :]
        with torch.autocast(x.device.type, enabled=False):  # as in the forward pass
            if torch.is_grad_enabled():  # only the twin supports second derivatives
                return None, None, *_differentiable_backward(ctx.form, x, whole, laid, [gradient, towards])
            return None, None, *_backward(ctx.form, x.contiguous(), whole, laid, attention, kept, gradient, towards)


class _IndicateAgain(torch.autograd.Function):
    """`indicate_again`; its arguments in the order of autograd, maps last."""

    @staticmethod
    def forward(ctx: Any, form: Form, whole: Tensor | None, *given: Tensor) -> tuple[Tensor, Tensor]:
        laid, maps = given[: len(Laid._fields)], given[len(Laid._fields) :]
        out, attention, *_ = triton_kernels("indicator").forward(torch.stack(maps), _dense(laid), form, False)
        ctx.form = form
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(whole, attention, *given)
        return out, attention

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, towards: Tensor | None) -> tuple[Tensor | None, ...]:
        form, (whole, attention, *given) = ctx.form, ctx.saved_tensors
        laid, maps = Laid(*given[: len(Laid._fields)]), given[len(Laid._fields) :]
        with torch.autocast(attention.device.type, enabled=False):
            x = torch.stack(maps)
            if torch.is_grad_enabled():
                dx, *rest = _differentiable_backward(form, x, whole, laid, [gradient, towards])
            else:
                kept = triton_kernels("indicator").forward_again(x, _dense(laid), form, attention)
                dx, *rest = _backward(form, x, whole, laid, attention, kept, gradient, towards)
        return None, *rest, *([None] * len(maps) if dx is None else dx.unbind())


def _dense(laid: Sequence[Tensor]) -> Laid:
    return Laid(*(part.contiguous() for part in laid))


def _backward(
    form: Form,
    x: Tensor,
    whole: Tensor | None,
    laid: Laid,
    attention: Tensor,
    kept: Sequence[Tensor],
    gradient: Tensor | None,
    towards: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of maps, vector and fields by the kernels; kept: what `forward` returns for it."""
    gradient = torch.zeros_like(kept[0]) if gradient is None else gradient.contiguous()
    given = Laid(*(p if name in UNREAD else p.contiguous() for name, p in zip(Laid._fields, laid, strict=True)))
    towards = None if towards is None else towards.contiguous()
    dx, found = triton_kernels("indicator").backward(x, given, form, attention, *kept, gradient, towards)
    if whole is not None:
        return dx, found, *[None] * len(laid)
    exact, low = columns(found, laid), columns(found.to(x.dtype), laid)
    exact["shift"] = low["shift"] = exact["shift"].sum(1)
    own = ((low if part.dtype == x.dtype else exact)[name] for name, part in zip(Laid._fields, laid, strict=True))
    return dx, None, *(one.reshape(part.shape) for one, part in zip(own, laid, strict=True))


def _differentiable_backward(
    form: Form, x: Tensor, whole: Tensor | None, laid: Laid, grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of maps, vector and fields by the twin: they can be differentiated again."""
    if whole is None:
        dx, *rest = by_twin(lambda own, *parts: indicate_reference(own, Laid(*parts), form), (x, *laid), grads)
        return dx, None, *rest
    found = by_twin(lambda own, given: indicate_reference(own, _unpacked(given, laid), form), (x, whole), grads)
    return *found, *[None] * len(laid)


class _ScaledAndShifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return torch.addcmul(shift, x, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        both = (gradient * x).sum_to_size(scale.shape), gradient.sum_to_size(scale.shape)
        return gradient * scale, *both


def scaled_and_shifted(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x · scale + shift, with scale and shift of the same shape: one operation forward and four backward.

    torch's gradient of `addcmul` first multiplies each factor by a constant, which is 1: an additional pass over x.
    """
    return _ScaledAndShifted.apply(x, scale, shift)  # type: ignore[no-any-return, no-untyped-call]
