"""What the tests of fused NOS networks run on each of two ranks, and on one process as the oracle."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softcell.arch import sample
from softcell.engine import distributed
from softcell.engine.optim import classification_step
from softcell.kernels.derived import derived_nodes_reference
from softcell.kernels.shared import local_norms
from softcell.spaces import _derived_plan, build_space
from softcell.spaces.execution import fused_networks, modules_only
from tests.helpers.fused_ranks import SIZE, Counted, fuse_by_twins, part_of
from tests.helpers.segmented_cells import CELLS, Segmented, factors_of, inputs_of, outcome

CHANNELS, IMAGE = 8, (6, 5)
NAMES = ("a pair at each tier", "several on an edge")
assert set(NAMES) <= set(CELLS)


def network_steps(part: slice, world: distributed.World, drop_path: float) -> dict[str, Tensor]:
    """Weights and running statistics of a small network after two steps of training on `part`."""
    torch.manual_seed(0)
    space = build_space("nos", {"cells": 3, "channels": 4})
    genotype = sample(space.layout(), 3)
    network: Any = space.network(genotype, (3, 16, 16), 5, auxiliary=True).double().train()
    network.use_drop_path(drop_path)
    images, labels = torch.randn(2, SIZE, 3, 16, 16, dtype=torch.float64), torch.randint(5, (2, SIZE))
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    with fused_networks():
        for x, y in zip(images, labels, strict=True):
            classification_step(network, optimiser, x[part], y[part], world, clip=1.0, auxiliary=0.4)
    return {name: value.clone() for name, value in network.state_dict().items()}


def steps_on_rank(world: distributed.World, folder: Path) -> dict[str, Any]:
    fuse_by_twins()
    part, ran = part_of(world.rank), 0

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal ran
        ran += 1
        return derived_nodes_reference(*given, **named)

    _derived_plan.derived_nodes = counted
    with Counted() as fused:
        shared = network_steps(part, world, 0.3)
    programs = ran
    with Counted() as modules, modules_only():
        network_steps(part, world, 0.3)
    assert ran == programs, "modules ran"
    with Counted() as local, local_norms():
        network_steps(part, world, 0.3)
    counts = {"fused": len(fused.sizes), "modules": len(modules.sizes), "local": len(local.sizes)}
    return {"shared": shared, "plain": network_steps(part, world, 0.0), "collectives": counts, "programs": programs}


def kernels_on_rank(world: distributed.World, folder: Path) -> dict[str, Any]:
    """By Triton in float32: on a GPU, or on a CPU by its interpreter."""
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

    def run(name: str) -> dict[str, Tensor]:
        cell = Segmented(name, CHANNELS).train()
        options: dict[str, Any] = {"device": device, "dtype": torch.float32, "part": part_of(world.rank)}
        found = outcome(cell, inputs_of(cell, SIZE, IMAGE), factors_of(cell, SIZE), fused=True, **options)
        return {key: value.cpu() for key, value in found.items()}

    return {name: run(name) for name in NAMES}
