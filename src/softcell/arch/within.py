"""The strongest architecture within a budget, where strengths and costs of choices add up.

One candidate is chosen per choice, as in a chain of layers. That is a multiple-choice knapsack: choice by choice the
architectures so far are kept that no other beats in both strength and cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from softcell.errors import UserError


def strongest_within(
    strengths: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], limit: float
) -> tuple[int, ...]:
    """One candidate per choice, of the largest sum of strengths whose sum of costs is at most `limit`.

    strengths, costs: per choice one number per candidate. In a tie the cheaper one; `UserError` where none fits.
    """
    left = [0.0]  # what the choices from here on cost at least
    for row in reversed(costs):
        left.append(left[-1] + min(row))
    left.reverse()
    kept: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]  # cost, strength, candidates
    for i, (values, prices) in enumerate(zip(strengths, costs, strict=True)):
        grown = sorted(
            (
                (cost + price, -(strength + value), (*chosen, k))
                for cost, strength, chosen in kept
                for k, (value, price) in enumerate(zip(values, prices, strict=True))
                if cost + price + left[i + 1] <= limit
            ),
        )
        kept, best = [], float("inf")
        for cost, loss, chosen in grown:  # from cheap to dear: a dearer one must be stronger than all before it
            if loss < best:
                best = loss
                kept.append((cost, -loss, chosen))
    if not kept:
        raise UserError(f"no architecture costs at most {limit:g}; the cheapest costs {left[0]:g}")
    return kept[-1][2]
