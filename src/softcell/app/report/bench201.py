"""Searches in NAS-Bench-201 compared with its table.

Accuracy of the found cell on three datasets, compared with optimum and chance; accuracy of the cell derived in each
epoch (IT-NAS, Figure 2); Kendall's tau of the method's indicator per edge (Figures 3, 6-8).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from softcell.app.report.charts import curves_svg
from softcell.app.report.compare import Summary, summarise, texts, varying, what, without_repeats
from softcell.app.report.runs import Run, check_intact, find_runs, is_table, read_runs
from softcell.arch import Genotype
from softcell.arch.notation import from_nb201
from softcell.errors import UserError
from softcell.evaluate.nb201 import (
    COLUMNS,
    EDGES,
    OPERATIONS,
    RANKINGS,
    Accuracies,
    Nb201Table,
    Ranking,
    mean_tau,
    notation,
    taus,
)
from softcell.search.genotypes import genotype_of, was_read
from softcell.settings import short_name

SPACE = "nb201"
RANDOM_CELLS = 10
"""The best of this many random cells is shown next to the found ones."""


@dataclass(frozen=True)
class Benched:
    """One search: its cell's accuracies, those of each epoch's cell, and its indicator [6][5] where it has one.

    settings: all but the seed; only runs with equal settings are averaged.
    """

    label: str
    method: str
    seed: int
    genotype: Genotype
    accuracies: Accuracies
    trajectory: tuple[Mapping[str, float], ...]
    indicator: tuple[tuple[float, ...], ...] | None
    settings: Mapping[str, Any] = field(default_factory=dict)


def bench_runs(
    table: Nb201Table, paths: Sequence[str | Path], notify: Callable[[str], None] = lambda text: None
) -> list[Benched]:
    """All finished searches in the folders, each experiment once; other runs are skipped.

    A path that is itself another kind of run is rejected. notify: receives sentences on skipped runs.
    """
    found, skipped = [], []
    named = set(map(Path, paths))
    folders = find_runs(paths)
    check_intact(folders)
    for run in read_runs(folders):
        if (reason := _unfit(run)) is None:
            found.append(run)
        elif run.folder in named:
            raise UserError(f"{run.folder} must be a finished search in space {SPACE}, but it is {reason}")
        else:
            skipped.append(reason)
    if not found:
        raise UserError(f"no finished search in space {SPACE} in {', '.join(map(str, paths))}")
    if skipped:
        notify(f"skipped: {', '.join(f'{n} × {what}' for what, n in Counter(skipped).items())}")
    kept, repeats = without_repeats(found)
    for note in repeats:
        notify(note)
    return [_benched(table, run) for run in kept]


def _unfit(run: Run) -> str | None:
    """Why a run cannot be used, or None for a finished search in the space."""
    if run.kind != "search":
        return f"a {run.kind} run"
    if run.space != SPACE:
        return f"a search in space {run.space!r}"
    done = run.status == "finished" and (run.folder / "genotype.json").is_file()
    return None if done else f"a search that is {'not complete' if run.status == 'finished' else run.status}"


def _benched(table: Nb201Table, run: Run) -> Benched:
    genotype, cells = Genotype.load(run.folder), list(run.architecture)
    try:
        accuracies, trajectory = table.lookup(genotype), tuple(_trajectory(table, cells))
    except UserError as error:
        raise UserError(f"{run.folder}: {error}") from error
    indicator, seed = _indicator(run.recipe, cells), int(run.recipe["seed"])
    return Benched(str(run.folder), run.method, seed, genotype, accuracies, trajectory, indicator, what(run.recipe))


def to_dict(run: Benched) -> dict[str, Any]:
    """Plain data for `from_dict`, which works without the run folder."""
    return {
        "method": run.method,
        "seed": run.seed,
        "architecture": notation(run.genotype),
        "accuracies": dict(run.accuracies),
        "trajectory": [dict(row) for row in run.trajectory],
        "indicator": None if run.indicator is None else [list(row) for row in run.indicator],
    }


def from_dict(table: Nb201Table, label: str, data: Mapping[str, Any]) -> Benched:
    """The inverse of `to_dict`; the accuracies of the cell are looked up again.

    Settings are not stored: runs of one method must differ only in their seed.
    """
    genotype, rows = from_nb201(data["architecture"]), data["indicator"]
    indicator = None if rows is None else tuple(tuple(map(float, row)) for row in rows)
    recipe = data.get("recipe", {})
    accuracies, trajectory = table.lookup(genotype), tuple(row for row in data["trajectory"] if was_read(row, recipe))
    return Benched(label, data["method"], data["seed"], genotype, accuracies, trajectory, indicator)


def _trajectory(table: Nb201Table, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Per epoch the accuracies of the derived cell; for methods that score single architectures, of the best so far."""
    found: list[dict[str, float]] = []
    best = -math.inf
    for row in rows:
        genotype = genotype_of(row, SPACE)
        score = float(row.get("val_accuracy", row.get("score", math.inf)))  # a zero-cost score is not an accuracy
        if "tables" in row or score > best:
            best = max(best, score)
            accuracies = table.lookup(genotype)
        found.append({"epoch": float(row["epoch"]), **accuracies})
    return found


