"""Regularised evolution: a population in which the oldest architecture dies, not the worst.

Real, Aggarwal, Huang, Le: Regularized Evolution for Image Classifier Architecture Search, AAAI 2019
(arXiv:1802.01548), Algorithm 1. Every architecture is trained from scratch without shared weights.

    the first P architectures are random
    each later one: draw S members of the population with replacement, mutate the best of them in one choice,
                    train the child, add it to the population, remove the oldest member
    result: the best architecture of the whole history
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from softcell.arch import Genotype, Layout
from softcell.arch.derive import random_architecture
from softcell.arch.evolve import mutate_one
from softcell.errors import UserError
from softcell.methods.base import Sampler, register_method


@dataclass(frozen=True)
class EvolutionSettings:
    """`population`: how many architectures live at a time (P); `tournament`: how many compete to be the parent (S);
    `samples`: how many architectures are trained in total (C).

    With `samples <= population` nothing is mutated: this is random search.
    """

    population: int = 10
    tournament: int = 3
    samples: int = 40

    def __post_init__(self) -> None:
        for name in ("population", "tournament", "samples"):
            if getattr(self, name) < 1:
                raise UserError(f"`{name} >= 1` must hold, but got {name}={getattr(self, name)}")


@register_method
class RegularisedEvolution(Sampler):
    name: ClassVar[str] = "evolution"
    about: ClassVar[str] = "regularised evolution: mutates the best of a random few, the oldest of the population dies"
    Settings: ClassVar[type] = EvolutionSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"epochs": 25, "method_settings": {"population": 100, "tournament": 25, "samples": 20_000}},
        "small": {
            "epochs": 3,
            "batch_size": 64,
            "weights": {"lr": 0.05},
            "method_settings": {"population": 4, "tournament": 2, "samples": 8},
        },
    }

    def __init__(self, layout: Layout, settings: EvolutionSettings, seed: int) -> None:
        super().__init__(layout, settings, seed)
        # Proposals so far and the scores they followed from. Only a cache: `propose` replays what does not match.
        self._proposed: list[Genotype] = []
        self._scores: list[float] = []

    @property
    def num_samples(self) -> int:
        return int(self.settings.samples)

    def propose(self, number: int, scores: list[float]) -> Genotype:
        """Architecture `number`. A score of 0 marks a proposal that broke a budget: it never joins the population."""
        assert len(scores) == number, f"proposal {number} needs the scores of all before it, got {len(scores)}"
        if self._scores[:number] != scores[: len(self._scores)]:
            self._proposed, self._scores = [], []
        for n in range(len(self._proposed), number + 1):
            self._proposed.append(self._next(n, scores[:n]))
        self._scores = max(self._scores, list(scores), key=len)
        return self._proposed[number]

    def _next(self, number: int, scores: list[float]) -> Genotype:
        """The proposal after `scores`, given the proposals that they belong to."""
        # A generator per proposal: nothing has to be saved to resume.
        rng = random.Random(f"regularised evolution {self.seed} {number}")
        size = self.settings.population
        members = [n for n, score in enumerate(scores) if score > 0]
        if len(members) < size:
            return random_architecture(self.layout, rng)
        living = members[-size:]  # ageing: all but the newest P are dead, no matter how good they were
        drawn = [rng.choice(living) for _ in range(self.settings.tournament)]
        parent = max(drawn, key=lambda n: scores[n])  # of equals the one drawn first
        return mutate_one(self.layout, self._proposed[parent], rng)
