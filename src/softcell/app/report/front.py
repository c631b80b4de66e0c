"""The part of a report on `softcell run` with several budgets: one network per budget, and the front they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from softcell.app.report._overview import COSTS
from softcell.app.report.charts import Cloud, scatter
from softcell.app.report.runs import mapping
from softcell.app.report.theme import Html, big, el, percent, table
from softcell.errors import UserError
from softcell.files import read_json

FRONT = "front.json"


def read_front(folders: Sequence[Path]) -> Mapping[str, Any] | None:
    """The front that all folders belong to, RUN/search or RUN/BUDGET/train; None without one that can be read."""
    around = [set(folder.resolve().parents) for folder in folders]
    common = set.intersection(*around) if around else set()
    files = [parent / FRONT for parent in sorted(common, key=lambda parent: -len(parent.parts))]
    file = next((file for file in files[:2] if file.is_file()), None)
    try:
        return None if file is None else mapping(read_json(file))
    except (OSError, UserError):
        return None


def front_section(front: Mapping[str, Any]) -> Html | None:
    """The networks as a table and a chart, with the verdict of each budget; None if the file does not hold them."""
    try:
        points, cost = list(front["points"]), str(front["cost"])
        rows = [
            (
                el("a", str(point["budget"]), href=f"{point['folder']}/report.html"),
                str(point["name"]),
                percent(point["accuracy"]),
                big(point["parameters"]),
                big(point["multiply_adds"]),
                f"{point['latency']:.2f} ms",
                f"{int(point['epochs']):,}",
            )
            for point in points
        ]
        marks = [(float(point[cost]), float(point["accuracy"])) for point in points]
        verdicts = [el("li", el("b", f"{point['budget']}: "), " ".join(point["verdict"])) for point in points]
        about = (
            f"Accuracy on {int(front['count']):,} test images, which were read once for each network. To choose among "
            "the networks by this accuracy is to choose by the test images."
        )
    except (LookupError, TypeError, ValueError):
        return None
    names = ("budget", "network", "accuracy", "parameters", "multiply-adds", "latency", "epochs")
    drawn = scatter(
        f"accuracy against {COSTS[cost].split(' ')[0]}",
        COSTS[cost],
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
        [el("p", f"{budget} was left out: {why}.") for budget, why in left_out.items()],
        el("div", drawn, class_="plots wide"),
        el("h3", "Was the search worth it?"),
        el("ul", verdicts, class_="statements"),
        id="front",
    )
