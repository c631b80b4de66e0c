"""What the tests of fused NAS-Bench-201 and 1Shot1 networks run on each of two ranks, and on one process as the
oracle."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softcell.arch import notation, sample
from softcell.engine import distributed
from softcell.engine.optim import classification_step
from softcell.kernels.cell import mixed_cell
from softcell.kernels.shared import local_norms
from softcell.spaces import _fused_cell, build_space
from softcell.spaces.execution import fused_networks, modules_only
from tests.helpers.fused_ranks import SIZE, Counted, fuse_by_twins, part_of
from tests.helpers.picked_cells import CELLS, RECTIFIED, inputs_of, outcome, picked

PICKS = "|nor_conv_1x1~0|+|nor_conv_3x3~0|avg_pool_3x3~1|+|skip_connect~0|none~1|nor_conv_3x3~2|"
CHANNELS, IMAGE = 5, (6, 5)
SPACES = ("nb201", "nb1shot1-2")


def network_steps(part: slice, world: distributed.World, name: str = "nb201") -> dict[str, Tensor]:
    """Weights and running statistics of a small network after two steps of training on `part`, with drop-path."""
    torch.manual_seed(0)
    space = build_space(name, {"cells_per_stage" if name == "nb201" else "cells_per_stack": 1, "channels": 3})
    genotype = notation.parse(PICKS) if name == "nb201" else sample(space.layout(), 1)
    network: Any = space.network(genotype, (3, 8, 8), 5).double().train()
    network.use_drop_path(0.3)
    images, labels = torch.randn(2, SIZE, 3, 8, 8, dtype=torch.float64), torch.randint(5, (2, SIZE))
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    with fused_networks():
        for x, y in zip(images, labels, strict=True):
            classification_step(network, optimiser, x[part], y[part], world, clip=1.0)
    return {name: value.clone() for name, value in network.state_dict().items()}


def steps_on_rank(world: distributed.World, folder: Path) -> dict[str, Any]:
    fuse_by_twins()
    part, ran = part_of(world.rank), 0

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal ran
        ran += 1
        return mixed_cell(*given, **named)

    _fused_cell.mixed_cell = counted  # type: ignore[assignment]
    with Counted() as fused:
        shared = network_steps(part, world)
    with Counted() as local, local_norms():
        network_steps(part, world)
    shared_rectified = network_steps(part, world, SPACES[1])
    cells = ran
    with Counted() as modules, modules_only():
        network_steps(part, world)
    assert ran == cells, "modules ran"
    counts = {"fused": len(fused.sizes), "modules": len(modules.sizes), "local": len(local.sizes)}
    return {SPACES[0]: shared, SPACES[1]: shared_rectified, "collectives": counts, "cells": cells}


def kernels_on_rank(world: distributed.World, folder: Path) -> dict[str, Any]:
    """By Triton in float32: on a GPU, or on a CPU by its interpreter."""
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

    def run(name: str) -> dict[str, Tensor]:
        x, factors = inputs_of(name, CHANNELS, SIZE, IMAGE)
        cell = picked(name, CHANNELS, factors)
        options: dict[str, Any] = {"device": device, "dtype": torch.float32, "part": part_of(world.rank)}
        return {key: value.cpu() for key, value in outcome(cell, x, factors, fused=True, **options).items()}

    found = {name: run(name) for name in (*CELLS, *RECTIFIED)}
    with local_norms():
        return found | {"local": run(next(iter(CELLS)))}
