"""Spaces by name, and the sizes at which their networks are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import softcell.nn.attention
import softcell.nn.calibrate
import softcell.nn.conv
import softcell.nn.stochastic  # noqa: F401  (registers its candidates)
from softcell.registry import Registry
from softcell.settings import at_most, build, merge
from softcell.spaces.base import Space

MOST_OF_ANY = 2**20
MOST = {"nodes": 100, "cells": 1000, "cells_per_stage": 1000, "layers": 1000, "blocks": 1000}
"""Largest values of settings by name: larger networks take hours to build and are mistakes."""
SPACES: Registry[Space] = Registry("space", "softcell.spaces")
register_space = SPACES.add


def build_space(name: str, settings: Mapping[str, Any] | None = None) -> Space:
    """The space `name` with the given settings; anything not given keeps the paper's value.

    Example:
        >>> from softcell.spaces import build_space
        >>> space = build_space("darts", {"cells": 8, "channels": 16})
        >>> space.cells, space.nodes
        (8, 4)
    """
    found = build(SPACES.get(name), settings or {}, where=f"space {name}")
    for setting in fields(found):  # type: ignore[arg-type]
        value = getattr(found, setting.name)
        if type(value) is int:
            at_most(f"space.{setting.name}", value, MOST.get(setting.name, MOST_OF_ANY))
    return found


def evaluation_scale(data: str) -> str:
    """The name of the training recipe, and of the sizes in `Space.evaluation`, that suit a dataset."""
    if data == "digits":
        return "small"
    return "imagenet" if data in ("imagenet", "cub200", "cub200-boxes") else "cifar"


def evaluation_space(name: str, data: str, settings: Mapping[str, Any] | None = None) -> Space:
    """The space at the size of its evaluation networks on `data`; `settings` override single values."""
    return build_space(name, merge(evaluation_sizes(SPACES.get(name), data), settings or {}))


def trained_space(
    name: str, data: str, searched: Mapping[str, Any], settings: Mapping[str, Any] | None = None
) -> Space:
    """`evaluation_space` with all settings of a search's space but sizes: nodes, candidates, form of the network.

    searched: settings of the search's space; data: a dataset, or the name of a training recipe.
    """
    kind = SPACES.get(name)
    left = kind.sizes() | kind.search_only
    kept = {key: value for key, value in searched.items() if key not in left}
    return build_space(name, merge(kept, evaluation_sizes(kind, data), settings or {}))


def evaluation_sizes(space: type[Space], data: str, recipe: str | None = None) -> Mapping[str, Any]:
    """Those of `Space.evaluation` for a dataset: under its own name, else those of the recipe that suits it.

    recipe: a requested one takes precedence.
    """
    own: Mapping[str, Any] = space.evaluation.get(evaluation_scale(data), {})
    return space.evaluation.get(data, own) if recipe is None else space.evaluation.get(recipe, {})
