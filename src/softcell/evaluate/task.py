"""Training a network from scratch, as a task of the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from softcell.data import Batches
from softcell.data.batches import Draft
from softcell.engine.capture import prepare_step
from softcell.engine.distributed import World, agree, broadcast_module
from softcell.engine.metrics import Failure, Tally, measure
from softcell.engine.optim import (
    AveragedWeights,
    adam,
    adamw,
    classification_step,
    load_optimiser,
    rate_at,
    rate_in,
    rmsprop,
    set_lr,
    sgd,
)
from softcell.engine.session import in_precision
from softcell.engine.timing import TimeBudget
from softcell.evaluate._retrieval import retrieval_step
from softcell.evaluate.recipe import TrainRecipe
from softcell.kernels.backend import current_settings
from softcell.kernels.shared import norms_of
from softcell.nn.classifiers import Classifier
from softcell.nn.norm import running_statistics
from softcell.nn.objective import ProxyNCA
from softcell.settings import MAX_EPOCHS
from softcell.spaces import Network
from softcell.spaces.execution import fused_networks
from softcell.spaces.training import compile_network, warn_if_unfused
from softcell.text import clock

FEWEST_EPOCHS = 5
"""A time that allows for fewer epochs leads to a warning."""
LOOKED_AT = 0.1
"""The share of the time after which the number of epochs is estimated."""
VALIDATION_SHARE = 0.05
"""The share of the time that accuracies on held-out images may take before the last one."""
FORWARD_SHARE = 0.4
"""Time of a forward pass relative to a training step, assumed until one is measured; a third is usual."""


class TrainTask:
    """A network, its optimiser and its data; accuracy on `held` is measured after each epoch."""

    def __init__(
        self,
        recipe: TrainRecipe,
        network: Network | Classifier,
        world: World,
        *,
        train: Batches,
        held: Batches | None,
        notify: Callable[[str], None],
        criterion: ProxyNCA | None = None,
        budget: TimeBudget | None = None,
        num_tested: int = 0,
    ) -> None:
        """criterion: learns an embedding instead of classes; the network's outputs are then coordinates.

        budget: the time limit of a training run, including the evaluation of `num_tested` test images.
        """
        self.recipe, self.network, self.world = recipe, network, world
        self._train, self._held, self._notify = train, held, notify
        self._budget, self._num_tested = budget, num_tested
        self._epoch = self._step = 0
        self._first: tuple[float, float] | None = None  # seconds used and epochs done after the first step
        self._per_image: float | None = None  # seconds to evaluate an image, once measured
        self._validating, self._warned, self._stepped = 0.0, False, False
        network.use_drop_path(recipe.drop_path)
        broadcast_module(network, world)
        self.criterion = criterion
        if criterion is not None:
            broadcast_module(criterion, world)
        self.optimiser = _optimiser(recipe, [network] if criterion is None else [network, criterion], world)
        self._average = AveragedWeights(network, recipe.ema) if recipe.ema else None
        self._tally = Tally(world.device)
        if recipe.fused:
            warn_if_unfused(network, recipe.precision, world, notify)
        learn = in_precision(self._learn, recipe.precision, world.device)
        self._run = prepare_step(learn, recipe.engine, world, notify, divides=recipe.norms == "local")

    @property
    def num_epochs(self) -> int:
        return self.recipe.epochs or MAX_EPOCHS

    def steps_in(self, epoch: int) -> int:
        return self._train.num_batches

    def begin_epoch(self, epoch: int) -> None:
        self._epoch, self._step = epoch, 0
        self.network.train()
        if not self.recipe.follows_steps:
            self.network.drop_path.set_fraction(epoch / self.num_epochs)
            set_lr(self.optimiser, learning_rate(self.recipe, epoch))
        self._tally.begin_epoch()

    def batches(self, epoch: int, start: int) -> Iterator[Draft]:
        return self._train.drafts(epoch, start)

    def step(self, batch: Draft) -> None:
        if self.recipe.follows_steps:
            self._follow_schedules()
        if not self._stepped:
            self._compile()
        self._run(*batch)
        self._step += 1
        self._stepped = True

    def _compile(self) -> None:
        """Compile the kernels of fused cells before the first step."""
        recipe, held = self.recipe, None if self._held is None else self._held.batch_size
        if recipe.fused:
            batch = self._train.batch_size
            compile_network(self.network, batch, held, recipe.precision, recipe.norms, self.world, self._notify)

    @property
    def _epochs_done(self) -> float:
        return self._epoch + self._step / self._train.num_batches

    @property
    def progress(self) -> float:
        """The share of the training that is done, 0 to 1: of its time or of its epochs, whichever is more."""
        # More steps than an epoch has are made where steps are timed to choose a number of threads.
        by_epochs = min(1.0, self._epochs_done / self.recipe.epochs) if self.recipe.epochs else 0.0
        return by_epochs if self._budget is None else max(by_epochs, self._budget.progress)

    def _follow_schedules(self) -> None:
        recipe = self.recipe
        if self._budget is not None:
            self._keep_time(self._budget)
        progress = self.progress
        self.network.drop_path.set_fraction(progress)
        rate = rate_in(progress, self._epochs_done, recipe.lr, recipe.lr_min, recipe.schedule, warmup=recipe.warmup)
        set_lr(self.optimiser, rate)

    def _keep_time(self, budget: TimeBudget) -> None:
        """Estimate how long the evaluation will take, and warn if the time allows for too few epochs.

        The first step is not counted: it includes the start of the process.
        """
        if self._first is None:
            if self._stepped:
                self._first = budget.used, self._epochs_done
            return
        began, before = self._first
        images = (self._epochs_done - before) * len(self._train.indices)
        if images:
            estimate = FORWARD_SHARE * (budget.used - began) / images
            per_image = estimate if self._per_image is None else self._per_image
            budget.evaluating = per_image * (self._num_held + self._num_tested)
        if budget.used - began > LOOKED_AT * budget.seconds and not self._warned:
            rate = (self._epochs_done - before) / (budget.used - began)
            self._warn_of_few(self._epochs_done + rate * (budget.for_steps - budget.used))

    def _warn_of_few(self, epochs: float) -> None:
        self._warned = True
        if epochs < FEWEST_EPOCHS and self.recipe.epochs not in range(1, FEWEST_EPOCHS):
            self._notify(
                f"the time of {clock(self.recipe.time)} allows for about {epochs:.1f} epochs, but a network learns "
                f"little in fewer than {FEWEST_EPOCHS}. Allow more time, or use a smaller network "
                "(--cells, --channels) or smaller images."
            )

    @property
    def _num_held(self) -> int:
        return 0 if self._held is None else len(self._held.indices)

    def _learn(self, *draft: Tensor) -> None:
        """One training step, augmentation included; everything happens on the device, so that it can be captured."""
        recipe, logits = self.recipe, None
        by_kernel = recipe.fused and current_settings().batch_kernels
        with fused_networks(recipe.fused), norms_of(recipe.norms):
            batch = self._train.finish(*draft, by_kernel=by_kernel)
            several = recipe.norms == "local" and self.world.size > 1
            also = running_statistics([self.network]) if several else []
            if self.criterion is not None:
                own = (self.network, self.criterion, self.optimiser, batch.images, batch.labels)
                loss = retrieval_step(*own, self.world, recipe.clip, also)
            else:
                loss, logits = classification_step(
                    self.network,
                    self.optimiser,
                    batch.images,
                    batch.labels,
                    self.world,
                    clip=recipe.clip,
                    label_smoothing=recipe.label_smoothing,
                    auxiliary=recipe.auxiliary,
                    also=also,
                )
            if self._average is not None:
                self._average.update()
            self._tally.update(loss, logits, batch.labels, by_kernel=by_kernel)

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        trained = self._tally.read(self.world)
        metrics: dict[str, Any] = {
            "train_loss": trained.loss,
            **({} if self.criterion is not None else trained.named("train")),
            "lr": float(self.optimiser.param_groups[0]["lr"]),
        }
        if self._held is not None and self._validates(epoch):
            self.network.eval()
            began = time.perf_counter()
            with fused_networks(self.recipe.fused), nullcontext() if self._average is None else self._average.applied():
                held = measure(self.network, self._held.epoch(0), self.world)
            if self._budget is not None:
                # The same on all ranks, which must decide alike whether to validate again (`_validates`).
                (milliseconds,) = agree([int(1000 * (time.perf_counter() - began))], self.world)
                self._validating += milliseconds / 1000
                self._per_image = milliseconds / 1000 / self._num_held
            metrics |= {
                "val_loss": held.loss,
                **held.named("val"),
                "val_split": "holdout",
                "val_count": held.count,
            }
        return metrics

    def _validates(self, epoch: int) -> bool:
        """Whether held-out images are evaluated after this epoch: always without a time, else rarely and at the end."""
        budget = self._budget
        if budget is None or budget.is_over or epoch + 1 == self.recipe.epochs:
            return True
        whole = self._num_held + self._num_tested
        cost = budget.evaluating * self._num_held / whole
        fits = budget.used + cost < budget.for_steps
        return fits and self._validating + cost <= VALIDATION_SHARE * budget.used

    def finish(self) -> None:
        """After the last step: the network gets the averaged weights, if there are any."""
        if self._budget is not None and not self._warned:
            self._warn_of_few(self._epochs_done)
        if self._average is not None:
            self._average.apply()

    def state_dict(self) -> dict[str, Any]:
        return {
            "network": self.network.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "criterion": None if self.criterion is None else self.criterion.state_dict(),
            "step": self._tally.step,
            **({} if self._average is None else {"average": self._average.state_dict()}),
            "_local": {"meter": self._tally.sums},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        if self.criterion is not None:
            self.criterion.load_state_dict(state["criterion"])
        load_optimiser(self.optimiser, state["optimiser"])
        if self._average is not None:
            self._average.load_state_dict(state["average"])
        self._step = state["step"]
        self._tally.load(state["step"], state.get("_local"))

    def failed(self) -> Failure | None:
        return self._tally.failed()


def _optimiser(recipe: TrainRecipe, modules: list[nn.Module], world: World) -> torch.optim.Optimizer:
    parameters = [p for module in modules for p in module.parameters()]
    if recipe.optimiser == "adam":
        decay = recipe.weight_decay
        return adam(parameters, world.device, lr=recipe.lr, betas=(0.9, 0.999), weight_decay=decay)
    if recipe.optimiser == "adamw":
        decay = recipe.weight_decay
        return adamw(parameters, world.device, lr=recipe.lr, betas=(0.9, 0.999), weight_decay=decay)
    if recipe.optimiser == "rmsprop":
        return rmsprop(
            parameters, world.device, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
        )
    return sgd(
        parameters,
        world.device,
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=recipe.nesterov,
    )


def learning_rate(recipe: TrainRecipe, epoch: int) -> float:
    """The rate of an epoch: a linear rise over the warm-up, then the recipe's schedule over the remaining epochs."""
    r = recipe
    warmup = int(r.warmup)
    return rate_at(epoch, r.epochs, r.lr, r.lr_min, r.schedule, warmup=warmup, factor=r.lr_decay, every=r.lr_every)
