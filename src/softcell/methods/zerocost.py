"""Zero-cost search: evolution by scores of untrained networks, without any training.

A score of a network at initialisation replaces the accuracy it would reach: one of `softcell.methods.proxies` (as a
search: Mellor et al., ICML 2021, arXiv:2006.04647; Abdelfattah et al., ICLR 2021, arXiv:2101.08134). Evolution works as
in single-path one-shot search (`softcell.arch.evolve`): children of the best so far, half by crossover, half by
mutation. The architecture of the best score is the result.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from softcell.arch import Genotype, Layout
from softcell.arch.evolve import Evolution, Evolved, evolving
from softcell.errors import UserError, nearest
from softcell.methods.base import UntrainedSampler, register_method
from softcell.methods.proxies import PROXIES, Proxy, score_untrained


@dataclass(frozen=True)
class ZeroCostSettings:
    """`proxy`: the score, one of `softcell.methods.proxies.PROXIES`; `images`: how many training images it sees.

    `generations` of `population` networks are scored; the `parents` best of all so far have children; `mutation` is the
    probability with which a choice of a mutated child is drawn again.
    """

    proxy: Proxy = "synflow"
    images: int = 64
    generations: int = 20
    population: int = 50
    parents: int = 10
    mutation: float = 0.1

    def __post_init__(self) -> None:
        if self.proxy not in PROXIES:
            raise UserError(f"no proxy {self.proxy!r} (`method.proxy`); {nearest(self.proxy, PROXIES)}")
        if self.proxy == "zico" and self.images < 4:
            raise UserError(f"`method.images >= 4` must hold for zico, which halves them, but got images={self.images}")
        for name, least in (("images", 2), ("generations", 1), ("population", 2), ("parents", 1)):
            if getattr(self, name) < least:
                raise UserError(f"`method.{name} >= {least}` must hold, but got {name}={getattr(self, name)}")
        if not 0.0 < self.mutation <= 1.0:
            raise UserError(f"`0 < method.mutation <= 1` must hold, but got mutation={self.mutation}")


@register_method
class ZeroCost(UntrainedSampler):
    name: ClassVar[str] = "zero-cost"
    about: ClassVar[str] = (
        "zero-cost search: evolution by a score of untrained networks (SynFlow, NASWOT, SNIP, ...); no training"
    )
    Settings: ClassVar[type] = ZeroCostSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"epochs": 1, "precision": "float32", "method_settings": {"images": 128}},
        "small": {
            "epochs": 1,
            "precision": "float32",
            "batch_size": 64,
            "method_settings": {"generations": 10, "population": 20, "parents": 5, "images": 32},
        },
    }

    def __init__(self, layout: Layout, settings: ZeroCostSettings, seed: int) -> None:
        super().__init__(layout, settings, seed)
        self._running: Generator[Genotype, float, Evolved] | None = None
        # Proposals so far and the scores they followed from. Only a cache: `propose` replays what does not match.
        self._proposed: list[Genotype] = []
        self._scores: list[float] = []

    @property
    def num_samples(self) -> int:
        return int(self.settings.generations * self.settings.population)

    @property
    def num_rounds(self) -> int:
        return int(self.settings.generations)

    @property
    def num_images(self) -> int:
        return int(self.settings.images)

    def score(self, network: nn.Module, images: Tensor, labels: Tensor) -> float:
        return score_untrained(network, self.settings.proxy, images, labels)

    def findings(self) -> dict[str, Any]:
        return {"proxy": self.settings.proxy}

    def propose(self, number: int, scores: list[float]) -> Genotype:
        """Architecture `number`; the best so far again once everything within the limits is known."""
        assert len(scores) == number, f"proposal {number} needs the scores of all before it, got {len(scores)}"
        if self._scores[:number] != scores[: len(self._scores)] or not self._proposed:
            s = self.settings
            settings = Evolution(s.generations, s.population, s.parents, s.mutation)
            self._running = evolving(self.layout, settings, self.allowed, self.seed, self.starts)
            self._proposed, self._scores = [next(self._running)], []
        while len(self._proposed) <= number:
            self._scores.append(scores[len(self._scores)])
            self._proposed.append(self._after(self._scores[-1]))
        return self._proposed[number]

    def _after(self, score: float) -> Genotype:
        if self._running is not None:
            try:
                return self._running.send(score)
            except StopIteration:
                self._running = None
        best = max(range(len(self._scores)), key=lambda n: self._scores[n])
        return self._proposed[best]
