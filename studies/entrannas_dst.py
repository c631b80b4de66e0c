"""`python -m studies.entrannas_dst`: which settings of EnTranNAS-DST find a network of a usable size.

Every arm is EnTranNAS-DST with other settings of temperature, λ and thresholds. Per epoch the record has connections
per node, thresholds, supernet accuracy and the size of the network that would be derived; at the end parameters and
multiply-adds of the evaluation network (20 cells, 36 channels on CIFAR), accuracies of supernet and derived network
with recalibrated BatchNorm, and the seconds. Searches share one GPU. Stop it at any time (or with --minutes); the same
command resumes. What is unfinished is recorded as not measured.

python -m studies.entrannas_dst --data-root DIR --precision bfloat16 --minutes 9
python -m studies.entrannas_dst --data-root DIR --arms constant-0.1 exponential-0.1 schedule=linear,sparsity=0.3
python -m studies.entrannas_dst --data digits --scale small --epochs 2 --arms constant-0.1 linear-0.1   # a rehearsal
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from softcell.arch import Genotype
from softcell.data import load
from softcell.engine import RunFolder
from softcell.engine.files import atomic_write_text
from softcell.report.svg import to_svg
from softcell.search import SearchRecipe, resolve
from softcell.search.history import FILE as ARCHITECTURES
from softcell.search.history import genotype_of
from softcell.settings import assignments
from softcell.spaces.count import count_genotype, evaluation_space
from studies.gap import on_one_basis
from studies.runs import (
    NOT_MEASURED,
    Deadline,
    entry,
    epochs_of,
    finished,
    minutes,
    side_by_side,
    spread,
    write_record,
)

ARMS: dict[str, dict[str, Any]] = {
    "constant-0.1": {"schedule": "constant", "sparsity": 0.1, "threshold_speed": 3.0},
    "constant-1": {"schedule": "constant", "sparsity": 1.0, "threshold_speed": 3.0},
    "exponential-0.1": {"schedule": "exponential", "sparsity": 0.1, "threshold_speed": 3.0},
    "exponential-0.3": {"schedule": "exponential", "sparsity": 0.3, "threshold_speed": 3.0},
    "exponential-1": {"schedule": "exponential", "sparsity": 1.0, "threshold_speed": 3.0},
    "exponential-3": {"schedule": "exponential", "sparsity": 3.0, "threshold_speed": 3.0},
    "exponential-0": {"schedule": "exponential", "sparsity": 0.0, "threshold_speed": 3.0},
    "exponential-fast": {"schedule": "exponential", "sparsity": 0.1, "threshold_speed": 10.0},
    "exponential-faster": {"schedule": "exponential", "sparsity": 0.1, "threshold_speed": 30.0},
    "exponential-to-0.03": {"schedule": "exponential", "last_temperature": 0.03, "threshold_speed": 3.0},
    "linear-0.1": {"schedule": "linear", "sparsity": 0.1, "threshold_speed": 3.0},
}
"""All settings that an arm is about are written out: an arm means the same when a default changes."""
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


def arm_settings(arm: str) -> dict[str, Any]:
    """The settings of a named arm, or of one written as `key=value,key=value`."""
    if "=" not in arm:
        return ARMS[arm]
    return assignments(arm.split(","))


def recipe_of(arm: str, seed: int, options: argparse.Namespace) -> SearchRecipe:
    names = ("data", "data_root", "scale", "epochs", "batch_size", "device", "precision", "engine")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    # The derived network is measured at the end alone.
    given |= {"method": "entrannas-dst", "seed": seed, "child_every": 1000, "method_settings": arm_settings(arm)}
    return resolve(given)


def sizes(folder: Path, every: int, options: argparse.Namespace) -> dict[int, int]:
    """Parameters of the network derived after every `every`-th epoch, and after the last."""
    file, found = folder / ARCHITECTURES, {}
    lines = file.read_text().splitlines() if file.exists() else []
    for number, line in enumerate(lines):
        if (number + 1) % every == 0 or number + 1 == len(lines):
            found[number] = parameters_and_products(genotype_of(json.loads(line), "darts"), options)[0]
    return found


def parameters_and_products(genotype: Genotype, options: argparse.Namespace) -> tuple[int, int]:
    dataset = load(options.data, options.data_root)
    cost = count_genotype(evaluation_space("darts", options.data), genotype, dataset.shape, dataset.num_classes)
    return cost.parameters, cost.multiply_adds


def measured(arm: str, seed: int, folder: Path, deadline: Deadline, options: argparse.Namespace) -> dict[str, Any]:
    """One arm's epochs so far and, once it is finished, its result."""
    curve = []
    epochs, parameters = epochs_of(folder), sizes(folder, 5, options)
    for epoch in epochs:
        row = {key: epoch[key] for key in PER_EPOCH if key in epoch}
        row |= {key: value for key, value in epoch.items() if key.startswith(("threshold_", "connections_"))}
        if epoch["epoch"] in parameters:
            row["parameters"] = parameters[epoch["epoch"]]
        curve.append(row)
    row = {"arm": arm, "seed": seed, "settings": arm_settings(arm), "epochs_done": len(epochs), "curve": curve}
    if not finished(folder):
        return {**row, "result": NOT_MEASURED}
    manifest, genotype = RunFolder.open(folder).manifest, Genotype.load(folder)
    results = manifest["results"]
    counts = [len(cell.incoming(node)) for cell in genotype.cells.values() for node in cell.targets]
    thresholds = [value for key, value in curve[-1].items() if key.startswith("threshold_")]
    basis: dict[str, Any] = {"supernet_accuracy_bn": results["val_accuracy_bn"], "gap_bn": NOT_MEASURED}
    if not deadline.passed:
        basis = dict(on_one_basis(folder, options.device, options.data_root))
    total, products = parameters_and_products(genotype, options)
    result = {
        "parameters": total,
        "multiply_adds": products,
        "connections_per_node": sum(counts) / len(counts),
        "mean_threshold": sum(thresholds) / len(thresholds),
        "supernet_accuracy": results["val_accuracy"],
        "derived_accuracy": results["child_accuracy"],
        "derived_accuracy_bn": results["child_accuracy_bn"],
        **basis,
        "seconds": results["seconds"],
        "split": results["val_split"],
        "genotype": genotype.to_dict(),
        **{key: manifest[key] for key in ("hardware", "versions", "git", "created", "recipe")},
    }
    drawing = options.out.parent / f"{options.out.stem}-{folder.name}.svg"
    atomic_write_text(drawing, to_svg(genotype, f"EnTranNAS-DST ({arm}) on {options.data}, seed {seed}"))
    return {**row, "drawing": drawing.name, "result": result}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.entrannas_dst", description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="cifar10", help="dataset")
    parser.add_argument("--data-root", help="where named data lie")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=list(ARMS),
        metavar="ARM",
        help=f"{', '.join(ARMS)}, or settings of the method as KEY=VALUE,KEY=VALUE; all named ones by default",
    )
    parser.add_argument("--seeds", type=int, default=1, help="searches per arm; one alone is no result")
    parser.add_argument("--epochs", type=int, help="another number than the recipe's")
    parser.add_argument("--batch-size", type=int, help="another number than the recipe's")
    parser.add_argument("--scale", help="small or paper; by default as suits the data")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--precision", help="float32 or bfloat16")
    parser.add_argument("--engine", help="auto, eager or graph")
    parser.add_argument("--at-once", type=int, help="searches that share the device; all of them on a GPU")
    parser.add_argument("--minutes", type=minutes, help="stop after so long (0: at once); the same command resumes")
    parser.add_argument("--runs", type=Path, default=Path("runs/entrannas-dst"), help="where the searches lie")
    parser.add_argument("--out", type=Path, help="the record; else results/entrannas/dst-DATA.json")
    options = parser.parse_args(arguments)
    for arm in options.arms:
        if "=" not in arm and arm not in ARMS:
            parser.error(f"--arms must name {', '.join(ARMS)} or have the form KEY=VALUE, got {arm!r}")
    options.out = options.out or Path(f"results/entrannas/dst-{Path(options.data).stem}.json")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    deadline, stem = Deadline(options.minutes), Path(options.data).stem
    folders = {
        (arm, seed): options.runs / f"{arm.replace('=', '-').replace(',', '-')}-{stem}-{seed}"
        for seed in range(options.seeds)
        for arm in options.arms
    }
    jobs = [(recipe_of(*job, options), folder) for job, folder in folders.items()]
    side_by_side(jobs, deadline, options.device, options.at_once)
    rows = [measured(*job, folder, deadline, options) for job, folder in folders.items()]
    summary: dict[str, Any] = {}
    for arm in options.arms:
        done = [row["result"] for row in rows if row["arm"] == arm and row["result"] != NOT_MEASURED]
        keys = [key for key in SUMMARY if not any(isinstance(r[key], str) for r in done)]
        summary[arm] = {key: spread([float(r[key]) for r in done]) for key in keys} if done else NOT_MEASURED
    write_record(options.out, "studies.entrannas_dst", rows=rows, summary=summary)
    _print(rows, options)


def _print(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    table = Table(title=f"EnTranNAS-DST on {options.data}; both networks with recalibrated BatchNorm")
    for column in ("arm", "seed", "done", "parameters", "MAdds", "per node", "threshold", "supernet", "derived", "s"):
        table.add_column(column, justify="right", no_wrap=column == "arm")
    for row in rows:
        found = row["result"]
        head = (row["arm"], str(row["seed"]), str(row["epochs_done"]))
        if found == NOT_MEASURED:
            last = row["curve"][-1] if row["curve"] else {}
            size = f"{last['parameters']:,} so far" if "parameters" in last else NOT_MEASURED
            table.add_row(*head, size)
            continue
        table.add_row(
            *head,
            f"{found['parameters']:,}",
            f"{found['multiply_adds'] / 1e6:,.0f}M",
            f"{found['connections_per_node']:.2f}",
            f"{found['mean_threshold']:.2f}",
            f"{found['supernet_accuracy_bn']:.2%}",
            f"{found['derived_accuracy_bn']:.2%}",
            f"{found['seconds']:.0f}",
        )
    console = Console()
    console.print(table)
    console.print(f"written: {options.out}")


if __name__ == "__main__":
    entry(main)
