"""A search that scores untrained networks, as a task of the loop: a generation is an epoch, a network is a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from softcell.arch import Genotype
from softcell.data import Batches
from softcell.engine.distributed import World, on_main
from softcell.engine.metrics import Failure
from softcell.errors import UserError
from softcell.methods import UntrainedSampler
from softcell.search.budget import Budget
from softcell.search.history import line
from softcell.search.recipe import SearchRecipe
from softcell.spaces import Space


class UntrainedTask:
    """Every network has the weights of the recipe's seed, so that a score depends on its architecture alone."""

    def __init__(
        self,
        recipe: SearchRecipe,
        space: Space,
        sampler: UntrainedSampler,
        num_classes: int,
        world: World,
        *,
        weights: Batches,
        notify: Callable[[str], None],
        budget: Budget | None = None,
    ) -> None:
        self.recipe, self.space, self.sampler, self.world = recipe, space, sampler, world
        self.about: dict[str, Any] = {}
        self._num_classes, self._budget = num_classes, budget
        self._genotypes: list[Genotype] = []
        self._scores: list[float] = []
        self._known: dict[Genotype, float] = {}
        if recipe.epochs != 1:
            notify(f"`epochs` is ignored: {recipe.method} trains nothing; its own settings say how long it runs")
        if budget is not None:
            for kind in budget.out_of_reach():
                raise UserError(
                    f"the budget is out of reach: {budget.least(kind)}; raise it, or make the network smaller "
                    f"({budget.smaller()}, and train with the same)"
                )
            sampler.allowed, sampler.starts = budget.is_met, budget.cheapest
            sampler.propose(0, [])  # a budget that nothing meets must not leave a run folder behind
        self._images = _first(weights, sampler.num_images)  # used by the first process alone, which scores

    @property
    def num_epochs(self) -> int:
        return self.sampler.num_rounds

    def steps_in(self, epoch: int) -> int:
        return self.sampler.num_samples // self.sampler.num_rounds

    def begin_epoch(self, epoch: int) -> None:
        pass

    def batches(self, epoch: int, start: int) -> Iterator[int]:
        """The numbers of the networks."""
        size = self.steps_in(epoch)
        return iter(range(epoch * size + start, (epoch + 1) * size))

    def step(self, batch: int) -> None:
        genotype = self.sampler.propose(batch, list(self._scores))
        if genotype not in self._known:
            self._known[genotype] = self._score(genotype)
        self._genotypes.append(genotype)
        self._scores.append(self._known[genotype])

    def _score(self, genotype: Genotype) -> float:
        score, seed = self.sampler.score, self.recipe.seed
        return on_main(
            lambda: score_architecture(self.space, genotype, score, self._images, self._num_classes, seed), self.world
        )

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        found = self._found()
        return {**found, "_records": {"architecture": line(epoch, self.derive(), score=found["best_score"])}}

    def derive(self) -> Genotype:
        """The architecture of the best score; the earlier one in a tie."""
        return self._genotypes[self._scores.index(max(self._scores))]

    def conclude(self, genotype: Genotype) -> dict[str, Any]:
        """The score, how many networks it is the best of, and what the architecture costs where there is a budget."""
        about = {**self.sampler.findings(), "images": len(self._images), **self._found()}
        verdict = {} if self._budget is None else self._budget.verdict(genotype)[0]
        return {"untrained": about, **verdict}

    def _found(self) -> dict[str, Any]:
        best = max(self._scores)
        return {"best_score": best if math.isfinite(best) else None, "networks": len(self._known)}

    def state_dict(self) -> dict[str, Any]:
        return {"genotypes": [genotype.to_dict() for genotype in self._genotypes], "scores": list(self._scores)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._genotypes = [Genotype.from_dict(data) for data in state["genotypes"]]
        self._scores = list(state["scores"])
        self._known = dict(zip(self._genotypes, self._scores, strict=True))

    def failed(self) -> Failure | None:
        return None


def score_architecture(
    space: Space,
    genotype: Genotype,
    score: Callable[[nn.Module, Tensor], float],
    images: Tensor,
    num_classes: int,
    seed: int,
) -> float:
    """The score of an architecture's untrained network, -inf where it is NaN; the same for the same seed.

    images: [n, c, h, w], normalised as for training; the network is scored on their device.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = space.network(genotype, (images.shape[1], images.shape[2], images.shape[3]), num_classes)
    found = score(network.to(images.device), images)
    return -math.inf if math.isnan(found) else found


def _first(batches: Batches, number: int) -> Tensor:
    """The first images [n, c, h, w] of a split, fewer where it has fewer."""
    found: list[Tensor] = []
    for batch in batches.epoch(0):
        found.append(batch.images)
        if sum(map(len, found)) >= number:
            break
    return torch.cat(found)[:number].float()
