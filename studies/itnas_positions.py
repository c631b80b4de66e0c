"""`python -m studies.itnas_positions`: how much of IT-NAS's ranking is explained by position encodings alone?

After a search on NAS-Bench-201 cells the indicator is read three times from the same supernet and images: unchanged,
with all maps zeroed inside the attention (positions only), and with every position replaced by their mean (content
only). Each search is repeated with the candidates in reverse order, to distinguish a preference for a slot from one for
a candidate; how often winners agree over seeds is an upper bound for agreement over orders.

Two variants have known answers. `noise`: on each of the six edges, noise competes with two useful operations, and must
not be chosen. `planted`: one edge per cell, three noise candidates and one that passes the image through.

python -m studies.itnas_positions                            # digits, on a CPU: minutes
python -m studies.itnas_positions --data cifar10 --data-root DIR --scale paper --seeds 3
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau
from torch import Tensor, nn
from torch.func import functional_call

from softcell.methods.itnas import ItMix, ItNas
from softcell.nn.candidates import candidate, known_candidates
from softcell.search import resolve
from softcell.search.supernet import restore
from studies.options import recipe_settings, study_parser
from studies.runs import NOT_MEASURED, Deadline, entry, run_or_resume, spread, write_record

CELL = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
NOISE = ("noise", "skip_connect", "nor_conv_3x3")
PLANTED = ("noise_a", "noise_b", "skip_connect", "noise_c")
TASKS = {"cell": CELL, "noise": NOISE, "planted": PLANTED}
KINDS = ("whole", "positions", "content")


class _Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.randn_like(x)


class Read(ItMix):
    """Runs the supernet unchanged and records the attention that one part of the tokens alone would produce."""

    def __init__(self, method: ItNas, kind: str) -> None:
        super().__init__(method, method.selection.clear())
        self._kind = kind

    def combine_together(
        self, site: int, outputs: Mapping[int, Mapping[int, Tensor | None]]
    ) -> Mapping[int, Tensor | None]:
        return {}  # every edge is read by itself

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        if all(x is None for x in outputs.values()):
            return None
        module = self._method.transformer(site, choice)
        output: Tensor
        output, attention = module(outputs)
        if self._kind == "positions":
            attention = module.attend({k: None if x is None else torch.zeros_like(x) for k, x in outputs.items()})
        elif self._kind == "content":
            own = dict(module.named_parameters())
            # The first position is that of the indicator token, which stays.
            first, rest = own["positions"][:1], own["positions"][1:]
            alike = torch.cat([first, rest.mean(0, keepdim=True).expand_as(rest)])
            (attention,) = functional_call(module, {**own, "positions": alike}, (outputs, True))
        self.rows.note(site, choice, attention)
        return output


@torch.no_grad()
def read(folder: Path, device: str) -> tuple[dict[str, Tensor], float]:
    """Indicators [choices, width] of the cell by kind, and how much of the variance of attention is between images."""
    found = restore(folder, device=device)
    assert isinstance(found.method, ItNas)
    result, between = {}, 0.0
    batches = found.feeds().plain(found.dataset.train, found.parts["validation"])
    for kind in KINDS:
        torch.manual_seed(0)  # noise candidates draw the same for every reading
        mix = Read(found.method, kind)
        for batch in batches.epoch(0):
            found.supernet(batch.images, mix)
        table = found.method.layout.tables[0]
        rows = found.method.selection.indicator()["cell"].cpu()
        result[kind] = rows
        if kind == "whole":
            second = found.method.moments["cell"].mean_products().diagonal().view(table.shape).cpu()
            images = (second - rows**2).clamp(min=0).mean()
            candidates = rows.var(dim=1, unbiased=False).mean()
            between = float(images / (images + candidates))
    return result, between


def compare(rows: dict[str, Tensor]) -> dict[str, float]:
    """Mean tau-b over edges between each part and the whole, and the fraction of edges with the same winner."""
    whole, result = rows["whole"], {}
    for kind in KINDS[1:]:
        taus = [float(kendalltau(a, b).statistic) for a, b in zip(whole, rows[kind], strict=True)]
        # NaN if all candidates of an edge are equal.
        known = [tau for tau in taus if tau == tau]
        result[f"tau_{kind}"] = sum(known) / len(known) if known else 0.0
        result[f"same_winner_{kind}"] = float((whole.argmax(1) == rows[kind].argmax(1)).double().mean())
    return result


def main() -> None:
    parser = study_parser(
        "studies.itnas_positions",
        __doc__,
        "epochs",
        data="digits",
        scale="small",
        seeds=3,
        device="cpu",
        runs=Path("runs/itnas-positions"),
        out=Path("results/itnas"),
    )
    options = parser.parse_args()
    for name in PLANTED:
        if name.startswith("noise_") and name not in known_candidates():
            candidate(name)(lambda spec: _Noise())
    deadline, rows = Deadline(options.minutes), []
    for task, names in TASKS.items():
        for seed in range(options.seeds):
            winners: dict[str, list[str]] = {}
            for order in ("given", "reversed"):
                row = study(task, names if order == "given" else names[::-1], seed, order, options, deadline)
                rows.append(row)
                winners[order] = row.get("winners", [])
            if all(winners.values()):
                pairs = list(zip(winners["given"], winners["reversed"], strict=True))
                same = sum(a == b for a, b in pairs) / len(pairs)
                slots = sum(names.index(a) == len(names) - 1 - names.index(b) for a, b in pairs) / len(pairs)
                rows[-1] |= {"same_candidate_in_both_orders": same, "same_slot_in_both_orders": slots}
    summary = {task: summarise([row for row in rows if row["task"] == task]) for task in TASKS}
    record = options.out / f"positions-{Path(options.data).stem}.json"
    write_record(record, "studies.itnas_positions", rows=rows, summary=summary)
    _print(summary, record)


def study(
    task: str, names: tuple[str, ...], seed: int, order: str, options: argparse.Namespace, deadline: Deadline
) -> dict[str, Any]:
    """One search and its three readings."""
    space: dict[str, Any] = {"candidates": list(names)}
    if task == "planted":
        space["nodes"] = 2
    own = {"method": "itnas", "space": "nb201", "seed": seed, "precision": "float32", "space_settings": space}
    folder = options.runs / f"{task}-{Path(options.data).stem}-{order}-{seed}"
    recipe = resolve({**recipe_settings(options), **own})
    manifest = run_or_resume(recipe, folder, deadline)
    row: dict[str, Any] = {"task": task, "seed": seed, "order": order, "candidates": list(names)}
    if manifest is None:
        return {**row, "result": NOT_MEASURED}
    readings, between = read(folder, options.device)
    winners = [names[k] for k in readings["whole"].argmax(1).tolist()]
    found = {**compare(readings), "variance_between_images": between}
    if task == "planted":
        found["winner_is_right"] = sum(w == "skip_connect" for w in winners) / len(winners)
        found["strength"] = float(readings["whole"][0, names.index("skip_connect")])
        uniform = 1 / (len(names) + 1)
        found["strength_over_uniform"] = found["strength"] / uniform
    if task == "noise":
        found["noise_wins"] = sum(w == "noise" for w in winners) / len(winners)
        found["noise_over_uniform"] = float(readings["whole"][:, names.index("noise")].mean()) * (len(names) + 1)
    values = {kind: rows.tolist() for kind, rows in readings.items()}
    accuracy = manifest["results"]["val_accuracy"]
    return {**row, "winners": winners, "val_accuracy": accuracy, "readings": values, "result": found}


def summarise(rows: list[dict[str, Any]]) -> Any:
    done = [row for row in rows if row["result"] != NOT_MEASURED]
    if not done:
        return NOT_MEASURED
    found = {key: spread([row["result"][key] for row in done]) for key in done[0]["result"]}
    for key in ("same_candidate_in_both_orders", "same_slot_in_both_orders"):
        known = [row[key] for row in done if key in row]
        if known:
            found[key] = spread(known)
    pairs = [
        sum(a == b for a, b in zip(one["winners"], other["winners"], strict=True)) / len(one["winners"])
        for i, one in enumerate(done)
        for other in done[i + 1 :]
        if one["order"] == other["order"]
    ]
    if pairs:
        found["same_candidate_over_seeds"] = spread(pairs)
    return found


def _print(summary: dict[str, Any], record: Path) -> None:
    console = Console()
    for task, found in summary.items():
        shown = Table(title=f"{task}: mean ± std over searches")
        shown.add_column("")
        shown.add_column("", justify="right")
        for key, value in {} if found == NOT_MEASURED else found.items():
            error = "" if value["std"] is None else f" ± {value['std']:.2f}"
            shown.add_row(key.replace("_", " "), f"{value['mean']:.2f}{error} (n={value['n']})")
        console.print(shown if found != NOT_MEASURED else f"{task}: {NOT_MEASURED}")
    console.print(f"written: {record}")


if __name__ == "__main__":
    entry(main)
