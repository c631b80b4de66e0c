"""Composes the dense kernels read by `taps` from the modules' weight factors, and computes the factors' gradients.

A *recipe* describes one convolution's kernel [c_out, taps, c_in] by the positions of its factors in one flat vector:

    product   pointwise[o, c] · depthwise[c, tap]
    halves    matrix[o, c] at the first tap for the first half of the outputs, at the last tap for the others
    copy      the kernel itself

Each function has a plain PyTorch twin named `_reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from softcell.kernels.backend import runs_triton, triton_kernels


class Kind(IntEnum):
    PRODUCT = 0
    HALVES = 1
    COPY = 2


@dataclass(frozen=True, slots=True)
class Recipe:
    """`matrix`: offset of the pointwise factor, the halves' matrix or the kernel; `depthwise`: offset of [c, taps]."""

    kind: Kind
    taps: int
    matrix: int
    depthwise: int
    target: int


def compose(factors: Tensor, out: Tensor, recipes: Sequence[Recipe], channels: int) -> None:
    """Writes kernels to out [size] from factors [any], both flat."""
    kernel = triton_kernels("compose").compose if runs_triton(factors) else compose_reference
    kernel(factors, out, recipes, channels)


def compose_reference(factors: Tensor, out: Tensor, recipes: Sequence[Recipe], channels: int) -> None:
    for r in recipes:
        size = channels * r.taps * channels
        out[r.target : r.target + size] = _kernel(factors, r, channels).flatten()


def compose_gradient(
    factors: Tensor, gradient: Tensor, factor_gradient: Tensor, recipes: Sequence[Recipe], channels: int
) -> None:
    """Writes factor_gradient, laid out like `factors`, from the gradient [size] of `compose`'s result."""
    kernel = triton_kernels("compose").compose_gradient if runs_triton(factors) else compose_gradient_reference
    kernel(factors, gradient, factor_gradient, recipes, channels)


def compose_gradient_reference(
    factors: Tensor, gradient: Tensor, factor_gradient: Tensor, recipes: Sequence[Recipe], channels: int
) -> None:
    # A backward pass runs with gradients disabled, but this needs them.
    with torch.enable_grad():
        probe = factors.detach().requires_grad_()
        kernels = [_kernel(probe, r, channels).flatten() for r in recipes]
    given = [gradient[r.target : r.target + len(k)] for r, k in zip(recipes, kernels, strict=True)]
    factor_gradient.copy_(torch.autograd.grad(kernels, probe, given)[0])


def _kernel(factors: Tensor, r: Recipe, c: int) -> Tensor:
    """The kernel [c_out, taps, c_in]; differentiable."""
    if r.kind is Kind.COPY:
        return factors[r.matrix : r.matrix + c * r.taps * c].view(c, r.taps, c)
    matrix = factors[r.matrix : r.matrix + c * c].view(c, 1, c)
    if r.kind is Kind.PRODUCT:
        return matrix * factors[r.depthwise : r.depthwise + c * r.taps].view(c, r.taps).t()[None]
    where = torch.zeros(c, r.taps, 1, dtype=factors.dtype, device=factors.device)
    where[: c // 2, 0] = 1
    where[c // 2 :, -1] = 1
    return matrix * where


def flat_kernels(factors: Tensor, recipes: Sequence[Recipe], channels: int) -> Tensor:
    """`compose` in plain PyTorch, for derivatives of any order."""
    return torch.cat([_kernel(factors, r, channels).flatten() for r in sorted(recipes, key=lambda r: r.target)])
