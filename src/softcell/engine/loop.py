"""Drives a `Task` through its epochs: restore, step, check, save, stop.

At the end of an epoch its line is appended to the history, the history is saved in the checkpoint, and then the
`.jsonl` files are written from it. If no checkpoint is due, only the files are written. The files of a killed run may
be behind its checkpoint or ahead of it; resuming rewrites them.
"""

from __future__ import annotations

import itertools
import os
import signal as signals
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from softcell.engine import checkpoint
from softcell.engine.checkpoint import IDENTITY, check_identity
from softcell.engine.distributed import World, agree, gather_objects, on_main, same_everywhere
from softcell.engine.interleave import Steps
from softcell.engine.metrics import METRICS, DivergedError, History, redistributed
from softcell.engine.session import Interrupt, exit_code, rng_state, set_rng_state
from softcell.engine.task import EpochEnded, Event, Finished, Interrupted, Note, OnEvent, Started, Stepped, Task
from softcell.engine.timing import Pace, TimeBudget
from softcell.errors import UserError, one_line
from softcell.settings import bounded_epochs

# Reading a flag from a CUDA device makes the host wait, so it is read rarely.
_LOOK_EVERY = 50
# Steps between the ranks' decisions to stop on CUDA: soon enough for the 30 s that torchrun grants after a signal.
_AGREE_EVERY = 10
MAX_SAVING_SHARE = 0.05
"""The share of a run's time that checkpoints after epochs may take, if one takes longer than `FAST_SAVE_SECONDS`."""
FAST_SAVE_SECONDS = 0.5
"""A state that is saved faster than this is saved after every epoch, however short."""
MAX_UNSAVED_SECONDS = 300.0
"""After this time the next epoch is saved in any case."""
TIME_IS_OVER = "time is over"
"""Why a run with a time budget stopped; its checkpoint says so."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended; `reason` says why if it stopped before its last epoch.

    Example:
        >>> from softcell.engine import Outcome
        >>> outcome = Outcome("interrupted", exit_code=130, reason="SIGINT", metrics=[{"epoch": 0, "loss": 0.5}])
        >>> outcome.status, len(outcome.metrics)
        ('interrupted', 1)
    """

    status: Literal["finished", "interrupted"]
    exit_code: int
    reason: str | None
    metrics: list[dict[str, Any]]


def run(
    task: Task,
    folder: str | os.PathLike[str],
    world: World,
    *,
    resume: bool,
    on_event: OnEvent | None = None,
    save_every_epochs: int = 1,
    identity: Mapping[str, Any] | None = None,
) -> Outcome:
    """Run `task` to its end or to a signal, keeping checkpoints and `metrics.jsonl` in the existing `folder`.

    Args:
        task: the job.
        folder: where the run lives; used by rank 0 only.
        world: from `distributed.start`.
        resume: continue from the folder's checkpoint. Without it the folder must hold none.
        on_event: called on rank 0 for each event.
        save_every_epochs: epochs between checkpoints, more where saving takes long (`MAX_SAVING_SHARE`); the last
            epoch is always saved.
        identity: what checkpoints belong to (`softcell.engine.checkpoint`); a checkpoint of another run is rejected.

    Example:
        >>> import torch
        >>> from softcell.engine import World, run
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
        >>> world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
        >>> outcome = run(Count(), ".", world, resume=False)
        >>> [line["total"] for line in outcome.metrics]
        [3, 6]
        >>> run(Count(), ".", world, resume=True).status  # nothing is left to do
        'finished'
    """
    steps = steps_of(
        task,
        folder,
        world,
        resume=resume,
        on_event=on_event,
        save_every_epochs=save_every_epochs,
        identity=identity,
    )
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            return outcome


