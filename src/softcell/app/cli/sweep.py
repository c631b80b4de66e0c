"""`softcell sweep`"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from softcell.app.cli import options as o
from softcell.app.cli.console import command, console
from softcell.app.cli.report import print_comparison
from softcell.app.report.compare import compare as compare_runs
from softcell.app.report.page import REPORT, write_report
from softcell.app.report.runs import read_runs
from softcell.app.sweep import Job, Outcome, jobs_of, read_plan, run_sweep
from softcell.app.sweep.launch import make_launcher
from softcell.app.sweep.plan import PLAN, code_of, folders_of, is_finished, plain_options
from softcell.app.sweep.share import LOG
from softcell.engine.runfolder import RUNS
from softcell.errors import UserError
from softcell.files import atomic_write_text
from softcell.settings import assignments, merge
from softcell.text import clock, count_of
from softcell.trust import PASSED_ON, digests, is_trusted, trusted
from softcell.trust import trust as trust_file

FAILED = 1
commands = typer.Typer()


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
    retries: Annotated[int, typer.Option(metavar="N", min=0, help="How often to retry a failed job.")] = 1,
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
            screen.print(f"{'finished' if job.is_finished() else 'to do':<9} {job.folder}", markup=False)
        return 0
    options = merge(plain_options(found) if on != "local" else {}, assignments(cluster or ()))
    launcher = make_launcher(on, folder.resolve(), jobs, options, {PASSED_ON: digests(code)} if code else {})
    source = plan / PLAN if plan.is_dir() else plan
    folder.mkdir(parents=True, exist_ok=True)
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
        words = {"start": "started", "done": "finished", "retry": "failed, will be retried", "failed": "failed"}[what]
        past = clock(time.monotonic() - began)
        line = f"{past:>8}  {counts['done']}/{len(every)}  {job.name} {words}" + (f": {remark}" if remark else "")
        screen.print(line, style="yellow" if what in ("retry", "failed") else None, markup=False)
        sys.stdout.flush()

    signals: list[int] = []

    def stop(number: int, _: object) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        outcome = run_sweep(every, launcher, at_once=jobs, retries=retries, notify=notify)
    finally:
        signal.signal(signal.SIGTERM, before)
    if not every:
        raise UserError("this sweep has no jobs")
    again = ["sweep", str(folder), *(["--on", on] if on != "local" else []), *(["--jobs", str(jobs)] if jobs else [])]
    return _conclude(screen, folder, every, outcome, command(*again), signals)


def _conclude(screen: Console, folder: Path, every: list[Job], outcome: Outcome, again: str, signals: list[int]) -> int:
    """Prints the report of all finished runs, the failures, and the command that resumes the sweep."""
    runs = [run for job in every for run in job.runs() if is_finished(run)]
    screen.print()
    if runs:
        write_report(runs, folder / REPORT)
        print_comparison(compare_runs(read_runs(runs)))
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
