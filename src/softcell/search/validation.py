"""Accuracy of a supernet and of its children, and the statistics that BatchNorm uses for them.

A child is a derived network with the supernet's own weights, without any training. SNAS, Table 1: a child far below its
supernet shows that the search is biased.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from softcell.arch import Genotype, Mix
from softcell.data import Batch, Batches
from softcell.engine.capture import MAX_GRAPHS, CapturedStep, Engine, prepare_step
from softcell.engine.distributed import World
from softcell.engine.metrics import Measured, Meter, measure
from softcell.nn.stochastic import Dropout, DropPath
from softcell.spaces import Network, Supernet

StepContext = Callable[[], AbstractContextManager[object]]
"""A context for forward passes: precision and kind of cells as in a step of the search."""

RECALIBRATED = "val_accuracy_bn"
"""The metric that says that `val_accuracy` was measured with BatchNorm recalibrated, and has its value.

Searches of earlier versions have it after the last epoch alone; their `val_accuracy` has running statistics.
"""
OVERFIT_RATIO = 3.0
"""Training accuracy over validation accuracy above which a supernet's validation accuracy is suspicious."""


class Validation:
    """Measures a supernet on `held`; `in_step` is entered around every forward pass.

    A pass is hundreds of forward passes under the same mix. Captured once as a CUDA graph, with buffers of its own for
    the mix, it costs the host almost nothing in later epochs.
    """

    def __init__(
        self,
        supernet: Supernet,
        held: Batches,
        engine: Engine,
        world: World,
        in_step: StepContext,
        notify: Callable[[str], None],
    ) -> None:
        self._supernet, self._held, self._world, self._in_step = supernet, held, world, in_step
        self._meter = Meter(world.device)
        self._mix: Mix | None = None
        self._kept: dict[Hashable, Mix] = {}
        self._run = prepare_step(self._forward, engine, world, notify, divides=True)  # it has no collectives

    @torch.no_grad()
    def __call__(self, mix: Mix) -> Measured:
        """Loss and accuracy over all images and all ranks, in evaluation mode, under `mix`."""
        self._supernet.eval()
        self._meter.reset()
        captured = False
        self._mix, key = mix, mix.signature()
        if isinstance(self._run, CapturedStep) and key is not None:
            captured = self._copy_into_buffers(mix, key)
        size = self._held.batch_size // self._world.size
        for draft in self._held.drafts(0):
            if captured and draft[0].shape[0] == size:
                self._run(*draft, key=key)
            elif draft[0].shape[0]:  # a rank's part of a short last batch may be empty
                self._forward(*draft)
        self._mix = None
        self._supernet.train()
        return self._meter.read(self._world)

    @torch.no_grad()
    def rehearse(self, mix: Mix) -> None:
        """One forward pass for every size of batch, measuring nothing: what `__call__` launches."""
        if isinstance(self._run, CapturedStep) and mix.signature() is not None:
            mix = mix.copy()  # as captured passes read it
        self._supernet.eval()
        for size in self._held.sizes - {0}:
            with self._in_step():
                self._supernet(self._held.blank(size), mix)
        self._supernet.train()

    def _copy_into_buffers(self, mix: Mix, key: Hashable) -> bool:
        """Copies the mix into the buffers that its graph reads; False where there are too many kinds to capture."""
        if key not in self._kept:
            if len(self._kept) >= MAX_GRAPHS:
                return False
            self._kept[key] = mix.copy()  # never dropped: the graph keeps reading it
        self._kept[key].take(mix)
        self._mix = self._kept[key]
        return True

    def _forward(self, *draft: Tensor) -> None:
        batch = self._held.finish(*draft)
        assert self._mix is not None
        with torch.no_grad(), self._in_step():
            logits = self._supernet(batch.images, self._mix)
        self._meter.judge(logits, batch.labels)


