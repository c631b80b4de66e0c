"""The end of a run: latencies, the comparison with random architectures and a plain network, report and exports."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from softcell.app.export import export
from softcell.app.pipeline.inspect import Inspection
from softcell.app.pipeline.plan import Plan, Screen
from softcell.app.report.page import write_report
from softcell.engine import resolve_device
from softcell.engine.files import atomic_write_text
from softcell.errors import UserError
from softcell.evaluate.latency import measure_module
from softcell.settings import to_dict
from softcell.spaces import Network
from softcell.text import count_of

LATENCY_ROUNDS = 5
SUMMARY = "summary.json"
REPORT = "report.html"


@dataclass(frozen=True, slots=True)
class Row:
    """One trained network. `accuracy` is a share on `count` test images, `latency` milliseconds for one image.

    Example:
        >>> from softcell.app.pipeline import Row
        >>> row = Row("train", "runs/photos/train", 0.9, 1000, multiply_adds=5000, latency=1.5, epochs=5, seconds=9.0)
        >>> row.name, row.accuracy
        ('train', 0.9)
    """

    name: str
    folder: str
    accuracy: float
    parameters: int
    multiply_adds: int
    latency: float
    epochs: int
    seconds: float

    @classmethod
    def inside(cls, folder: Path, stored: Mapping[str, Any]) -> Row:
        """A stored row of the run that is now in `folder`."""
        return cls(**{**stored, "folder": str(folder / stored["name"])})


@dataclass(frozen=True, slots=True)
class Summary:
    """All networks of a run, trained with the same recipe, and their accuracies on `count` test images.

    Example:
        >>> from softcell.app.pipeline import Row, Summary
        >>> def row(name, accuracy):
        ...     return Row(name, name, accuracy, parameters=1, multiply_adds=1, latency=1.0, epochs=1, seconds=1.0)
        >>> draws = (row("random-1", 0.80), row("random-2", 0.84))
        >>> summary = Summary(row("train", 0.95), draws, row("plain", 0.90), count=400, most_frequent=0.5)
        >>> round(summary.mean, 2), summary.to_dict()["worth_it"]
        (0.82, True)
    """

    found: Row
    random: tuple[Row, ...]
    plain: Row
    count: int
    most_frequent: float

    @property
    def mean(self) -> float:
        return statistics.fmean(row.accuracy for row in self.random)

    @property
    def std(self) -> float:
        return statistics.stdev(row.accuracy for row in self.random) if len(self.random) > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For files; folders of rows are relative to the run, which may be moved."""
        worth, lines = verdict(self)
        data = to_dict(self)
        for row in (data["found"], data["plain"], *data["random"]):
            row["folder"] = row["name"]
        return {**data, "worth_it": worth, "verdict": lines}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], folder: Path) -> Summary:
        """The inverse of `to_dict`, for a run that is now in `folder`."""
        found, plain = (Row.inside(folder, data[key]) for key in ("found", "plain"))
        random = tuple(Row.inside(folder, row) for row in data["random"])
        return cls(found, random, plain, data["count"], data["most_frequent"])


def noise(first: float, second: float, count: int) -> float:
    """Twice the standard error of the difference of two accuracies on `count` images: what chance explains."""
    return 2.0 * math.sqrt(max(first * (1 - first) + second * (1 - second), 0.5 / count) / count)


