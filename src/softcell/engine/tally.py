"""What every task counts while it learns, on the device: loss, accuracy, the step's number, non-finite losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softcell.engine.distributed import World
from softcell.engine.meter import Measured, Meter
from softcell.engine.watch import Failure, LossWatch


class Tally:
    """The running metrics of one epoch; a recorded step may update them."""

    def __init__(self, device: torch.device) -> None:
        self._meter, self._watch = Meter().to(device), LossWatch().to(device)
        self._number = torch.zeros((), dtype=torch.int64, device=device)  # of the step within its epoch

    def begin_epoch(self) -> None:
        self._meter.reset()
        self._number.zero_()

    def update(self, loss: Tensor, logits: Tensor | None, labels: Tensor, *others: Tensor) -> None:
        """One step: its loss [], logits [n, classes] and labels [n]; `others` are losses that must be finite too."""
        for value in (*others, loss):
            self._watch.update(value, self._number)
        self._meter.update(loss, logits, labels)
        self._number += 1

    def read(self, world: World) -> Measured:
        """Means over the epoch so far and over all ranks."""
        return self._meter.read(world)

    def failed(self) -> Failure | None:
        return self._watch.failed()

    @property
    def step(self) -> int:
        return int(self._number)

    @property
    def sums(self) -> Tensor:
        """This rank's own sums, for a checkpoint within an epoch."""
        return self._meter.sums

    def load(self, step: int, local: dict[str, Any] | None) -> None:
        """Restores the step's number and, within an epoch, this rank's sums."""
        self._number.fill_(step)
        if local is not None:
            kept = local["meter"]
            self._meter.sums.zero_()[: len(kept)].copy_(kept)  # earlier versions did not count the top five
