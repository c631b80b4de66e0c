"""Turns Ctrl-C and a scheduler's SIGTERM into a flag that a loop reads between two steps."""

import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from softcell.engine.distributed import World


class Interrupt:
    """Context in which the first SIGINT or SIGTERM is only remembered, in `signal`; 0 means none came.

    A SIGINT after that raises KeyboardInterrupt at once, for whoever cannot wait. Outside the main thread,
    where Python allows no handlers, nothing is caught. Inside another such context, that one catches for both: a signal
    stops all runs that share a process.
    """

    _active: ClassVar["Interrupt | None"] = None

    def __init__(self) -> None:
        self._caught = 0
        self._before: dict[int, Any] = {}
        self._outer: Interrupt | None = None

    @property
    def signal(self) -> int:
        return self._caught if self._outer is None else self._outer.signal

    def __enter__(self) -> Self:
        if Interrupt._active is not None:
            self._outer = Interrupt._active
        elif threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
            Interrupt._active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outer is not None:
            self._caught, self._outer = self._outer.signal, None
            return
        if Interrupt._active is self:
            Interrupt._active = None
        for number, handler in self._before.items():
            # None stands for a handler that was not installed from Python and cannot be put back from it.
            if handler is not None:
                signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._caught:
            raise KeyboardInterrupt
        self._caught = self._caught or number


def agree(flags: Sequence[int], world: World) -> list[int]:
    """Return the largest value of each flag over the ranks: all decide alike and none is left waiting."""
    if world.size == 1:
        return list(flags)
    shared = torch.tensor(flags, dtype=torch.int64, device=world.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return [int(value) for value in shared.tolist()]


def exit_code(number: int) -> int:
    """The exit code by which shells report an end by signal `number`: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + number
