"""`python -m studies.itnas_readings`: cells that other aggregates of the same attention select in NAS-Bench-201.

An IT-NAS search writes the indicator token's rows of every cell to `attention.jsonl`, one line per pass over the
validation half. Each aggregate (`softcell.methods.itnas.attention`), of the last pass and of the mean over
the passes of the last ten epochs, derives a cell, which is looked up in the table.

python -m studies.itnas_readings --table nb201_200epochs.csv.gz results/itnas/attention-cifar10-*.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from softcell.app.report.compare import summarise
from softcell.arch import derive
from softcell.arch.notation import to_nb201
from softcell.errors import UserError
from softcell.evaluate.nb201 import OPERATIONS, Nb201Table, load_table, mean_tau, taus
from softcell.methods.itnas.attention import AGGREGATES, SiteRows, aggregate
from softcell.spaces import build_space
from studies.runs import entry, write_record

FILE = "attention.jsonl"
WINDOW = 10
"""Epochs of the mean over several passes."""
WHEN = ("last pass", f"last {WINDOW} epochs")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The passes in a file; an incomplete last line is skipped."""
    try:
        return [json.loads(line) for line in file.read_text("utf-8").split("\n")[:-1]]
    except (OSError, ValueError) as error:
        raise UserError(f"{file} must be the {FILE} of a search with IT-NAS, but cannot be read: {error}") from error


def site_rows(lines: Sequence[Mapping[str, Any]]) -> SiteRows:
    """The rows of all sites [sites, 6, 5], as the mean over passes."""
    tables = [line["tables"]["cell"] for line in lines]
    means, logs = (torch.tensor([t[k] for t in tables], dtype=torch.float64).mean(0) for k in ("mean", "log"))
    return SiteRows(means, logs, torch.ones(means.shape[:2], dtype=torch.bool), tables[0]["stages"])


def selected(table: Nb201Table, lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By aggregate and passes: the cell, its accuracies, its smallest margin, tau-b with the best cells."""
    if not lines:
        return {}
    layout = build_space("nb201", {"candidates": OPERATIONS}).layout()
    ends = lines[-1]["epoch"]
    passes = {WHEN[0]: lines[-1:], WHEN[1]: [line for line in lines if line["epoch"] > ends - WINDOW]}
    found = {}
    for how in AGGREGATES:
        for when, own in passes.items():
            strengths = aggregate(site_rows(own), how)
            genotype = derive(layout, {"cell": strengths})
            top = strengths.topk(2, dim=1).values
            tau = mean_tau(taus(table, strengths.tolist(), genotype, "cifar10_test")["best"])
            found[f"{how}, {when}"] = {
                "architecture": to_nb201(genotype),
                "accuracies": table.lookup(genotype),
                "smallest_lead": float((top[:, 0] - top[:, 1]).min()),
                "tau": None if math.isnan(tau) else tau,
            }
    return found


def show(console: Console, found: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """found: of each search what `selected` gave."""
    shown = Table(title="readings of the same attention, CIFAR-10 test accuracy of the cell, %", title_justify="left")
    for head in ("aggregate", "passes", "mean ± std", "each search", "smallest lead", "tau-b"):
        shown.add_column(head, justify="left" if head in ("aggregate", "passes") else "right")
    for name in found[0] if found else ():
        own = [one[name] for one in found]
        accuracies = [one["accuracies"]["cifar10_test"] for one in own]
        over = summarise(accuracies)
        spread = f"{over.mean:.2f}" if over.std is None else f"{over.mean:.2f} ± {over.std:.2f}"
        leads, tau = (
            min(one["smallest_lead"] for one in own),
            mean_tau([math.nan if one["tau"] is None else one["tau"] for one in own]),
        )
        each = ", ".join(f"{value:.2f}" for value in accuracies)
        shown.add_row(*name.split(", "), spread, each, f"{leads:.1e}", f"{tau:+.2f}")
    console.print(shown)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.itnas_readings", description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, required=True, help="the NAS-Bench-201 table, .csv or .csv.gz")
    parser.add_argument("files", nargs="+", type=Path, help=f"{FILE} of searches, or the folders they are in")
    parser.add_argument("--out", type=Path, help="JSON file of a record")
    options = parser.parse_args(arguments)
    table = load_table(options.table)
    files = [file / FILE if file.is_dir() else file for file in options.files]
    found = {file.name if file.name != FILE else file.parent.name: selected(table, read_lines(file)) for file in files}
    show(Console(width=140), [one for one in found.values() if one])
    if options.out is not None:
        write_record(options.out, "studies.itnas_readings", searches=found)


if __name__ == "__main__":
    entry(main)
