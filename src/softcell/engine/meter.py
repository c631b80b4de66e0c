"""Running means that live on the device: nothing waits for the host until they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.engine.distributed import World, sum_


class Meter(nn.Module):
    """Sums of loss, correct answers and samples; [3] in float64, so that long epochs lose nothing."""

    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(3, dtype=torch.float64), persistent=False)

    @torch.no_grad()
    def update(self, loss: Tensor, logits: Tensor | None, labels: Tensor) -> None:
        """loss: mean over the batch []; logits [n, classes]; labels [n]."""
        count = labels.shape[0]
        self.sums[0] += loss.double() * count
        self.sums[2] += count
        if logits is not None:
            self.sums[1] += (logits.argmax(dim=1) == labels).sum()

    @torch.no_grad()
    def judge(self, logits: Tensor, labels: Tensor) -> None:
        """Counts answers and their cross-entropy, of logits [n, classes] in any precision.

        Outside autocast the loss of bfloat16 logits would itself be rounded to eight bits, so it is taken in float32.
        """
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        self.update(F.cross_entropy(wide, labels), wide, labels)

    def reset(self) -> None:
        self.sums.zero_()

    def read(self, world: World) -> Measured:
        """The means over all ranks; the meter keeps its own sums."""
        loss, correct, count = sum_(self.sums.clone(), world).tolist()
        return Measured(loss / max(count, 1), correct / max(count, 1), int(count))


@dataclass(frozen=True, slots=True)
class Measured:
    """Mean loss, share of correct answers, and over how many samples."""

    loss: float
    accuracy: float
    count: int


class Labelled(Protocol):
    """What a batch must have."""

    @property
    def images(self) -> Tensor: ...

    @property
    def labels(self) -> Tensor: ...


@torch.no_grad()
def measure(forward: Callable[[Tensor], Tensor], batches: Iterable[Labelled], world: World) -> Measured:
    """Loss and accuracy of `forward` (images [n, c, h, w] to logits [n, classes]) over all batches of all ranks."""
    meter = Meter().to(world.device)
    for batch in batches:
        if batch.labels.shape[0]:  # a rank's part of a short last batch may be empty
            meter.judge(forward(batch.images), batch.labels)
    return meter.read(world)
