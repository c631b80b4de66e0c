"""One training step of a classifier with an optional auxiliary tower."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.engine.distributed import World
from softcell.engine.optim import apply_gradients


def classification_step(
    network: Any,
    optimiser: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    world: World,
    *,
    clip: float,
    label_smoothing: float = 0.0,
    auxiliary: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy plus `auxiliary` times that of the tower; gives loss [] (of the main head) and logits [n, classes].

    network: a module whose `forward_with_auxiliary` gives both logits, the second None without a tower.
    """
    logits, extra = network.forward_with_auxiliary(images)
    loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    total = loss
    if extra is not None and auxiliary > 0:
        total = loss + auxiliary * F.cross_entropy(extra, labels, label_smoothing=label_smoothing)
    parameters = list(network.parameters())
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    apply_gradients(optimiser, parameters, gradients, world, clip)
    return loss.detach(), logits.detach()
