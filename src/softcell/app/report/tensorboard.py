"""Writes the metrics of a run for TensorBoard while it goes (extra `tensorboard`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from softcell.app.report.runs import number
from softcell.engine.task import EpochEnded, Event, Finished, Interrupted, OnEvent, Started
from softcell.errors import UserError

BOARD = "tensorboard"


class TensorBoard:
    """A listener that writes every number of an epoch below `folder`/tensorboard and passes all events on to `then`.

    A new run replaces the files of an earlier one. A resumed run continues at its checkpoint, so that no epoch appears
    twice. `folder` may be changed before another run starts.
    """

    def __init__(self, folder: Path, then: OnEvent | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("--tensorboard needs TensorBoard: pip install 'softcell[tensorboard]'") from None
        self.folder, self._then = folder, then
        self._make: Any = SummaryWriter
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._start(event)
            case EpochEnded():
                self._write(event.metrics)
            case Finished() | Interrupted():
                self.close()
            case _:
                pass
        if self._then is not None:
            self._then(event)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _start(self, event: Started) -> None:
        self.close()
        place = self.folder / BOARD
        if event.epoch == 0 and event.step == 0 and not place.is_symlink():  # a link may lead to logs of others
            for file in place.glob("events.out.tfevents.*"):
                file.unlink()
        # TensorBoard ignores what an earlier process wrote from this step on: lost epochs are run again.
        self._writer = self._make(str(place), purge_step=event.epoch + 1)

    def _write(self, metrics: dict[str, Any]) -> None:
        step = int(metrics["epoch"]) + 1  # epochs are shown from 1
        for name, value in metrics.items():
            found = number(value)
            if found is not None and name not in ("epoch", "val_count"):
                self._writer.add_scalar(_tag(name), found, step)
        self._writer.flush()


def _tag(name: str) -> str:
    """`val_accuracy` to `accuracy/val`, which groups charts of one kind."""
    for kind in ("accuracy", "top5", "loss", "share", "entropy"):
        if kind in name.split("_"):
            rest = "_".join(part for part in name.split("_") if part != kind)
            return f"{kind}/{rest or 'mean'}"
    return name if "_" not in name else f"{name.split('_')[0]}/{'_'.join(name.split('_')[1:])}"
