"""Writes the metrics of runs to TensorBoard, MLflow or Weights & Biases while they run (extras of these names)."""

from __future__ import annotations

import json
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from softcell.app.report.runs import number
from softcell.engine import RunFolder
from softcell.engine.distributed import is_main_process
from softcell.engine.runfolder import MANIFEST
from softcell.engine.task import EpochEnded, Event, OnEvent, Started
from softcell.errors import UserError, one_line
from softcell.files import atomic_write_text, read_json
from softcell.settings import flat

BOARD = "tensorboard"
IDS = "trackers.json"
"""File of a run folder: by tool, the id of the run there, so that a resumed run continues there."""
PROJECT = "softcell"
_NOT_METRICS = ("epoch", "val_count")


class Tracker(ABC):
    """One run in one tool."""

    @abstractmethod
    def __init__(self) -> None:
        """Raises `UserError` if the tool is not installed."""

    @abstractmethod
    def start(self, folder: Path, recipe: Mapping[str, Any], event: Started, known: str | None) -> str | None:
        """Opens the run; `known` is its id if it is resumed. Returns the id."""

    @abstractmethod
    def write(self, metrics: Mapping[str, float], epoch: int) -> None:
        """Metrics of an epoch, counted from 1."""

    @abstractmethod
    def finish(self, results: Mapping[str, float], status: str) -> None:
        """Closes the run; status: `finished`, `interrupted` or `failed`."""


