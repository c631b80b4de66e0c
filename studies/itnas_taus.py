"""Compares the indicators of one supernet with the NAS-Bench-201 table, for `studies.itnas_nb201`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from softcell.app.report.bench201 import Benched, accuracy_rows
from softcell.arch import derive
from softcell.arch.notation import to_nb201
from softcell.data import load
from softcell.data.batches import first_batch
from softcell.engine.manifest import collect, now
from softcell.evaluate.nb201 import (
    COLUMNS,
    EDGES,
    OPERATIONS,
    RANKINGS,
    SETS,
    Nb201Table,
    mean_tau,
    taus,
    zero_cost,
)
from softcell.methods.proxies import Proxy
from softcell.search import SearchRecipe
from softcell.spaces import build_space
from studies.runs import NOT_MEASURED, Deadline

NAMES = ("attention", "alpha", "perturbation")
RANKED_BY = ("cifar10_valid", "cifar10_test")
ZERO_COST_PT: tuple[Proxy, ...] = ("naswot", "synflow")
"""The proxies of the study; those that Softcell learned later have not been measured with Zero-Cost-PT."""


def rank(table: Nb201Table, found: Any) -> Any:
    """Tau-b per edge of each indicator [6][5], by name, column and ranking; None if one of them is constant."""
    if not isinstance(found, Mapping):
        return found
    layout = build_space("nb201", {"candidates": OPERATIONS}).layout()
    result: dict[str, Any] = {}
    for name, values in found.items():
        genotype = derive(layout, {"cell": torch.tensor(values, dtype=torch.float64)})
        result[name] = {"derives": to_nb201(genotype), "accuracies": table.lookup(genotype)}
        for column in RANKED_BY:
            own = taus(table, values, genotype, column)
            result[name][column] = {r: [None if math.isnan(v) else v for v in own[r]] for r in RANKINGS}
    return result


def proxies(
    table: Nb201Table,
    options: argparse.Namespace,
    recipe: SearchRecipe,
    deadline: Deadline,
    known: Mapping[str, Any],
) -> dict[str, Any]:
    """Zero-Cost-PT with NASWOT and SynFlow on untrained supernets of the searches' size, by seed; `known` ones stay."""
    result = dict(known)
    wanted = [(name, seed) for seed in range(options.proxies) for name in ZERO_COST_PT if f"{name}-{seed}" not in known]
    if not wanted:
        return result
    dataset = load(recipe.data, recipe.data_root, recipe.image_size)
    space, batch = build_space("nb201", recipe.space_settings), first_batch(dataset, 32)
    for name, seed in wanted:
        result[f"{name}-{seed}"] = NOT_MEASURED
        if not deadline.passed:
            deadline.log(f"Zero-Cost-PT, {name}, seed {seed}")
            values = zero_cost(space, name, batch.images, batch.labels, dataset.num_classes, seed)["cell"].tolist()
            result[f"{name}-{seed}"] = {"date": now(), **collect(), "taus": rank(table, {name: values})}
    return result


def summarise_taus(rows: Sequence[dict[str, Any]], zero_cost: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Means over seeds: per supernet, indicator, column and ranking the tau of each edge and of all."""
    found: dict[tuple[str, str, str, str], list[list[float]]] = {}
    sources = [(row["method"], row["taus"]) for row in rows if isinstance(row.get("taus"), Mapping)]
    sources += [("untrained", one["taus"]) for one in zero_cost.values() if isinstance(one, Mapping)]
    for supernet, ranked in sources:
        for name, own in ranked.items():
            for column in RANKED_BY:
                for ranking in RANKINGS:
                    # Records from before it was called `derived` have it as `discretisation`.
                    known = own[column].get(ranking, own[column].get("discretisation"))
                    values = [math.nan if v is None else v for v in known]
                    found.setdefault((supernet, name, column, ranking), []).append(values)
    result = []
    for (supernet, name, column, order), seeds in found.items():
        edges = [mean_tau([one[edge] for one in seeds]) for edge in range(len(EDGES))]
        plain = [None if math.isnan(value) else value for value in (*edges, mean_tau(edges))]
        about = {"supernet": supernet, "indicator": name, "column": column, "ranking": order, "n": len(seeds)}
        result.append({**about, "edges": plain[:-1], "mean": plain[-1]})
    return result


def show_accuracies(
    console: Console,
    table: Nb201Table,
    runs: Sequence[Benched],
    methods: Sequence[str],
    done: Mapping[str, str],
    published: Mapping[str, str],
) -> None:
    shown = Table(title="accuracy in NAS-Bench-201 of what was found, %, mean ± std", title_justify="left")
    shown.add_column("")
    for column in COLUMNS:
        name, split = column.split("_")
        shown.add_column(f"{SETS[name]}\n{split}", justify="right")
    rows = {name: (n, values) for name, n, values in accuracy_rows(table, runs)}
    for method in methods:
        n, values = rows.pop(method, ("0", dict.fromkeys(COLUMNS, NOT_MEASURED)))
        shown.add_row(f"{method} (n={n}; {done[method]})", *(values[c] for c in COLUMNS))
    for name, (_, values) in rows.items():
        shown.add_row(name, *(values[c] for c in COLUMNS))
    shown.add_section()
    for name, text in published.items():
        shown.add_row(f"{name}, published", *(value.replace("±", " ± ") for value in text.split()))
    console.print(shown)


def show_taus(console: Console, summary: Sequence[Mapping[str, Any]]) -> None:
    def text(value: float | None) -> str:
        return "–" if value is None else f"{value:+.2f}"

    shown = Table(title="Kendall's tau-b per edge with the table, CIFAR-10, mean over seeds", title_justify="left")
    for head in ("supernet", "indicator", "ranked by", *(f"{s}→{t}" for s, t in EDGES), "mean", "n"):
        shown.add_column(head, justify="left" if head in ("supernet", "indicator", "ranked by") else "right")
    for row in summary:
        by = f"{row['ranking']}, {row['column'].rsplit('_')[-1]}"
        shown.add_row(row["supernet"], row["indicator"], by, *map(text, (*row["edges"], row["mean"])), str(row["n"]))
    console.print(shown if summary else f"Kendall's tau: {NOT_MEASURED}")
