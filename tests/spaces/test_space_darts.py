"""The DARTS space: published sizes, and cells with vanished edges from SNAS."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from softcell.arch import Cell, Genotype, Pick, WeightMix, count
from softcell.arch.notation import from_darts
from softcell.errors import UserError
from softcell.spaces import build_space
from softcell.spaces.darts import DartsSpace, plan_cells
from softcell.testing import one_hot
from tests.reference import reference_snas_cells as snas_cells
from tests.reference.published_genotypes import DARTS_V2


def parameters(space: DartsSpace, shape: tuple[int, int, int], classes: int, *, auxiliary: bool = False) -> int:
    with torch.device("meta"):
        network = space.network(from_darts(DARTS_V2), shape, classes, auxiliary=auxiliary)
    return sum(p.numel() for p in network.parameters())


def test_darts_v2_has_the_published_number_of_parameters_on_cifar() -> None:
    space = DartsSpace(**DartsSpace.evaluation["cifar"])
    plain = parameters(space, (3, 32, 32), 10)
    assert plain == 3_349_342
    # The tower reads 4 nodes of 144 channels: 1×1 to 128, 2×2 to 768, two norms, a classifier.
    tower = 576 * 128 + 2 * 128 + 128 * 768 * 4 + 2 * 768 + 768 * 10 + 10
    assert parameters(space, (3, 32, 32), 10, auxiliary=True) == plain + tower


def test_darts_v2_has_the_published_number_of_parameters_on_imagenet() -> None:
    space = DartsSpace(**DartsSpace.evaluation["imagenet"])
    assert parameters(space, (3, 224, 224), 1000) == pytest.approx(4.72e6, rel=0.002)  # "4.7M" in the paper


def test_the_imagenet_network_ends_at_seven_by_seven() -> None:
    with torch.device("meta"):
        network = DartsSpace(**DartsSpace.evaluation["imagenet"]).network(from_darts(DARTS_V2), (3, 224, 224), 1000)
        shapes = [tuple(f.shape) for f in network.features(torch.empty(1, 3, 224, 224))]
    assert shapes == [(1, 192, 28, 28), (1, 384, 14, 14), (1, 768, 7, 7)]


def test_reduction_cells_stand_at_one_and_two_thirds_and_double_the_width() -> None:
    space = DartsSpace(cells=8, channels=16)
    assert [i for i in range(8) if space.reduces(i)] == [2, 5]
    plans = plan_cells(space, 48, {"normal": 4, "reduce": 4})
    assert [plan.width for plan in plans] == [16, 16, 32, 32, 32, 64, 64, 64]
    assert plans[0].widths == (48, 48)
    assert plans[1].widths == (48, 64)
    assert plans[3].widths == (64, 128)
    assert [i for i, plan in enumerate(plans) if plan.older_is_larger] == [3, 6]


def test_the_space_has_the_published_size() -> None:
    # 180 pairs of inputs over the four nodes, 7 operations on 8 edges, two kinds of cell.
    assert count(DartsSpace().layout()) == (180 * 7**8) ** 2


def test_nodes_that_a_derivation_dropped_are_zeros_in_search_form_and_absent_in_evaluation() -> None:
    """SNAS derives `none` too: node 3 of this cell has no path left, and node 4 reads only node 3."""
    space = DartsSpace(cells=3, channels=4, nodes=3)
    cell = Cell(
        (Pick(0, 2, "sep_conv_3x3"), Pick(1, 3, "none"), Pick(3, 4, "skip_connect"), Pick(2, 4, "none")), (2, 3, 4)
    )
    genotype = Genotype("darts", {"normal": cell, "reduce": cell})
    supernet = space.supernet((3, 8, 8), 5).double()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    mix = WeightMix(space.layout(), one_hot(space.layout(), genotype))
    torch.testing.assert_close(supernet(x, mix), supernet.child(genotype)(x), rtol=1e-12, atol=1e-12)
    evaluated = space.network(genotype, (3, 8, 8), 5)
    assert [f.shape[1] for f in evaluated.features(x.float())] == [4, 8, 16]  # one node of each cell is left
    assert evaluated(x.float()).shape == (4, 5)


def parameters_of(text: str, **settings: object) -> int:
    space = build_space("darts", {**DartsSpace.evaluation["cifar"], **settings})
    with torch.device("meta"):
        network = space.network(from_darts(text), (3, 32, 32), 10)
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    ("name", "here", "authors"),
    [
        ("mild", 2_661_382, 2_663_542),  # 2.9M in Table 2
        ("moderate", 2_847_358, 2_848_222),  # 2.8M
        ("aggressive", 2_209_942, 2_313_622),  # 2.3M
    ],
)
def test_published_cells_of_snas_have_the_parameters_of_the_authors_network(name: str, here: int, authors: int) -> None:
    """At 20 cells and 36 channels, without auxiliary tower; the authors' counts come from running their code."""
    text = snas_cells.EDGE_ALL[name]
    assert parameters_of(text) == here
    assert parameters_of(text, vanished="zeros", pool_norm=True) == authors
    if name != "aggressive":
        assert parameters_of(text, vanished="zeros") == here, "no node of this cell vanished"


