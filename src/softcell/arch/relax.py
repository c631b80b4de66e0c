"""Relaxations over ragged tables: softmax and concrete samples without padding, and falling temperatures."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from softcell.arch.choice import LINK


def masked_softmax(logits: Tensor, mask: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """Softmax over the real candidates of each choice; padding gets exactly 0.

    logits, mask [..., choices, width] to probabilities of the same shape.

    Example:
        >>> import torch
        >>> from softcell.arch import masked_softmax
        >>> logits = torch.zeros(2, 3)
        >>> masked_softmax(logits, torch.tensor([[True, True, False], [True, True, True]]))
        tensor([[0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """
    return torch.softmax((logits / temperature).masked_fill(~mask, -torch.inf), dim=-1)


def contested_softmax(logits: Tensor, mask: Tensor, members: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """`masked_softmax`, but one softmax over the links of each contest; `none` gets 1 minus its link.

    logits, mask [..., choices, width]; members bool [contests, choices] to probabilities like the logits.
    """
    links = torch.where(members, (logits / temperature)[..., None, :, LINK], -torch.inf)  # [..., contests, choices]
    return with_links(masked_softmax(logits, mask, temperature), torch.softmax(links, dim=-1), members, mask)


def gumbel(uniform: Tensor) -> Tensor:
    """Gumbel variables from uniform ones, any shape; 0 and 1 are clamped inside, where both logarithms are finite."""
    bounds = torch.finfo(uniform.dtype)
    return -torch.log(-torch.log(uniform.clamp(bounds.tiny, 1.0 - bounds.eps)))


def concrete(
    log_alpha: Tensor, mask: Tensor, temperature: Tensor | float, uniform: Tensor, members: Tensor | None = None
) -> Tensor:
    """One relaxed one-hot sample softmax((log α + G) / λ) per choice, or per contest of choices; padding is exactly 0.

    log_alpha, mask, uniform [..., choices, width], temperature λ [] and members bool [contests, choices] to
    [..., choices, width].
    """
    noisy = log_alpha + gumbel(uniform)
    if members is None:
        return masked_softmax(noisy, mask, temperature)
    return contested_softmax(noisy, mask, members, temperature)


def contested_shares(strengths: Tensor, members: Tensor) -> Tensor:
    """`normalised`, but the links of each contest sum to 1; `none` gets 1 minus its link."""
    links = torch.where(members, strengths[..., None, :, LINK], 0.0)
    shares = links / links.sum(-1, keepdim=True)
    return with_links(normalised(strengths), shares, members, torch.ones_like(strengths, dtype=torch.bool))


def with_links(others: Tensor, links: Tensor, members: Tensor, mask: Tensor) -> Tensor:
    """Probabilities [..., choices, width] with those of contested links [..., contests, choices] put in."""
    link = torch.where(members, links, 0.0).sum(-2)
    gap = (1.0 - link) * mask[..., 0]
    row = torch.stack([gap, link, *([torch.zeros_like(link)] * (others.shape[-1] - LINK - 1))], dim=-1)
    return torch.where(members.any(0)[:, None], row, others)


def entropy(probabilities: Tensor) -> Tensor:
    """Entropy in nats per choice: [..., choices, width] to [..., choices]; 0·ln 0 counts as 0."""
    return -torch.xlogy(probabilities, probabilities).sum(dim=-1)


def normalised(strengths: Tensor) -> Tensor:
    """Strengths [..., choices, width], not negative, to shares of the same shape that sum to 1 per choice."""
    return strengths / strengths.sum(-1, keepdim=True)


Schedule = Literal["linear", "exponential", "constant"]


def temperature_at(progress: float, first: float, last: float, schedule: Schedule) -> float:
    """The temperature λ at `progress` 0..1; `constant` stays at `first`."""
    match schedule:
        case "linear":
            return first + (last - first) * progress
        case "exponential":
            return float(first * (last / first) ** progress)
        case "constant":
            return first
