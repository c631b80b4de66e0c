"""The end of a run in numbers and words: the found network beside random ones and a plain one of similar size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softcell.settings import to_dict


@dataclass(frozen=True, slots=True)
class Row:
    """One trained network. `accuracy` is a share on `count` test images, `latency` milliseconds for one image."""

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
        """A row of the run in `folder`, wherever that lay when the row was stored."""
        return cls(**{**stored, "folder": str(folder / stored["name"])})


@dataclass(frozen=True, slots=True)
class Summary:
    """All networks of a run, trained alike."""

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
        """For files; folders of rows are relative to that of the run, which may be moved."""
        worth, lines = verdict(self)
        data = to_dict(self)
        for row in (data["found"], data["plain"], *data["random"]):
            row["folder"] = row["name"]
        return {**data, "worth_it": worth, "verdict": lines}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], folder: Path) -> Summary:
        """What `to_dict` gave of the run that is in `folder` now."""
        found, plain = (Row.inside(folder, data[key]) for key in ("found", "plain"))
        random = tuple(Row.inside(folder, row) for row in data["random"])
        return cls(found, random, plain, data["count"], data["most_frequent"])


def noise(first: float, second: float, count: int) -> float:
    """Twice the standard error of the difference of two accuracies on `count` images: chance alone does this much."""
    return 2.0 * math.sqrt(max(first * (1 - first) + second * (1 - second), 0.5 / count) / count)


def verdict(summary: Summary) -> tuple[bool, list[str]]:
    """Whether the search was worth it, and why, in sentences."""
    found, plain, n = summary.found, summary.plain, len(summary.random)
    above_random = found.accuracy - summary.mean
    margin = max(summary.std, noise(found.accuracy, summary.mean, summary.count))
    above_plain = found.accuracy - plain.accuracy
    margin_plain = noise(found.accuracy, plain.accuracy, summary.count)
    lines = [
        f"against {n} random architectures: {_points(above_random)}, where up to {margin * 100:.1f} is chance "
        f"(their spread, {summary.count:,} test images)",
        f"against a plain residual network: {_points(above_plain)}, where up to {margin_plain * 100:.1f} is chance",
    ]
    beats_random, beats_plain = above_random > margin, above_plain > margin_plain
    worth = (beats_random and above_plain >= 0) or (beats_plain and above_random >= 0)
    if worth:
        lines.append("The search was worth it here, as far as one seed can tell.")
    elif above_plain < -margin_plain:
        lines.append(f"The search was not worth it: the plain network in {plain.folder} is better; use that one.")
    elif above_random < -margin:
        best = max(summary.random, key=lambda row: row.accuracy)
        lines.append(f"The search was not worth it: random architectures did better, the best in {best.folder}.")
    else:
        lines.append(
            "The search was not worth it here: no difference beyond chance. More time, or more images, may tell."
        )
    if found.accuracy <= summary.most_frequent + noise(found.accuracy, summary.most_frequent, summary.count):
        lines.append(
            f"Mind that always naming the most frequent class gives {summary.most_frequent:.1%}: nothing useful was "
            "learned."
        )
    return worth, lines


def _points(difference: float) -> str:
    if abs(difference) < 0.0005:
        return "equal"
    return f"{abs(difference) * 100:.1f} points {'better' if difference >= 0 else 'worse'}"
