"""`python -m studies.run_method`: which method should `softcell run` search with?

Each method searches as `softcell run` does (`studies.inherit.found_by_search`). Its cell, and one random cell per seed,
are trained with the recipe `fast` from random weights. Searches and training runs use the first `--images` of the
dataset's shuffled training images; accuracies are measured on the next `--held` images, which neither uses. The
dataset's test images and the NAS-Bench-201 table are never read.

An epoch costs about the same for all methods: SNAS uses all images for weights and architecture at once, DrNAS half of
them for each. The rule was fixed before the first run: a method replaces another if its mean is higher by more than the
standard error of their difference.

python -m studies.run_method --data cifar10 --data-root DIR --images 3600 --held 2000 --side 16 --record rows.jsonl
python -m studies.run_method --images 200 --held 100 --search 1 --epochs 1 --seeds 1     # a rehearsal on digits
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from softcell.arch import notation, sample
from softcell.spaces import build_space
from studies.fast_recipe import subset_parser, write_subset
from studies.inherit import candidates_of_run, found_by_search, trained

METHODS = ("snas", "drnas", "random")


def one_row(options: Any, subset: Path, method: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if method == "random":  # a random cell, without any search
            sizes = {"cells_per_stage": 1, "channels": options.channels, "candidates": candidates_of_run()}
            genotype = sample(build_space("nb201", sizes).layout(), 1000 + seed)
            found: dict[str, Any] = {"genotype": genotype, "sizes": sizes, "cpu_seconds": 0.0}
        else:
            found = found_by_search(options, subset, folder / "search", seed, method)
        result = trained(options, subset, found, folder, "random", options.epochs, seed)
    cell = notation.to_nb201(found["genotype"])
    searched = {"method": method, "cell": cell, "search_cpu_seconds": found["cpu_seconds"]}
    return {**searched, "seed": seed, "accuracy": result["accuracy"], "cpu_seconds": result["cpu_seconds"]}


def main() -> None:
    parser = subset_parser(__doc__)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--search", type=int, default=20, help="epochs of the search")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of the training")
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    case = {key: getattr(options, key) for key in ("data", "images", "held", "side", "channels", "search", "epochs")}
    lines = options.record.read_text().splitlines() if options.record and options.record.exists() else []
    rows = [row for row in map(json.loads, lines) if all(row[key] == value for key, value in case.items())]
    done = {(row["method"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as scratch:
        subset = Path(scratch) / "subset.npz"
        write_subset(options, subset)
        for seed in range(options.seeds):
            for method in METHODS:
                if (method, seed) in done:
                    continue
                rows.append({**case, **one_row(options, subset, method, seed)})
                print(json.dumps(rows[-1]), flush=True)
                if options.record:
                    with options.record.open("a") as record:
                        print(json.dumps(rows[-1]), file=record)
    for method in METHODS:
        own = [row for row in rows if row["method"] == method and row["seed"] < options.seeds]
        found = [100 * row["accuracy"] for row in own]
        error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else float("nan")
        seconds = statistics.fmean(row["search_cpu_seconds"] for row in own)
        print(f"{method:<8} {statistics.fmean(found):5.1f} % ± {error:.1f} (standard error), search {seconds:.0f} s")


if __name__ == "__main__":
    main()
