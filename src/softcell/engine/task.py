"""The interface between the loop and what it runs (`Task`), and the events that the loop emits on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from softcell.engine.metrics import Failure


@dataclass(frozen=True, slots=True)
class Started:
    """The loop is about to make its first step; `epoch` and `step` are above 0 when it was resumed.

    `time`: the seconds of a run that ends when its time is up, 0 for others; `num_epochs` is then an upper limit.
    """

    epoch: int
    step: int
    num_epochs: int
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Stepped:
    """`step` of `steps` in `epoch` are done, `fraction` of the whole run; `seconds_left` is None while unknown."""

    epoch: int
    step: int
    steps: int
    fraction: float
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """An epoch is over; `metrics` is its line in `metrics.jsonl`."""

    epoch: int
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Note:
    """A message for the user that does not stop the run."""

    text: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A signal stopped the run after `step` steps of `epoch`; it can be resumed."""

    signal: int
    exit_code: int
    epoch: int
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """All epochs are done, or the task ended the run before for `reason`."""

    num_epochs: int
    reason: str | None


Event: TypeAlias = Started | Stepped | EpochEnded | Note | Interrupted | Finished
OnEvent: TypeAlias = Callable[[Event], None]


class Task(Protocol):
    """A job of epochs and steps whose whole state can be saved between any two steps.

    A run that was killed and resumed repeats an unbroken one bit by bit if these hold:

    - `batches(epoch, start)` yields the batches from number `start` on, as a function of its arguments. It
      may draw from torch's global generators while it makes a batch, but not ahead of time for a later one.
    - `state_dict` holds all that steps change: weights, optimizers, running metrics. A resumed epoch calls
      `load_state_dict`, `begin_epoch`, and `load_state_dict` again, so what `begin_epoch` sets from the
      epoch's number alone (schedules) need not be in it.

    Example:
        >>> from softcell.engine import Task
        >>> class Count:  # sums the numbers of its batches
        ...     num_epochs, total = 2, 0
        ...     def steps_in(self, epoch): return 3
        ...     def begin_epoch(self, epoch): ...
        ...     def batches(self, epoch, start): yield from range(start, 3)
        ...     def step(self, batch): self.total += batch
        ...     def end_epoch(self, epoch): return {"total": self.total}
        ...     def state_dict(self): return {"total": self.total}
        ...     def load_state_dict(self, state): self.total = state["total"]
        ...     def failed(self): return None
        >>> task: Task = Count()
        >>> for batch in task.batches(epoch=0, start=1):
        ...     task.step(batch)
        >>> task.end_epoch(0)
        {'total': 3}
    """

    @property
    def num_epochs(self) -> int:
        """The number of epochs of the run."""

    def steps_in(self, epoch: int) -> int:
        """The number of steps of `epoch`; the same on every rank."""

    def begin_epoch(self, epoch: int) -> None:
        """Set the schedules for `epoch` and zero the running metrics."""

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield the batches of `epoch` that this rank sees, from step `start` on."""

    def step(self, batch: Any) -> None:
        """Learn from one batch; metrics are summed on the device."""

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        """Return the epoch's metrics, ready for JSON, the same on every rank.

        Two keys are not metrics: `"_records"`, a dict whose values become lines of `<name>.jsonl`;
        `"_stop"`, the reason to end the run after this epoch. `"epoch"` and `"seconds"` are added by the
        loop.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors (any shape) and plain values, the same on every rank.

        What differs between ranks (metrics not yet summed over them) goes under the key `"_local"`. It is
        kept, rank by rank, in the middle of an epoch only. Its values are tensors in nested dicts, so that a run
        can be resumed with another number of processes (`softcell.engine.metrics.redistributed`).
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; tensors come on the CPU, and `"_local"` in mid-epoch only."""

    def failed(self) -> Failure | None:
        """Return the first non-finite loss, if there was one; may read the device."""
