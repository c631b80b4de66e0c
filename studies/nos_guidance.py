"""`python -m studies.nos_guidance`: guided against unguided search (NOS, Figure 5 and Table 4).

One teacher is trained; NOS searches with and without it, with the same seeds and epochs, and every derived
network is trained for the same number of epochs. Runs share one GPU. Record and curves go to
`results/nos/`. Stop it at any time (or with --minutes); the same command resumes. Unfinished runs are recorded as not
measured. If the run folders are gone, --searched reads finished searches from a record and trains their networks.

python -m studies.nos_guidance --data-root DIR --teacher resnet18 --teacher-epochs 30 --train-epochs 30 --minutes 9
python -m studies.nos_guidance --data digits --teacher resnet18 --teacher-epochs 1 --search-epochs 1 --train-epochs 1
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from softcell.app.report import curves_svg
from softcell.arch import Genotype, sample
from softcell.engine import RunFolder
from softcell.evaluate import resolve as resolve_training
from softcell.evaluate.teacher import resolve_teacher, stored_teacher, train_teacher
from softcell.files import atomic_write_text
from softcell.search import SearchRecipe, resolve
from softcell.settings import assignments, layered
from softcell.spaces import build_space
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

ARMS = ("unguided", "guided")
CURVES = ("train_accuracy", "val_accuracy")  # of the proxy network, Figure 5
MEASURES = {"search_accuracy": ("search", "val_accuracy"), "test_accuracy": ("trained", "accuracy")}


def common(options: argparse.Namespace) -> dict[str, Any]:
    return recipe_settings(options, ("data", "data_root", "device", "precision"))


def teacher_of(options: argparse.Namespace) -> Path:
    return Path(options.runs) / f"teacher-{options.teacher}-{Path(options.data).stem}"


def folder_of(arm: str, seed: int, options: argparse.Namespace) -> Path:
    return Path(options.runs) / f"{arm}-{Path(options.data).stem}-{seed}"


def record_of(options: argparse.Namespace) -> Path:
    return Path(options.out) / f"guidance-{Path(options.data).stem}.json"


def recipe_of(arm: str, seed: int, options: argparse.Namespace) -> SearchRecipe:
    given: dict[str, Any] = {**common(options), "method": "nos", "space": "nos", "seed": seed}
    given |= {} if options.scale is None else {"scale": options.scale}
    given |= {} if options.search_epochs is None else {"epochs": options.search_epochs}
    # The path as given: a study whose runs are copied to another machine resumes there.
    given |= {"guide": {"teacher": str(teacher_of(options))}} if arm == "guided" else {}
    return resolve(layered(given, assignments(options.search_set)))


def teaching_of(options: argparse.Namespace) -> dict[str, Any]:
    """Training settings of the teacher."""
    own: dict[str, Any] = {"seed": 0}
    if options.teacher_epochs is not None:
        # The learning rate is divided by 10 twice. The paper does it nine times in 300 epochs; in a few epochs that
        # would end learning after the first.
        own |= {"epochs": options.teacher_epochs, "lr_every": -(-options.teacher_epochs // 3)}
    return layered(common(options), own, assignments(options.teacher_set))


def training_of(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Training settings of a derived network."""
    own: dict[str, Any] = {**common(options), "seed": seed}
    own |= {} if options.train_epochs is None else {"epochs": options.train_epochs}
    return layered(own, assignments(options.train_set))


def teach(options: argparse.Namespace, deadline: Deadline) -> bool:
    """Trains the teacher if necessary; whether it is available."""
    folder, given = teacher_of(options), teaching_of(options)
    if not finished(folder) and not deadline.passed:
        begun = (folder / "run.json").is_file()
        recipe = stored_teacher(folder, given) if begun else resolve_teacher(options.teacher, given)
        train_teacher(recipe, folder, resume=begun, on_event=deadline.watching("teacher"))
    return finished(folder)


