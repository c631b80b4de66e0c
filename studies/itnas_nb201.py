"""`python -m studies.itnas_nb201`: NAS-Bench-201 searches by several methods in one setting, looked up.

Every method runs `softcell search --seeds K` (on a GPU the seeds side by side), 50 epochs on CIFAR-10 with the same
supernet, batch size and weight optimiser; what is found is looked up in the table of trained architectures. Stop it at
any time (or with --minutes); the same command goes on. What is unfinished is recorded as not measured.

python -m studies.itnas_nb201 --data-root DIR --table nb201_200epochs.csv.gz
python -m studies.itnas_nb201 --data-root DIR --table FILE --minutes 25 --methods itnas --seeds 3
python -m studies.itnas_nb201 --data digits --scale small --epochs 1 --seeds 2 --table FILE   # a rehearsal
"""

from __future__ import annotations

import argparse
import csv
import gzip
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from softcell.api import search_seeds_with, seeds_recipe
from softcell.arch import Genotype, notation
from softcell.engine import RunFolder
from softcell.errors import UserError
from softcell.search import resolve
from softcell.search.several import SEEDS
from studies.runs import NOT_MEASURED, Deadline, epochs_of, spread, write_record

METHODS = ("itnas", "snas", "darts", "entrannas")
SHARED = ("batch_size", "weights", "epochs", "split", "drop_path", "child_every", "resource")
"""What all methods take from IT-NAS's recipe, so that they differ in method and in nothing else."""
PUBLISHED = {"itnas": "93.65 ± 0.04", "snas": "92.77 ± 0.83", "darts": "54.30"}
"""CIFAR-10 test accuracy as the IT-NAS paper prints it; never ours."""


def recipe_of(method: str, options: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = {
        "space": "nb201",
        "data": options.data,
        "data_root": options.data_root,
        "scale": options.scale,
        "epochs": options.epochs,
        "device": options.device,
        "precision": options.precision,
        "engine": options.engine,
    }
    given = {key: value for key, value in given.items() if value is not None}
    same = resolve({**given, "method": "itnas"}).to_dict()
    return {**given, **{key: same[key] for key in SHARED}, "method": method}


def read_table(path: Path) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Architecture string to its accuracies, and the names of the accuracy columns."""
    if not path.is_file():
        raise UserError(f"--table must name the NAS-Bench-201 table, but there is no file {path}")
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or ()
        columns = [name for name in names if name.endswith(("_valid", "_test"))]
        key = next((name for name in names if name.startswith("arch")), None)
        if key is None or not columns:
            raise UserError(f"{path}: a table needs an architecture column and accuracies, got {list(names)}")
        return {row[key]: {name: float(row[name]) for name in columns} for row in reader}, columns


def carry_on(method: str, folder: Path, options: argparse.Namespace, deadline: Deadline) -> None:
    """Runs what is left of a method's seeds; an interruption leaves them resumable."""
    resume = (folder / SEEDS).is_file()
    given = {} if resume else recipe_of(method, options)
    seeds, recipe, folder = seeds_recipe(given, seeds=options.seeds, out=folder, resume=resume)
    search_seeds_with(recipe, folder, seeds, resume=resume, on_event=lambda seed: deadline)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.itnas_nb201", description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, required=True, help="the NAS-Bench-201 table, .csv or .csv.gz")
    parser.add_argument("--data", default="cifar10", help="dataset")
    parser.add_argument("--data-root", help="where named data lie")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="which searches, in order")
    parser.add_argument("--seeds", type=int, default=3, help="searches per method")
    parser.add_argument("--epochs", type=int, help="another number than the recipe's 50")
    parser.add_argument("--scale", help="small or paper; by default as suits the data")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--precision", help="float32 or bfloat16")
    parser.add_argument("--engine", help="auto, eager or graph")
    parser.add_argument("--minutes", type=float, help="stop after so long; the same command goes on")
    parser.add_argument("--runs", type=Path, default=Path("runs/nb201-evidence"), help="where the searches lie")
    parser.add_argument("--out", type=Path, default=Path("results/itnas"), help="where the record goes")
    options = parser.parse_args()
    table, columns = read_table(options.table)
    deadline = Deadline(options.minutes)
    rows: list[dict[str, Any]] = []
    for method in options.methods:
        folder = options.runs / f"{method}-{Path(options.data).stem}"
        if not deadline.passed:
            carry_on(method, folder, options, deadline)
        rows += [measured(method, seed, folder / f"seed-{seed}", table) for seed in range(options.seeds)]
    summary: dict[str, Any] = {}
    for method in options.methods:
        done = [row["accuracies"] for row in rows if row["method"] == method and row["accuracies"] != NOT_MEASURED]
        summary[method] = {name: spread([d[name] for d in done]) for name in columns} if done else NOT_MEASURED
    best = {name: max(entry[name] for entry in table.values()) for name in columns}
    record = options.out / f"nb201-{Path(options.data).stem}.json"
    write_record(record, "studies.itnas_nb201", rows=rows, summary=summary, optimum=best)
    _print(summary, best, columns, options.methods, record)


def measured(method: str, seed: int, folder: Path, table: dict[str, dict[str, float]]) -> dict[str, Any]:
    """One search: what it found and what the table says of it."""
    row: dict[str, Any] = {"method": method, "seed": seed, "epochs_done": len(epochs_of(folder))}
    if not (folder / "run.json").is_file() or RunFolder.open(folder).manifest["status"] != "finished":
        return {**row, "accuracies": NOT_MEASURED}
    manifest = RunFolder.open(folder).manifest
    text = notation.to_nb201(Genotype.load(folder))
    return {
        **row,
        "architecture": text,
        "accuracies": table[text],
        "seconds": manifest["results"]["seconds"],
        "selection": manifest["results"].get("selection"),
        "hardware": manifest["hardware"],
        "versions": manifest["versions"],
        "git": manifest["git"],
        "recipe": manifest["recipe"],
    }


def _print(
    summary: dict[str, Any], best: dict[str, float], columns: list[str], methods: list[str], record: Path
) -> None:
    shown = Table(title="accuracies of what was found, from the table: mean ± std (n)")
    for column in ("method", *columns, "paper, CIFAR-10 test"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    for method in methods:
        found = summary[method]
        cells = [NOT_MEASURED] * len(columns) if found == NOT_MEASURED else [_cell(found[name]) for name in columns]
        shown.add_row(method, *cells, PUBLISHED.get(method, ""))
    shown.add_row("optimum", *(f"{best[name]:.2f}" for name in columns), "94.37")
    console = Console()
    console.print(shown)
    console.print(f"written: {record}")


def _cell(found: dict[str, Any]) -> str:
    error = "" if found["std"] is None else f" ± {found['std']:.2f}"
    return f"{found['mean']:.2f}{error} (n={found['n']})"


if __name__ == "__main__":
    main()
