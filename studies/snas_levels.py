"""`python -m studies.snas_levels`: how large are the cells that SNAS derives for each weight of the resource penalty?

The paper names three levels (Table 2: mild 2.9M, moderate 2.8M, aggressive 2.3M parameters) and prints no weights. Each
arm is a search with one weight and one estimator. The table has the parameters of the evaluation network (20 cells, 36
channels on CIFAR), the edges that end as `none` in each cell, and the accuracies of search and child. Searches share a
GPU. Stop the study at any time (or with --minutes); the same command resumes. An unfinished search shows the
cells of its last epoch.

python -m studies.snas_levels --data-root DIR --precision bfloat16 --epochs 15 --set architecture.lr=0.003 --minutes 9
python -m studies.snas_levels --data digits --scale small --epochs 2 --weights 0 0.0015 --seeds 1      # a rehearsal
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from softcell.arch import Genotype
from softcell.arch.genotype import alive
from softcell.data import load
from softcell.search import SearchRecipe, resolve
from softcell.search.genotypes import FILE as ARCHITECTURES
from softcell.search.genotypes import genotype_of
from softcell.settings import assignments, layered
from softcell.spaces.base import evaluation_space
from softcell.spaces.costs import count_genotype
from studies.options import recipe_settings, study_parser
from studies.runs import Deadline, entry, epochs_of, finished, run_searches, spread, write_record

WEIGHTS = (2e-4, 5e-4, 1.5e-3, 3e-3, 5e-3)
INPUTS = 2


def recipe_of(weight: float, seed: int, options: argparse.Namespace) -> SearchRecipe:
    own = {
        "method": "snas",
        "seed": seed,
        # Once, after the last epoch.
        "child_every": options.epochs,
        "resource": {"weight": weight, "estimator": options.estimator},
    }
    return resolve(layered(recipe_settings(options), own, assignments(options.set)))


def folder_of(weight: float, seed: int, options: argparse.Namespace) -> Path:
    return Path(options.runs) / f"{options.estimator}-{weight:g}-{Path(options.data).stem}-{seed}"


def measured(weight: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The cells of a search's last epoch, and their cost at training size."""
    folder = folder_of(weight, seed, options)
    rows = epochs_of(folder)
    found: dict[str, Any] = {
        "weight": weight,
        "estimator": options.estimator,
        "seed": seed,
        "epochs": options.epochs,
        "epochs_done": len(rows),
        "finished": finished(folder),
    }
    if not rows:
        return found
    last = json.loads((folder / ARCHITECTURES).read_text().splitlines()[-1])
    genotype, dataset = genotype_of(last, "darts"), load(options.data, options.data_root)
    found["genotype"] = genotype.to_dict()
    found["none"] = {name: sum(pick.op == "none" for pick in cell.picks) for name, cell in genotype.cells.items()}
    found["reached"] = {name: reached(genotype, name) for name in genotype.cells}
    kept = ("val_accuracy", "val_accuracy_bn", "child_accuracy", "entropy", "expected_parameters")
    found |= {key: rows[-1][key] for key in kept if key in rows[-1]}
    if all(found["reached"].values()):
        cost = count_genotype(evaluation_space("darts", options.data), genotype, dataset.shape, dataset.num_classes)
        found |= {"parameters": cost.parameters, "multiply_adds": cost.multiply_adds}
    return found


def reached(genotype: Genotype, name: str) -> int:
    """How many output nodes of a cell an input reaches."""
    cell = alive(genotype.cells[name], INPUTS)
    return len(set(cell.output) & set(cell.targets))


def main(arguments: list[str] | None = None) -> None:
    parser = study_parser(
        "studies.snas_levels",
        __doc__,
        *("scale", "precision", "set", "at_once"),
        epochs=15,
        seeds=2,
        runs=Path("runs/snas-levels"),
        out=Path("results/snas"),
    )
    parser.add_argument("--weights", type=float, nargs="+", default=list(WEIGHTS), help="weights of the penalty")
    parser.add_argument(
        "--estimator", default="monte-carlo", choices=("monte-carlo", "expectation"), help="of the sample or expected"
    )
    options = parser.parse_args(arguments)
    pairs = [(weight, seed) for seed in range(options.seeds) for weight in options.weights]
    jobs = [(recipe_of(*pair, options), folder_of(*pair, options)) for pair in pairs]
    run_searches(jobs, Deadline(options.minutes), options.device, options.at_once)
    rows = [measured(*pair, options) for pair in pairs]
    summary = {
        f"{weight:g}": spread(own)
        for weight in options.weights
        if (
            own := [
                float(r["parameters"]) for r in rows if r["weight"] == weight and r["finished"] and "parameters" in r
            ]
        )
    }
    record = options.out / f"levels-{options.estimator}-{Path(options.data).stem}.json"
    published = {"mild": "2.9M", "moderate": "2.8M", "aggressive": "2.3M"}
    write_record(record, "studies.snas_levels", rows=rows, parameters=summary, published=published)
    console = Console(width=120)  # wide enough for the table, in a log too
    console.print(table_of(rows, options))
    console.print(f"written: {record}")


def table_of(rows: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    table = Table(title=f"{options.data}: cells of SNAS by weight of the penalty ({options.estimator})")
    for column in (
        "weight",
        "seed",
        "epochs",
        "parameters",
        "none: normal",
        "none: reduce",
        "search",
        "child",
        "entropy",
    ):
        table.add_column(column, justify="right")
    for row in sorted(rows, key=lambda row: (row["weight"], row["seed"])):
        cells = [f"{row['weight']:g}", str(row["seed"]), f"{row['epochs_done']}/{row['epochs']}"]
        if "none" in row:
            cells.append(f"{row['parameters']:,}" if "parameters" in row else "an empty cell")
            cells += [str(row["none"][name]) for name in ("normal", "reduce")]
            cells += [f"{row[key]:.2%}" if key in row else "-" for key in ("val_accuracy", "child_accuracy")]
            cells.append(f"{row['entropy']:.3f}")
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    entry(main)
