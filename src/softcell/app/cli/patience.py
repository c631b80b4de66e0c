"""Whoever waits in a terminal is told after two seconds that work goes on, also by commands that have no progress."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 2.0
_showing = [0]  # how many displays show progress of their own


@contextmanager
def showing() -> Iterator[None]:
    """Within this context progress is shown by someone else."""
    _showing[0] += 1
    try:
        yield
    finally:
        _showing[0] -= 1


@contextmanager
def patience(what: str) -> Iterator[None]:
    """Says once on standard error, if that is a terminal, that `what` is still at work."""

    def say() -> None:
        if not _showing[0]:
            print(f"{what} is at work; Ctrl-C stops it", file=sys.stderr)

    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
