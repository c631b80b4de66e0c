"""`python -m studies.entrannas`: full searches with EnTranNAS, EnTranNAS-DST and DARTS in one setting.

For each: wall-clock time and GPU-days, parameters and multiply-adds of the network that would be trained, and on the
validation split the accuracies of the supernet and of the derived network with the supernet's weights. Both are
measured with BatchNorm's running statistics from training, and both with recalibrated ones, so that the gap compares
like with like (`studies.gap`). Drawings and a record go to `results/entrannas/`. Stop it at any time (or
with --minutes); the same command resumes. Unfinished searches are recorded as not measured.

python -m studies.entrannas --data-root DIR                      # CIFAR-10, 50 epochs
python -m studies.entrannas --data-root DIR --minutes 9          # one piece of it
python -m studies.entrannas --data digits --epochs 2 --scale small --batch-size 64   # a rehearsal
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from softcell.app.report import to_svg
from softcell.arch import Genotype
from softcell.files import atomic_write_text
from softcell.search import SearchRecipe, resolve
from studies.gap import gap_or_not_measured
from studies.options import recipe_settings, study_parser
from studies.runs import (
    NOT_MEASURED,
    Deadline,
    entry,
    epochs_of,
    evaluation_cost,
    run_or_resume,
    spread,
    write_record,
)

METHODS = ("entrannas", "entrannas-dst", "darts")
SHARED_SETTING = ("batch_size", "weights", "architecture", "epochs", "split")
"""Settings that DARTS shares with EnTranNAS's recipe, so that they differ only in the method."""

CURVE = ("epoch", "train_accuracy", "val_accuracy", "child_accuracy", "connections_normal", "connections_reduce")

SUMMARY = (
    "seconds",
    "parameters",
    "supernet_accuracy",
    "derived_accuracy",
    "supernet_accuracy_bn",
    "derived_accuracy_bn",
    "gap_bn",
)


def recipe_of(method: str, seed: int, options: argparse.Namespace) -> SearchRecipe:
    given = {**recipe_settings(options), "child_every": options.child_every, "seed": seed}
    given = {key: value for key, value in given.items() if value is not None}
    if method != "darts":
        return resolve({**given, "method": method})
    same = resolve({**given, "method": "entrannas"}).to_dict()
    return resolve({**given, **{key: same[key] for key in SHARED_SETTING}, "method": method})


def measured(folder: Path, manifest: dict[str, Any], deadline: Deadline, options: argparse.Namespace) -> dict[str, Any]:
    """The numbers of one finished search; `gap` uses stale statistics, `gap_bn` recalibrated ones."""
    results, genotype = manifest["results"], Genotype.load(folder)
    cost = evaluation_cost(genotype, options.data, options.data_root)
    gpus = manifest["hardware"]["gpus"] or []
    return {
        "seconds": results["seconds"],
        "gpu_days": results["seconds"] / 86400 if gpus and manifest["recipe"]["device"] != "cpu" else None,
        "supernet_accuracy": results["val_accuracy"],
        "derived_accuracy": results["child_accuracy"],
        "gap": results["val_accuracy"] - results["child_accuracy"],
        **gap_or_not_measured(folder, deadline, options.device, options.data_root),
        "parameters": cost.parameters,
        "multiply_adds": cost.multiply_adds,
        "split": results["val_split"],
        "connections_per_node": {
            name: sum(pick.op != "none" for pick in cell.picks) / len(cell.targets)
            for name, cell in genotype.cells.items()
        },
        "genotype": genotype.to_dict(),
        "hardware": manifest["hardware"],
        "versions": manifest["versions"],
        "git": manifest["git"],
        "created": manifest["created"],
        "recipe": manifest["recipe"],
    }


def main() -> None:
    parser = study_parser(
        "studies.entrannas",
        __doc__,
        *("seeds", "epochs", "batch_size", "scale", "precision", "engine"),
        runs=Path("runs/entrannas-evidence"),
        out=Path("results/entrannas"),
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="which searches, in order")
    parser.add_argument("--child-every", type=int, default=5, help="epochs between measurements of the derived network")
    options = parser.parse_args()
    deadline, rows = Deadline(options.minutes), []
    for seed in range(options.seeds):
        for method in options.methods:
            folder = options.runs / f"{method}-{Path(options.data).stem}-{seed}"
            recipe = recipe_of(method, seed, options)
            manifest = run_or_resume(recipe, folder, deadline)
            row: dict[str, Any] = {"method": method, "seed": seed, "epochs": recipe.epochs}
            epochs = epochs_of(folder)
            row["epochs_done"] = len(epochs)
            row["curve"] = [{key: epoch[key] for key in CURVE if key in epoch} for epoch in epochs]
            row["result"] = NOT_MEASURED if manifest is None else measured(folder, manifest, deadline, options)
            if manifest is not None:
                drawing = options.out / f"{folder.name}.svg"
                drawing.parent.mkdir(parents=True, exist_ok=True)
                atomic_write_text(drawing, to_svg(Genotype.load(folder), f"{method} on {options.data}, seed {seed}"))
                row["drawing"] = drawing.name
            rows.append(row)
    summary: dict[str, Any] = {}
    for method in options.methods:
        done = [row["result"] for row in rows if row["method"] == method and row["result"] != NOT_MEASURED]
        keys = [key for key in SUMMARY if NOT_MEASURED not in [r[key] for r in done]]
        summary[method] = {key: spread([float(r[key]) for r in done]) for key in keys} if done else NOT_MEASURED
    name = f"search-{Path(options.data).stem}.json"
    write_record(options.out / name, "studies.entrannas", rows=rows, summary=summary)
    _print(rows, options.out / name)


def _print(rows: list[dict[str, Any]], record: Path) -> None:
    table = Table(title="accuracies on the validation split, both networks with recalibrated BatchNorm")
    for column in ("method", "seed", "epochs", "hours", "GPU-days", "parameters", "supernet", "derived", "gap"):
        table.add_column(column, justify="right", no_wrap=column in ("method", "gap"))
    for row in rows:
        found, done = row["result"], f"{row['epochs_done']}/{row['epochs']}"
        if found == NOT_MEASURED:
            table.add_row(row["method"], str(row["seed"]), done, NOT_MEASURED)
            continue
        days = "" if found["gpu_days"] is None else f"{found['gpu_days']:.4f}"
        accuracies = [found[k] for k in ("supernet_accuracy_bn", "derived_accuracy_bn", "gap_bn")]
        table.add_row(
            row["method"],
            str(row["seed"]),
            done,
            f"{found['seconds'] / 3600:.3f}",
            days,
            f"{found['parameters']:,}",
            *(a if isinstance(a, str) else f"{a:.2%}" for a in accuracies),
        )
    console = Console()
    console.print(table)
    console.print(f"written: {record}")


if __name__ == "__main__":
    entry(main)
