"""Training a network from scratch, as a task of the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from softcell.data import Batches
from softcell.data.batches import Draft
from softcell.engine.capture import prepare_step
from softcell.engine.distributed import World, broadcast_module
from softcell.engine.metrics import Failure, Tally, measure
from softcell.engine.optim import adam, classification_step, load_optimiser, rate_at, rmsprop, set_lr, sgd
from softcell.engine.session import in_precision
from softcell.evaluate.recipe import TrainRecipe
from softcell.evaluate.retrieval import retrieval_step
from softcell.nn.classifiers import Classifier
from softcell.nn.objective import ProxyNCA
from softcell.spaces import Network
from softcell.spaces.execution import fused_networks


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
    ) -> None:
        """criterion: learns an embedding instead of classes; the network's outputs are then coordinates."""
        self.recipe, self.network, self.world = recipe, network, world
        self._train, self._held = train, held
        network.use_drop_path(recipe.drop_path)
        broadcast_module(network, world)
        self.criterion = criterion
        if criterion is not None:
            broadcast_module(criterion, world)
        self.optimiser = _optimiser(recipe, [network] if criterion is None else [network, criterion], world)
        self._tally = Tally(world.device)
        self._cells: Callable[[], AbstractContextManager[None]] = fused_networks if recipe.fused else nullcontext
        learn = in_precision(self._learn, recipe.precision, world.device)
        self._run = prepare_step(learn, recipe.engine, world, notify)

    @property
    def num_epochs(self) -> int:
        return self.recipe.epochs

    def steps_in(self, epoch: int) -> int:
        return self._train.num_batches

    def begin_epoch(self, epoch: int) -> None:
        self.network.train()
        self.network.drop_path.set_fraction(epoch / self.num_epochs)
        set_lr(self.optimiser, learning_rate(self.recipe, epoch))
        self._tally.begin_epoch()

    def batches(self, epoch: int, start: int) -> Iterator[Draft]:
        return self._train.drafts(epoch, start)

    def step(self, batch: Draft) -> None:
        self._run(*batch)

    def _learn(self, *draft: Tensor) -> None:
        """One training step, augmentation included; everything happens on the device, so that it can be captured."""
        recipe, logits = self.recipe, None
        with self._cells():
            batch = self._train.finish(*draft)
            if self.criterion is not None:
                loss = retrieval_step(
                    self.network, self.criterion, self.optimiser, batch.images, batch.labels, self.world, recipe.clip
                )
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
                )
            self._tally.update(loss, logits, batch.labels)

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        trained = self._tally.read(self.world)
        metrics: dict[str, Any] = {
            "train_loss": trained.loss,
            **({} if self.criterion is not None else trained.named("train")),
            "lr": float(self.optimiser.param_groups[0]["lr"]),
        }
        if self._held is not None:
            self.network.eval()
            held = measure(self.network, self._held.epoch(0), self.world)
            metrics |= {
                "val_loss": held.loss,
                **held.named("val"),
                "val_split": "holdout",
                "val_count": held.count,
            }
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {
            "network": self.network.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "criterion": None if self.criterion is None else self.criterion.state_dict(),
            "step": self._tally.step,
            "_local": {"meter": self._tally.sums},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        if self.criterion is not None:
            self.criterion.load_state_dict(state["criterion"])
        load_optimiser(self.optimiser, state["optimiser"])
        self._tally.load(state["step"], state.get("_local"))

    def failed(self) -> Failure | None:
        return self._tally.failed()


def _optimiser(recipe: TrainRecipe, modules: list[nn.Module], world: World) -> torch.optim.Optimizer:
    parameters = [p for module in modules for p in module.parameters()]
    if recipe.optimiser == "adam":
        decay = recipe.weight_decay
        return adam(parameters, world.device, lr=recipe.lr, betas=(0.9, 0.999), weight_decay=decay)
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
    return rate_at(epoch, r.epochs, r.lr, r.lr_min, r.schedule, warmup=r.warmup, factor=r.lr_decay, every=r.lr_every)
