"""The meters of a search: each measures one thing at the end of every epoch.

`SearchTask.end_epoch` calls its meters in order and merges what they return: metrics for `metrics.jsonl`, and records
for other files of the run folder. A meter with state has a key, under which the task's checkpoints keep it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from softcell.arch import Cell, Genotype, Layout, Mix, Table
from softcell.arch.mix import entropy
from softcell.data import Batch, Batches
from softcell.engine.capture import once
from softcell.engine.distributed import average_, sum_
from softcell.engine.metrics import Meter
from softcell.engine.session import forked_rng
from softcell.methods import Method, Pass
from softcell.nn.objective import Guided, Objective
from softcell.search.budget import Budget
from softcell.search.genotypes import line
from softcell.search.guide import probe, read_gauges
from softcell.search.recipe import Collapse
from softcell.search.resource import ResourcePenalty
from softcell.search.supernet import RECALIBRATED, Validation, measure_child, overfit_warning, recalibrated
from softcell.spaces import Bound
from softcell.text import count_of

if TYPE_CHECKING:
    from softcell.search.task import SearchTask

SKIP = "skip_connect"


@dataclass
class Epoch:
    """An epoch that has ended; number from 0. `metrics`: what earlier meters of the list measured."""

    method: Method
    number: int
    is_last: bool
    is_validated: bool
    metrics: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def genotype(self) -> Genotype:
        """The architecture at its end. A selection makes its passes in `ValidationMeter`: read it after that."""
        return self.method.derive()

    @cached_property
    def probabilities(self) -> dict[str, Tensor]:
        """The method's probabilities at its end, per table [choices, width], on the CPU in float64."""
        return {name: p.detach().cpu().double() for name, p in self.method.probabilities().items()}


class EpochMeter:
    """Measures one thing. key: of its state in checkpoints; None without state. is_local: each process has its own."""

    key: ClassVar[str | None] = None
    is_local: ClassVar[bool] = False

    def begin_epoch(self) -> None:
        """Resets what is summed over an epoch."""

    def measure(self, task: SearchTask, epoch: Epoch) -> dict[str, Any]:
        """Metrics of the epoch by name."""
        return {}

    def records(self, task: SearchTask, epoch: Epoch) -> dict[str, Any]:
        """By file name, a line for `<name>.jsonl`; called after all meters have measured."""
        return {}

    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state: Any) -> None:
        pass


class TrainingMeter(EpochMeter):
    """Loss and accuracy of the epoch's training steps, and the learning rate."""

    def measure(self, task: SearchTask, epoch: Epoch) -> dict[str, Any]:
        trained = task.tally.read(task.world)
        return {
            "train_loss": trained.loss,
            **(trained.named("train") if task.objective.supervised else {}),
            "lr": float(task.step_state.weight_optimiser.param_groups[0]["lr"]),
        }


class MethodMeter(EpochMeter):
    """The method's own numbers, such as a temperature."""

    def measure(self, task: SearchTask, epoch: Epoch) -> dict[str, Any]:
        return {name: float(value) for name, value in task.method.gauges().items()}


class ObjectiveMeter(EpochMeter):
    """Means over the epoch of what the objective sums up, such as the loss of guidance."""

    key = "objective"
    is_local = True

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def begin_epoch(self) -> None:
        for sums in self._objective.gauges().values():
            sums.zero_()

    def measure(self, task: SearchTask, epoch: Epoch) -> dict[str, Any]:
        return read_gauges(self._objective, task.world)

    def state_dict(self) -> dict[str, Tensor]:
        return self._objective.gauges()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, sums in self._objective.gauges().items():
            sums.copy_(state[name])


class GuideMeter(EpochMeter):
    """After the first epoch of a guided search, gradient norms of the task and of the teacher."""

    def measure(self, task: SearchTask, epoch: Epoch) -> dict[str, Any]:
        if epoch.number > 0 or not isinstance(task.objective, Guided):
            return {}
        with task.in_step():  # as in a step, whose kernels are compiled
            return probe(
                task.objective,
                task.supernet,
                lambda: Bound(task.supernet, task.method.relax()),
                task.step_state.architecture(),
                task.weights.epoch(0),
                task.world,
                task.notify,
            )


