"""`python -m studies.entrannas_sparsity`: how λ of EnTranNAS-DST controls the number of connections (Eq 11).

Searches with the small recipe on digits, every λ with every seed, on the CPU; thresholds and connections per node go to
a record. Run it again to go on where it was stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from softcell.arch import Genotype
from softcell.search import resolve
from studies.runs import NOT_MEASURED, Deadline, carry_on, epochs_of, spread, write_record

WEIGHTS = (0.0, 0.01, 0.1, 1.0)


def measured(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """What one finished search says about its topology."""
    last, cells = epochs_of(folder)[-1], Genotype.load(folder).cells
    connections = {name: {str(node): len(cell.incoming(node)) for node in cell.targets} for name, cell in cells.items()}
    counts = [count for nodes in connections.values() for count in nodes.values()]
    thresholds = {key.removeprefix("threshold_"): last[key] for key in last if key.startswith("threshold_")}
    return {
        "connections": connections,
        "connections_per_node": sum(counts) / len(counts),
        "thresholds": thresholds,
        "mean_threshold": sum(thresholds.values()) / len(thresholds),
        "supernet_accuracy": manifest["results"]["val_accuracy"],
        "derived_accuracy_bn": manifest["results"].get("child_accuracy_bn"),
        "split": manifest["results"]["val_split"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.entrannas_sparsity", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/entrannas/sparsity-digits.json"), help="the record")
    parser.add_argument("--runs", type=Path, default=Path("runs/sparsity"), help="where the searches lie")
    parser.add_argument("--seeds", type=int, default=2, help="searches per λ")
    parser.add_argument("--epochs", type=int, help="another number than the small recipe's")
    parser.add_argument("--speed", type=float, help="another method.threshold_speed than the default")
    parser.add_argument("--schedule", help="another temperature schedule than `constant`, such as `exponential`")
    parser.add_argument("--minutes", type=float, help="stop after so long; the same command goes on")
    options = parser.parse_args()
    changed = {"threshold_speed": options.speed, "schedule": options.schedule}
    method = {key: value for key, value in changed.items() if value is not None}
    deadline, rows = Deadline(options.minutes), []
    recipe: dict[str, Any] = {}
    for weight in WEIGHTS:
        for seed in range(options.seeds):
            given: dict[str, Any] = {"method": "entrannas-dst", "seed": seed, "device": "cpu", "threads": 1}
            given |= {"epochs": options.epochs} if options.epochs else {}
            resolved = resolve({**given, "method_settings": {**method, "sparsity": weight}})
            recipe = resolved.to_dict()
            folder = options.runs / f"lambda-{weight:g}-seed-{seed}"
            manifest = carry_on(resolved, folder, deadline)
            found = NOT_MEASURED if manifest is None else measured(folder, manifest)
            rows.append({"lambda": weight, "seed": seed, "result": found})
    summary = {}
    for weight in WEIGHTS:
        done = [row["result"] for row in rows if row["lambda"] == weight and row["result"] != NOT_MEASURED]
        keys = ("connections_per_node", "mean_threshold", "supernet_accuracy", "derived_accuracy_bn")
        summary[f"{weight:g}"] = {key: spread([r[key] for r in done]) for key in keys} if done else NOT_MEASURED
    write_record(options.out, "studies.entrannas_sparsity", recipe=recipe, rows=rows, summary=summary)
    table = Table(title=f"EnTranNAS-DST on digits, {options.seeds} seeds")
    for column in ("λ", "connections per node", "threshold", "supernet", "derived (norms re-estimated)"):
        table.add_column(column, justify="right")
    for weight, row in summary.items():
        cells = [NOT_MEASURED] * 4 if row == NOT_MEASURED else [_shown(value) for value in row.values()]  # type: ignore
        table.add_row(weight, *cells)
    Console().print(table)


def _shown(value: dict[str, Any]) -> str:
    return f"{value['mean']:.3g}" + ("" if value["std"] is None else f" ± {value['std']:.2g}")


if __name__ == "__main__":
    main()