def check(options: argparse.Namespace) -> None:
    """Raises any error in the settings of the runs before the first one starts, not after hours.

    Existing runs must belong to this study, even if there is no time to resume them.
    """
    resolve_teacher(options.teacher, teaching_of(options))
    if (teacher_of(options) / "run.json").is_file():
        stored_teacher(teacher_of(options), teaching_of(options))
    for seed in options.seeds:
        for arm in ARMS:
            recipe = recipe_of(arm, seed, options)
            known, folder = options.known.get((arm, seed)), folder_of(arm, seed, options)
            check_resumable(known, recipe, folder, training_of(seed, options))
        space = build_space(recipe.space, recipe.space_settings)
        resolve_training(sample(space.layout(), seed), training_of(seed, options))


def known_of(options: argparse.Namespace) -> Rows:
    """The searches that --searched has."""
    recipes = {(arm, seed): recipe_of(arm, seed, options) for seed in options.seeds for arm in ARMS}
    return recorded_searches(options.searched, recipes, partial(training_of, options=options), record_of(options))


def all_taught(options: argparse.Namespace) -> bool:
    """Whether --searched has all guided searches, so that no teacher is needed."""
    return all(("guided", seed) in options.known for seed in options.seeds)


def run_all(options: argparse.Namespace) -> None:
    """Runs or resumes all unfinished runs concurrently until they are finished or the time is up."""
    check(options)
    deadline, starts = Deadline(options.minutes), []
    if not (all_taught(options) or teach(options, deadline)) or deadline.passed:
        return
    for seed in options.seeds:
        own = training_of(seed, options)
        for arm in ARMS:
            folder, recipe = folder_of(arm, seed, options), recipe_of(arm, seed, options)
            starts.append(partial(remaining_steps, options.known.get((arm, seed)), recipe, folder, own, deadline))
    run_interleaved(starts, options.device or "auto", options.at_once)


