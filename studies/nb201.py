"""`python -m studies.nb201`: every method in NAS-Bench-201 under one recipe, looked up in the table of trained cells.

All searches use the supernet, data, batch size, weight optimiser and length of one recipe (IT-NAS's: 50 epochs, first
order unless an arm says otherwise); methods keep their own settings. Recipes and arms were fixed before the first
look-up, except those in `ON_REQUEST`. `random` and `random-20` train individual cells and keep the best on the
validation half; every other arm is compared with their result after the same number of seconds. `random cell`, the best
of 10 and of 100 random cells and `optimum` come from the table. GPU memory is that of one search, even if several share
the GPU; the seconds of an epoch are then divided by the number of searches that shared the GPU in it. Kendall's tau per
edge compares indicators with the table: the method's own, that of a selection by perturbation, with --indicators
perturbation and discretisation on every trained supernet, and with --proxies Zero-Cost-PT on untrained ones.

Every finished search is one file, OUT/rows/ARM-DATA-SEED.json, so that several commands and machines can fill the table
together. Stop a command at any time (or with --minutes); the same command resumes.

python -m studies.nb201 --data-root DIR --table nb201_200epochs.csv.gz --arms snas gdas --seeds 0 1 --minutes 9
python -m studies.nb201 --table FILE --seeds        # only the table, no search
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from softcell.api import compare_indicators
from softcell.app.report import bench201
from softcell.app.report.charts import curves_svg
from softcell.app.report.compare import summarise
from softcell.arch.notation import from_nb201
from softcell.engine import RunFolder, resolve_device
from softcell.errors import UserError
from softcell.evaluate.nb201 import COLUMNS, EDGES, OPERATIONS, SETS, Nb201Table, load_table, mean_tau, taus
from softcell.files import atomic_write_text
from softcell.search import SearchRecipe, resolve
from softcell.settings import assignments, layered
from studies.itnas_nb201 import AT_ONCE, SHARED, check_candidates
from studies.itnas_taus import proxies, rank, show_taus, summarise_taus
from studies.options import recipe_settings, study_parser
from studies.runs import (
    NOT_MEASURED,
    Deadline,
    PeakMemory,
    entry,
    epochs_of,
    finished,
    run_searches,
    sharing_of,
    spread,
    without_folders,
    write_record,
)

PT: dict[str, Any] = {"select": {"by": "perturbation"}}
SCORES = ("jacob-cov", "grad-norm", "snip", "grasp", "fisher", "zico", "params", "flops")
"""Arms of zero-cost search by other scores; added after the first look-up, with the settings of SynFlow and NASWOT."""
ARMS: dict[str, dict[str, Any]] = {
    "darts": {},
    "darts-2nd": {"method": "darts", "regime": "unrolled"},
    "darts-pt": {"method": "darts", **PT},
    "snas": {},
    "gdas": {},
    "drnas": {},
    "beta-darts": {},
    "darts-minus": {},
    "pc-darts": {},
    "edge-normalised": {},
    "entrannas": {},
    "itnas": {},
    "itnas-post-norm": {"method": "itnas", "method_settings": {"token_norm": False}},
    "itnas-pt": {"method": "itnas", **PT},
    "spos": {},
    "random": {"epochs": 10, "method_settings": {"samples": 10}},
    "evolution": {"epochs": 10, "method_settings": {"population": 4, "tournament": 2, "samples": 10}},
    "zero-cost": {},
    "naswot": {"method": "zero-cost", "method_settings": {"proxy": "naswot"}},
    "gdas-released": {"method": "gdas", "method_settings": {"unsampled": "constant"}},
    "gdas-250": {
        "method": "gdas",
        "epochs": 250,
        "weights": {"weight_decay": 5e-4},
        "method_settings": {"unsampled": "constant"},
    },
    "beta-darts-100": {"method": "beta-darts", "epochs": 100},
    "pc-darts-256": {"method": "pc-darts", "batch_size": 256, "weights": {"lr": 0.1, "lr_min": 0.0}},
    "darts-partial-100": {"method": "darts", "epochs": 100, "space_settings": {"partial_channels": 4}},
    "random-20": {"method": "random", "epochs": 10, "method_settings": {"samples": 20}},
    "itnas-fixed-values": {"method": "itnas", "method_settings": {"learned_values": False, "feed_forward": False}},
    "itnas-flat": {"method": "itnas", "method_settings": {"tokens": "flat", "token_norm": False}},
    "itnas-shared": {"method": "itnas", "method_settings": {"shared": True}},
    **{arm: {"method": "zero-cost", "method_settings": {"proxy": arm.replace("-", "_")}} for arm in SCORES},
}
"""The settings of each arm; the method has the name of the arm unless it is given."""

AUTHORS = ("gdas-released", "gdas-250", "beta-darts-100", "pc-darts-256", "darts-partial-100")
"""Arms that follow the authors' code instead of the common recipe.

