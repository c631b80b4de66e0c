"""β-DARTS: Beta-Decay Regularization for Differentiable Architecture Search (Ye et al., CVPR 2022, arXiv:2203.01665).

    mixture          o(x) = Σ_k softmax(α)_k · o_k(x), as in DARTS       -> `relax` (`SoftmaxMethod`)
    Beta-Decay       L_Beta = log Σ_k exp(α_k), the smooth maximum of α  -> `beta_decay`
    objective        min_α L_val(w*(α), α) + λ · L_Beta                  -> `BetaDarts.penalty`
    weighting        λ rises linearly over the search, 0 to 50           -> `BetaDarts.begin_epoch`

The gradient of L_Beta is softmax(α): strong candidates are pushed down most, so the softmax stays flat for longer. It
replaces the weight decay of α, which pulls α towards 0 regardless of the softmax; the recipes set that to 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from softcell.arch import Layout, Mix
from softcell.arch.choice import LINK
from softcell.methods.base import Regime, SoftmaxMethod, register_method
from softcell.settings import not_negative


def beta_decay(logits: Tensor, mask: Tensor, members: Tensor | None = None) -> Tensor:
    """Mean of log Σ_k exp(α_k) over all softmaxes of a table; padding is ignored.

    logits, mask [choices, width] and members bool [contests, choices] to []. Choices that compete share one softmax
    over their links (`Table.contests`), so each contest counts once.
    """
    rows = torch.logsumexp(logits.masked_fill(~mask, -torch.inf), dim=-1)  # [choices]
    if members is None:
        return rows.mean()
    links = torch.logsumexp(torch.where(members, logits[:, LINK], -torch.inf), dim=-1)  # [contests]
    # Multiplied, not indexed: indexing by a mask would synchronise with the host.
    alone = (~members.any(0)).to(rows.dtype)
    return ((rows * alone).sum() + links.sum()) / (alone.sum() + len(links))


@dataclass(frozen=True)
class BetaDartsSettings:
    """`first_weight`, `last_weight`: λ in the first and in the last epoch, linear between them.

    `init_scale`: deviation of the normal distribution that logits start from (1e-3 in the released code).
    """

    first_weight: float = 0.0
    last_weight: float = 50.0
    init_scale: float = 1e-3

    def __post_init__(self) -> None:
        not_negative("first_weight", self.first_weight)
        not_negative("last_weight", self.last_weight)
        not_negative("init_scale", self.init_scale)


@register_method
class BetaDarts(SoftmaxMethod):
    """DARTS whose architecture loss has a term that keeps the softmax of each edge from becoming one-sided."""

    name: ClassVar[str] = "beta-darts"
    about: ClassVar[str] = "β-DARTS: DARTS with Beta-Decay, a penalty on the smooth maximum of each edge's logits"
    regime: ClassVar[Regime] = "bilevel"
    home: ClassVar[str] = "nb201"
    Settings: ClassVar[type] = BetaDartsSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"epochs": 100, "architecture": {"weight_decay": 0.0}},
        "small": {
            "epochs": 8,
            "batch_size": 96,
            "weights": {"lr": 0.1},
            "architecture": {"lr": 0.04, "weight_decay": 0.0},
        },
    }

    weight: Tensor

    def __init__(self, layout: Layout, settings: BetaDartsSettings) -> None:
        super().__init__(layout, settings)
        self.register_buffer("weight", torch.tensor(settings.first_weight))

    def begin_epoch(self, progress: float) -> None:
        first, last = self.settings.first_weight, self.settings.last_weight
        self.weight.fill_(first + (last - first) * progress)

    def penalty(self, mix: Mix) -> Tensor:
        """λ · L_Beta, summed over tables: each kind of cell has its own term."""
        terms = [beta_decay(alpha, self.masks[name], self.masks.members(name)) for name, alpha in self.alpha.items()]
        return self.weight * torch.stack(terms).sum()

    def gauges(self) -> dict[str, Tensor]:
        return {"beta_decay_weight": self.weight}
