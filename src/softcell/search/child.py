"""Children: the derived network with the supernet's own weights, measured without any training.

SNAS, Table 1: how far a derived network falls behind the supernet it comes from tells how biased a search is.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from softcell.arch import Genotype
from softcell.data import Batch
from softcell.engine.distributed import World
from softcell.engine.meter import Measured, measure
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