def test_the_authors_network_has_zeros_for_vanished_nodes_and_affine_norms_behind_pools() -> None:
    space = build_space("darts", {"cells": 3, "channels": 4, "vanished": "zeros", "pool_norm": True})
    genotype = from_darts(snas_cells.EDGE_ALL["aggressive"])
    network = space.network(genotype, (3, 8, 8), 5)
    nodes: list[torch.Tensor] = []
    network.cells[1].register_forward_hook(lambda cell, given, values: nodes.extend(values))  # type: ignore[index]
    widths = [f.shape[1] for f in network.features(torch.randn(2, 3, 8, 8))]
    assert widths == [4 * 4, 4 * 8, 4 * 16], "every cell outputs four nodes"
    assert [bool(node.any()) for node in nodes] == [True, True, True, True, False, False]
    pools = space.network(from_darts(snas_cells.EDGE_ALL["mild"]), (3, 8, 8), 5).cells[1]  # type: ignore[index]
    norms = [part for part in pools.modules() if isinstance(part, nn.BatchNorm2d)]
    assert len(norms) == 6  # five pools and a dilated convolution
    assert all(norm.affine for norm in norms)


def test_an_architecture_without_any_operation_still_gives_logits() -> None:
    empty = Cell((Pick(0, 2, "none"), Pick(1, 2, "none")), (2,))
    network = DartsSpace(cells=3, channels=4, nodes=1).network(
        Genotype("darts", {"normal": empty, "reduce": empty}), (1, 8, 8), 3
    )
    assert network(torch.randn(2, 1, 8, 8)).isfinite().all()


def test_pools_are_followed_by_a_norm_in_search_and_stand_alone_in_evaluation() -> None:
    space = DartsSpace(cells=3, channels=4, nodes=1, candidates=("max_pool_3x3", "avg_pool_3x3"))
    pools = Cell((Pick(0, 2, "max_pool_3x3"), Pick(1, 2, "avg_pool_3x3")), (2,))
    genotype = Genotype("darts", {"normal": pools, "reduce": pools})

    def norms(cells: nn.Module) -> list[bool]:
        return [part.affine for part in cells.modules() if isinstance(part, nn.BatchNorm2d)]

    supernet = space.supernet((3, 8, 8), 5)
    assert norms(supernet.cells) == [False] * 12  # type: ignore[arg-type]  # 3 cells, 2 inputs, 2 pools
    assert norms(space.network(genotype, (3, 8, 8), 5, search_form=True).cells) == [False] * 6  # type: ignore[arg-type]
    assert norms(space.network(genotype, (3, 8, 8), 5).cells) == []  # type: ignore[arg-type]


def test_features_shared_by_source_need_fewer_weights() -> None:
    sizes = [
        sum(
            p.numel()
            for p in DartsSpace(cells=3, channels=4, share_features=shared).supernet((3, 8, 8), 5).parameters()
        )
        for shared in (False, True)
    ]
    assert sizes[1] < 0.5 * sizes[0]


@pytest.mark.parametrize(
    "settings",
    [{"cells": 2}, {"channels": 0}, {"nodes": 0}, {"candidates": ["sep_konv"]}, {"stem": "mnist"}, {"depth": 4}],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"cells|channels|nodes|sep_konv|stem|depth"):
        build_space("darts", settings)
