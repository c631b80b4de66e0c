"""What the outputs of every candidate look like, seen in one pass of a single image through the supernet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from softcell.arch import Mix
from softcell.spaces.base import Shape, Supernet


@dataclass(frozen=True)
class Outputs:
    """The shapes [c, h, w] of a choice's outputs by candidate; None for zeros.

    `in_parts`: they are combined kind by kind, since features meet calibrating candidates (`Mix.meet`).
    """

    by_candidate: Mapping[int, Shape | None]
    in_parts: bool

    def feature(self) -> Shape | None:
        """The largest shape: that of the feature maps among them."""
        found = [shape for shape in self.by_candidate.values() if shape is not None]
        return max(found, key=lambda shape: shape[0] * shape[1] * shape[2]) if found else None


Shapes = Mapping[tuple[int, int], Outputs]
"""By site and choice."""


class _Probe(Mix):
    """Takes note of what arrives and hands on its mean."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], Outputs] = {}

    def meet(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> None:
        self.seen[site, choice] = Outputs(_shapes(outputs), True)

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        if (site, choice) not in self.seen:
            self.seen[site, choice] = Outputs(_shapes(outputs), False)
        present = [x for x in outputs.values() if x is not None]
        return torch.stack(present).mean(0) if present else None


def _shapes(outputs: Mapping[int, Tensor | None]) -> dict[int, Shape | None]:
    return {k: None if x is None else (x.shape[1], x.shape[2], x.shape[3]) for k, x in outputs.items()}


@torch.no_grad()
def output_shapes(supernet: Supernet) -> Shapes:
    """The shapes of all outputs for images of the supernet's size; nothing of it changes."""
    probe, reference = _Probe(), next(supernet.parameters())
    image = torch.zeros(1, *supernet.shape, device=reference.device, dtype=reference.dtype)
    was_training = supernet.training
    supernet.eval()
    with torch.random.fork_rng(devices=[]):  # some candidates draw noise
        supernet(image, probe)
    supernet.train(was_training)
    return probe.seen
