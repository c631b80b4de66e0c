"""Small tensors from the device to the host without stalling the device: what was sent is received one send later."""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """Copies that the device makes in its own time.

    `exchange` queues a copy of a tensor and gives the one before. By then the device has long begun the work queued
    behind that earlier copy, so waiting for it keeps the host at most one step ahead and never leaves the device idle.
    """

    def __init__(self) -> None:
        self._sent: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def exchange(self, value: Tensor) -> Tensor | None:
        """Queues a copy of `value`; gives the copy queued by the call before, or None at the first call."""
        before = self.pending()
        value = value.detach()
        if value.device.type == "cuda":
            self._sent = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._sent.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._sent, self._event = value.clone(), None
        return before

    def pending(self) -> Tensor | None:
        """The copy that the next `exchange` will give; waits until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._sent

    def restore(self, pending: Tensor | None) -> None:
        """Makes `pending` what the next `exchange` gives: for a run that is resumed."""
        self._sent, self._event = pending, None
