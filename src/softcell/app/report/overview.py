"""Parts of a report on several runs: the list of runs, groups over seeds, costs, the result of `softcell run`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softcell.app.report.charts import Cloud, scatter
from softcell.app.report.compare import Comparison, Group, compare
from softcell.app.report.html import Html, big, el, join, percent, table
from softcell.app.report.runs import Run, mapping, number
from softcell.errors import UserError
from softcell.reading import read_json

STATUS = {"finished": "✓ finished", "running": "▶ running", "interrupted": "❚❚ interrupted", "failed": "✕ failed"}
SUMMARY = "summary.json"
ORDER = ("search", "train", "plain")
COSTS = {
    "parameters": "parameters",
    "multiply_adds": "multiply-adds for one image",
    "latency": "latency for one image, ms",
}


def overview(runs: Sequence[Run], beside: Sequence[Run]) -> Html | None:
    """The runs side by side; `beside` are random architectures that were trained for comparison and only count here."""
    everything = [*runs, *beside]
    if len(everything) < 2:
        return None
    found = compare(everything)
    alone = len(runs) == 1
    level, heading = ("h3", "Comparison with random architectures") if alone else ("h2", "Groups over seeds")
    parts = [
        None if alone else list_of(runs),
        el("section", el(level, heading), _groups(found), id="groups") if found.groups else None,
    ]
    pictures = _costs(found)
    if pictures is not None:
        about = "Each mark is a run. Where a group has two or more, the cross shows mean ± standard deviation."
        parts.append(
            el("section", el(level, "Accuracy against cost"), el("p", about, class_="quiet"), pictures, id="cost")
        )
    return join(*parts)


def list_of(runs: Sequence[Run]) -> Html:
    """The table of runs, with a link to each."""
    return el("section", el("h2", "Runs"), _runs(runs), id="runs")


def _runs(runs: Sequence[Run]) -> Html:
    rows = []
    for i, run in enumerate(runs):
        score = run.score
        cost = number(run.results.get("parameters"))
        rows.append(
            (
                el("a", run.label, href=f"#run-{i}"),
                "–" if score is None else percent(score.value),
                "–" if score is None or score.top5 is None else percent(score.top5),
                "–" if cost is None else big(cost),
                STATUS.get(run.status, run.status),
                run.kind,
                run.method,
                run.space,
                run.data,
                run.seed,
                "–" if score is None else score.measure,
            )
        )
    names = (
        "run",
        "accuracy",
        "top-5",
        "parameters",
        "status",
        "kind",
        "method",
        "space",
        "data",
        "seed",
        "accuracy of",
    )
    return table(names, rows, numeric=(1, 2, 3))


def _groups(found: Comparison) -> Html:
    rows = []
    for group in found.groups:
        s, top5, cost = group.summary, group.top5, group.cost("parameters")
        std = "–" if s.std is None else f"{100 * s.std:.2f}"
        mean = f"{100 * s.mean:.2f}"
        among = "–" if top5 is None else f"{100 * top5.mean:.2f}"
        costs = big(cost.mean) if cost else "–"
        rows.append((group.name, str(s.n), mean, std, among, costs, group.data, group.measure))
    names = ("group", "n", "mean, %", "std", "top-5, %", "parameters", "data", "accuracy of")
    said = el("ul", [el("li", said) for said in found.sentences], class_="statements") if found.pairs else None
    notes = el("ul", [el("li", note) for note in found.notes], class_="quiet") if found.notes else None
    return join(table(names, rows, numeric=(1, 2, 3, 4, 5)), said, notes)


def _costs(found: Comparison) -> Html | None:
    """Accuracy against each cost, for groups whose networks were counted; one chart per measure and dataset."""
    several = len({group.data for group in found.groups}) > 1
    drawn = []
    for measure, data in dict.fromkeys((group.measure, group.data) for group in found.groups):
        own = [group for group in found.groups if (group.measure, group.data) == (measure, data)]
        for cost in ("parameters", "multiply_adds"):
            clouds = [cloud for group in own if (cloud := _cloud(group, cost))]
            if sum(len(cloud.points) for cloud in clouds) > 1:
                on = f" on {data}" if several else ""
                title = f"accuracy{on} against {COSTS[cost].split(' ')[0]} ({measure})"
                drawn.append(scatter(title, COSTS[cost], clouds))
    return el("div", drawn, class_="plots wide") if drawn else None


def _cloud(group: Group, cost: str) -> Cloud | None:
    counted, score = group.cost(cost), group.summary
    if counted is None:
        return None
    points = [(float(run.results[cost]), value) for run, value in zip(group.runs, group.values, strict=True)]
    spread = None
    if counted.std is not None and score.std is not None:
        spread = ((counted.mean, score.mean), (counted.std, score.std))
    return Cloud(group.name, points, spread, [run.label for run in group.runs])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one `softcell run`: numbers of the found, the plain and the random networks, and the verdict."""

    found: Mapping[str, Any]
    plain: Mapping[str, Any]
    random: tuple[Mapping[str, Any], ...]
    count: float | None
    verdict: tuple[str, ...]


def read_outcome(folders: Sequence[Path]) -> Outcome | None:
    """The summary of the `softcell run` that all folders belong to; None without one that can be read."""
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
    """The folders of one `softcell run` in the order in which they were made."""

    def place(folder: Path) -> tuple[int, int, str]:
        name = folder.resolve().name
        return ORDER.index(name) if name in ORDER else len(ORDER), len(name), name

    return sorted(folders, key=place)


def _is_row(row: object) -> bool:
    known = mapping(row)
    return all(number(known.get(key)) is not None for key in ("accuracy", *COSTS))


def outcome_section(outcome: Outcome) -> Html:
    """The table, the verdict, and accuracy against each cost."""
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
        el("div", [_against_cost(outcome, cost, name) for cost, name in COSTS.items()], class_="plots wide"),
        id="outcome",
    )


def _against_cost(outcome: Outcome, cost: str, name: str) -> Html:
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
