"""`python -m studies.snas`: does a derived network need training? SNAS at three levels compared with DARTS (Table 1).

DARTS runs in three variants: first order (`darts`), second order (`darts-second-order`, the paper's) and single level
(`darts-single-level`), which uses the same images and steps as SNAS, so that only sampling differs.

All searches with the same seed hold out the same 5,000 training images, on which they and their children are measured:
derived networks with the supernet's weights and BatchNorm statistics unchanged. Also recorded: children with
recalibrated statistics, and the parameters of the network that would be trained. All searches run concurrently on
one GPU. Record and curves go to `results/snas/`. Stop it at any time (or with --minutes); the same command resumes.
Unfinished searches are recorded as not measured.

python -m studies.snas --data-root DIR --epochs 25 --minutes 9
python -m studies.snas --data digits --epochs 2 --held 100 --scale small --seeds 1 --levels mild      # a rehearsal
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from softcell.app.report import curves_svg, to_svg
from softcell.arch import Genotype
from softcell.data import load
from softcell.engine import RunFolder
from softcell.files import atomic_write_text
from softcell.search import SearchRecipe, resolve
from softcell.settings import assignments, layered
from softcell.spaces.base import evaluation_space
from softcell.spaces.costs import count_genotype
from studies.options import recipe_settings, study_parser
from studies.runs import NOT_MEASURED, Deadline, entry, epochs_of, run_searches, spread, write_record

LEVELS = ("mild", "moderate", "aggressive")
DARTS = {"darts": "bilevel", "darts-second-order": "unrolled", "darts-single-level": "single-level"}
"""Arms of DARTS and their regimes."""
CURVES = ("train_accuracy", "val_accuracy", "child_accuracy", "entropy")


def recipe_of(arm: str, seed: int, options: argparse.Namespace) -> SearchRecipe:
    given = layered({**recipe_settings(options), "seed": seed, "child_every": 1}, assignments(options.set))
    left = len(load(options.data, options.data_root).train) - options.held
    halves = {"held": options.held, "weights": left // 2, "validation": left - left // 2}
    split = {"held": options.held, "weights": left}
    if arm in DARTS:
        regime = DARTS[arm]
        # A single level learns weights and architecture from the same images, as SNAS does.
        own = split if regime == "single-level" else halves
        return resolve({**given, "method": "darts", "regime": regime, "split": own})
    return resolve({**given, "method": "snas", "split": split, "resource": {"preset": arm.removeprefix("snas-")}})


def folder_of(arm: str, seed: int, options: argparse.Namespace) -> Path:
    return Path(options.runs) / f"{arm}-{Path(options.data).stem}-{seed}"


def run_all(arms: list[str], options: argparse.Namespace) -> None:
    """Runs or resumes all unfinished searches concurrently until they are finished or the time is up."""
    jobs = [
        (recipe_of(arm, seed, options), folder_of(arm, seed, options)) for seed in range(options.seeds) for arm in arms
    ]
    run_searches(jobs, Deadline(options.minutes), options.device, options.at_once)


def measured(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The results of one search, or its progress."""
    folder = folder_of(arm, seed, options)
    rows = epochs_of(folder)
    row: dict[str, Any] = {"arm": arm, "seed": seed, "epochs": options.epochs, "epochs_done": len(rows)}
    if not (folder / "run.json").is_file() or RunFolder.open(folder).manifest["status"] != "finished":
        return {**row, "result": NOT_MEASURED}
    manifest, genotype = RunFolder.open(folder).manifest, Genotype.load(folder)
    results, dataset = manifest["results"], load(options.data, options.data_root)
    cost = count_genotype(evaluation_space("darts", options.data), genotype, dataset.shape, dataset.num_classes)
    row["result"] = {
        "search_accuracy": results["val_accuracy"],
        "child_accuracy": results["child_accuracy"],
        "child_accuracy_bn": results["child_accuracy_bn"],
        "loss_of_child": results["val_accuracy"] - results["child_accuracy"],
        "split": results["val_split"],
        "parameters": cost.parameters,
        "multiply_adds": cost.multiply_adds,
        "entropy": rows[-1]["entropy"],
        "genotype": genotype.to_dict(),
        "curves": {key: [r.get(key) for r in rows] for key in CURVES},
        "recipe": manifest["recipe"],
        "hardware": manifest["hardware"],
        "versions": manifest["versions"],
    }
    atomic_write_text(options.out / f"{arm}-{seed}.svg", to_svg(genotype, f"{arm} on {options.data}, seed {seed}"))
    return row


