"""Optimisers, learning-rate schedules and the plain training step.

A step can be captured as a CUDA graph: learning rates live on the device and are filled in place.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.engine.distributed import World, average_
from softcell.engine.metrics import sum_dtype
from softcell.engine.reduce import gradients_of
from softcell.kernels.backend import runs_triton
from softcell.kernels.sgd import sgd_step


def apply_gradients(
    optimiser: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor | None],
    world: World,
    clip: float,
    *,
    averaged: bool = False,
) -> None:
    """Average gradients over ranks (unless `averaged`), clip them by norm (0: no clipping) and step.

    gradients: one per parameter, of its shape; a parameter whose gradient is None is left unchanged.
    """
    own = [_laid_out_like(p, g) for p, g in zip(parameters, _owned(gradients), strict=True)]
    if not averaged:
        average_([gradient for gradient in own if gradient is not None], world)
    # Clipped after averaging, so that all ranks clip by the same norm.
    if type(optimiser) is torch.optim.SGD and _step_at_once(optimiser, parameters, own, clip):
        return
    for parameter, gradient in zip(parameters, own, strict=True):
        parameter.grad = gradient
    if clip > 0:
        nn.utils.clip_grad_norm_(parameters, clip)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


@torch.no_grad()
def rehearse_gradients(
    optimiser: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor | None],
    clip: float,
) -> None:
    """Launch the kernels of `apply_gradients` for a parameter of its own: what a dry pass compiles."""
    own = [_laid_out_like(p, g) for p, g in zip(parameters, _owned(gradients), strict=True)]
    if type(optimiser) is torch.optim.SGD and _momenta_at_once(optimiser, parameters, own) is not None:
        blank = [torch.zeros(1, device=parameters[0].device) for _ in range(4)]
        sgd_step(blank[:1], blank[1:2], blank[2:3], blank[3][0], clip=clip, **_rule(optimiser))


@torch.no_grad()
def _step_at_once(
    optimiser: torch.optim.SGD, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], clip: float
) -> bool:
    """Clip and step by `sgd_step`, if it can and all parameters have gradients; whether it did."""
    momenta = _momenta_at_once(optimiser, parameters, gradients)
    if momenta is None:
        return False
    known = [gradient for gradient in gradients if gradient is not None]
    sgd_step(parameters, known, momenta, optimiser.param_groups[0]["lr"], clip=clip, **_rule(optimiser))
    return True


def _rule(optimiser: torch.optim.SGD) -> dict[str, Any]:
    return {name: optimiser.param_groups[0][name] for name in ("momentum", "weight_decay", "nesterov")}


def _momenta_at_once(
    optimiser: torch.optim.SGD, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]
) -> list[Tensor] | None:
    """The momenta of the parameters, if `sgd_step` can make a step; else None.

    Steps that update changing sets of parameters would need a table of addresses for each set. Hooks of steps are only
    called by torch's.
    """
    if len(optimiser.param_groups) > 1 or not (parameters and runs_triton(parameters[0])):
        return None
    if optimiser._optimizer_step_pre_hooks or optimiser._optimizer_step_post_hooks:
        return None
    group = optimiser.param_groups[0]
    lr, plain = group["lr"], not (group["dampening"] or group["maximize"])
    plain = plain and isinstance(lr, Tensor) and lr.device == parameters[0].device
    known = [gradient for gradient in gradients if gradient is not None]
    if not plain or len(known) < len(parameters):
        return None
    momenta = [optimiser.state.get(p, {}).get("momentum_buffer") for p in parameters]
    found = [m for m in momenta if m is not None]
    if len(found) < len(parameters) or not all(map(_alike, parameters, known, found)):
        return None
    return found


def _alike(parameter: Tensor, gradient: Tensor, momentum: Tensor) -> bool:
    """Whether the values of all three are float32 and in the same order, without gaps."""
    dense = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
    same = parameter.stride() == gradient.stride() == momentum.stride()
    return dense and same and parameter.dtype == gradient.dtype == momentum.dtype == torch.float32


def _laid_out_like(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """The gradient with the strides of its parameter, which fused optimisers require."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    sides = zip(parameter.shape, parameter.stride(), gradient.stride(), strict=True)
    if all(own == given for n, own, given in sides if n > 1):  # strides of size 1 have no effect
        return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())
    return torch.empty_like(parameter).copy_(gradient)


