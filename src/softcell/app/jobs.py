"""Searches and training runs from complete recipes: folder, lock, steps, drawings, report, time.

The command line and `softcell.api` complete recipes and call this; so do `softcell run` and the training of random
architectures. The time of a job is measured on its own first steps, and a search that takes too long can be ended.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from softcell import seeds
from softcell.app.report import curves_svg, heat_svg, to_svg
from softcell.app.report.cells_graph import edge_names
from softcell.app.report.heatmaps import evenly
from softcell.app.report.page import REPORT, write_report
from softcell.arch import Genotype, Layout, Table
from softcell.engine.distributed import is_main_process
from softcell.engine.interleave import drain
from softcell.engine.lock import locked
from softcell.engine.runfolder import MANIFEST
from softcell.engine.session import join_processes
from softcell.engine.task import EpochEnded, Event, OnEvent, Started, Stepped
from softcell.evaluate import TrainRecipe, TrainResult
from softcell.evaluate.train import finished_training, train_steps
from softcell.files import atomic_write_text, read_json_lines
from softcell.methods import METHODS, Method, UntrainedSampler
from softcell.search import SearchRecipe, SearchResult
from softcell.search.run import finished_search, search_steps
from softcell.seeds import Keep, SearchedSeeds, TrainedSeeds
from softcell.settings import build
from softcell.spaces import build_space
from softcell.text import count_of


def has_run(folder: Path) -> bool:
    """Whether a run was started in `folder`."""
    return (folder / MANIFEST).is_file()


def search(
    recipe: SearchRecipe,
    folder: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
) -> SearchResult:
    """Searches, or returns the result if `resume` finds a finished search in `folder`."""
    # A finished run is only read: it needs neither its lock nor the other processes.
    if resume and (done := finished_search(folder, recipe)) is not None:
        draw_search(done)
        return done
    with join_processes(recipe.device, recipe.deterministic) as world, locked(folder, world):
        result = drain(search_steps(recipe, folder, resume=resume, overwrite=overwrite, on_event=on_event))
        draw_search(result, again=True)
    return result


def train(
    genotype: Genotype,
    recipe: TrainRecipe,
    folder: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
    startup: float = 0.0,
    later: Callable[[], float] | None = None,
) -> TrainResult:
    """Trains, or returns the result if `resume` finds a finished training run in `folder`.

    startup: up to this many seconds before the first step are not part of the recipe's time. later: how many seconds
    later than planned the training may end; called between steps.
    """
    if resume and (done := finished_training(folder, genotype, recipe)) is not None:
        draw_training(done)
        return done
    with join_processes(recipe.device, recipe.deterministic) as world, locked(folder, world):
        result = drain(
            train_steps(
                genotype,
                recipe,
                folder,
                resume=resume,
                overwrite=overwrite,
                on_event=on_event,
                startup=startup,
                later=later,
            )
        )
        draw_training(result, again=True)
    return result


def search_seeds(
    recipe: SearchRecipe,
    folder: Path,
    numbers: Sequence[int],
    *,
    keep: Keep = "all",
    at_once: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_event: Callable[[int], OnEvent] | None = None,
) -> SearchedSeeds:
    """`search` with several seeds (`softcell.seeds`), each in its own folder."""
    result = seeds.search_seeds(
        recipe, folder, numbers, keep=keep, at_once=at_once, resume=resume, overwrite=overwrite, on_event=on_event
    )
    for one in result.results.values():
        if one.genotype is not None:
            draw_search(one)
    return result


def train_seeds(
    genotype: Genotype,
    recipe: TrainRecipe,
    folder: Path,
    numbers: Sequence[int],
    *,
    at_once: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_event: Callable[[int], OnEvent] | None = None,
) -> TrainedSeeds:
    """`train` with several seeds (`softcell.seeds`), each in its own folder."""
    result = seeds.train_seeds(
        genotype, recipe, folder, numbers, at_once=at_once, resume=resume, overwrite=overwrite, on_event=on_event
    )
    for one in result.results.values():
        if not one.exit_code:
            draw_training(one)
    return result


CELLS = "genotype.svg"
CURVES = {
    "curves.svg": ("accuracy", ("train_accuracy", "val_accuracy", "child_accuracy", "best_val_accuracy")),
    "loss.svg": ("loss", ("train_loss", "val_loss", "child_loss")),
    "entropy.svg": ("entropy of the architecture in nats", ("entropy",)),
    "temperature.svg": ("temperature", ("temperature",)),
    "cost.svg": ("expected parameters of the architecture", ("expected_parameters",)),
}
MAX_COLUMNS = 16
"""Maximum number of epochs in the heat map of entropies, evenly spaced, including the first and the last."""


def _is_drawn(folder: Path) -> bool:
    """Whether the report, which is written last, is newer than the result: a run may have been killed in between."""
    report = folder / REPORT
    return report.exists() and report.stat().st_mtime_ns >= (folder / MANIFEST).stat().st_mtime_ns


def draw_search(result: SearchResult, *, again: bool = False) -> None:
    """Drawings and report of a search; complete ones are kept unless `again`."""
    if not is_main_process() or (_is_drawn(result.folder) and not again):
        return
    recipe = result.recipe
    title = f"{recipe.method} in space {recipe.space} on {recipe.data}"
    if result.genotype is not None:
        draw_genotype(result.folder, result.genotype, title)
    draw_curves(result.folder, result.metrics, title)
    draw_architecture(result.folder, build_space(recipe.space, recipe.space_settings).layout(), title)
    write_report([result.folder], result.folder / REPORT)


def draw_training(result: TrainResult, *, again: bool = False) -> None:
    """Drawings and report of a training run; complete ones are kept unless `again`."""
    if not is_main_process() or (_is_drawn(result.folder) and not again):
        return
    title = f"{result.genotype.space} network on {result.recipe.data}"
    draw_genotype(result.folder, result.genotype, title)
    draw_curves(result.folder, result.metrics, title)
    write_report([result.folder], result.folder / REPORT)


def draw_genotype(folder: Path, genotype: Genotype, title: str) -> None:
    """Writes `genotype.svg`."""
    atomic_write_text(folder / CELLS, to_svg(genotype, title))


def draw_curves(folder: Path, metrics: Sequence[Mapping[str, Any]], title: str) -> None:
    """Writes a chart per group of metrics that were measured; epochs count from 1.

    Metrics of validation carry the name of their split.
    """
    split = next((row["val_split"] for row in metrics if "val_split" in row), "validation")
    names = {"train": "train", "val": str(split), "child": f"child, {split}", "best": f"best {split}"}
    for file, (what, keys) in CURVES.items():
        present = {key: names.get(key.partition("_")[0], key) for key in keys if any(key in row for row in metrics)}
        if present:
            rows = [
                {"epoch": row["epoch"] + 1, **{name: row[key] for key, name in present.items() if key in row}}
                for row in metrics
            ]
            atomic_write_text(folder / file, curves_svg(rows, present.values(), f"{title}: {what}"))


def draw_architecture(folder: Path, layout: Layout, title: str) -> None:
    """Writes `architecture-<table>.svg`, the weights after the last epoch, for methods that have weights.

    `entropy-<table>.svg` has the entropy of every edge over the epochs (SNAS, Figure 4).
    """
    record = folder / "architecture.jsonl"
    lines = read_json_lines(record) if record.is_file() else []
    tables: dict[str, Any] = lines[-1].get("tables", {}) if lines else {}
    for name, weights in tables.items():
        table = layout.table(name)
        columns = list(dict.fromkeys(op for choice in table.choices for op in choice.candidates))
        rows = edge_names(table)
        svg = heat_svg(_aligned(table, weights, columns), rows, columns, f"{title}: weights of the {name} table")
        atomic_write_text(folder / f"architecture-{name}.svg", svg)
        shown = [lines[i] for i in evenly(len(lines), MAX_COLUMNS)]
        by_epoch = [[_entropy(row) for row in line["tables"][name]] for line in shown]
        svg = heat_svg(
            [list(edge) for edge in zip(*by_epoch, strict=True)],
            rows,
            [f"epoch {line['epoch'] + 1}" for line in shown],
            f"{title}: entropy of the {name} table in nats",
        )
        atomic_write_text(folder / f"entropy-{name}.svg", svg)


def _entropy(row: Sequence[float | None]) -> float:
    """The entropy of one edge in nats; padding is 0 and adds nothing."""
    return -sum(p * math.log(p) for p in row if p)


def _aligned(table: Table, weights: Sequence[Sequence[float]], columns: list[str]) -> list[list[float | None]]:
    """Weights [choices, width] by candidate name, as the candidates of a ragged table differ from row to row."""
    rows = []
    for choice, row in zip(table.choices, weights, strict=True):
        # Rows are padded to the width of the table, so they may be longer than the candidates.
        known = dict(zip(choice.candidates, row, strict=False))
        rows.append([known.get(name) for name in columns])
    return rows


ENOUGH_STEPS, ENOUGH_ENDS = 100, 3
"""A measurement ends early after this number of steps and epochs: on a GPU they take less than a second."""
EVALUATION = 0.3
"""Time of a forward pass relative to a training step, assumed if no epoch ended during the measurement."""


@dataclass(frozen=True, slots=True)
class JobTime:
    """Seconds of the start, per epoch (steps, evaluation, checkpoint), and after the last epoch.

    The start is the time before the first step, plus the extra time of the first epoch: allocation,
    compilation and graph capture.
    """

    startup: float
    epoch: float
    tail: float = 0.0

    def total(self, epochs: int) -> float:
        return self.startup + epochs * self.epoch + self.tail

    def epochs_in(self, seconds: float) -> int:
        """The number of whole epochs that fit into `seconds`; may be 0."""
        return max(0, int((seconds - self.startup - self.tail) / max(self.epoch, 1e-6)))


class _MeasuredError(Exception):
    """Ends a measurement from within an event."""


class _Stopwatch:
    """Times steps and epochs until enough of them, or `seconds`, have passed since the first step.

    Steps of a GPU are asynchronous: only whole epochs are timed exactly, because their metrics are read at the end.
    """

    def __init__(self, seconds: float) -> None:
        self.began = time.perf_counter()
        self.seconds = seconds
        self.first: float | None = None  # end of the first step, which includes allocation and graph capture
        self.last = self.began
        self.steps_seen, self.in_steps = 0, 0.0
        self.in_ends, self.ends = 0.0, list[float]()
        self.steps_per_epoch = 1

    def __call__(self, event: Event) -> None:
        now = time.perf_counter()
        match event:
            case Started():
                self.last = now
            case Stepped():
                self.steps_per_epoch = event.steps
                if self.first is None:
                    self.first = now
                else:
                    self.steps_seen, self.in_steps = self.steps_seen + 1, self.in_steps + now - self.last
                self.last = now
                self._stop_when_measured(now)
            case EpochEnded():
                self.in_ends += now - self.last
                self.ends.append(now)
                self.last = now
                self._stop_when_measured(now)
            case _:
                pass

    def _stop_when_measured(self, now: float) -> None:
        if self.first is None or self.steps_seen < 2:
            return
        if now - self.first >= self.seconds or (self.steps_seen >= ENOUGH_STEPS and len(self.ends) >= ENOUGH_ENDS):
            raise _MeasuredError

    def job_time(self, evaluated: float, tested: float) -> JobTime:
        """`evaluated`, `tested`: batches evaluated after each epoch and after the last, per training batch."""
        assert self.first is not None
        step = self.in_steps / self.steps_seen if self.steps_seen else self.first - self.began
        steps = self.steps_per_epoch * step
        tail = steps * tested * EVALUATION + 0.5
        if len(self.ends) > 1:  # the first epoch includes the start
            epoch = (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)
            return JobTime(max(0.0, self.ends[0] - self.began - epoch), epoch, tail)
        end = self.in_ends if self.ends else steps * evaluated * EVALUATION
        return JobTime(self.first - self.began, steps + end, tail)


def measure_job(
    job: Callable[[Path, OnEvent], Any], scratch: Path, seconds: float, *, evaluated: float, tested: float
) -> JobTime:
    """Runs `job` in a scratch folder for about `seconds` after its first step, then deletes the folder."""
    watch = _Stopwatch(seconds)
    # Left by a measurement that was killed.
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        result = job(scratch, watch)
        if getattr(result, "exit_code", 0):
            raise KeyboardInterrupt  # the job handled the signal itself
    except _MeasuredError:
        pass
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return watch.job_time(evaluated, tested)


SAMPLES = "samples"
"""The setting of a sampler for the number of architectures it proposes."""


class SearchTimeoutError(Exception):
    """A search has exceeded its time; `epochs` of it are done and saved."""

    def __init__(self, epochs: int) -> None:
        super().__init__(epochs)
        self.epochs = epochs


def num_networks(recipe: SearchRecipe) -> int:
    """How many networks a search trains in sequence, each for the recipe's epochs; 1 for a supernet."""
    kind = METHODS.get(recipe.method)
    if issubclass(kind, Method):
        return 1
    layout = build_space(recipe.space, recipe.space_settings).layout()
    settings: Any = build(kind.Settings, recipe.method_settings, f"method {recipe.method}")
    return kind(layout, settings, recipe.seed).num_samples


