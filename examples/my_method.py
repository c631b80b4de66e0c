"""A custom method: DARTS's softmax with a temperature that decreases during the search.

    softcell search cooling --plugin examples/my_method.py --set method.final=0.2

A method owns only the architecture parameters. `relax` returns how candidates are mixed in the next step, and
`probabilities` the probability of each candidate, from which the space derives the architecture.
`softcell.testing.check_method("cooling", space)` checks the contracts of methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from softcell.arch import Layout, Mix, WeightMix, masked_softmax
from softcell.methods import Masks, Method, Regime, logits_like, register_method


@dataclass(frozen=True)
class CoolingSettings:
    """`initial` and `final`: the temperature in the first and the last epoch."""

    initial: float = 2.0
    final: float = 0.5


@register_method
class Cooling(Method):
    name: ClassVar[str] = "cooling"
    about: ClassVar[str] = "softmax with a decreasing temperature (example)"
    regime: ClassVar[Regime] = "bilevel"
    Settings: ClassVar[type] = CoolingSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {"small": {"epochs": 8, "architecture": {"lr": 6e-3}}}

    temperature: Tensor

    def __init__(self, layout: Layout, settings: CoolingSettings) -> None:
        super().__init__(layout, settings)
        self.alpha = logits_like(layout)  # one matrix [choices, width] per table
        self.masks = Masks(layout)  # choices may have fewer candidates than the table is wide
        self.register_buffer("temperature", torch.tensor(settings.initial))

    def begin_epoch(self, progress: float) -> None:
        s = self.settings
        self.temperature.fill_(s.initial + (s.final - s.initial) * progress)  # in place: a captured step sees it

    def relax(self) -> Mix:
        return WeightMix(self.layout, self.probabilities())

    def probabilities(self) -> dict[str, Tensor]:
        return {name: masked_softmax(a, self.masks[name], self.temperature) for name, a in self.alpha.items()}
