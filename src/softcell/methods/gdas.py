"""GDAS: Searching for a Robust Neural Architecture in Four GPU Hours (Dong, Yang; CVPR 2019, arXiv:1910.04465).

    §3.2    one operation per edge, drawn with probability p = softmax(A)           -> `Gdas.probabilities`
            h = one_hot(argmax_k(log p_k + o_k)), o from Gumbel(0, 1)               -> `harden`
            its relaxation softmax((log p + o) / τ) gives the gradient              -> `concrete` (`softcell.arch.mix`)
            x_i = Σ_k h^k F_k(x_j); only the sampled operation runs                 -> `Gdas.relax`
            only the gradient of h at the sampled operation is used                -> `straight_through`
            weights learn on one half of the images, A on the other                 -> bilevel steps
    §4      τ falls linearly from 10 to 0.1                                         -> `Gdas.begin_epoch`
            the strongest operation of each edge                                    -> the space's rule

log p = A - logsumexp(A) and A give the same softmax, so A itself is perturbed. One sample per table and pass is shared
by all its sites. The weight of a sampled operation is exactly 1 and has the gradient of its relaxed sample; all other
weights are exactly 0 and have no gradient.

The authors' code for NAS-Bench-201 adds the weights h^k of the other operations to the node, x_i = h^s F_s(x_j) +
Σ_{k≠s} h^k. That adds 0, but ∂L/∂h^k is then the sum of ∂L/∂x_i over the feature map instead of 0. The softmax ignores
what all operations of an edge have in common, so the sampled one is in effect compared with a constant map instead of
no map. The published accuracy comes from that code; `unsampled="constant"` is its gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from softcell.arch import Layout, Mix, WeightMix
from softcell.arch.choice import LINK
from softcell.arch.mix import Schedule, concrete, live_where, temperature_at, with_links
from softcell.errors import UserError
from softcell.methods.base import Masks, Method, Regime, logits_like, register_method
from softcell.methods.parts import Planner
from softcell.nn.stochastic import draw_uniform
from softcell.settings import not_negative, positive


def harden(relaxed: Tensor, mask: Tensor, members: Tensor | None = None) -> Tensor:
    """1 at the largest weight of each choice and 0 elsewhere; in a contest, at the link that wins it.

    relaxed, mask [choices, width] and members bool [contests, choices] to [choices, width].
    """
    # Relaxed weights are never negative, so padding cannot win.
    rows = _one_hot(relaxed.masked_fill(~mask, -1.0))
    if members is None:
        return rows
    links = _one_hot(torch.where(members, relaxed[:, LINK], -1.0))  # [contests, choices]
    return with_links(rows, links, members, mask)


def straight_through(hard: Tensor, relaxed: Tensor) -> Tensor:
    """`hard` with the gradient of `relaxed` where it is 1 and none where it is 0; both [choices, width].

    The paper evaluates h only at the sampled operation. `relaxed - relaxed.detach()` is exactly 0, so the values are
    exactly 0 and 1.
    """
    return hard * (1.0 + (relaxed - relaxed.detach()))


def constants(hard: Tensor, relaxed: Tensor) -> Tensor:
    """Σ_k h^k over the operations that were not sampled, [choices, width] to [choices]: 0, with their gradient."""
    return ((1.0 - hard) * (relaxed - relaxed.detach())).sum(-1)


def _one_hot(values: Tensor) -> Tensor:
    """1 at the first largest of the last dimension, 0 elsewhere, [..., n] to [..., n]."""
    return torch.zeros_like(values).scatter(-1, values.argmax(-1, keepdim=True), 1.0)


@dataclass(frozen=True)
class GdasSettings:
    """Temperature, start of A, and what runs.

    `schedule`: how the temperature τ moves from `first_temperature` in the first epoch to `last_temperature` in the
    last. `init_scale`: deviation of the normal distribution that A starts from (1e-3 in the released code).

    `run`: "sampled" runs only the sampled candidates, as the paper does; "all" runs every candidate and multiplies the
    others by 0; "auto" is "sampled" on a CPU and "all" elsewhere.
    Deviation: on a GPU the host would have to wait for every sample, and a CUDA graph, which runs the same kernels at
    every replay, could not be used. Gradients are the same. What differs for candidates that were not sampled: under
    "all" their BatchNorm statistics are updated and SGD applies momentum and weight decay to their weights.

    `unsampled`: what the weight of an operation that was not sampled multiplies. "nothing" is the paper's, and gives it
    no gradient; "constant" is the released code's for NAS-Bench-201, a map of ones. Only the space `nb201` has it.
    """

    schedule: Schedule = "linear"
    first_temperature: float = 10.0
    last_temperature: float = 0.1
    init_scale: float = 1e-3
    run: Literal["auto", "sampled", "all"] = "auto"
    unsampled: Literal["nothing", "constant"] = "nothing"

    def __post_init__(self) -> None:
        positive("first_temperature", self.first_temperature)
        positive("last_temperature", self.last_temperature)
        not_negative("init_scale", self.init_scale)


class _SampledPaths(Planner):
    """`Gdas.relax` decides on the host what runs, so there is nothing to plan and no step to capture."""

    def __init__(self, method: Gdas) -> None:
        super().__init__()
        self._method = method

    def num_plans(self) -> int | None:
        """The number of sets of candidates that a step may run; None if it runs all of them."""
        if not self._method.runs_sampled_only():
            return None
        tables = self._method.layout.tables
        return math.prod(len(choice.candidates) for table in tables for choice in table.choices)


@register_method
class Gdas(Method):
    """Samples one operation per edge and pass; the distribution learns through the relaxed sample."""

    name: ClassVar[str] = "gdas"
    about: ClassVar[str] = "GDAS: one sampled operation per edge, gradients of its Gumbel-softmax; bilevel"
    regime: ClassVar[Regime] = "bilevel"
    many_cells: bool = True
    Settings: ClassVar[type] = GdasSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        # The released GDAS-NASNet-CIFAR.config of AutoDL-Projects.
        "paper": {"epochs": 250, "batch_size": 256, "weights": {"weight_decay": 5e-4}},
        # configs/nas-benchmark/algos/GDAS.config and scripts-search/NAS-Bench-201-algos/GDAS.sh there.
        "nb201": {
            "epochs": 250,
            "batch_size": 64,
            "weights": {"weight_decay": 5e-4},
            "method_settings": {"unsampled": "constant"},
        },
        "small": {"epochs": 24, "batch_size": 64, "weights": {"lr": 0.1}, "architecture": {"lr": 0.01}},
    }

    temperature: Tensor

    def __init__(self, layout: Layout, settings: GdasSettings) -> None:
        super().__init__(layout, settings)
        if settings.unsampled == "constant" and layout.space != "nb201":
            raise UserError(
                f"method.unsampled=constant requires space 'nb201', but got {layout.space!r}: the released code "
                "has it only there; set method.unsampled=nothing"
            )
        self.alpha = logits_like(layout, settings.init_scale)
        self.masks = Masks(layout)
        self.register_buffer("temperature", torch.tensor(settings.first_temperature))
        self.planner = _SampledPaths(self)

    def begin_epoch(self, progress: float) -> None:
        s = self.settings
        self.temperature.fill_(temperature_at(progress, s.first_temperature, s.last_temperature, s.schedule))

    def relax(self) -> Mix:
        samples, offsets = dict[str, Tensor](), dict[str, Tensor]()
        for name in self.alpha:
            hard, relaxed = self._sample(name)
            samples[name] = straight_through(hard, relaxed)
            # Outside of the architecture's steps the offsets would be zeros without gradient, and cells would not fuse.
            if self.settings.unsampled == "constant" and relaxed.requires_grad:
                offsets[name] = constants(hard, relaxed)
        if not self.runs_sampled_only():
            return WeightMix(self.layout, samples, offsets=offsets)
        lives = {name: live_where(sample.detach() > 0) for name, sample in samples.items()}
        by_site = {site: lives[name] for site, name in enumerate(self.layout.sites)}
        return WeightMix(self.layout, samples, lives=by_site, offsets=offsets)

    def probabilities(self) -> dict[str, Tensor]:
        """softmax(A): how often each operation is sampled, at any temperature."""
        return {name: self.masks.softmax(name, alpha) for name, alpha in self.alpha.items()}

    def gauges(self) -> dict[str, Tensor]:
        return {"temperature": self.temperature}

    def runs_sampled_only(self) -> bool:
        """Whether candidates that were not sampled are skipped."""
        run = self.settings.run
        return bool(self.temperature.device.type == "cpu" if run == "auto" else run == "sampled")

    def _sample(self, table: str) -> tuple[Tensor, Tensor]:
        """One-hot sample and its relaxation, both [choices, width].

        Drawn in float32, so that the precision of a run does not change its samples.
        """
        alpha, mask, members = self.alpha[table], self.masks[table], self.masks.members(table)
        uniform = draw_uniform(*alpha.shape, device=alpha.device).to(alpha.dtype)
        relaxed = concrete(alpha, mask, self.temperature, uniform, members)
        return harden(relaxed, mask, members), relaxed
