"""`python -m studies.inherit`: does a derived network train better if it starts from the supernet's weights?

A search finds a cell, which is trained with the recipe `fast`: once from random weights, once from the supernet's
(`softcell train --from SEARCH`), with the same width as the supernet. Searching and training use the first `--images`
of a random order of the dataset's training images; accuracies are measured on the next `--held`, which neither uses.
The dataset's test images are never read.

python -m studies.inherit --data cifar10 --data-root DIR --images 1500 --held 2000 --side 16 --record inherit.jsonl
python -m studies.inherit --data digits --images 200 --held 100 --search 2 --epochs 1 --seeds 1     # a rehearsal
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from softcell.data import load
from softcell.evaluate import resolve as resolve_training
from softcell.evaluate import train
from softcell.search import resolve, search
from softcell.spaces import build_space
from studies.fast_recipe import subset_parser, write_subset

ARMS: dict[str, dict[str, Any]] = {"random": {}, "supernet": {}, "supernet, half the rate": {"lr": 0.05}}
"""Settings that override the recipe; all arms except the first start from the supernet."""


def candidates_of_run() -> list[str]:
    """The candidates of `softcell run` in the NAS-Bench-201 space: all but `none`."""
    return [op for op in build_space("nb201").candidates if op != "none"]  # type: ignore[attr-defined]


def found_by_search(
    options: argparse.Namespace, subset: Path, folder: Path, seed: int, method: str = "snas"
) -> dict[str, Any]:
    """Searches like `softcell run` on a CPU, in the NAS-Bench-201 space without `none`."""
    sizes = {"cells_per_stage": 1, "channels": options.channels, "candidates": candidates_of_run()}
    given = {
        "method": method,
        "space": "nb201",
        "data": str(subset),
        "scale": "small",
        "epochs": options.search,
        "batch_size": 64,
        "cutout": options.side // 4 if options.side else 2,
        "child_every": 0,
        "seed": seed,
        "threads": 1,
        "space_settings": sizes,
    }
    began = time.process_time()
    result = search(resolve(given), folder)
    if result.genotype is None:
        raise SystemExit(result.exit_code)
    return {"genotype": result.genotype, "sizes": sizes, "cpu_seconds": round(time.process_time() - began, 1)}


def trained(
    options: argparse.Namespace, subset: Path, found: dict[str, Any], folder: Path, arm: str, epochs: int, seed: int
) -> dict[str, Any]:
    given = {
        "recipe": "fast",
        "data": str(subset),
        "epochs": epochs,
        # The "test" images of the subset are the held-out ones.
        "holdout": 0.0,
        "flip": load(options.data, options.data_root).augment.flip,
        "seed": seed,
        "threads": 1,
        "space_settings": found["sizes"],
        "init": None if arm == "random" else str(folder / "search"),
        **ARMS[arm],
    }
    began = time.process_time()
    place = folder / f"{arm.replace(' ', '-')}-{epochs}"
    result = train(found["genotype"], resolve_training(found["genotype"], given), place)
    if result.exit_code:
        raise SystemExit(result.exit_code)
    cpu = round(time.process_time() - began, 1)
    return {"arm": arm, "epochs": epochs, "seed": seed, "accuracy": result.accuracy, "cpu_seconds": cpu}


def main() -> None:
    parser = subset_parser(__doc__)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--search", type=int, default=20, help="epochs of the search")
    parser.add_argument("--epochs", type=int, nargs="+", default=[5, 20], help="epochs of the training runs")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    case = {key: getattr(options, key) for key in ("data", "images", "held", "side", "channels", "search")}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        subset = Path(scratch) / "subset.npz"
        write_subset(options, subset)
        for seed in range(options.seeds):
            folder = Path(scratch) / f"seed-{seed}"
            found = found_by_search(options, subset, folder / "search", seed)
            for epochs in options.epochs:
                for arm in options.arms:
                    row = {**case, **trained(options, subset, found, folder, arm, epochs, seed)}
                    rows.append({**row, "search_cpu_seconds": found["cpu_seconds"]})
                    if options.record is not None:
                        with options.record.open("a") as record:
                            print(json.dumps(rows[-1]), file=record, flush=True)
    for epochs in options.epochs:
        for arm in options.arms:
            own = [100 * row["accuracy"] for row in rows if (row["arm"], row["epochs"]) == (arm, epochs)]
            print(
                f"{epochs:>4} epochs, {arm:<26} {statistics.fmean(own):5.1f} %  ({' '.join(f'{v:.1f}' for v in own)})"
            )


if __name__ == "__main__":
    main()
