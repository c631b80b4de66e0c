"""Loss and accuracy, kept on the device, and the lines of JSON that record them.

Nothing synchronises with the host until sums are read.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.engine import checkpoint
from softcell.engine.distributed import World, sum_
from softcell.errors import UserError
from softcell.files import atomic_write_text
from softcell.kernels.backend import runs_triton, triton_kernels

METRICS = "metrics"
"""The name of the lines in `metrics.jsonl`."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
TOP = 5
"""Top-5 accuracy is counted too, if there are more classes than that."""


def in_top(logits: Tensor, labels: Tensor, top: int = TOP) -> Tensor:
    """Whether the true class is among the `top` strongest of logits [n, classes]: bool [n].

    Among equal logits the earlier class counts as stronger, as in `argmax`: a network whose outputs are all equal is
    right for `top` classes, not for all. Nothing is sorted, so a captured step may call it.
    """
    own, numbers = logits.gather(1, labels[:, None]), torch.arange(logits.shape[1], device=logits.device)
    stronger = (logits > own) | ((logits == own) & (numbers < labels[:, None]))
    # Comparisons with NaN are false, so a true class with NaN would count as the strongest.
    return (stronger.sum(1) < top) & ~own.squeeze(1).isnan()


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums on a device: float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


class Meter(nn.Module):
    """Running sums [5]: loss, correct answers, samples, top-5 answers, samples that count for top 5."""

    sums: Tensor

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
        super().__init__()
        self.register_buffer("sums", torch.zeros(5, dtype=sum_dtype(device), device=device), persistent=False)

    @torch.no_grad()
    def update(self, loss: Tensor, logits: Tensor | None, labels: Tensor) -> None:
        """loss: mean over the batch []; logits [n, classes]; labels [n]."""
        # A plain number also in a captured step, whose batches all have one size.
        count = labels.shape[0]
        self.sums[0] += loss.to(self.sums.dtype) * count
        self.sums[2] += count
        if logits is not None:
            self.sums[1] += (logits.argmax(dim=1) == labels).sum()
            if logits.shape[1] > TOP:
                self.sums[3] += in_top(logits, labels).sum()
                self.sums[4] += count

    @torch.no_grad()
    def judge(self, logits: Tensor, labels: Tensor) -> None:
        """Count answers and their cross-entropy, from logits [n, classes] in any precision.

        Outside autocast the loss of bfloat16 logits would be rounded to eight bits, so it is computed in float32.
        """
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        self.update(F.cross_entropy(wide, labels), wide, labels)

    def reset(self) -> None:
        self.sums.zero_()

    def read(self, world: World) -> Measured:
        """The means over all ranks; the meter keeps its own sums."""
        loss, correct, count, among, ranked = sum_(self.sums.clone(), world).tolist()
        top5 = among / ranked if ranked else None
        return Measured(loss / max(count, 1), correct / max(count, 1), int(count), top5)


@dataclass(frozen=True, slots=True)
class Measured:
    """Mean loss, share of correct answers, and over how many samples.

    `top5`: the share of images whose class is among the five strongest; None with at most five classes.
    """

    loss: float
    accuracy: float
    count: int
    top5: float | None = None

    def named(self, of: str, suffix: str = "") -> dict[str, float]:
        """`{of}_accuracy` and, if it was counted, `{of}_top5`, as in `metrics.jsonl`."""
        found = {f"{of}_accuracy{suffix}": self.accuracy}
        return found if self.top5 is None else {**found, f"{of}_top5{suffix}": self.top5}


class Labelled(Protocol):
    """A batch with images and labels."""

    @property
    def images(self) -> Tensor: ...

    @property
    def labels(self) -> Tensor: ...


@torch.no_grad()
def measure(forward: Callable[[Tensor], Tensor], batches: Iterable[Labelled], world: World) -> Measured:
    """Loss and accuracy of `forward` (images [n, c, h, w] to logits [n, classes]) over all batches of all ranks."""
    meter = Meter(world.device)
    for batch in batches:
        if batch.labels.shape[0]:  # a rank's part of a short last batch may be empty
            meter.judge(forward(batch.images), batch.labels)
    return meter.read(world)


@dataclass(frozen=True, slots=True)
class Failure:
    """The first non-finite loss of a run and the step at which it appeared.

    Example:
        >>> from softcell.engine import Failure
        >>> Failure(step=17, value=float("inf"))
        Failure(step=17, value=inf)
    """

    step: int
    value: float


class DivergedError(UserError):
    """Training stopped because a loss is not finite.

    Example:
        >>> from softcell.engine import DivergedError, Failure
        >>> error = DivergedError(epoch=3, failure=Failure(step=17, value=float("nan")), folder="runs/search")
        >>> "17" in str(error) and "nan" in str(error)
        True
    """

    def __init__(self, epoch: int, failure: Failure, folder: str | os.PathLike[str]) -> None:
        self.epoch = epoch
        self.failure = failure
        # A resumed run keeps its recipe and would diverge again, so the message does not suggest it.
        kept = f" {Path(folder)} keeps its last good checkpoint." if checkpoint.exists(folder) else ""
        super().__init__(
            f"every loss must be finite, but it became {failure.value} in epoch {epoch + 1} at step {failure.step}. "
            "Lower the learning rate (--set weights.lr=... for a search, --set lr=... for training), clip the "
            "gradients, or check the data for values that are not finite, and start again in another --out, or here "
            f"with --overwrite; --resume would lead to the same loss.{kept}"
        )


