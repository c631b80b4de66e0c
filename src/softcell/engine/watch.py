"""Notices the first loss that is not finite without making the device wait for the host."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from softcell.engine import checkpoint
from softcell.errors import UserError


@dataclass(frozen=True, slots=True)
class Failure:
    """The first non-finite loss of a run and the step at which it appeared."""

    step: int
    value: float


class DivergedError(UserError):
    """Training cannot go on, because a loss is not finite."""

    def __init__(self, epoch: int, failure: Failure, folder: str | os.PathLike[str]) -> None:
        self.epoch = epoch
        self.failure = failure
        # A resumed run keeps its recipe: with the same rate it comes to the same loss, so no one is sent there.
        kept = f" {Path(folder)} keeps its last good checkpoint." if checkpoint.exists(folder) else ""
        super().__init__(
            f"every loss must be finite, but it became {failure.value} in epoch {epoch + 1} at step {failure.step}. "
            "Lower the learning rate (--set weights.lr=... for a search, --set lr=... for a training), clip the "
            "gradients, or check the data for values that are not finite, and start again in another --out, or here "
            f"with --overwrite; --resume would go on as before, to the same loss.{kept}"
        )


class LossWatch(nn.Module):
    """Remembers the first non-finite loss in buffers on the device.

    The buffers are not saved: a state with a failure in it is never checkpointed.
    """

    step: Tensor
    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(-1), persistent=False)
        self.register_buffer("value", torch.tensor(0.0), persistent=False)

    @torch.no_grad()
    def update(self, loss: Tensor, step: int | Tensor) -> None:
        """Record `loss` [] of `step`, if it is the first that is not finite.

        In a captured graph `step` must be a tensor [] that is advanced in place: a number would be frozen in.
        """
        first = ~torch.isfinite(loss) & (self.step < 0)
        self.step.copy_(torch.where(first, step, self.step))
        self.value.copy_(torch.where(first, loss.to(self.value.dtype), self.value))

    def failed(self) -> Failure | None:
        """Return what was recorded; this reads the device, so not in every step on CUDA."""
        step = int(self.step)
        return Failure(step, float(self.value)) if step >= 0 else None
