"""The reduced spaces S1 to S4, in which DARTS fails: DARTS's stack of cells with two or three candidates per edge.

Zela et al.: Understanding and Robustifying Differentiable Architecture Search, ICLR 2020, §3 and its released code.

    S1   two candidates per edge, those that an iteratively pruned DARTS search kept
    S2   skip_connect, sep_conv_3x3
    S3   none, skip_connect, sep_conv_3x3
    S4   sep_conv_3x3, noise

Networks are trained at 20 cells and 36 channels on CIFAR-10 (S2 and S4: 16 channels), at 8 cells and 16 channels on
CIFAR-100 and SVHN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from softcell.errors import UserError
from softcell.spaces.base import register_space
from softcell.spaces.darts import INPUTS, DartsSpace

_SHORT = {
    "a": "skip_connect",
    "m": "max_pool_3x3",
    "v": "avg_pool_3x3",
    "s3": "sep_conv_3x3",
    "d3": "dil_conv_3x3",
    "d5": "dil_conv_5x5",
}


def _pairs(text: str) -> tuple[tuple[str, ...], ...]:
    """`a-d3 m-v` to candidates per edge, in DARTS's order: by target node, then source."""
    return tuple(tuple(_SHORT[name] for name in pair.split("-")) for pair in text.split())


S1_EDGES = {
    "normal": _pairs("a-d3 a-d5 a-d5 a-s3 a-d3 m-a a-s3 a-s3 a-d3 a-s3 m-a a-d3 d3-d5 d3-d5"),
    "reduce": _pairs("m-v m-d3 m-v m-v a-d5 m-v m-s3 a-d3 a-d5 m-v m-v a-d5 a-d5 a-d5"),
}
NODES = 4


def _evaluation(channels: int) -> dict[str, dict[str, Any]]:
    """Sizes for training; an entry for a dataset takes precedence over one for its recipe."""
    other = {"cells": 8, "channels": 16}
    return {
        "small": {"cells": 5, "channels": 16},
        "cifar": {"cells": 20, "channels": channels},
        "cifar100": other,
        "svhn": other,
        "imagenet": {"cells": 14, "channels": 48, "stem": "imagenet"},
    }


@register_space
@dataclass(frozen=True)
class S1Space(DartsSpace):
    """S1: every edge has its own two candidates."""

    name: ClassVar[str] = "s1"
    about: ClassVar[str] = "RobustDARTS S1: DARTS cells, two candidates per edge, other ones on each"
    evaluation: ClassVar[dict[str, dict[str, Any]]] = _evaluation(36)

    candidates: tuple[str, ...] = field(init=False, default=tuple(_SHORT.values()))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes > NODES:
            raise UserError(
                f"`nodes <= {NODES}` must hold: S1 names its candidates edge by edge, but got nodes={self.nodes}"
            )

    def edge_candidates(self, table: str, source: int, target: int) -> tuple[str, ...]:
        before = sum(range(INPUTS, target))  # edges of earlier nodes
        return S1_EDGES[table][before + source]


@register_space
@dataclass(frozen=True)
class S2Space(DartsSpace):
    name: ClassVar[str] = "s2"
    about: ClassVar[str] = "RobustDARTS S2: DARTS cells with skip_connect and sep_conv_3x3 on every edge"
    evaluation: ClassVar[dict[str, dict[str, Any]]] = _evaluation(16)

    candidates: tuple[str, ...] = ("skip_connect", "sep_conv_3x3")


@register_space
@dataclass(frozen=True)
class S3Space(DartsSpace):
    name: ClassVar[str] = "s3"
    about: ClassVar[str] = "RobustDARTS S3: DARTS cells with none, skip_connect and sep_conv_3x3 on every edge"
    evaluation: ClassVar[dict[str, dict[str, Any]]] = _evaluation(36)

    candidates: tuple[str, ...] = ("none", "skip_connect", "sep_conv_3x3")


@register_space
@dataclass(frozen=True)
class S4Space(DartsSpace):
    name: ClassVar[str] = "s4"
    about: ClassVar[str] = "RobustDARTS S4: DARTS cells with sep_conv_3x3 and noise on every edge"
    evaluation: ClassVar[dict[str, dict[str, Any]]] = _evaluation(16)

    candidates: tuple[str, ...] = ("sep_conv_3x3", "noise")