class ValidationMeter(EpochMeter):
    """Accuracy of the supernet under the method's mix; the passes of a method's `selection` are made here too.

    accuracy: measures on the split that accuracies are reported for. selecting: measures on the validation split; the
    same object where both splits are the same.
    """

    def __init__(
        self, accuracy: Validation, selecting: Validation, held: Batches, notify: Callable[[str], None]
    ) -> None:
        self._accuracy, self._selecting, self._held = accuracy, selecting, held
        self._warn = once(notify)

    def measure(self, task: SearchTask, epoch: Epoch) -> dict[str, Any]:
        if not epoch.is_validated:
            return {}
        # The sampled mix and candidates such as `noise` draw random numbers: a search must not depend on them.
        with torch.no_grad(), forked_rng(task.world.device):
            metrics = self._validated(task, epoch.is_last)
        text = overfit_warning(
            epoch.metrics.get("train_accuracy"), metrics.get("val_accuracy"), is_recalibrated=RECALIBRATED in metrics
        )
        if text is not None and epoch.is_last:  # at first running statistics fit no supernet
            self._warn(text)
        return metrics

    def _validated(self, task: SearchTask, last: bool) -> dict[str, Any]:
        method, selection = task.method, task.method.selection
        # Asking for the passes clears the sums of earlier ones, so only an epoch that makes them asks.
        passes = selection.passes() if selection is not None and (last or not selection.last_epoch_only) else ()
        # A pass over the whole supernet also measures its accuracy, where both read the same images.
        whole = passes[0].mix if passes and passes[0].calibration is None else None
        if task.objective.supervised:
            metrics = self._supervised(task, whole)
        else:
            metrics = self._unsupervised(task, method.relax() if whole is None else whole)
        self._calibrated_passes(task, passes)
        if passes and selection is not None:
            for sums in selection.sums():
                sum_(sums, task.world)
        return metrics

    @torch.no_grad()
    def rehearse(self, task: SearchTask, images: Tensor, labels: Tensor) -> None:
        """The forward passes of `measure`, each on one batch of every size; nothing is measured.

        images [n, c, h, w], labels [n]: a training batch.
        """
        selection = task.method.selection
        passes = selection.passes() if selection is not None and not selection.last_epoch_only else ()
        whole = passes[0].mix if passes and passes[0].calibration is None else None
        if not task.objective.supervised:
            task.supernet.eval()
            task.objective.eval()
            mix = task.method.relax() if whole is None else whole
            with task.in_step():
                task.objective(Bound(task.supernet, mix), self._held.blank(len(labels)), labels)
            task.supernet.train()
            task.objective.train()
            return
        mix = whole if whole is not None and self._selecting is self._accuracy else task.method.relax()
        own = Pass(mix, mix if task.method.many_cells and whole is None else None)
        # One of the passes that recalibrate represents all of them.
        others = [*passes[: whole is not None], *[other for other in passes if other.calibration is not None][:1]]
        for validation, one in ((self._accuracy, own), *((self._selecting, other) for other in others)):
            calibrated: AbstractContextManager[None] = nullcontext()
            if one.calibration is not None:
                batch = Batch(images, labels, labels)
                calibrated = recalibrated(task.supernet, one.calibration, [batch], task.in_step)
            with calibrated:
                validation.rehearse(one.mix)

    def _supervised(self, task: SearchTask, whole: Mix | None) -> dict[str, Any]:
        """Loss and accuracy; with BatchNorm recalibrated where running statistics fit no single mix (`many_cells`)."""
        # The selection needs a pass over the validation split; accuracies are measured on `held` below.
        if whole is not None and self._selecting is not self._accuracy:
            self._selecting(whole)
        mix = whole if whole is not None and self._selecting is self._accuracy else task.method.relax()
        if task.method.many_cells and whole is None:
            with recalibrated(task.supernet, mix, task.calibration_batches(), task.in_step):
                held = self._accuracy(mix)
            marked = {RECALIBRATED: held.accuracy}
        else:
            held, marked = self._accuracy(mix), {}
        return {"val_loss": held.loss, **held.named("val"), **self._split(task), "val_count": held.count, **marked}

    def _unsupervised(self, task: SearchTask, mix: Mix) -> dict[str, Any]:
        """The objective's own loss. Its random draws are the same each time."""
        meter = Meter(task.world.device)
        task.supernet.eval()
        task.objective.eval()
        torch.manual_seed(task.recipe.seed)
        with task.in_step():
            for batch in self._held.epoch(0):
                if batch.labels.shape[0]:
                    loss = task.objective(Bound(task.supernet, mix), batch.images, batch.labels).loss
                    meter.update(loss, None, batch.labels)
        task.supernet.train()
        task.objective.train()
        held = meter.read(task.world)
        return {"val_loss": held.loss, **self._split(task), "val_count": held.count}

    def _split(self, task: SearchTask) -> dict[str, str]:
        return {"val_split": task.recipe.measured_split}

    def _calibrated_passes(self, task: SearchTask, passes: Sequence[Pass]) -> None:
        """The passes of a selection that recalibrate BatchNorm first."""
        calibrated = [(mix, calibration) for mix, calibration in passes if calibration is not None]
        if calibrated:
            task.notify(f"selection in {len(calibrated)} passes over the validation split")
        for mix, calibration in calibrated:
            with recalibrated(task.supernet, calibration, task.calibration_batches(), task.in_step):
                self._selecting(mix)

    def records(self, task: SearchTask, epoch: Epoch) -> dict[str, Any]:
        if not epoch.is_validated or task.method.selection is None:
            return {}
        return {name: {"epoch": epoch.number, **row} for name, row in task.method.selection.records().items()}


