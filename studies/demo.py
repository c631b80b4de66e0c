"""`python -m studies.demo`: what does `softcell demo` claim for each seed, and how long does it take?

Runs the demo as a user would, one process per seed, and collects its output and measurements. A seed that is already
finished in `--runs` is not run again.

python -m studies.demo --runs DIR --seeds 0 1 2 3 4 --record results/demo/fresh.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from softcell.app.baseline import LEVEL
from softcell.app.cli.run import DEMO_RECORD
from softcell.errors import UserError
from softcell.files import atomic_write_text
from softcell.search.genotypes import read_genotype
from studies.runs import entry, write_record

TIMES = "times.json"


def ran(folder: Path, seed: int) -> dict[str, Any]:
    """The record of the demo in `folder` with wall-clock and CPU seconds; runs it first if it is not finished."""
    if not (folder / DEMO_RECORD).is_file():
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        words = ("demo", "--seed", str(seed), "--out", str(folder), "--device", "cpu", "--quiet")
        done = subprocess.run([sys.executable, "-m", "softcell", *words], env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise UserError(
                f"every demo must finish, but seed {seed} ended with exit code {done.returncode}; run again"
            )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        times = {"wall_seconds": round(time.monotonic() - began), "cpu_seconds": round(cpu)}
        atomic_write_text(folder / TIMES, json.dumps(times) + "\n")
    record = json.loads((folder / DEMO_RECORD).read_text("utf-8"))
    cells = {name: read_genotype(folder / "train" / name).to_dict()["cells"] for name in record["accuracy"]}
    return {**record, **json.loads((folder / TIMES).read_text("utf-8")), "cells": cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR", help="folder of the demos")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="seeds of the demo")
    parser.add_argument("--record", type=Path, metavar="FILE", help="file to write")
    options = parser.parse_args()
    rows = [ran(options.runs / f"seed-{seed}", seed) for seed in options.seeds]
    for row in rows:
        print(f"seed {row['seed']} ({row['cpu_seconds']} CPU seconds): {row['claim']}")
    claimed = sum(row["p"] <= LEVEL for row in rows)
    print(f"a difference is claimed with {claimed} of {len(rows)} seeds")
    if options.record is not None:
        write_record(options.record, "studies.demo", rows=rows)


if __name__ == "__main__":
    entry(main)
