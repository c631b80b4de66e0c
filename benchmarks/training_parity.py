"""`python -m benchmarks.training_parity`: training of DARTS_V2 in fused cells (bfloat16) against eager float32.

Both ways train with the same seeds; they differ in rounding and in the random numbers of drop-path. Losses and
accuracies must not differ by more than those of different seeds: fused cells became the default when they did not.
Accuracy is measured on a tenth of the training images, which is held out; the test set is not read. Every run is a
separate process. Runs are kept in `--folder`: the same command resumes what `--minutes` interrupted and repeats nothing
that has finished.

python -m benchmarks.training_parity --data-root DIR --folder runs/parity --minutes 9 --out record.json
python -m benchmarks.training_parity --data digits --epochs 1 --seeds 2 --folder runs/small \
    -- --recipe small --set space.cells=3 --set space.channels=4   # a rehearsal on a CPU
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.parity import compare
from studies.runs import finished, write_record
from tests.reference.published_genotypes import DARTS_V2

WAYS = {
    "eager": ("--engine", "eager", "--precision", "float32", "--set", "fused=false"),
    "modules": ("--engine", "auto", "--precision", "bfloat16", "--set", "fused=false"),
    "fused": ("--engine", "auto", "--precision", "bfloat16"),
}
PIPES: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
METRICS = ("train_loss", "train_accuracy", "accuracy")
HOLDOUT = 0.1  # the paper's recipe holds out nothing, so that there would be no accuracy without the test set


def train(way: str, seed: int, options: argparse.Namespace, end: float) -> dict[str, Any] | None:
    """One training run, new or resumed: its last metrics and its seconds; None if it was interrupted at `end`."""
    out = options.folder / f"{way}-{seed}"
    if not finished(out):
        root = [] if options.data_root is None else ["--data-root", options.data_root]
        sizes = ["--epochs", str(options.epochs), "--seed", str(seed)]
        sizes += ["--set", "test=false", "--set", f"holdout={HOLDOUT}"]
        new = [DARTS_V2, "--data", options.data, *root, *sizes, *WAYS[way], *options.more, "--out", str(out)]
        words = ["train", *(["--resume", str(out)] if (out / "run.json").exists() else new), "--quiet"]
        with subprocess.Popen([sys.executable, "-m", "softcell", *words], **PIPES) as run:
            try:
                _, errors = run.communicate(timeout=max(0.0, end - time.monotonic()) if end < math.inf else None)
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGTERM)  # it saves and ends
                run.communicate()
                return None
        if run.returncode:
            raise SystemExit(f"softcell {' '.join(words)} failed:\n{errors}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    results = json.loads((out / "run.json").read_text())["results"]
    found = {**rows[-1], "accuracy": results["accuracy"], "seconds": sum(row["seconds"] for row in rows)}
    by_epoch = {key: [row.get(key) for row in rows] for key in ("train_loss", "val_accuracy", "seconds")}
    return {"seed": seed, **{key: found[key] for key in (*METRICS, "seconds")}, "by_epoch": by_epoch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-root")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--way", action="append", choices=WAYS, help="run these alone; may be repeated")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=6, help="runs at the same time")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="interrupt what is still running after this time"
    )
    parser.add_argument("--out", type=Path, help="where to write the JSON record")
    parser.add_argument("more", nargs="*", help="after --: more options of `softcell train`")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    jobs = [(way, seed) for way in options.way or ("eager", "fused") for seed in range(options.seeds)]
    with ThreadPoolExecutor(options.jobs) as pool:
        work = [pool.submit(train, way, seed, options, end) for way, seed in jobs]
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way, _ in jobs}
        for (way, seed), future in zip(jobs, work, strict=True):
            run = future.result()
            if run is None:
                print(f"{way} seed {seed}: interrupted; run the same command to resume", flush=True)
                continue
            runs[way].append(run)
            print(f"{way} seed {seed}: " + ", ".join(f"{key} {run[key]:.4f}" for key in METRICS), flush=True)
    rows = compare(runs, METRICS) if all(len(found) > 1 for found in runs.values()) and "eager" in runs else []
    for row in rows:
        gap = "" if row["gap_in_spreads"] is None else f"  {row['gap_in_spreads']:+.2f} spreads from eager"
        print(f"{row['metric']:15} {row['way']:8} {row['mean']:.4f} ± {row['std']:.4f}{gap}")
    if options.out is not None:
        write_record(options.out, "benchmarks.training_parity", epochs=options.epochs, runs=runs, rows=rows)


if __name__ == "__main__":
    main()
