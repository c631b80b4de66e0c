"""Space, method, resolution and sizes for given images, device, time and budget, with the reason in two lines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from softcell.arch import Genotype, notation, sample
from softcell.errors import UserError
from softcell.pipeline.inspect import Inspection
from softcell.pipeline.plan import Wishes
from softcell.settings import to_dict
from softcell.spaces import SPACES, Shape, Space, build_space
from softcell.spaces.count import Cost, count_genotype

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
    batch = max(4, min(96 if is_gpu else 64, inspection.num_train // 10))
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

    def middle(settings: dict[str, Any]) -> dict[str, float]:
        space = build_space(choice.space, settings)
        costs = [count_genotype(space, sample(space.layout(), seed), choice.shape, num_classes) for seed in range(7)]
        return {
            "parameters": statistics.median(cost.parameters for cost in costs),
            "multiply_adds": statistics.median(cost.multiply_adds for cost in costs),
        }

    return _widest(choice.network, lambda settings: _meets(middle(settings), limits), limits, choice.space)


def fit(choice: Choice, genotype: Genotype, num_classes: int, limits: Mapping[str, float]) -> dict[str, Any]:
    """The settings of the widest network of `genotype`, up to the chosen width, that meets the budget."""
    if not limits:
        return dict(choice.network)

    def meets(settings: dict[str, Any]) -> bool:
        cost = count_genotype(build_space(choice.space, settings), genotype, choice.shape, num_classes)
        return _meets(_costs(cost), limits)

    return _widest(choice.network, meets, limits, choice.space)


def _widest(settings: Mapping[str, Any], meets: Any, limits: Mapping[str, float], name: str) -> dict[str, Any]:
    """`settings` with the largest number of channels, up to its own, for which `meets` holds; costs grow with it."""
    low, high = 1, int(settings["channels"])
    if meets({**settings, "channels": high}):
        return {**settings, "channels": high}
    if not meets({**settings, "channels": low}):
        stated = " and ".join(f"{value:,.0f} {kind.replace('_', '-')}" for kind, value in limits.items())
        raise UserError(
            f"no network of space {name} is as small as {stated}; raise the budget or choose another --space"
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets({**settings, "channels": middle}) else (low, middle)
    return {**settings, "channels": low}


def _costs(cost: Cost) -> dict[str, float]:
    return {"parameters": cost.parameters, "multiply_adds": cost.multiply_adds}


def _meets(costs: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    return all(costs[kind] <= limit for kind, limit in limits.items())


def plain_network(
    like: Cost, shape: Shape, num_classes: int, limits: Mapping[str, float]
) -> tuple[Genotype, dict[str, Any]]:
    """A residual network of about the parameters of `like` that meets the budget too, and its settings."""
    genotype = notation.parse(RESIDUAL)
    best: tuple[float, dict[str, Any]] | None = None
    for depth in (1, 2, 3):
        for channels in _widths():
            settings = {"cells_per_stage": depth, "channels": channels}
            cost = count_genotype(_bench(settings), genotype, shape, num_classes)
            if not _meets(_costs(cost), limits):
                break
            distance = abs(cost.parameters / like.parameters - 1.0)
            if best is None or distance < best[0]:
                best = distance, settings
            if cost.parameters > like.parameters:
                break
    if best is None:
        raise UserError("no hand-made residual network is as small as the budget; raise it")
    return genotype, best[1]


def _widths() -> list[int]:
    return [*range(1, 33), *range(36, 129, 4), *range(144, 513, 16)]


def _bench(settings: Mapping[str, Any]) -> Space:
    return build_space(SMALL_SPACE, settings)
