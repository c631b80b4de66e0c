"""`python -m studies.itnas_nb201`: NAS-Bench-201 searches by several methods in one setting, looked up and ranked.

IT-NAS, SNAS, DARTS (first order) and EnTranNAS search with the same supernet, data, batch size and weight optimiser, 50
epochs on CIFAR-10, all concurrently on one GPU. Their cells are looked up in the table of trained architectures
(IT-NAS, Table 5), and so is the cell of every epoch (Figure 2). On each IT-NAS and DARTS supernet, attention, alpha
and perturbation are compared with the table by Kendall's tau-b per edge (Figures 3, 6-8), along with Zero-Cost-PT.

Stop it at any time (or with --minutes); the same command resumes. Methods and seeds may be split over commands: the
record keeps earlier results, even if their run folders are gone. It is written when the searches end and
after every supernet that was measured, so that nothing is lost. What is unfinished is not measured.

python -m studies.itnas_nb201 --data-root DIR --table nb201_200epochs.csv.gz --minutes 9
python -m studies.itnas_nb201 --data-root DIR --table FILE --methods itnas --seeds 1 2
python -m studies.itnas_nb201 --data digits --scale small --epochs 1 --seeds 0 --table FILE   # a rehearsal
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from softcell.api import compare_indicators
from softcell.app.report import bench201
from softcell.data.catalogue import loaded_once
from softcell.engine import RunFolder, resolve_device
from softcell.errors import UserError
from softcell.evaluate.nb201 import COLUMNS, OPERATIONS, Nb201Table, load_table
from softcell.files import atomic_write_text
from softcell.search import SearchRecipe, resolve
from softcell.settings import assignments, layered
from studies.itnas_readings import FILE as READINGS
from studies.itnas_readings import read_lines, selected
from studies.itnas_readings import show as show_readings
from studies.itnas_taus import NAMES, proxies, rank, show_accuracies, show_taus, summarise_taus
from studies.options import recipe_settings, study_parser
from studies.runs import (
    NOT_MEASURED,
    Deadline,
    entry,
    epochs_of,
    finished,
    run_searches,
    spread,
    without_folders,
    write_record,
)

METHODS = ("itnas", "snas", "darts", "entrannas")
AT_ONCE = 4
"""Searches that share a GPU: eight would run 10 % more steps per second, but all would finish only at the end."""
RANKED = ("itnas", "darts")
"""The methods on whose supernets indicators are compared."""
SHARED = ("batch_size", "weights", "epochs", "split", "drop_path", "child_every", "resource", "validate_every")
"""Settings of IT-NAS's recipe that all methods share, so that they differ only in the method."""
OWN = ("device", "threads", "precision", "engine", "data_root", "seed")
"""What may differ between searches that are compared."""
PUBLISHED = {
    "itnas": "90.15±0.42 93.65±0.04 69.96±1.00 70.31±0.66 43.04±0.58 43.88±0.98",
    "snas": "90.10±1.04 92.77±0.83 69.69±2.39 69.34±1.98 42.84±1.79 43.16±2.64",
    "darts": "39.77±0.00 54.30±0.00 15.03±0.00 15.61±0.00 16.43±0.00 16.32±0.00",
    "optimum": "91.61 94.37 73.49 73.51 46.77 47.31",
}
"""As printed in Table 5 of IT-NAS (six runs), in the order of `COLUMNS`; never ours."""


def recipe_of(method: str, seed: int, options: argparse.Namespace) -> SearchRecipe:
    given = layered({**recipe_settings(options), "space": "nb201", "seed": seed}, assignments(options.set))
    same = resolve({**given, "method": "itnas"}).to_dict()
    given |= {key: same[key] for key in SHARED}
    if method == "itnas":  # memory is not studied here
        given["method_settings"] = {"recompute": False, **given.get("method_settings", {})}
    else:
        given.pop("method_settings", None)  # --set method.…: IT-NAS's own
        # They do not derive from a pass over the validation half: an occasional pass shows their progress.
        given["validate_every"] = max(same["validate_every"], 10)
    return resolve({**given, "method": method})


def folder_of(method: str, seed: int, options: argparse.Namespace) -> Path:
    return Path(options.runs) / f"{method}-{Path(options.data).stem}-{seed}"


