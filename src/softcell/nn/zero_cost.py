"""Zero-cost proxies, scores of untrained networks: NASWOT and SynFlow.

NASWOT    log |det K|, K_ij = how many ReLUs treat images i and j alike (Mellor et al., ICML 2021, arXiv:2006.04647)
SynFlow   Σ θ · ∂R/∂θ, R = Σ logits of the network of |θ| for an image of ones (Tanaka et al., NeurIPS 2020,
          arXiv:2006.05467; as a score of networks: Abdelfattah et al., ICLR 2021, arXiv:2101.08134)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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
def naswot(forward: Callable[[Tensor], Any], images: Tensor) -> float:
    """log |det K| over a batch of images [n, c, h, w]; -inf where two images are alike to every ReLU."""
    codes = _Codes(images.shape[0])
    with codes:
        forward(images)
    return float(torch.linalg.slogdet(codes.kernel).logabsdet)


def synflow(forward: Callable[[Tensor], Tensor], parameters: Iterable[nn.Parameter], images: Tensor) -> float:
    """Σ θ · ∂R/∂θ; of the images [n, c, h, w] only the shape matters. The parameters must be |θ|."""
    ones = torch.ones_like(images[:1])
    learned = [p for p in parameters if p.requires_grad]
    gradients = torch.autograd.grad(forward(ones).sum(), learned, allow_unused=True)
    terms = [(p.detach() * g).sum() for p, g in zip(learned, gradients, strict=True) if g is not None]
    return float(torch.stack(terms).sum())


def score_untrained(network: nn.Module, proxy: Proxy, images: Tensor) -> float:
    """The score of an untrained network, larger is better; its weights are changed.

    images: [n, c, h, w], normalised as for training, on the network's device. SynFlow runs in float64: its products
    over all layers leave float32's range.
    """
    if proxy == "naswot":
        return naswot(network.train(), images)
    network = network.double().eval()  # SynFlow must not normalise by a batch of ones
    for parameter in network.parameters():
        parameter.data.abs_()
    return synflow(network, network.parameters(), images.double())
