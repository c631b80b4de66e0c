"""`python -m benchmarks`: times search steps, prints tables and writes JSON.

python -m benchmarks                      # a GPU: everything, at the papers' sizes; a CPU: steps at small sizes
python -m benchmarks --paper              # the papers' sizes on a CPU too (minutes)
python -m benchmarks --out benchmarks/records/NAME.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import gpu
from benchmarks.options import machine
from benchmarks.steps import PAPER, SMALL, compare
from studies.runs import write_record


def main(arguments: Sequence[str] | None = None) -> None:
    """Wrong options are reported before anything is measured: exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--paper", action="store_true", help="the papers' sizes instead of the small ones")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds per formulation")
    parser.add_argument(
        "--space", action="append", choices=[case.space for case in PAPER], help="run only this space; may be repeated"
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--out", type=Path, help="where to write the JSON record")
    options = parser.parse_args(arguments)
    device, threads = machine(parser, options)
    console = Console()
    if device.type == "cuda":
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
    rows = [compare(case, device, options.rounds) for case in track(cases, "steps", console=console, transient=True)]
    table = Table(title=f"one search step (weights + architecture), {device.type}, {threads} threads")
    table.add_column("space")
    for column in ("plain ms", "softcell ms", "ratio", "CPU-time ratio", "plain MB", "softcell MB", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        plain, ours = row["plain"], row["softcell"]
        table.add_row(
            row["name"],
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
