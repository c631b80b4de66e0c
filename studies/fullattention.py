"""`python -m studies.fullattention`: does context auto-regression help the search? (Figure 6 a, b; Table VII)

Arms at equal total cost on one dataset: `both` searches with context auto-regression for --first epochs without labels
and then for --epochs on the target task; `alone` searches for --first + --epochs on the target task from random logits,
`tied` does so in the space of cells. All derived networks are trained for the same number of epochs and evaluated on
the test set. All arms run concurrently on one GPU. Curves and record go to `results/fullattention/`. Stop it at any
time (or with --minutes); the same command resumes. Unfinished runs are recorded as not measured. If the run folders are
gone, --searched reads finished searches from a record and trains their networks.

python -m studies.fullattention --data-root DIR --first 8 --epochs 12 --train-epochs 15 --channels 80 --minutes 9
python -m studies.fullattention --data-root DIR --first 4 --epochs 7 --train-epochs 10 --channels 80 \\
    --precision bfloat16 --seeds 2 --searched results/fullattention/phases-cifar10.json
python -m studies.fullattention --data digits --first 1 --epochs 1 --train-epochs 1 --seeds 1      # a rehearsal
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from softcell.app.report import curves_svg
from softcell.arch import Genotype
from softcell.engine import RunFolder
from softcell.files import atomic_write_text
from softcell.search import SearchRecipe, resolve
from softcell.search.run import FIRST
from softcell.settings import assignments, layered
from studies.options import recipe_settings, study_parser
from studies.recorded import Rows, check_resumable, recorded_searches, remaining_steps, with_training
from studies.runs import (
    NOT_MEASURED,
    Deadline,
    entry,
    epochs_of,
    finished,
    print_arms,
    run_interleaved,
    spread,
    write_record,
)

ARMS = ("both", "alone", "tied")
CURVES = ("train_loss", "train_accuracy", "val_loss", "val_accuracy", "entropy")


def common(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    return {**recipe_settings(options), "seed": seed}


def recipe_of(arm: str, seed: int, options: argparse.Namespace) -> SearchRecipe:
    given = {**common(options, seed), "method": "fullattention"}
    if arm == "both":
        own: dict[str, Any] = {"epochs": options.epochs, "pretrain": {"epochs": options.first}}
    else:
        own = {
            "epochs": options.first + options.epochs,
            "pretrain": {"epochs": 0},
            # The ablation without phase 1 begins with random logits; phase 1 itself begins with zeros.
            "method_settings": {"init_scale": 1e-3},
            "space_settings": {"tied": arm == "tied"},
        }
    return resolve(layered(given, own, assignments(options.set)))


def folder_of(arm: str, seed: int, options: argparse.Namespace) -> Path:
    return Path(options.runs) / f"{arm}-{Path(options.data).stem}-{seed}"


def training_of(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Training settings of the derived network."""
    own: dict[str, Any] = {**common(options, seed), "epochs": options.train_epochs, "space_settings": {}}
    if options.channels is not None:
        own["space_settings"] = {"channels": options.channels}
    return layered(own, assignments(options.set_training))


def known_of(options: argparse.Namespace) -> Rows:
    """The searches that --searched has."""
    recipes = {(arm, seed): recipe_of(arm, seed, options) for seed in range(options.seeds) for arm in options.arms}
    return recorded_searches(options.searched, recipes, partial(training_of, options=options), record_of(options))


def record_of(options: argparse.Namespace) -> Path:
    return Path(options.out) / f"phases-{Path(options.data).stem}.json"


def run_all(options: argparse.Namespace) -> None:
    """Runs or resumes all unfinished runs concurrently until they are finished or the time is up."""
    deadline, starts = Deadline(options.minutes), []
    for seed in range(options.seeds):
        own = training_of(seed, options)
        for arm in options.arms:
            folder, recipe = folder_of(arm, seed, options), recipe_of(arm, seed, options)
            known = options.known.get((arm, seed))
            check_resumable(known, recipe, folder, own)
            starts.append(partial(remaining_steps, known, recipe, folder, own, deadline))
    if not deadline.passed:
        run_interleaved(starts, options.device, options.at_once)


