"""Learning rates as functions of the epoch."""

from __future__ import annotations

import math

import torch


def cosine(epoch: float, num_epochs: int, first: float, last: float) -> float:
    """From `first` at epoch 0 along half a cosine to `last` at `num_epochs`."""
    return last + 0.5 * (first - last) * (1.0 + math.cos(math.pi * epoch / num_epochs))


def linear(epoch: float, num_epochs: int, first: float, last: float) -> float:
    return first + (last - first) * epoch / num_epochs


def exponential(epoch: float, first: float, factor: float) -> float:
    """`first` times `factor` for every epoch."""
    return float(first * factor**epoch)


def set_lr(optimiser: torch.optim.Optimizer, lr: float) -> None:
    for group in optimiser.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)  # in place, so that a captured step sees it
        else:
            group["lr"] = lr
