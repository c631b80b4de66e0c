"""Run folders made by hand: all that a report reads, without any search or training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from softcell.arch import sample
from softcell.engine import RunFolder, new_manifest
from softcell.spaces import build_space

SPACE = build_space("nb201", {})
CLASSES = [f"class {i}" for i in range(5)]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def make_search(
    folder: Path,
    *,
    method: str = "darts",
    seed: int = 0,
    epochs: int = 6,
    accuracy: float = 0.9,
    status: str = "finished",
    data: str = "digits",
    recipe: dict[str, Any] | None = None,
) -> Path:
    """A search of `epochs` epochs whose first candidate slowly wins on every edge."""
    settings = {"cells_per_stage": 1, "channels": 4}
    full = {
        "method": method,
        "space": "nb201",
        "data": data,
        "epochs": epochs,
        "batch_size": 64,
        "seed": seed,
        "space_settings": settings,
        "collapse": {"warn_above": 0.5},
        **(recipe or {}),
    }
    run = RunFolder.create(folder, new_manifest("search", full, seed))
    layout, metrics, lines = build_space("nb201", settings).layout(), [], []
    table = layout.tables[0]
    for epoch in range(epochs):
        share = 0.2 + 0.7 * epoch / max(1, epochs - 1)
        rows = [[share] + [(1 - share) / 4] * 4 for _ in table.choices]
        entropy = -sum(p * math.log(p) for p in rows[0])
        metrics.append(
            {
                "epoch": epoch,
                "train_loss": 2.0 / (epoch + 1),
                "train_accuracy": 1 - 0.5 / (epoch + 1),
                "val_loss": 2.2 / (epoch + 1),
                "val_accuracy": accuracy * (epoch + 1) / epochs,
                "val_split": "validation",
                "entropy": entropy,
                "entropy_cell": entropy,
                "skip_share_cell": min(1.0, epoch / 5),
                "seconds": 1.5,
            }
        )
        genotype = sample(layout, seed * 1000 + min(epoch, 3))
        lines.append({"epoch": epoch, "tables": {"cell": rows}, "genotype": genotype.to_dict()["cells"]})
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "architecture.jsonl", lines)
    if status == "finished":
        sample(layout, seed * 1000 + 3).save(folder / "genotype.json")
        run.finish("finished", val_accuracy=accuracy, val_split="validation", stopped=None)
    elif status != "running":
        run.update(status=status)
    return folder


def make_training(
    folder: Path,
    *,
    method: str = "darts",
    seed: int = 0,
    accuracy: float = 0.9,
    epochs: int = 3,
    classes: list[str] | None = None,
    parameters: int = 1000,
    side: int = 8,
    about: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """A finished training of 200 test images with mistakes, pictures of the worst and Grad-CAM maps."""
    names = CLASSES if classes is None else classes
    genotype = sample(SPACE.layout(), seed)
    origin = {"method": method, "seed": seed, **(about or {})}
    genotype = type(genotype)(genotype.space, genotype.cells, genotype.settings, origin)
    recipe = {"recipe": "small", "data": "digits", "epochs": epochs, "seed": seed, "space_settings": {"channels": 4}}
    recipe |= settings or {}
    known = {
        "parameters": parameters,
        "multiply_adds": 10 * parameters,
        "data": {"shape": [1, side, side], "classes": names, "mean": [0.3], "std": [0.4], "source": "made up"},
    }
    run = RunFolder.create(folder, {**new_manifest("train", recipe, seed), "results": known})
    genotype.save(folder / "genotype.json")
    rows = [
        {"epoch": e, "train_loss": 1 / (e + 1), "train_accuracy": 1 - 0.5 / (e + 1), "lr": 0.1, "seconds": 1.0}
        for e in range(epochs)
    ]
    write_lines(folder / "metrics.jsonl", rows)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(200) % len(names)
    predicted = torch.where(torch.arange(200) < round(200 * accuracy), labels, (labels + 1) % len(names))
    worst = torch.nonzero(predicted != labels).flatten()[:14]
    content = {
        "labels": labels.int(),
        "predicted": predicted.int(),
        "confidence": torch.rand(200, generator=generator) / 2 + 0.5,
        "truth": torch.rand(200, generator=generator) / 2,
    }
    if len(worst):
        content["worst"] = worst.int()
        pixels = torch.randint(0, 256, (len(worst), 1, side, side), generator=generator)
        content["images"] = pixels.to(torch.uint8)
        content["heat"] = torch.rand(len(worst), 2, 2, generator=generator)
    (folder / "predictions.safetensors").write_bytes(safetensors.torch.save(content))
    run.finish("finished", accuracy=accuracy, split="test", count=200)
    return folder
