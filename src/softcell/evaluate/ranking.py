"""How well an indicator of importance ranks operations: Kendall's tau per edge against accuracies of NAS-Bench-201.

IT-NAS, A.7 (Figures 6-8). Two rankings of accuracy, both of fully trained networks: `best`, the best one that has the
operation on the edge (Eq 9), and `derived`, the derived one with the operation put there. Figure 3 ranks by another,
the accuracy of the supernet once an edge keeps one operation: that is `discretisation` in `softcell.search.indicators`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from softcell.arch import Genotype
from softcell.errors import UserError
from softcell.evaluate.nb201 import EDGES, OPERATIONS, Nb201Table

Ranking = Literal["best", "derived"]
RANKINGS: tuple[Ranking, ...] = ("best", "derived")


def kendall(indicator: Sequence[float], accuracy: Sequence[float]) -> float:
    """Kendall's tau-b of two lists; NaN where one of them does not tell its entries apart, or one is NaN."""
    from scipy.stats import kendalltau

    if any(math.isnan(value) for value in (*indicator, *accuracy)):
        return math.nan
    return float(kendalltau(indicator, accuracy).statistic)


def taus(
    table: Nb201Table, indicator: Sequence[Sequence[float]], genotype: Genotype, column: str
) -> dict[Ranking, list[float]]:
    """Tau-b for each of the six edges; indicator [6][5] in the order of `EDGES` and `OPERATIONS`."""
    if len(indicator) != len(EDGES) or any(len(row) != len(OPERATIONS) for row in indicator):
        raise UserError(
            f"an indicator for NAS-Bench-201 has {len(EDGES)} edges with {len(OPERATIONS)} operations, got "
            f"{[len(row) for row in indicator]}"
        )
    accuracies: Mapping[Ranking, list[list[float]]] = {
        "best": table.best_accuracy(column),
        "derived": table.with_each(genotype, column),
    }
    return {
        name: [kendall(own, row) for own, row in zip(indicator, rows, strict=True)] for name, rows in accuracies.items()
    }


def mean_tau(values: Sequence[float]) -> float:
    """The mean over edges that have one."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
