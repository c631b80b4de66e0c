"""Space, method, resolution and sizes for given images, device, time and budget, with the reason in two lines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from softcell.app.pipeline.inspect import Inspection
from softcell.app.pipeline.wishes import LEAST_BATCH, Wishes
from softcell.arch import Genotype, notation, sample
from softcell.errors import UserError
from softcell.settings import to_dict
from softcell.spaces import SPACES, Shape, build_space
from softcell.spaces.costs import Cost, count_genotype

SMALL_SPACE, LARGE_SPACE = "nb201", "darts"
SIZES = (16, 24, 32, 48, 64, 96, 128, 160, 224)
"""Sides of square images that are considered."""
RESIDUAL = "|nor_conv_3x3~0|+|none~0|none~1|+|skip_connect~0|nor_conv_3x3~1|none~2|"
"""The basic residual block as a NAS-Bench-201 cell: two 3×3 convolutions and a shortcut. Made by hand, not searched."""
HOUR = 3600.0


@dataclass(frozen=True)
class Choice:
    """What will be searched and trained.

    `search_space` are the settings of the supernet, `network` those of the networks that are trained. `image_size` is
    None where images keep their size.
    """

    space: str
    method: str
    image_size: int | None
    shape: Shape
    batch_size: int
    search_space: dict[str, Any]
    network: dict[str, Any]
    why: tuple[str, str]

    def to_dict(self) -> dict[str, Any]:
        return {**to_dict(self), "shape": list(self.shape), "why": list(self.why)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Choice:
        channels, height, width = data["shape"]
        first, second = data["why"]
        return cls(**{**data, "shape": (channels, height, width), "why": (first, second)})


def choose(inspection: Inspection, wishes: Wishes, *, is_gpu: bool, is_resizable: bool) -> Choice:
    """The first choice; `cheaper` gives the next smaller one where the time does not allow it."""
    size = _resolution(inspection, wishes, is_gpu=is_gpu) if is_resizable else None
    side = size or inspection.sides[1]
    shape = (inspection.channels, side, side)
    name = wishes.space or (LARGE_SPACE if is_gpu else SMALL_SPACE)
    method = wishes.method or ("darts" if name == LARGE_SPACE else "snas")
    batch = max(LEAST_BATCH, min(96 if is_gpu else 64, inspection.num_train // 10))
    search_space, network = _sizes(name, wishes, is_gpu=is_gpu)
    made = Choice(name, method, size, shape, batch, search_space, network, ("", ""))
    limits = wishes.limits()
    if limits:
        made = replace(made, network=_nominal(made, len(inspection.train), limits))
    return explained(made, inspection, wishes, is_gpu=is_gpu)


def _sizes(name: str, wishes: Wishes, *, is_gpu: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of supernet and network for the device, laid over the space's own for a laptop."""
    space = SPACES.get(name)
    search_space, network = dict(space.small), {**space.small, **space.evaluation.get("small", {})}
    if name == SMALL_SPACE:
        # Without `none` every architecture conducts: no half-trained search can end in a network that sees nothing.
        conducting = [op for op in build_space(name).candidates if op != "none"]  # type: ignore[attr-defined]
        search_space["candidates"] = network["candidates"] = conducting
        if wishes.time > 2 * HOUR:
            network["cells_per_stage"] = 2
    elif name == LARGE_SPACE and is_gpu:
        search_space |= {"cells": 6, "channels": 16}
        network |= {"cells": 8, "channels": 24}
    return search_space, network


def _resolution(inspection: Inspection, wishes: Wishes, *, is_gpu: bool) -> int:
    if wishes.image_size is not None:
        return wishes.image_size
    middle = inspection.sides[1]
    most = (64 if wishes.time < HOUR / 2 else 128) if is_gpu else (32 if wishes.time < 2 * HOUR else 64)
    fitting = [size for size in SIZES if size <= min(middle, most)]
    return max(fitting, default=SIZES[0])


def explained(choice: Choice, inspection: Inspection, wishes: Wishes, *, is_gpu: bool) -> Choice:
    """With the two lines that say why."""
    device = "a GPU" if is_gpu else "a CPU"
    sizes = ", ".join(f"{key} {value}" for key, value in choice.network.items() if isinstance(value, int))
    pixels = "x".join(map(str, choice.shape[1:]))
    chosen = "as you asked" if wishes.space else ("its richer cells pay off there" if is_gpu else "its cells are small")
    limits = [
        f"{text} {what}"
        for text, what in ((wishes.max_params, "parameters"), (wishes.max_flops, "multiply-adds"))
        if text
    ]
    budget = f", sized for at most {' and '.join(limits)}" if limits else ""
    first = f"space {choice.space} ({sizes}{budget}): {inspection.num_train:,} images and {device}; {chosen}"
    reason = {
        "snas": "weights and architecture learn from one backward pass and the same images, the most for little time",
        "darts": "learns the architecture on held-out images, and the time on this device allows it",
    }.get(choice.method, "as you asked")
    source = inspection.sides[1]
    shrunk = f", from a median side of {source}" if choice.shape[1] != source else ""
    second = f"method {choice.method} at {pixels}{shrunk}, batch {choice.batch_size}: {reason}"
    return replace(choice, why=(first, second))


