"""What `softcell run` found, above all else: the network beside a plain and random ones, and if it was worth it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softcell.app.report.html.charts import Cloud, scatter
from softcell.app.report.html.elements import Html, big, el, percent, table
from softcell.app.report.runs import mapping, number
from softcell.errors import UserError
from softcell.reading import read_json

SUMMARY = "summary.json"
ORDER = ("search", "train", "plain")
COSTS = {
    "parameters": "parameters",
    "multiply_adds": "multiply-adds for one image",
    "latency": "latency for one image, ms",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Numbers by role; `random` are several of one role."""

    found: Mapping[str, Any]
    plain: Mapping[str, Any]
    random: tuple[Mapping[str, Any], ...]
    count: float | None
    verdict: tuple[str, ...]


def read_outcome(folders: Sequence[Path]) -> Outcome | None:
    """Of the runs of one `softcell run`, its summary; None of any others, and where it cannot be read."""
    parents = {folder.resolve().parent for folder in folders}
    if len(parents) != 1:
        return None
    try:
        data = mapping(read_json(parents.pop() / SUMMARY))
    except (OSError, UserError):
        return None
    others, lines = data.get("random"), data.get("verdict")
    rows = [data.get("found"), data.get("plain"), *(others if isinstance(others, list) else [])]
    if len(rows) < 3 or not all(_is_row(row) for row in rows) or not isinstance(lines, list):
        return None
    found, plain, *random = map(mapping, rows)
    return Outcome(found, plain, tuple(random), number(data.get("count")), tuple(map(str, lines)))


def in_order(folders: Sequence[Path]) -> list[Path]:
    """Those of one `softcell run` in the order in which they were made."""

    def place(folder: Path) -> tuple[int, int, str]:
        name = folder.resolve().name
        return ORDER.index(name) if name in ORDER else len(ORDER), len(name), name

    return sorted(folders, key=place)


def _is_row(row: object) -> bool:
    known = mapping(row)
    return all(number(known.get(key)) is not None for key in ("accuracy", *COSTS))


def outcome_section(outcome: Outcome) -> Html:
    """The table, the sentences, and costs against accuracy."""
    shares = [row["accuracy"] for row in outcome.random]
    std = f" ± {100 * statistics.stdev(shares):.1f}" if len(shares) > 1 else ""
    named = [("found by search", outcome.found), ("plain residual", outcome.plain)]
    named += [(f"random {i}", row) for i, row in enumerate(outcome.random, 1)]
    rows = [
        (name, percent(row["accuracy"]), big(row["parameters"]), big(row["multiply_adds"]), f"{row['latency']:.2f} ms")
        for name, row in named
    ]
    rows.append((f"random, mean{' ± std' if std else ''}", f"{100 * statistics.fmean(shares):.1f}{std} %", "", "", ""))
    images = "" if outcome.count is None else f" on {int(outcome.count):,} test images"
    epochs = number(outcome.found.get("epochs"))
    trained = "" if epochs is None else f", all trained alike for {int(epochs)} epoch{'' if epochs == 1 else 's'}"
    return el(
        "section",
        el("h2", "Was the search worth it?"),
        el("p", f"Accuracy{images}{trained}.", class_="quiet"),
        table(("", "accuracy", "parameters", "multiply-adds", "latency"), rows, numeric=(1, 2, 3, 4)),
        el("ul", [el("li", line) for line in outcome.verdict], class_="statements"),
        el("div", [_against(outcome, cost, name) for cost, name in COSTS.items()], class_="plots wide"),
        id="outcome",
    )


def _against(outcome: Outcome, cost: str, name: str) -> Html:
    def point(row: Mapping[str, Any]) -> tuple[float, float]:
        return float(row[cost]), float(row["accuracy"])

    points = [point(row) for row in outcome.random]
    spread = None
    if len(points) > 1:
        x, y = zip(*points, strict=True)
        spread = ((statistics.fmean(x), statistics.fmean(y)), (statistics.stdev(x), statistics.stdev(y)))
    clouds = [
        Cloud("found by search", [point(outcome.found)], None, ["found by search"]),
        Cloud("plain residual", [point(outcome.plain)], None, ["plain residual"]),
        Cloud("random", points, spread, [f"random {i}" for i in range(1, len(points) + 1)]),
    ]
    return scatter(f"accuracy against {name.split(' ')[0]}", name, clouds)
