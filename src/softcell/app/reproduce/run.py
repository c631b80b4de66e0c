"""Running a plan: what is unfinished, stage by stage, several runs at a time, until it is done or time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from softcell.app.jobs import JobTime, has_run, measure_job
from softcell.app.reproduce.plan import STAGES, Job, Plan
from softcell.arch import Genotype, empty_cells
from softcell.data.catalogue import loaded_once
from softcell.engine import RunFolder, resolve_device
from softcell.engine.interleave import Running, drain, interleave
from softcell.engine.lock import locked
from softcell.engine.manifest import hardware
from softcell.engine.session import Interrupt, exit_code
from softcell.engine.task import EpochEnded, Event, Finished, Note, OnEvent, Started, Stepped
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe
from softcell.evaluate.teacher import TeacherRecipe, teacher_steps
from softcell.evaluate.train import train_steps
from softcell.files import read_json_lines
from softcell.search import SearchRecipe
from softcell.search.run import search_steps
from softcell.settings import build, flat, to_dict
from softcell.spaces import build_space
from softcell.text import clock, count_of, percent

AnyRecipe = SearchRecipe | TrainRecipe | TeacherRecipe
PLACES = ("data_root", "device", "threads", "precision", "engine", "guide.teacher", "plugins")
"""Settings that may differ when a run is resumed: where it runs, and what was `auto` before it started."""
MEASURED_SECONDS = 2.0
LINE_EVERY = 20.0
"""Seconds between two lines about epochs."""


class _StoppedError(Exception):
    """Ends a run that has made all its epochs and is still selecting its architecture, which reads no signals."""


@dataclass(slots=True)
class Ended:
    """How a call of `run_plan` ended: errors by title of the run, whether time was up, the code of a signal."""

    errors: dict[str, Exception] = field(default_factory=dict)
    out_of_time: bool = False
    exit_code: int = 0


def status(folder: Path) -> str:
    """`finished`, `interrupted`, `failed`, `running` or `not started`."""
    return str(RunFolder.open(folder).manifest["status"]) if has_run(folder) else "not started"


def is_finished(folder: Path) -> bool:
    return status(folder) == "finished"


def untrainable(plan: Plan, job: Job) -> str | None:
    """Why the network of a finished search cannot be trained; None otherwise."""
    if job.found is None or not is_finished(plan.folder / job.found):
        return None
    genotype = plan.genotype(job)
    empty = empty_cells(genotype, build_space(genotype.space).layout())
    return f"the {' and '.join(empty)} cell is empty: all its paths are `none`" if empty else None


def _is_ready(plan: Plan, job: Job) -> bool:
    """Whether the runs that this one needs are finished."""
    if job.kind == "search" and job.settings.get("guide"):
        return is_finished(plan.folder_of(plan.teacher()))
    return job.found is None or is_finished(plan.folder / job.found)


def resumed(recipe: AnyRecipe, folder: Path) -> AnyRecipe:
    """The recipe that the run in `folder` was started with, in the places of `recipe`; another one is rejected."""
    if not has_run(folder):
        return recipe
    stored = build(type(recipe), RunFolder.open(folder).manifest["recipe"], f"{folder}: recipe")
    was, now = flat(to_dict(stored)), flat(to_dict(recipe))
    other = sorted(key for key in {*was, *now} if key not in PLACES and was.get(key) != now.get(key))
    if other:
        changes = ", ".join(f"{key}: {was.get(key)} -> {now.get(key)}" for key in other)
        raise UserError(
            f"{folder} belongs to a different plan ({changes}); choose another folder with --out, or remove this one"
        )
    kept: dict[str, Any] = {"data_root": recipe.data_root, "device": recipe.device}
    if isinstance(recipe, SearchRecipe):
        kept["guide"] = recipe.guide
    return replace(stored, **kept)


def _check_network(genotype: Genotype, folder: Path) -> None:
    """Raises if the run in `folder` trains another architecture."""
    stored = Genotype.from_dict(RunFolder.open(folder).manifest["results"]["genotype"], f"{folder}: genotype")
    if (stored.space, stored.cells) != (genotype.space, genotype.cells):
        raise UserError(
            f"{folder} trains a different architecture from the one that was found or drawn; remove the folder, or "
            "choose another one with --out"
        )


def steps_of(plan: Plan, job: Job, folder: Path, on_event: OnEvent) -> Running[Any]:
    """Runs a job in `folder`, or the rest of it."""
    recipe, resume = resumed(plan.recipe(job), folder), has_run(folder)
    if job.kind == "train" and resume:
        _check_network(plan.genotype(job), folder)
    if isinstance(recipe, SearchRecipe):
        return (yield from search_steps(recipe, folder, resume=resume, on_event=on_event))
    if isinstance(recipe, TeacherRecipe):
        return (yield from teacher_steps(recipe, folder, resume=resume, on_event=on_event))
    return (yield from train_steps(plan.genotype(job), recipe, folder, resume=resume, on_event=on_event))


def run_plan(
    plan: Plan,
    *,
    rows: set[str] | None = None,
    minutes: float | None = None,
    at_once: int = 1,
    notify: Callable[[str], None] = print,
) -> Ended:
    """Runs or resumes all unfinished runs of the chosen rows; None for all rows.

    Every run has its own folder and can be stopped at any step. `minutes` stops all of them in time; the same call
    continues later, on another machine too if the folder is copied there.

    Example:
        >>> from softcell.app.reproduce import make_plan, run_plan
        >>> ended = run_plan(make_plan("nos", "1", small=True), minutes=0)  # no time: nothing is run
        >>> ended.out_of_time, ended.errors
        (True, {})
    """
    began, ended, refused = time.monotonic(), Ended(), list[UserError]()
    wanted = [job for job in plan.jobs if rows is None or rows & {*job.rows}]
    for job in wanted:
        if has_run(plan.folder_of(job)):  # before the first run starts: a run of another recipe may be the last in line
            resumed(plan.recipe(job), plan.folder_of(job))
    device = resolve_device(plan.device)
    with locked(plan.folder), Interrupt() as interrupt, loaded_once():

        def late() -> bool:
            return minutes is not None and time.monotonic() - began >= 60 * minutes

        def run(job: Job) -> Generator[Any, Any, None]:
            if interrupt.signal or late() or not _is_ready(plan, job) or untrainable(plan, job):
                return
            began_run, started = time.monotonic(), list[Job]()
            try:
                yield from steps_of(plan, job, plan.folder_of(job), _watch(job, started, interrupt, late, notify))
            except _StoppedError:
                RunFolder.open(plan.folder_of(job)).finish("interrupted")  # its checkpoints and rounds are saved
                return
            except UserError as error:
                if not started:  # wrong settings or missing data, which the other runs have too
                    refused.append(error)
                    interrupt.request()
                raise
            if is_finished(plan.folder_of(job)):
                notify(f"{job.title}: finished in {clock(time.monotonic() - began_run)}{_result(plan.folder_of(job))}")

        for stage in sorted({STAGES[job.kind] for job in wanted}):
            left = [job for job in wanted if STAGES[job.kind] == stage and not is_finished(plan.folder_of(job))]
            for job, error in zip(left, interleave([partial(run, job) for job in left], device, at_once), strict=True):
                if refused:
                    raise refused[0]
                if isinstance(error, Exception):
                    notify(f"{job.title}: failed: {error}")
                    ended.errors[job.title] = error
        ended.out_of_time = late() and any(not is_finished(plan.folder_of(job)) for job in wanted)
        ended.exit_code = exit_code(interrupt.signal) if interrupt.signal and not late() else 0
    return ended


def _watch(
    job: Job, started: list[Job], interrupt: Interrupt, late: Callable[[], bool], notify: Callable[[str], None]
) -> OnEvent:
    """Stops a run when time is up, and prints its progress. started: gets the job once it has begun."""
    last, epochs, finished = [time.monotonic()], [0], list[Event]()

    def on_event(event: Event) -> None:
        if isinstance(event, Started):
            epochs[0] = event.num_epochs
            started.append(job)
            again = f", from epoch {event.epoch + 1}, step {event.step}" if event.epoch or event.step else ""
            notify(f"{job.title}: {'resumed' if again else 'started'}, {count_of(event.num_epochs, 'epoch')}{again}")
        elif isinstance(event, Stepped) and late():
            # Stops all runs that share the process, and each saves its state.
            interrupt.request()
        elif isinstance(event, Finished):
            finished.append(event)
        elif isinstance(event, Note):
            if finished and (late() or interrupt.signal):
                raise _StoppedError
            notify(f"{job.title}: {event.text}")
        elif isinstance(event, EpochEnded) and time.monotonic() - last[0] >= LINE_EVERY:
            last[0] = time.monotonic()
            accuracy = event.metrics.get("val_accuracy")
            shown = "" if accuracy is None else f", validation {percent(accuracy)}"
            notify(f"{job.title}: epoch {event.epoch + 1} of {epochs[0]}{shown}")

    return on_event


def _result(folder: Path) -> str:
    results = RunFolder.open(folder).manifest["results"]
    for key, name in (("recall_at_1", "Recall@1"), ("accuracy", "test accuracy"), ("val_accuracy", "validation")):
        if results.get(key) is not None:
            return f", {name} {percent(results[key])}"
    return ""


def epochs_done(folder: Path) -> list[dict[str, Any]]:
    """The metrics of finished epochs, those of a first phase included."""
    files = [folder / "phase-1" / "metrics.jsonl", folder / "metrics.jsonl"]
    return [row for file in files if file.is_file() for row in read_json_lines(file)]


def num_epochs(recipe: AnyRecipe) -> int:
    """All epochs of a run: both phases of a search, all networks of random search."""
    if isinstance(recipe, SearchRecipe):
        return recipe.epochs * int(recipe.method_settings.get("samples", 1)) + recipe.pretrain.epochs
    return recipe.epochs


def kind_of(job: Job) -> str:
    """Runs of one kind take the same time per epoch: the same search, or networks trained with the same recipe."""
    return f"search {job.network}" if job.kind == "search" else f"{job.kind} {job.folder.parts[1]}"


def measured_times(
    plan: Plan, jobs: Sequence[Job], measure: bool, notify: Callable[[str], None] = print
) -> dict[str, JobTime]:
    """The time of each kind of run on this device: of runs in the folder, else measured on a few steps.

    measure: False skips kinds without a finished epoch on this device. Training is measured on the first network of
    their kind, or on a random one.
    """
    known: dict[str, JobTime] = {}
    here = hardware()
    for job in plan.jobs:
        rows = epochs_done(plan.folder_of(job))
        if rows and RunFolder.open(plan.folder_of(job)).manifest["hardware"] == here:
            # The metrics have the seconds of epochs only, so the start counts as 0.
            known.setdefault(kind_of(job), JobTime(0.0, sum(row["seconds"] for row in rows) / len(rows)))
    for one in jobs if measure else ():
        job = plan.stand_in(one)
        if kind_of(job) in known or not _is_ready(plan, job):
            continue
        notify(f"measuring {kind_of(job)} ...")
        recipe = plan.recipe(job)
        split = recipe.split if isinstance(recipe, SearchRecipe) else {}
        evaluated = float(split.get("held", split.get("validation", 0.0))) / float(split.get("weights", 1.0))

        def run(folder: Path, watch: OnEvent, job: Job = job) -> Any:
            return drain(steps_of(plan, job, folder, watch))

        tested = 0.0 if job.kind == "search" else 0.2  # CIFAR has a test image for every five of training
        with TemporaryDirectory(prefix="softcell-") as scratch:
            known[kind_of(job)] = measure_job(
                run, Path(scratch) / "run", MEASURED_SECONDS, evaluated=evaluated, tested=tested
            )
    return known
