"""What to search and train for given images, device, time and budget, with the reason, and the recipes for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count as count_up
from typing import Any

from softcell.app.baseline import APART, STRIDE
from softcell.app.pipeline.inspect import Inspection
from softcell.app.pipeline.plan import LEAST_BATCH, Plan, RunRequest
from softcell.arch import Genotype, Layout, count, notation, sample
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe
from softcell.evaluate import resolve as resolve_training
from softcell.methods import METHODS, Method
from softcell.search import SearchRecipe, resolve
from softcell.settings import to_dict
from softcell.spaces import SPACES, Shape, build_space
from softcell.spaces.costs import Cost, count_genotype
from softcell.text import count_of

SMALL_SPACE, LARGE_SPACE = "nb201", "darts"
SIZES = (16, 24, 32, 48, 64, 96, 128, 160, 224)
"""Image sizes to choose from, in pixels."""
RESIDUAL = "|nor_conv_3x3~0|+|none~0|none~1|+|skip_connect~0|nor_conv_3x3~1|none~2|"
"""The basic residual block as a NAS-Bench-201 cell: two 3×3 convolutions and a shortcut. Not searched."""
HOUR = 3600.0


@dataclass(frozen=True)
class Choice:
    """What to search and train.

    `search_space` are the settings of the supernet, `network` those of the trained networks. `image_size` is None if
    images keep their size. `why` gives the reasons in two lines.
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


