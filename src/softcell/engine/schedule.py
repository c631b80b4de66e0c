"""Learning rates as functions of the epoch."""

from __future__ import annotations

import math
from typing import Literal

import torch

Fall = Literal["cosine", "linear", "exponential"]


def cosine(epoch: float, num_epochs: int, first: float, last: float) -> float:
    """From `first` at epoch 0 along half a cosine to `last` at `num_epochs`."""
    return last + 0.5 * (first - last) * (1.0 + math.cos(math.pi * epoch / num_epochs))


def linear(epoch: float, num_epochs: int, first: float, last: float) -> float:
    return first + (last - first) * epoch / num_epochs


def exponential(epoch: float, first: float, factor: float) -> float:
    """`first` times `factor` for every epoch."""
    return float(first * factor**epoch)


def rate_at(
    epoch: int,
    num_epochs: int,
    first: float,
    last: float,
    schedule: Fall,
    *,
    warmup: int = 0,
    factor: float = 1.0,
    every: int = 1,
) -> float:
    """The rate of an epoch: a linear rise to `first` over `warmup` epochs, then the schedule over those that are left.

    `exponential` multiplies by `factor` every `every` epochs and has no `last`.
    """
    if epoch < warmup:
        return first * (epoch + 1) / warmup
    past, length = epoch - warmup, num_epochs - warmup
    match schedule:
        case "cosine":
            return cosine(past, length, first, last)
        case "linear":
            return linear(past, length, first, last)
        case "exponential":
            return exponential(past // every, first, factor)


def set_lr(optimiser: torch.optim.Optimizer, lr: float) -> None:
    for group in optimiser.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)  # in place, so that a captured step sees it
        else:
            group["lr"] = lr
