"""The three step regimes: single-level, bilevel, unrolled. Each is one small function.

Weights w belong to the supernet (and to an objective's own modules), architecture parameters α to the method. Under
several processes every gradient is the mean over ranks, so all of them stay identical (`softcell.engine.reduce`).

`hypergradient`, which `unrolled` uses, is the gradient of the validation loss after one virtual weight step (DARTS,
Eq 6-8). With w' = w - ξ (μ m + ∇_w L_train(w, α) + λ w), the chain rule gives

    d/dα L_val(w'(α), α) = ∇_α L_val(w', α) - ξ ∇²_{α,w} L_train(w, α) · v,    v = ∇_{w'} L_val(w', α)   (Eq 7)

The product with the mixed second derivative is a finite difference (Eq 8, as in DARTS: two more backward passes), or
exact by differentiating twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from softcell.arch import Mix
from softcell.engine.distributed import World, average_
from softcell.engine.optim import apply_gradients
from softcell.engine.reduce import gradients_of
from softcell.kernels.shared import Norms
from softcell.methods import Method
from softcell.nn.norm import running_statistics
from softcell.nn.objective import Evaluated, Objective
from softcell.nn.stochastic import SharedDraws
from softcell.search.resource import ResourcePenalty
from softcell.settings import positive
from softcell.spaces import Bound, Supernet


@dataclass(slots=True)
class StepState:
    """Everything that a step reads and changes."""

    supernet: Supernet
    method: Method
    objective: Objective
    weight_optimiser: torch.optim.Optimizer
    architecture_optimiser: torch.optim.Optimizer
    world: World
    clip_weights: float
    clip_architecture: float
    resource: ResourcePenalty | None = None
    norms: Norms = "shared"

    def weights(self) -> list[nn.Parameter]:
        modules: Iterable[nn.Module] = (self.supernet, self.objective)
        return [p for module in modules for p in module.parameters() if p.requires_grad]

    def architecture(self) -> list[nn.Parameter]:
        return [p for p in self.method.parameters() if p.requires_grad]

    def unequal(self) -> list[Tensor]:
        """The tensors that differ between ranks after a step, to be averaged: running statistics of local norms."""
        several = self.norms == "local" and self.world.size > 1
        return running_statistics((self.supernet, self.objective)) if several else []

    def penalty(self, mix: Mix) -> Tensor | None:
        """A term [] in the loss of the architecture: the method's own and the resource penalty."""
        own = self.method.penalty(mix)
        if self.resource is None:
            return own
        cost: Tensor = self.resource(self.method.occupancy(mix), mix)
        return cost if own is None else own + cost

    def watched(self, mix: Mix) -> Sequence[Tensor]:
        """The tensors whose gradients the method's observer needs."""
        observer = self.method.observer
        return () if observer is None else observer.watched(mix)

    def observe(self, mix: Mix, gradients: Sequence[Tensor | None]) -> None:
        if self.method.observer is not None:
            self.method.observer.observe(mix, gradients)

    def learn_weights(self, means: Sequence[Tensor | None]) -> None:
        """One step of the weights; means: gradients, averaged over the ranks."""
        optimiser, clip = self.weight_optimiser, self.clip_weights
        apply_gradients(optimiser, self.weights(), means, self.world, clip, averaged=True)

    def learn_architecture(self, means: Sequence[Tensor | None]) -> None:
        optimiser, clip = self.architecture_optimiser, self.clip_architecture
        apply_gradients(optimiser, self.architecture(), means, self.world, clip, averaged=True)


def single_level(state: StepState, images: Tensor, labels: Tensor) -> Evaluated:
    """Weights and architecture from one backward of one loss on one batch; images [n, c, h, w], labels int64 [n]."""
    mix = state.method.relax()
    result = state.objective(Bound(state.supernet, mix), images, labels)
    penalty = state.penalty(mix)  # after the forward pass: some methods weigh feature maps (`Method.occupancy`)
    total = result.loss if penalty is None else result.loss + penalty
    weights, architecture, watched = state.weights(), state.architecture(), state.watched(mix)
    found = gradients_of(total, [*weights, *architecture], state.world, watched=watched, also=state.unequal())
    state.learn_weights(found.means[: len(weights)])
    state.learn_architecture(found.means[len(weights) :])
    state.observe(mix, found.watched)
    return _detached(result)


def bilevel(
    state: StepState, train: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor]
) -> tuple[Evaluated, Evaluated]:
    """First order: the architecture learns from one batch at the current weights, then the weights from another.

    train, validation: images [n, c, h, w] and labels int64 [n]. Returns the results of both batches, in this order.
    """
    mix = state.method.relax()
    held = state.objective(Bound(state.supernet, mix), *validation)
    penalty = state.penalty(mix)
    total = held.loss if penalty is None else held.loss + penalty
    architecture, watched = state.architecture(), state.watched(mix)
    # Gradients of α only: the backward pass then never computes those of the convolutions' weights.
    found = gradients_of(total, architecture, state.world, watched=watched)
    state.learn_architecture(found.means)
    state.observe(mix, found.watched)
    return weight_step(state, *train), _detached(held)