def measured(method: str, seed: int, table: Nb201Table, before: dict[str, Any], options: argparse.Namespace) -> Any:
    """One search: its cell and the table's accuracies for it and for each epoch's cell; or its progress."""
    folder = folder_of(method, seed, options)
    epochs = epochs_of(folder)
    if not finished(folder):
        return before if "recipe" in before else {"method": method, "seed": seed, "epochs_done": len(epochs)}
    manifest = RunFolder.open(folder).manifest
    (found,) = bench201.bench_runs(table, [folder])
    return {
        "method": method,
        "seed": seed,
        "epochs_done": len(epochs),
        **bench201.to_dict(found),
        "seconds": manifest["results"]["seconds"],
        "selection": manifest["results"].get("selection"),
        **readings(method, seed, table, options),
        "supernet": {key: epochs[-1].get(key) for key in ("train_accuracy", "val_accuracy")},
        **{key: before[key] for key in ("indicators", "taus") if key in before},
        **{key: manifest[key] for key in ("recipe", "hardware", "versions", "git")},
    }


def readings(method: str, seed: int, table: Nb201Table, options: argparse.Namespace) -> dict[str, Any]:
    """The cells selected by other aggregates; the rows of all cells and passes are stored next to the record."""
    file = folder_of(method, seed, options) / READINGS
    if not file.is_file():
        return {}
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / f"attention-{Path(options.data).stem}-{seed}.jsonl"
    atomic_write_text(kept, file.read_text("utf-8"))
    return {"readings": selected(table, read_lines(file))}


def indicators(method: str, seed: int, row: dict[str, Any], deadline: Deadline, options: argparse.Namespace) -> Any:
    """Indicators on the supernet of a finished search [6][5] by name; computed once, stored in its folder."""
    folder = folder_of(method, seed, options)
    file = folder / "indicators.json"
    if "recipe" not in row or method not in RANKED:
        return None
    if not file.is_file():
        if not (folder / "checkpoint.bin").is_file() or deadline.passed:
            return row.get("indicators", NOT_MEASURED)
        # The method's own alpha or attention exists already; the other is trained on the frozen supernet.
        deadline.log(f"{folder.name}: indicators")
        found = compare_indicators(
            folder, NAMES, epochs=options.indicator_epochs, device=options.device, data_root=options.data_root
        )
        atomic_write_text(file, json.dumps(found, indent=2) + "\n")
    values = json.loads(file.read_text("utf-8"))["values"]
    return {name: values[name]["cell"] for name in values}


