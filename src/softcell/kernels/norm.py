"""Batch-norm without scale and shift, and the weighted sum that forms a node, over planes [planes, n, h, w, c].

A node is Σ_k w_k · (y_k − mean_k) · rstd_k over all its inputs, so one pass normalises and mixes. With the
node's gradient g, ŷ = (y − mean) · rstd and m rows,

    ∂w_k = Σ g·ŷ_k        ∂y_k = w_k · rstd_k · (g − Σg / m − ŷ_k · Σ(g·ŷ_k) / m)

so all candidates of a node share one reducing pass and one writing pass. With drop-path, the contribution of a choice
is scaled per sample, and so is g for that choice.

Derived cells, whose norms have scale γ and shift β, compute the same sums with weights per channel: Σ_k γ_k · ŷ_k +
β_k. ∂γ_k = Σ g·ŷ_k and ∂β_k = Σg, both per channel, are computed anyway. Such a mix is [1 + 2 · norms, c]: ones, then γ
and β of every norm. Planes without a norm use row 0, the ones, which have no gradient.

Every function has a `_reference` twin of the same signature in plain PyTorch, which is also the CPU path. Statistics
and sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from softcell.kernels.backend import runs_triton, triton_kernels
from softcell.kernels.taps import TILE, tile_sums


@dataclass(frozen=True, slots=True)
class Term:
    """One input of a node: `plane` with the mixing weight at `weight`; per channel with γ there and β in the next row.

    `normed`: normalised with the plane's statistics. `through`: the plane is itself a node (identity), so its gradient
    is not written here. `adds`: accumulate into the plane's gradient, to which another node has contributed. `choice`:
    its row of drop-path factors.
    """

    plane: int
    weight: int
    normed: bool
    choice: int = 0
    through: bool = False
    adds: bool = False


def finish_moments(partial: Tensor, rows: int, moments: Tensor, planes: range, eps: float) -> None:
    """Merges statistics of tiles of rows (Chan, Golub & LeVeque 1983).

    partial [2, tiles, planes, c] as written by `convolve`; moments [3, planes, c] gets mean, 1/√(variance + eps) and
    biased variance of `planes`.
    """
    if planes:
        kernel = triton_kernels("norm").finish_moments if runs_triton(moments) else finish_moments_reference
        kernel(partial, rows, moments, planes, eps)


def finish_moments_reference(partial: Tensor, rows: int, moments: Tensor, planes: range, eps: float) -> None:
    sums, squares = partial[:, :, planes.start : planes.stop]
    counts = torch.full((len(sums), 1, 1), TILE, dtype=sums.dtype, device=sums.device)
    counts[-1] = rows - TILE * (len(sums) - 1)
    mean = sums.sum(0) / rows
    variance = (squares + counts * (sums / counts - mean).square()).sum(0) / rows
    moments[:, planes.start : planes.stop] = torch.stack([mean, torch.rsqrt(variance + eps), variance])


def normalise(y: Tensor, moments: Tensor, planes: range) -> None:
    """y = (y − mean) · rstd for `planes`, in place."""
    if planes:
        (triton_kernels("norm").normalise if runs_triton(y) else normalise_reference)(y, moments, planes)


def normalise_reference(y: Tensor, moments: Tensor, planes: range) -> None:
    for plane in planes:
        y[plane] = normed(y[plane], moments[:2, plane]).to(y.dtype)


def gradient_sums(y: Tensor, dy: Tensor, partial: Tensor, planes: range) -> None:
    """partial [2, tiles, planes, c] gets sums of dy and dy·y of `planes` per tile of rows, for `normalise_gradient`.

    Products are computed and summed in the dtype of `partial`: rounding each to bfloat16 would add an error.
    """
    if planes:
        (triton_kernels("norm").gradient_sums if runs_triton(y) else gradient_sums_reference)(y, dy, partial, planes)


def gradient_sums_reference(y: Tensor, dy: Tensor, partial: Tensor, planes: range) -> None:
    for plane in planes:
        partial[:, :, plane] = tile_sums(y[plane], dy[plane], partial.dtype)


def normalise_gradient(
    partial: Tensor, y: Tensor, dy: Tensor, moments: Tensor, planes: range, *, by_batch: bool
) -> None:
    """The gradient of `normalise`, in place: dy = rstd · (dy − Σdy / m − y · Σ(dy·y) / m), where y is normalised.

    partial [2, tiles, planes, c]: sums of dy and dy·y per tile. Without `by_batch` the statistics are constants, so dy
    = rstd · dy.
    """
    if planes:
        kernel = triton_kernels("norm").normalise_gradient if runs_triton(y) else normalise_gradient_reference
        kernel(partial, y, dy, moments, planes, by_batch=by_batch)


def normalise_gradient_reference(
    partial: Tensor, y: Tensor, dy: Tensor, moments: Tensor, planes: range, *, by_batch: bool
) -> None:
    rows = y[0].numel() // y.shape[-1]
    means = partial.sum(1) / rows if by_batch else torch.zeros_like(partial[:, 0])
    for plane in planes:
        inner = dy[plane] - means[0, plane] - y[plane] * means[1, plane]
        dy[plane] = (moments[1, plane] * inner).to(dy.dtype)


def combine(
    buffer: Tensor,
    moments: Tensor,
    mix: Tensor,
    factors: Tensor | None,
    node: int,
    terms: Sequence[Term],
    *,
    rectified: bool = False,
) -> None:
    """buffer[node] = Σ factors[t.choice] · mix[t.weight] · t's value, or Σ factors[t.choice] · (γ · t's value + β).

    buffer [planes, n, h, w, c], mix [weights] or [1 + 2 · norms, c] float32, factors [choices, n] of drop-path or None
    for ones. rectified: store the ReLU of that sum.
    """
    kernel = triton_kernels("norm").combine if runs_triton(buffer) else combine_reference
    kernel(buffer, moments, mix, factors, node, terms, rectified=rectified)


def combine_reference(
    buffer: Tensor,
    moments: Tensor,
    mix: Tensor,
    factors: Tensor | None,
    node: int,
    terms: Sequence[Term],
    *,
    rectified: bool = False,
) -> None:
    total = torch.zeros_like(buffer[node], dtype=moments.dtype)
    for t in terms:
        total += scaled(weighted(_value(buffer, moments, t), mix, t), factors, t.choice)
    buffer[node] = (total.relu() if rectified else total).to(buffer.dtype)


def combine_gradient(
    buffer: Tensor,
    gradient: Tensor,
    moments: Tensor,
    mix: Tensor,
    factors: Tensor | None,
    mix_gradient: Tensor,
    node: int,
    terms: Sequence[Term],
    *,
    by_batch: bool,
    merge: Callable[[Tensor], Tensor] | None = None,
    rectified: bool = False,
    arrived: Tensor | None = None,
) -> None:
    """Computes the gradients of all input planes of a node, and of their mixing weights, from gradient[node].

    buffer and gradient [planes, n, h, w, c]; factors [choices, n] or None; mix_gradient like `mix`, written at the
    weights (or γ and β) of the terms. merge: applied to the sums [any, c] over rows that enter the gradients of planes
    (`SharedRows.merge_sums`); gradients of mixing weights only cover this rank's rows. rectified: the node is the ReLU
    of a single normalised plane, scaled and shifted per channel. arrived [n, h, w, c]: first copied to gradient[node].
    """
    kernel = triton_kernels("norm").combine_gradient if runs_triton(buffer) else combine_gradient_reference
    given = (buffer, gradient, moments, mix, factors, mix_gradient, node, terms)
    kernel(*given, by_batch=by_batch, merge=merge, rectified=rectified, arrived=arrived)


def combine_gradient_reference(
    buffer: Tensor,
    gradient: Tensor,
    moments: Tensor,
    mix: Tensor,
    factors: Tensor | None,
    mix_gradient: Tensor,
    node: int,
    terms: Sequence[Term],
    *,
    by_batch: bool,
    merge: Callable[[Tensor], Tensor] | None = None,
    rectified: bool = False,
    arrived: Tensor | None = None,
) -> None:
    if not terms:
        return
    if arrived is not None:
        gradient[node] = arrived
    given = gradient[node].to(moments.dtype)
    if rectified:
        given = given * (buffer[node] > 0)
    rows = given.numel() // given.shape[-1]
    sums = moments.new_empty(2, len(terms), given.shape[-1])  # of g and of g·ŷ
    for i, t in enumerate(terms):
        g = scaled(given, factors, t.choice)
        sums[0, i] = g.sum((0, 1, 2))
        sums[1, i] = (g * _value(buffer, moments, t)).sum((0, 1, 2))
        if mix.dim() == 1:
            mix_gradient[t.weight] = sums[1, i].sum()
        elif t.normed:
            mix_gradient[t.weight], mix_gradient[t.weight + 1] = sums[1, i], sums[0, i]
    if merge is not None and by_batch:
        sums = merge(sums)
    means = sums / rows
    for i, t in enumerate(terms):
        if t.through:
            continue
        inner = scaled(given, factors, t.choice)
        if t.normed:
            if by_batch:
                inner = inner - means[0, i] - _value(buffer, moments, t) * means[1, i]
            inner = inner * moments[1, t.plane]
        inner = mix[t.weight] * inner
        gradient[t.plane] = (gradient[t.plane] + inner if t.adds else inner).to(gradient.dtype)


def distribute_gradient(
    buffer: Tensor,
    gradient: Tensor,
    moments: Tensor,
    mix: Tensor,
    factors: Tensor | None,
    node: int,
    terms: Sequence[Term],
) -> None:
    """gradient[t.plane] = factors[t.choice] · gradient[node], for inputs that have no norm and are not nodes.

    This is `combine_gradient` with a mix per channel, in which their weights are ones: nothing is reduced.
    """
    if terms:
        kernel = triton_kernels("norm").distribute_gradient if runs_triton(buffer) else distribute_gradient_reference
        kernel(buffer, gradient, moments, mix, factors, node, terms)


def distribute_gradient_reference(
    buffer: Tensor,
    gradient: Tensor,
    moments: Tensor,
    mix: Tensor,
    factors: Tensor | None,
    node: int,
    terms: Sequence[Term],
) -> None:
    for t in terms:
        own = scaled(gradient[node], factors, t.choice)
        gradient[t.plane] = gradient[t.plane] + own if t.adds else own


def normed(y: Tensor, moments: Tensor) -> Tensor:
    """y [..., c] normalised with moments [2, c]."""
    return (y - moments[0]) * moments[1]


def weighted(values: Tensor, mix: Tensor, t: Term) -> Tensor:
    """values [n, ., ., c] times the weight of `t`, or scaled and shifted per channel."""
    values = mix[t.weight] * values
    return values + mix[t.weight + 1] if mix.dim() == 2 and t.normed else values


def scaled(values: Tensor, factors: Tensor | None, choice: int) -> Tensor:
    """values [n, ., ., .], each sample scaled by its factor of `choice`."""
    return values if factors is None else values * factors[choice].to(values.dtype).view(-1, 1, 1, 1)


def _value(buffer: Tensor, moments: Tensor, t: Term) -> Tensor:
    value = buffer[t.plane].to(moments.dtype)
    return normed(value, moments[:2, t.plane]) if t.normed else value
