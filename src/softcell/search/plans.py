"""The plans of recorded steps: which candidates run, known on the host before the step without waiting for the device.

A method with a plan derives it from its parameters at every step. An eager step does so on the spot. A recorded step
cannot, since what runs is fixed when it is recorded; its plan is made here, before it, from the reading that was queued
before the step in front of it. Deviation (EnTranNAS §2.2): such a plan is one step old.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softcell.arch import Plan
from softcell.engine.capture import Readback
from softcell.methods import Planner


class Plans:
    """Makes the plan of each step of a run."""

    def __init__(self, planner: Planner | None) -> None:
        self._planner, self._readback = planner, Readback()
        self._before: Plan | None = None

    @torch.no_grad()
    def next(self) -> Plan | None:
        """The plan of the next step; None where the method needs none. The first one waits for the device."""
        reading = None if self._planner is None else self._planner.reading()
        if self._planner is None or reading is None:
            return None
        earlier = self._readback.exchange(reading)
        known = reading.cpu() if earlier is None else earlier
        plan = self._planner.plan(known)
        self._before = plan if self._before is None else self._planner.widen(plan, known, self._before)
        return self._before

    def state_dict(self) -> dict[str, Any]:
        """The reading that the next plan comes from and the plan before it: a resumed run follows the same plans."""
        return {"reading": self._readback.pending(), "before": self._before}

    def load_state_dict(self, state: dict[str, Any] | Tensor | None) -> None:
        if not isinstance(state, dict):  # checkpoints of older versions have the reading alone
            state = {"reading": state, "before": None}
        self._readback.restore(state["reading"])
        self._before = state["before"]
