"""Searches without a supernet, as tasks of the loop: a sampler proposes architectures, which are compared one by one.

`IndependentTask` trains each of them from scratch; `UntrainedTask` scores networks of random weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from softcell.arch import Genotype
from softcell.data import Batches
from softcell.data.batches import Draft
from softcell.engine.capture import Step, once, prepare_step
from softcell.engine.distributed import World, broadcast_module, on_main
from softcell.engine.metrics import Failure, Tally, measure
from softcell.engine.optim import apply_gradients, load_optimiser, rate_at, set_lr, sgd
from softcell.engine.reduce import gradients_of
from softcell.engine.session import Session, computing_in, forked_rng, in_precision
from softcell.errors import UserError
from softcell.kernels.backend import current_settings
from softcell.kernels.shared import norms_of
from softcell.methods import Sampler, UntrainedSampler
from softcell.nn.norm import running_statistics
from softcell.nn.objective import Evaluated, Guided, Objective
from softcell.search.budget import Budget, next_within
from softcell.search.genotypes import line
from softcell.search.guide import probe, read_gauges
from softcell.search.recipe import SearchRecipe
from softcell.spaces import Network, Shape, Space
from softcell.spaces.execution import fused_networks
from softcell.spaces.training import compile_network, warn_if_unfused


class IndependentTask:
    """Epoch e belongs to architecture e // epochs: trained from scratch, then measured on the validation split."""

    def __init__(
        self,
        recipe: SearchRecipe,
        space: Space,
        sampler: Sampler,
        objective: Objective,
        shape: Shape,
        num_classes: int,
        session: Session,
        *,
        weights: Batches,
        held: Batches,
        notify: Callable[[str], None],
        about: Mapping[str, Any] | None = None,
        budget: Budget | None = None,
    ) -> None:
        world = session.world
        self.objective, self.about = objective, dict(about or {})
        self.recipe, self.space, self.sampler, self.world = recipe, space, sampler, world
        self._shape, self._num_classes, self._session = shape, num_classes, session
        self._weights, self._held, self._notify = weights, held, notify
        # One reason is enough for all architectures, but it must not hide notes of another kind.
        self._notify_uncaptured, self._notify_unfused = once(notify), once(notify)
        self._tally = Tally(world.device)
        self._scores: list[float] = []
        self._genotypes: list[Genotype] = []
        self._budget = budget
        self._numbers: list[int] = []  # of the genotypes among all proposals: those that miss a budget are skipped
        self._network: Network | None = None
        self._optimiser: torch.optim.SGD | None = None
        self._run: Step | None = None  # captured again for each architecture
        self._is_compiled = False  # whether the kernels of the current network are
        if budget is not None:
            self._propose()  # raises before there is a run folder if no draw meets the budget

    @property
    def num_epochs(self) -> int:
        return self.recipe.epochs * self.sampler.num_samples

    def steps_in(self, epoch: int) -> int:
        return self._weights.num_batches

    def begin_epoch(self, epoch: int) -> None:
        number, own = divmod(epoch, self.recipe.epochs)
        # A resumed run has built the network in `load_state_dict`.
        if own == 0 and len(self._genotypes) <= number:
            self._build(*self._propose())
        assert self._network is not None and self._optimiser is not None
        self._network.train()
        w = self.recipe.weights
        set_lr(self._optimiser, rate_at(own, self.recipe.epochs, w.lr, w.lr_min, w.schedule, warmup=w.warmup))
        self._tally.begin_epoch()
        for sums in self.objective.gauges().values():
            sums.zero_()

    def batches(self, epoch: int, start: int) -> Iterator[Draft]:
        return self._weights.drafts(epoch, start)

    def step(self, batch: Draft) -> None:
        assert self._run is not None
        if not self._is_compiled:
            self._compile()
        self._run(*batch)

    def _compile(self) -> None:
        """Compile the kernels of fused cells before the first step of a network."""
        self._is_compiled, recipe = True, self.recipe
        assert self._network is not None
        if recipe.fused:
            sizes = (self._weights.batch_size, self._held.batch_size)
            compile_network(self._network, *sizes, recipe.precision, recipe.norms, self.world, self._notify)

    def _learn(self, *draft: Tensor) -> None:
        """One training step of the current network; it can be captured."""
        assert self._network is not None and self._optimiser is not None
        clip, by_kernel = self.recipe.weights.clip, self.recipe.fused and current_settings().batch_kernels
        parameters, norms = list(self._network.parameters()), self.recipe.norms
        with fused_networks(self.recipe.fused), norms_of(norms):
            batch = self._weights.finish(*draft, by_kernel=by_kernel)
            result: Evaluated = self.objective(self._network, batch.images, batch.labels)
            also = running_statistics([self._network]) if norms == "local" and self.world.size > 1 else []
            found = gradients_of(result.loss, parameters, self.world, also=also)
        apply_gradients(self._optimiser, parameters, found.means, self.world, clip, averaged=True)
        logits = None if result.logits is None else result.logits.detach()
        self._tally.update(result.loss.detach(), logits, batch.labels, by_kernel=by_kernel)

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        assert self._network is not None and self._optimiser is not None
        number, own = divmod(epoch, self.recipe.epochs)
        trained = self._tally.read(self.world)
        metrics: dict[str, Any] = {
            "architecture": number,
            "train_loss": trained.loss,
            **trained.named("train"),
            "lr": float(self._optimiser.param_groups[0]["lr"]),
            **read_gauges(self.objective, self.world),
        }
        if epoch == 0 and isinstance(self.objective, Guided):
            network = self._network
            with computing_in(self.recipe.precision, self.world.device):
                metrics |= probe(
                    self.objective, network, lambda: network, (), self._weights.epoch(0), self.world, self._notify
                )
        if own + 1 == self.recipe.epochs:
            self._network.eval()
            with fused_networks(self.recipe.fused):
                held = measure(self._network, self._held.epoch(0), self.world)
            self._scores.append(held.accuracy)
            metrics |= {
                "val_loss": held.loss,
                **held.named("val"),
                "val_split": self.recipe.measured_split,
                "val_count": held.count,
                "best_val_accuracy": max(self._scores),
                "_records": {"architecture": line(epoch, self._genotypes[number], val_accuracy=held.accuracy)},
            }
        return metrics

    def derive(self) -> Genotype:
        """The architecture with the best validation accuracy; the earlier one in a tie."""
        best = max(range(len(self._scores)), key=lambda i: (self._scores[i], -i))
        return self._genotypes[best]

    def conclude(self, genotype: Genotype) -> dict[str, Any]:
        """The costs of the architecture where there is a budget; everything else has been measured."""
        if self._budget is None:
            return {}
        return self._budget.verdict(genotype)[0]

    def state_dict(self) -> dict[str, Any]:
        assert self._network is not None and self._optimiser is not None
        return {
            "network": self._network.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "genotypes": [genotype.to_dict() for genotype in self._genotypes],
            "scores": list(self._scores),
            "numbers": list(self._numbers),
            "step": self._tally.step,
            "_local": {"meter": self._tally.sums, "objective": self.objective.gauges()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        genotypes = [Genotype.from_dict(data) for data in state["genotypes"]]
        numbers = list(state.get("numbers", range(len(genotypes))))  # older checkpoints have none
        if self._genotypes != genotypes:
            # Without the last one, which `_build` adds.
            self._genotypes, self._numbers = genotypes[:-1], numbers[:-1]
            self._build(numbers[-1], genotypes[-1])
        assert self._network is not None and self._optimiser is not None
        self._network.load_state_dict(state["network"])
        load_optimiser(self._optimiser, state["optimiser"])
        self._scores = list(state["scores"])
        self._tally.load(state["step"], state.get("_local"))
        if "_local" in state:
            for name, sums in self.objective.gauges().items():
                sums.copy_(state["_local"]["objective"][name])

    def failed(self) -> Failure | None:
        return self._tally.failed()

    def _propose(self) -> tuple[int, Genotype]:
        """The next architecture and its number among all proposals; with a budget the next one that meets it."""
        first = self._numbers[-1] + 1 if self._numbers else 0

        def propose(number: int) -> Genotype:
            scores = [0.0] * number  # to the sampler, one that was skipped is like one that learned nothing
            for own, score in zip(self._numbers, self._scores, strict=True):
                scores[own] = score
            return self.sampler.propose(number, scores)

        if self._budget is None:
            return first, propose(first)
        way_out = f"raise it, or make the network smaller ({self._budget.smaller()}, and train with the same)"
        return next_within(self._budget, propose, first, len(self._genotypes), way_out)

    def _build(self, number: int, genotype: Genotype) -> None:
        self._network = self._session.place(self.space.network(genotype, self._shape, self._num_classes))
        self._is_compiled = False
        if self.recipe.fused:
            warn_if_unfused(self._network, self.recipe.precision, self.world, self._notify_unfused)
        broadcast_module(self._network, self.world)
        w = self.recipe.weights
        self._optimiser = sgd(
            self._network.parameters(),
            self.world.device,
            lr=w.lr,
            momentum=w.momentum,
            weight_decay=w.weight_decay,
        )
        learn = in_precision(self._learn, self.recipe.precision, self.world.device)
        self._run = prepare_step(
            learn, self.recipe.engine, self.world, self._notify_uncaptured, divides=self.recipe.norms == "local"
        )
        self._genotypes.append(genotype)
        self._numbers.append(number)


class UntrainedTask:
    """A generation is an epoch, a network is a step.

    Every network has the weights of the recipe's seed, so that a score depends only on its architecture.
    """

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
            sampler.propose(0, [])  # raises before there is a run folder if nothing meets the budget
        self._batch = _first(weights, sampler.num_images)  # used only by the main process, which scores

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
            lambda: score_architecture(self.space, genotype, score, *self._batch, self._num_classes, seed), self.world
        )

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        found = self._found()
        return {**found, "_records": {"architecture": line(epoch, self.derive(), score=found["best_score"])}}

    def derive(self) -> Genotype:
        """The architecture with the best score; the earlier one in a tie."""
        return self._genotypes[self._scores.index(max(self._scores))]

    def conclude(self, genotype: Genotype) -> dict[str, Any]:
        """The score, how many networks it is the best of, and what the architecture costs where there is a budget."""
        if self._scores and max(self._scores) == -math.inf:
            scored_by = ", ".join(f"{name}={value}" for name, value in self.sampler.findings().items())
            raise UserError(
                f"none of {len(self._known)} networks has a score ({scored_by}): it is not defined for the networks of "
                f"space {self.recipe.space}; choose another one (`method.proxy`)"
            )
        about = {**self.sampler.findings(), "images": len(self._batch[0]), **self._found()}
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
    score: Callable[[nn.Module, Tensor, Tensor], float],
    images: Tensor,
    labels: Tensor,
    num_classes: int,
    seed: int,
) -> float:
    """The score of an architecture's untrained network, -inf where it is NaN; the same for the same seed.

    images: [n, c, h, w], normalised as for training; the network is scored on their device. labels: int64 [n].
    """
    with forked_rng(images.device):  # also around the score: candidates such as `noise` draw numbers when they run
        # Built on the CPU, whose generator draws the same weights for every device.
        torch.manual_seed(seed)
        network = space.network(genotype, (images.shape[1], images.shape[2], images.shape[3]), num_classes)
        found = score(network.to(images.device), images, labels)
    return -math.inf if math.isnan(found) else found


def _first(batches: Batches, number: int) -> tuple[Tensor, Tensor]:
    """The first images [n, c, h, w] of a split and their labels [n], fewer where it has fewer."""
    images: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in batches.epoch(0):
        images.append(batch.images)
        labels.append(batch.labels)
        if sum(map(len, images)) >= number:
            break
    return torch.cat(images)[:number].float(), torch.cat(labels)[:number]
