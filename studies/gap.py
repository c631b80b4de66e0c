"""Measures a supernet and its derived network on the same basis: same images and precision, both norms recalibrated.

A run's `val_accuracy` uses the running statistics from training, unless its method trains many cells,
and `child_accuracy_bn` recalibrated ones. Their difference can mix two effects, so studies that report a gap measure
both networks with this module.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from softcell.arch import Genotype
from softcell.engine import RunFolder
from softcell.engine.distributed import World
from softcell.engine.metrics import measure
from softcell.files import atomic_write_text
from softcell.search.supernet import measure_child, recalibrated, restore
from studies.runs import NOT_MEASURED, Deadline

FILE = "one-basis.json"


@torch.no_grad()
def measure_gap(folder: Path, device: str, data_root: str | None) -> dict[str, float]:
    """Accuracies of a finished search on its validation split; BatchNorm is averaged over one epoch of training images.

    Keys: `supernet_accuracy_bn`, `derived_accuracy_bn` and their difference `gap_bn`. The result is stored in the run's
    folder, so that repeating a study does not repeat the measurement.
    """
    kept, finished = folder / FILE, RunFolder.open(folder).manifest["results"]["child_accuracy_bn"]
    if kept.is_file():
        stored = json.loads(kept.read_text())
        if stored.pop("run", None) == finished:  # another search in the same folder would differ here
            return {key: float(value) for key, value in stored.items()}
    found = restore(folder, device=device, data_root=data_root)
    feeds, world = found.feeds(), World(0, 1, 0, found.device)
    held = feeds.plain(found.dataset.train, found.parts[found.recipe.measured_split])
    weights = feeds.training(found.parts["weights"], replace(found.dataset.augment, cutout=found.recipe.cutout))
    mix = found.method.relax()
    with recalibrated(found.supernet, mix, weights.epoch(0)):
        found.supernet.eval()
        supernet = measure(lambda images: found.supernet(images, mix), held.epoch(0), world).accuracy
    genotype = Genotype.load(folder)
    derived = measure_child(found.supernet, genotype, held.epoch(0), world, recalibrate=weights.epoch(0)).accuracy
    result = {"supernet_accuracy_bn": supernet, "derived_accuracy_bn": derived, "gap_bn": supernet - derived}
    atomic_write_text(kept, json.dumps({"run": finished, **result}) + "\n")
    return result


def gap_or_not_measured(folder: Path, deadline: Deadline, device: str, data_root: str | None) -> dict[str, Any]:
    """The result of `measure_gap`, or 'not measured' without time for it: a run's own numbers are not comparable."""
    if deadline.passed:
        return dict.fromkeys(("supernet_accuracy_bn", "derived_accuracy_bn", "gap_bn"), NOT_MEASURED)
    return dict(measure_gap(folder, device, data_root))