They were added after the look-up of seeds 0 and 1, where GDAS (75.3), PC-DARTS (88.4) and β-DARTS (93.7) were below
their published means, to find out why. Nothing in them was chosen using the table: GDAS's released gradient
and its 250 epochs, β-DARTS's 100 epochs (λ grows half as fast), PC-DARTS's batches, and the partial channels without
edge normalisation of DrNAS's repository, the one public form of PC-DARTS for this space.
"""

READINGS = ("itnas-fixed-values", "itnas-flat", "itnas-shared")
"""Arms that test why IT-NAS is below its published mean; each has its prediction on IT-NAS's page."""

RANDOM = ("random-20", "random")
"""Arms that others are compared with after the same time: the first one that has `ENOUGH` seeds.

`random` was measured when random search still trained module by module, at half the speed of fused cells. With these it
trains 10 cells in less time than most searches take, so `random-20` was added.
"""
ENOUGH = 4
"""Minimum number of seeds of a result."""

ON_REQUEST = (*AUTHORS, *READINGS, *SCORES, "random-20")
"""Arms that run only if named by --arms."""

BEST_OF = (10, 100)
"""Numbers of random cells of which the best by CIFAR-10 validation accuracy is a row of the table."""

RANKED_BY = "cifar10_test"
"""The accuracies that indicators are compared with, and those over the seconds of a search."""

SEPARATE = (*RANDOM, "evolution", "zero-cost", "naswot", *SCORES)
"""Arms without a supernet: they take the data's split and batch size from the recipe, not its length."""

PUBLISHED = {
    "darts": (54.30, 0.00),
    "snas": (92.77, 0.83),
    "gdas": (93.61, 0.09),
    "gdas-250": (93.61, 0.09),
    "drnas": (94.36, 0.00),
    "beta-darts": (94.36, 0.00),
    "beta-darts-100": (94.36, 0.00),
    "darts-minus": (93.80, 0.40),
    "pc-darts": (93.41, 0.30),
    "itnas": (93.65, 0.04),
}
"""CIFAR-10 test accuracies that the papers print (PC-DARTS: IT-NAS's Table 5); never ours."""


def recipe_of(arm: str, seed: int, options: argparse.Namespace) -> SearchRecipe:
    """The recipe of an arm: the common one, then what the arm changes, then --set."""
    own = {"method": arm, **ARMS[arm]}
    given = {**recipe_settings(options), "space": "nb201", "seed": seed}
    common = resolve({**given, "method": "itnas"}).to_dict()
    shared = {key: common[key] for key in SHARED if arm not in SEPARATE or key in ("batch_size", "split", "weights")}
    if own["method"] == "itnas":  # recomputing saves memory, which is not scarce here
        own["method_settings"] = {"recompute": False, **own.get("method_settings", {})}
    elif arm not in SEPARATE:
        # Validation does not affect what these methods derive: an occasional pass shows their progress.
        shared["validate_every"] = max(common["validate_every"], 10)
    return resolve(layered(given, shared, own, assignments(options.set)))


def label(arm: str, seed: int, options: argparse.Namespace) -> str:
    return f"{arm}-{Path(options.data).stem}-{seed}"


def row_of(
    arm: str, seed: int, table: Nb201Table, options: argparse.Namespace, at_once: int = 1, memory: int | None = None
) -> dict[str, Any]:
    """The results of a finished search, with everything the table needs once its folder is gone.

    Args:
        at_once: how many searches shared the device, if the folder has no record of it.
        memory: peak in bytes.
    """
    folder = options.runs / label(arm, seed, options)
    manifest = RunFolder.open(folder).manifest
    (found,) = bench201.bench_runs(table, [folder])
    epochs = epochs_of(folder)
    shared_by = sharing_of(folder, len(epochs))
    row = {
        "date": manifest["finished"],
        "arm": arm,
        "data": Path(options.data).stem,
        **bench201.to_dict(found),
        "seconds": manifest["results"]["seconds"],
        "seconds_by_epoch": list(accumulate(epoch["seconds"] for epoch in epochs)),
        "at_once": max(shared_by) if shared_by else at_once,
        "at_once_by_epoch": shared_by,
        "memory": memory,
        "perturbation": _removals(manifest["results"].get("perturbation")),
        "supernet": {key: epochs[-1].get(key) for key in ("train_accuracy", "val_accuracy")} if epochs else {},
        **{key: manifest[key] for key in ("recipe", "hardware", "versions", "git")},
    }
    return cast(dict[str, Any], without_folders(row))


