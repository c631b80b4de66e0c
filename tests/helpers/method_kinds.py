"""One method of each kind by default, and all of them with `make exhaustive`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

ALIKE = frozenset({"beta-darts", "darts-minus", "edge-normalised", "entrannas", "fullattention", "nos"})
"""In a space of single operations these relax, step and derive as another method does: EnTranNAS as its DST variant,
edge normalisation as PC-DARTS, the others as DARTS. What is their own has tests in `tests/methods`."""


def one_of_each_kind(names: Iterable[str]) -> list[Any]:
    """Parameters of a test that does the same with every method."""
    return [pytest.param(name, marks=[pytest.mark.exhaustive] if name in ALIKE else []) for name in names]
