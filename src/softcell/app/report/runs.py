"""Reads run folders for the report, the comparison and the live page: tolerant, and without running their code.

A run may be in progress, killed or copied while it was written. Only an unreadable `run.json` is an error; other files
that are missing or damaged are skipped and named in `Run.problems` (`check_intact` is stricter). Plugins that a run
names are not loaded, since reading a folder must not run its code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from softcell.app.report.cells_graph import edge_names
from softcell.arch import Genotype, Rule, Table
from softcell.engine.runfolder import MANIFEST, RunFolder, mismatch
from softcell.errors import UserError
from softcell.evaluate.predictions import PREDICTIONS, read_predictions
from softcell.files import MAX_BYTES_OF_LINES, parse_json, read_text
from softcell.search.genotypes import was_read
from softcell.search.run import FIRST
from softcell.spaces import build_space
from softcell.text import clock

DRAWN = "random draw"
LINES = ("metrics.jsonl", "architecture.jsonl")


@dataclass(frozen=True, slots=True)
class Score:
    """The accuracy of a run's architecture in 0..1 and how it was measured; only equal `measure`s are compared.

    `top5`: the share of images whose class is among the five strongest; None where it was not counted.
    """

    value: float
    measure: str
    top5: float | None = None


RECENT = 5
"""Epochs from which the time of the next ones is estimated."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run folder in memory; `label` is its name among the runs it is shown with."""

    folder: Path
    label: str
    manifest: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    architecture: Sequence[Mapping[str, Any]]
    genotype: Genotype | None
    predictions: Mapping[str, Tensor] | None
    problems: tuple[str, ...]

    @property
    def kind(self) -> str:
        return str(self.manifest["kind"])

    @property
    def status(self) -> str:
        return str(self.manifest["status"])

    @property
    def recipe(self) -> Mapping[str, Any]:
        return mapping(self.manifest.get("recipe"))

    @property
    def results(self) -> Mapping[str, Any]:
        return mapping(self.manifest.get("results"))

    @property
    def seed(self) -> str:
        return str(self.manifest.get("seed"))

    @property
    def data(self) -> str:
        return str(self.recipe.get("data"))

    @property
    def method(self) -> str:
        """The method that found the architecture; `given` where that is not recorded."""
        if self.kind == "search":
            return str(self.recipe.get("method"))
        about = {} if self.genotype is None else self.genotype.about
        found = str(about.get("method", "given"))
        # Random search picks the best of several architectures; a single draw is not a search.
        return DRAWN if found == "random" and "epochs" not in about else found

    @property
    def searched(self) -> Mapping[str, Any]:
        """The settings of the search that found the genotype of a training run, and the epoch it was taken from."""
        about = {} if self.genotype is None or self.kind == "search" else self.genotype.about
        epoch = {"epoch": about["epoch"]} if "epoch" in about else {}
        return {**mapping(about.get("settings")), **epoch}

    @property
    def space(self) -> str:
        if self.kind == "search":
            return str(self.recipe.get("space"))
        return "unknown" if self.genotype is None else self.genotype.space

    @property
    def latest(self) -> Score | None:
        """The latest validation accuracy of a run that has not finished; never compared."""
        found = [row for row in self.metrics if number(row.get("val_accuracy")) is not None]
        if self.status == "finished" or not found:
            return None
        split = found[-1].get("val_split", "validation")
        return _score(found[-1]["val_accuracy"], f"so far, {split} split", found[-1].get("val_top5"))

    @property
    def progress(self) -> str | None:
        """`epoch 3/10, 1:20 left` of a run that has not finished; the rest is estimated from its latest epochs."""
        if self.status == "finished" or not self.metrics:
            return None
        done, epochs = len(self.metrics), number(self.recipe.get("epochs")) or 0
        seconds = [number(row.get("seconds")) or 0.0 for row in self.metrics]
        recent = seconds[-RECENT:]
        left = (epochs - done) * sum(recent) / len(recent) if epochs else 0.0
        if time := number(self.recipe.get("time")):
            left = min(left, time - sum(seconds)) if epochs else time - sum(seconds)
        of = f"/{epochs:.0f}" if epochs else ""
        rest = f", {clock(left)} left" if self.status == "running" and left > 0 else ""
        return f"epoch {done}{of}{rest}"

    @property
    def score(self) -> Score | None:
        """None until the run has finished; of a search the derived network's if measured, else the supernet's."""
        if self.status != "finished":
            return None
        results = self.results
        if self.kind == "train" and self.recipe.get("task") == "retrieve":
            return _score(results.get("recall_at_1"), f"retrieval (Recall@1), {results.get('split', 'unseen classes')}")
        if self.kind == "train":
            measure = f"trained network, {results.get('split', 'test')} split"
            return _score(results.get("accuracy"), measure, results.get("top5"))
        best = next((row["best_val_accuracy"] for row in reversed(self.metrics) if "best_val_accuracy" in row), None)
        split = results.get("val_split", "validation")
        # In runs of earlier versions the two may differ: `val_accuracy` was measured with the running statistics.
        is_recalibrated = results.get("val_accuracy_bn") == results.get("val_accuracy")
        norms = ", BatchNorm recalibrated" if is_recalibrated else ""
        return (
            _score(
                results.get("child_accuracy_bn"),
                f"derived network with the supernet's weights, BatchNorm recalibrated, {split} split",
                results.get("child_top5_bn"),
            )
            or _score(
                results.get("child_accuracy"),
                f"derived network with the supernet's weights, {split} split",
                results.get("child_top5"),
            )
            or _score(best, f"best architecture of the search, {split} split")
            or _score(results.get("val_accuracy"), f"supernet{norms}, {split} split", results.get("val_top5"))
        )


