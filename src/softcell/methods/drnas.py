"""DrNAS: Dirichlet Neural Architecture Search (Chen, Wang, Cheng, Tang, Hsieh; ICLR 2021, arXiv:2006.10355).

    mixing weights  θ ~ Dirichlet(c) per edge, c = elu(β) + 1                        -> `concentration`, `DrNas.relax`
    gradient        ∂θ_j/∂c_i = -(∂F/∂c_i)(θ_i) / f(θ_i) · (δ_ij - θ_j) / (1 - θ_i), -> `pathwise`
                    F and f of Beta(c_i, Σ c - c_i)
    objective       min_β E_θ[L_val(w*, θ)] + λ d(β, anchor), the anchor is c = 1    -> bilevel steps
        d = l2      λ/2 ‖β‖², by Adam's weight decay (default)                       -> `architecture.weight_decay`
        d = KL      λ KL(Dirichlet(c) || Dirichlet(1))                               -> `divergence`, `DrNas.penalty`
    derivation      the largest mean c_k / Σ c of each edge                          -> `DrNas.probabilities`

One sample per table and pass is shared by all its sites. The progressive scheme (partial channels, pruning of
candidates between stages) is not implemented.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.arch import Layout, Mix, WeightMix
from softcell.arch.choice import LINK
from softcell.arch.mix import with_links
from softcell.methods.base import Masks, Method, Regime, logits_like, register_method
from softcell.nn.stochastic import draw_gamma
from softcell.settings import not_negative

MIN_CONCENTRATION = 1e-6  # elu(β) + 1 rounds to 0 for very negative β, and no distribution has that concentration


def concentration(beta: Tensor) -> Tensor:
    """c = elu(β) + 1, any shape; at least `MIN_CONCENTRATION`."""
    return (F.elu(beta) + 1.0).clamp_min(MIN_CONCENTRATION)


def pathwise(c: Tensor, gammas: Tensor, mask: Tensor) -> Tensor:
    """One sample of Dirichlet(c) over the real candidates of each row, with pathwise gradients to c.

    c, gammas from Gamma(c, 1) and mask [..., n] to [..., n]; padding is exactly 0.
    """
    real = torch.where(mask, gammas.to(c.dtype), 0.0)
    # torch bounds gammas by the smallest normal number, so the sum is never 0.
    sample: Tensor = _Pathwise.apply(c, real / real.sum(-1, keepdim=True), mask)  # type: ignore[no-untyped-call]
    return sample


class _Pathwise(torch.autograd.Function):
    """Passes a given sample on; its gradient to the concentration is the pathwise derivative."""

    @staticmethod
    def forward(ctx: Any, c: Tensor, sample: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(c, sample, mask)
        return sample.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        c, sample, mask = ctx.saved_tensors
        (gradient,) = gradients
        bounds = torch.finfo(c.dtype)
        total = torch.where(mask, c, 0.0).sum(-1, keepdim=True)
        # Padding gets the arguments of a uniform Beta(1, 1), where the gradient is finite; it is masked below.
        slope = torch._dirichlet_grad(
            torch.where(mask, sample.clamp(bounds.tiny, 1.0 - bounds.eps), 0.5),
            torch.where(mask, c, 1.0),
            torch.where(mask, total, 2.0),
        )  # -(∂F/∂c_i) / (f · (1 - θ_i))
        slope = torch.where(mask, slope, 0.0)
        # Σ_j gradient_j · ∂θ_j/∂c_i
        return slope * (gradient - (sample * gradient).sum(-1, keepdim=True)), None, None


def divergence(c: Tensor, mask: Tensor) -> Tensor:
    """KL(Dirichlet(c) || Dirichlet(1)) per row: c, mask [..., n] to [...]; padding is ignored."""
    # Padding counts as c = 1, whose terms are 0: ln Γ(1) and c - 1.
    real = torch.where(mask, c, 1.0)
    total = torch.where(mask, c, 0.0).sum(-1)
    gained = ((real - 1.0) * (torch.digamma(real) - torch.digamma(total)[..., None])).sum(-1)
    return torch.lgamma(total) - torch.lgamma(real).sum(-1) - torch.lgamma(mask.sum(-1).to(c.dtype)) + gained


@dataclass(frozen=True)
class DrNasSettings:
    """`kl_weight`: λ of the KL divergence, summed over edges; 0 leaves it out.

    `init_scale`: deviation of the normal distribution that β starts from (1e-3 in the released code), so that c is
    nearly 1 and all mixtures are equally likely.
    """

    kl_weight: float = 0.0
    init_scale: float = 1e-3

    def __post_init__(self) -> None:
        not_negative("kl_weight", self.kl_weight)
        not_negative("init_scale", self.init_scale)


@register_method
class DrNas(Method):
    """Mixes the candidates of each edge by a sample of a Dirichlet distribution, whose concentration learns."""

    name: ClassVar[str] = "drnas"
    about: ClassVar[str] = "DrNAS: mixing weights drawn from a learned Dirichlet distribution per edge; bilevel"
    regime: ClassVar[Regime] = "bilevel"
    many_cells: bool = True
    Settings: ClassVar[type] = DrNasSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        # DARTS-space/train_search.py of the released code. Deviation: without its progressive scheme.
        "paper": {"weights": {"lr": 0.1, "lr_min": 0.0}, "architecture": {"lr": 6e-4}},
        "nb201": {"epochs": 100},  # 201-space/train_search.py
        "small": {"epochs": 8, "batch_size": 96, "weights": {"lr": 0.1}, "architecture": {"lr": 0.04}},
    }

    def __init__(self, layout: Layout, settings: DrNasSettings) -> None:
        super().__init__(layout, settings)
        self.beta = logits_like(layout, settings.init_scale)
        self.masks = Masks(layout)

    def relax(self) -> Mix:
        return WeightMix(self.layout, {name: self._sample(name) for name in self.beta})

    def probabilities(self) -> dict[str, Tensor]:
        """The mean of each mixing weight, c_k / Σ c."""
        return {
            name: self.masks.shares(name, torch.where(self.masks[name], concentration(beta), 0.0))
            for name, beta in self.beta.items()
        }

    def penalty(self, mix: Mix) -> Tensor | None:
        weight: float = self.settings.kl_weight
        return weight * torch.stack([self._divergence(name) for name in self.beta]).sum() if weight else None

    def _sample(self, table: str) -> Tensor:
        """θ [choices, width]; links that compete share one distribution, and `none` has what a link lacks to 1."""
        c, mask, members = concentration(self.beta[table]), self.masks[table], self.masks.members(table)
        gammas = draw_gamma(c)
        rows = pathwise(c, gammas, mask)
        if members is None:
            return rows
        own, drawn = (torch.where(members, one[:, LINK], 1.0) for one in (c, gammas))  # [contests, choices]
        return with_links(rows, pathwise(own, drawn, members), members, mask)

    def _divergence(self, table: str) -> Tensor:
        c, mask, members = concentration(self.beta[table]), self.masks[table], self.masks.members(table)
        rows = divergence(c, mask)
        if members is None:
            return rows.sum()
        alone = (~members.any(0)).to(rows.dtype)
        return (rows * alone).sum() + divergence(torch.where(members, c[:, LINK], 1.0), members).sum()
