"""What stands above several runs: the table of them, groups over seeds, and cost against accuracy."""

from __future__ import annotations

from collections.abc import Sequence

from softcell.app.report.compare import Comparison, Group, compare
from softcell.app.report.html.charts import Cloud, scatter
from softcell.app.report.html.elements import Html, big, el, join, percent, table
from softcell.app.report.html.sections import STATUS
from softcell.app.report.runs import Run, number

COSTS = {"parameters": "parameters", "multiply_adds": "multiply-adds for one image"}


def overview(runs: Sequence[Run], beside: Sequence[Run]) -> Html | None:
    """The runs side by side; `beside` are random architectures trained along, which only count here."""
    everything = [*runs, *beside]
    if len(everything) < 2:
        return None
    found = compare(everything)
    heading = "Groups over seeds" if len(runs) > 1 else "Beside random architectures"
    parts = [
        list_of(runs) if len(runs) > 1 else None,
        el("section", el("h2", heading), _groups(found), id="groups") if found.groups else None,
    ]
    pictures = costs(found)
    if pictures is not None:
        about = "Each mark is a run. Where a group has two or more, the cross shows mean ± standard deviation."
        parts.append(
            el("section", el("h2", "Cost against accuracy"), el("p", about, class_="quiet"), pictures, id="cost")
        )
    return join([part for part in parts if part is not None])


def list_of(runs: Sequence[Run]) -> Html:
    """The section that leads to each run."""
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


def costs(found: Comparison) -> Html | None:
    """Accuracy against each cost, for the groups whose networks were counted, by measure."""
    drawn = []
    for measure in dict.fromkeys(group.measure for group in found.groups):
        for what, name in COSTS.items():
            clouds = [cloud for group in found.groups if group.measure == measure and (cloud := _cloud(group, what))]
            if sum(len(cloud.points) for cloud in clouds) > 1:
                drawn.append(scatter(f"accuracy against {name.split(' ')[0]} ({measure})", name, clouds))
    return el("div", drawn, class_="plots wide") if drawn else None


def _cloud(group: Group, what: str) -> Cloud | None:
    cost, score = group.cost(what), group.summary
    if cost is None:
        return None
    points = [(float(run.results[what]), value) for run, value in zip(group.runs, group.values, strict=True)]
    spread = None
    if cost.std is not None and score.std is not None:
        spread = ((cost.mean, score.mean), (cost.std, score.std))
    return Cloud(group.name, points, spread, [run.label for run in group.runs])