class LossWatch(nn.Module):
    """Remembers the first non-finite loss in buffers on the device.

    The buffers are not saved: a state with a failure in it is never checkpointed.

    Example:
        >>> import torch
        >>> from softcell.engine import LossWatch
        >>> watch = LossWatch()
        >>> for step, loss in enumerate((0.5, float("nan"), 0.4)):
        ...     watch.update(torch.tensor(loss), step)
        >>> watch.failed()
        Failure(step=1, value=nan)
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
        """The recorded failure, if any; reads the device, so do not call it in every step on CUDA."""
        step = int(self.step)
        return Failure(step, float(self.value)) if step >= 0 else None


def _has_kernel(logits: Tensor, *losses: Tensor) -> bool:
    """Whether the Triton kernel counts a step: one program reads the logits, at most a thousand classes at a time."""
    if not runs_triton(logits) or not 0 < logits.shape[1] <= 1024:
        return False
    return len(losses) <= 2 and all(loss.dtype == torch.float32 and not loss.dim() for loss in losses)


class Tally:
    """The running metrics of one epoch; a captured step may update them."""

    def __init__(self, device: torch.device) -> None:
        self._meter, self._watch = Meter(device), LossWatch().to(device)
        self._number = torch.zeros((), dtype=torch.int64, device=device)  # of the step within its epoch

    def begin_epoch(self) -> None:
        self._meter.reset()
        self._number.zero_()

    def update(
        self, loss: Tensor, logits: Tensor | None, labels: Tensor, *others: Tensor, by_kernel: bool = False
    ) -> None:
        """One step: its loss [], logits [n, classes] and labels [n]; `others` are losses that must be finite too.

        by_kernel: by one Triton kernel, with the same result, where it serves.
        """
        if by_kernel and logits is not None and _has_kernel(logits, loss, *others):
            top = TOP if logits.shape[1] > TOP else 0
            values = (loss, others[0] if others else None, logits.contiguous(), labels, self._meter.sums, self._number)
            triton_kernels("batch").count(*values, self._watch.step, self._watch.value, top)
            return
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


def redistributed(parts: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    """The part of an unfinished epoch's sums that `rank` keeps after the number of processes has changed.

    parts: one per earlier rank, of nested dicts of tensors. Those under `meter` count samples: rank 0 gets their total.
    All others get one term per rank and step and are averaged over ranks at the end: every rank gets their mean.
    """

    def combine(values: list[Any], is_count: bool) -> Any:
        if isinstance(values[0], dict):
            return {key: combine([value[key] for value in values], is_count) for key in values[0]}
        total = torch.stack(values).sum(0)
        return (total if rank == 0 else torch.zeros_like(total)) if is_count else total / len(values)

    return {key: combine([part[key] for part in parts], key == "meter") for key in parts[0]}


class History:
    """The lines of JSON that a run has written so far, by file name (without `.jsonl`).

    Kept as text, so that checkpoint and files cannot differ.
    """

    def __init__(self, lines: dict[str, list[str]] | None = None) -> None:
        self.lines = {name: list(texts) for name, texts in (lines or {METRICS: []}).items()}

    def append(self, name: str, value: Any) -> list[str]:
        """Add `value` as a line of `<name>.jsonl`; return where non-finite numbers were replaced by null."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"a record's name must be usable as a file name, but got {name!r}")
        lost: list[str] = []
        text = json.dumps(_finite(value, "", lost), allow_nan=False, ensure_ascii=False)
        self.lines.setdefault(name, []).append(text)
        return lost

    def last(self) -> Any:
        """Return the last line of the metrics, parsed."""
        return json.loads(self.lines[METRICS][-1])

    def rows(self, name: str = METRICS) -> list[Any]:
        """Return the lines of `name`, parsed."""
        return [json.loads(text) for text in self.lines.get(name, [])]

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write the `.jsonl` files in `folder`."""
        for name, texts in self.lines.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):  # a checkpoint may come from an untrusted source
                raise UserError(f"a record of a checkpoint must be named like a file, got {name!r}; start a new run")
            atomic_write_text(Path(folder) / f"{name}.jsonl", "".join(f"{text}\n" for text in texts))


def _finite(value: Any, where: str, lost: list[str]) -> Any:
    """Copy `value` with null for NaN and infinities, which JSON lacks, and note where they were."""
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(f"{where} is {value}")
        return None
    if isinstance(value, dict):
        return {key: _finite(item, f"{where}.{key}" if where else str(key), lost) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, f"{where}[{index}]", lost) for index, item in enumerate(value)]
    return value
