"""What a running loop tells whoever displays it; only rank 0 tells."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Started:
    """The loop is about to make its first step; `epoch` and `step` are above 0 when it was resumed."""

    epoch: int
    step: int
    num_epochs: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """`step` of `steps` in `epoch` are done, `fraction` of the whole run; None while the pace is unknown."""

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
    """Something that the user should know and that stops nothing."""

    text: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A signal ended the run; it can be resumed after `step` steps of `epoch`."""

    signal: int
    exit_code: int
    epoch: int
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """All epochs are done, or the task stopped early for `reason`."""

    num_epochs: int
    reason: str | None


Event: TypeAlias = Started | Stepped | EpochEnded | Note | Interrupted | Finished
OnEvent: TypeAlias = Callable[[Event], None]