class ChildMeter(EpochMeter):
    """Accuracy of the derived network with the supernet's weights."""

    def measure(self, task: SearchTask, epoch: Epoch) -> dict[str, Any]:
        every = task.recipe.child_every if task.objective.supervised else 0
        if not every or not (epoch.is_last or (epoch.number + 1) % every == 0):
            return {}
        child = measure_child(task.supernet, epoch.genotype, task.held.epoch(0), task.world)
        return {**child.named("child"), "child_loss": child.loss}


class CostMeter(EpochMeter):
    """Expected costs of the architecture's distribution; with a budget, also those of the derived network.

    Without a penalty, evolution or the method's selection finds an architecture within the budget after the last epoch
    (`build._resource_of`); until then there is no derived network to count.
    """

    key = "budget"

    def __init__(self, resource: ResourcePenalty | None, budget: Budget | None) -> None:
        self._resource, self._budget = resource, budget

    def measure(self, task: SearchTask, epoch: Epoch) -> dict[str, Any]:
        if self._resource is None:
            return {}
        expected = self._resource.expected(task.method.occupancy())
        metrics = {f"expected_{kind}": value for kind, value in expected.items()}
        return metrics if self._budget is None else metrics | self._budget.end_epoch(epoch.number, epoch.genotype)

    def state_dict(self) -> Any:
        return None if self._budget is None else self._budget.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if self._budget is not None:
            self._budget.load_state_dict(state)


class ArchitectureMeter(EpochMeter):
    """Entropy of the probabilities and share of skip connections; records the architecture itself."""

    def measure(self, task: SearchTask, epoch: Epoch) -> dict[str, Any]:
        metrics = {"entropy": mean_entropy(list(epoch.probabilities.values()))}
        for name, table in epoch.probabilities.items():
            metrics[f"entropy_{name}"] = mean_entropy([table])
            metrics[f"skip_share_{name}"] = share(epoch.genotype.cells[name], SKIP, task.method.layout.table(name))
        return metrics

    def records(self, task: SearchTask, epoch: Epoch) -> dict[str, Any]:
        selection = task.method.selection
        # A selection that made no pass in this epoch still has the result of an earlier one, or none.
        is_new = selection is None or epoch.is_last or (epoch.is_validated and not selection.last_epoch_only)
        tables = {name: table.tolist() for name, table in epoch.probabilities.items()}
        read = {} if is_new else {"read": False}
        return {"architecture": line(epoch.number, epoch.genotype, tables=tables, **read)}


