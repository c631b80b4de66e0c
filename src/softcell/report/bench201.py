"""Searches in NAS-Bench-201 set beside its table: what was found, how it came about, and how well it was ranked.

Accuracy of the found cell on three datasets beside optimum and chance; accuracy of the cell that each epoch would have
derived (IT-NAS, Figure 2); Kendall's tau of the method's indicator per edge (Figures 3, 6-8).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softcell.arch import Genotype
from softcell.arch.notation import from_nb201, to_nb201
from softcell.errors import UserError
from softcell.evaluate.nb201 import COLUMNS, EDGES, OPERATIONS, Accuracies, Nb201Table
from softcell.evaluate.ranking import RANKINGS, Ranking, mean_tau, taus
from softcell.report.curves import curves_svg
from softcell.report.runs import find_runs, is_table, read_run
from softcell.report.stats import Summary, summarise
from softcell.search.history import genotype_of

SPACE = "nb201"


@dataclass(frozen=True)
class Benched:
    """One search: its cell's accuracies, those of each epoch's cell, and its indicator [6][5] where it has one."""

    label: str
    method: str
    seed: int
    genotype: Genotype
    accuracies: Accuracies
    trajectory: tuple[Mapping[str, float], ...]
    indicator: tuple[tuple[float, ...], ...] | None


def bench_runs(table: Nb201Table, paths: Sequence[str | Path]) -> list[Benched]:
    """All finished searches in the folders; one of another space is refused."""
    found = [_benched(table, folder) for folder in find_runs(paths)]
    if not found:
        raise UserError(f"no finished search in {', '.join(map(str, paths))}")
    return found


def _benched(table: Nb201Table, folder: Path) -> Benched:
    run = read_run(folder)
    recipe: Mapping[str, Any] = run.recipe
    if run.kind != "search" or recipe.get("space") != SPACE or not (folder / "genotype.json").is_file():
        raise UserError(
            f"{folder} must be a finished search in space {SPACE}, but it is a {run.kind} run in space "
            f"{recipe.get('space')!r}, {run.status}"
        )
    genotype, cells = Genotype.load(folder), list(run.architecture)
    return Benched(
        str(folder),
        str(recipe["method"]),
        int(recipe["seed"]),
        genotype,
        table.lookup(genotype),
        tuple(_trajectory(table, cells)),
        _indicator(recipe, cells),
    )


def to_dict(run: Benched) -> dict[str, Any]:
    """Plain data, from which `from_dict` makes the same again where the run folder is gone."""
    return {
        "method": run.method,
        "seed": run.seed,
        "architecture": to_nb201(run.genotype),
        "accuracies": dict(run.accuracies),
        "trajectory": [dict(row) for row in run.trajectory],
        "indicator": None if run.indicator is None else [list(row) for row in run.indicator],
    }


def from_dict(table: Nb201Table, label: str, data: Mapping[str, Any]) -> Benched:
    """What `to_dict` gave; the accuracies of the cell are looked up anew."""
    genotype, rows = from_nb201(data["architecture"]), data["indicator"]
    indicator = None if rows is None else tuple(tuple(map(float, row)) for row in rows)
    accuracies, trajectory = table.lookup(genotype), tuple(data["trajectory"])
    return Benched(label, data["method"], data["seed"], genotype, accuracies, trajectory, indicator)


def _trajectory(table: Nb201Table, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Per epoch the accuracies of the cell derived then; of architectures trained one by one the best so far."""
    found: list[dict[str, float]] = []
    best = -math.inf
    for row in rows:
        genotype = genotype_of(row, SPACE)
        score = float(row.get("val_accuracy", math.inf))
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
    """By method, in the order in which they came."""
    found: dict[str, list[Benched]] = {}
    for run in runs:
        found.setdefault(run.method, []).append(run)
    return found


def summaries(runs: Sequence[Benched]) -> dict[str, Summary]:
    """Mean and deviation over runs of each column."""
    return {column: summarise([run.accuracies[column] for run in runs]) for column in COLUMNS}


def accuracy_rows(table: Nb201Table, runs: Sequence[Benched]) -> list[tuple[str, str, dict[str, str]]]:
    """Name, number of runs and `mean ± std` by column: each method, then chance and the optimum."""
    rows = []
    for method, own in groups(runs).items():
        found = summaries(own)
        rows.append((method, str(len(own)), {c: shown(s.mean, s.std) for c, s in found.items()}))
    chance = {column: shown(*values) for column, values in table.chance().items()}
    rows.append(("random cell", f"{len(table):,}", chance))
    rows.append(("optimum", "", {column: shown(value, None) for column, value in table.optimum().items()}))
    return rows


def shown(mean: float, std: float | None) -> str:
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def trajectory_rows(runs: Sequence[Benched], column: str) -> list[dict[str, float]]:
    """Per epoch, from 1, the mean over the runs of each method under its name, and each run's own under its folder."""
    epochs = sorted({row["epoch"] for run in runs for row in run.trajectory})
    found = []
    for epoch in epochs:
        line: dict[str, float] = {"epoch": int(epoch) + 1}
        for method, own in groups(runs).items():
            values = {run.label: row[column] for run in own for row in run.trajectory if row["epoch"] == epoch}
            if values:
                line |= {method: sum(values.values()) / len(values), **values}
        found.append(line)
    return found


def trajectory_svg(runs: Sequence[Benched], column: str) -> str:
    """The means of `trajectory_rows` as a chart."""
    title = f"accuracy of each epoch's cell, {column}, in NAS-Bench-201"
    return curves_svg(trajectory_rows(runs, column), groups(runs), title)


def tau_rows(
    table: Nb201Table, runs: Sequence[Benched], columns: Sequence[str]
) -> list[tuple[str, str, Ranking, list[float]]]:
    """Name, column, ranking and the tau-b of each edge, the mean over the runs that have one."""
    rows = []
    for method, own in groups(runs).items():
        ranked = [run for run in own if run.indicator is not None]
        for column in columns if ranked else ():
            found = [taus(table, run.indicator, run.genotype, column) for run in ranked if run.indicator is not None]
            for ranking in RANKINGS:
                edges = [mean_tau([one[ranking][edge] for one in found]) for edge in range(len(EDGES))]
                rows.append((method, column, ranking, edges))
    return rows