def choose(inspection: Inspection, request: RunRequest, *, is_gpu: bool, is_resizable: bool) -> Choice:
    """The first choice; `cheaper` returns the next smaller one if time is short."""
    size = _resolution(inspection, request, is_gpu=is_gpu) if is_resizable else None
    side = size or inspection.sides[1]
    shape = (inspection.channels, side, side)
    name = request.space or (LARGE_SPACE if is_gpu else SMALL_SPACE)
    method = request.method or ("darts" if name == LARGE_SPACE else "snas")
    batch = max(LEAST_BATCH, min(96 if is_gpu else 64, inspection.num_train // 10))
    search_space, network = _sizes(name, request, is_gpu=is_gpu)
    made = Choice(name, method, size, shape, batch, search_space, network, ("", ""))
    limits = request.limits()
    if limits:
        made = replace(made, network=_nominal(made, len(inspection.train), limits))
    return explained(made, inspection, request, is_gpu=is_gpu)


def _sizes(name: str, request: RunRequest, *, is_gpu: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of supernet and network for the device, over the space's settings for a laptop."""
    space = SPACES.get(name)
    search_space, network = dict(space.small), {**space.small, **space.evaluation.get("small", {})}
    if name == SMALL_SPACE:
        # Without `none` every path carries signal, so a short search cannot end in a network without inputs.
        candidates = [op for op in build_space(name).candidates if op != "none"]  # type: ignore[attr-defined]
        search_space["candidates"] = network["candidates"] = candidates
        if request.time > 2 * HOUR:
            network["cells_per_stage"] = 2
    elif name == LARGE_SPACE and is_gpu:
        search_space |= {"cells": 6, "channels": 16}
        network |= {"cells": 8, "channels": 24}
    return search_space, network


def _resolution(inspection: Inspection, request: RunRequest, *, is_gpu: bool) -> int:
    if request.image_size is not None:
        return request.image_size
    middle = inspection.sides[1]
    most = (64 if request.time < HOUR / 2 else 128) if is_gpu else (32 if request.time < 2 * HOUR else 64)
    fitting = [size for size in SIZES if size <= min(middle, most)]
    return max(fitting, default=SIZES[0])


def explained(choice: Choice, inspection: Inspection, request: RunRequest, *, is_gpu: bool) -> Choice:
    """The choice with its reasons."""
    device = "a GPU" if is_gpu else "a CPU"
    sizes = ", ".join(f"{key} {value}" for key, value in choice.network.items() if isinstance(value, int))
    pixels = "x".join(map(str, choice.shape[1:]))
    why = "as requested" if request.space else ("a GPU can train its larger cells" if is_gpu else "its cells are small")
    limits = [
        f"{text} {what}"
        for text, what in ((request.max_params, "parameters"), (request.max_flops, "multiply-adds"))
        if text
    ]
    budget = f", sized for at most {' and '.join(limits)}" if limits else ""
    images = count_of(inspection.num_train, "image")
    first = f"space {choice.space} ({sizes}{budget}): {images} and {device}; {why}"
    reason = {
        "snas": "it learns weights and architecture in one backward pass, which suits a short time",
        "darts": "it learns the architecture from held-out images, and there is enough time on this device",
    }.get(choice.method, "as requested")
    source = inspection.sides[1]
    shrunk = f" (resized from a median of {source})" if choice.shape[1] != source else ""
    second = f"method {choice.method} at {pixels}{shrunk}, batch {choice.batch_size}: {reason}"
    return replace(choice, why=(first, second))


def cheaper(choice: Choice, *, is_resizable: bool) -> Choice | None:
    """The same with smaller images or, if these are already small, narrower networks; None if nothing is left."""
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
    """The width at which half of the space meets the budget, so that the search has room on both sides."""
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
    # Costs grow roughly with the square of the width, so the first guess is near and its neighbours decide.
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
                f"no network of space {name} fits {stated}; with one channel it has {least}: raise the budget, or "
                "choose another --space or a smaller --image-size"
            )
    return {**settings, "channels": channels}


def _costs(cost: Cost) -> dict[str, float]:
    return {"parameters": cost.parameters, "multiply_adds": cost.multiply_adds}


def _meets(costs: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    return all(costs[kind] <= limit for kind, limit in limits.items())


def plain_network(
    like: Cost, shape: Shape, num_classes: int, limits: Mapping[str, float]
) -> tuple[Genotype, dict[str, Any]]:
    """A residual network with about as many parameters as `like` that also meets the budget, and its settings."""
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
        for _ in range(3):  # parameters grow roughly with the square of the width
            channels = max(1, round(channels * (like.parameters / cost(channels).parameters) ** 0.5))
        while channels > 1 and not _meets(_costs(cost(channels)), limits):
            channels -= 1
        if _meets(_costs(cost(channels)), limits):
            distance = abs(cost(channels).parameters / like.parameters - 1.0)
            found.append((distance, {"cells_per_stage": depth, "channels": channels}))
    if not found:
        raise UserError("no plain residual network fits the budget; raise it")
    return genotype, min(found, key=lambda item: item[0])[1]


def random_others(found: Genotype, layout: Layout, seed: int, num: int) -> list[Genotype]:
    """`num` random architectures of the space, all different from each other and from `found`.

    They repeat if the space has no others left. A random search draws its own from other seeds (see `APART`).
    """
    others: list[Genotype] = []
    taken = [found.cells]
    for number in count_up(seed * STRIDE + APART):
        if len(others) == num:
            break
        other = sample(layout, number)
        if other.cells not in taken or count(layout) <= len(taken):
            others.append(other)
            taken.append(other.cells)
    return others


HOLDOUT = 0.1
"""Share of the training images that trainings hold back for validation."""


def search_recipe(plan: Plan, choice: Choice, epochs: int) -> SearchRecipe:
    """The small recipe of the chosen method, with `epochs` and the requested limits."""
    request, limits = plan.request, plan.request.limits()
    resource: dict[str, Any] = {"preset": "none"}
    if limits and issubclass(METHODS.get(choice.method), Method):
        resource |= {"max_params": limits.get("parameters"), "max_flops": limits.get("multiply_adds")}
        resource = {key: value for key, value in resource.items() if value is not None}
        resource["network"] = choice.network
    return resolve(
        {
            "method": choice.method,
            "space": choice.space,
            "data": str(plan.data),
            "data_root": None if request.is_folder() else request.data_root,
            "image_size": choice.image_size,
            "scale": "small",
            "epochs": epochs,
            "batch_size": choice.batch_size,
            "cutout": choice.shape[1] // 4,
            "child_every": 0,
            "seed": request.seed,
            "device": request.device,
            "threads": request.threads,
            "space_settings": choice.search_space,
            "resource": resource,
        }
    )


def train_recipe(plan: Plan, choice: Choice, genotype: Genotype, settings: dict[str, Any], epochs: int) -> TrainRecipe:
    """The same for all compared networks, except for the settings of the network."""
    request = plan.request
    return resolve_training(
        genotype,
        {
            "recipe": "small",
            "data": str(plan.data),
            "data_root": None if request.is_folder() else request.data_root,
            "image_size": choice.image_size,
            "space_settings": settings,
            "epochs": epochs,
            "batch_size": choice.batch_size,
            "lr": 0.05 * max(0.25, min(2.0, choice.batch_size / 64)),
            "cutout": choice.shape[1] // 4,
            "auxiliary": 0.0,
            "holdout": HOLDOUT,
            "seed": request.seed,
            "device": request.device,
            "threads": request.threads,
        },
    )
