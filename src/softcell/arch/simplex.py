"""Probabilities over ragged tables: padding takes no part."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_softmax(logits: Tensor, mask: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """Softmax over the real candidates of each choice; padding gets exactly 0.

    logits, mask [..., choices, width] to probabilities of the same shape.
    """
    return torch.softmax((logits / temperature).masked_fill(~mask, -torch.inf), dim=-1)


def entropy(probabilities: Tensor) -> Tensor:
    """Entropy in nats per choice: [..., choices, width] to [..., choices]; 0·ln 0 counts as 0."""
    return -torch.xlogy(probabilities, probabilities).sum(dim=-1)


def normalised(strengths: Tensor) -> Tensor:
    """Strengths [..., choices, width], not negative, to shares of the same shape that sum to 1 per choice."""
    return strengths / strengths.sum(-1, keepdim=True)