def _indicator(recipe: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[float, ...], ...] | None:
    """The last probabilities of the method, with operations in the benchmark's order."""
    tables = rows[-1].get("tables") if rows else None
    candidates = recipe.get("space_settings", {}).get("candidates", [])
    if not isinstance(tables, Mapping) or not is_table(tables.get("cell")) or sorted(candidates) != sorted(OPERATIONS):
        return None
    order = [candidates.index(op) for op in OPERATIONS]
    return tuple(tuple(float(row[k]) for k in order) for row in tables["cell"])


def groups(runs: Sequence[Benched]) -> dict[str, list[Benched]]:
    """Groups of runs that differ only by their seed, in the order of `runs`.

    They are named after their method; if several groups share it, the settings that differ are added.
    """
    members: dict[tuple[str, str], list[Benched]] = {}
    for run in runs:
        key = json.dumps(run.settings, sort_keys=True, default=str)
        members.setdefault((run.method, key), []).append(run)
    found: dict[str, list[Benched]] = {}
    for (method, _), own in members.items():
        differing = varying([texts(one[0].settings) for (name, _), one in members.items() if name == method])
        values = texts(own[0].settings)
        extra = ", ".join(f"{short_name(key)}={values.get(key)}" for key in differing)
        found[f"{method} ({extra})" if extra else method] = own
    return found


def summaries(runs: Sequence[Benched]) -> dict[str, Summary]:
    """Mean and deviation over runs of each column."""
    return {column: summarise([run.accuracies[column] for run in runs]) for column in COLUMNS}


def accuracy_rows(table: Nb201Table, runs: Sequence[Benched]) -> list[tuple[str, str, dict[str, str]]]:
    """Name, number of runs and `mean ± std` by column: each group, then chance, the best of ten and the optimum."""
    rows = []
    for name, own in groups(runs).items():
        found = summaries(own)
        rows.append((name, str(len(own)), {c: shown(s.mean, s.std) for c, s in found.items()}))
    chance = {column: shown(*values) for column, values in table.chance().items()}
    rows.append(("random cell", "", chance))
    best = {column: shown(*values) for column, values in table.best_of(RANDOM_CELLS).items()}
    rows.append((f"best of {RANDOM_CELLS} random", "", best))
    rows.append(("optimum", "", {column: shown(value, None) for column, value in table.optimum().items()}))
    return rows


def shown(mean: float, std: float | None) -> str:
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def trajectory_rows(runs: Sequence[Benched], column: str) -> list[dict[str, float]]:
    """Per epoch, from 1, the mean over the runs of each group under its name, and each run's own under its folder.

    A mean is taken over all runs of its group; epochs that some of them lack have no mean.
    """
    epochs = sorted({row["epoch"] for run in runs for row in run.trajectory})
    members, found = groups(runs), []
    for epoch in epochs:
        line: dict[str, float] = {"epoch": int(epoch) + 1}
        for name, own in members.items():
            values = {run.label: row[column] for run in own for row in run.trajectory if row["epoch"] == epoch}
            if len(values) == len(own):
                line[name] = sum(values.values()) / len(values)
            # A folder may have the name of a method.
            line |= {f"{label}/" if label in members else label: value for label, value in values.items()}
        found.append(line)
    return found


def trajectory_notes(runs: Sequence[Benched]) -> list[str]:
    """A sentence for each group whose runs have different epochs, for example because some stopped early."""
    found = []
    for name, own in groups(runs).items():
        epochs = [{row["epoch"] for row in run.trajectory} for run in own]
        lacking = sum(one != set.union(*epochs) for one in epochs)
        if lacking:
            found.append(
                f"{name}: {lacking} of {len(own)} searches lack epochs that others have; means are given for the "
                f"{len(set.intersection(*epochs))} epochs that all of them have"
            )
    return found


def trajectory_svg(runs: Sequence[Benched], column: str) -> str:
    """The means of `trajectory_rows` as a chart, with one standard deviation over the runs of a group as a band."""
    title = f"accuracy of each epoch's cell, {column}, in NAS-Bench-201"
    return curves_svg(trajectory_rows(runs, column), groups(runs), title, trajectory_bands(runs, column))


def trajectory_bands(runs: Sequence[Benched], column: str) -> dict[str, list[tuple[float, float, float]]]:
    """By group with several runs (epoch from 1, mean - std, mean + std) of every epoch that all its runs have."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for name, own in groups(runs).items():
        values: dict[float, list[float]] = {}
        for row in (row for run in own for row in run.trajectory):
            values.setdefault(row["epoch"], []).append(row[column])
        over = {epoch: summarise(several) for epoch, several in sorted(values.items()) if len(several) == len(own) > 1}
        found[name] = [
            (epoch + 1, one.mean - one.std, one.mean + one.std) for epoch, one in over.items() if one.std is not None
        ]
    return {name: band for name, band in found.items() if band}


def tau_rows(
    table: Nb201Table, runs: Sequence[Benched], columns: Sequence[str]
) -> list[tuple[str, str, Ranking, list[float]]]:
    """Name, column, ranking and the tau-b of each edge, the mean over the runs that have one."""
    rows = []
    for name, own in groups(runs).items():
        ranked = [run for run in own if run.indicator is not None]
        for column in columns if ranked else ():
            found = [taus(table, run.indicator, run.genotype, column) for run in ranked if run.indicator is not None]
            for ranking in RANKINGS:
                edges = [mean_tau([one[ranking][edge] for one in found]) for edge in range(len(EDGES))]
                rows.append((name, column, ranking, edges))
    return rows