def _owned(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients that may be changed in place: autograd returns one tensor for both terms of a sum, and broadcasts.

    Disjoint parts of one buffer, as fused cells return them, are not copied: that would cost a launch per weight.
    """
    storages = [None if g is None or not g.numel() else g.untyped_storage().data_ptr() for g in gradients]
    sharing = Counter(storages)
    taken: dict[int, list[tuple[int, int]]] = {}  # by storage, in order
    result: list[Tensor | None] = []
    for gradient, storage in zip(gradients, storages, strict=True):
        # Nearly all gradients on a CPU have their own storage, and steps of small networks would notice more Python.
        if gradient is not None and storage is not None and (sharing[storage] > 1 or 0 in gradient.stride()):
            strides = [(n - 1, step) for n, step in zip(gradient.shape, gradient.stride(), strict=True) if n > 1]
            first = int(gradient.storage_offset())
            span = (first, first + 1 + sum(last * step for last, step in strides))
            spans = taken.setdefault(storage, [])
            # Spans in the list are disjoint, so only the two neighbours can overlap this one.
            place = bisect(spans, span)
            meets = any(one[0] < span[1] and span[0] < one[1] for one in spans[max(0, place - 1) : place + 1])
            if meets or any(step == 0 for _, step in strides):
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            else:
                spans.insert(place, span)
        result.append(gradient)
    return result


def load_optimiser(optimiser: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Restore a `state_dict`, but keep this optimiser's device and implementation (`foreach`, `fused`, `capturable`).

    torch's `load_state_dict` would install the saved learning rate, a tensor on the host, whose value a captured step
    would freeze.
    """
    groups = []
    for own, saved in zip(optimiser.param_groups, state["param_groups"], strict=True):
        kept: dict[str, Any] = {key: own[key] for key in ("foreach", "fused", "capturable") if key in own}
        rate = float(saved["lr"])
        kept["lr"] = torch.full_like(own["lr"], rate) if isinstance(own["lr"], Tensor) else rate
        groups.append({**saved, **kept})
    optimiser.load_state_dict({"state": state["state"], "param_groups": groups})
    # The state of a run on a CPU lacks momenta of parameters that had no gradient yet.
    if any(group.get("fused") for group in optimiser.param_groups):
        fill_momenta(optimiser)


def sgd(
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool = False,
) -> torch.optim.SGD:
    """SGD with momentum; fused on CUDA, where its learning rate is a tensor."""
    on_cuda = device.type == "cuda"
    optimiser = torch.optim.SGD(
        parameters,
        lr=torch.tensor(lr, device=device) if on_cuda else lr,
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=nesterov,
        fused=True if on_cuda else None,
        foreach=None if on_cuda else True,
    )
    if on_cuda:
        fill_momenta(optimiser)
    return optimiser


def fill_momenta(optimiser: torch.optim.Optimizer) -> None:
    """Create missing momentum buffers, filled with zeros.

    The first step then results in the same buffer, 0.9 · 0 + g = g. torch's fused SGD requires all buffers or none, but
    parameters may get their first gradient at different steps. A captured step needs the buffers too.
    """
    for group in optimiser.param_groups:
        if group.get("momentum"):
            for parameter in group["params"]:
                state = optimiser.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def adam(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    device: torch.device,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.Adam:
    """Adam with weight decay added to the gradient; on CUDA its step counters are on the device.

    parameters: or groups of them, with an optional `lr` and `weight_decay` each.
    """
    on_cuda = device.type == "cuda"
    listed: list[Any] = list(parameters)
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    if on_cuda:
        groups = [{**group, "lr": torch.tensor(group.get("lr", lr), device=device)} for group in groups]
    return torch.optim.Adam(
        groups,
        lr=torch.tensor(lr, device=device) if on_cuda else lr,
        betas=betas,
        weight_decay=weight_decay,
        foreach=True,
        capturable=on_cuda,
    )


def adamw(
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.AdamW:
    """Adam with decoupled weight decay, which does not apply to vectors: biases, and scales of normalisation layers."""
    on_cuda = device.type == "cuda"
    listed = list(parameters)
    groups = [
        {"params": [p for p in listed if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in listed if p.dim() <= 1], "weight_decay": 0.0},
    ]
    rate = torch.tensor(lr, device=device) if on_cuda else lr
    filled = [group for group in groups if group["params"]]
    return torch.optim.AdamW(filled, lr=rate, betas=betas, foreach=True, capturable=on_cuda)


class RMSpropTF(torch.optim.Optimizer):
    """RMSprop as in TensorFlow, which EfficientNet's protocol uses; torch's differs in three ways.

    ε is added under the root, the mean of squares starts at 1, and the learning rate is inside the momentum:

        v = ρ v + (1 - ρ) g²,  m = μ m + lr · g / √(v + ε),  p = p - m
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float | Tensor,
        decay: float = 0.9,
        momentum: float = 0.9,
        eps: float = 1e-3,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "decay": decay, "momentum": momentum, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step; it does not synchronise with the host, so it can be captured."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["squares"] = torch.ones_like(parameter, memory_format=torch.preserve_format)
                    state["momenta"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                gradient = parameter.grad.add(parameter, alpha=group["weight_decay"])
                squares, momenta = state["squares"], state["momenta"]
                squares.mul_(group["decay"]).addcmul_(gradient, gradient, value=1.0 - group["decay"])
                gradient.div_((squares + group["eps"]).sqrt_()).mul_(group["lr"])
                momenta.mul_(group["momentum"]).add_(gradient)
                parameter.sub_(momenta)


def rmsprop(
    parameters: Iterable[nn.Parameter], device: torch.device, *, lr: float, momentum: float, weight_decay: float
) -> RMSpropTF:
    """`RMSpropTF`; on CUDA its learning rate is a tensor."""
    rate = torch.tensor(lr, device=device) if device.type == "cuda" else lr
    return RMSpropTF(parameters, lr=rate, momentum=momentum, weight_decay=weight_decay)


Fall = Literal["cosine", "linear", "exponential"]


def cosine(epoch: float, num_epochs: int, first: float, last: float) -> float:
    """Cosine decay from `first` at epoch 0 to `last` at `num_epochs`."""
    return last + 0.5 * (first - last) * (1.0 + math.cos(math.pi * epoch / num_epochs))


def linear(epoch: float, num_epochs: int, first: float, last: float) -> float:
    return first + (last - first) * epoch / num_epochs


def exponential(epoch: float, first: float, factor: float) -> float:
    """`first` times `factor` for every epoch."""
    return float(first * factor**epoch)


def rate_at(
    epoch: int,
    num_epochs: int,
    first: float,
    last: float,
    schedule: Fall,
    *,
    warmup: int = 0,
    factor: float = 1.0,
    every: int = 1,
) -> float:
    """The rate of an epoch: a linear rise to `first` over `warmup` epochs, then the schedule over the remaining ones.

    `exponential` multiplies by `factor` every `every` epochs and has no `last`.
    """
    if epoch < warmup:
        return first * (epoch + 1) / warmup
    past, length = epoch - warmup, num_epochs - warmup
    match schedule:
        case "cosine":
            return cosine(past, length, first, last)
        case "linear":
            return linear(past, length, first, last)
        case "exponential":
            return exponential(past // every, first, factor)


def rate_in(
    progress: float, epochs_done: float, first: float, last: float, schedule: Fall, *, warmup: float = 0.0
) -> float:
    """The rate after a share `progress` of a run, 0 to 1: the lower one of a linear rise and the schedule.

    warmup: the length of the rise, in epochs, or below 1 as a share of the run. An exponential schedule has no end that
    it could reach within a run, so it is not offered here.
    """
    assert schedule != "exponential"
    fall = (cosine if schedule == "cosine" else linear)(progress, 1, first, last)
    done = progress if warmup < 1 else epochs_done
    return min(first * done / warmup, fall) if done < warmup else fall


class AveragedWeights:
    """The exponential moving average of a module's weights; a captured step may update it.

    After t updates the decay is min(`decay`, (1 + t) / (10 + t)): short training runs also forget their random weights.
    Statistics of batch normalisation are averaged like weights: those of the module belong to other weights. Whole
    numbers (such as counts of batches) are not averaged; a module keeps its own.

    Example:
        >>> import torch
        >>> from softcell.engine.optim import AveragedWeights
        >>> layer = torch.nn.Linear(1, 1)
        >>> average = AveragedWeights(layer, decay=0.9)
        >>> average.update()  # the layer has not changed, nor has the average
        >>> with average.applied():
        ...     torch.equal(layer.weight, average.tensors["weight"])
        True
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay = decay
        # Tensors of a state dict share their memory with the module.
        self._own = {name: t for name, t in module.state_dict().items() if t.is_floating_point()}
        self.tensors = {name: t.clone() for name, t in self._own.items()}
        self.updates = torch.zeros((), dtype=torch.int64, device=next(iter(self._own.values())).device)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the module's weights of this moment."""
        self.updates += 1
        count = self.updates.to(sum_dtype(self.updates.device))
        weight = 1.0 - ((1.0 + count) / (10.0 + count)).clamp(max=self._decay)
        own, mean = list(self._own.values()), list(self.tensors.values())
        difference = torch._foreach_sub(own, mean)
        torch._foreach_mul_(difference, weight.to(own[0].dtype))
        torch._foreach_add_(mean, difference)

    def apply(self) -> None:
        """Give the module the averaged weights."""
        _copy(self._own.values(), self.tensors.values())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the module has the averaged weights; afterwards its own, bit for bit."""
        kept = [tensor.clone() for tensor in self._own.values()]
        self.apply()
        try:
            yield
        finally:
            _copy(self._own.values(), kept)

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": dict(self.tensors), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore in place: a captured step keeps its tensors."""
        assert state["tensors"].keys() == self.tensors.keys()
        _copy(self.tensors.values(), [state["tensors"][name] for name in self.tensors])
        self.updates.copy_(state["updates"])


@torch.no_grad()
def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def set_lr(optimiser: torch.optim.Optimizer, lr: float) -> None:
    for group in optimiser.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)  # in place, so that a captured step sees it
        else:
            group["lr"] = lr


def classification_step(
    network: Any,
    optimiser: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    world: World,
    *,
    clip: float,
    label_smoothing: float = 0.0,
    auxiliary: float = 0.0,
    also: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """One training step of a classifier; returns the loss [] of the main head and its logits [n, classes].

    The objective is the cross-entropy plus `auxiliary` times that of the auxiliary tower, if there is one. images:
    [n, c, h, w]. labels: int64 [n]. also: tensors that are averaged over the ranks together with the gradients.

    network: a module whose `forward_with_auxiliary` returns both logits, the second None without a tower.
    """
    logits, extra = network.forward_with_auxiliary(images)
    loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    total = loss
    if extra is not None and auxiliary > 0:
        total = loss + auxiliary * F.cross_entropy(extra, labels, label_smoothing=label_smoothing)
    parameters = list(network.parameters())
    found = gradients_of(total, parameters, world, also=also)
    apply_gradients(optimiser, parameters, found.means, world, clip, averaged=True)
    return loss.detach(), logits.detach()
