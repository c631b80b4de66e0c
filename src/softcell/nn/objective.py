"""What a step minimises: a module from (network, images, labels) to a loss.

An objective sees a network only as `features` and `head`, so the same one serves a supernet under a mix and a derived
network, and it may own modules of its own (a decoder, a frozen teacher).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor, nn


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
