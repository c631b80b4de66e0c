"""A comparison as text: Markdown and CSV; the terminal's table is the command's own affair."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from softcell.app.report.compare import Comparison, Group
from softcell.app.report.html.elements import big
from softcell.app.report.strings import clean

HEADER = ("group", "n", "mean, %", "std", "top-5, %", "parameters", "data", "accuracy of", "seeds")
NUMERIC = (1, 2, 3, 4, 5)


def group_row(group: Group) -> tuple[str, ...]:
    """One line of the table, as people read it."""
    s, top5, cost = group.summary, group.top5, group.cost("parameters")
    return (
        group.name,
        str(s.n),
        f"{100 * s.mean:.2f}",
        "–" if s.std is None else f"{100 * s.std:.2f}",
        "–" if top5 is None else f"{100 * top5.mean:.2f}",
        "–" if cost is None else big(cost.mean),
        group.data,
        group.measure,
        ", ".join(group.seeds),
    )


def markdown(found: Comparison) -> str:
    """The table, one sentence per pair, and the notes."""
    lines = [_line(HEADER), _line("---:" if i in NUMERIC else "---" for i in range(len(HEADER)))]
    lines += [_line(group_row(group)) for group in found.groups]
    lines += ["", *(f"- {_plain(said)}" for said in found.sentences)] if found.pairs else []
    lines += ["", *(f"- Note: {_plain(note)}" for note in found.notes)] if found.notes else []
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_plain(cell) for cell in cells)} |"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: nothing of it opens a cell, a tag or a link."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|" else c for c in clean(text))


def groups_csv(found: Comparison) -> str:
    """One row per group with full precision; shares are 0..1."""
    header = "method space data measure group n mean std ci95_low ci95_high min max"
    header += " top5_mean top5_std parameters_mean multiply_adds_mean seeds runs"
    rows: list[Sequence[object]] = []
    for group in found.groups:
        s, values = group.summary, group.values
        low, high = s.interval if s.interval is not None else (None, None)
        costs = [cost.mean if (cost := group.cost(what)) else None for what in ("parameters", "multiply_adds")]
        runs = " ".join(run.label for run in group.runs)
        row = (group.method, group.space, group.data, group.measure, group.name, s.n, s.mean, s.std, low, high)
        top5 = (None, None) if group.top5 is None else (group.top5.mean, group.top5.std)
        rows.append((*row, min(values), max(values), *top5, *costs, " ".join(group.seeds), runs))
    return plain_csv(header.split(), rows)


def pairs_csv(found: Comparison) -> str:
    """One row per pair of groups; empty where no test can be made."""
    header = "first second difference ci95_low ci95_high p p_holm statement"
    rows: list[Sequence[object]] = []
    for pair in found.pairs:
        test = pair.test
        numbers = (None,) * 4 if test is None else (test.difference, *test.interval, test.p)
        rows.append((pair.first.name, pair.second.name, *numbers, pair.p_adjusted, pair.sentence))
    return plain_csv(header.split(), rows)


def runs_csv(found: Comparison) -> str:
    """One row per run that was counted."""
    header = "run group measure seed accuracy top5 parameters multiply_adds"
    rows: list[Sequence[object]] = []
    for group in found.groups:
        for run, value in zip(group.runs, group.values, strict=True):
            costs = [run.results.get(what) for what in ("parameters", "multiply_adds")]
            top5 = None if run.score is None else run.score.top5
            rows.append((run.label, group.name, group.measure, run.seed, value, top5, *costs))
    return plain_csv(header.split(), rows)


def plain_csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows as CSV; None is an empty cell."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([_cell(value) for value in row])
    return stream.getvalue()


def _cell(value: object) -> object:
    """A spreadsheet must not take a name for a formula."""
    if isinstance(value, str):
        text = clean(value)
        return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
    return "" if value is None else value
