"""Zero-cost indicators: what an untrained supernet loses when one operation is taken from one edge (Zero-Cost-PT).

Xiang et al.: Zero-Cost Proxies Meet Differentiable Architecture Search, 2021 (arXiv:2106.06799). A score is taken of
the supernet without the operation, the others of its edge sharing its weight; the lower that score, the more the
operation matters, so the indicator is its negative. The scores are those of `softcell.nn.untrained`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from softcell.arch import WeightMix
from softcell.nn import untrained
from softcell.nn.untrained import PROXIES, Proxy
from softcell.settings import is_seed
from softcell.spaces import Space, Supernet


def naswot(supernet: Supernet, mix: WeightMix, images: Tensor) -> float:
    """log |det K| over a batch of images [n, c, h, w]."""
    return untrained.naswot(lambda x: supernet(x, mix), images)


def synflow(supernet: Supernet, mix: WeightMix, images: Tensor) -> float:
    """Σ θ · ∂R/∂θ; of the images only the shape matters. The supernet must hold |θ| (see `indicator`)."""
    return untrained.synflow(lambda x: supernet(x, mix), supernet.parameters(), images)


__all__ = ["PROXIES", "Proxy", "indicator", "naswot", "synflow"]

_SCORES: dict[Proxy, Callable[[Supernet, WeightMix, Tensor], float]] = {"naswot": naswot, "synflow": synflow}


def indicator(space: Space, proxy: Proxy, images: Tensor, num_classes: int, seed: int = 0) -> dict[str, Tensor]:
    """Per table the importance of each operation [choices, width], padding 0, on a supernet of fresh weights.

    images: [n, c, h, w], normalised as for training.
    """
    is_seed("seed", seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        supernet = space.supernet((images.shape[1], images.shape[2], images.shape[3]), num_classes).double()
    images = images.double()
    supernet.train(proxy == "naswot")  # SynFlow wants no statistics of a batch of ones
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
                rows[i, k] = -_SCORES[proxy](supernet, mix, images)
        found[table.name] = rows
    return found
