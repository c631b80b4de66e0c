"""Small searches for the tests: data, recipes, and supernets in float64 with everything a step needs."""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softcell.engine.checkpoint import load_latest
from softcell.engine.distributed import World
from softcell.engine.optim import adam, sgd
from softcell.engine.task import Event, Stepped
from softcell.methods import METHODS
from softcell.nn.objective import CrossEntropy
from softcell.search import SearchRecipe, search
from softcell.search.steps import StepState
from softcell.settings import build
from softcell.spaces import build_space

ALONE = World(0, 1, 0, torch.device("cpu"))
TINY: dict[str, dict[str, Any]] = {
    "nb201": {"cells_per_stage": 1, "channels": 2},
    "darts": {"cells": 3, "channels": 2, "nodes": 2},
    "s4": {"cells": 3, "channels": 2, "nodes": 2},
}
"""The smallest sizes that still have every part of a space."""
THREE_EDGES = {**TINY["nb201"], "nodes": 3}
"""Half the edges of NAS-Bench-201, for tests that make many searches and do not look at their cells."""

# Exact in float32, in which learning rates are kept on CUDA.
LR, ARCHITECTURE_LR = 2**-4, 2**-6

Pair = tuple[Tensor, Tensor]


def write_data(
    path: Path, *, shape: tuple[int, ...] = (8, 8), classes: int = 3, train: int = 64, counts: Sequence[int] = ()
) -> Path:
    """An .npz of noisy images whose classes differ in where they are bright; `counts` makes them imbalanced."""
    rng = np.random.default_rng(0)
    height, width = shape[0], shape[1]

    def draw(labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        images = rng.integers(0, 60, (len(labels), *shape), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            start = int(label) * width // classes
            image[: height // 2 + 1, start : start + max(1, width // classes)] += 180
        return images

    labels = np.repeat(np.arange(classes), counts) if len(counts) else np.arange(train) % classes
    test = np.arange(6 * classes) % classes
    np.savez(path, x_train=draw(labels), y_train=labels, x_test=draw(test), y_test=test)
    return path


def settings(space: str, data: Path | str, **changes: Any) -> dict[str, Any]:
    """A search of two or three epochs of a few steps, on one thread."""
    return {
        "space": space,
        "data": str(data),
        "scale": "small",
        "space_settings": TINY.get(space),
        "epochs": 3,
        "batch_size": 16,
        "device": "cpu",
        "threads": 1,
        "weights": {"lr": 0.1},
        "architecture": {"lr": 0.05, "after": 0.0},
        "pretrain": {"epochs": 0},  # two phases have tests of their own
        **changes,
    }


def training(space: str, data: Path | str, **changes: Any) -> dict[str, Any]:
    """A training run with all that DARTS has, on one thread; `in` and `genotype` name a random architecture."""
    sizes = TINY[space]
    return {
        "in": space,
        "genotype": 5,
        "recipe": "small",
        "data": str(data),
        "space_settings": sizes,
        "epochs": 3,
        "batch_size": 16,
        "drop_path": 0.5,
        "cutout": 3,
        "holdout": 0.25,
        "device": "cpu",
        "threads": 1,
        **changes,
    }


def step_state(
    space: str = "nb201",
    *,
    seed: int = 0,
    device: str = "cpu",
    clip_weights: float = 5.0,
    clip_architecture: float = 0.0,
    method: Any = None,
) -> StepState:
    """Supernet, method and optimisers in float64. Logits are spread out, so that candidates differ in weight."""
    torch.manual_seed(seed)
    built = build_space(space, TINY[space])
    supernet = built.supernet((1, 8, 8), 3).to(torch.float64)
    kind = METHODS.get("darts") if method is None else method
    made = kind.for_supernet(build(kind.Settings, {}), supernet).to(torch.float64)
    with torch.no_grad():
        for logits in made.parameters():
            logits.copy_(torch.randn(logits.shape, dtype=torch.float64))
    supernet, made = supernet.to(device), made.to(device)
    return StepState(
        supernet,
        made,
        CrossEntropy(),
        sgd(supernet.parameters(), torch.device(device), lr=LR, momentum=0.9, weight_decay=3e-3),
        adam(made.parameters(), torch.device(device), lr=ARCHITECTURE_LR, betas=(0.5, 0.999), weight_decay=1e-2),
        replace(ALONE, device=torch.device(device)),
        clip_weights,
        clip_architecture,
    )


def batch(seed: int, size: int = 6, device: str = "cpu") -> Pair:
    """images [size, 1, 8, 8] and labels [size]"""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 1, 8, 8, dtype=torch.float64, generator=generator)
    return images.to(device), torch.randint(3, (size,), generator=generator).to(device)


FINAL = ("genotype.json", "metrics.jsonl", "architecture.jsonl")


def remains(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves and that must not depend on how often it was stopped; times are taken out."""
    found: dict[str, Any] = {}
    for name in FINAL:
        if (folder / name).exists():
            text = (folder / name).read_text()
            rows = [json.loads(line) for line in text.splitlines()] if name.endswith("l") else [json.loads(text)]
            found[name] = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
    if (folder / "model.safetensors").exists():
        found["weights"] = (folder / "model.safetensors").read_bytes()
    manifest = json.loads((folder / "run.json").read_text())
    found["status"], found["recipe"] = manifest["status"], manifest["recipe"]
    found["results"] = {key: value for key, value in manifest["results"].items() if key != "seconds"}
    return found


def state_of(folder: Path) -> Any:
    loaded = load_latest(folder)
    assert loaded is not None
    return loaded.state["task"]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def check_resumed(recipe: SearchRecipe, place: Path, epoch: int, step: int) -> None:
    """A search that is stopped there and resumed (`place`/broken) leaves what an unbroken one (`place`/whole) does."""

    def strike(event: Event) -> None:
        if isinstance(event, Stepped) and (event.epoch, event.step) == (epoch, step):
            os.kill(os.getpid(), signal.SIGTERM)

    search(recipe, place / "whole")
    assert search(recipe, place / "broken", on_event=strike).genotype is None
    search(recipe, place / "broken", resume=True)
    assert remains(place / "broken") == remains(place / "whole")
    assert same(state_of(place / "broken"), state_of(place / "whole"))
