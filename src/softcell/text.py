"""Counts and durations in the words of a message."""

from __future__ import annotations


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