def cheaper(choice: Choice, *, is_resizable: bool) -> Choice | None:
    """The same with smaller images or, where those are small already, narrower networks; None at the end."""
    side = choice.shape[1]
    smaller = [size for size in SIZES if size < side]
    if is_resizable and smaller:
        return replace(choice, image_size=smaller[-1], shape=(choice.shape[0], smaller[-1], smaller[-1]))
    narrow = int(choice.search_space.get("channels", 0)) // 2
    if narrow < 2:
        return None
    network = {**choice.network, "channels": max(2, int(choice.network["channels"]) // 2)}
    return replace(choice, search_space={**choice.search_space, "channels": narrow}, network=network)


def _nominal(choice: Choice, num_classes: int, limits: Mapping[str, float]) -> dict[str, Any]:
    """The width at which half of the space meets the budget: the search has room on both sides of it."""
    genotypes = [sample(build_space(choice.space, choice.network).layout(), seed) for seed in range(3)]

    def middle(settings: dict[str, Any]) -> dict[str, float]:
        space = build_space(choice.space, settings)
        costs = [_costs(count_genotype(space, genotype, choice.shape, num_classes)) for genotype in genotypes]
        return {kind: statistics.median(cost[kind] for cost in costs) for kind in limits}

    return _widest(choice.network, middle, limits, choice.space)


def fit(choice: Choice, genotype: Genotype, num_classes: int, limits: Mapping[str, float]) -> dict[str, Any]:
    """The settings of the widest network of `genotype`, up to the chosen width, that meets the budget."""
    if not limits:
        return dict(choice.network)

    def costs(settings: dict[str, Any]) -> dict[str, float]:
        return _costs(count_genotype(build_space(choice.space, settings), genotype, choice.shape, num_classes))

    return _widest(choice.network, costs, limits, choice.space)


def _widest(
    settings: Mapping[str, Any],
    costs_of: Callable[[dict[str, Any]], dict[str, float]],
    limits: Mapping[str, float],
    name: str,
) -> dict[str, Any]:
    """`settings` with the largest number of channels, up to its own, that meets the limits; costs grow with it."""
    most = int(settings["channels"])
    known: dict[int, dict[str, float]] = {}

    def meets(channels: int) -> bool:
        if channels not in known:
            known[channels] = costs_of({**settings, "channels": channels})
        return _meets(known[channels], limits)

    if meets(most):
        return dict(settings)
    # Costs grow about with the square of the width: the first guess is near, and neighbours settle it.
    channels = max(1, int(most * min(limits[kind] / known[most][kind] for kind in limits) ** 0.5))
    while meets(channels) and meets(channels + 1):
        channels += 1
    while not meets(channels):
        channels -= 1
        if channels < 1:
            stated, least = (
                " and ".join(f"{values[kind]:,.0f} {kind.replace('_', '-')}" for kind in limits)
                for values in (limits, known[1])
            )
            raise UserError(
                f"no network of space {name} is as small as {stated}; one channel wide it has {least}: raise the "
                "budget, or choose another --space or a smaller --image-size"
            )
    return {**settings, "channels": channels}


def _costs(cost: Cost) -> dict[str, float]:
    return {"parameters": cost.parameters, "multiply_adds": cost.multiply_adds}


def _meets(costs: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    return all(costs[kind] <= limit for kind, limit in limits.items())


def plain_network(
    like: Cost, shape: Shape, num_classes: int, limits: Mapping[str, float]
) -> tuple[Genotype, dict[str, Any]]:
    """A residual network of about the parameters of `like` that meets the budget too, and its settings."""
    genotype = notation.parse(RESIDUAL)
    found: list[tuple[float, dict[str, Any]]] = []
    for depth in (1, 2, 3):
        known: dict[int, Cost] = {}

        def cost(channels: int, depth: int = depth, known: dict[int, Cost] = known) -> Cost:
            if channels not in known:
                space = build_space(SMALL_SPACE, {"cells_per_stage": depth, "channels": channels})
                known[channels] = count_genotype(space, genotype, shape, num_classes)
            return known[channels]

        channels = 16
        for _ in range(3):  # parameters grow about with the square of the width
            channels = max(1, round(channels * (like.parameters / cost(channels).parameters) ** 0.5))
        while channels > 1 and not _meets(_costs(cost(channels)), limits):
            channels -= 1
        if _meets(_costs(cost(channels)), limits):
            distance = abs(cost(channels).parameters / like.parameters - 1.0)
            found.append((distance, {"cells_per_stage": depth, "channels": channels}))
    if not found:
        raise UserError("no hand-made residual network is as small as the budget; raise it")
    return genotype, min(found, key=lambda item: item[0])[1]
