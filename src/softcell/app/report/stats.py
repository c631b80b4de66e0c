"""The statistics of a comparison: mean and spread of a group, Welch's t-test of two, Holm's correction of many."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.05


@dataclass(frozen=True, slots=True)
class Summary:
    """`std` is the sample standard deviation, `interval` the 95 % t-interval of the mean; None for n < 2."""

    n: int
    mean: float
    std: float | None
    interval: tuple[float, float] | None


def summarise(values: Sequence[float]) -> Summary:
    """The summary of at least one value."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Summary(n, mean, None, None)
    std = statistics.stdev(values)
    half = _quantile(n - 1) * std / math.sqrt(n)
    return Summary(n, mean, std, (mean - half, mean + half))


@dataclass(frozen=True, slots=True)
class Welch:
    """Difference of two means (first minus second), its 95 % interval and the two-sided p-value."""

    difference: float
    interval: tuple[float, float]
    p: float


def welch(first: Sequence[float], second: Sequence[float]) -> Welch | None:
    """Welch's test (1947), which allows different variances; None where it does not apply.

    It needs at least two values on each side, and some variance on one.
    """
    if min(len(first), len(second)) < 2:
        return None
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    error = math.sqrt(sum(parts))
    difference = statistics.fmean(first) - statistics.fmean(second)
    # Rounding leaves the variance of equal numbers just above 0.
    if error <= 1e-12 * max(1.0, *map(abs, first), *map(abs, second)):
        return None
    # Welch and Satterthwaite's degrees of freedom
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True)
    )
    from scipy.special import stdtr

    half = _quantile(freedom) * error
    p = min(1.0, 2.0 * float(stdtr(freedom, -abs(difference) / error)))
    return Welch(difference, (difference - half, difference + half), p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (1979): adjusted p-values that keep the chance of any false claim below the level."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def _quantile(freedom: float) -> float:
    """The 97.5 % point of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1.0 - LEVEL / 2))