def steps_of(
    task: Task,
    folder: str | os.PathLike[str],
    world: World,
    *,
    resume: bool,
    on_event: OnEvent | None = None,
    save_every_epochs: int = 1,
    identity: Mapping[str, Any] | None = None,
    budget: TimeBudget | None = None,
) -> Steps[Outcome]:
    """`run`, pausing after every step, so that several runs can share a process.

    budget: ends the run when its time is up, within an epoch too; the task's epochs remain a limit.
    """
    if save_every_epochs < 1:
        raise UserError(f"`save_every_epochs >= 1` must hold, but got save_every_epochs={save_every_epochs}")
    return _Loop(task, Path(folder), world, on_event, save_every_epochs, identity, budget).steps(resume)


@dataclass(slots=True)
class _Progress:
    """The progress of the run, apart from the task's own state."""

    epoch: int = 0
    step: int = 0
    seconds: float = 0.0  # spent in the current epoch, including earlier processes
    stopped: str | None = None
    history: History = field(default_factory=History)


class _Loop:
    def __init__(
        self,
        task: Task,
        folder: Path,
        world: World,
        on_event: OnEvent | None,
        save_every: int,
        identity: Mapping[str, Any] | None,
        budget: TimeBudget | None,
    ) -> None:
        self.budget = budget
        self.task = task
        self.folder = folder
        self.world = world
        self.on_event = on_event if world.is_main else None
        self.save_every = save_every
        self.identity = identity
        self.at = _Progress()
        self.pace = Pace()
        self.interrupt = Interrupt()
        self.saved_at = self.saving_took = 0.0
        self.restored: dict[str, Any] | None = None
        self.counts: list[int] = []
        self.done_before: list[int] = []  # steps before each epoch, and all of them

    def steps(self, resume: bool) -> Steps[Outcome]:
        self._restore(resume)
        task, at = self.task, self.at
        bounded_epochs("epochs", task.num_epochs)
        budget = self.budget
        if budget is None:  # with a time limit alone, there may be a million epochs, which are not listed
            self.counts = [task.steps_in(epoch) for epoch in range(task.num_epochs)]
            self.done_before = [0, *itertools.accumulate(self.counts)]
        elif (at.epoch, at.step) == (0, 0):
            # Only in a new run: a resumed one gets these times from its checkpoint (`_load`).
            (milliseconds,) = agree([int(1000 * budget.elapsed())], self.world)
            budget.used = budget.preparing = milliseconds / 1000
        self._emit(Started(at.epoch, at.step, task.num_epochs, 0.0 if budget is None else budget.seconds))
        with self.interrupt:
            while at.epoch < task.num_epochs and at.stopped is None:
                began = time.perf_counter() - at.seconds
                batches, steps = self._begin_epoch(), task.steps_in(at.epoch)
                while at.step < steps:
                    task.step(self._next(batches))
                    at.step += 1
                    at.seconds = time.perf_counter() - began
                    self._emit_step(steps)
                    yield
                    number = self._check(steps)
                    if number:
                        # After the last step too: an evaluation may take longer than a scheduler waits.
                        self._save()
                        return self._interrupted(number)
                    if budget is not None and budget.is_over:
                        break
                number = self._end_epoch()
                if number:
                    return self._interrupted(number)
        reason = None if at.stopped == TIME_IS_OVER else at.stopped  # a run that used its time ended as planned
        self._emit(Finished(at.epoch, reason))
        return Outcome("finished", 0, reason, at.history.rows())

    def _begin_epoch(self) -> Iterator[Any]:
        """Begin or resume the current epoch; return its remaining batches."""
        task, at = self.task, self.at
        task.begin_epoch(at.epoch)
        if self.restored is not None:
            # begin_epoch has set the schedules but also zeroed the metrics of the unfinished epoch.
            task.load_state_dict(self.restored["task"])
        batches = iter(task.batches(at.epoch, at.step))
        if self.restored is not None:
            # Last, since everything above may draw: the next number must be that of the interrupted run.
            set_rng_state(self.restored["rng"], self.world.device)
            self.restored = None
        self.pace.mark()
        return batches

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches)
        except StopIteration:
            epoch = self.at.epoch
            raise RuntimeError(
                f"batches({epoch}, ...) must reach the {self.task.steps_in(epoch)} steps that steps_in({epoch}) "
                f"promises, but ended after {self.at.step}"
            ) from None

    def _end_epoch(self) -> int:
        """Finish the current epoch; return the signal that arrived meanwhile, or 0."""
        task, at = self.task, self.at
        began = time.perf_counter()
        metrics = dict(task.end_epoch(at.epoch))
        at.stopped = metrics.pop("_stop", None)
        if self.budget is not None and self.budget.is_over:
            at.stopped = TIME_IS_OVER
        records = metrics.pop("_records", {})
        at.seconds += time.perf_counter() - began
        if METRICS in records or "epoch" in metrics:
            raise ValueError(f"the record {METRICS!r} and the metric 'epoch' are reserved for the loop; rename yours")
        row = {"epoch": at.epoch, **metrics}
        row.setdefault("seconds", at.seconds)
        for name, value in {METRICS: row, **records}.items():
            for lost in at.history.append(name, value):
                self._emit(Note(f"epoch {at.epoch + 1}: {lost} and is written as null in {name}.jsonl"))
        ended = at.epoch
        at.epoch, at.step, at.seconds = at.epoch + 1, 0, 0.0
        last = at.epoch >= task.num_epochs or at.stopped is not None
        number, due = agree([self.interrupt.signal, int(self._may_save())], self.world)
        saves = bool(last or number or (due and at.epoch % self.save_every == 0))
        if saves:
            self._save()
        elif self.budget is None:  # otherwise files are written with checkpoints: thousands of epochs may fit in
            on_main(lambda: at.history.write(self.folder), self.world)
        self.pace.ended_epoch()
        try:
            self._emit(EpochEnded(ended, at.history.last()))
        except BaseException:
            # A run that is ended by this callback resumes here. Other ranks do not know and cannot join in saving.
            if not saves and self.world.size == 1:
                self._save()
            raise
        # A signal at the very end changes nothing: the run is complete and saved.
        return 0 if last else number

    def _check(self, steps: int) -> int:
        """Between two steps: raise if a loss is not finite, and return the signal to stop for, or 0."""
        step, world = self.at.step, self.world
        alone, cuda = world.size == 1, world.device.type == "cuda"
        if not alone and cuda and step % _AGREE_EVERY and step != steps:
            return 0
        number = self.interrupt.signal
        budget = self.budget
        # Check before every checkpoint, which follows the end of an epoch and a signal. Looking also waits for the
        # device, without which the host would see too little of the time used.
        every = _LOOK_EVERY if budget is None else _AGREE_EVERY
        look = not (alone and cuda) or step % every == 0 or step == steps or number
        failure = self.task.failed() if look else None
        elapsed = 0.0 if budget is None else budget.elapsed()
        number, bad, milliseconds = agree([number, int(failure is not None), int(1000 * elapsed)], world)
        if budget is not None:
            budget.used = elapsed if alone else milliseconds / 1000  # the same on all ranks, whose schedules follow it
        if bad:
            found = next(item for item in gather_objects(failure, world) if item is not None)
            raise DivergedError(self.at.epoch, found, self.folder)
        return number

    def _may_save(self) -> bool:
        """Whether a checkpoint at the end of this epoch keeps within `MAX_SAVING_SHARE`.

        With large states and short epochs a GPU would wait for the disk. A signal always leads to a checkpoint: only a
        run that is killed or fails may lose more than its latest epoch.
        """
        cost = self.saving_took
        if self.budget is None and cost < FAST_SAVE_SECONDS:
            return True
        return time.perf_counter() - self.saved_at >= min(cost / MAX_SAVING_SHARE, MAX_UNSAVED_SECONDS)

    def _save(self) -> None:
        began = time.perf_counter()
        self._save_now()
        self.saved_at = time.perf_counter()
        self.saving_took = self.saved_at - began
        if self.budget is not None:
            (milliseconds,) = agree([int(1000 * self.saving_took)], self.world)
            self.budget.saving = milliseconds / 1000

    def _save_now(self) -> None:
        at, world = self.at, self.world
        rng = rng_state(world.device)
        if not same_everywhere([value for value in rng.values() if value is not None], world):
            raise RuntimeError(
                "all ranks must have drawn the same random numbers, but their generators differ; draw for the global "
                "batch on every rank, as softcell.nn.stochastic does"
            )
        task_state = dict(self.task.state_dict())
        local = gather_objects(task_state.pop("_local", None), world)
        state = {
            "epoch": at.epoch,
            "step": at.step,
            "seconds": at.seconds,
            "stopped": at.stopped,
            "history": at.history.lines,
            "rng": rng,
            "task": task_state,
            "local": local if at.step > 0 else None,
            "world_size": world.size,
            **({} if self.budget is None else {"budget": self.budget.state_dict()}),
            **({} if self.identity is None else {IDENTITY: self.identity}),
        }

        def write() -> None:
            checkpoint.save(self.folder, state)
            at.history.write(self.folder)

        on_main(write, world)

    def _restore(self, resume: bool) -> None:
        loaded = on_main(lambda: checkpoint.load_latest(self.folder), self.world)
        if loaded is None:
            if resume:
                self._emit(Note(f"{self.folder} has no checkpoint yet: starting from the beginning."))
            return
        if not resume:
            raise UserError(
                f"a new run needs a folder without a checkpoint, but {self.folder} has one. Use --resume to continue "
                f"that run, or another --out."
            )
        if loaded.note:
            self._emit(Note(loaded.note))
        state = loaded.state
        if self.identity is not None:
            for note in check_identity(state, self.identity, self.folder):
                self._emit(Note(note))
        try:
            self._load(state)
        except (UserError, torch.OutOfMemoryError):
            raise
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"the checkpoint in {self.folder} does not fit this run: it may be of another method, space or version "
                f"({type(error).__name__}: {one_line(error)}). Put the run's own checkpoint back, or start a new run."
            ) from error

    def _load(self, state: dict[str, Any]) -> None:
        """Restore the run from the checkpoint `state`."""
        # First, because it adds this rank's part to the state that the task loads.
        self._restore_local(state)
        self.at = _Progress(
            state["epoch"], state["step"], state["seconds"], state["stopped"], History(state["history"])
        )
        if self.budget is not None:
            self.budget.resume(state["budget"])
        on_main(lambda: self.at.history.write(self.folder), self.world)
        self.task.load_state_dict(state["task"])
        set_rng_state(state["rng"], self.world.device)
        # Within an epoch, begin_epoch must be called before the state is loaded once more.
        self.restored = state if self.at.step > 0 else None

    def _restore_local(self, state: dict[str, Any]) -> None:
        """Put this rank's own part back into the task's state."""
        before, now, parts = state["world_size"], self.world.size, state["local"]
        has_parts = parts is not None and parts[0] is not None
        if before != now:
            self._emit(Note(f"the run had {before} processes and now has {now}: results will differ in rounding."))
            if has_parts:
                state["task"]["_local"] = redistributed(parts, self.world.rank)
        elif has_parts:
            state["task"]["_local"] = parts[self.world.rank]

    def _interrupted(self, number: int) -> Outcome:
        at = self.at
        text = (
            f"interrupted by {signals.Signals(number).name} in epoch {at.epoch + 1} after step {at.step}; the state is "
            f"saved in {self.folder}. Resume with the same command and --resume."
        )
        self._emit(Interrupted(number, exit_code(number), at.epoch, at.step, text))
        return Outcome("interrupted", exit_code(number), text, at.history.rows())

    def _emit(self, event: Event) -> None:
        if self.on_event is not None:
            self.on_event(event)

    def _emit_step(self, steps: int) -> None:
        at = self.at
        self.pace.stepped()
        if self.budget is not None:
            unused = max(0.0, self.budget.seconds - self.budget.used)
            self._emit(Stepped(at.epoch, at.step, steps, self.budget.progress, unused))
            return
        total, done = self.done_before[-1], self.done_before[at.epoch] + at.step
        left = self.pace.seconds_left(total - done, len(self.counts) - at.epoch)
        self._emit(Stepped(at.epoch, at.step, steps, done / total, left))
