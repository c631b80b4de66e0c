"""What a step minimises: a module from (network, images, labels) to a loss.

An objective sees a network only as `features` and `head`, so the same one serves a supernet under a mix and a derived
network, and it may own modules of its own (a decoder, a frozen teacher).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.errors import UserError


class Features(Protocol):
    """A network in two halves."""

    def features(self, x: Tensor) -> list[Tensor]:
        """[n, c, h, w] to one feature map per stage."""

    def head(self, features: Tensor) -> Tensor:
        """The last feature map to logits [n, classes]."""


class Evaluated(NamedTuple):
    """The mean loss over the batch [], and logits [n, classes] where the objective makes any.

    Example:
        >>> import torch
        >>> from softcell.nn import Evaluated
        >>> evaluated = Evaluated(loss=torch.tensor(0.5), logits=None)  # an objective without classes
        >>> evaluated.loss
        tensor(0.5000)
    """

    loss: Tensor
    logits: Tensor | None


class Objective(nn.Module, ABC):
    """`supervised`: whether it learns from labels, so that accuracy means something.

    Example:
        >>> import torch
        >>> from softcell.nn import Evaluated, Objective
        >>> class SmallFeatures(Objective):
        ...     supervised = False
        ...     def forward(self, network, images, labels):
        ...         return Evaluated(network.features(images)[-1].square().mean(), None)
        >>> class Doubles:
        ...     def features(self, x):
        ...         return [2 * x]
        >>> SmallFeatures()(Doubles(), torch.ones(1, 1, 2, 2), torch.tensor([0])).loss
        tensor(4.)
    """

    supervised: ClassVar[bool] = True

    @abstractmethod
    def forward(self, network: Features, images: Tensor, labels: Tensor) -> Evaluated:
        """images [n, c, h, w], labels [n]."""

    def gauges(self) -> dict[str, Tensor]:
        """By name of a metric its sum over an epoch's batches and their number [2], added to in place.

        The search zeroes them before an epoch, saves them within one, and records the means over all processes.
        """
        return {}


class CrossEntropy(Objective):
    """Classification, with optional label smoothing.

    Example:
        >>> import torch
        >>> from softcell.nn import CrossEntropy
        >>> class Untrained:
        ...     def features(self, x):
        ...         return [x]
        ...     def head(self, features):
        ...         return torch.zeros(len(features), 10)
        >>> loss, logits = CrossEntropy()(Untrained(), torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]))
        >>> round(loss.item(), 4)  # ln 10: ten equally likely classes
        2.3026
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, network: Features, images: Tensor, labels: Tensor) -> Evaluated:
        logits = network.head(network.features(images)[-1])
        return Evaluated(F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing), logits)


class ProxyNCA(nn.Module):
    """Proxy-NCA: pulls images to the proxy of their class and away from all others.

    Movshovitz-Attias et al.: No Fuss Distance Metric Learning using Proxies, ICCV 2017. With embeddings x and proxies
    p, all normalised to length 1, and squared distances d, Eq 6:

        L(x, y) = -log( exp(-d(x, p_y)) / Σ_{z ≠ y} exp(-d(x, p_z)) )

    The right class is not in the denominator, so the loss can be negative. One proxy [d] per class.
    """

    def __init__(self, num_classes: int, embedding: int) -> None:
        super().__init__()
        if num_classes < 2:
            raise UserError(f"Proxy-NCA needs at least 2 classes, but got {num_classes}")
        self.proxies = nn.Parameter(torch.randn(num_classes, embedding))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Embeddings [n, d] and labels [n] to the mean loss []."""
        exact = torch.promote_types(embeddings.dtype, torch.float32)
        x, proxies = F.normalize(embeddings.to(exact), dim=1), F.normalize(self.proxies.to(exact), dim=1)
        near = 2.0 * (x @ proxies.T) - 2.0  # -d(x, p) of vectors of length 1
        own = F.one_hot(labels, proxies.shape[0]).bool()
        others = near.masked_fill(own, -torch.inf)
        return (torch.logsumexp(others, 1) - near.masked_fill(~own, 0.0).sum(1)).mean()