def overfit_warning(trained: float | None, held: float | None, *, is_recalibrated: bool) -> str | None:
    """A warning where the supernet's validation accuracy is far below the one in training, else None.

    None: not measured. is_recalibrated: whether BatchNorm has the statistics of the mix that is validated.
    """
    if trained is None or held is None or trained <= OVERFIT_RATIO * held:
        return None
    both = f"the supernet is right for {held:.1%} of its validation images, but for {trained:.1%} in training. "
    if is_recalibrated:
        return both + (
            "Its method trains many cells, and one of them is validated, with BatchNorm recalibrated for it: either "
            "the supernet overfits, or this cell is a poor one (a sample may be all `none`). More images may help. "
            "Do not compare seeds by this figure."
        )
    return both + (
        "Every step of its method trains all candidates, so either the supernet overfits, or BatchNorm's running "
        "statistics lag behind its weights (few steps, or a high learning rate). More images or a smaller "
        "--set weights.lr may help. Do not compare seeds by this figure."
    )


def make_child(supernet: Supernet, genotype: Genotype) -> Network:
    """The child. The random numbers that building it draws are restored, so that it changes no search."""
    with torch.random.fork_rng(devices=[]):
        return supernet.child(genotype)


def measure_child(
    supernet: Supernet,
    genotype: Genotype,
    held: Iterable[Batch],
    world: World,
    recalibrate: Iterable[Batch] | None = None,
) -> Measured:
    """Loss and accuracy of the child on `held`, with the supernet's running statistics of BatchNorm.

    recalibrate: training batches over which these are averaged first.
    """
    child = make_child(supernet, genotype)
    if recalibrate is not None:
        recalibrate_(child, recalibrate)
    child.eval()
    return measure(child, held, world)


@torch.no_grad()
def recalibrate_(network: nn.Module, batches: Iterable[Batch]) -> None:
    """Replaces the running statistics of all BatchNorms by their mean over the batches; nothing else changes."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the plain average over all batches
    network.train()
    for batch in batches:
        network(batch.images)


@contextmanager
def recalibrated(
    supernet: Supernet, mix: Mix, batches: Iterable[Batch], in_step: StepContext = nullcontext
) -> Iterator[None]:
    """Within this context all BatchNorms have the mean of their statistics over `batches` under `mix`.

    Nothing is dropped, as in evaluation; random numbers are restored. in_step: entered around these forward
    passes, so that they have the precision of the evaluation.
    """
    norms = [module for module in supernet.modules() if isinstance(module, nn.BatchNorm2d)]
    kept = [({k: v.clone() for k, v in norm.state_dict().items()}, norm.momentum) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    try:
        with torch.no_grad(), _training_without_drops(supernet), in_step():
            for batch in batches:
                supernet(batch.images, mix)
        yield
    finally:
        for norm, (state, momentum) in zip(norms, kept, strict=True):
            norm.load_state_dict(state)
            norm.momentum = momentum


@contextmanager
def batch_statistics(supernet: Supernet) -> Iterator[None]:
    """Within this context all BatchNorms normalise by the batch itself; running statistics stay as they are.

    Nothing is dropped; random numbers are restored.
    """
    norms = [module for module in supernet.modules() if isinstance(module, nn.BatchNorm2d)]
    kept = [{k: v.clone() for k, v in norm.state_dict().items()} for norm in norms]
    try:
        with _training_without_drops(supernet):
            yield
    finally:
        for norm, state in zip(norms, kept, strict=True):
            norm.load_state_dict(state)


@contextmanager
def _training_without_drops(supernet: Supernet) -> Iterator[None]:
    """The supernet in training mode, with nothing dropped; mode, drop rates and random numbers are restored."""
    drops = [module for module in supernet.modules() if isinstance(module, DropPath | Dropout)]
    chances = [drop.current.clone() for drop in drops]
    was_training, device = supernet.training, next(supernet.parameters()).device
    supernet.train()
    for drop in drops:
        drop.set_fraction(0.0)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        supernet.train(was_training)
        for drop, chance in zip(drops, chances, strict=True):
            drop.current.copy_(chance)
