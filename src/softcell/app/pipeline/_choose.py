"""What to search and train for given images, device, time and budget, with the reason, and the recipes for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from softcell.app import jobs
from softcell.app.jobs import JobTime, measure_job
from softcell.app.pipeline._inspect import Inspection
from softcell.app.pipeline._plain import (
    MIN_EPOCHS,
    REFERENCE,
    enough_epochs,
    epoch_seconds,
    plain_cell,
    plain_networks,
)
from softcell.app.pipeline._plan import MIN_BATCH, SAFE, Candidate, Plan, RunRequest, RunTime, TooLittleTimeError
from softcell.app.progress import Screen
from softcell.arch import Genotype
from softcell.engine import resolve_device
from softcell.engine.task import Event, OnEvent
from softcell.evaluate import TrainRecipe, TrainResult
from softcell.evaluate import resolve as resolve_training
from softcell.evaluate.recipe import cutout_side
from softcell.search import SearchRecipe, resolve
from softcell.spaces import SPACES, Shape, build_space
from softcell.spaces.costs import Cost

SMALL_SPACE, LARGE_SPACE = "nb201", "darts"
SIZES = (16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224)
"""Image sizes to choose from, in pixels."""
FEW_EPOCHS, GOOD_EPOCHS = 5, 40
"""Minimum epochs of `REFERENCE` in the final training: for images of up to `KEPT_SIZE` pixels, and for larger ones.

The narrowest network gets about twice as many: fewer channels cost less accuracy than fewer pixels.
"""
KEPT_SIZE = 32
HOUR = 3600.0
BUSY = 1.5
"""Wall-clock seconds per CPU second of this process from which the machine counts as busy."""
MEASURING = 0.01
"""Share of the time for measuring one job, within `MEASURING_BOUNDS`."""
MEASURING_BOUNDS = (0.3, 6.0)
"""Minimum and maximum seconds for measuring one job."""
MEASURING_CPU = 3.0
"""CPU seconds until training steps are first timed, including the start of the first steps."""
MAX_WIDENED = 2
"""Cells with few multiply-adds become wider than the largest plain network, but at most by this factor."""
MAX_TRIED, HURRIED = 3, 0.25
"""Maximum number of image sizes to measure, and the share of the time after which smaller ones are forecast instead."""
CLOSE = 0.9
"""The shallowest network with at least this share of the most multiply-adds is chosen: its steps are faster."""
SMALLER = 0.6
"""Maximum multiply-adds of the next smaller plain network, relative to the larger one."""
NUM_SIZES = 3
MAX_START, MAX_START_GPU = 1.0, 4.0
"""Maximum seconds planned for the start of a training run, on a CPU and on a GPU, which captures its steps."""


@dataclass(frozen=True)
class Choice:
    """What to search and train.

    `search_space` are the settings of the supernet, `network` those of networks of cells, up to their width. `plain`
    are the plain networks, largest first, `epoch` the expected seconds of its epochs, `start` those before the
    first training step, and `final` those of the final training, on `num_train` images. `image_size` is None if
    images keep their size. `why` gives the reasons in two lines.
    """

    space: str
    method: str
    image_size: int | None
    shape: Shape
    batch_size: int
    search_space: dict[str, Any]
    network: dict[str, Any]
    threads: int = 0
    plain: tuple[Candidate, ...] = ()
    epoch: float = 0.0
    final: float = 0.0
    start: float = 0.0
    num_train: int = 0
    why: tuple[str, str] = ("", "")


def first_choice(inspection: Inspection, request: RunRequest, *, is_gpu: bool, is_resizable: bool) -> Choice:
    """The first choice, before anything is measured; images of folders have `KEPT_SIZE` pixels at most."""
    name = request.space or (LARGE_SPACE if is_gpu and request.time > 2 * HOUR else SMALL_SPACE)
    method = request.method or "drnas"
    # A tenth of the images at most: an epoch has ten steps or more.
    batch = max(MIN_BATCH, min(96 if is_gpu else 64, inspection.num_train // 10))
    side = inspection.sides[1]
    shape, sizes = (inspection.channels, side, side), _sizes(name, request)
    made = Choice(name, method, None, shape, batch, *sizes, num_train=inspection.num_train)
    if not is_resizable:
        return made
    kept = max((size for size in SIZES if size <= min(side, KEPT_SIZE)), default=side)
    return resized(made, request.image_size or kept)


def _sizes(name: str, request: RunRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of supernet and network, over the space's settings for a laptop."""
    space = SPACES.get(name)
    search_space, network = dict(space.small), {**space.small, **space.evaluation.get("small", {})}
    if name == SMALL_SPACE:
        # Without `none` every path carries signal, so a short search cannot end in a network without inputs.
        candidates = [op for op in build_space(name).candidates if op != "none"]  # type: ignore[attr-defined]
        search_space["candidates"] = network["candidates"] = candidates
    elif name == LARGE_SPACE and request.time > 2 * HOUR:
        search_space |= {"cells": 6, "channels": 16}
        network |= {"cells": 8, "channels": 24}
    return search_space, network