def describe_length(recipe: SearchRecipe) -> str:
    """`30 epochs`, or `4 architectures of 30 epochs`."""
    epochs = count_of(recipe.epochs, "epoch")
    kind = METHODS.get(recipe.method)
    if issubclass(kind, Method):
        return epochs
    if issubclass(kind, UntrainedSampler):
        return count_of(num_networks(recipe), "untrained network")
    return f"{count_of(num_networks(recipe), 'architecture')} of {epochs}"


def stop_when_late(listener: OnEvent, is_late: Callable[[], bool], recipe: SearchRecipe) -> OnEvent:
    """Forwards events to `listener`; ends a late search after its current epoch, which is saved by then."""
    num_epochs = recipe.epochs * num_networks(recipe)

    def on_event(event: Event) -> None:
        listener(event)
        if isinstance(event, EpochEnded) and event.epoch + 1 < num_epochs and is_late():
            done = event.epoch + 1
            # With an equal recipe the caller would resume the search, only to see it ended here again.
            if shortened(recipe, done) != recipe:
                raise SearchTimeoutError(done)

    return on_event


def shortened(recipe: SearchRecipe, done: int) -> SearchRecipe:
    """The recipe of a search that ends as soon as possible after `done` epochs, counted over all its networks."""
    if issubclass(METHODS.get(recipe.method), Method):
        return replace(recipe, epochs=done)
    if SAMPLES not in recipe.method_settings:
        return recipe  # a sampler from a plugin, whose number of proposals cannot be reduced
    complete = done // recipe.epochs
    settings = {**recipe.method_settings, SAMPLES: max(1, complete)}
    # A network is evaluated after its last epoch, so the first network needs one more epoch.
    epochs = recipe.epochs if complete else min(recipe.epochs, done + 1)
    return replace(recipe, epochs=epochs, method_settings=settings)