def unrolled(
    state: StepState,
    train: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    settings: Unrolling,
) -> tuple[Evaluated, Evaluated]:
    """Second order: the architecture's gradient is taken after one virtual weight step (DARTS Eq 6-8).

    All evaluations of it see the same architecture sample, and those of the training batch the same dropped paths, so
    that Eq 8 is a difference of one function. The weight step after it draws its own, as in `bilevel`.
    """
    loss = _Loss(state)
    weights, architecture = state.weights(), state.architecture()
    # Without architecture parameters there is nothing to unroll.
    if not architecture:
        return bilevel(state, train, validation)
    group = state.weight_optimiser.param_groups[0]
    momenta = [state.weight_optimiser.state.get(p, {}).get("momentum_buffer") for p in weights]
    held: list[Evaluated] = []

    def validation_loss(values: Sequence[Tensor]) -> Tensor:
        result, total = loss.at(values, *validation, batch="validation")
        held.append(result)
        return total

    gradients = hypergradient(
        lambda values: loss.at(values, *train, batch="train")[0].loss,
        validation_loss,
        weights,
        architecture,
        lr=group["lr"],
        momentum=group["momentum"],
        momenta=momenta,
        weight_decay=group["weight_decay"],
        settings=settings,
        differentiate=lambda loss, by, again: gradients_of(loss, by, state.world, create_graph=again)[:2],
        average=lambda tensors: average_(tensors, state.world),
    )
    state.learn_architecture(gradients)
    return weight_step(state, *train), _detached(held[0])


def weight_step(state: StepState, images: Tensor, labels: Tensor) -> Evaluated:
    """One step of the weights with the architecture held fixed; images [n, c, h, w], labels int64 [n]."""
    with torch.no_grad():  # α does not learn here, so the mix keeps nothing for its gradient
        mix = state.method.relax()
    result = state.objective(Bound(state.supernet, mix), images, labels)
    found = gradients_of(result.loss, state.weights(), state.world, also=state.unequal())
    state.learn_weights(found.means)
    return _detached(result)


class _Loss(nn.Module):
    """The objective as a function of the weights only: all calls share one draw of random numbers.

    Running statistics stay untouched.
    """

    def __init__(self, state: StepState) -> None:
        super().__init__()
        self.supernet, self.objective = state.supernet, state.objective
        self._state = state  # not a module: α is not a weight and must not be replaced
        self._names = [name for name, p in self.named_parameters() if p.requires_grad]
        self._draws = SharedDraws()

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Evaluated, Tensor]:
        """The result of the batch, and its loss with the method's penalty."""
        mix = self._state.method.relax()
        result: Evaluated = self.objective(Bound(self.supernet, mix), images, labels)
        penalty = self._state.penalty(mix)
        return result, result.loss if penalty is None else result.loss + penalty

    def at(self, values: Sequence[Tensor], images: Tensor, labels: Tensor, *, batch: str) -> tuple[Evaluated, Tensor]:
        """`forward` with `values` in place of the weights and copies in place of the buffers.

        batch: the name of the batch; calls with one name share random numbers per image.
        """
        buffers = {name: buffer.clone() for name, buffer in self.named_buffers()}
        state = {**dict(zip(self._names, values, strict=True)), **buffers}
        with self._draws.evaluation(batch):
            result: tuple[Evaluated, Tensor] = functional_call(self, state, (images, labels))
        return result


def _detached(result: Evaluated) -> Evaluated:
    return Evaluated(result.loss.detach(), None if result.logits is None else result.logits.detach())


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
    """Settings of the second order (regime `unrolled`).

    `exact` differentiates twice instead of the paper's finite difference, whose step is `epsilon` / ‖v‖ (Eq 8).
    """

    exact: bool = False
    epsilon: float = 0.01

    def __post_init__(self) -> None:
        positive("unrolled.epsilon", self.epsilon)


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
    """The gradient for each tensor of `architecture`, of its shape; `average` takes means over ranks, in place."""
    chosen = settings or Unrolling()
    reduce = average or (lambda tensors: None)
    values = [w.detach().requires_grad_() for w in weights]

    # The virtual step needs the means over the ranks, which cannot be differentiated again. The local gradient
    # `inner` can, and products with it are averaged below.
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
        # Eq 7, second term: d/dα (∇_w L_train · v), with v held constant.
        product = sum((torch.sum(g * v) for g, v in present), start=torch.zeros((), device=vector[0].device))
        implicit = _filled(
            torch.autograd.grad(product, architecture, allow_unused=True) if present else [None] * len(architecture),
            architecture,
        )
    else:
        implicit = _finite_difference(train_loss, values, vector, architecture, chosen.epsilon)
    reduce(implicit)
    # Eq 7.
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
    # For v = 0 the bound keeps the step finite; without it w ± εv would be NaN.
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
