"""Random search without weight sharing: the baseline every search must beat at equal cost.

Architectures are drawn uniformly from the space, each is trained from scratch on the weight split, and the one with the
best validation accuracy wins (Li, Talwalkar: Random Search and Reproducibility for NAS, UAI 2019, the variant without
shared weights).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from softcell.arch import Genotype, sample
from softcell.errors import UserError
from softcell.methods.base import Sampler, register_method


@dataclass(frozen=True)
class RandomSettings:
    """`samples`: the number of architectures to train."""

    samples: int = 8

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError(f"`samples >= 1` must hold, but got samples={self.samples}")


@register_method
class RandomSearch(Sampler):
    name: ClassVar[str] = "random"
    about: ClassVar[str] = "random search: uniform architectures, each trained from scratch, best validation accuracy"
    Settings: ClassVar[type] = RandomSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"epochs": 10, "method_settings": {"samples": 24}},
        "small": {"epochs": 3, "batch_size": 64, "weights": {"lr": 0.05}, "method_settings": {"samples": 4}},
    }

    @property
    def num_samples(self) -> int:
        return int(self.settings.samples)

    def propose(self, number: int, scores: list[float]) -> Genotype:
        # A large odd stride keeps the architectures of neighbouring seeds apart.
        return sample(self.layout, self.seed * 1_000_003 + number)