class TensorBoard(Tracker):
    """Files in the run folder. A new run replaces those of an earlier one; a resumed run repeats no epoch."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard", "TensorBoard") from None
        self._make: Any = SummaryWriter
        self._writer: Any = None

    def start(self, folder: Path, recipe: Mapping[str, Any], event: Started, known: str | None) -> None:
        logs = folder / BOARD
        if event.epoch == 0 and event.step == 0 and not logs.is_symlink():  # a link may lead to logs of others
            for file in logs.glob("events.out.tfevents.*"):
                file.unlink()
        # TensorBoard ignores what an earlier process wrote from this step on: lost epochs are run again.
        self._writer = self._make(str(logs), purge_step=event.epoch + 1)

    def write(self, metrics: Mapping[str, float], epoch: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(tag(name), value, epoch)
        self._writer.flush()

    def finish(self, results: Mapping[str, float], status: str) -> None:
        self._writer.close()


class MLflow(Tracker):
    """A run of the experiment $MLFLOW_EXPERIMENT_NAME (`softcell`), in the store of $MLFLOW_TRACKING_URI."""

    def __init__(self) -> None:
        try:
            import mlflow
            from mlflow.entities import Metric, Param
        except ImportError:
            raise _missing("mlflow", "MLflow") from None
        self._mlflow, self._metric, self._param = mlflow, Metric, Param

    def start(self, folder: Path, recipe: Mapping[str, Any], event: Started, known: str | None) -> str:
        # A client with explicit ids: several seeds may run at the same time.
        self._client = self._mlflow.MlflowClient()
        if known is not None:
            self._run = known
            self._client.update_run(known, status="RUNNING")
            return known
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        tags = {"softcell.folder": str(folder.resolve())}
        self._run = str(self._client.create_run(experiment, run_name=folder.name, tags=tags).info.run_id)
        settings = [self._param(key, str(value)[:500]) for key, value in flat(recipe).items()]
        for first in range(0, len(settings), 100):  # which is as many as MLflow accepts at once
            self._client.log_batch(self._run, params=settings[first : first + 100])
        return self._run

    def write(self, metrics: Mapping[str, float], epoch: int) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(self._run, [self._metric(name, value, now, epoch) for name, value in metrics.items()])

    def finish(self, results: Mapping[str, float], status: str) -> None:
        now = int(1000 * time.time())
        found = [self._metric(f"result.{name}", value, now, 0) for name, value in results.items()]
        self._client.log_batch(self._run, found)
        self._client.set_terminated(self._run, {"finished": "FINISHED", "failed": "FAILED"}.get(status, "KILLED"))


class WandB(Tracker):
    """A run of the project $WANDB_PROJECT (`softcell`); $WANDB_MODE=offline keeps it in the run folder."""

    def __init__(self) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("wandb", "Weights & Biases") from None
        self._wandb = wandb

    def start(self, folder: Path, recipe: Mapping[str, Any], event: Started, known: str | None) -> str:
        self._run: Any = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=known,
            resume=None if known is None else "allow",
            dir=os.environ.get("WANDB_DIR", str(folder)),
            config=dict(recipe),
            reinit="create_new",  # several seeds may run at the same time
            settings=self._wandb.Settings(console="off"),
        )
        self._run.define_metric("epoch")
        self._run.define_metric("*", step_metric="epoch")  # its own steps may not go back, as after a resume
        return str(self._run.id)

    def write(self, metrics: Mapping[str, float], epoch: int) -> None:
        self._run.log({"epoch": epoch, **metrics})

    def finish(self, results: Mapping[str, float], status: str) -> None:
        self._run.summary.update({f"result.{name}": value for name, value in results.items()})
        self._run.finish(exit_code=0 if status == "finished" else 1)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


class Tracking:
    """A listener that writes every number of every epoch to the named tools and passes all events on to `then`.

    A context: at its end the results of the run are written too. `folder` may be changed before another run starts. A
    tool that fails in the middle of a run is dropped with a warning, because the run itself matters more.
    """

    def __init__(self, names: Iterable[str], folder: Path, then: OnEvent | None = None) -> None:
        self.folder, self._then = folder, then
        self._trackers = {name: TRACKERS[name]() for name in names} if is_main_process() else {}
        self._running: dict[str, Tracker] = {}
        self._where = folder
        self._phase = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("finished" if kind is None else "failed")

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._start(event)
        elif isinstance(event, EpochEnded):
            found = {name: number(value) for name, value in event.metrics.items() if name not in _NOT_METRICS}
            metrics = {f"{self._phase}{name}": value for name, value in found.items() if value is not None}
            self._each("write", metrics, int(event.metrics["epoch"]) + 1)  # epochs are shown from 1
        if self._then is not None:
            self._then(event)

    def close(self, status: str = "finished") -> None:
        """Writes the results in the run folder and ends the run in all tools."""
        results: dict[str, float] = {}
        if self._running and (self._where / MANIFEST).is_file():
            manifest = RunFolder.open(self._where, lenient=True).manifest
            known = {name: number(value) for name, value in manifest["results"].items()}
            results = {name: value for name, value in known.items() if value is not None}
            # The context ended without an error, but the run is not finished: a signal stopped it.
            status = "interrupted" if status == "finished" != manifest["status"] else status
        self._each("finish", results, status)
        self._running = {}

    def _start(self, event: Started) -> None:
        has_manifest, first = (self.folder / MANIFEST).is_file(), self.folder / "phase-1"
        in_first = (first / MANIFEST).is_file() and RunFolder.open(first, lenient=True).manifest["status"] != "finished"
        self._phase = "phase-1/" if in_first else ""
        if self._running and self._where == self.folder:
            return  # the second phase: the same run
        # Another run begins, such as the next random architecture.
        self.close()
        self._where = self.folder
        recipe = RunFolder.open(self.folder).manifest["recipe"] if has_manifest else {}
        stored = read_json(self.folder / IDS) if (self.folder / IDS).is_file() else None
        is_resumed = event.epoch > 0 or event.step > 0
        # A new run in this folder must not continue the one that it replaces.
        known = stored if isinstance(stored, dict) and is_resumed else {}
        ids = {name: str(known[name]) for name in self._trackers if name in known}
        for name, tracker in self._trackers.items():
            try:
                found = tracker.start(self.folder, recipe, event, ids.get(name))
            except Exception as error:  # a server that does not answer, a missing login: before any work is lost
                raise UserError(f"--{name} cannot start a run: {one_line(error, 300)}") from error
            self._running[name] = tracker
            if found is not None:
                ids[name] = found
        if ids:
            atomic_write_text(self.folder / IDS, json.dumps(ids, indent=2) + "\n")

    def _each(self, action: str, *values: Any) -> None:
        for name, tracker in list(self._running.items()):
            try:
                getattr(tracker, action)(*values)
            except Exception as error:  # anything that a server or an exceeded quota raises
                del self._running[name]
                warnings.warn(f"--{name} stopped, the run continues: {one_line(error, 300)}", stacklevel=2)


def tag(name: str) -> str:
    """`val_accuracy` to `accuracy/val`, which groups charts of one kind."""
    for kind in ("accuracy", "top5", "loss", "share", "entropy"):
        if kind in name.split("_"):
            rest = "_".join(part for part in name.split("_") if part != kind)
            return f"{kind}/{rest or 'mean'}"
    return name if "_" not in name else f"{name.split('_')[0]}/{'_'.join(name.split('_')[1:])}"


def _missing(extra: str, tool: str) -> UserError:
    return UserError(f"--{extra} needs {tool}: pip install 'softcell[{extra}]'")