def read_before(
    record: Path, options: argparse.Namespace
) -> tuple[dict[tuple[str, int], dict[str, Any]], dict[str, Any]]:
    """The finished rows of an earlier record, and its Zero-Cost-PT results; they must come from one setting."""
    if not record.is_file():
        return {}, {}
    try:
        found, content = {}, json.loads(record.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{record} is no record of this study ({error}); choose another --out, or remove it") from error
    for row in content["rows"]:
        if "recipe" not in row:
            continue
        wanted = recipe_of(row["method"], row["seed"], options).to_dict()
        # Settings newer than the record have their defaults, as in a resumed run.
        known = resolve(row["recipe"]).to_dict()
        other = [k for k, v in wanted.items() if k not in OWN and without_folders(v) != without_folders(known[k])]
        if other:
            raise UserError(
                f"searches that are compared must have one setting, but {row['method']} {row['seed']} in {record} has "
                f"another {', '.join(other)}; choose another --out, or remove the record"
            )
        found[row["method"], row["seed"]] = row
    same = content.get("space_settings") == recipe_of("itnas", 0, options).space_settings
    known = content["zero_cost"] if same else {}
    return found, {name: ranked for name, ranked in known.items() if ranked != NOT_MEASURED}


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    table, deadline = load_table(options.table), Deadline(options.minutes)
    before, zero_cost = read_before(_record(options), options)
    wanted = [(method, seed) for seed in options.seeds for method in options.methods]
    left = [pair for pair in wanted if pair not in before or (folder_of(*pair, options) / "run.json").is_file()]
    with loaded_once():
        run_searches(
            [(recipe_of(*pair, options), folder_of(*pair, options)) for pair in left],
            deadline,
            options.device,
            options.at_once or (AT_ONCE if resolve_device(options.device).type == "cuda" else 1),
        )
        rows = [measured(*pair, table, before.get(pair, {}), options) for pair in dict.fromkeys((*before, *wanted))]
        rows.sort(key=lambda row: (METHODS.index(row["method"]), row["seed"]))
        write(table, rows, zero_cost, options)
        for row in rows:
            row["indicators"] = indicators(row["method"], row["seed"], row, deadline, options)
            row["taus"] = rank(table, row["indicators"])
            write(table, rows, zero_cost, options)
        zero_cost = proxies(table, options, recipe_of("darts", 0, options), deadline, zero_cost)
    summary, runs = write(table, rows, zero_cost, options)
    console = Console(width=None if sys.stdout.isatty() else 140)
    methods = list(summary["accuracies"])
    show_accuracies(console, table, runs, methods, {m: f"{_done(rows, m)} done" for m in methods}, PUBLISHED)
    show_taus(console, summary["taus"])
    if found := [row["readings"] for row in rows if row.get("readings")]:
        show_readings(console, found)
    console.print(f"written: {_record(options)}")


def _record(options: argparse.Namespace) -> Path:
    found: Path = options.out / f"nb201-{Path(options.data).stem}.json"
    return found


def write(
    table: Nb201Table, rows: list[dict[str, Any]], zero_cost: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, Any], list[bench201.Benched]]:
    """Writes the record and the drawings; returns its summary and the finished searches."""
    runs = [bench201.from_dict(table, f"{row['method']}-{row['seed']}", row) for row in rows if "recipe" in row]
    methods = list(dict.fromkeys([*(row["method"] for row in rows), *options.methods]))
    summary = {
        "accuracies": {m: _accuracies([run for run in runs if run.method == m]) for m in methods},
        "taus": summarise_taus(rows, zero_cost),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for column in ("cifar10_valid", "cifar10_test") if runs else ():
        file = options.out / f"trajectory-{Path(options.data).stem}-{column.rsplit('_')[-1]}.svg"
        atomic_write_text(file, bench201.trajectory_svg(runs, column))
    write_record(
        _record(options),
        "studies.itnas_nb201",
        rows=rows,
        zero_cost=zero_cost,
        space_settings=recipe_of("itnas", 0, options).space_settings,
        summary=summary,
        optimum=table.optimum(),
        random=table.chance(),
        published=PUBLISHED,
    )
    return summary, runs


def _accuracies(runs: list[bench201.Benched]) -> Any:
    return {c: spread([run.accuracies[c] for run in runs]) for c in COLUMNS} if runs else NOT_MEASURED


def _done(rows: list[dict[str, Any]], method: str) -> str:
    own = [row for row in rows if row["method"] == method]
    return f"{sum('recipe' in row for row in own)}/{len(own)}"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = study_parser(
        "studies.itnas_nb201",
        __doc__,
        *("epochs", "scale", "precision", "engine", "set", "at_once"),
        runs=Path("runs/nb201-evidence"),
        out=Path("results/itnas"),
    )
    parser.add_argument("--table", type=Path, required=True, help="the NAS-Bench-201 table, .csv or .csv.gz")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="which searches")
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=[0, 1, 2], metavar="SEED", help="of each; none: no search"
    )
    parser.add_argument(
        "--indicator-epochs", type=int, default=1, help="of attention on DARTS's supernets, of alpha on IT-NAS's"
    )
    parser.add_argument("--proxies", type=int, default=1, metavar="SEEDS", help="seeds of Zero-Cost-PT; 0: without")
    found = parser.parse_args(arguments)
    check_candidates(recipe_of("itnas", 0, found))
    return found


def check_candidates(recipe: SearchRecipe) -> None:
    """Raises if a search has different candidates from the table."""
    candidates = recipe.space_settings.get("candidates")
    if list(candidates or OPERATIONS) != list(OPERATIONS):
        raise UserError(f"the table has the candidates {', '.join(OPERATIONS)} in this order, got {candidates}")


if __name__ == "__main__":
    entry(main)
