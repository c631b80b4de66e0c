"""Ends a search that takes longer than was planned, and keeps what it has learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from softcell.app.pipeline.inspect import counted
from softcell.engine.task import EpochEnded, Event, OnEvent
from softcell.methods import METHODS, Method, UntrainedSampler
from softcell.search import SearchRecipe
from softcell.settings import build
from softcell.spaces import build_space

SAMPLES = "samples"
"""The setting of a sampler that says how many architectures it proposes."""


class TimeIsUpError(Exception):
    """A search has used its time and more; `epochs` of it are done and saved."""

    def __init__(self, epochs: int) -> None:
        super().__init__(epochs)
        self.epochs = epochs


def num_networks(recipe: SearchRecipe) -> int:
    """How many networks a search trains one after the other, each for the recipe's epochs; a supernet is one."""
    kind = METHODS.get(recipe.method)
    if issubclass(kind, Method):
        return 1
    layout = build_space(recipe.space, recipe.space_settings).layout()
    settings: Any = build(kind.Settings, recipe.method_settings, f"method {recipe.method}")
    return kind(layout, settings, recipe.seed).num_samples


def extent(recipe: SearchRecipe) -> str:
    """`30 epochs`, or `4 architectures of 30 epochs`."""
    epochs = counted(recipe.epochs, "epoch")
    kind = METHODS.get(recipe.method)
    if issubclass(kind, Method):
        return epochs
    if issubclass(kind, UntrainedSampler):
        return counted(num_networks(recipe), "untrained network")
    return f"{counted(num_networks(recipe), 'architecture')} of {epochs}"


def ending(shown: OnEvent, is_late: Callable[[], bool], recipe: SearchRecipe) -> OnEvent:
    """Passes events on; ends a search that is late after the epoch it is in, which is saved by then."""
    num_epochs = recipe.epochs * num_networks(recipe)

    def event(happened: Event) -> None:
        shown(happened)
        if isinstance(happened, EpochEnded) and happened.epoch + 1 < num_epochs and is_late():
            done = happened.epoch + 1
            if shortened(recipe, done) != recipe:
                raise TimeIsUpError(done)

    return event


def shortened(recipe: SearchRecipe, done: int) -> SearchRecipe:
    """The recipe of a search that ends as soon as it can after `done` epochs, those of all its networks counted."""
    if issubclass(METHODS.get(recipe.method), Method):
        return replace(recipe, epochs=done)
    if SAMPLES not in recipe.method_settings:
        return recipe  # a sampler of somebody's own, which cannot be told to propose fewer
    complete = done // recipe.epochs
    settings = {**recipe.method_settings, SAMPLES: max(1, complete)}
    # A network is measured after its last epoch: the first one needs another epoch to be that.
    epochs = recipe.epochs if complete else min(recipe.epochs, done + 1)
    return replace(recipe, epochs=epochs, method_settings=settings)