def resized(choice: Choice, size: int) -> Choice:
    """The choice for images of `size` pixels."""
    return replace(choice, image_size=size, shape=(choice.shape[0], size, size))


def best_size(choice: Choice, median: int, epochs: float) -> int:
    """The image size for the time, if the chosen one leaves time for `epochs`; images are never enlarged.

    Images of up to `KEPT_SIZE` pixels are only made smaller if fewer than `FEW_EPOCHS` would be left, and larger ones
    are only used if `GOOD_EPOCHS` are. Time grows with the number of pixels.
    """
    side = choice.shape[1]
    fitting = [
        size
        for size in SIZES
        if size <= median
        and epochs * (side / size) ** 2 >= (FEW_EPOCHS if size <= min(median, KEPT_SIZE) else GOOD_EPOCHS)
    ]
    return max(fitting, default=min(median, SIZES[0]))


def explained(choice: Choice, inspection: Inspection, request: RunRequest) -> Choice:
    """The choice with its reasons."""
    pixels = "x".join(map(str, choice.shape[1:]))
    limits = [
        f"{text} {what}"
        for text, what in ((request.max_params, "parameters"), (request.max_flops, "multiply-adds"))
        if text
    ]
    budget = f" with at most {' and '.join(limits)}" if limits else ""
    why = (
        "as requested" if request.space else "little time" if choice.space == SMALL_SPACE else "a GPU and several hours"
    )
    first = f"networks{budget} for {pixels} images, cells of space {choice.space} ({why})"
    source = inspection.sides[1]
    if choice.shape[1] != source:
        first += f"; images are resized from a median of {source}"
    reason = {
        "drnas": "in NAS-Bench-201 on CIFAR-10 it found cells with 94.36%, SNAS with 93.76%, DARTS with 54.30% "
        "(4, 6 and 4 seeds)",
    }.get(choice.method, "as requested")
    return replace(choice, why=(first, f"method {choice.method}, batch {choice.batch_size}: {reason}"))


def held_out_share(num_train: int) -> float:
    """Share of the training images that the competition measures on: a tenth, or more of a small dataset."""
    return min(0.25, max(0.1, 1000 / num_train))


def search_recipe(plan: Plan, choice: Choice, epochs: int) -> SearchRecipe:
    """The small recipe of the chosen method, which ends where it collapses to skip connections.

    It ignores the budget: networks of any cell are sized to meet it.
    """
    request = plan.request
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
            # A collapsing search ends, and training gets the rest of its time. A single collapsed epoch may be chance.
            "collapse": {"stop": True, "patience": 2},
            "seed": request.seed,
            "device": request.device,
            "threads": choice.threads,
            "space_settings": choice.search_space,
        }
    )


def train_recipe(
    plan: Plan,
    choice: Choice,
    genotype: Genotype,
    settings: Mapping[str, Any],
    *,
    epochs: int,
    expected: float = 0.0,
    time: float = 0.0,
    holdout: float = 0.0,
    seed: int = 0,
    is_tested: bool = False,
) -> TrainRecipe:
    """The recipe of a training run: the same for all networks and rounds, except for the length and what depends on it.

    expected: the expected number of epochs.
    """
    request = plan.request
    return resolve_training(
        genotype,
        {
            "recipe": "fast",
            "data": str(plan.data),
            "data_root": None if request.is_folder() else request.data_root,
            "image_size": choice.image_size,
            "space_settings": dict(settings),
            "epochs": epochs,
            "time": time,
            "cutout": cutout_side(expected, choice.num_train, choice.shape[1]),
            "holdout": holdout,
            "test": is_tested,
            "seed": request.seed + seed,
            "device": request.device,
            "threads": choice.threads,
        },
    )


