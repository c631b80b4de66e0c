"""PC-DARTS: Partial Channel Connections for Memory-Efficient Architecture Search (Xu et al., ICLR 2020; 1907.05737).

    Eq 2         f_ij(x_i) = Σ_k softmax(α_ij)_k · o_k(S·x_i) + (1 - S)·x_i        -> the space's `partial_channels`
    Eq 3         x_j = Σ_{i<j} softmax_i(β)_ij · f_ij(x_i)                          -> `edge_weights`, `relax`
    derivation   strongest softmax(β)_ij · softmax(α_ij)_k, by the space's rule     -> `derive`
    §4.2         α and β wait for 15 of 50 epochs                                   -> `architecture.after`

S selects 1/K of the channels: the first ones, with a channel shuffle behind each node, as in the released code.
`pc-darts` is the whole method. `edge-normalised` is only Eq 3: every candidate works on all channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from softcell.arch import Genotype, Layout, Mix, Table, WeightMix, derive
from softcell.methods.base import Regime, SoftmaxMethod, register_method
from softcell.settings import not_negative

SMALL: dict[str, Any] = {"epochs": 8, "batch_size": 96, "weights": {"lr": 0.1}, "architecture": {"lr": 0.04}}


def edge_groups(table: Table) -> Tensor:
    """Which edges share a softmax: bool [groups, choices], those into one node.

    Edges whose links compete already (`Table.contests`) are groups of one, which leaves their weights unchanged.
    """
    free = [[i for i in table.incoming(node) if i not in table.contest_of] for node in table.targets]
    groups = [group for group in free if group] + [[i] for i in table.contest_of]
    return torch.tensor([[i in group for i in range(len(table))] for group in groups])


def edge_weights(logits: Tensor, groups: Tensor) -> Tensor:
    """Softmax over the edges of each group (Eq 3): logits β [choices], groups bool [groups, choices] to [choices]."""
    shares = torch.softmax(logits.masked_fill(~groups, -torch.inf), dim=-1)  # [groups, choices]
    return shares.sum(0)  # an edge is in one group, and has 0 in all others


@dataclass(frozen=True)
class EdgeNormalisedSettings:
    """`init_scale`: deviation of the normal distribution that α and β start from (1e-3 in PC-DARTS's released code)."""

    init_scale: float = 1e-3

    def __post_init__(self) -> None:
        not_negative("init_scale", self.init_scale)


class _NormalisedEdges(SoftmaxMethod):
    """DARTS with one more softmax, over the edges into each node."""

    regime: ClassVar[Regime] = "bilevel"
    Settings: ClassVar[type] = EdgeNormalisedSettings

    def __init__(self, layout: Layout, settings: EdgeNormalisedSettings) -> None:
        super().__init__(layout, settings)
        self.beta = nn.ParameterDict()
        for table in layout.tables:
            groups = edge_groups(table)
            if len(groups) < len(table):  # otherwise every node has one edge, whose weight is always 1
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


@register_method
class PcDarts(_NormalisedEdges):
    """Edge normalisation, by recipes whose supernets have partial channels."""

    name: ClassVar[str] = "pc-darts"
    about: ClassVar[str] = (
        "PC-DARTS: candidates work on a part of the channels; a softmax over the edges into each node"
    )
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        # train_search.py of the released code
        "paper": {
            "epochs": 50,
            "batch_size": 256,
            "weights": {"lr": 0.1, "lr_min": 0.0},
            "architecture": {"lr": 6e-4, "after": 0.3},
            "space_settings": {"partial_channels": 4},
        },
        # train_search_imagenet.py and model_search_imagenet.py
        "imagenet": {
            "epochs": 50,
            "batch_size": 1024,
            "split": {"weights": 0.1, "validation": 0.025},
            "weights": {"lr": 0.5, "lr_min": 0.0, "warmup": 5},
            "architecture": {"lr": 6e-3, "after": 0.7},
            "space_settings": {"partial_channels": 2, "stem": "imagenet"},
        },
        "small": {
            **SMALL,
            "architecture": {"lr": 0.04, "after": 0.3},
            "space_settings": {"partial_channels": 2},  # a quarter of 8 channels would be 2
        },
    }


@register_method
class EdgeNormalised(_NormalisedEdges):
    """Edge normalisation on all channels."""

    name: ClassVar[str] = "edge-normalised"
    about: ClassVar[str] = "DARTS with a softmax over the edges into each node (of PC-DARTS, without partial channels)"
    recipes: ClassVar[dict[str, dict[str, Any]]] = {"paper": {}, "small": SMALL}
