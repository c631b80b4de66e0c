"""What the tests of fused derived cells run on each of two ranks, and on one process as the oracle.

Every `*_on_rank` is `(world, folder) -> plain results`.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softcell.arch import notation
from softcell.engine import distributed
from softcell.engine.optim import classification_step
from softcell.kernels.derived import derived_cell, derived_cell_reference
from softcell.kernels.derived_program import norm_groups
from softcell.kernels.shared import local_norms
from softcell.spaces import _derived_plan, build_space, execution
from softcell.spaces.execution import fused_networks, is_modules_only
from tests.helpers.derived_cells import Cell, states
from tests.helpers.fused_ranks import Counted
from tests.reference.published_genotypes import DARTS_V2

FORMS = {
    f"stride {stride}, older {'larger' if larger else 'alike'}, pools {'normed' if normed else 'plain'}": (
        stride,
        larger,
        normed,
    )
    for stride, larger, normed in ((1, False, True), (1, True, False), (2, True, True), (2, False, False))
}
"""Stride, whether the older input is larger, whether pools have norms."""
CHANNELS = 5
SIZE = 5
"""Images of the whole batch: the ranks have 2 and 3."""


def part_of(rank: int) -> slice:
    return slice(0, 2) if rank == 0 else slice(2, SIZE)


def cell_pass(
    form: str, part: slice, *, plain: bool, shared: bool, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> list[Tensor]:
    """Output, statistics and gradients of parameters and inputs of a cell on `part` of a batch, with drop-path."""
    stride, larger, normed = FORMS[form]
    torch.manual_seed(0)
    cell = Cell(CHANNELS, stride, older_is_larger=larger, pool_norm=normed)
    given = [x[part] for x in states(SIZE, (7, 6), older_is_larger=larger)]
    fused = cell.plan()
    wide = torch.promote_types(dtype, torch.float32)
    generator = torch.Generator().manual_seed(1)
    factors = (torch.rand(fused.program.paths, SIZE, generator=generator) + 0.5)[:, part].to(device, wide).contiguous()
    parameters = fused.flat_parameters().detach().to(device, wide).requires_grad_()
    inputs = [x.to(device, dtype).requires_grad_() for x in given]
    run = derived_cell_reference if plain else derived_cell
    out, moments = run(fused.program, dtype, parameters, None, factors, *inputs, shared=shared)
    pulls = torch.randn(SIZE, *out.shape[1:], generator=generator)[part].to(device, dtype)
    found = torch.autograd.grad(out, (parameters, *inputs), pulls)
    return [x.detach().cpu() for x in (out, moments, *found)]


def network_steps(part: slice, world: distributed.World, *, fused: bool, steps: int = 2) -> dict[str, Tensor]:
    """Weights and running statistics of a small DARTS_V2 after some steps of training on `part`, in float64."""
    torch.manual_seed(0)
    space = build_space("darts", {"cells": 3, "channels": 4})
    network: Any = space.network(notation.parse(DARTS_V2), (3, 16, 16), 5, auxiliary=True).double().train()
    network.use_drop_path(0.0)
    images, labels = torch.randn(steps, 6, 3, 16, 16, dtype=torch.float64), torch.randint(5, (steps, 6))
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for x, y in zip(images, labels, strict=True):
        if fused:
            with fused_networks():
                classification_step(network, optimiser, x[part], y[part], world, clip=1.0, auxiliary=0.4)
        else:
            classification_step(network, optimiser, x[part], y[part], world, clip=1.0, auxiliary=0.4)
    return {name: value.clone() for name, value in network.state_dict().items()}


def twins_on_rank(world: distributed.World, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    part = part_of(world.rank)
    with Counted() as cells:
        for form in FORMS:
            found[form] = cell_pass(form, part, plain=True, shared=True)
    _derived_plan.derived_cell = derived_cell_reference  # type: ignore[assignment]
    execution.kernels_serve = lambda x: not is_modules_only()
    half = slice(3 * world.rank, 3 * world.rank + 3)
    ran = 0
    original = _derived_plan.DerivedPass.run

    def counted(own: Any, *arguments: Any, **options: Any) -> list[Tensor]:
        nonlocal ran
        ran += 1
        return original(own, *arguments, **options)

    _derived_plan.DerivedPass.run = counted  # type: ignore[method-assign]
    with Counted() as together:
        found["network"] = network_steps(half, world, fused=True)
    with Counted() as alone:
        network_steps(half, world, fused=False)
    with Counted() as local, local_norms():
        network_steps(half, world, fused=True, steps=1)
    found["collectives"] = {"fused": len(together.sizes), "modules": len(alone.sizes), "local": len(local.sizes)}
    found["sizes"], found["cells fused"] = cells.sizes, ran
    return found


def kernels_on_rank(world: distributed.World, folder: Path) -> dict[str, Any]:
    """By Triton in float32: on a GPU, or on a CPU by its interpreter."""
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    part = part_of(world.rank)
    found: dict[str, Any] = {}
    for form in FORMS:
        with Counted() as counted:
            found[form] = cell_pass(form, part, plain=False, shared=True, dtype=torch.float32, device=device)
        found[f"{form}: sizes"] = counted.sizes
    with local_norms():
        form = next(iter(FORMS))
        found["local"] = cell_pass(form, part, plain=False, shared=False, dtype=torch.float32, device=device)
    return found


def groups_of(form: str) -> tuple[list[int], list[int]]:
    stride, larger, normed = FORMS[form]
    return norm_groups(Cell(CHANNELS, stride, older_is_larger=larger, pool_norm=normed).plan().program)
