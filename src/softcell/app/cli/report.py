"""`softcell report`, `watch`, `compare` and `sweep`: many runs, their pages and their comparison."""

from __future__ import annotations

import io
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from softcell import api
from softcell.app.cli import options as o
from softcell.app.cli.output import check_absent, command, console, write
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
from softcell.app.report.page import REPORT, LivePage, LiveServer, write_report
from softcell.app.report.runs import check_intact, find_runs, read_runs
from softcell.app.report.theme import clean
from softcell.app.sweep import Job, Outcome, jobs_of, read_plan, run_sweep
from softcell.app.sweep.launch import make_launcher
from softcell.app.sweep.plan import LOG, PLAN, code_of, folders_of, is_finished, plain_options
from softcell.engine.runfolder import RUNS
from softcell.errors import UserError
from softcell.files import atomic_write_text, make_folder
from softcell.machine import num_processes
from softcell.settings import assignments, merge
from softcell.text import clock, count_of
from softcell.trust import PASSED_ON, digests, is_trusted, trusted
from softcell.trust import trust as trust_file

Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN", help="Run folders, or folders that contain runs.", show_default=False),
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
        typer.Argument(metavar="RUN", help="Run folders, or folders that contain runs. Default: runs/."),
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port on this machine; 0 for any free one.")
    ] = 8477,
    every: Annotated[float, typer.Option(metavar="S", min=0.2, help="Seconds between two reads of the files.")] = 2.0,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    plugin: o.Plugin = None,
) -> int:
    """Serve a live report of running searches and training runs, on this machine only.

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

    Runs that differ only in their seed form a group. All pairs of groups measured in the same way on the same data are
    compared by Welch's t-test, corrected for the number of comparisons (Holm). Nothing is claimed from a single run.
    """
    if of != "groups" and format_ != "csv":
        raise UserError(f"--of {of} requires --format csv; the other formats show groups and pairs together")
    found = api.compare(runs)
    if format_ == "table":
        text = None if out is None else _print_comparison(found, width=120)
    elif format_ == "markdown":
        text = markdown(found)
    else:
        text = {"groups": groups_csv, "pairs": pairs_csv, "runs": runs_csv}[of](found)
    if text is None:
        _print_comparison(found)
    elif out is None:
        typer.echo(text, nl=False)
    else:
        write(out, text, overwrite)
        typer.echo(f"written: {out}")


def _print_comparison(found: Comparison, width: int | None = None) -> str:
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


FAILED = 1
DEFAULT_RETRIES = 1