def plain_sizes(
    networks: list[tuple[dict[str, Any], Cost]], epochs_of: Callable[[Cost], float], num_train: int
) -> tuple[Candidate, ...]:
    """Up to `NUM_SIZES` plain networks, largest first; the others are for less time than expected.

    epochs_of: how many epochs of a network the final training has time for. The largest is the one with the most
    multiply-adds for which these are enough (`enough_epochs`), or the smallest of all; with fewer than `MIN_EPOCHS`
    there is none. Each of the others has about half the multiply-adds of the one before and is shallower, down to one
    cell per stage. Of networks with about equal multiply-adds the shallowest is taken (`CLOSE`).
    """

    def has_enough(settings: dict[str, Any], cost: Cost) -> bool:
        return epochs_of(cost) >= enough_epochs(settings["cells_per_stage"], num_train)

    def first(fitting: list[tuple[dict[str, Any], Cost]]) -> list[tuple[dict[str, Any], Cost]]:
        close = [each for each in fitting if each[1].multiply_adds >= CLOSE * fitting[0][1].multiply_adds]
        return sorted(close, key=lambda each: each[0]["cells_per_stage"])[:1]

    chosen = first([each for each in networks if has_enough(*each)]) or networks[-1:]
    if epochs_of(chosen[0][1]) < MIN_EPOCHS:
        return ()
    while len(chosen) < NUM_SIZES:
        settings, cost = chosen[-1]
        depth = max(1, settings["cells_per_stage"] - 1)
        most = SMALLER * cost.multiply_adds
        smaller = first([(s, c) for s, c in networks if c.multiply_adds <= most and s["cells_per_stage"] <= depth])
        if not smaller:
            break
        chosen += smaller
    longest = epochs_of(chosen[0][1])
    return tuple(
        Candidate(
            f"plain-{number}",
            "plain",
            plain_cell().to_dict(),
            settings,
            cost.parameters,
            cost.multiply_adds,
            length=longest / epochs_of(cost),
        )
        for number, (settings, cost) in enumerate(chosen, 1)
    )


def expected_start(measured: JobTime, *, is_gpu: bool) -> float:
    """Seconds before the first step of a training run, after a first one was measured.

    The first one also reads the data, initialises the device, compiles kernels and chooses the number of threads.
    """
    return min(measured.startup, MAX_START_GPU if is_gpu else MAX_START)


