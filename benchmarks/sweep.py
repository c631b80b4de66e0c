"""`python -m benchmarks.sweep`: a sweep whose searches share a GPU, compared with the same sweep run sequentially.

Both run `softcell sweep` in separate processes, after a short sweep that compiles the kernels. "sweep" is the time of
the whole command, including process start-up. "epochs" is the time of all epochs except the first, in which steps are
captured: the sum over sequential searches, or the maximum over concurrent ones. On a CPU searches do not share a
process, and the result says nothing about a GPU.

python -m benchmarks.sweep --jobs 4 --images 10000 --epochs 8 --out record.json
python -m benchmarks.sweep --data cifar10 --data-root DIR --epochs 3
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.options import machine
from studies.runs import write_record


def sweep(folder: Path, plan: dict[str, Any], jobs: int) -> dict[str, Any]:
    """Seconds of a sweep in `folder`, those of each search's epochs, and the searches' metrics."""
    folder.mkdir()
    (folder / "plan.yaml").write_text(json.dumps(plan))
    began = time.perf_counter()
    words = ["-m", "softcell", "sweep", "plan.yaml", "--jobs", str(jobs), "--out", "runs"]
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"softcell sweep --jobs {jobs} failed:\n{done.stdout}{done.stderr}")
    files = sorted(folder.glob("runs/*/search/metrics.jsonl"))
    rows = {file.parent.parent.name: [json.loads(line) for line in file.read_text().splitlines()] for file in files}
    return {
        "jobs": jobs,
        "wall_s": wall,
        "epochs_s": {name: sum(row["seconds"] for row in own[1:]) for name, own in rows.items()},
        "metrics": {
            name: [{k: v for k, v in row.items() if k != "seconds"} for row in own] for name, own in rows.items()
        },
        "shared": len(list(folder.glob("runs/shared-*.txt"))),
    }


def measured(search: dict[str, Any], jobs: int, images: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs both sweeps and computes the speedup of the second one.

    images: if positive, the searches use that many random 32 × 32 images instead of `search["data"]`.
    """

    def timed(folder: Path, count: int, epochs: int, jobs: int) -> dict[str, Any]:
        own = {**search, "epochs": epochs}
        row = sweep(folder, {"methods": ["darts"], "spaces": ["nb201"], "seeds": count, "search": own}, jobs)
        say(f"{count} searches of {epochs} epochs, --jobs {jobs}: {row['wall_s']:.1f} s")
        return row

    with TemporaryDirectory() as name:
        folder = Path(name)
        if images:
            search = {**search, "data": str(folder / "random.npz")}
            draws = np.random.default_rng(0)
            pixels = draws.integers(0, 256, (images, 32, 32, 3), dtype=np.uint8)
            np.savez(search["data"], images=pixels, labels=draws.integers(0, 10, images))
        timed(folder / "first", 1, 1, 1)
        one, several = (timed(folder / f"jobs-{n}", jobs, search["epochs"], n) for n in (1, jobs))
    same = one.pop("metrics") == several.pop("metrics")
    epochs = sum(one["epochs_s"].values()), max(several["epochs_s"].values())
    return {
        "searches": jobs,
        "search": search | ({"data": f"{images} random images"} if images else {}),
        "one_by_one": one,
        "at_once": several,
        "same_metrics": same,
        "ratio_wall": one["wall_s"] / several["wall_s"],
        "ratio_epochs": epochs[0] / epochs[1],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--jobs", type=int, default=4, help="number of searches, and of concurrent ones")
    parser.add_argument("--epochs", dest="rounds", type=int, default=20, help="epochs of each search")
    parser.add_argument("--data", default="digits", help="as in softcell search")
    parser.add_argument("--images", type=int, default=0, metavar="N", help="N random 32x32 images instead of --data")
    parser.add_argument("--data-root", help="as in softcell search")
    parser.add_argument("--scale", default="paper", help="small or paper: the size of the supernet")
    parser.add_argument("--batch-size", type=int, default=64, help="as in softcell search")
    parser.add_argument("--out", type=Path, help="where to write the JSON record")
    options = parser.parse_args(arguments)
    device, threads = machine(parser, options, threads=0)
    if options.jobs < 2:
        parser.error(f"--jobs must be at least 2, but is {options.jobs}")
    if options.rounds < 2:
        parser.error(f"--epochs must be at least 2, since the first is left out, but is {options.rounds}")
    search = {"data": options.data, "scale": options.scale, "batch_size": options.batch_size}
    search |= {"device": device.type, "epochs": options.rounds}
    search |= {"data_root": options.data_root} if options.data_root else {}
    console = Console()
    found = measured(search, options.jobs, options.images, console.print)
    table = Table("softcell sweep", "sweep, s", "epochs, s", "shared processes")
    for key, of in (("one_by_one", sum), ("at_once", max)):
        row = found[key]
        table.add_row(
            f"--jobs {row['jobs']}", f"{row['wall_s']:.1f}", f"{of(row['epochs_s'].values()):.1f}", str(row["shared"])
        )
    table.add_row("× faster", f"{found['ratio_wall']:.2f}", f"{found['ratio_epochs']:.2f}", "")
    console.print(table)
    console.print("same losses and accuracies in both" if found["same_metrics"] else "losses or accuracies differ")
    if options.out is not None:
        write_record(options.out, "benchmarks.sweep", threads=threads, **found)
        console.print(f"written: {options.out}")


if __name__ == "__main__":
    main()
