"""`python -m benchmarks`: times search steps, prints a table, writes JSON.

python -m benchmarks                      # small sizes on this machine's device
python -m benchmarks --paper              # the papers' sizes (on a CPU: minutes)
python -m benchmarks --out benchmarks/records/NAME.json
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.steps import PAPER, SMALL, compare
from softcell.engine.device import resolve_device, set_threads
from softcell.engine.provenance import collect


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--paper", action="store_true", help="the papers' sizes instead of the small ones")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds per formulation")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--out", type=Path, help="where to write the JSON record")
    options = parser.parse_args()
    device = resolve_device(options.device)
    threads = set_threads(options.threads)
    console = Console()
    cases = PAPER if options.paper else SMALL
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
    if options.out is not None:
        record = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "threads": threads,
            **collect(),
            "command": ["python", "-m", "benchmarks", *sys.argv[1:]],
            "rows": rows,
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        console.print(f"written: {options.out}")


if __name__ == "__main__":
    main()
