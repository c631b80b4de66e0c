"""Proxy-NCA: images of a class are drawn to the class's proxy and away from all others.

Movshovitz-Attias et al.: No Fuss Distance Metric Learning using Proxies, ICCV 2017. With embeddings x and proxies p,
all brought to length 1, and squared distances d, Eq 6:

    L(x, y) = -log( exp(-d(x, p_y)) / Σ_{z ≠ y} exp(-d(x, p_z)) )

The right class is not in the denominator, so the loss may fall below zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.errors import UserError


class ProxyNCA(nn.Module):
    """Embeddings [n, d] and labels [n] to the mean loss []; owns one proxy [d] per class."""

    def __init__(self, num_classes: int, embedding: int) -> None:
        super().__init__()
        if num_classes < 2:
            raise UserError(f"Proxy-NCA needs at least 2 classes to tell apart, but got {num_classes}")
        self.proxies = nn.Parameter(torch.randn(num_classes, embedding))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        exact = torch.promote_types(embeddings.dtype, torch.float32)
        x, proxies = F.normalize(embeddings.to(exact), dim=1), F.normalize(self.proxies.to(exact), dim=1)
        near = 2.0 * (x @ proxies.T) - 2.0  # -d(x, p) of vectors of length 1
        own = F.one_hot(labels, proxies.shape[0]).bool()
        others = near.masked_fill(own, -torch.inf)
        return (torch.logsumexp(others, 1) - near.masked_fill(~own, 0.0).sum(1)).mean()
