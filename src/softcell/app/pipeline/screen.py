"""What a run tells people, and how long things take in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from softcell.engine.task import Event, Note, OnEvent


class Screen(Protocol):
    """Whoever shows a run."""

    def say(self, *lines: str) -> None:
        """Lines for people."""

    def working(self, what: str) -> AbstractContextManager[Callable[[int, int, str], None]]:
        """A stretch without events of its own; gives a function of (done, of all, what)."""

    def job(self, heading: str) -> AbstractContextManager[OnEvent]:
        """A search or training."""


_KEEPING = re.compile(r"[;.] [^;.]*--keep best[^;.]*(?=\.)")


def without_foreign_options(event: Event) -> Event:
    """The event without what its words say of `--keep best`: an option of `softcell search` that a run has not."""
    return replace(event, text=_KEEPING.sub("", event.text)) if isinstance(event, Note) else event


def clock(seconds: float) -> str:
    """`0:07`, `12:30`, `3:02:10`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
