"""One search or training from a complete recipe: its folder, its lock, its steps, its drawings and its report.

The command line and `softcell.api` complete recipes and call this; so do `softcell run` and the training of random
architectures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from softcell.app.report import curves_svg, heat_svg, to_svg
from softcell.app.report.cells_graph import edge_names
from softcell.app.report.heatmaps import evenly
from softcell.app.report.page import REPORT, write_report
from softcell.arch import Genotype, Layout, Table
from softcell.engine.distributed import is_main_process
from softcell.engine.interleave import drain
from softcell.engine.lock import locked
from softcell.engine.runfolder import output_folder
from softcell.engine.session import join_processes
from softcell.engine.task import OnEvent
from softcell.evaluate import TrainRecipe, TrainResult
from softcell.evaluate.train import finished_training, train_steps
from softcell.files import atomic_write_text, read_json_lines
from softcell.recipes import resumed_folder
from softcell.search import SearchRecipe, SearchResult
from softcell.search.run import finished_search, search_steps
from softcell.spaces import build_space


def search(
    recipe: SearchRecipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
) -> SearchResult:
    """Searches, or returns the result if `resume` finds a finished search in `out`."""
    if resume and (done := finished_search(resumed_folder(out), recipe)) is not None:
        draw_search(done)
        return done
    with join_processes(recipe.device, recipe.deterministic) as world:
        folder = output_folder(out, world, recipe.method, recipe.space, recipe.data)
        with locked(folder, world):
            result = drain(search_steps(recipe, folder, resume=resume, overwrite=overwrite, on_event=on_event))
            draw_search(result, again=True)
        return result


def train(
    genotype: Genotype,
    recipe: TrainRecipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
    startup: float = 0.0,
    later: Callable[[], float] | None = None,
) -> TrainResult:
    """Trains, or returns the result if `resume` finds a finished training in `out`.

    startup: up to this many seconds before the first step are not part of the recipe's time. later: how many seconds
    later than planned the training may end, asked between steps.
    """
    if resume and (done := finished_training(resumed_folder(out), genotype, recipe)) is not None:
        return done
    with join_processes(recipe.device, recipe.deterministic) as world:
        folder = output_folder(out, world, "train", genotype.space, recipe.data)
        with locked(folder, world):
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
            if world.is_main:
                draw_training(result)
        return result


CELLS = "genotype.svg"
CURVES = {
    "curves.svg": ("accuracy", ("train_accuracy", "val_accuracy", "child_accuracy", "best_val_accuracy")),
    "loss.svg": ("loss", ("train_loss", "val_loss", "child_loss")),
    "entropy.svg": ("entropy of the architecture in nats", ("entropy",)),
    "temperature.svg": ("temperature", ("temperature",)),
    "cost.svg": ("expected parameters of the architecture", ("expected_parameters",)),
}
MOST_COLUMNS = 16


def draw_search(result: SearchResult, *, again: bool = False) -> None:
    """Drawings and report of a search; those that exist are kept unless `again`."""
    if not is_main_process() or ((result.folder / CELLS).exists() and not again):
        return
    recipe = result.recipe
    title = f"{recipe.method} in space {recipe.space} on {recipe.data}"
    if result.genotype is not None:
        draw_genotype(result.folder, result.genotype, title)
    draw_curves(result.folder, result.metrics, title)
    draw_architecture(result.folder, build_space(recipe.space, recipe.space_settings).layout(), title)
    write_report([result.folder], result.folder / REPORT)


def draw_training(result: TrainResult) -> None:
    """Drawings and report of a training."""
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
        shown = [lines[i] for i in evenly(len(lines), MOST_COLUMNS)]
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
        known = dict(zip(choice.candidates, row, strict=False))
        rows.append([known.get(name) for name in columns])
    return rows