class Chooser:
    """Chooses image size and networks for a run from measured steps."""

    def __init__(self, plan: Plan, screen: Screen, time: RunTime) -> None:
        self.plan, self.screen, self.request, self.time = plan, screen, plan.request, time
        self.device, self.is_folder = resolve_device(plan.request.device), plan.request.is_folder()

    def choose(self, inspection: Inspection) -> Choice:
        """The choice, with its reasons."""
        plan = self.plan
        is_gpu, classes, limits = self.device.type == "cuda", len(inspection.train), self.request.limits()
        choice = first_choice(inspection, self.request, is_gpu=is_gpu, is_resizable=self.is_folder)
        may_resize = self.is_folder and self.request.image_size is None
        tried: list[int] = []
        measuring = MEASURING_CPU * self.time.slowness
        if plan.used() + measuring > self.time.end:  # rejected now rather than when time is up
            raise TooLittleTimeError(self._too_short_to_measure(measuring))
        while True:
            networks = plain_networks(choice.shape, classes, limits)
            shallow = [each for each in networks if each[0]["cells_per_stage"] == 1]
            settings, cost = next((each for each in shallow if each[0]["channels"] <= REFERENCE), shallow[-1])
            side = choice.shape[1]
            with self.screen.working(f"timing training steps at {side}x{choice.shape[2]}"):
                measured, threads = self._measure_training(choice, settings)
            tried.append(side)
            final = min(self.time.share * self.request.time, self.time.end - plan.used())
            better = best_size(choice, inspection.sides[1], measured.epochs_in(final)) if may_resize else side
            # On a busy machine each measurement takes a long time.
            is_hurried = plan.used() > HURRIED * self.request.time
            # Forecasts from two sizes may each point at the other, so no size is measured again.
            if better in tried or len(tried) == MAX_TRIED or (is_hurried and better > side):
                break
            choice = resized(choice, better)
            if is_hurried:
                networks = plain_networks(choice.shape, classes, limits)
                before, cost = cost, next(each for own, each in networks if own == settings)
                measured = replace(measured, epoch=epoch_seconds(measured.epoch, before, cost, is_gpu=is_gpu))
                break

        def seconds(other: Cost) -> float:
            return epoch_seconds(measured.epoch, cost, other, is_gpu=is_gpu)

        if MIN_EPOCHS * seconds(networks[-1][1]) > final:  # if need be, the training gets all that is left
            final = self.time.end - plan.used()
        plain = plain_sizes(networks, lambda other: final / seconds(other), inspection.num_train)
        if not plain:
            raise TooLittleTimeError(self._too_short(replace(measured, epoch=seconds(networks[-1][1])), final))
        largest = plain[0]
        epoch = seconds(Cost(largest.parameters, largest.multiply_adds))
        network = dict(choice.network)
        if "channels" in network:
            network["channels"] = MAX_WIDENED * largest.settings["channels"]
        if "cells_per_stage" in network:
            network["cells_per_stage"] = largest.settings["cells_per_stage"]
        start = expected_start(measured, is_gpu=is_gpu)
        choice = replace(choice, threads=threads, plain=plain, epoch=epoch, start=start, final=final, network=network)
        return explained(choice, inspection, self.request)

    def _too_short(self, least: JobTime, final: float) -> str:
        """Why the time is too short, and how much is needed."""
        used, reserved, needed = self.plan.used(), self.time.reserved(), least.total(MIN_EPOCHS)
        text = _at_least(1.1 * (used + reserved + needed) / SAFE)
        return (
            f"--time {self.request.time:.0f}s is too short: starting and measuring took {used:.0f} s, report and "
            f"exports need about {reserved:.0f} s, and {MIN_EPOCHS} epochs of the smallest plain network take "
            f"{needed:.1f} s here, but only {max(0.0, final):.1f} s are left; use at least --time {text}"
        )

    def _too_short_to_measure(self, measuring: float) -> str:
        used, reserved = self.plan.used(), self.time.reserved()
        text = _at_least(2 * (used + reserved + measuring))
        busy = ": other programs use the CPU cores" if self.time.slowness > BUSY else ""
        return (
            f"--time {self.request.time:.0f}s is too short: starting took {used:.0f} s, timing training steps needs "
            f"about {measuring:.0f} s more, and report and exports need about {reserved:.0f} s{busy}; use at least "
            f"--time {text}"
        )

    def _measure_training(self, choice: Choice, settings: dict[str, Any]) -> tuple[JobTime, int]:
        """The times of a training run, and its number of CPU threads: those requested, or one or all cores.

        A training run with a time limit measures which is faster. On a busy machine this takes long, and the answer is
        known.
        """
        is_busy = self.time.slowness > BUSY
        choice = replace(choice, threads=self.request.threads or (1 if is_busy else 0))
        recipe = train_recipe(self.plan, choice, plain_cell(), settings, epochs=0, time=self.request.time)
        used = choice.threads

        def job(folder: Path, watch: OnEvent) -> TrainResult:
            def on_event(event: Event) -> None:
                nonlocal used
                # The training run chooses the number itself, but the measurement ends before it has a result.
                used = torch.get_num_threads()
                watch(event)

            return jobs.train(plain_cell(), recipe, folder, on_event=on_event)

        scratch, seconds = self.plan.folder / "measuring", measuring_seconds(self.request)
        measured = measure_job(job, scratch, seconds, evaluated=0.0, tested=0.0)
        return measured, used if self.device.type == "cpu" else choice.threads


def measuring_seconds(request: RunRequest) -> float:
    """Seconds for measuring one job, after its first step."""
    low, high = MEASURING_BOUNDS
    return min(high, max(low, MEASURING * request.time))


def _at_least(seconds: float) -> str:
    """A time that can be given as --time, not below `seconds`."""
    return f"{math.ceil(seconds / 60)}m" if seconds > 120 else f"{math.ceil(seconds / 10) * 10}s"
