"""Batch-norm of a channels-last map with what follows it in a block of attention, in three launches each way.

    y = act(γ · ẑ + β) · f + shortcut,   ẑ = (z − mean) · rstd

over the rows z [n·h·w, c] of a batch; act is ReLU or nothing; f is drop-path's factor of a sample, 1 without it. With
m rows and g = ∂y · f · [act is ReLU: γ·ẑ + β > 0]

    ∂β = Σg        ∂γ = Σ g·ẑ        ∂z = γ · rstd · (g − Σg / m − ẑ · Σ(g·ẑ) / m)        ∂shortcut = ∂y

Kernels reduce tiles of rows, merge the tiles, and write the result. Statistics and sums are float32; only z is kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.kernels.backend import by_twin, runs_triton, triton_kernels


def normed(
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    relu: bool = False,
    shortcut: Tensor | None = None,
    factors: Tensor | None = None,
    parts: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """z [n, c, h, w] normalised by its batch, then as above; returns y like z, and mean and biased variance [c].

    weight and bias (γ and β) [c], or None for ones and zeros; shortcut like z; factors [n] float32. Statistics have no
    gradient of their own. Uses Triton kernels where available, on channels-last maps. With several parts, which have no
    shortcut, y is [parts, n, h, w, c / parts]: the channels of each are a map of their own.
    """
    if z.numel() <= z.shape[1]:
        raise ValueError(f"training needs more than 1 value per channel, but got {tuple(z.shape)}")
    if not runs_triton(z):
        return normed_reference(z, weight, bias, eps, relu=relu, shortcut=shortcut, factors=factors, parts=parts)
    assert shortcut is None or parts == 1
    given = (z, weight, bias, shortcut, factors, eps, relu, parts)
    result: tuple[Tensor, Tensor, Tensor] = _Normed.apply(*given)  # type: ignore[no-untyped-call]
    return result


def normed_reference(
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    relu: bool = False,
    shortcut: Tensor | None = None,
    factors: Tensor | None = None,
    parts: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """The plain twin of `normed`."""
    exact = z.to(torch.promote_types(z.dtype, torch.float32))
    variance, mean = torch.var_mean(exact, (0, 2, 3), correction=0)
    y = (exact - mean[:, None, None]) * torch.rsqrt(variance + eps)[:, None, None]
    if weight is not None and bias is not None:
        y = y * weight[:, None, None] + bias[:, None, None]
    if relu:
        y = F.relu(y)
    if factors is not None:
        y = y * factors.to(y.dtype)[:, None, None, None]
    if shortcut is not None:
        y = y + shortcut
    if parts > 1:
        y = y.unflatten(1, (parts, -1)).permute(1, 0, 3, 4, 2).contiguous()  # type: ignore[no-untyped-call]
    return y.to(z.dtype), mean.detach(), variance.detach()


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shortcut: Tensor | None,
        factors: Tensor | None,
        eps: float,
        relu: bool,
        parts: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = _rows(z)
        given = (weight, bias, None if shortcut is None else _rows(shortcut), factors)
        y, moments = triton_kernels("block_norm").forward(rows, *given, eps, relu, parts)
        ctx.save_for_backward(z, weight, bias, factors, moments)
        ctx.has_shortcut, ctx.eps, ctx.relu, ctx.parts = shortcut is not None, eps, relu, parts
        mean, _, variance = moments.unbind()
        ctx.set_materialize_grads(False)  # zeros for the statistics would be two launches
        ctx.mark_non_differentiable(mean, variance)
        return y if parts > 1 else y[0].permute(0, 3, 1, 2), mean, variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        z, weight, bias, factors, moments = ctx.saved_tensors
        back = grad if ctx.has_shortcut else None
        if torch.is_grad_enabled():  # only the twin supports second derivatives

            def twin(*own: Tensor | None) -> list[Tensor]:
                own_z, own_weight, own_bias = own
                assert own_z is not None
                kind = {"relu": ctx.relu, "factors": factors, "parts": ctx.parts}
                return [normed_reference(own_z, own_weight, own_bias, ctx.eps, **kind)[0]]

            dz, dweight, dbias = by_twin(twin, (z, weight, bias), [grad])
            return dz, dweight, dbias, back, *(None,) * 4
        given = (_rows(z), weight, bias, factors, moments)
        grad = grad.to(z.dtype)
        dy = grad.contiguous() if ctx.parts > 1 else _rows(grad)[None]
        out, sums = triton_kernels("block_norm").backward(*given, dy, ctx.relu)
        dweight = None if weight is None else sums[1].to(weight.dtype)
        dbias = None if bias is None else sums[0].to(bias.dtype)
        return out.permute(0, 3, 1, 2), dweight, dbias, back, *(None,) * 4


def _rows(x: Tensor) -> Tensor:
    """[n, c, h, w] as [n, h, w, c] without gaps, which is a view of a channels-last map."""
    return x.permute(0, 2, 3, 1).contiguous()