def device_seconds(row: Mapping[str, Any], epoch: int | None = None) -> float:
    """A search's share of the device's time, whole or up to the end of an epoch.

    The seconds of an epoch are divided by the number of searches that shared the device in it. Rows of earlier versions
    have one number for all epochs.
    """
    shared_by = row.get("at_once_by_epoch")
    if not shared_by:
        seconds = row["seconds"] if epoch is None else row["seconds_by_epoch"][epoch]
        return float(seconds) / int(row["at_once"])
    ends = [0.0, *row["seconds_by_epoch"]]
    shares = [(end - start) / count for start, end, count in zip(ends, ends[1:], shared_by, strict=False)]
    if epoch is not None:
        return float(sum(shares[: epoch + 1]))
    return float(sum(shares) + (row["seconds"] - ends[-1]) / shared_by[-1])  # deriving a cell follows the last epoch


def _removals(selection: Mapping[str, Any] | None) -> list[list[float]] | None:
    """The indicator [6][5] of a selection by perturbation: how much worse the supernet is without an operation."""
    if selection is None:
        return None
    sign = -1.0 if selection["measure"] == "accuracy" else 1.0
    without = {edge["edge"]: edge["without"] for edge in selection["edges"]}
    return [
        [sign * without[f"{source}->{target}"][op][selection["measure"]] for op in OPERATIONS]
        for source, target in EDGES
    ]


def add_indicators(file: Path, folder: Path, deadline: Deadline, options: argparse.Namespace) -> None:
    """Adds perturbation and discretisation on a search's supernet to its row, once."""
    row = json.loads(file.read_text("utf-8"))
    if row["arm"] in SEPARATE or "indicators" in row or deadline.passed or not (folder / "checkpoint.bin").is_file():
        return
    deadline.log(f"{folder.name}: indicators")
    names = ("perturbation", "discretisation")
    values = compare_indicators(folder, names, device=options.device, data_root=options.data_root)["values"]
    row["indicators"] = {name: values[name]["cell"] for name in names}
    atomic_write_text(file, json.dumps(row, indent=1) + "\n")


def indicators_in(row: Mapping[str, Any]) -> dict[str, Any]:
    """All indicators [6][5] of a row by name; rows of earlier versions have only their method's."""
    selected = {"selection by perturbation": row.get("perturbation")}
    found = {"own": row["indicator"], **selected, **row.get("indicators", {})}
    return {name: values for name, values in found.items() if values is not None}


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """All measured rows, ordered by arm and seed."""
    rows = [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]
    unknown = sorted({row["arm"] for row in rows} - {*ARMS})
    if unknown:
        raise UserError(f"{folder} has rows of unknown arms: {', '.join(unknown)}; remove them")
    return sorted(rows, key=lambda row: (row["data"], list(ARMS).index(row["arm"]), row["seed"]))


def summaries(table: Nb201Table, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per dataset and arm, over seeds: accuracies, device seconds, GPU memory, the mean Kendall's tau of its indicator.

    `random`: the result of random search after the same number of seconds.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["data"], row["arm"]), []).append(row)
    found = []
    for (data, arm), own in groups.items():
        accuracies = {c: spread([row["accuracies"][c] for row in own]) for c in COLUMNS}
        seconds = spread([device_seconds(row) for row in own])
        memory = [row["memory"] for row in own if row.get("memory")]
        others = _compared_with(groups, data) if arm not in SEPARATE else []
        found.append(
            {
                **{"data": data, "arm": arm, "n": len(own), "accuracies": accuracies},
                "seconds": seconds,
                "memory": spread(memory) if memory else None,
                "random": random_within(float(seconds["mean"] or 0.0), others) if others else None,
                "tau": _tau(table, own),
                "cells": [row["architecture"] for row in own],
                "published": PUBLISHED.get(arm) if data == "cifar10" else None,
            }
        )
    return found


def _compared_with(groups: Mapping[tuple[str, str], list[Mapping[str, Any]]], data: str) -> list[Mapping[str, Any]]:
    """The rows of random search on `data`: of the first arm of `RANDOM` with enough seeds, or else with any."""
    found = [groups[data, arm] for arm in RANDOM if (data, arm) in groups]
    return next((rows for rows in found if len(rows) >= ENOUGH), found[0] if found else [])


