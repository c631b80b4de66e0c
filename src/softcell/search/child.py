"""Children: the derived network with the supernet's own weights, measured without any training.

SNAS, Table 1: how far a derived network falls behind the supernet it comes from tells how biased a search is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from softcell.arch import Genotype, Mix
from softcell.data import Batch
from softcell.engine.distributed import World
from softcell.engine.metrics import Measured, measure
from softcell.nn.stochastic import Dropout, DropPath
from softcell.spaces import Network, Supernet


def make_child(supernet: Supernet, genotype: Genotype) -> Network:
    """The child; the random numbers that building it draws are given back, so that looking changes no search."""
    with torch.random.fork_rng(devices=[]):
        return supernet.child(genotype)


def measure_child(
    supernet: Supernet,
    genotype: Genotype,
    held: Iterable[Batch],
    world: World,
    reestimate: Iterable[Batch] | None = None,
) -> Measured:
    """Loss and accuracy of the child on `held`, with batch-norm's running statistics as the supernet has them.

    reestimate: training batches over which they are averaged anew first.
    """
    child = make_child(supernet, genotype)
    if reestimate is not None:
        reestimate_(child, reestimate)
    child.eval()
    return measure(child, held, world)


@contextmanager
def norms_measured_anew(
    supernet: Supernet,
    mix: Mix,
    batches: Iterable[Batch],
    surroundings: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[None]:
    """Within this context all batch-norms have the plain mean of their statistics over `batches` under `mix`.

    Nothing is dropped meanwhile, as nothing is in evaluation; random numbers that are drawn are given back.
    surroundings: entered around these forwards; whoever evaluates in lower precision measures in it, too.
    """
    norms = [module for module in supernet.modules() if isinstance(module, nn.BatchNorm2d)]
    kept = [({k: v.clone() for k, v in norm.state_dict().items()}, norm.momentum) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    try:
        with torch.no_grad(), _training_without_drops(supernet), surroundings():
            for batch in batches:
                supernet(batch.images, mix)
        yield
    finally:
        for norm, (state, momentum) in zip(norms, kept, strict=True):
            norm.load_state_dict(state)
            norm.momentum = momentum


@contextmanager
def norms_of_each_batch(supernet: Supernet) -> Iterator[None]:
    """Within this context all batch-norms normalise by the batch they are given; running statistics stay as they are.

    Nothing is dropped meanwhile; random numbers that are drawn are given back.
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
    """The supernet in training, but that nothing is dropped; mode, chances and random numbers are given back."""
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


@torch.no_grad()
def reestimate_(network: nn.Module, batches: Iterable[Batch]) -> None:
    """Replaces the running statistics of all batch-norms by their plain mean over the batches; nothing else moves."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the plain average over all batches
    network.train()
    for batch in batches:
        network(batch.images)
