"""Training steps on a CPU, compared with plain PyTorch; the CPU part of `python -m benchmarks.training`.

softcell: the step of `softcell train`. plain: the same network made of torch's own modules in an ordinary loop
(`zero_grad`, `backward`, `clip_grad_norm_`, `step`), channels-first and channels-last. All three alternate in one
process on the same batch, so that their ratios are robust to other load on the machine. Gathering and augmenting images
is excluded, since it would be the same in all three.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.arch import notation
from softcell.engine.distributed import World
from softcell.engine.optim import classification_step, sgd
from softcell.engine.session import place
from softcell.engine.timing import Stopwatch, Timing
from softcell.nn.conv import AveragePool, DilatedDepthwise
from softcell.nn.norm import BatchNorm2d
from softcell.spaces import Network, build_space
from tests.reference.published_genotypes import DARTS_V2

CPU = torch.device("cpu")
LR, MOMENTUM, DECAY, CLIP = 0.025, 0.9, 3e-4, 5.0
PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    BatchNorm2d: nn.BatchNorm2d,
    DilatedDepthwise: nn.Conv2d,
    AveragePool: nn.AvgPool2d,
}
"""Our modules and the equivalent torch modules."""


@dataclass(frozen=True)
class Small:
    """A derived network that is small enough to train on a CPU."""

    genotype: str
    settings: dict[str, Any]
    shape: tuple[int, int, int] = (3, 32, 32)
    batch: int = 32


BEST_201 = "|nor_conv_3x3~0|+|nor_conv_3x3~0|nor_conv_3x3~1|+|skip_connect~0|nor_conv_3x3~1|nor_conv_3x3~2|"
CASES = {
    "darts": Small(DARTS_V2, {"cells": 5, "channels": 16}),
    "nb201": Small(BEST_201, {"cells_per_stage": 1, "channels": 16}),
}


def make_network(case: Small) -> Network:
    torch.manual_seed(0)
    genotype = notation.parse(case.genotype)
    return build_space(genotype.space, case.settings).network(genotype, case.shape, 10)


def plain_network(network: Network) -> Network:
    """A copy of a network with torch's modules in place of ours; outputs and weights are the same."""
    twin = copy.deepcopy(network)
    for module in twin.modules():
        module.__class__ = PLAIN.get(type(module), type(module))
    return twin


def steps_of(case: Small) -> dict[str, tuple[Network, Callable[[Tensor, Tensor], None]]]:
    """Named networks, each with a function that runs one training step; all start from the same weights."""
    network = make_network(case)
    first, last = plain_network(network), plain_network(network)
    last.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ours, world = place(network, CPU), World(0, 1, 0, CPU)
    own = sgd(ours.parameters(), CPU, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)

    def step(images: Tensor, labels: Tensor) -> None:
        classification_step(ours, own, images, labels, world, clip=CLIP)

    def ordinary(twin: Network, memory: torch.memory_format) -> Callable[[Tensor, Tensor], None]:
        optimiser = torch.optim.SGD(twin.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)

        def run(images: Tensor, labels: Tensor) -> None:
            optimiser.zero_grad()
            loss = F.cross_entropy(twin(images.contiguous(memory_format=memory)), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(twin.parameters(), CLIP)
            optimiser.step()

        return run

    return {
        "softcell": (ours, step),
        "plain, channels first": (first, ordinary(first, torch.contiguous_format)),
        "plain, channels last": (last, ordinary(last, torch.channels_last)),
    }


def compared(name: str, rounds: int) -> dict[str, Any]:
    """Median processor and wall times in milliseconds, and best plain time / ours: above 1, ours is faster."""
    case = CASES[name]
    steps = {way: step for way, (_, step) in steps_of(case).items()}
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(case.batch, *case.shape, generator=generator)
    labels = torch.randint(10, (case.batch,), generator=generator)
    watch, order = Stopwatch(CPU), list(steps)
    timings: dict[str, list[Timing]] = {way: [] for way in steps}
    for number in range(rounds + 1):
        for way in order:
            with watch:
                steps[way](images, labels)
            if number:  # the first step allocates
                timings[way].append(watch.timing)
        order = [*order[1:], order[0]]  # a step reuses the memory that the previous one freed
    ways = {
        way: {
            "cpu_ms": 1e3 * statistics.median(t.cpu_seconds for t in found),
            "wall_ms": 1e3 * statistics.median(t.wall_seconds for t in found),
        }
        for way, found in timings.items()
    }
    ratios = {
        f"ratio_{kind}": min(ways[way][f"{kind}_ms"] for way in ways if way != "softcell")
        / ways["softcell"][f"{kind}_ms"]
        for kind in ("cpu", "wall")
    }
    sizes = {"settings": case.settings, "shape": case.shape, "batch": case.batch}
    return {"network": name, **sizes, "rounds": rounds, "ways": ways, **ratios}