def measured(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The results of one search and its training run, or their progress."""
    row, place = (
        options.known.get((arm, seed)) or searched(arm, seed, options),
        folder_of(arm, seed, options) / "training",
    )
    kept = ("accuracy", "split", "count", "parameters", "multiply_adds", "seconds")
    row = with_training(row, place, kept, options.out / f"{arm}-{seed}.svg", f"{arm} on {options.data}, seed {seed}")
    if row["trained"] != NOT_MEASURED and "curves" not in row["trained"]:
        own = epochs_of(place)
        row["trained"]["curves"] = {key: [r.get(key) for r in own] for key in ("train_loss", "train_accuracy")}
    return row


def searched(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The results of one search, or its progress."""
    folder = folder_of(arm, seed, options)
    rows, before = epochs_of(folder), epochs_of(folder / FIRST)
    row: dict[str, Any] = {"arm": arm, "seed": seed, "epochs_done": [len(before), len(rows), 0]}
    row["curves"] = {key: [r.get(key) for r in rows] for key in CURVES}
    row["first_phase"] = {key: [r.get(key) for r in before] for key in CURVES}
    if not finished(folder):
        return {**row, "search": NOT_MEASURED, "trained": NOT_MEASURED}
    manifest = RunFolder.open(folder).manifest
    row["search"] = {
        "val_accuracy": manifest["results"]["val_accuracy"],
        "split": manifest["results"]["val_split"],
        "seconds": sum(r["seconds"] for r in (*before, *rows)),
        "genotype": Genotype.load(folder).to_dict(),
        **{key: manifest[key] for key in ("recipe", "hardware", "versions")},
    }
    return {**row, "trained": NOT_MEASURED}


def summarise(rows: list[dict[str, Any]], arms: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for arm in arms:
        own = [row for row in rows if row["arm"] == arm]
        searched = [row["search"] for row in own if row["search"] != NOT_MEASURED]
        trained = [row["trained"] for row in own if row["trained"] != NOT_MEASURED]
        found[arm] = {
            "search_accuracy": spread([r["val_accuracy"] for r in searched]) if searched else NOT_MEASURED,
            "search_seconds": spread([r["seconds"] for r in searched]) if searched else NOT_MEASURED,
            "test_accuracy": spread([r["accuracy"] for r in trained]) if trained else NOT_MEASURED,
        }
    return found


def draw(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Loss and accuracy of the searches on the target task, as means over finished seeds.

    By epochs on that task (Figure 6 a, b), and by all epochs, including those of phase 1.
    """
    for key in ("train_loss", "train_accuracy", "val_accuracy"):
        for name, counted in ((key, False), (f"{key}-by-cost", True)):
            history: dict[int, dict[str, Any]] = {}
            labels = []
            for arm in options.arms:
                done = [r["curves"][key] for r in rows if r["arm"] == arm and r["search"] != NOT_MEASURED]
                if done:
                    labels.append(arm)
                before = options.first if counted and arm == "both" else 0
                for epoch, values in enumerate(zip(*done, strict=True), before):
                    if None not in values:
                        history.setdefault(epoch, {"epoch": epoch})[arm] = statistics.fmean(values)
            if labels:
                title = f"{key} on {options.data}, mean over seeds{', by all epochs spent' if counted else ''}"
                curve = curves_svg([history[epoch] for epoch in sorted(history)], labels, title)
                atomic_write_text(options.out / f"{name}.svg", curve)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The arguments, each checked separately."""
    parser = study_parser(
        "studies.fullattention",
        __doc__,
        *("set", "at_once"),
        epochs=50,
        seeds=2,
        precision="auto",
        runs=Path("runs/fullattention-study"),
        out=Path("results/fullattention"),
    )
    parser.add_argument("--first", type=int, default=20, help="epochs of phase 1; the arm alone adds them to --epochs")
    parser.add_argument("--train-epochs", type=int, default=500, help="epochs of each training run")
    parser.add_argument("--channels", type=int, help="width of the trained networks; the recipe's by default")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["both", "alone"], help="what is compared")
    parser.add_argument(
        "--set-training", action="append", default=[], metavar="KEY=VALUE", help="settings of all training runs"
    )
    parser.add_argument("--searched", type=Path, metavar="FILE", help="train what searches of this record found")
    options = parser.parse_args(arguments)
    for name, least in (("seeds", 1), ("first", 1), ("epochs", 1), ("train_epochs", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, but got {getattr(options, name)}")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    # Read now: the record written at the end may be the same file.
    options.known = {} if options.searched is None else known_of(options)
    try:
        run_all(options)
    finally:  # record finished runs even if others failed
        if options.known or any(options.runs.glob("*/run.json")):
            record(options)


def record(options: argparse.Namespace) -> None:
    """Writes and prints the results so far."""
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [measured(arm, seed, options) for seed in range(options.seeds) for arm in options.arms]
    summary = summarise(rows, options.arms)
    draw(rows, options)
    published = "CIFAR-10 error at 80 channels, 500 epochs: 4.38 tied and alone, 4.08 alone, 3.70 both"
    file = record_of(options)
    seconds = "by the clock; runs that share a device (--at-once) wait for each other, so compare epochs"
    write_record(file, "studies.fullattention", rows=rows, summary=summary, seconds=seconds, published=published)
    print_arms(f"{options.data}: with and without phase 1, mean over seeds", rows, summary, file)


if __name__ == "__main__":
    entry(main)
