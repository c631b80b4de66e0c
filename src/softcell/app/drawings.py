"""The pictures of a run folder: the cells, the curves and the architecture's weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from softcell.app.report import curves_svg, heat_svg, to_svg
from softcell.arch import Genotype, Layout, Table
from softcell.engine.files import atomic_write_text
from softcell.reading import read_json_lines

CELLS = "genotype.svg"
CURVES = {
    "curves.svg": ("accuracy", ("train_accuracy", "val_accuracy", "child_accuracy", "best_val_accuracy")),
    "loss.svg": ("loss", ("train_loss", "val_loss", "child_loss")),
    "entropy.svg": ("entropy of the architecture in nats", ("entropy",)),
    "temperature.svg": ("temperature", ("temperature",)),
    "cost.svg": ("parameters of the candidates that are expected to be picked", ("expected_parameters",)),
}
MOST_COLUMNS = 16


def draw_genotype(folder: Path, genotype: Genotype, title: str) -> None:
    """Writes `genotype.svg`."""
    atomic_write_text(folder / CELLS, to_svg(genotype, title))


def draw_curves(folder: Path, metrics: Sequence[Mapping[str, Any]], title: str) -> None:
    """Writes a chart per group of metrics; those that were never measured are left out.

    Metrics of validation carry the name of their split in the chart; epochs count from 1, as they do on the screen.
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
    """Writes `architecture-<table>.svg` for the weights after the last epoch, where the method has any.

    Beside each an `entropy-<table>.svg`: the entropy of every edge over the epochs (SNAS, Figure 4).
    """
    record = folder / "architecture.jsonl"
    lines = read_json_lines(record) if record.is_file() else []
    tables: dict[str, Any] = lines[-1].get("tables", {}) if lines else {}
    for name, weights in tables.items():
        table = layout.table(name)
        columns = list(dict.fromkeys(op for choice in table.choices for op in choice.candidates))
        rows = [f"{choice.source}→{choice.target}" for choice in table.choices]
        svg = heat_svg(_aligned(table, weights, columns), rows, columns, f"{title}: weights of the {name} table")
        atomic_write_text(folder / f"architecture-{name}.svg", svg)
        shown = [lines[i] for i in _spread(len(lines))]
        by_epoch = [[_entropy(row) for row in line["tables"][name]] for line in shown]
        svg = heat_svg(
            [list(edge) for edge in zip(*by_epoch, strict=True)],
            rows,
            [f"epoch {line['epoch'] + 1}" for line in shown],
            f"{title}: entropy of the {name} table in nats",
        )
        atomic_write_text(folder / f"entropy-{name}.svg", svg)


def _spread(count: int) -> list[int]:
    """At most `MOST_COLUMNS` of `count` positions, evenly spread, first and last among them."""
    if count <= MOST_COLUMNS:
        return list(range(count))
    return [round(i * (count - 1) / (MOST_COLUMNS - 1)) for i in range(MOST_COLUMNS)]


def _entropy(row: Sequence[float | None]) -> float:
    """In nats, of one edge; padding is 0 and adds nothing."""
    return -sum(p * math.log(p) for p in row if p)


def _aligned(table: Table, weights: Sequence[Sequence[float]], columns: list[str]) -> list[list[float | None]]:
    """Weights [choices, width] by candidate name, as the candidates of a ragged table differ from row to row."""
    rows = []
    for choice, row in zip(table.choices, weights, strict=True):
        known = dict(zip(choice.candidates, row, strict=False))
        rows.append([known.get(name) for name in columns])
    return rows
