"""SPOS: Single Path One-Shot Neural Architecture Search with Uniform Sampling (Guo et al., ECCV 2020; 1904.00420).

    Eq 5-6   W = argmin E_{a ~ U(A)} L_train(N(a, W(a)))   -> `PathPlanner.draw`: one uniform architecture per step
    §3.3     a* = argmax ACC_val(N(a, W(a)))               -> evolution (`softcell.arch.evolve`)

Only the supernet learns. Each step runs one architecture, drawn uniformly from the space, with coefficients of exactly
1; it is drawn on the host before the step, from the run's seed and the step's number only, so a resumed run draws the
same ones and the host never synchronises with the device. The best one is found afterwards by evolution, which measures
architectures with the supernet's weights and recalibrated BatchNorm, within the budgets.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
from torch import Tensor

from softcell.arch import Layout, Live, Mix, Plan, WeightMix
from softcell.arch.mix import uniform_path
from softcell.methods.base import Masks, Method, Regime, register_method
from softcell.methods.parts import PathPlanner

# IT-NAS, A.3, which trains this way too; SPOS itself has batch 1024 and a learning rate of 0.5 for 120 epochs.
CHAIN = {
    "epochs": 240,
    "batch_size": 512,
    "weights": {"lr": 0.25, "lr_min": 5e-4, "weight_decay": 4e-5},
    "evolution": {"generations": 20},
}


@register_method
class Spos(Method):
    """Uniform single-path training; `probabilities` are uniform, since there is no preference before the selection."""

    name: ClassVar[str] = "spos"
    about: ClassVar[str] = "SPOS: one uniformly drawn architecture per step trains the supernet, evolution selects"
    learns: ClassVar[bool] = False
    many_cells: bool = True
    regime: ClassVar[Regime] = "single-level"
    home: ClassVar[str] = "proxyless"
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": CHAIN,
        "imagenet": {**CHAIN, "split": {"weights": 0.1, "validation": 0.025}},
        # Candidates of a layer become interchangeable after some thousand steps; before, the supernet is at chance.
        "small": {
            "epochs": 60,
            "batch_size": 32,
            "weights": {"lr": 0.03, "weight_decay": 4e-5},
            "split": {"weights": 0.8, "validation": 0.2},
            "evolution": {"generations": 3, "population": 8, "parents": 4, "norm_batches": 2},
        },
    }

    basis: Tensor

    def __init__(self, layout: Layout, settings: Any) -> None:
        super().__init__(layout, settings)
        self.masks = Masks(layout)
        width = max(table.width for table in layout.tables)
        self.planner: PathPlanner = PathPlanner(self, layout, self._path)
        self.register_buffer("basis", torch.eye(width), persistent=False)

    def probabilities(self) -> dict[str, Tensor]:
        found = {}
        for table in self.layout.tables:
            mask = self.masks[table.name].to(self.basis.dtype)
            found[table.name] = mask / mask.sum(1, keepdim=True)
        return found

    def relax(self) -> Mix:
        weights = self.probabilities()
        picked = {}
        for site, live in enumerate(self.planner.current()):
            assert live is not None
            picked[site] = live, self._ones(live, weights[self.layout.sites[site]].shape[1])
        return WeightMix(self.layout, weights, picked=picked)

    def _path(self, seed: str) -> Plan:
        return uniform_path(self.layout, random.Random(seed))

    def _ones(self, live: Live, width: int) -> Tensor:
        """1 at live candidates, 0 elsewhere [choices, width], made from tensors that are on the device already."""
        rows = self.basis[:, :width]
        nothing = torch.zeros_like(rows[0])
        return torch.stack([sum((rows[k] for k in row[1:]), rows[row[0]]) if row else nothing for row in live])
