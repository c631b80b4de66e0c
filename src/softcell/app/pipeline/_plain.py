"""Plain residual networks, the baseline of `softcell run`, and how large they should be.

Their size is chosen by the number of epochs that their training has time for. Few epochs suit a small, shallow network.
With many, the largest one that the budget allows is best. A short competition cannot decide this: small networks learn
faster at first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from fractions import Fraction
from functools import cache
from typing import Any

from softcell.arch import Genotype, notation
from softcell.errors import UserError
from softcell.spaces import Shape, build_space
from softcell.spaces.costs import Cost, count_genotype
from softcell.text import count_of

PLAIN_SPACE = "nb201"
RESIDUAL = "|nor_conv_3x3~0|+|none~0|none~1|+|skip_connect~0|nor_conv_3x3~1|none~2|"
"""The basic residual block as a NAS-Bench-201 cell: two 3×3 convolutions and a shortcut. Not searched."""
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
"""Channels to choose from. Multiples of 8 take the least time per multiply-add: 16 channels are about as fast as 11."""
DEEPEST, DEEP_FROM = 3, 16
"""Maximum cells per stage, and minimum channels of networks with more than one: below that, width is worth more."""
REFERENCE = 16
"""Channels of the plain network whose steps are measured, if the budget allows for it."""
NARROWEST = 8
"""Channels of the smallest network that is chosen for lack of time; fewer save no time. A budget may require fewer."""
MIN_EPOCHS = 5
"""Training for fewer epochs is not worth starting."""
ENOUGH_EPOCHS, ENOUGH_IMAGES = 20, 500_000
"""Epochs, or images, that a network with one cell per stage needs in the final training (see `enough_epochs`)."""
GPU_FIXED = 0.7
"""Share of an epoch of the reference network on a GPU that does not depend on its multiply-adds.

On an H200 (CIFAR-10, batch 512, captured steps) networks of 22, 49 and 87 million multiply-adds took 0.24, 0.30 to 0.34
and 0.35 s per epoch, a share of 0.7 to 0.85. All had one cell per stage. The lowest is used, because deeper networks
have more kernels: a forecast that is too long costs less than training for too few epochs.
"""
SLOWER_BELOW, SLOWER_ABOVE = 0.5, 0.9
"""Powers of the multiply-adds by which the time on a CPU changes, for smaller and larger networks."""


@cache
def plain_cell() -> Genotype:
    """`RESIDUAL` as a genotype."""
    return notation.parse(RESIDUAL)


def plain_costs(shape: Shape, num_classes: int) -> Callable[[int, int], Cost]:
    """The costs of a plain network as a function of its channels and its cells per stage.

    Costs are quadratic in the channels and linear in the cells per stage, so six networks determine all others.
    Counting every network of the family would take seconds.
    """
    counted = [
        [
            count_genotype(
                build_space(PLAIN_SPACE, {"cells_per_stage": depth, "channels": channels}),
                plain_cell(),
                shape,
                num_classes,
            )
            for channels in (8, 16, 24)
        ]
        for depth in (1, 2)
    ]

    def of(channels: int, depth: int) -> Cost:
        t = Fraction(channels - 8, 8)

        def at(kind: str) -> int:
            # Newton's form of the parabola through the three widths, for each of the two depths.
            one, two = (
                a + t * (b - a) + t * (t - 1) / 2 * (c - 2 * b + a)
                for a, b, c in ([getattr(cost, kind) for cost in row] for row in counted)
            )
            return int(one + (depth - 1) * (two - one))

        return Cost(at("parameters"), at("multiply_adds"))

    return of


def meets(cost: Cost, limits: Mapping[str, float]) -> bool:
    return all(getattr(cost, kind) <= limit for kind, limit in limits.items())


def in_words(costs: Mapping[str, float], kinds: Iterable[str]) -> str:
    """`1,000 parameters and 1 multiply-add`: those of `kinds`."""
    return " and ".join(count_of(int(costs[kind]), kind.replace("_", "-").removesuffix("s")) for kind in kinds)


def plain_networks(shape: Shape, num_classes: int, limits: Mapping[str, float]) -> list[tuple[dict[str, Any], Cost]]:
    """Settings and costs of all plain residual networks that meet the limits, most expensive first."""
    cost_of = plain_costs(shape, num_classes)
    found = [
        ({"cells_per_stage": depth, "channels": channels}, cost)
        for channels in WIDTHS
        for depth in range(1, DEEPEST + 1 if channels >= DEEP_FROM else 2)
        if meets(cost := cost_of(channels, depth), limits)
    ]
    if not found:
        least = in_words(asdict(cost_of(WIDTHS[0], 1)), limits)
        raise UserError(
            f"no plain residual network fits {in_words(limits, limits)}; the smallest has {least} for "
            f"{shape[1]}x{shape[2]} images: raise the budget"
        )
    # A small budget may allow only narrower networks; the two widest of these are left.
    wide = [each for each in found if each[0]["channels"] >= NARROWEST] or found[-2:]
    return sorted(wide, key=lambda item: item[1].multiply_adds, reverse=True)


def enough_epochs(depth: int, num_train: int) -> float:
    """Number of epochs of the final training from which a network with `depth` cells per stage is worth its time.

    A large dataset needs fewer epochs, because it has more steps in each. Deeper networks learn more slowly and cost
    more per epoch, so they only pay off in long training runs: four times as many epochs for 2 cells, nine times for 3.
    """
    return float(min(ENOUGH_EPOCHS, max(MIN_EPOCHS, ENOUGH_IMAGES / num_train)) * depth**2)


def epoch_seconds(measured: float, reference: Cost, other: Cost, *, is_gpu: bool) -> float:
    """The expected seconds of an epoch, if one of the network `reference` takes `measured` seconds.

    On a CPU, time grows more slowly than multiply-adds, above all for small layers, which leave a core half idle. The
    powers describe plain networks of 8 to 32 channels. On a GPU most of the time is a fixed part (`GPU_FIXED`).
    """
    ratio = other.multiply_adds / reference.multiply_adds
    if is_gpu:
        return measured * (GPU_FIXED + (1.0 - GPU_FIXED) * ratio)
    return measured * float(ratio ** (SLOWER_BELOW if ratio < 1.0 else SLOWER_ABOVE))
