"""Parts of a report on several runs: the list of runs, groups over seeds, costs, and the result of `softcell run`.

`softcell run` leaves a summary for a single budget, and a front of networks for several.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softcell.app.report.charts import Cloud, scatter
from softcell.app.report.compare import HEADER, NUMERIC, Comparison, Group, compare, group_row
from softcell.app.report.runs import Run, mapping, number
from softcell.app.report.theme import Html, big, el, join, percent, table
from softcell.errors import UserError
from softcell.files import read_json

STATUS = {"finished": "✓ finished", "running": "▶ running", "interrupted": "❚❚ interrupted", "failed": "✕ failed"}
SUMMARY, FRONT = "summary.json", "front.json"
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
        score = run.score or run.latest
        cost = number(run.results.get("parameters"))
        rows.append(
            (
                el("a", run.label, href=f"#run-{i}"),
                "–" if score is None else percent(score.value),
                "–" if score is None or score.top5 is None else percent(score.top5),
                "–" if cost is None else big(cost),
                ", ".join(filter(None, (STATUS.get(run.status, run.status), run.progress))),
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
    # Without the last column, the seeds.
    rows = [group_row(group)[:-1] for group in found.groups]
    said = el("ul", [el("li", said) for said in found.sentences], class_="statements") if found.pairs else None
    notes = el("ul", [el("li", note) for note in found.notes], class_="quiet") if found.notes else None
    return join(table(HEADER[:-1], rows, numeric=NUMERIC), said, notes)


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
    """The result of one `softcell run`, ready to be shown.

    `facts`: lines about the delivered network. `columns` and `rows`: the table of all networks. `marks`: kind, name,
    costs and accuracy of each, for the charts, whose accuracies are described by `measured`.
    """

    heading: str
    facts: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marks: tuple[tuple[str, str, Mapping[str, Any]], ...]
    measured: str
    verdict: tuple[str, ...]


def read_outcome(folders: Sequence[Path]) -> Outcome | None:
    """The summary of the `softcell run` that all folders belong to; None without one that can be read."""
    parents = {_whole(folder) for folder in folders}
    if len(parents) != 1:
        return None
    try:
        data = mapping(read_json(parents.pop() / SUMMARY))
        return _competition(data) if data.get("version") == 2 else _first_version(data)
    except (OSError, UserError, LookupError, TypeError, ValueError):
        return None


def _whole(folder: Path) -> Path:
    """The folder of the `softcell run` that a run in `folder` may belong to."""
    parent = folder.resolve().parent
    return parent.parent if re.fullmatch(r"round-\d+", parent.name) else parent


def _competition(data: Mapping[str, Any]) -> Outcome:
    one, rounds = data["delivered"], data["rounds"]
    results = [{own["name"]: own for own in each["results"]} for each in rounds]
    rows, marks = [], []
    for entry in data["entries"]:
        shares = [
            statistics.fmean(own[entry["name"]]["accuracies"]) if entry["name"] in own else None for own in results
        ]
        shown = [("–" if share is None else percent(share)) for share in shares]
        rows.append((entry["name"], big(entry["parameters"]), big(entry["multiply_adds"]), *shown))
        if shares and shares[0] is not None:
            marks.append((entry["kind"], entry["name"], {**entry, "accuracy": shares[0]}))
    lengths = [f"round {i}: {each['seconds']:.1f} s" for i, each in enumerate(rounds, 1)]
    seeds = [f"{each['seeds']} seed{'' if each['seeds'] == 1 else 's'} each" for each in rounds]
    facts = (
        f"Delivered: {one['name']}, because {data['why']}.",
        f"{percent(one['accuracy'])} on {int(data['count']):,} test images, which were read once, after "
        f"{one['epochs']:,} epochs in {one['seconds']:.0f} s on all training images.",
        f"{big(one['parameters'])} parameters, {big(one['multiply_adds'])} multiply-adds, {one['latency']:.2f} ms for "
        "one image.",
    )
    columns = ("competition", "parameters", "multiply-adds", *(f"round {i}" for i in range(1, len(rounds) + 1)))
    measured = f"{int(data['held_out']):,} held-out training images; " + ", ".join(
        map(", ".join, zip(lengths, seeds, strict=True))
    )
    return Outcome("Result", facts, columns, tuple(rows), tuple(marks), measured, tuple(map(str, data["verdict"])))


def _first_version(data: Mapping[str, Any]) -> Outcome:
    """Runs of the first version: found, plain and random networks, all trained in the same way and tested."""
    named = [("found by search", data["found"]), ("plain residual", data["plain"])]
    named += [(f"random {i}", row) for i, row in enumerate(data["random"], 1)]
    rows = tuple(
        (name, percent(row["accuracy"]), big(row["parameters"]), big(row["multiply_adds"]), f"{row['latency']:.2f} ms")
        for name, row in named
    )
    marks = tuple((name.rstrip(" 0123456789"), name, row) for name, row in named)
    epochs = data["found"]["epochs"]
    length = f"{epochs} epoch{'' if epochs == 1 else 's'}"
    measured = f"{int(data['count']):,} test images, all trained in the same way for {length}"
    columns = ("", "accuracy", "parameters", "multiply-adds", "latency")
    return Outcome("Was the search worth it?", (), columns, rows, marks, measured, tuple(map(str, data["verdict"])))


def in_order(folders: Sequence[Path]) -> list[Path]:
    """The folders of one `softcell run` in the order in which they were made."""

    def place(folder: Path) -> tuple[int, int, str]:
        name = folder.resolve().name
        return ORDER.index(name) if name in ORDER else len(ORDER), len(name), name

    return sorted(folders, key=place)


def outcome_section(outcome: Outcome) -> Html:
    """The delivered network, the table, the verdict on the search, and accuracy against each cost."""
    costs = {cost: name for cost, name in COSTS.items() if all(cost in row for _, _, row in outcome.marks)}
    return el(
        "section",
        el("h2", outcome.heading),
        el("ul", [el("li", fact) for fact in outcome.facts], class_="statements") if outcome.facts else None,
        table(outcome.columns, outcome.rows, numeric=tuple(range(1, len(outcome.columns)))),
        el("p", f"Accuracy on {outcome.measured}.", class_="quiet") if outcome.marks else None,
        el("ul", [el("li", line) for line in outcome.verdict], class_="statements"),
        el("div", [_against_cost(outcome, cost, name) for cost, name in costs.items()], class_="plots wide")
        if len(outcome.marks) > 1
        else None,
        id="outcome",
    )


def _against_cost(outcome: Outcome, cost: str, name: str) -> Html:
    clouds = []
    for kind in dict.fromkeys(kind for kind, _, _ in outcome.marks):
        own = [(label, row) for other, label, row in outcome.marks if other == kind]
        points = [(float(row[cost]), float(row["accuracy"])) for _, row in own]
        clouds.append(Cloud(kind, points, None, [label for label, _ in own]))
    return scatter(f"accuracy against {name.split(' ')[0]}", name, clouds)


def read_front(folders: Sequence[Path]) -> Mapping[str, Any] | None:
    """The front that all folders belong to, RUN/search or RUN/BUDGET/train; None without one that can be read."""
    around = [set(folder.resolve().parents) for folder in folders]
    common = set.intersection(*around) if around else set()
    # The front is one folder above RUN/search, and two above RUN/BUDGET/train.
    files = [parent / FRONT for parent in sorted(common, key=lambda parent: -len(parent.parts))]
    file = next((file for file in files[:2] if file.is_file()), None)
    try:
        return None if file is None else mapping(read_json(file))
    except (OSError, UserError):
        return None


def front_section(front: Mapping[str, Any], *, links: bool = True) -> Html | None:
    """The networks as a table and a chart, with the verdict of each budget; None if the file does not hold them.

    links: budgets are links to their own reports.
    """
    try:
        points, cost = list(front["points"]), str(front["cost"])
        rows = [
            (
                el("a", str(point["budget"]), href=f"{point['folder']}/report.html") if links else str(point["budget"]),
                str(point["name"]),
                percent(point["accuracy"]),
                big(point["parameters"]),
                big(point["multiply_adds"]),
                f"{point['latency']:.2f} ms",
                f"{int(point['epochs']):,}",
            )
            for point in points
        ]
        marks, described = [(float(point[cost]), float(point["accuracy"])) for point in points], COSTS[cost]
        verdicts = [el("li", el("b", f"{point['budget']}: "), " ".join(point["verdict"])) for point in points]
        about = (
            f"Accuracy on {int(front['count']):,} test images, which were read once for each network. Choosing among "
            "the networks by this accuracy means selecting on the test images."
        )
    except (LookupError, TypeError, ValueError):
        return None
    names = ("budget", "network", "accuracy", "parameters", "multiply-adds", "latency", "epochs")
    drawn = scatter(
        f"accuracy against {described.split(' ')[0]}",
        described,
        [
            Cloud(str(point["budget"]), [mark], None, [str(point["name"])])
            for point, mark in zip(points, marks, strict=True)
        ],
    )
    left_out = mapping(front.get("left_out"))
    return el(
        "section",
        el("h2", "One network per budget"),
        table(names, rows, numeric=range(2, len(names))),
        el("p", about, class_="quiet"),
        [el("p", f"{budget} was skipped: {why}.") for budget, why in left_out.items()],
        el("div", drawn, class_="plots wide"),
        el("h3", "Was the search worth it?"),
        el("ul", verdicts, class_="statements"),
        id="front",
    )