def summarise(rows: list[dict[str, Any]], arms: list[str]) -> dict[str, Any]:
    keys = ("search_accuracy", "child_accuracy", "child_accuracy_bn", "loss_of_child", "parameters", "entropy")
    found: dict[str, Any] = {}
    for arm in arms:
        done = [row["result"] for row in rows if row["arm"] == arm and row["result"] != NOT_MEASURED]
        found[arm] = {key: spread([float(r[key]) for r in done]) for key in keys} if done else NOT_MEASURED
    return found


def draw(rows: list[dict[str, Any]], arms: list[str], options: argparse.Namespace) -> None:
    """Accuracies of search and child, and entropies (Figure 4), as means over the seeds."""
    for name, keys in (("accuracy", ("val_accuracy", "child_accuracy")), ("entropy", ("entropy",))):
        history: list[dict[str, Any]] = [{"epoch": e} for e in range(options.epochs)]
        labels = []
        for arm in arms:
            done = [r["result"]["curves"] for r in rows if r["arm"] == arm and r["result"] != NOT_MEASURED]
            for key in keys if done else ():
                label = arm if len(keys) == 1 else f"{arm} {'child' if key == 'child_accuracy' else 'search'}"
                labels.append(label)
                for epoch, values in enumerate(zip(*(curves[key] for curves in done), strict=True)):
                    if None not in values:
                        history[epoch][label] = statistics.fmean(values)
        if labels:
            title = f"{name} on {options.data}, mean over seeds"
            atomic_write_text(options.out / f"{name}.svg", curves_svg(history, labels, title))


def main(arguments: list[str] | None = None) -> None:
    parser = study_parser(
        "studies.snas",
        __doc__,
        *("scale", "precision", "set", "at_once"),
        epochs=25,
        seeds=2,
        runs=Path("runs/snas-study"),
        out=Path("results/snas"),
    )
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS, help="constraint levels of SNAS")
    parser.add_argument("--darts", nargs="+", default=list(DARTS), choices=list(DARTS), help="arms of DARTS")
    parser.add_argument("--held", type=int, default=5000, help="training images left out, to be measured on")
    options = parser.parse_args(arguments)
    arms = [*(f"snas-{level}" for level in options.levels), *options.darts]
    run_all(arms, options)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [measured(arm, seed, options) for seed in range(options.seeds) for arm in arms]
    summary = summarise(rows, arms)
    draw(rows, arms, options)
    published = {"snas": "88.54 → 90.67 (150 epochs)", "darts": "87.67 → 54.66 (second order)"}
    record = options.out / f"children-{Path(options.data).stem}.json"
    write_record(record, "studies.snas", rows=rows, summary=summary, published=published)
    table = Table(title=f"{options.data}: accuracy on the {options.held:,} images left out, mean over seeds")
    for column in ("arm", "done", "search", "child", "child, BN recalibrated", "parameters (trained size)", "entropy"):
        table.add_column(column, justify="right")
    for arm in arms:
        done = f"{sum(r['arm'] == arm and r['result'] != NOT_MEASURED for r in rows)}/{options.seeds}"
        if summary[arm] == NOT_MEASURED:
            table.add_row(arm, done, NOT_MEASURED)
            continue
        means = {key: value["mean"] for key, value in summary[arm].items()}
        shares = (f"{means[k]:.2%}" for k in ("search_accuracy", "child_accuracy", "child_accuracy_bn"))
        table.add_row(arm, done, *shares, f"{means['parameters']:,.0f}", f"{means['entropy']:.3f}")
    console = Console()
    console.print(table)
    console.print(f"written: {record}")


if __name__ == "__main__":
    entry(main)
