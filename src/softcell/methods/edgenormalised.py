"""Edge normalisation, one of the two parts of PC-DARTS (Xu et al., ICLR 2020, arXiv:1907.05737), on its own.

    edges        x_j = Σ_{i<j} softmax_i(β)_ij · Σ_k softmax_k(α_ij)_k · o_k(x_i)    -> `edge_weights`, `relax`
    derivation   strongest softmax(β)_ij · softmax(α_ij)_k, by the space's rule        -> `derive`

The other part, partial channel connections, is missing: every candidate works on all channels. This is therefore not
PC-DARTS, and its results say nothing about PC-DARTS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from softcell.arch import Genotype, Layout, Mix, Table, WeightMix, derive
from softcell.methods.base import Regime, SoftmaxMethod, register_method
from softcell.settings import not_negative


def edge_groups(table: Table) -> Tensor:
    """Which edges share a softmax: bool [groups, choices], those into one node.

    Edges whose links compete already (`Table.contests`) are groups of one, which leaves their weights alone.
    """
    free = [[i for i in table.incoming(node) if i not in table.contest_of] for node in table.targets]
    groups = [group for group in free if group] + [[i] for i in table.contest_of]
    return torch.tensor([[i in group for i in range(len(table))] for group in groups])


def edge_weights(logits: Tensor, groups: Tensor) -> Tensor:
    """Softmax over the edges of each group: logits β [choices] and groups bool [groups, choices] to [choices]."""
    shares = torch.softmax(logits.masked_fill(~groups, -torch.inf), dim=-1)  # [groups, choices]
    return shares.sum(0)  # an edge is in one group, and has 0 in all others


@dataclass(frozen=True)
class EdgeNormalisedSettings:
    """`init_scale`: deviation of the normal distribution that α and β start from (1e-3 in PC-DARTS's released code)."""

    init_scale: float = 1e-3

    def __post_init__(self) -> None:
        not_negative("init_scale", self.init_scale)


@register_method
class EdgeNormalised(SoftmaxMethod):
    """DARTS whose edges into a node compete in a softmax of their own."""

    name: ClassVar[str] = "edge-normalised"
    about: ClassVar[str] = "DARTS with a softmax over the edges into each node (of PC-DARTS, without partial channels)"
    regime: ClassVar[Regime] = "bilevel"
    Settings: ClassVar[type] = EdgeNormalisedSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {},
        "small": {"epochs": 8, "batch_size": 96, "weights": {"lr": 0.1}, "architecture": {"lr": 0.04}},
    }

    def __init__(self, layout: Layout, settings: EdgeNormalisedSettings) -> None:
        super().__init__(layout, settings)
        self.beta = nn.ParameterDict()
        for table in layout.tables:
            groups = edge_groups(table)
            if len(groups) < len(table):  # else every node has one edge, whose weight is 1 whatever its logit
                self.beta[table.name] = nn.Parameter(settings.init_scale * torch.randn(len(table)))
                self.register_buffer(f"groups_{table.name}", groups, persistent=False)

    def weights(self) -> dict[str, Tensor]:
        """Per table softmax(β) · softmax(α) [choices, width]."""
        found = self.probabilities()
        for name, beta in self.beta.items():
            found[name] = edge_weights(beta, self.get_buffer(f"groups_{name}"))[:, None] * found[name]
        return found

    def relax(self) -> Mix:
        return WeightMix(self.layout, self.weights())

    def derive(self) -> Genotype:
        return derive(self.layout, self.weights(), self.rule, about={"method": self.name})
