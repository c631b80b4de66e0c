"""`softcell report`, `watch` and `compare`: finished and running runs as a page, a live page or a table."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from softcell.app.cli import options as o
from softcell.app.cli.console import check_absent, console, write
from softcell.app.report.compare import (
    HEADER,
    NUMERIC,
    Comparison,
    group_row,
    groups_csv,
    markdown,
    pairs_csv,
    runs_csv,
)
from softcell.app.report.compare import compare as compare_runs
from softcell.app.report.live import LivePage, LiveServer
from softcell.app.report.page import REPORT, write_report
from softcell.app.report.runs import check_intact, find_runs, read_runs
from softcell.app.report.theme import clean
from softcell.engine.runfolder import RUNS
from softcell.errors import UserError
from softcell.text import count_of

Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Run folders, or folders that contain runs.", show_default=False),
]
commands = typer.Typer()


@commands.command(
    "report",
    epilog=o.examples(
        "softcell report runs/darts-darts-digits-1",
        "softcell report runs/my-sweep --out sweep.html",
        "softcell report runs/train-* --out comparison.html",
    ),
)
def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File to write. Default: report.html in the given folder, or here for several."
        ),
    ] = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
) -> None:
    """Write one self-contained HTML page about one or more runs.

    Every run writes its own report.html already; use this to put several runs on one page, or to rewrite a page.
    """
    o.load_plugins(plugin)
    folders = find_runs(runs)
    check_intact(folders)
    own = runs[0] / REPORT if len(runs) == 1 else None
    path = out or own or Path(REPORT)
    if path.is_dir():
        raise UserError(f"--out must be a file, but {path} is a folder; use {path / REPORT}")
    check_absent(path, overwrite or path == own)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_report(folders, path)
    console().print(f"report of {count_of(len(folders), 'run')}: {path}", markup=False)


@commands.command(
    "watch",
    epilog=o.examples(
        "softcell watch", "softcell watch runs/my-sweep --port 8800", "softcell watch runs/darts-nb201-1"
    ),
)
def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN...]", help="Run folders, or folders that contain runs. Default: runs/."),
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port on this machine; 0 for any free one.")
    ] = 8477,
    every: Annotated[float, typer.Option(metavar="S", min=0.2, help="Seconds between two reads of the files.")] = 2.0,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    plugin: o.Plugin = None,
) -> int:
    """Serve a live report of running searches and trainings, on this machine only.

    The page is served on 127.0.0.1. To see it from another machine, forward the port: ssh -L 8477:localhost:8477 HOST
    """
    o.load_plugins(plugin)
    roots = runs or [RUNS]
    for root in roots:
        if runs and not root.is_dir():
            raise UserError(f"{root} must be a folder with runs, but there is no such folder; see what is in {RUNS}/")
    with LiveServer(LivePage(roots, every), port) as server:
        screen = console()
        screen.print(f"watching {', '.join(map(str, roots))}: {server.address}  (Ctrl-C stops)", markup=False)
        sys.stdout.flush()  # so that a log shows the address at once
        if open_:
            typer.launch(server.address)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            screen.print("Stopped watching; the runs continue.")
    return 0


@commands.command(
    "compare",
    epilog=o.examples(
        "softcell compare runs/train-*",
        "softcell compare runs/my-sweep --format markdown --out results.md",
        "softcell compare runs/my-sweep --format csv --of pairs",
    ),
)
def compare(
    runs: Runs,
    format_: Annotated[
        Literal["table", "markdown", "csv"],
        typer.Option("--format", help="For a terminal, a document or a spreadsheet."),
    ] = "table",
    of: Annotated[
        Literal["groups", "pairs", "runs"], typer.Option(help="Rows of the CSV file; accuracies are 0..1.")
    ] = "groups",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of to standard output.")] = None,
    overwrite: o.OverwriteFile = False,
) -> None:
    """Compare runs over seeds: n, mean, std, and which differences are significant.

    Runs that differ only in their seed form a group. Every two groups measured in the same way on the same data are
    compared by Welch's t-test, corrected for the number of comparisons (Holm). Nothing is claimed from a single run.
    """
    if of != "groups" and format_ != "csv":
        raise UserError(f"--of {of} requires --format csv; the other formats show groups and pairs together")
    folders = find_runs(runs)
    check_intact(folders)
    found = compare_runs(read_runs(folders))
    if not found.groups:
        raise UserError(f"no run has an accuracy to compare: {'; '.join(found.notes)}")
    if format_ == "table":
        text = None if out is None else print_comparison(found, width=120)
    elif format_ == "markdown":
        text = markdown(found)
    else:
        text = {"groups": groups_csv, "pairs": pairs_csv, "runs": runs_csv}[of](found)
    if text is None:
        print_comparison(found)
    elif out is None:
        typer.echo(text, nl=False)
    else:
        write(out, text, overwrite)
        typer.echo(f"written: {out}")


def print_comparison(found: Comparison, width: int | None = None) -> str:
    """Prints the table, the sentences and the notes; with `width`, returns them as text instead."""
    stream = io.StringIO()
    screen = console() if width is None else Console(file=stream, width=width, highlight=False, soft_wrap=True)
    columns = [i for i, name in enumerate(HEADER) if name not in ("data", "accuracy of")]
    for measure, data in dict.fromkeys((group.measure, group.data) for group in found.groups):
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        for i in columns:
            numeric = i in NUMERIC
            table.add_column(HEADER[i], justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
        for group in found.groups:
            if (group.measure, group.data) == (measure, data):
                row = group_row(group)
                table.add_row(*(Text(clean(row[i])) for i in columns))
        screen.print(Text(f"accuracy of {clean(measure)}, data {clean(data)}", "bold underline"))
        screen.print(table, soft_wrap=False)
        screen.print()
    for sentence in found.sentences:
        screen.print(Text(f"• {clean(sentence)}"), soft_wrap=False)
    for note in found.notes:
        screen.print(Text(f"note: {clean(note)}", "yellow"), soft_wrap=False)
    return stream.getvalue()
