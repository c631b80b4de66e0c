"""Zero-cost indicators: what an untrained supernet loses when one operation is taken from one edge (Zero-Cost-PT).

Xiang et al.: Zero-Cost Proxies Meet Differentiable Architecture Search, 2021 (arXiv:2106.06799). A score is taken of
the supernet without the operation, the others of its edge sharing its weight; the lower that score, the more the
operation matters, so the indicator is its negative. Two scores:

    NASWOT    log |det K|, K_ij = how many ReLUs treat images i and j alike (Mellor et al., ICML 2021)
    SynFlow   Σ θ · ∂R/∂θ, R = Σ logits of the network of |θ| for an image of ones (Tanaka et al., NeurIPS 2020)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from softcell.arch import WeightMix
from softcell.settings import is_seed
from softcell.spaces import Space, Supernet

Proxy = Literal["naswot", "synflow"]
PROXIES: tuple[Proxy, ...] = ("naswot", "synflow")


class _Codes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums over every ReLU that runs how alike it treats each pair of images: K [n, n]."""

    def __init__(self, images: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernel = torch.zeros(images, images, dtype=torch.float64)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.relu.default, torch.ops.aten.hardtanh.default):
            code = (output > 0).flatten(1).to(torch.float64)
            self.kernel += (code @ code.T + (1 - code) @ (1 - code).T).cpu()
        return output


@torch.no_grad()
def naswot(supernet: Supernet, mix: WeightMix, images: Tensor) -> float:
    """log |det K| over a batch of images [n, c, h, w]."""
    codes = _Codes(images.shape[0])
    with codes:
        supernet(images, mix)
    return float(torch.linalg.slogdet(codes.kernel).logabsdet)


def synflow(supernet: Supernet, mix: WeightMix, images: Tensor) -> float:
    """Σ θ · ∂R/∂θ; of the images only the shape matters. The supernet must hold |θ| (see `indicator`)."""
    ones = torch.ones_like(images[:1])
    parameters = [p for p in supernet.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(supernet(ones, mix).sum(), parameters, allow_unused=True)
    terms = [(p.detach() * g).sum() for p, g in zip(parameters, gradients, strict=True) if g is not None]
    return float(torch.stack(terms).sum())


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
