"""Temperatures that fall over a search, for every method that has one."""

from __future__ import annotations

from typing import Literal

Schedule = Literal["linear", "exponential", "constant"]


def temperature_at(progress: float, first: float, last: float, schedule: Schedule) -> float:
    """The temperature λ at `progress` 0..1; `constant` stays at `first`."""
    match schedule:
        case "linear":
            return first + (last - first) * progress
        case "exponential":
            return float(first * (last / first) ** progress)
        case "constant":
            return first
