"""The spaces by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import softcell.nn.attention
import softcell.nn.calibrate
import softcell.nn.conv
import softcell.nn.mbconv
import softcell.nn.pool
import softcell.nn.stochastic  # noqa: F401  (registers its candidates)
from softcell.registry import Registry
from softcell.settings import at_most, build
from softcell.spaces.base import Space

MOST_OF_ANY = 2**20
MOST = {"nodes": 100, "cells": 1000, "cells_per_stage": 1000, "layers": 1000, "blocks": 1000}
"""Largest values of settings by name: networks beyond them take hours to build, and are mistakes."""
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