@commands.command(
    "sweep",
    epilog=o.examples(
        "softcell sweep sweep.yaml",
        "softcell sweep sweep.yaml --jobs 2 --out runs/comparison",
        "softcell sweep runs/comparison",
        "softcell sweep sweep.yaml --on slurm --cluster slurm_partition=gpu --cluster gpus_per_node=1",
        "softcell sweep sweep.yaml --on ray --cluster address=auto --cluster num_gpus=1",
    ),
)
def sweep(
    plan: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML file of methods, spaces and seeds, or the folder of a sweep.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the sweep. Default: runs/ and the name of the file.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Concurrent jobs. Default: 1 on this machine, all on a cluster."),
    ] = None,
    retries: Annotated[
        int, typer.Option(metavar="N", min=0, help="How often to retry a failed job.")
    ] = DEFAULT_RETRIES,
    on: Annotated[
        Literal["local", "slurm", "ray"], typer.Option(help="This machine, Slurm (through submitit) or a Ray cluster.")
    ] = "local",
    cluster: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of submitit or Ray, such as timeout_min=60; repeatable."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the jobs.")] = False,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
) -> int:
    """Run methods x spaces x seeds from a short file; finished runs are never repeated.

    Each job has a folder named after its settings. The same command resumes an interrupted sweep. Failed jobs are
    retried from their last checkpoint; those that fail again are listed at the end with their last error and log.
    """
    if num_processes() > 1:
        raise UserError(
            "`softcell sweep` starts its own processes; run it without torchrun, with --jobs N or --on slurm"
        )
    for path in plugin or ():
        trust_file(path)  # naming a plugin of the sweep means trusting it
    screen = console()
    folder = out or (plan if plan.is_dir() else RUNS / plan.stem)
    if dry_run:
        found = read_plan(plan, only_read=True)
        unknown = [str(path) for path, kind in code_of(found) if not is_trusted(path, kind)]
        if unknown:
            for place in folders_of(found, folder):
                screen.print(str(place), markup=False)
            screen.print(
                f"settings were not checked: the sweep names {', '.join(unknown)}, which is not trusted here and was "
                "not run; read it, then repeat with --trust",
                style="yellow",
                markup=False,
            )
            return 0
    found = read_plan(plan)
    code = [trusted(path, f"the sweep in {plan}", kind).path for path, kind in code_of(found)]
    every = jobs_of(found, folder)
    if dry_run:
        for job in every:
            screen.print(f"{'finished' if job.is_finished() else 'to do':<9} {folder / job.name}", markup=False)
        return 0
    options = merge(plain_options(found) if on != "local" else {}, assignments(cluster or (), "--cluster"))
    # Jobs cannot ask the user: they trust the contents that are trusted here, not later versions of the same files.
    launcher = make_launcher(on, folder.resolve(), jobs, options, {PASSED_ON: digests(code)} if code else {})
    source = plan / PLAN if plan.is_dir() else plan
    make_folder(folder, "a sweep")
    if source.resolve() != (folder / PLAN).resolve():
        kept = folder / PLAN
        if kept.exists() and kept.read_bytes() != source.read_bytes():
            screen.print(f"note: {kept} is replaced by {source}", style="yellow", markup=False)
        atomic_write_text(kept, source.read_text(encoding="utf-8"))
    started = f"sweep of {count_of(len(every), 'job')} in {folder}"
    screen.print(f"{started}; run `{command('watch', folder)}` to watch it", markup=False)
    began, counts = time.monotonic(), {"done": sum(job.is_finished() for job in every)}
    if counts["done"]:
        screen.print(f"{count_of(counts['done'], 'job')} already finished", markup=False)

    def notify(what: str, job: Job, remark: str) -> None:
        counts["done"] += what == "done"
        words = {
            "start": "started",
            "wait": "waiting: not accepted by the scheduler yet",
            "done": "finished",
            "retry": "failed, will be retried",
            "failed": "failed",
        }[what]
        past = clock(time.monotonic() - began)
        line = f"{past:>8}  {counts['done']}/{len(every)}  {job.name} {words}" + (f": {remark}" if remark else "")
        screen.print(line, style="yellow" if what in ("retry", "failed") else None, markup=False)
        sys.stdout.flush()

    signals: list[int] = []

    def stop(number: int, _: object) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    # A scheduler ends the sweep by SIGTERM: like Ctrl-C, it must let the jobs save their state.
    before = signal.signal(signal.SIGTERM, stop)
    try:
        outcome = run_sweep(every, launcher, at_once=jobs, retries=retries, notify=notify)
    finally:
        signal.signal(signal.SIGTERM, before)
    again = ["sweep", str(folder), *(["--on", on] if on != "local" else []), *(["--jobs", str(jobs)] if jobs else [])]
    again += [word for option in cluster or () for word in ("--cluster", option)]
    again += ["--retries", str(retries)] if retries != DEFAULT_RETRIES else []
    return _conclude(screen, folder, every, outcome, command(*again), signals)


def _conclude(screen: Console, folder: Path, every: list[Job], outcome: Outcome, again: str, signals: list[int]) -> int:
    """Prints the report of all finished runs, the failures, and the command that resumes the sweep."""
    runs = [run for job in every for run in job.runs() if is_finished(run)]
    screen.print()
    if runs:
        write_report(runs, folder / REPORT)
        _print_comparison(compare_runs(read_runs(runs)))
        screen.print(f"\nreport: {folder / REPORT}", markup=False)
    for job, attempts, error in outcome.failed.values():
        text = f"failed after {count_of(attempts, 'attempt')}: {job.name}: {error}\n  log: {job.folder / LOG}"
        screen.print(text, style="yellow", markup=False)
    of_all = f"of {count_of(len(every), 'job')}"
    if outcome.interrupted:
        screen.print(f"Interrupted; {len(outcome.open)} {of_all} left. Resume with:\n  {again}", markup=False)
        return 128 + (signals[0] if signals else signal.SIGINT)
    if outcome.failed:
        screen.print(f"{len(outcome.failed)} {of_all} failed. Retry with:\n  {again}", markup=False)
        return FAILED
    return 0
