"""`python -m benchmarks.parity`: short real searches, eager float32 compared with the fast engine, over several seeds.

python -m benchmarks.parity --data-root DIR --out benchmarks/records/NAME.json

The engines differ only in rounding; after three epochs their losses and accuracies must not differ by more than those
of different seeds. Every run is a separate process, as a user would start it. Eager runs are mostly host-bound, so
several run concurrently. `--beside RECORD` reuses the runs of an earlier record of the same setting instead of
repeating them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from studies.runs import write_record

WAYS = {
    "eager": ("--engine", "eager", "--precision", "float32", "--set", "fused=false"),
    "fast": ("--engine", "graph", "--precision", "bfloat16"),
    "fast float32": ("--engine", "graph", "--precision", "float32"),
}
METRICS = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")


def search(space: str, way: str, seed: int, images: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One search; its last line of metrics and its seconds."""
    out = folder / f"{space}-{way.replace(' ', '-')}-{seed}"
    command = [sys.executable, "-m", "softcell", "search", "darts", "--space", space, "--data", options.data]
    if options.data_root is not None:
        command += ["--data-root", options.data_root]
    command += ["--epochs", str(options.epochs), "--seed", str(seed), "--out", str(out), "--quiet", *WAYS[way]]
    command += ["--set", f"split.weights={images}", "--set", f"split.validation={images}", *options.more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {**{key: rows[-1][key] for key in METRICS}, "seconds": sum(row["seconds"] for row in rows)}


def known(space: str, images: int, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The runs of `space` in the record given by --beside, which must have the same size."""
    if options.beside is None:
        return {}
    record = json.loads(options.beside.read_text(encoding="utf-8"))
    found = record["spaces"].get(space, {"images_per_half": None})
    if (record["epochs"], found["images_per_half"]) != (options.epochs, images):
        raise SystemExit(f"{options.beside} has no runs in {space} of {options.epochs} epochs of {images:,} images")
    return dict(found["runs"])


def compare(runs: dict[str, list[dict[str, Any]]], metrics: Sequence[str] = METRICS) -> list[dict[str, Any]]:
    """For each metric and engine: mean, spread, and the distance from eager in units of the combined spread."""
    rows = []
    for metric in metrics:
        eager = [run[metric] for run in runs["eager"]]
        for way, found in runs.items():
            values = [run[metric] for run in found]
            spread = (statistics.variance(eager) + statistics.variance(values)) ** 0.5
            gap = statistics.mean(values) - statistics.mean(eager)
            row = {"metric": metric, "way": way, "mean": statistics.mean(values), "std": statistics.stdev(values)}
            rows.append(
                {**row, "n": len(values), "gap_in_spreads": None if way == "eager" else gap / (spread or 1e-12)}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-root")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--space", action="append", metavar="NAME=IMAGES", help="a space and the number of images in each half"
    )
    parser.add_argument("--way", action="append", choices=WAYS, help="run only these (with --beside)")
    parser.add_argument(
        "--beside", type=Path, help="an earlier record of the same setting that provides the other ways"
    )
    parser.add_argument("--jobs", type=int, default=6, help="number of concurrent runs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("more", nargs="*", help="after --: further options of `softcell search`")
    options = parser.parse_args()
    spaces = dict(text.split("=") for text in options.space or ["darts=3200", "nb201=12800"])
    ways = options.way or list(WAYS)
    results = {space: known(space, int(images), options) for space, images in spaces.items()}
    if any("eager" not in {*found, *ways} for found in results.values()):
        raise SystemExit("nothing to compare with: run the way 'eager' too, or name a record that has it with --beside")
    for found in results.values():
        found.update({way: [] for way in ways})
    jobs = [(space, way, seed) for way in ways for space in spaces for seed in range(options.seeds)]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        work = [pool.submit(search, s, w, seed, int(spaces[s]), options, Path(folder)) for s, w, seed in jobs]
        for (space, way, seed), future in zip(jobs, work, strict=True):
            run = future.result()
            results[space][way].append({"seed": seed, **run})
            print(f"{space} {way} seed {seed}: " + ", ".join(f"{k} {run[k]:.4f}" for k in METRICS), flush=True)
    compared: dict[str, Any] = {
        s: {"images_per_half": int(spaces[s]), "runs": r, "rows": compare(r)} for s, r in results.items()
    }
    for space, found in compared.items():
        for row in found["rows"]:
            gap = "" if row["gap_in_spreads"] is None else f"  {row['gap_in_spreads']:+.2f} spreads from eager"
            print(f"{space:6} {row['metric']:15} {row['way']:13} {row['mean']:.4f} ± {row['std']:.4f}{gap}")
    if options.out is not None:
        beside = None if options.beside is None else options.beside.name
        write_record(options.out, "benchmarks.parity", epochs=options.epochs, beside=beside, spaces=compared)


if __name__ == "__main__":
    main()
