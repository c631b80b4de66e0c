"""EnTranNAS or EnTranNAS-DST searches that differ only in settings of the method: run, measure, record, print.

For each epoch a row has temperature, accuracies, entropy and, for DST, connections per node, thresholds and the size of
the network that would be derived; at the end parameters and multiply-adds of the evaluation network (20 cells and 36
channels on CIFAR), accuracies of supernet and derived network on the same basis (`studies.gap`), and the seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from softcell.app.report import to_svg
from softcell.arch import Genotype
from softcell.data.catalogue import loaded_once
from softcell.engine import RunFolder
from softcell.files import atomic_write_text
from softcell.search import SearchRecipe, resolve
from softcell.search.genotypes import FILE as ARCHITECTURES
from softcell.search.genotypes import genotype_of
from softcell.settings import assignments, layered
from studies.gap import gap_or_not_measured
from studies.options import recipe_settings, study_parser
from studies.runs import (
    NOT_MEASURED,
    Deadline,
    epochs_of,
    evaluation_cost,
    finished,
    run_searches,
    spread,
    write_record,
)

PER_EPOCH = ("epoch", "seconds", "temperature", "train_accuracy", "val_accuracy", "entropy")
SUMMARY = (
    "parameters",
    "multiply_adds",
    "connections_per_node",
    "mean_threshold",
    "supernet_accuracy",
    "supernet_accuracy_bn",
    "derived_accuracy_bn",
    "gap_bn",
    "seconds",
)
SIZE_EVERY = 5
"""Epochs between two entries of a derived network's size: counting one takes about a second."""


def arms_parser(module: str, doc: str | None, data: str) -> argparse.ArgumentParser:
    """The common options of these studies, which add --arms; data: the default dataset."""
    names = ("seeds", "epochs", "batch_size", "scale", "precision", "engine", "set", "at_once")
    return study_parser(module, doc, *names, one_file=True, data=data)


def recipe_of(method: str, settings: Mapping[str, Any], seed: int, options: argparse.Namespace) -> SearchRecipe:
    given = recipe_settings(options)
    # The derived network is measured only at the end.
    given |= {"method": method, "seed": seed, "child_every": 1000, "method_settings": dict(settings)}
    return resolve(layered(given, assignments(options.set)))


def run_arms(
    module: str, method: str, arms: Mapping[str, Mapping[str, Any]], name: str, options: argparse.Namespace
) -> None:
    """Runs all unfinished searches, interleaved if they share a GPU, and writes and prints the record.

    arms: settings of the method by name of the arm. name: of the record, unless --out names another.
    """
    stem = Path(options.data).stem
    options.out = options.out or Path(f"results/entrannas/{name}-{stem}.json")
    options.runs = options.runs or Path(f"runs/entrannas-{name}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    deadline = Deadline(options.minutes)
    folders = {
        (arm, seed): options.runs / f"{arm.replace('=', '-').replace(',', '-')}-{stem}-{seed}"
        for seed in range(options.seeds)
        for arm in arms
    }
    jobs = [(recipe_of(method, arms[arm], seed, options), folder) for (arm, seed), folder in folders.items()]
    run_searches(jobs, deadline, options.device, options.at_once)
    rows = []
    with loaded_once():
        for (arm, seed), folder in folders.items():
            row = {"arm": arm, "seed": seed, "settings": dict(arms[arm]), **_progress(folder, options)}
            row["result"] = _result(folder, row["curve"][-1], deadline, options) if finished(folder) else NOT_MEASURED
            if finished(folder):
                drawing = options.out.parent / f"{options.out.stem}-{folder.name}.svg"
                title = f"{method} ({arm}) on {options.data}, seed {seed}"
                atomic_write_text(drawing, to_svg(Genotype.load(folder), title))
                row["drawing"] = drawing.name
            rows.append(row)
    summary: dict[str, Any] = {}
    for arm in arms:
        done = [row["result"] for row in rows if row["arm"] == arm and row["result"] != NOT_MEASURED]
        keys = [key for key in SUMMARY if all(isinstance(r.get(key), int | float) for r in done)]
        summary[arm] = {key: spread([float(r[key]) for r in done]) for key in keys} if done else NOT_MEASURED
    write_record(options.out, module, rows=rows, summary=summary)
    _print(f"{method} on {options.data}; both networks with recalibrated BatchNorm", rows, options.out)


def _progress(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The completed epochs, with the size of the derived network for some of them."""
    epochs, file = epochs_of(folder), folder / ARCHITECTURES
    derived = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    curve = []
    for number, epoch in enumerate(epochs):
        row = {key: epoch[key] for key in PER_EPOCH if key in epoch}
        row |= {key: value for key, value in epoch.items() if key.startswith(("threshold_", "connections_"))}
        if number < len(derived) and ((number + 1) % SIZE_EVERY == 0 or number + 1 == len(epochs)):
            genotype = genotype_of(derived[number], "darts")
            row["parameters"] = evaluation_cost(genotype, options.data, options.data_root).parameters
        curve.append(row)
    return {"epochs_done": len(epochs), "curve": curve}


def _result(folder: Path, last: Mapping[str, Any], deadline: Deadline, options: argparse.Namespace) -> dict[str, Any]:
    """The results of one finished search."""
    manifest, genotype = RunFolder.open(folder).manifest, Genotype.load(folder)
    results, cost = manifest["results"], evaluation_cost(genotype, options.data, options.data_root)
    counts = [len(cell.incoming(node)) for cell in genotype.cells.values() for node in cell.targets]
    thresholds = [value for key, value in last.items() if key.startswith("threshold_")]
    return {
        "parameters": cost.parameters,
        "multiply_adds": cost.multiply_adds,
        "connections_per_node": sum(counts) / len(counts),
        **({"mean_threshold": sum(thresholds) / len(thresholds)} if thresholds else {}),
        "supernet_accuracy": results["val_accuracy"],
        "derived_accuracy": results["child_accuracy"],
        **gap_or_not_measured(folder, deadline, options.device, options.data_root),
        "seconds": results["seconds"],
        "split": results["val_split"],
        "genotype": genotype.to_dict(),
        **{key: manifest[key] for key in ("hardware", "versions", "git", "created", "recipe")},
    }


def _print(title: str, rows: list[dict[str, Any]], record: Path) -> None:
    table = Table(title=title)
    for column in ("arm", "seed", "done", "parameters", "MAdds", "per node", "supernet", "derived", "gap", "seconds"):
        table.add_column(column, justify="right", no_wrap=column == "arm")
    for row in rows:
        found = row["result"]
        head = (row["arm"], str(row["seed"]), str(row["epochs_done"]))
        if found == NOT_MEASURED:
            last = row["curve"][-1] if row["curve"] else {}
            table.add_row(*head, f"{last['parameters']:,} so far" if "parameters" in last else NOT_MEASURED)
            continue
        accuracies = [found[key] for key in ("supernet_accuracy_bn", "derived_accuracy_bn", "gap_bn")]
        table.add_row(
            *head,
            f"{found['parameters']:,}",
            f"{found['multiply_adds'] / 1e6:,.0f}M",
            f"{found['connections_per_node']:.2f}",
            *(a if isinstance(a, str) else f"{a:.2%}" for a in accuracies),
            f"{found['seconds']:.0f}",
        )
    console = Console()
    longest = max((len(row["arm"]) for row in rows), default=0)
    console.width = max(console.width, 90 + longest)  # a truncated size is useless
    console.print(table)
    console.print(f"written: {record}")
