"""Searches that resume where they stopped, within a time limit, and the record of a set of them."""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

# Exported again for the other studies.
from softcell.app.reproduce.record import without_folders as without_folders
from softcell.arch import Genotype
from softcell.data import load
from softcell.data.catalogue import loaded_once
from softcell.engine import RunFolder, resolve_device
from softcell.engine.interleave import Running, Steps, drain, interleave
from softcell.engine.manifest import collect, now
from softcell.engine.session import Interrupt
from softcell.engine.task import EpochEnded, Event, Finished, Interrupted, Note, OnEvent, Stepped
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe, stored_training
from softcell.evaluate import resolve as resolve_training
from softcell.evaluate.train import train_steps
from softcell.files import atomic_write_text, read_json
from softcell.search import SearchRecipe, stored_recipe
from softcell.search.run import search_steps
from softcell.spaces.base import evaluation_space
from softcell.spaces.costs import Cost, count_genotype

NOT_MEASURED = "not measured"

T = TypeVar("T")


class Deadline:
    """Asks a run to stop, like Ctrl-C, once `minutes` have passed since it was created; None: never.

    `watching` a run also prints its progress to standard error.
    """

    def __init__(self, minutes: float | None) -> None:
        self._begin = time.monotonic()
        self._end = None if minutes is None else self._begin + 60 * minutes

    def watching(self, name: str) -> OnEvent:
        """What a run called `name` reports to."""

        def on_event(event: Event) -> None:
            if isinstance(event, Stepped) and self.passed:
                # `Interrupt` turns it into a request: every loop saves its state after its step and ends.
                os.kill(os.getpid(), signal.SIGTERM)
            elif isinstance(event, EpochEnded):
                seconds, accuracy = event.metrics["seconds"], event.metrics.get("val_accuracy")
                shown = "" if accuracy is None else f", validation {accuracy:.2%}"
                self.log(f"{name}: epoch {event.epoch + 1} in {seconds:.0f} s{shown}")
            elif isinstance(event, Finished):
                self.log(f"{name}: all epochs are done")
            elif isinstance(event, Interrupted):
                self.log(f"{name}: stopped in epoch {event.epoch + 1}, state saved")
            elif isinstance(event, Note):
                self.log(f"{name}: {event.text}")

        return on_event

    def log(self, text: str) -> None:
        print(f"{time.monotonic() - self._begin:6.0f} s  {text}", file=sys.stderr, flush=True)

    @property
    def passed(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end


def run_or_resume(recipe: SearchRecipe, folder: Path, deadline: Deadline) -> dict[str, Any] | None:
    """Runs or resumes a search in `folder`; returns its manifest once it is finished, otherwise None."""
    drain(search_or_resume(recipe, folder, deadline))
    return RunFolder.open(folder).manifest if finished(folder) else None


def run_searches(
    jobs: Sequence[tuple[SearchRecipe, Path]],
    deadline: Deadline,
    device: str,
    at_once: int | None = None,
    peaks: dict[Path, PeakMemory] | None = None,
    others: int = 0,
) -> None:
    """Runs or resumes all unfinished searches until they are finished or the time is up.

    peaks: receives the GPU memory of each search by its folder; on a CPU it stays empty. others: runs of other commands
    on the same device.
    """
    for recipe, folder in jobs:
        matching_recipe(recipe, folder)  # all before the first, so that runs without time left are also checked
    where = resolve_device(device)
    starts: list[Callable[[], Running[Any]]] = []
    sharing = Sharing(others)
    for recipe, folder in jobs:
        start = partial(search_or_resume, recipe, folder, deadline, sharing)
        if peaks is not None and where.type == "cuda":
            peaks[folder] = PeakMemory(partial(_allocated_on, where))
            start = partial(in_turns, start, peaks[folder])
        starts.append(start)
    run_interleaved(starts, device, at_once)


SHARING = "sharing.json"
"""In the folder of a run: the number of runs on its device by epoch, itself included."""


class Sharing:
    """Counts the runs that share a device, and records the number in the folder of each run after every epoch.

    The number changes as runs start and end, and a resumed run may have other neighbours than before.
    """

    def __init__(self, others: int = 0) -> None:
        """others: runs that are not counted here, because other commands started them."""
        self._active = others

    @contextmanager
    def run(self, folder: Path, on_event: OnEvent) -> Iterator[OnEvent]:
        """Within this context the run in `folder` is one of those that are counted; it reports to the result."""

        def record(event: Event) -> None:
            if isinstance(event, EpochEnded):
                counts = _sharing(folder) | {str(event.epoch): self._active}
                atomic_write_text(folder / SHARING, json.dumps(counts) + "\n")
            on_event(event)

        self._active += 1
        try:
            yield record
        finally:
            self._active -= 1


def sharing_of(folder: Path, num_epochs: int) -> list[int] | None:
    """The number of runs on the device by epoch; None unless it was recorded for all of `num_epochs` epochs."""
    counts = _sharing(folder)
    epochs = [str(epoch) for epoch in range(num_epochs)]
    return [counts[epoch] for epoch in epochs] if epochs and counts.keys() >= set(epochs) else None


def _sharing(folder: Path) -> dict[str, int]:
    file = folder / SHARING
    return dict(read_json(file)) if file.is_file() else {}


class PeakMemory:
    """The most memory that one of several interleaved runs had allocated, without that of the others: `peak`, in bytes.

    Used as a context around every turn of the run. Runs take turns in one thread and the allocator counts on the host,
    so what changes within a turn belongs to its run.

    allocated: returns the bytes that are allocated and the most since the last call with `reset=True`.
    """

    def __init__(self, allocated: Callable[[bool], tuple[int, int]]) -> None:
        self._allocated = allocated
        self._own = self._before = self.peak = 0

    def __enter__(self) -> None:
        self._before, _ = self._allocated(True)

    def __exit__(self, *raised: object) -> None:
        now, most = self._allocated(False)
        self.peak = max(self.peak, self._own + most - self._before)
        self._own += now - self._before


def _allocated_on(device: torch.device, reset: bool) -> tuple[int, int]:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    # `torch.cuda.memory_allocated` makes a flat dictionary of all counters each time, which takes longer.
    counters = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return int(counters["current"]), int(counters["peak"])


def in_turns(start: Callable[[], Running[T]], turn: AbstractContextManager[None]) -> Running[T]:
    """A run with `turn` entered around each of its turns."""
    running = start()
    advance: Callable[[], Steps[Any]] = partial(next, running)
    while True:
        try:
            with turn:
                steps = advance()
        except StopIteration as stop:
            result: T = stop.value
            return result
        try:
            advance = partial(running.send, (yield _interleaved_steps(steps, turn)))
        except BaseException as error:  # of a step: the run decides what becomes of it
            advance = partial(running.throw, error)


def _interleaved_steps(steps: Steps[T], turn: AbstractContextManager[None]) -> Steps[T]:
    while True:
        try:
            with turn:
                next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
        yield


def run_interleaved(starts: Sequence[Callable[[], Running[Any]]], device: str, at_once: int | None = None) -> None:
    """Interleaves generators. at_once: how many share the device; None: all on a GPU, otherwise one."""
    where = resolve_device(device)
    with Interrupt(), loaded_once():
        found = interleave(starts, where, at_once or (len(starts) if where.type == "cuda" else 1))
    # Only now: the other runs have been completed in spite of it.
    for error in found:
        if isinstance(error, Exception):
            raise error


def finished(folder: Path) -> bool:
    return (folder / "run.json").is_file() and RunFolder.open(folder).manifest["status"] == "finished"


def matching_recipe(recipe: SearchRecipe, folder: Path) -> SearchRecipe:
    """The recipe that the search in `folder` was started with, if any; it must equal `recipe`."""
    if not (folder / "run.json").is_file():
        return recipe
    # The run has recorded the number that 0 stood for, which would count as a different setting.
    return stored_recipe(folder, {k: v for k, v in recipe.to_dict().items() if k != "threads"})


def search_or_resume(
    recipe: SearchRecipe, folder: Path, deadline: Deadline, sharing: Sharing | None = None
) -> Running[None]:
    """Runs or resumes a search."""
    begun, recipe = (folder / "run.json").is_file(), matching_recipe(recipe, folder)
    if not finished(folder) and not deadline.passed:
        with (sharing or Sharing()).run(folder, deadline.watching(folder.name)) as on_event:
            yield from search_steps(recipe, folder, resume=begun, on_event=on_event)


def search_and_train(
    recipe: SearchRecipe, folder: Path, place: Path, given: Mapping[str, Any], deadline: Deadline
) -> Running[None]:
    """A search in `folder` and, with the settings `given`, the training of its result in `place`."""
    yield from search_or_resume(recipe, folder, deadline)
    if finished(folder):
        yield from trained(Genotype.load(folder), place, given, deadline, folder.name)


def matching_training(place: Path, given: Mapping[str, Any]) -> tuple[Genotype, TrainRecipe] | None:
    """The architecture and recipe trained in `place`, or None; conflicting settings are rejected."""
    return stored_training(place, given) if (place / "run.json").is_file() else None


def trained(genotype: Genotype, place: Path, given: Mapping[str, Any], deadline: Deadline, name: str) -> Running[None]:
    """Trains an architecture, or resumes its training, in `place`, with the settings `given`."""
    begun = matching_training(place, given)
    # The recipe of the first start is kept; another recipe or architecture in the same place is rejected.
    kept, how = begun or (genotype, resolve_training(genotype, dict(given)))
    if (kept.space, kept.cells) != (genotype.space, genotype.cells):
        raise UserError(f"{place} holds the training of another architecture; take another folder by --runs")
    if finished(place) or deadline.passed:
        return
    resumed = begun is not None
    yield from train_steps(genotype, how, place, resume=resumed, on_event=deadline.watching(f"{name}, trained"))


def entry(main: Callable[[], None]) -> None:
    """Runs a study; a wrong argument ends it with one line and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def training_results(place: Path, kept: Sequence[str]) -> dict[str, Any] | str:
    """The recorded results of a finished training run, with its recipe and device; otherwise 'not measured'."""
    if not finished(place):
        return NOT_MEASURED
    manifest = RunFolder.open(place).manifest
    about = {key: manifest[key] for key in ("recipe", "hardware", "versions")}
    return {**{key: manifest["results"][key] for key in kept}, **about}


def epochs_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the completed epochs."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def evaluation_cost(genotype: Genotype, data: str, data_root: str | None) -> Cost:
    """Parameters and multiply-adds of the network that would be trained: 20 cells and 36 channels on CIFAR."""
    dataset = load(data, data_root)
    return count_genotype(evaluation_space(genotype.space, data), genotype, dataset.shape, dataset.num_classes)


def spread(values: list[float]) -> dict[str, float | int | None]:
    """n, mean and standard deviation (None for a single value)."""
    return {
        "n": len(values),
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
    }


def write_record(path: Path, module: str, **content: Any) -> None:
    """A record with date, versions, hardware, commit and the command that produces it; folders are called DIR."""
    command = ["python", "-m", module, *sys.argv[1:]]
    record = {"date": now(), **collect(), "command": command, **content}
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps(without_folders(record), indent=2) + "\n")


def print_arms(title: str, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], record: Path) -> None:
    """Searches and their training runs, arm by arm."""
    table = Table(title=title)
    for column in ("arm", "epochs done", "search, validation", "trained, test"):
        table.add_column(column, justify="right")
    for arm, found in summary.items():
        values = (found[key] for key in ("search_accuracy", "test_accuracy"))
        done = ", ".join("+".join(map(str, row["epochs_done"])) for row in rows if row["arm"] == arm)
        table.add_row(arm, done, *(v if isinstance(v, str) else f"{v['mean']:.2%} (n={v['n']})" for v in values))
    console = Console()
    console.print(table)
    console.print(f"written: {record}")
