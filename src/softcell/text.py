"""Formats counts and durations for messages, and lets objects display themselves in a notebook."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from softcell.errors import UserError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
VIEWS: dict[type, Callable[[Any], str]] = {}
"""Type -> function to HTML. The shell fills it, because the core cannot draw; `import softcell.api` is enough."""


class Shown:
    """Base class of objects that a notebook displays as a picture or table, once the shell is imported."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        view = VIEWS.get(type(self))
        return None if view is None else view(self)  # None: the notebook shows the `repr`


def count_of(number: int, noun: str) -> str:
    """`1 class`, `2 classes`, `1,000 images`, `0 entries`."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def percent(share: float) -> str:
    """`93.4%` from 0.934; `100%` only if nothing is missing."""
    return "100%" if share == 1.0 else f"{share * 100:.1f}%"


def clock(seconds: float) -> str:
    """`0:07`, `12:30`, `3:02:10`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def parse_time(text: str) -> float:
    """`30m`, `1h30m` or `90s` as seconds.

    Example:
        >>> from softcell.app.pipeline import parse_time
        >>> parse_time("1h30m")
        5400.0
    """
    found = re.fullmatch(r"\s*(?:([0-9.]+)h)?\s*(?:([0-9.]+)m)?\s*(?:([0-9.]+)s)?\s*", text)
    try:
        seconds = (
            sum(float(part) * _UNITS[unit] for part, unit in zip(found.groups(), "hms", strict=True) if part)
            if found
            else 0.0
        )
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UserError(f"--time must be a duration such as 30m, 90s or 1h30m, got {text!r}")
    return seconds