def verdict(summary: Summary) -> tuple[bool, list[str]]:
    """Whether the search was worth it, and the reasons in sentences.

    Example:
        >>> from softcell.app.pipeline import Row, Summary, verdict
        >>> def row(name, accuracy):
        ...     return Row(name, name, accuracy, parameters=1, multiply_adds=1, latency=1.0, epochs=1, seconds=1.0)
        >>> draws = (row("random-1", 0.80), row("random-2", 0.84))
        >>> summary = Summary(row("train", 0.83), draws, row("plain", 0.95), count=400, most_frequent=0.5)
        >>> worth, reasons = verdict(summary)
        >>> worth
        False
    """
    found, plain, n = summary.found, summary.plain, len(summary.random)
    above_random = found.accuracy - summary.mean
    margin = max(summary.std, noise(found.accuracy, summary.mean, summary.count))
    above_plain = found.accuracy - plain.accuracy
    margin_plain = noise(found.accuracy, plain.accuracy, summary.count)
    lines = [
        f"Compared with {count_of(n, 'random architecture')}: {_points(above_random)}; up to {margin * 100:.1f} may be "
        f"chance (their spread, {count_of(summary.count, 'test image')}).",
        f"Compared with a plain residual network: {_points(above_plain)}; up to {margin_plain * 100:.1f} may be "
        "chance.",
    ]
    beats_random, beats_plain = above_random > margin, above_plain > margin_plain
    worth = (beats_random and above_plain >= 0) or (beats_plain and above_random >= 0)
    if worth:
        lines.append("The search was worth it here, as far as one seed can show.")
    elif above_plain < -margin_plain:
        lines.append(f"The search was not worth it: the plain network in {plain.folder} is better. Use that one.")
    elif above_random < -margin:
        best = max(summary.random, key=lambda row: row.accuracy)
        lines.append(f"The search was not worth it: random architectures are better, the best one is in {best.folder}.")
    else:
        lines.append(
            "The search was not worth it here: no difference beyond chance. More time or more images may show one."
        )
    if found.accuracy <= summary.most_frequent + noise(found.accuracy, summary.most_frequent, summary.count):
        lines.append(
            f"Always predicting the most frequent class gives {summary.most_frequent:.1%}: nothing useful was learned."
        )
    return worth, lines


def _points(difference: float) -> str:
    if abs(difference) < 0.0005:
        return "equal"
    return f"{abs(difference) * 100:.1f} points {'better' if difference >= 0 else 'worse'}"


def summarise(plan: Plan, screen: Screen, rows: list[dict[str, Any]], inspection: Inspection) -> Summary:
    """Measures latencies and writes the comparison of all trained networks to `summary.json`."""
    with screen.working("measuring latencies") as step:
        folders = [plan.folder / row["name"] for row in rows]
        latencies = _latencies(resolve_device(plan.request.device), folders, step)
    named = {row["name"]: Row.inside(plan.folder, {**row, "latency": latencies[row["name"]]}) for row in rows}
    random = tuple(row for name, row in named.items() if name.startswith("random-"))
    manifest = json.loads((plan.folder / "train" / "run.json").read_text(encoding="utf-8"))
    summary = Summary(named["train"], random, named["plain"], manifest["results"]["count"], inspection.most_frequent)
    plan.summary = summary.to_dict()
    plan.save()
    atomic_write_text(plan.folder / SUMMARY, json.dumps(plan.summary, indent=2) + "\n")
    return summary


def _latencies(device: torch.device, folders: list[Path], step: Callable[[int, int, str], None]) -> dict[str, float]:
    """Milliseconds for one image by name of the folder, as the median over rounds.

    Every round measures each network once, so that a busy moment of the machine affects all of them.
    """
    found: dict[Path, list[float]] = {folder: [] for folder in folders}
    networks = {folder: Network.from_pretrained(folder).to(device) for folder in folders}
    for turn in range(LATENCY_ROUNDS):
        for number, (folder, network) in enumerate(networks.items()):
            step(turn * len(folders) + number, LATENCY_ROUNDS * len(folders), folder.name)
            image = torch.rand(1, *network.shape, device=device)
            found[folder].append(measure_module(network, image, samples=7).median)
    return {folder.name: statistics.median(times) for folder, times in found.items()}


def finish(plan: Plan, screen: Screen, summary: Summary) -> None:
    """Writes report and exports; a run interrupted here writes both again when resumed."""
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
            screen.print(f"note: {error}")
