"""Architecture weights over time: a table per kind of cell that a slider takes through the epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from softcell.app.report.html.elements import Html, data, el
from softcell.app.report.runs import Names, Run, is_table, mapping, number, table_names

MOST_FRAMES = 120
SHADES = 10


def weights(run: Run) -> Html | None:
    """The slider and its tables; None for a run without weights (a training, random search, or none written yet)."""
    rows = [row for row in run.architecture if any(is_table(t) for t in mapping(row.get("tables")).values())]
    rows = [row for row in rows if number(row.get("epoch")) is not None]
    if not rows:
        return None
    frames = [rows[i] for i in _spread(len(rows), MOST_FRAMES)]
    epochs = [int(float(row["epoch"])) + 1 for row in frames]
    tables = [_table(name, names, frames) for name, names in table_names(run).items()]
    last = len(frames) - 1
    controls = el(
        "div",
        el("button", "▶ play", type="button", class_="play", aria_label="play the epochs"),
        el(
            "input",
            type="range",
            class_="epochs",
            min=0,
            max=last,
            value=last,
            step=1,
            aria_label="epoch",
            aria_valuetext=f"epoch {epochs[-1]}",
        ),
        el("output", f"epoch {epochs[-1]}"),
        class_="slider",
    )
    legend = el(
        "p",
        "Each row is an edge, each column a candidate; the fuller the colour, the more weight. A frame marks what "
        "would be derived in that epoch.",
        class_="quiet",
    )
    return el("div", controls, el("div", tables, class_="heats"), legend, class_="weights", data_epochs=data(epochs))


def _table(name: str, names: Names, frames: Sequence[Mapping[str, Any]]) -> Html:
    columns = list(dict.fromkeys(op for ops in names.candidates for op in ops))
    values = [_values(name, names, columns, frame) for frame in frames]
    picked = [_picked(name, names, columns, frame) for frame in frames]
    top = max(1, max(map(max, values)))
    rows = []
    for i, choice in enumerate(names.choices):
        cells = []
        for j, op in enumerate(columns):
            number_ = i * len(columns) + j
            if op not in names.candidates[i]:
                cells.append(el("td", class_="void"))
                continue
            share = values[-1][number_]
            style = f"h{shade(share, top)}" + (" picked" if number_ in picked[-1] else "")
            cells.append(el("td", f"{share / 100:.2f}", class_=style, data_i=number_))
        rows.append(el("tr", el("th", choice, scope="row"), cells))
    head = el("tr", el("td"), [el("th", el("span", op), scope="col") for op in columns])
    return el(
        "figure",
        el("figcaption", f"{name} cell" if name != "cell" else "cell"),
        el("div", el("table", el("thead", head), el("tbody", rows), class_="heat"), class_="scroll fade", tabindex=0),
        class_="card",
        data_top=top,
        data_frames=data(values),
        data_picked=data(picked),
    )


def shade(hundredths: int, top: int = 100) -> int:
    """Which of the ten shades a weight in hundredths has, where `top` has the fullest."""
    return min(SHADES - 1, max(0, hundredths * SHADES // top))


def _values(name: str, names: Names, columns: list[str], frame: Mapping[str, Any]) -> list[int]:
    """Weights of all cells of the table in hundredths, row by row; 0 where there is no such candidate."""
    found = mapping(frame.get("tables")).get(name)
    table = found if is_table(found) else None
    result = []
    for i, ops in enumerate(names.candidates):
        row = table[i] if table is not None and i < len(table) else []
        known = dict(zip(ops, row, strict=False))
        result += [round(100 * min(1.0, max(0.0, known.get(op, 0.0)))) for op in columns]
    return result


def _picked(name: str, names: Names, columns: list[str], frame: Mapping[str, Any]) -> list[int]:
    """Numbers of the cells that the epoch's derived architecture consists of."""
    edges = mapping(mapping(frame.get("genotype")).get(name)).get("edges")
    result = []
    for edge in edges if isinstance(edges, list) else []:
        if isinstance(edge, list) and len(edge) == 3 and edge[2] in columns and tuple(edge[:2]) in names.ends:
            result.append(names.ends.index((edge[0], edge[1])) * len(columns) + columns.index(edge[2]))
    return sorted(result)


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` positions, evenly spread, first and last among them."""
    return list(range(count)) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]
