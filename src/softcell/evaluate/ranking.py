"""Indicators of importance against accuracies of NAS-Bench-201, and the zero-cost indicators among them.

`taus`: Kendall's tau per edge (IT-NAS, A.7, Figures 6-8). Two rankings of accuracy, both of fully trained networks:
`best`, the best network that has the operation on the edge (Eq 9), and `derived`, the derived network with the
operation put there. Figure 3 uses a third, the accuracy of the supernet once an edge keeps one operation: that is
`discretisation` in `softcell.search.indicators`.

`zero_cost`: Zero-Cost-PT (Xiang et al., 2021, arXiv:2106.06799). The score of an untrained supernet without one
operation, whose weight the others of its edge share. The lower that score, the more the operation matters, so the
indicator is its negative. The scores are those of `softcell.nn.zero_cost`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from softcell.arch import Genotype, WeightMix
from softcell.errors import UserError
from softcell.evaluate.nb201 import EDGES, OPERATIONS, Nb201Table
from softcell.nn.zero_cost import PROXIES, Proxy, naswot, synflow
from softcell.settings import is_seed
from softcell.spaces import Space, Supernet

__all__ = ["PROXIES", "RANKINGS", "Proxy", "Ranking", "kendall", "mean_tau", "score_supernet", "taus", "zero_cost"]

Ranking = Literal["best", "derived"]
RANKINGS: tuple[Ranking, ...] = ("best", "derived")


def kendall(indicator: Sequence[float], accuracy: Sequence[float]) -> float:
    """Kendall's tau-b of two lists; NaN where all entries of one are equal, or one entry is NaN."""
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
    """The mean over the edges whose tau is not NaN."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def score_supernet(proxy: Proxy, supernet: Supernet, mix: WeightMix, images: Tensor) -> float:
    """NASWOT: log |det K| over the images [n, c, h, w]. SynFlow: Σ θ · ∂R/∂θ, for which the supernet must hold |θ|.

    SynFlow reads only the shape of the images.
    """
    if proxy == "naswot":
        return naswot(lambda x: supernet(x, mix), images)
    return synflow(lambda x: supernet(x, mix), supernet.parameters(), images)


def zero_cost(space: Space, proxy: Proxy, images: Tensor, num_classes: int, seed: int = 0) -> dict[str, Tensor]:
    """Per table the importance of each operation [choices, width], padding 0, in a supernet of random weights.

    images: [n, c, h, w], normalised as for training.
    """
    is_seed("seed", seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        supernet = space.supernet((images.shape[1], images.shape[2], images.shape[3]), num_classes).double()
    images = images.double()
    supernet.train(proxy == "naswot")  # SynFlow's batch of ones has no useful statistics
    if proxy == "synflow":
        for parameter in supernet.parameters():
            parameter.data.abs_()
    layout = supernet.layout
    uniform = {t.name: t.mask().double() / t.mask().sum(1, keepdim=True) for t in layout.tables}
    found = {}
    for table in layout.tables:
        rows = torch.zeros(table.shape, dtype=torch.float64)
        for i, choice in enumerate(table.choices):
            for k in range(len(choice.candidates)):
                without = uniform[table.name].clone()
                without[i, k] = 0.0
                without[i] /= without[i].sum().clamp(min=1e-12)
                mix = WeightMix(layout, {**uniform, table.name: without})
                rows[i, k] = -score_supernet(proxy, supernet, mix, images)
        found[table.name] = rows
    return found