class CollapseMeter(EpochMeter):
    """Warns where most operations of a cell become skip connections, and ends the search if the recipe requires it.

    `kept` is the last architecture from before the collapse that ended a search.
    """

    key = "collapse"

    def __init__(self, settings: Collapse, layout: Layout, notify: Callable[[str], None], epochs: int) -> None:
        self._settings, self._layout, self._notify = settings, layout, notify
        self._first = 0 if settings.after == 0 or epochs == 1 else max(1, math.ceil(settings.after * epochs))
        self._streaks: dict[str, int] = {}
        self._warned: set[str] = set()
        self._healthy: Genotype | None = None
        self.kept: Genotype | None = None

    def measure(self, task: SearchTask, epoch: Epoch) -> dict[str, Any]:
        stop = self.check(epoch.number, epoch.genotype)
        return {} if stop is None else {"_stop": stop}

    def check(self, epoch: int, genotype: Genotype) -> str | None:
        """Takes note of an epoch's architecture and returns the reason to stop, if there is one."""
        shares = {name: share(cell, SKIP, self._layout.table(name)) for name, cell in genotype.cells.items()}
        # In the first epochs too: they are not judged, but may be the last ones before a collapse.
        if all(value <= self._settings.warn_above for value in shares.values()):
            self._healthy = genotype
        if epoch < self._first:
            return None
        for name, value in shares.items():
            collapsed = value > self._settings.warn_above
            self._streaks[name] = self._streaks.get(name, 0) + 1 if collapsed else 0
            if collapsed and name not in self._warned:
                self._warned.add(name)
                advice = (
                    f"it ends after {count_of(self._settings.patience, 'such epoch')} in a row and keeps the "
                    "architecture from before."
                    if self._settings.stop
                    else "fewer epochs, or --set collapse.stop=true to keep the architecture from before."
                )
                self._notify(
                    f"epoch {epoch + 1}: {value:.0%} of the {_of(name)} operations are skip connections (warning "
                    f"above {self._settings.warn_above:.0%}). The search may be collapsing: {advice}"
                )
        worst = max(self._streaks, key=lambda name: self._streaks[name])
        if self._settings.stop and self._streaks[worst] >= self._settings.patience:
            self.kept = self._healthy
            return (
                f"collapse: {shares[worst]:.0%} of the {_of(worst)} operations are skip connections, more than "
                f"{self._settings.warn_above:.0%} for {count_of(self._streaks[worst], 'epoch')}"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "streaks": dict(self._streaks),
            "warned": sorted(self._warned),
            "healthy": None if self._healthy is None else self._healthy.to_dict(),
            "kept": None if self.kept is None else self.kept.to_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._streaks, self._warned = dict(state["streaks"]), set(state["warned"])
        self._healthy = None if state["healthy"] is None else Genotype.from_dict(state["healthy"])
        self.kept = None if state["kept"] is None else Genotype.from_dict(state["kept"])


class ObserverMeter(EpochMeter):
    """Records the sums of the method's observer: means per step over all processes, and their sums per choice."""

    key = "diagnostics"
    is_local = True

    def __init__(self, method: Method) -> None:
        self._method = method

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return {} if self._method.observer is None else self._method.observer.sums()

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        for name, tables in self.state_dict().items():
            for table, sums in tables.items():
                sums.copy_(state[name][table])

    def begin_epoch(self) -> None:
        for tables in self.state_dict().values():
            for sums in tables.values():
                sums.zero_()

    def records(self, task: SearchTask, epoch: Epoch) -> dict[str, Any]:
        if task.recipe.regime == "unrolled":  # its gradients are not those of one backward pass
            return {}
        found = {}
        for name, tables in self.state_dict().items():
            means = {table: sums.double() / task.steps_in(epoch.number) for table, sums in tables.items()}
            average_(means.values(), task.world)
            found[name] = {
                "epoch": epoch.number,
                "tables": {table: mean.tolist() for table, mean in means.items()},
                "choices": {table: mean.sum(1).tolist() for table, mean in means.items()},
            }
        return found


def share(cell: Cell, op: str, table: Table) -> float:
    """The share of a cell's picks that are `op`; `none` does not count as a pick.

    Edges that only choose whether to exist (the parents of NAS-Bench-1Shot1) do not count either.
    """
    links = {(c.source, c.target) for c in table.choices if set(c.candidates) == {op, "none"}}
    picks = [pick for pick in cell.picks if pick.op != "none" and (pick.source, pick.target) not in links]
    return sum(pick.op == op for pick in picks) / len(picks) if picks else 0.0


def mean_entropy(tables: list[Tensor]) -> float:
    """Mean entropy in nats over the choices of all tables, each [choices, width]."""
    return float(torch.cat([entropy(table) for table in tables]).mean())


def _of(table: str) -> str:
    return "cell's" if table == "cell" else f"{table} cell's"
