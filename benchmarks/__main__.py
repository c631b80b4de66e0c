"""`python -m benchmarks`: times search and training steps, prints tables and writes JSON.

Parts, in this order: `steps` compares search steps with the plain formulation; `methods` times a search step of every
method, `training` a training step of every network, `cold` the very first step of a search. `methods` and `cold` need a
GPU. Every part but the first is a command of its own, such as `python -m benchmarks.training`, with more options.

python -m benchmarks                      # a GPU: the papers' sizes; a CPU: small sizes
python -m benchmarks --part steps --paper # search steps at the papers' sizes on a CPU, too (minutes)
python -m benchmarks --out benchmarks/records/NAME.json    # further parts: NAME-PART.json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import gpu
from benchmarks.options import machine
from benchmarks.steps import PAPER, SMALL, compare
from studies.runs import write_record

STEPS = "steps"
OTHERS = {"methods": ["cuda"], "training": ["cuda", "cpu"], "cold": ["cuda"]}
"""Further parts, each `benchmarks.NAME`, and the devices that they run on."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Wrong options are reported before anything is measured: exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--part", action="append", choices=[STEPS, *OTHERS], help="run only this part; may be repeated")
    parser.add_argument("--paper", action="store_true", help=f"{STEPS}: the papers' sizes instead of the small ones")
    parser.add_argument("--rounds", type=int, default=7, help=f"{STEPS}: timed rounds per formulation")
    parser.add_argument(
        "--space",
        action="append",
        choices=[case.space for case in PAPER],
        help=f"{STEPS}: run only this space; may be repeated",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--out", type=Path, help="where to write the JSON record")
    options = parser.parse_args(arguments)
    device, threads = machine(parser, options)
    known = [STEPS, *(part for part, kinds in OTHERS.items() if device.type in kinds)]
    wrong = [part for part in options.part or () if part not in known]
    if wrong:
        parser.error(f"--part {wrong[0]} needs a GPU; {device.type} runs {' and '.join(known)}")
    console, failed = Console(), []
    for part in options.part or known:
        if part == STEPS:
            steps(device.type, threads, options, console)
        elif not run_part(part, options):
            failed.append(part)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run_part(part: str, options: argparse.Namespace) -> bool:
    """Runs `benchmarks.PART` in a separate process, which frees all memory at its end; whether it succeeded."""
    given = ["--device", options.device, "--threads", str(options.threads)]
    if options.out is not None:
        given += ["--out", str(options.out.with_stem(f"{options.out.stem}-{part}"))]
    return subprocess.run([sys.executable, "-m", f"benchmarks.{part}", *given], check=False).returncode == 0


def steps(device: str, threads: int, options: argparse.Namespace, console: Console) -> None:
    """Search steps compared with the plain formulation; on a GPU also training steps, and searches that share it."""
    if device == "cuda":
        found = gpu.run(options.rounds, options.space or [case.space for case in PAPER], console.print)
        for title, columns, lines in gpu.as_tables(found):
            shown = Table(title=title, title_justify="left")
            for i, column in enumerate(columns):
                shown.add_column(column, justify="left" if i == 0 else "right")
            for line in lines:
                shown.add_row(*line)
            console.print(shown)
        write(options.out, threads, found, console)
        return
    cases = [case for case in (PAPER if options.paper else SMALL) if case.space in (options.space or case.space)]
    rows = [
        compare(case, torch.device(device), options.rounds)
        for case in track(cases, "steps", console=console, transient=True)
    ]
    table = Table(
        title=f"one search step (weights + architecture), {device}, {threads} threads",
        caption="\n".join(row["name"] for row in rows),
    )
    table.add_column("space", no_wrap=True)
    for column in ("plain ms", "ours ms", "ratio", "CPU ratio", "plain MB", "ours MB", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        plain, ours = row["plain"], row["softcell"]
        table.add_row(
            row["case"]["space"],
            f"{plain['wall_ms']:.1f}",
            f"{ours['wall_ms']:.1f}",
            f"{row['ratio_wall']:.2f}",
            f"{row['ratio_cpu']:.2f}",
            f"{plain['peak_mb']:.0f}",
            f"{ours['peak_mb']:.0f}",
            f"{row['ratio_peak']:.2f}",
        )
    console.print(table)
    write(options.out, threads, {"rows": rows}, console)


def write(out: Path | None, threads: int, found: dict[str, Any], console: Console) -> None:
    """The record, including the machine and versions."""
    if out is not None:
        write_record(out, "benchmarks", threads=threads, **found)
        console.print(f"written: {out}")


if __name__ == "__main__":
    main()
