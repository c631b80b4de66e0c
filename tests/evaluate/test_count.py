"""Costs against hand-computed sums."""

import pytest
import torch
from torch import nn

from softcell.arch import Cell, Genotype, Pick, sample
from softcell.evaluate import count_genotype, count_module
from softcell.spaces import SPACES, build_space


def test_a_small_network_counts_as_on_paper() -> None:
    """3x3 convolution 2 -> 4 with stride 2 on 8x6, depthwise 3x3, linear 4 -> 5."""
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )
    cost = count_module(network, (2, 8, 6))
    assert cost.parameters == 4 * 2 * 9 + 2 * 4 + (4 * 9 + 4) + (4 * 5 + 5)
    assert cost.multiply_adds == (4 * 2 * 9 + 4 * 9) * (4 * 3) + 4 * 5
    assert cost.megabytes == pytest.approx(cost.parameters * 4 / 1e6)


def test_counting_leaves_the_network_as_it_was() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).train()
    before = [value.clone() for value in network.state_dict().values()]
    count_module(network, (1, 5, 5))
    assert network.training
    assert all(torch.equal(a, b) for a, b in zip(before, network.state_dict().values(), strict=True))


def test_a_nas_bench_201_network_counts_as_on_paper() -> None:
    """One 3x3 convolution from input to output of each cell, 2, 4 and 8 channels on 8x8, 4x4 and 2x2."""
    picks = [
        Pick(source, target, "nor_conv_3x3" if (source, target) == (0, 3) else "none")
        for target in range(1, 4)
        for source in range(target)
    ]
    genotype = Genotype("nb201", {"cell": Cell(tuple(picks), (3,))})
    space = build_space("nb201", {"cells_per_stage": 1, "channels": 2})
    cost = count_genotype(space, genotype, (3, 8, 8), 10)
    sizes = {2: 64, 4: 16, 8: 4}
    stem = 3 * 2 * 9
    cells = {c: c * c * 9 for c in (2, 4, 8)}
    reductions = {c: (c // 2) * c * 9 + c * c * 9 + (c // 2) * c for c in (4, 8)}
    norms = 2 * 2 + 2 * (2 + 4 + 8) + 2 * (2 * 4 + 2 * 8) + 2 * 8
    assert cost.parameters == stem + sum(cells.values()) + sum(reductions.values()) + norms + 8 * 10 + 10
    assert cost.multiply_adds == (
        stem * 64 + sum(cells[c] * sizes[c] for c in cells) + sum(reductions[c] * sizes[c] for c in reductions) + 8 * 10
    )


@pytest.mark.parametrize("name", list(SPACES))
def test_the_cost_of_a_genotype_matches_its_network_without_a_tower(name: str) -> None:
    kind = SPACES.get(name)
    space = build_space(name, kind.small)
    genotype = sample(space.layout(), 3)
    cost = count_genotype(space, genotype, (3, 16, 16), 10)
    network = space.network(genotype, (3, 16, 16), 10)
    assert cost == count_module(network, (3, 16, 16))
    if kind.has_auxiliary:
        tower = space.network(genotype, (3, 16, 16), 10, auxiliary=True)
        assert tower.auxiliary is not None
        extra = sum(p.numel() for p in tower.auxiliary.parameters())
        assert extra > 0
        assert sum(p.numel() for p in tower.parameters()) == cost.parameters + extra
