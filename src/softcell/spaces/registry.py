"""The spaces by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import softcell.nn.attention_blocks
import softcell.nn.calibrate
import softcell.nn.conv
import softcell.nn.mbconv
import softcell.nn.noise
import softcell.nn.pool  # noqa: F401  (registers its candidates)
from softcell.registry import Registry
from softcell.settings import build
from softcell.spaces.base import Space

SPACES: Registry[Space] = Registry("space", "softcell.spaces")
register_space = SPACES.add


def build_space(name: str, settings: Mapping[str, Any] | None = None) -> Space:
    """The space `name` with the given settings; anything not given keeps the paper's value."""
    return build(SPACES.get(name), settings or {}, where=f"space {name}")
