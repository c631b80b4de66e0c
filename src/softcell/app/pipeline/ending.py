"""What comes after the trainings of a run: latencies, the summary, the report, exports."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from softcell.app.export import export
from softcell.app.pipeline.inspect import Inspection
from softcell.app.pipeline.plan import Plan
from softcell.app.pipeline.screen import Screen
from softcell.app.pipeline.summary import Row, Summary
from softcell.app.report.page import write_report
from softcell.engine import resolve_device
from softcell.engine.files import atomic_write_text
from softcell.errors import UserError
from softcell.evaluate.latency import measure_module
from softcell.spaces import Network

LATENCY_ROUNDS = 5
SUMMARY = "summary.json"
REPORT = "report.html"


def summarise(plan: Plan, screen: Screen, rows: list[dict[str, Any]], inspection: Inspection) -> Summary:
    """What the trained networks came to, in `summary.json`."""
    with screen.working("measuring latencies") as step:
        folders = [plan.folder / row["name"] for row in rows]
        latencies = _latencies(resolve_device(plan.wishes.device), folders, step)
    named = {row["name"]: Row.inside(plan.folder, {**row, "latency": latencies[row["name"]]}) for row in rows}
    random = tuple(row for name, row in named.items() if name.startswith("random-"))
    manifest = json.loads((plan.folder / "train" / "run.json").read_text(encoding="utf-8"))
    summary = Summary(named["train"], random, named["plain"], manifest["results"]["count"], inspection.most_frequent)
    plan.summary = summary.to_dict()
    plan.save()
    atomic_write_text(plan.folder / SUMMARY, json.dumps(plan.summary, indent=2) + "\n")
    return summary


def _latencies(device: torch.device, folders: list[Path], step: Callable[[int, int, str], None]) -> dict[str, float]:
    """Milliseconds for one image, by name of the folder: the median of rounds in which every network has its turn, so
    that a busy moment of the machine does not fall on one of them alone."""
    found: dict[Path, list[float]] = {folder: [] for folder in folders}
    networks = {folder: Network.from_pretrained(folder).to(device) for folder in folders}
    for turn in range(LATENCY_ROUNDS):
        for number, (folder, network) in enumerate(networks.items()):
            step(turn * len(folders) + number, LATENCY_ROUNDS * len(folders), folder.name)
            image = torch.rand(1, *network.shape, device=device)
            found[folder].append(measure_module(network, image, samples=7).median)
    return {folder.name: statistics.median(times) for folder, times in found.items()}


def finish(plan: Plan, screen: Screen, summary: Summary) -> None:
    """Report and exports; both are made anew when a run that was stopped here goes on."""
    folder = plan.folder
    with screen.working("writing the report"):
        rows = (summary.found, summary.plain, *summary.random)
        write_report([folder / "search", *(Path(row.folder) for row in rows)], folder / REPORT)
    with screen.working("exporting"):
        export(folder / "train", "safetensors", folder / "export", overwrite=True)
        export(folder / "train", "python", folder / "export", overwrite=True)
        try:
            export(folder / "train", "onnx", folder / "export", overwrite=True)
        except UserError as error:  # the extra is not installed
            screen.say(f"note: {error}")
