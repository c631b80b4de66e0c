"""DARTS−: Robustly Stepping out of Performance Collapse Without Indicators (Chu et al., ICLR 2021, arXiv:2009.01027).

    mixture   o(x) = β·x + Σ_k softmax(α)_k · o_k(x)                         -> `with_auxiliary_skip`
                   = (β + softmax(α)_skip)·x + Σ_{k≠skip} softmax(α)_k · o_k(x)
    decay     β falls linearly from 1 to 0 over the search                   -> `DartsMinus.begin_epoch`
    end       without the auxiliary skip, only by softmax(α)                -> `derive`, on `probabilities`

A skip connection does two jobs in a supernet: it is a candidate, and it helps gradients through the network, which lets
its logit grow. The auxiliary skip does the second job in its place. β is a constant for α, so α has the gradients of
DARTS, taken at the mixture above.

Where the skip candidate of an edge is the identity, adding β to its weight is the mixture itself. Deviation: on edges
of stride 2 the auxiliary skip is the factorised reduction of the skip candidate, not a second one with its own
weights; an edge without a skip candidate gets no auxiliary skip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from softcell.arch import Layout, Mix, Table, WeightMix
from softcell.methods.base import Regime, SoftmaxMethod, register_method
from softcell.settings import not_negative

SKIP = "skip_connect"


def auxiliary_edges(table: Table) -> Tensor:
    """True at the skip candidates that carry an auxiliary skip: bool [choices, width].

    Edges that compete to be inputs (`Table.contests`) have none: their link is not an alternative to an operation.
    """
    compete = torch.tensor([choice in table.contest_of for choice in range(len(table))])
    return table.columns(SKIP) & ~compete[:, None]


def with_auxiliary_skip(probabilities: Tensor, skips: Tensor, strength: Tensor) -> Tensor:
    """β added to the weight of the skip candidate: probabilities, skips [choices, width] and β [] to weights."""
    return probabilities + strength * skips


@dataclass(frozen=True)
class DartsMinusSettings:
    """`auxiliary`: β of the auxiliary skip in the first epoch; it falls linearly to 0 in the last.

    `init_scale`: deviation of the normal distribution that logits start from (1e-3 in the released code).
    """

    auxiliary: float = 1.0
    init_scale: float = 1e-3

    def __post_init__(self) -> None:
        not_negative("auxiliary", self.auxiliary)
        not_negative("init_scale", self.init_scale)


@register_method
class DartsMinus(SoftmaxMethod):
    """DARTS with an auxiliary skip connection on every edge, which fades out over the search."""

    name: ClassVar[str] = "darts-minus"
    about: ClassVar[str] = "DARTS−: DARTS with an auxiliary skip connection on every edge that fades out"
    regime: ClassVar[Regime] = "bilevel"
    Settings: ClassVar[type] = DartsMinusSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {},
        "small": {"epochs": 8, "batch_size": 96, "weights": {"lr": 0.1}, "architecture": {"lr": 0.04}},
    }

    strength: Tensor

    def __init__(self, layout: Layout, settings: DartsMinusSettings) -> None:
        super().__init__(layout, settings)
        self.register_buffer("strength", torch.tensor(settings.auxiliary))
        for table in layout.tables:
            self.register_buffer(f"skips_{table.name}", auxiliary_edges(table).float(), persistent=False)

    def begin_epoch(self, progress: float) -> None:
        self.strength.fill_(self.settings.auxiliary * (1.0 - progress))

    def relax(self) -> Mix:
        weights = {
            name: with_auxiliary_skip(own, self.get_buffer(f"skips_{name}"), self.strength)
            for name, own in self.probabilities().items()
        }
        return WeightMix(self.layout, weights)

    def gauges(self) -> dict[str, Tensor]:
        return {"auxiliary_skip": self.strength}

    def remarks(self) -> Sequence[str]:
        edges = sum(len(table) for table in self.layout.tables)
        carried = sum(int(auxiliary_edges(table).sum()) for table in self.layout.tables)
        if carried == edges:
            return ()
        return (
            f"DARTS− added its auxiliary skip to {carried} of {edges} edges: the others have no candidate {SKIP!r} "
            "that competes with operations, and were searched as by DARTS",
        )
