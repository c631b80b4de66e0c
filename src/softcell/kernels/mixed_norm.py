"""The weighted sum of several maps, each normalised by its batch, and of a shortcut that all of them add.

    y = Σ_k w_k · (ẑ_k + shortcut),   ẑ_k = (z_k − mean_k) · rstd_k

for the blocks k of one layer, in three launches each way: neither the normalised maps nor their sums with the shortcut
are stored. With m rows and g = ∂y

    ∂z_k = w_k · rstd_k · (g − Σg / m − ẑ_k · Σ(g·ẑ_k) / m)    ∂w_k = Σ g·ẑ_k + Σ g·shortcut    ∂shortcut = g · Σ w_k

where the sums of ∂w are over channels, too. Statistics and sums are float32; only z and the shortcut are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softcell.kernels.backend import by_twin, is_wanted, runs_triton, triton_kernels


def mixed_norm(
    z: Tensor, weights: Tensor, eps: float, *, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """z [k, n, h, w, c], weights [k], shortcut [n, c, h, w] or None; returns y [n, c, h, w], mean and variance [k, c].

    The variances are biased. Statistics have no gradient of their own. Uses Triton kernels where available; y is
    channels-last then. z is read without a copy if the blocks are stored one after the other, or pixel by pixel.
    """
    if z[0].numel() <= z.shape[-1]:
        raise ValueError(f"training needs more than 1 value per channel, but got {tuple(z.shape[1:])}")
    if not runs_triton(z):
        return mixed_norm_reference(z, weights, eps, shortcut=shortcut)
    result: tuple[Tensor, Tensor, Tensor] = _MixedNorm.apply(z, weights, shortcut, eps)  # type: ignore[no-untyped-call]
    return result


def mixed_norm_reference(
    z: Tensor, weights: Tensor, eps: float, *, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The plain twin of `mixed_norm`."""
    exact = z.to(torch.promote_types(z.dtype, torch.float32))
    variance, mean = torch.var_mean(exact, (1, 2, 3), correction=0)
    y = (exact - mean[:, None, None, None]) * torch.rsqrt(variance + eps)[:, None, None, None]
    weights = weights.to(y.dtype)
    total = (weights[:, None, None, None, None] * y).sum(0).permute(0, 3, 1, 2)
    if shortcut is not None:
        total = total + weights.sum() * shortcut
    return total.to(z.dtype), mean.detach(), variance.detach()


class _MixedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, weights: Tensor, shortcut: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        shares = weights.float()
        y, moments = triton_kernels("mixed_norm").forward(_laid_out(z), shares, _rows(shortcut, z.dtype), eps)
        ctx.save_for_backward(z, weights, shares, shortcut, moments)
        ctx.eps = eps
        mean, _, variance = moments.unbind()
        ctx.set_materialize_grads(False)  # zeros for the statistics would be two launches
        ctx.mark_non_differentiable(mean, variance)
        return y.permute(0, 3, 1, 2), mean, variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 4
        z, weights, shares, shortcut, moments = ctx.saved_tensors
        if torch.is_grad_enabled():  # only the twin supports second derivatives

            def twin(*own: Tensor | None) -> list[Tensor]:
                own_z, own_weights, own_shortcut = own
                assert own_z is not None and own_weights is not None
                return [mixed_norm_reference(own_z, own_weights, ctx.eps, shortcut=own_shortcut)[0]]

            dz, dweights, dshortcut = by_twin(twin, (z, weights, shortcut), [grad])
            return dz, dweights, dshortcut, None
        given = (_laid_out(z), shares, _rows(shortcut, z.dtype), moments, _rows(grad, z.dtype))
        # Weight steps need no gradient of the mix, and an architecture step none of the first layer's maps.
        wanted = is_wanted(ctx, 0), is_wanted(ctx, 1), shortcut is not None and is_wanted(ctx, 2)
        dz, dweights, dx = triton_kernels("mixed_norm").backward(*given, *wanted)
        dweights = None if dweights is None else dweights.to(weights.dtype)
        return dz, dweights, None if dx is None else dx.permute(0, 3, 1, 2), None


def _laid_out(z: Tensor) -> Tensor:
    """z [k, n, h, w, c] with its blocks one after the other, or pixel by pixel."""
    return z if z.is_contiguous() or z.permute(1, 2, 3, 0, 4).is_contiguous() else z.contiguous()


def _rows(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """[n, c, h, w] as [n, h, w, c] without gaps, which is a view of a channels-last map of this type."""
    return None if x is None else x.permute(0, 2, 3, 1).to(dtype).contiguous()