def random_within(seconds: float, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Random search stopped after `seconds`: the accuracy of its best cell, over seeds; None where one trained no cell.

    `values`: of each seed. `cells`: how many cells it had trained, on average. `is_shorter`: it ended before, so more
    cells might be better.
    """
    reached = []
    for row in rows:
        times = [device_seconds(row, int(one["epoch"])) for one in row["trajectory"]]
        reached.append([one for one, time in zip(row["trajectory"], times, strict=True) if time <= seconds])
    if not all(reached):
        return None
    shorter = any(device_seconds(row) < seconds for row in rows)
    values = [own[-1][RANKED_BY] for own in reached]
    return {**spread(values), "values": values, "cells": sum(map(len, reached)) / len(reached), "is_shorter": shorter}


def _tau(table: Nb201Table, rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Kendall's tau-b of the methods' own indicators with CIFAR-10 test accuracy, mean over edges and seeds."""
    ranked = [row for row in rows if row["indicator"] is not None]
    found = [taus(table, row["indicator"], from_nb201(row["architecture"]), RANKED_BY) for row in ranked]
    means = [mean_tau(one["derived"]) for one in found]
    # NaN if an indicator is equal for all operations of every edge.
    known = [value for value in means if value == value]
    return sum(known) / len(known) if known else None


def on_one_device(rows: Sequence[Mapping[str, Any]], data: str) -> list[Mapping[str, Any]]:
    """The searches on `data` whose seconds can be compared: those on a GPU, or all if there are none."""
    own = [row for row in rows if row["data"] == data]
    return [row for row in own if row["hardware"]["gpus"]] or own


def anytime_svg(rows: Sequence[Mapping[str, Any]], data: str, column: str) -> str:
    """Accuracy of the cell that each epoch would derive over the seconds of the search, mean and band over seeds."""
    lines: list[dict[str, float]] = []
    bands: dict[str, list[tuple[float, float, float]]] = {}
    shown = on_one_device(rows, data)
    arms = list(dict.fromkeys(row["arm"] for row in shown))
    for arm in arms:
        own = [row for row in shown if row["arm"] == arm]
        steps = min(len(row["trajectory"]) for row in own)
        for i in range(steps):
            epoch = int(own[0]["trajectory"][i]["epoch"])
            seconds = summarise([device_seconds(row, epoch) for row in own]).mean
            one = summarise([row["trajectory"][i][column] for row in own])
            lines.append({"epoch": seconds, arm: one.mean})
            if one.std is not None:
                bands.setdefault(arm, []).append((seconds, one.mean - one.std, one.mean + one.std))
    lines.sort(key=lambda line: line["epoch"])
    measured, part = column.split("_")
    where = f"searched on {SETS.get(data, data)}"
    title = f"{SETS[measured]} {part} accuracy of the derived cell, {where}, in %"
    return curves_svg(lines, arms, title, bands, x_label="device seconds")


def show(console: Console, table: Nb201Table, found: Sequence[Mapping[str, Any]]) -> None:
    for data in dict.fromkeys(row["data"] for row in found):
        shown = Table(title=f"NAS-Bench-201, searched on {data}: accuracy in %, mean ± std", title_justify="left")
        for head in ("method", "n", *(f"{SETS[c.split('_')[0]]}\n{c.split('_')[1]}" for c in COLUMNS)):
            shown.add_column(head, justify="left" if head == "method" else "right")
        for head in (
            "seconds of\nthe device",
            "random, same seconds\nCIFAR-10 test",
            "GPU memory\nGB",
            "tau",
            "published\nCIFAR-10 test",
        ):
            shown.add_column(head, justify="right")
        for row in (row for row in found if row["data"] == data):
            cells = [bench201.shown(row["accuracies"][c]["mean"], row["accuracies"][c]["std"]) for c in COLUMNS]
            tau = "–" if row["tau"] is None else f"{row['tau']:+.2f}"
            published = "–" if row["published"] is None else bench201.shown(*row["published"])
            seconds = f"{row['seconds']['mean']:.0f}"
            memory = NOT_MEASURED if row["memory"] is None else f"{row['memory']['mean'] / 2**30:.2f}"
            random = "" if row["arm"] in SEPARATE else _shown_random(row["random"])
            shown.add_row(row["arm"], str(row["n"]), *cells, seconds, random, memory, tau, published)
        for name, _, values in bench201.accuracy_rows(table, []):
            shown.add_row(name, "", *(values[c] for c in COLUMNS), *[""] * 5)
        console.print(shown)


def _shown_random(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return NOT_MEASURED
    sign = "≥ " if found["is_shorter"] else ""
    return f"{sign}{bench201.shown(found['mean'], found['std'])} ({found['cells']:.0f} cells)"


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    table, deadline, kept = load_table(options.table), Deadline(options.minutes), options.out / "rows"
    wanted = [(arm, seed) for seed in options.seeds for arm in options.arms]
    left = [pair for pair in wanted if not (kept / f"{label(*pair, options)}.json").is_file()]
    at_once = options.at_once or (AT_ONCE if resolve_device(options.device).type == "cuda" else 1)
    jobs = [(recipe_of(*pair, options), options.runs / label(*pair, options)) for pair in left]
    shared_by = min(at_once, max(len(jobs), 1)) + options.others
    peaks: dict[Path, PeakMemory] = {}
    try:
        run_searches(jobs, deadline, options.device, at_once, peaks, options.others)
    finally:  # keep finished searches, no matter what stops the others
        for pair in left:
            folder = options.runs / label(*pair, options)
            if finished(folder):
                peak = peaks[folder].peak if folder in peaks else None
                text = json.dumps(row_of(*pair, table, options, shared_by, peak), indent=1)
                kept.mkdir(parents=True, exist_ok=True)
                atomic_write_text(kept / f"{label(*pair, options)}.json", text + "\n")
    if options.indicators:
        for name in (label(*pair, options) for pair in wanted):
            if (kept / f"{name}.json").is_file():
                add_indicators(kept / f"{name}.json", options.runs / name, deadline, options)
    rows = read_rows(kept) if kept.is_dir() else []
    found = summaries(table, rows)
    for data in dict.fromkeys(row["data"] for row in rows):
        atomic_write_text(options.out / f"anytime-{data}.svg", anytime_svg(rows, data, RANKED_BY))
    untrained = proxies(table, options, recipe_of("darts", 0, options), deadline, _known_proxies(options.out))
    ranked = [
        {"method": f"{row['arm']}, {row['data']}", "taus": rank(table, own)}
        for row in rows
        if (own := indicators_in(row))
    ]
    per_edge = [row for row in summarise_taus(ranked, untrained) if row["column"] == RANKED_BY]
    write_record(
        options.out / "nb201.json",
        "studies.nb201",
        summary=found,
        searches=[
            {key: row[key] for key in ("arm", "data", "seed", "architecture", "seconds", "at_once", "git")}
            for row in rows
        ],
        taus=per_edge,
        zero_cost=untrained,
        optimum=table.optimum(),
        random=table.chance(),
        best_of={str(count): table.best_of(count) for count in BEST_OF},
    )
    console = Console(width=None if sys.stdout.isatty() else 200)
    show(console, table, found)
    show_taus(console, per_edge)
    missing = [label(*pair, options) for pair in wanted if not (kept / f"{label(*pair, options)}.json").is_file()]
    if missing:
        console.print(f"{NOT_MEASURED}: {', '.join(missing)}")
    console.print(f"written: {options.out / 'nb201.json'}")


def _known_proxies(out: Path) -> dict[str, Any]:
    """Earlier measurements on untrained supernets."""
    file = out / "nb201.json"
    found: dict[str, Any] = json.loads(file.read_text("utf-8")).get("zero_cost", {}) if file.is_file() else {}
    return {name: one for name, one in found.items() if one != NOT_MEASURED}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = study_parser(
        "studies.nb201",
        __doc__,
        *("epochs", "scale", "precision", "engine", "set", "at_once"),
        runs=Path("runs/nb201"),
        out=Path("results/nb201"),
    )
    parser.add_argument("--table", type=Path, required=True, help="the NAS-Bench-201 table, .csv or .csv.gz")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=[arm for arm in ARMS if arm not in ON_REQUEST],
        choices=list(ARMS),
        help="which searches",
    )
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=[0, 1, 2, 3], metavar="SEED", help="seeds of each arm; none: no search"
    )
    parser.add_argument(
        "--others",
        type=int,
        default=0,
        metavar="N",
        help="searches that other commands run on this GPU at the same time",
    )
    parser.add_argument("--indicators", action="store_true", help="also measure indicators on every trained supernet")
    parser.add_argument("--proxies", type=int, default=0, metavar="K", help="untrained supernets for Zero-Cost-PT")
    found = parser.parse_args(arguments)
    check_candidates(recipe_of("darts", 0, found))
    return found


if __name__ == "__main__":
    entry(main)
