"""A search that trains every proposed architecture on its own, as a task of the engine's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from softcell.arch import Genotype
from softcell.data import Batches
from softcell.data.batches import Draft
from softcell.engine.capture import Step, once, prepare_step
from softcell.engine.distributed import broadcast_module
from softcell.engine.metrics import Failure, Tally, measure
from softcell.engine.optim import apply_gradients, load_optimiser, rate_at, set_lr, sgd
from softcell.engine.session import Session, computing_in, in_precision
from softcell.methods import Sampler
from softcell.nn.guide import Guided
from softcell.nn.objective import Evaluated, Objective
from softcell.search.budget import Budget
from softcell.search.guide import probe, read_gauges
from softcell.search.history import line
from softcell.search.recipe import SearchRecipe
from softcell.search.within import next_within
from softcell.spaces import Network, Shape, Space


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
        self._weights, self._held, self._notify_once = weights, held, once(notify)
        self._tally = Tally(world.device)
        self._scores: list[float] = []
        self._genotypes: list[Genotype] = []
        self._budget = budget
        self._numbers: list[int] = []  # of the genotypes among all proposals: a budget passes some over
        self._network: Network | None = None
        self._optimiser: torch.optim.SGD | None = None
        self._run: Step | None = None  # recorded anew for each architecture
        if budget is not None:
            self._propose()  # a budget that no draw meets must not leave a run folder behind

    @property
    def num_epochs(self) -> int:
        return self.recipe.epochs * self.sampler.num_samples

    def steps_in(self, epoch: int) -> int:
        return self._weights.num_batches

    def begin_epoch(self, epoch: int) -> None:
        number, own = divmod(epoch, self.recipe.epochs)
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
        self._run(*batch)

    def _learn(self, *draft: Tensor) -> None:
        """One training step of the present network; it can be recorded."""
        assert self._network is not None and self._optimiser is not None
        batch, clip = self._weights.finish(*draft), self.recipe.weights.clip
        result: Evaluated = self.objective(self._network, batch.images, batch.labels)
        parameters = list(self._network.parameters())
        gradients = torch.autograd.grad(result.loss, parameters, allow_unused=True)
        apply_gradients(self._optimiser, parameters, gradients, self.world, clip)
        logits = None if result.logits is None else result.logits.detach()
        self._tally.update(result.loss.detach(), logits, batch.labels)

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
                    self.objective, network, lambda: network, (), self._weights.epoch(0), self.world, self._notify_once
                )
        if own + 1 == self.recipe.epochs:
            self._network.eval()
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
        """Nothing is left to measure, every architecture was trained on its own; what it costs stands by a budget."""
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
        numbers = list(state.get("numbers", range(len(genotypes))))  # older checkpoints know of no budget
        if self._genotypes != genotypes:
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
            scores = [0.0] * number  # one that was passed over is to its sampler like one that learnt nothing
            for own, score in zip(self._numbers, self._scores, strict=True):
                scores[own] = score
            return self.sampler.propose(number, scores)

        if self._budget is None:
            return first, propose(first)
        way_out = f"raise it, or make the network smaller ({self._budget.smaller()}, and train with the same)"
        return next_within(self._budget, propose, first, len(self._genotypes), way_out)

    def _build(self, number: int, genotype: Genotype) -> None:
        self._network = self._session.place(self.space.network(genotype, self._shape, self._num_classes))
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
        self._run = prepare_step(learn, self.recipe.engine, self.world, self._notify_once)
        self._genotypes.append(genotype)
        self._numbers.append(number)
