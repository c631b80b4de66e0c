"""SNAS: Stochastic Neural Architecture Search (Xie, Zheng, Liu, Lin; ICLR 2019, arXiv:1812.09926).

    Eq 2      x_j = Σ_{i<j} Z_ij · O_ij(x_i)                           -> `Snas.relax`, the supernet
    Eq 3-4    min E_{Z ~ p_α}[L_θ(Z)] for θ and α together             -> single-level steps (`softcell.search.steps`)
    Eq 5, 22  Z^k = softmax((log α + G) / λ)^k, G = -log(-log U)        -> `concrete` (`softcell.arch.mix`)
    Eq 6, 24  ∂Z^l/∂α^k = (δ_lk - Z^l) Z^k / (λ α^k)                   -> autograd through `concrete`
    Eq 7-8    credit R_ij = -∂L/∂x_j · Õ_ij(x_i)                       -> `credit`
    Eq 9-11   E[L] + η E[C]                                             -> the recipe's `resource`, for any method
    Eq 33-34  per candidate -Z^k · ∂L/∂Z^k, which sums to R_ij          -> `credit`, `_CreditObserver`
    §3.1      argmax over all candidates, zero among them              -> `StrongestEach`

The parameters are log α: ∂/∂ log α^k = α^k ∂/∂ α^k, so Eq 24 loses its 1/α^k. One sample per table and step is shared
by all its sites. Adam, its learning rate and the rest of the setup are DARTS's, which `SearchRecipe` has as defaults.

Eq 7 equates the search gradient with a policy gradient of credit R. That is an identity where the loss is linear in
x_j. In general Appendix D stops the gradient from successor nodes: for L = x_j² the right-hand side is twice the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from softcell.arch import Layout, Mix, Rule, StrongestEach, WeightMix
from softcell.arch.mix import Schedule, concrete, temperature_at
from softcell.methods.base import Masks, Method, Regime, register_method
from softcell.methods.parts import Observer
from softcell.nn.stochastic import draw_uniform
from softcell.settings import not_negative, positive


def credit(sample: Tensor, gradient: Tensor) -> Tensor:
    """-Z^k · ∂L/∂Z^k, both [choices, width]: the credit of each candidate.

    x_j is linear in Z, so ∂L/∂Z_ij^k = ∂L/∂x_j · O_ij^k(x_i), and the candidates of an edge sum to R_ij (Eq 8, 34).
    """
    return -sample * gradient


@dataclass(frozen=True)
class SnasSettings:
    """Temperature and start of log α.

    `schedule`: how the temperature moves from `first_temperature` in the first epoch to `last_temperature` in the last;
    the paper says "annealed to be close to zero". `init_mean` and `init_std`: the normal distribution that log α starts
    from. `record_credit`: whether credits are recorded.

    Deviation: the authors' code has 1 - 0.97·(e + 1)/150 in epoch e from 0, with a fixed 150, so that the temperature
    of a shorter search never gets low. Here the first epoch has the first temperature and the last one the last, in
    searches of any length; over 150 epochs the two differ by at most 0.0065.
    """

    schedule: Schedule = "linear"
    first_temperature: float = 1.0
    last_temperature: float = 0.03
    init_mean: float = 1.0
    init_std: float = 0.01
    record_credit: bool = True

    def __post_init__(self) -> None:
        positive("first_temperature", self.first_temperature)
        positive("last_temperature", self.last_temperature)
        not_negative("init_std", self.init_std)


class _CreditObserver(Observer):
    """Sums the credits of an epoch's steps (Eq 34) in buffers of the method."""

    def __init__(self, method: Snas) -> None:
        self._method = method

    def watched(self, mix: Mix) -> Sequence[Tensor]:
        assert isinstance(mix, WeightMix)
        return list(mix.tables.values())

    @torch.no_grad()
    def observe(self, mix: Mix, gradients: Sequence[Tensor | None]) -> None:
        assert isinstance(mix, WeightMix)
        sums = self.sums()["credit"]
        for (name, sample), gradient in zip(mix.tables.items(), gradients, strict=True):
            if gradient is not None:  # None: no site reads this table
                sums[name].add_(credit(sample, gradient))

    def sums(self) -> dict[str, dict[str, Tensor]]:
        return {"credit": {name: self._method.get_buffer(f"credit_{name}") for name in self._method.log_alpha}}


@register_method
class Snas(Method):
    """Samples a relaxed architecture each step; its distribution and the weights learn from one backward pass."""

    name: ClassVar[str] = "snas"
    about: ClassVar[str] = "SNAS: concrete samples, annealed; single-level (bilevel with --set regime=bilevel)"
    regime: ClassVar[Regime] = "single-level"
    rule: ClassVar[Rule] = StrongestEach()
    many_cells: bool = True
    Settings: ClassVar[type] = SnasSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {
            "epochs": 150,
            # Deviation: 0.3 is the authors', constant from the first step on. Here it is reached linearly over the
            # epochs, as in DARTS: operations that have learned nothing yet need no noise.
            "drop_path": 0.3,
            "child_every": 1,
            "weights": {"lr_min": 0.0},
            "architecture": {"clip": 10.0},
            "resource": {"preset": "moderate", "estimator": "monte-carlo"},
        },
        "small": {
            "epochs": 12,
            "batch_size": 64,
            "drop_path": 0.1,
            "child_every": 1,
            "weights": {"lr": 0.05, "lr_min": 0.0},
            "architecture": {"lr": 0.05, "clip": 10.0},
            "resource": {"preset": "moderate", "estimator": "monte-carlo"},
        },
    }

    temperature: Tensor

    def __init__(self, layout: Layout, settings: SnasSettings) -> None:
        super().__init__(layout, settings)
        self.log_alpha = nn.ParameterDict(
            {
                table.name: nn.Parameter(settings.init_mean + settings.init_std * torch.randn(*table.shape))
                for table in layout.tables
            }
        )
        self.masks = Masks(layout)
        self.register_buffer("temperature", torch.tensor(settings.first_temperature))
        for table in layout.tables:
            # Not part of the method's state: the search saves these sums within an epoch (`Observer.sums`).
            self.register_buffer(f"credit_{table.name}", torch.zeros(table.shape), persistent=False)
        if settings.record_credit:
            self.observer = _CreditObserver(self)

    def begin_epoch(self, progress: float) -> None:
        s = self.settings
        self.temperature.fill_(temperature_at(progress, s.first_temperature, s.last_temperature, s.schedule))

    def relax(self) -> Mix:
        return WeightMix(self.layout, {name: self._sample(name) for name in self.log_alpha})

    def probabilities(self) -> dict[str, Tensor]:
        """α^k / Σ_l α^l: how often each candidate wins a sample, at any temperature."""
        return {name: self.masks.softmax(name, log_alpha) for name, log_alpha in self.log_alpha.items()}

    def gauges(self) -> dict[str, Tensor]:
        return {"temperature": self.temperature}

    def _sample(self, table: str) -> Tensor:
        """Z [choices, width] (Eq 5); drawn in float32, so that the precision of a run does not change its samples."""
        log_alpha = self.log_alpha[table]
        uniform = draw_uniform(*log_alpha.shape, device=log_alpha.device)
        members = self.masks.members(table)
        return concrete(log_alpha, self.masks[table], self.temperature, uniform.to(log_alpha.dtype), members)
