"""`python -m studies.fast_recipe`: which settings are best for short training, judged by held-out training images?

Each arm is the recipe `fast` with some settings changed, trained for the same number of epochs on the
first `--images` of a random order of the dataset's training images and evaluated on the next `--held`; the
dataset's test images are never read. Results are appended to a JSON lines file; arms in it are not trained again.

python -m studies.fast_recipe --data cifar10 --data-root DIR --images 4000 --held 2000 --side 16 --epochs 8 \
    --arm base --arm "sgd optimiser=sgd lr=0.1 weight_decay=5e-4"
python -m studies.fast_recipe --data digits --images 200 --held 100 --epochs 1 --seeds 1      # a rehearsal
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import adaptive_avg_pool2d

from softcell.app.pipeline._plain import RESIDUAL
from softcell.arch import notation
from softcell.data import load
from softcell.evaluate import resolve, train
from softcell.settings import assignments, layered

CELLS = {
    "residual": RESIDUAL,
    "found": "|nor_conv_3x3~0|+|nor_conv_1x1~0|nor_conv_3x3~1|+|skip_connect~0|nor_conv_3x3~1|avg_pool_3x3~2|",
}
"""The plain residual block, and a typical searched cell."""


def write_subset(options: argparse.Namespace, file: Path) -> None:
    """Training images of the dataset as the training and "test" images of an .npz file."""
    dataset = load(options.data, options.data_root)
    order = torch.randperm(len(dataset.train), generator=torch.Generator().manual_seed(0))
    parts: dict[str, Any] = {}
    for name, chosen in (
        ("train", order[: options.images]),
        ("test", order[options.images : options.images + options.held]),
    ):
        pixels = dataset.train.fetch(chosen)
        if options.side:
            pixels = adaptive_avg_pool2d(pixels.float(), options.side).round().to(torch.uint8)
        parts[f"x_{name}"] = pixels.permute(0, 2, 3, 1).squeeze(-1).numpy()
        parts[f"y_{name}"] = dataset.train.labels[chosen].numpy()
    np.savez(file, **parts)


def trained(options: argparse.Namespace, subset: Path, arm: str, seed: int) -> dict[str, Any]:
    name, *changes = arm.split()
    sizes = {"cells_per_stage": 1, "channels": options.channels}
    given = {
        "recipe": "fast",
        "data": str(subset),
        "epochs": options.epochs,
        # The "test" images of the subset are the held-out ones.
        "holdout": 0.0,
        "flip": load(options.data, options.data_root).augment.flip,
        "cutout": 0,  # arms set their own cutout; the rule by epochs is what is being studied
        "seed": seed,
        "threads": 1,
        "space_settings": sizes,
    }
    genotype = notation.parse(CELLS[options.cell])
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        result = train(genotype, resolve(genotype, layered(given, assignments(changes))), Path(folder) / "run")
    if result.exit_code:
        raise SystemExit(result.exit_code)
    last = result.metrics[-1]
    cpu = round(time.process_time() - began, 1)
    return {
        "arm": name,
        "changes": changes,
        "seed": seed,
        "accuracy": result.accuracy,
        "loss": last["train_loss"],
        "train_accuracy": last["train_accuracy"],
        "cpu_seconds": cpu,
    }


def subset_parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of studies on part of a training set; doc: the docstring of the study."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-root")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--held", type=int, default=300)
    parser.add_argument("--side", type=int, default=0, help="shrink images to this size")
    parser.add_argument("--record", type=Path, help="JSON lines that results are appended to")
    return parser


def main() -> None:
    parser = subset_parser(__doc__)
    parser.add_argument("--cell", choices=list(CELLS), default="residual")
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--arm", action="append", help='a name and changed settings: "sgd optimiser=sgd lr=0.1"')
    options = parser.parse_args()
    case = {key: getattr(options, key) for key in ("data", "images", "held", "side", "cell", "channels", "epochs")}
    lines = options.record.read_text().splitlines() if options.record and options.record.exists() else []
    rows = [row for row in map(json.loads, lines) if all(row[key] == value for key, value in case.items())]
    arms = options.arm or ["base"]
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as opened:
        record = opened.enter_context(options.record.open("a")) if options.record else None
        subset = Path(scratch) / "subset.npz"
        write_subset(options, subset)
        for seed in range(options.seeds):
            for arm in arms:
                if any(row["arm"] == arm.split()[0] and row["seed"] == seed for row in rows):
                    continue
                rows.append({**case, **trained(options, subset, arm, seed)})
                if record is not None:
                    print(json.dumps(rows[-1]), file=record, flush=True)
    for arm in arms:
        found = [100 * row["accuracy"] for row in rows if row["arm"] == arm.split()[0] and row["seed"] < options.seeds]
        values = " ".join(f"{value:.1f}" for value in found)
        print(f"{arm.split()[0]:<20} {statistics.fmean(found):5.1f} %  ({values})")


if __name__ == "__main__":
    main()
