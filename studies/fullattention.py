"""`python -m studies.fullattention`: does context auto-regression help the search? (Figure 6 a, b; Table VII)

Two arms at equal total cost on one dataset: `both` searches by context auto-regression for --first epochs without
labels and then for --epochs on the target task; `alone` searches for --first + --epochs on the target task from random
logits. What each finds is trained equally long and measured on the test set. Curves and record go to
`results/fullattention/`. Stop it at any time (or with --minutes); the same command goes on. What is unfinished is
recorded as not measured.

python -m studies.fullattention --data-root DIR --first 10 --epochs 15 --train-epochs 20 --minutes 9
python -m studies.fullattention --data digits --first 1 --epochs 1 --train-epochs 1 --seeds 1      # a rehearsal
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from softcell.api import layered
from softcell.arch import Genotype
from softcell.engine import RunFolder
from softcell.engine.files import atomic_write_text
from softcell.evaluate import resolve as resolve_training
from softcell.evaluate import stored_training, train
from softcell.report import curves_svg
from softcell.report.svg import to_svg
from softcell.search import SearchRecipe, resolve
from softcell.search.phases import FIRST
from softcell.settings import assignments
from studies.runs import NOT_MEASURED, Deadline, carry_on, epochs_of, spread, write_record

ARMS = ("both", "alone")
CURVES = ("train_loss", "train_accuracy", "val_loss", "val_accuracy", "entropy")


def common(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    given = {"data": options.data, "data_root": options.data_root, "device": options.device, "seed": seed}
    return {**{key: value for key, value in given.items() if value is not None}, "precision": options.precision}


def recipe_of(arm: str, seed: int, options: argparse.Namespace) -> SearchRecipe:
    given = {**common(options, seed), "method": "fullattention"}
    if arm == "both":
        own: dict[str, Any] = {"epochs": options.epochs, "pretrain": {"epochs": options.first}}
    else:
        own = {
            "epochs": options.first + options.epochs,
            "pretrain": {"epochs": 0},
            "method_settings": {"init_scale": 1e-3},
        }
    return resolve(layered(given, own, assignments(options.set)))


def folder_of(arm: str, seed: int, options: argparse.Namespace) -> Path:
    return Path(options.runs) / f"{arm}-{Path(options.data).stem}-{seed}"


def finished(folder: Path) -> bool:
    return (folder / "run.json").is_file() and RunFolder.open(folder).manifest["status"] == "finished"


def train_found(folder: Path, seed: int, options: argparse.Namespace, deadline: Deadline) -> None:
    """Trains what a search found, or goes on with it."""
    place, genotype = folder / "training", Genotype.load(folder)
    if finished(place) or deadline.passed:
        return
    begun = (place / "run.json").is_file()
    if begun:
        genotype, recipe = stored_training(place, {})
    else:
        own = {"epochs": options.train_epochs, "space_settings": {}}
        if options.channels is not None:
            own["space_settings"] = {"channels": options.channels}
        recipe = resolve_training(genotype, layered(common(options, seed), own))
    train(genotype, recipe, place, resume=begun, on_event=deadline)


def measured(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """What one search and its training gave, or how far they have come."""
    folder = folder_of(arm, seed, options)
    rows, before = epochs_of(folder), epochs_of(folder / FIRST)
    row: dict[str, Any] = {"arm": arm, "seed": seed, "epochs_done": [len(before), len(rows)]}
    row["curves"] = {key: [r.get(key) for r in rows] for key in CURVES}
    row["first_phase"] = {key: [r.get(key) for r in before] for key in CURVES}
    if not finished(folder):
        return {**row, "search": NOT_MEASURED, "trained": NOT_MEASURED}
    manifest, genotype = RunFolder.open(folder).manifest, Genotype.load(folder)
    seconds = sum(r["seconds"] for r in (*before, *rows))
    row["search"] = {
        "val_accuracy": manifest["results"]["val_accuracy"],
        "split": manifest["results"]["val_split"],
        "seconds": seconds,
        "genotype": genotype.to_dict(),
        "recipe": manifest["recipe"],
        "hardware": manifest["hardware"],
        "versions": manifest["versions"],
    }
    atomic_write_text(options.out / f"{arm}-{seed}.svg", to_svg(genotype, f"{arm} on {options.data}, seed {seed}"))
    place = folder / "training"
    row["trained"] = NOT_MEASURED
    if finished(place):
        results = RunFolder.open(place).manifest["results"]
        kept = ("accuracy", "split", "count", "parameters", "multiply_adds", "seconds")
        row["trained"] = {key: results[key] for key in kept}
    return row


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for arm in ARMS:
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
    """Training loss and accuracy of the searches on the target task (Figure 6 a, b), as means over finished seeds."""
    for key in ("train_loss", "train_accuracy", "val_accuracy"):
        history: list[dict[str, Any]] = [{"epoch": e} for e in range(options.first + options.epochs)]
        labels = []
        for arm in ARMS:
            done = [r["curves"][key] for r in rows if r["arm"] == arm and r["search"] != NOT_MEASURED]
            if done:
                labels.append(arm)
            for epoch, values in enumerate(zip(*done, strict=True)):
                if None not in values:
                    history[epoch][arm] = statistics.fmean(values)
        if labels:
            title = f"{key} on {options.data}, mean over seeds"
            atomic_write_text(options.out / f"{key}.svg", curves_svg(history, labels, title))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies.fullattention", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--data", default="cifar10", help="dataset")
    parser.add_argument("--data-root", help="where named data lie")
    parser.add_argument("--first", type=int, default=20, help="epochs of phase 1")
    parser.add_argument("--epochs", type=int, default=50, help="epochs of phase 2; the arm alone has both together")
    parser.add_argument("--train-epochs", type=int, default=500, help="of what was found")
    parser.add_argument("--channels", type=int, help="width of what is trained; else the recipe's")
    parser.add_argument("--seeds", type=int, default=2, help="searches per arm")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--precision", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of all searches")
    parser.add_argument("--minutes", type=float, help="stop after so long; the same command goes on")
    parser.add_argument("--runs", type=Path, default=Path("runs/fullattention-study"), help="where the runs lie")
    parser.add_argument("--out", type=Path, default=Path("results/fullattention"), help="where record and curves go")
    options = parser.parse_args(arguments)
    deadline = Deadline(options.minutes)
    for seed in range(options.seeds):
        for arm in ARMS:
            folder = folder_of(arm, seed, options)
            if carry_on(recipe_of(arm, seed, options), folder, deadline) is not None:
                train_found(folder, seed, options, deadline)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [measured(arm, seed, options) for seed in range(options.seeds) for arm in ARMS]
    summary = summarise(rows)
    draw(rows, options)
    published = "CIFAR-10 error at 80 channels: 4.08 without, 3.70 with context auto-regression (500 epochs)"
    record = options.out / f"phases-{Path(options.data).stem}.json"
    write_record(record, "studies.fullattention", rows=rows, summary=summary, published=published)
    table = Table(title=f"{options.data}: with and without phase 1, mean over seeds")
    for column in ("arm", "search, validation", "trained, test"):
        table.add_column(column, justify="right")
    for arm, found in summary.items():
        shown = (found[k] for k in ("search_accuracy", "test_accuracy"))
        table.add_row(arm, *(v if isinstance(v, str) else f"{v['mean']:.2%} (n={v['n']})" for v in shown))
    console = Console()
    console.print(table)
    console.print(f"written: {record}")


if __name__ == "__main__":
    main()