def _score(value: object, measure: str, top5: object = None) -> Score | None:
    found = number(value)
    return None if found is None else Score(found, measure, number(top5))


def number(value: object) -> float | None:
    """`value` if it is a finite number, else None."""
    # A bool is an int too, but `true` in a file is no number.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def mapping(value: object) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The run folders in `paths`: a path that is a run, else all runs below it, sorted."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if (path / MANIFEST).is_file():
            found[path] = None
        elif path.is_dir():
            below = sorted(file.parent for file in path.rglob(MANIFEST) if not is_phase(file.parent))
            if not below:
                raise UserError(f"{path} holds no run (no {MANIFEST} in it or below); pass a run folder")
            found.update(dict.fromkeys(below))
        else:
            raise UserError(f"{path} must be a run folder, but there is no such folder; see what is in runs/")
    return list(found)


def is_phase(folder: Path) -> bool:
    """Whether this folder is the first phase of the run around it."""
    return folder.name == FIRST and (folder.parent / MANIFEST).is_file()


def companions(folder: Path) -> list[Path]:
    """The random architectures trained for comparison in `folder` (`softcell train --random N`)."""
    found = [file.parent for file in folder.glob(f"random-*/{MANIFEST}")]
    # random-10 comes after random-9.
    return sorted(found, key=lambda path: (len(path.name), path.name))


def check_intact(folders: Iterable[Path]) -> None:
    """Raises `UserError` if a file of a finished run was changed afterwards."""
    for folder in folders:
        RunFolder.open(folder, lenient=True).verify(*LINES, "genotype.json", PREDICTIONS)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """All runs, each labelled by the part of its path that the others do not share."""
    return [read_run(folder, label) for folder, label in zip(folders, labels(folders), strict=True)]


