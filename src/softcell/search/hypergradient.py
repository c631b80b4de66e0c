"""The gradient of the validation loss after one virtual weight step (DARTS, Eq 6-8).

With w' = w - ξ (μ m + ∇_w L_train(w, α) + λ w), the chain rule gives

    d/dα L_val(w'(α), α) = ∇_α L_val(w', α) - ξ ∇²_{α,w} L_train(w, α) · v,    v = ∇_{w'} L_val(w', α)   (Eq 7)

The product with the mixed second derivative is taken by the finite difference of Eq 8 (DARTS's own way: two more
backward passes) or exactly by differentiating twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Loss = Callable[[Sequence[Tensor]], Tensor]
"""From weights to a loss []; the closure holds the architecture."""
Parts = list[Tensor | None]
Differentiate = Callable[[Tensor, Sequence[Tensor], bool], tuple[Parts, Parts]]
"""From a loss [], tensors, and whether to differentiate again, to gradients: means over the ranks, and local ones."""


def _alone(loss: Tensor, tensors: Sequence[Tensor], again: bool) -> tuple[Parts, Parts]:
    """`Differentiate` of a single process."""
    found: Parts = [*torch.autograd.grad(loss, tensors, create_graph=again, allow_unused=True)]
    return found, found


@dataclass(frozen=True)
class Unrolling:
    """`exact`: differentiate twice instead of the finite difference. `epsilon`: its step, divided by ‖v‖ (Eq 8)."""

    exact: bool = False
    epsilon: float = 0.01


def hypergradient(
    train_loss: Loss,
    validation_loss: Loss,
    weights: Sequence[Tensor],
    architecture: Sequence[Tensor],
    *,
    lr: float | Tensor,
    momentum: float = 0.0,
    momenta: Sequence[Tensor | None] | None = None,
    weight_decay: float = 0.0,
    settings: Unrolling | None = None,
    differentiate: Differentiate = _alone,
    average: Callable[[Sequence[Tensor]], None] | None = None,
) -> list[Tensor]:
    """The gradient for each tensor of `architecture`; `average` takes means over ranks, in place."""
    chosen = settings or Unrolling()
    reduce = average or (lambda tensors: None)
    values = [w.detach().requires_grad_() for w in weights]

    found, inner = differentiate(train_loss(values), values, chosen.exact)
    slopes = _filled(found, values)
    shifted = [
        _virtual_step(w, slope, lr, momentum, None if momenta is None else momenta[i], weight_decay)
        for i, (w, slope) in enumerate(zip(values, slopes, strict=True))
    ]

    # One backward gives both ∇_α L_val(w', α) and v.
    outer, _ = differentiate(validation_loss(shifted), [*architecture, *shifted], False)
    direct = _filled(outer[: len(architecture)], architecture)
    vector = _filled(outer[len(architecture) :], shifted)

    if chosen.exact:
        present = [(g, v) for g, v in zip(inner, vector, strict=True) if g is not None and g.requires_grad]
        product = sum((torch.sum(g * v) for g, v in present), start=torch.zeros((), device=vector[0].device))
        implicit = _filled(
            torch.autograd.grad(product, architecture, allow_unused=True) if present else [None] * len(architecture),
            architecture,
        )
    else:
        implicit = _finite_difference(train_loss, values, vector, architecture, chosen.epsilon)
    reduce(implicit)
    return [d - lr * i for d, i in zip(direct, implicit, strict=True)]


def _virtual_step(
    w: Tensor, slope: Tensor, lr: float | Tensor, momentum: float, moment: Tensor | None, weight_decay: float
) -> Tensor:
    """w' = w - ξ (μ m + ∇L + λ w), detached."""
    direction = slope + weight_decay * w.detach()
    if moment is not None:
        direction = direction + momentum * moment
    return (w.detach() - lr * direction).requires_grad_()


def _finite_difference(
    loss: Loss, values: Sequence[Tensor], vector: Sequence[Tensor], architecture: Sequence[Tensor], epsilon: float
) -> list[Tensor]:
    """(∇_α L(w + εv) - ∇_α L(w - εv)) / 2ε with ε = `epsilon` / ‖v‖ (Eq 8 and its footnote)."""
    norm = torch.stack([v.norm() for v in vector]).norm()
    step = epsilon / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    sides = []
    for sign in (1.0, -1.0):
        moved = [w.detach() + sign * step * v for w, v in zip(values, vector, strict=True)]
        sides.append(_filled(torch.autograd.grad(loss(moved), architecture, allow_unused=True), architecture))
    return [(plus - minus) / (2 * step) for plus, minus in zip(*sides, strict=True)]


def _filled(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [
        torch.zeros_like(tensor) if gradient is None else gradient.detach().clone()
        for gradient, tensor in zip(gradients, like, strict=True)
    ]
