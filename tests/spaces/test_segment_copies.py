"""What runs around the programs of fused cells: values, gradients, and how often a map is copied.

The kernels are replaced by their twin (`tests.helpers.twin_kernels`), so that this code runs on a CPU, in float64.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.training_launches import launches
from softcell.arch import notation, sample
from softcell.kernels.derived import derived_nodes
from softcell.nn.stochastic import fixed_noise
from softcell.spaces import Network, build_space
from softcell.spaces.execution import fused_networks, modules_only
from tests.helpers.picked_cells import require_close
from tests.helpers.segmented_cells import CELLS, Segmented, factors_of, inputs_of, outcome
from tests.helpers.twin_kernels import use_twin_kernels
from tests.reference.published_genotypes import DARTS_V2


@pytest.fixture(autouse=True)
def twin_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_twin_kernels(monkeypatch)


@pytest.fixture
def nan_memory() -> Any:
    """New tensors hold NaN, so that a value which nothing writes is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", list(CELLS))
def test_cells_equal_their_modules(name: str, stride: int, training: bool, nan_memory: None) -> None:
    cell = Segmented(name, 4, stride=stride).train(training)
    states, factors = inputs_of(cell, 3, (6, 5)), factors_of(cell, 3) if training else None
    mine, theirs = (outcome(cell, states, factors, fused=fused) for fused in (True, False))
    require_close(mine, theirs, 1e-9)


def network_of(space: str, seed: int, *, auxiliary: bool = True, **settings: Any) -> Network:
    torch.manual_seed(seed)
    genotype = notation.parse(DARTS_V2) if space == "darts" else None
    built = build_space(space, {"cells": 4, "channels": 8, **settings})
    genotype = sample(built.layout(), seed) if genotype is None else genotype
    network = built.network(genotype, (3, 16, 15), 10, auxiliary=auxiliary).double()
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return network


def results(network: Network, images: Tensor, *, fused: bool, reads: str) -> dict[str, Tensor | None]:
    """reads: what the loss reads."""
    network.zero_grad()
    with fixed_noise(), fused_networks() if fused else modules_only():
        logits, auxiliary = network.forward_with_auxiliary(images)
    loss = logits.new_zeros(())
    if reads != "auxiliary":
        loss = loss + logits.square().mean()
    if reads != "logits":
        assert auxiliary is not None
        loss = loss + auxiliary.square().mean()
    loss.backward()
    found = {"logits": logits.detach(), **dict(network.named_buffers())}
    return found | {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in network.named_parameters()}


@pytest.mark.parametrize("reads", ["both", "logits", "auxiliary"])
@pytest.mark.parametrize(("space", "seed"), [("nos", 0), ("nos", 3), ("s4", 1), ("darts", 0)])
def test_networks_equal_their_modules(space: str, seed: int, reads: str, nan_memory: None) -> None:
    """If only the tower is read, the last cells' outputs get no gradient."""
    fused = network_of(space, seed).train()
    modules, images = copy.deepcopy(fused), torch.randn(4, 3, 16, 15).double()
    mine = results(fused, images, fused=True, reads=reads)
    require_close(mine, results(modules, images, fused=False, reads=reads), 1e-8)


def test_nodes_of_a_part_have_no_gaps() -> None:
    cell = Segmented("a pair at each tier", 4).train()
    program, states = cell.form().programs[0], inputs_of(cell, 3, (6, 5))
    nodes, _ = derived_nodes(program.program, torch.float64, program.flat_parameters(), None, None, *states)
    assert len(nodes) > 1
    assert all(node.is_contiguous(memory_format=torch.channels_last) for node in nodes)


def counted(space: str) -> tuple[dict[str, int], dict[str, int]]:
    """Operations of a training step by name, and those of them on maps with gaps."""
    torch.manual_seed(0)
    genotype = notation.parse(DARTS_V2) if space == "darts" else None
    built = build_space(space, {"cells": 4, "channels": 16})
    genotype = sample(built.layout(), 0) if genotype is None else genotype
    found = launches(built.network(genotype, (3, 32, 32), 10, auxiliary=True), 32, fused=True)
    every, gaps = ({name.removeprefix("aten.").split(".")[0]: n for name, n in own.items() if n} for own in found)
    return every, gaps


def test_copies_of_a_step_of_nos() -> None:
    """Two normal cells and two reduction cells. A calibration that reads a node of a program copies nothing."""
    every, gaps = counted("nos")
    assert gaps == {"clone": 9, "mul": 16, "add": 9, "copy_": 6, "div": 7}
    assert (every["clone"], every["copy_"], every["_foreach_copy_"]) == (16, 8, 40)


def test_copies_of_a_step_of_darts() -> None:
    every, gaps = counted("darts")
    assert gaps == {"clone": 1, "div": 1}, "the gradient of the mean over pixels"
    assert (every["add"], every["copy_"], every["_foreach_copy_"]) == (6, 2, 8)