def read_run(folder: Path, label: str | None = None) -> Run:
    """All readable parts of a run folder; `UserError` if it is not a run."""
    manifest = RunFolder.open(folder, lenient=True).manifest
    problems: list[str] = []
    known = mapping(manifest["checksums"])

    def intact(name: str) -> bool:
        """Whether a file exists and, in a finished run, is unchanged."""
        found = mismatch(folder, known, name)
        if found is None and name in known and not (folder / name).is_file():
            found = f"{name} is missing; the run had written one"
        problems.extend([] if found is None else [found])
        return found is None

    lines = {name: read_lines(folder, name, problems) if intact(name) else [] for name in LINES}
    metrics = [row for row in lines["metrics.jsonl"] if number(row.get("epoch")) is not None]
    recipe = mapping(manifest["recipe"])
    architecture = [row for row in lines["architecture.jsonl"] if number(row.get("epoch")) is not None]
    architecture = [row for row in architecture if was_read(row, recipe)]
    genotype, predictions = None, None
    if (folder / "genotype.json").is_file() and intact("genotype.json"):
        try:
            genotype = Genotype.load(folder)
        except (UserError, RecursionError) as error:
            problems.append(str(error))
    try:
        predictions = read_predictions(folder) if intact(PREDICTIONS) else None
    except UserError as error:
        problems.append(str(error))
    name = label if label is not None else folder.resolve().name
    return Run(folder, name, manifest, metrics, architecture, genotype, predictions, tuple(problems))


def labels(folders: Sequence[Path]) -> list[str]:
    """Short names of folders: the path below their common parent, or the last part of a single one."""
    paths = [folder.resolve() for folder in folders]
    if len(paths) < 2:
        return [path.name for path in paths]
    # Of the parents, so that every label has at least the name of its folder.
    common = Path(os.path.commonpath([path.parent for path in paths]))
    return [str(path.relative_to(common)) for path in paths]


@dataclass(frozen=True, slots=True)
class Names:
    """The meaning of the rows and columns of a table of probabilities: edges, and their candidates.

    `table` and the `rule` that derives from it are None where the run's space is not known here.
    """

    choices: tuple[str, ...]
    ends: tuple[tuple[int, int] | None, ...]
    candidates: tuple[tuple[str, ...], ...]
    table: Table | None = None
    rule: Rule | None = None


def table_names(run: Run) -> dict[str, Names]:
    """Names for the tables in `architecture.jsonl`; numbers where the run's space is unknown."""
    shapes: dict[str, tuple[int, int]] = {}
    for row in run.architecture:
        for name, table in mapping(row.get("tables")).items():
            if is_table(table):
                shapes[name] = (len(table), max(map(len, table)))
    known: dict[str, Names] = {}
    try:
        layout = build_space(run.space, dict(mapping(run.recipe.get("space_settings")))).layout()
        for found in layout.tables:
            known[found.name] = Names(
                tuple(edge_names(found)),
                tuple((choice.source, choice.target) for choice in found.choices),
                tuple(tuple(choice.candidates) for choice in found.choices),
                found,
                layout.rule if isinstance(layout.rule, Rule) else None,
            )
    except (UserError, TypeError):
        pass  # the space of a plugin that is not loaded, or damaged settings
    result = {}
    for name, (rows, width) in shapes.items():
        names = known.get(name)
        if names is None or len(names.choices) != rows:
            plain = tuple(f"candidate {k + 1}" for k in range(width))
            names = Names(tuple(f"choice {i + 1}" for i in range(rows)), (None,) * rows, (plain,) * rows)
        result[name] = names
    return result


def is_table(value: object) -> bool:
    """Whether `value` is a non-empty list of rows of numbers."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, list) and row and all(number(v) is not None for v in row) for row in value)
    )


def read_lines(folder: Path, name: str, problems: list[str]) -> list[dict[str, Any]]:
    """The JSON objects of a `.jsonl` file; other lines are skipped."""
    try:
        text = read_text(folder / name, most_bytes=MAX_BYTES_OF_LINES, errors="replace")
    except FileNotFoundError:
        return []
    except UserError as error:
        problems.append(str(error))
        return []
    rows, bad = [], 0
    for line in text.splitlines():
        try:
            value = parse_json(line, name)
        except UserError:
            value = None
        if isinstance(value, dict):
            rows.append(value)
        elif line.strip():
            bad += 1
    if bad:
        problems.append(f"{name}: {bad} unreadable {'line' if bad == 1 else 'lines'} skipped")
    return rows