def measured(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The results of one search and its training run, or their progress."""
    row, folder = options.known.get((arm, seed)) or searched(arm, seed, options), folder_of(arm, seed, options)
    kept = ("accuracy", "split", "parameters", "multiply_adds", "seconds")
    drawing, title = options.out / f"{folder.name}.svg", f"{arm} on {options.data}, seed {seed}"
    return with_training(row, folder / "training", kept, drawing, title)


def searched(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The results of one search, or its progress."""
    folder = folder_of(arm, seed, options)
    rows = epochs_of(folder)
    row: dict[str, Any] = {"arm": arm, "seed": seed, "epochs_done": [len(rows), 0]}
    row["curves"] = {key: [r.get(key) for r in rows] for key in (*CURVES, "guide_loss") if any(key in r for r in rows)}
    row["gradient_norms"] = {k: v for k, v in (rows[0] if rows else {}).items() if k.startswith("gradient_norm")}
    row["search"] = row["trained"] = NOT_MEASURED
    if finished(folder):
        manifest = RunFolder.open(folder).manifest
        row["search"] = {
            **{key: manifest["results"][key] for key in ("val_accuracy", "val_split", "seconds")},
            "genotype": Genotype.load(folder).to_dict(),
            **{key: manifest[key] for key in ("recipe", "hardware", "versions")},
        }
    return row


def taught(options: argparse.Namespace) -> dict[str, Any]:
    """The teacher, with its own accuracy."""
    folder, about = teacher_of(options), {"architecture": options.teacher}
    if not finished(folder):
        if all_taught(options):  # by the teacher of the record
            known: dict[str, Any] = json.loads(options.searched.read_text())["teacher"]
            return known
        return {**about, "epochs_done": len(epochs_of(folder)), "test_accuracy": NOT_MEASURED}
    manifest = RunFolder.open(folder).manifest
    numbers = {key: manifest["results"][key] for key in ("parameters", "multiply_adds", "seconds")}
    accuracy = manifest["results"]["accuracy"]
    measured = NOT_MEASURED if accuracy is None else accuracy
    return {**about, "test_accuracy": measured, **numbers, "recipe": manifest["recipe"]}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for arm in ARMS:
        own = [row for row in rows if row["arm"] == arm]
        values = {name: [v for row in own if (v := value_of(row, name)) is not None] for name in MEASURES}
        found[arm] = {name: spread(known) if known else NOT_MEASURED for name, known in values.items()}
    return found


def differences(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Guided minus unguided for the same seed (cf. Table 4), for seeds with both measured."""
    found: dict[str, Any] = {}
    for name in MEASURES:
        by_seed = {(row["arm"], row["seed"]): value_of(row, name) for row in rows}
        pairs = {seed: (by_seed["guided", seed], by_seed["unguided", seed]) for _, seed in by_seed}
        gained = {seed: a - b for seed, (a, b) in pairs.items() if a is not None and b is not None}
        found[name] = {**spread(list(gained.values())), "by_seed": gained} if gained else NOT_MEASURED
    return found


def value_of(row: dict[str, Any], name: str) -> float | None:
    """An accuracy of one row, or None if it is not measured."""
    part, key = MEASURES[name]
    value: float | None = None if row[part] == NOT_MEASURED else row[part][key]
    return value


def draw(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Accuracy of the proxy network over the epochs (Figure 5), averaged over the seeds so far."""
    history: list[dict[str, Any]] = []
    labels = []
    for arm in ARMS:
        for key in CURVES:
            runs = [row["curves"][key] for row in rows if row["arm"] == arm and key in row["curves"]]
            label = f"{arm} {key.split('_')[0]}"
            labels += [label] if runs else []
            for epoch, values in enumerate(zip(*runs, strict=False)):
                while len(history) <= epoch:
                    history.append({"epoch": len(history)})
                if None not in values:
                    history[epoch][label] = statistics.fmean(values)
    if labels:
        title = f"NOS search on {options.data}: accuracy of the proxy network, mean over seeds"
        atomic_write_text(record_of(options).with_suffix(".svg"), curves_svg(history, labels, title))


def main(arguments: list[str] | None = None) -> None:
    parser = study_parser(
        "studies.nos_guidance",
        __doc__,
        *("precision", "at_once"),
        device=None,
        runs=Path("runs/nos-study"),
        out=Path("results/nos"),
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of searches and training runs")
    parser.add_argument("--scale", choices=("paper", "small"), help="by default the one that fits the data")
    parser.add_argument("--teacher", default="pyramidnet", help="pyramidnet or resnet18")
    parser.add_argument("--teacher-epochs", type=int, help="else the recipe's")
    parser.add_argument("--search-epochs", type=int, help="else the recipe's")
    parser.add_argument("--train-epochs", type=int, help="of every derived network; else the recipe's")
    for part in ("teacher", "search", "train"):
        parser.add_argument(f"--{part}-set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--searched", type=Path, metavar="FILE", help="train what searches of this record found")
    options = parser.parse_args(arguments)
    options.known = {} if options.searched is None else known_of(options)
    run_all(options)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [measured(arm, seed, options) for seed in options.seeds for arm in ARMS]
    summary, teacher = summarise(rows), taught(options)
    draw(rows, options)
    published = "CIFAR-10 test error 3.44 without and 2.53 with guidance (Table 4; 25 and 600 epochs)"
    record, gained = record_of(options), differences(rows)
    write_record(
        record,
        "studies.nos_guidance",
        teacher=teacher,
        rows=rows,
        summary=summary,
        guided_less_unguided=gained,
        published=published,
    )
    shown = teacher["test_accuracy"]
    shown = shown if isinstance(shown, str) else f"{shown:.2%} on the test split"
    print_arms(f"{options.data}: with and without a teacher ({options.teacher}: {shown})", rows, summary, record)
    for name, found in gained.items():
        text = found if isinstance(found, str) else f"{100 * found['mean']:+.2f} points (n={found['n']})"
        print(f"guided less unguided, {name.replace('_', ' ')}: {text}")


if __name__ == "__main__":
    entry(main)
