"""The plans of recorded steps: which candidates run, known on the host before the step without waiting for the device.

A method with a plan derives it from its parameters at every step. An eager step does so on the spot. A recorded step
cannot, since what runs is fixed when it is recorded; its plan is made here, before it, from the reading that was queued
before the step in front of it. Deviation (EnTranNAS §2.2): such a plan is one step old.
"""

from __future__ import annotations

import torch
from torch import Tensor

from softcell.arch import Plan
from softcell.engine.capture import Readback
from softcell.methods import Planner


class Plans:
    """Makes the plan of each step of a run."""

    def __init__(self, planner: Planner | None) -> None:
        self._planner, self._readback = planner, Readback()

    @torch.no_grad()
    def next(self) -> Plan | None:
        """The plan of the next step; None where the method needs none. The first one waits for the device."""
        reading = None if self._planner is None else self._planner.reading()
        if self._planner is None or reading is None:
            return None
        before = self._readback.exchange(reading)
        return self._planner.plan(reading.cpu() if before is None else before)

    def state_dict(self) -> Tensor | None:
        """The reading that the next plan comes from, so that a resumed run follows the plans of an unbroken one."""
        return self._readback.pending()

    def load_state_dict(self, state: Tensor | None) -> None:
        self._readback.restore(state)
