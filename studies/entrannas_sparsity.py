"""`python -m studies.entrannas_sparsity`: how λ of EnTranNAS-DST controls the number of connections (Eq 11).

Runs a search for every λ and seed, by default with the small recipe on digits, concurrently on a GPU; thresholds,
connections per node, sizes of the derived networks and accuracies with recalibrated BatchNorm are recorded. Stop it
at any time (or with --minutes); the same command resumes.

python -m studies.entrannas_sparsity --seeds 4
python -m studies.entrannas_sparsity --space nb201 --epochs 120 --lr 0.004 --out results/entrannas/sparsity-nb201.json
python -m studies.entrannas_sparsity --data cifar10 --data-root DIR --epochs 5 --minutes 9
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from softcell.arch import Genotype
from softcell.engine import RunFolder
from softcell.search import SearchRecipe, resolve
from studies.gap import gap_or_not_measured
from studies.options import recipe_settings, study_parser
from studies.runs import (
    NOT_MEASURED,
    Deadline,
    entry,
    epochs_of,
    evaluation_cost,
    finished,
    run_searches,
    spread,
    write_record,
)

WEIGHTS = (0.0, 0.01, 0.1, 1.0)
SUMMARY = ("connections_per_node", "mean_threshold", "parameters", "supernet_accuracy_bn", "derived_accuracy_bn")


def measured(folder: Path, manifest: dict[str, Any], deadline: Deadline, options: argparse.Namespace) -> dict[str, Any]:
    """The topology found by one finished search, and the size of the network that would be trained."""
    last, genotype = epochs_of(folder)[-1], Genotype.load(folder)
    cells, cost = genotype.cells, evaluation_cost(genotype, options.data, options.data_root)
    connections = {name: {str(node): len(cell.incoming(node)) for node in cell.targets} for name, cell in cells.items()}
    counts = [count for nodes in connections.values() for count in nodes.values()]
    thresholds = {key.removeprefix("threshold_"): last[key] for key in last if key.startswith("threshold_")}
    return {
        "connections": connections,
        "connections_per_node": sum(counts) / len(counts),
        "thresholds": thresholds,
        "mean_threshold": sum(thresholds.values()) / len(thresholds),
        "supernet_accuracy": manifest["results"]["val_accuracy"],
        **gap_or_not_measured(folder, deadline, options.device, options.data_root),
        "parameters": cost.parameters,
        "multiply_adds": cost.multiply_adds,
        "split": manifest["results"]["val_split"],
        "genotype": genotype.to_dict(),
    }


def main() -> None:
    parser = study_parser(
        "studies.entrannas_sparsity",
        __doc__,
        *("epochs", "at_once"),
        one_file=True,
        data="digits",
        seeds=2,
        runs=Path("runs/sparsity"),
    )
    parser.add_argument("--space", help="another search space than DARTS's")
    parser.add_argument("--lr", type=float, help="another architecture.lr than the recipe's")
    parser.add_argument("--speed", type=float, help="another method.threshold_speed than the default")
    parser.add_argument("--schedule", help="another temperature schedule than the default")
    options = parser.parse_args()
    changed = {"threshold_speed": options.speed, "schedule": options.schedule}
    method = {key: value for key, value in changed.items() if value is not None}
    options.out = options.out or Path(f"results/entrannas/sparsity-{Path(options.data).stem}.json")
    jobs: dict[tuple[float, int], tuple[SearchRecipe, Path]] = {}
    for weight in WEIGHTS:
        for seed in range(options.seeds):
            given: dict[str, Any] = {"method": "entrannas-dst", "seed": seed, "threads": 1}
            given["child_every"] = 1000  # the derived network is measured only at the end
            given |= recipe_settings(options)
            if options.space is not None:
                given["space"] = options.space
            if options.lr is not None:
                given["architecture"] = {"lr": options.lr}
            recipe = resolve({**given, "method_settings": {**method, "sparsity": weight}})
            jobs[weight, seed] = recipe, options.runs / f"lambda-{weight:g}-{Path(options.data).stem}-{seed}"
    deadline = Deadline(options.minutes)
    run_searches(list(jobs.values()), deadline, options.device, options.at_once)
    rows: list[dict[str, Any]] = []
    for (weight, seed), (_, folder) in jobs.items():
        found: dict[str, Any] | str = NOT_MEASURED
        if finished(folder):
            found = measured(folder, RunFolder.open(folder).manifest, deadline, options)
        rows.append({"lambda": weight, "seed": seed, "result": found})
    summary: dict[str, Any] = {}
    for weight in WEIGHTS:
        done = [row["result"] for row in rows if row["lambda"] == weight and row["result"] != NOT_MEASURED]
        keys = [key for key in SUMMARY if NOT_MEASURED not in [r[key] for r in done]]
        summary[f"{weight:g}"] = {key: spread([float(r[key]) for r in done]) for key in keys} if done else NOT_MEASURED
    write_record(options.out, "studies.entrannas_sparsity", recipe=recipe.to_dict(), rows=rows, summary=summary)
    table = Table(title=f"EnTranNAS-DST on {options.data}, {options.seeds} seeds")
    for column in ("λ", *(key.removesuffix("_bn").replace("_", " ") for key in SUMMARY)):
        table.add_column(column, justify="right")
    for shown, row in summary.items():
        values = [row] * len(SUMMARY) if isinstance(row, str) else [_shown(row.get(key)) for key in SUMMARY]
        table.add_row(shown, *values)
    Console().print(table)


def _shown(value: dict[str, Any] | None) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value['mean']:.3g}" + ("" if value["std"] is None else f" ± {value['std']:.2g}")


if __name__ == "__main__":
    entry(main)
