"""`softcell compare`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from softcell.app.cli import options as o
from softcell.app.cli.report import Runs

if TYPE_CHECKING:
    from softcell.app.report.compare import Comparison

EPILOG = o.examples(
    "softcell compare runs/train-*",
    "softcell compare runs/my-sweep --format markdown --out results.md",
    "softcell compare runs/my-sweep --format csv --of pairs",
)


def compare(
    runs: Runs,
    format_: Annotated[
        Literal["table", "markdown", "csv"], typer.Option("--format", help="For a terminal, a text or a spreadsheet.")
    ] = "table",
    of: Annotated[
        Literal["groups", "pairs", "runs"], typer.Option(help="What the rows of a CSV file are; shares are 0..1.")
    ] = "groups",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of standard output.")] = None,
    overwrite: o.OverwriteFile = False,
) -> None:
    """Compare runs over seeds: n, mean, std, and what can fairly be said of the differences.

    Runs that differ by their seed alone form a group. Every two groups that were measured alike on the same data are
    compared by Welch's t-test, corrected for the number of comparisons (Holm). With one run nothing is claimed.
    """
    from softcell.app.cli.console import write
    from softcell.app.report.compare import compare as compare_runs
    from softcell.app.report.compare import groups_csv, markdown, pairs_csv, runs_csv
    from softcell.app.report.runs import check_intact, find_runs, read_runs
    from softcell.errors import UserError

    if of != "groups" and format_ != "csv":
        raise UserError(f"--of {of} belongs to --format csv; the other formats show groups and pairs together")
    folders = find_runs(runs)
    check_intact(folders)
    found = compare_runs(read_runs(folders))
    if not found.groups:
        raise UserError(f"no run has an accuracy to compare: {'; '.join(found.notes)}")
    if format_ == "table":
        text = None if out is None else _terminal(found, width=120)
    elif format_ == "markdown":
        text = markdown(found)
    else:
        text = {"groups": groups_csv, "pairs": pairs_csv, "runs": runs_csv}[of](found)
    if text is None:
        _terminal(found)
    elif out is None:
        typer.echo(text, nl=False)
    else:
        write(out, text, overwrite)
        typer.echo(f"written: {out}")


def _terminal(found: Comparison, width: int | None = None) -> str:
    """Prints the table, the sentences and the notes; with `width`, gives them as text instead."""
    import io

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from softcell.app.cli.console import console
    from softcell.app.report.compare import HEADER, NUMERIC, group_row
    from softcell.app.report.strings import clean

    stream = io.StringIO()
    screen = console() if width is None else Console(file=stream, width=width, highlight=False, soft_wrap=True)
    keep = [i for i, name in enumerate(HEADER) if name not in ("data", "accuracy of")]
    for measure, data in dict.fromkeys((group.measure, group.data) for group in found.groups):
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        for i in keep:
            numeric = i in NUMERIC
            table.add_column(HEADER[i], justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
        for group in found.groups:
            if (group.measure, group.data) == (measure, data):
                row = group_row(group)
                table.add_row(*(Text(clean(row[i])) for i in keep))
        screen.print(Text(f"accuracy of {clean(measure)}, data {clean(data)}", "bold underline"))
        screen.print(table, soft_wrap=False)
        screen.print()
    for said in found.sentences:
        screen.print(Text(f"• {clean(said)}"), soft_wrap=False)
    for note in found.notes:
        screen.print(Text(f"note: {clean(note)}", "yellow"), soft_wrap=False)
    return stream.getvalue()
