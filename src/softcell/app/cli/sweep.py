"""`softcell sweep`"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from softcell.app.cli import options as o

if TYPE_CHECKING:
    from rich.console import Console

    from softcell.app.sweep import Job, Outcome

EPILOG = o.examples(
    "softcell sweep sweep.yaml",
    "softcell sweep sweep.yaml --jobs 2 --out runs/comparison",
    "softcell sweep runs/comparison",
    "softcell sweep sweep.yaml --on slurm --cluster slurm_partition=gpu --cluster gpus_per_node=1",
    "softcell sweep sweep.yaml --on ray --cluster address=auto --cluster num_gpus=1",
)
FAILED = 1


def sweep(
    plan: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML with methods, spaces and seeds, or the folder of a sweep.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the sweep; else runs/ and the name of the file.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Jobs at the same time; 1 here, all on a cluster.")
    ] = None,
    retries: Annotated[int, typer.Option(metavar="N", min=0, help="How often a failed job is tried again.")] = 1,
    on: Annotated[
        Literal["local", "slurm", "ray"], typer.Option(help="This machine, Slurm (by submitit) or a Ray cluster.")
    ] = "local",
    cluster: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of submitit or Ray, as timeout_min=60; may be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be run.")] = False,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
) -> int:
    """Run methods x spaces x seeds from a small file; what is finished is never repeated.

    Each job has a folder named by its settings. The same command goes on with a sweep that was stopped. Failed jobs are
    tried again from their last checkpoint, and named at the end with their last error and log.
    """
    from softcell.api import RUNS
    from softcell.app.cli.console import command, console
    from softcell.app.sweep import jobs_of, read_plan, run_sweep
    from softcell.app.sweep.launch import make_launcher
    from softcell.app.sweep.plan import PLAN, code_of, folders_of, plain_options
    from softcell.engine.files import atomic_write_text
    from softcell.errors import UserError
    from softcell.settings import assignments, merge
    from softcell.trust import PASSED_ON, digests, is_trusted, trusted
    from softcell.trust import trust as agree

    for path in plugin or ():
        agree(path)  # naming a plugin of the sweep is to trust it
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
    screen.print(f"sweep of {len(every)} jobs in {folder}; `{command('watch', folder)}` shows them", markup=False)
    began, counts = time.monotonic(), {"done": sum(job.is_finished() for job in every)}
    if counts["done"]:
        screen.print(f"{counts['done']} finished before and are left alone", markup=False)

    def notify(what: str, job: Job, remark: str) -> None:
        counts["done"] += what == "done"
        words = {"start": "started", "done": "finished", "retry": "failed, tries again", "failed": "failed"}[what]
        from softcell.app.cli.progress import clock

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
    """The report of all that is finished, the failures, and how to go on."""
    from softcell.app.cli.compare import _terminal
    from softcell.app.report.compare import compare
    from softcell.app.report.page import REPORT, write_report
    from softcell.app.report.runs import read_runs
    from softcell.app.sweep.plan import finished
    from softcell.app.sweep.work import LOG

    runs = [run for job in every for run in job.runs() if finished(run)]
    screen.print()
    if runs:
        write_report(runs, folder / REPORT)
        _terminal(compare(read_runs(runs)))
        screen.print(f"\nreport: {folder / REPORT}", markup=False)
    for job, attempts, error in outcome.failed.values():
        tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        text = f"failed after {tries}: {job.name}: {error}\n  log: {job.folder / LOG}"
        screen.print(text, style="yellow", markup=False)
    if outcome.interrupted:
        screen.print(
            f"stopped with {len(outcome.open)} of {len(every)} jobs to do; go on with:\n  {again}", markup=False
        )
        return 128 + (signals[0] if signals else signal.SIGINT)
    if outcome.failed:
        count = len(outcome.failed)
        screen.print(f"{count} of {len(every)} jobs failed; try them again with:\n  {again}", markup=False)
        return FAILED
    return 0
