"""The space of full-attention NAS: Table I, its size, its variants, and what its networks cost."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from softcell.arch import Genotype, Pick, WeightMix, count, derive, sample
from softcell.arch.genotype import Cell
from softcell.errors import UserError
from softcell.nn.attention import LocalAttention
from softcell.spaces import Network, build_space, fullattention
from softcell.spaces.costs import count_candidates, count_module
from softcell.spaces.fullattention import CANDIDATES, PRINTED, FullAttentionSpace

SPACE = FullAttentionSpace()
FEW = ("local_sa_k3_h4", "non_local_sa")


def shapes(network: Network, side: int) -> list[tuple[int, ...]]:
    """Shapes that stem, stages, head and classifier give, for one image without memory."""
    found: list[tuple[int, ...]] = []

    def note(module: nn.Module, given: object, output: object) -> None:
        last = output[-1] if isinstance(output, list) else output
        assert isinstance(last, torch.Tensor)
        found.append(tuple(last.shape[1:]))

    for part in (network.skeleton.stem, *network.cells, network.skeleton.classifier):  # type: ignore[union-attr]
        part.register_forward_hook(note)
    with torch.device("meta"), torch.no_grad():
        network.eval()(torch.zeros(1, 3, side, side))
    return found


def on_meta(space: FullAttentionSpace, side: int, genotype: Genotype | None = None, classes: int = 10) -> Network:
    with torch.device("meta"):
        return space.network(genotype or sample(space.layout(), 0), (3, side, side), classes)


def test_shapes_match_table_1() -> None:
    assert shapes(on_meta(SPACE, 32), 32) == [
        (16, 32, 32),
        (16, 32, 32),
        (32, 16, 16),
        (32, 16, 16),
        (64, 8, 8),
        (64, 8, 8),
        (10,),
    ]


def test_every_layer_of_every_stage_chooses_on_its_own_among_the_seven_of_table_2() -> None:
    layout = SPACE.layout()
    assert count(layout) == 7**15
    assert layout.sites == ("stage1", "stage2", "stage3", "stage4", "stage5")
    assert all(choice.candidates == CANDIDATES for table in layout.tables for choice in table.choices)
    assert (
        *(f"local_sa_k{k}_h{h}" for k in (3, 5, 7) for h in (4, 8)),
        "non_local_sa",
    ) == CANDIDATES


def test_the_stem_is_local_attention_of_extent_3_with_8_heads() -> None:
    (stem,) = [m for m in on_meta(SPACE, 32).skeleton.stem.modules() if isinstance(m, LocalAttention)]  # type: ignore[union-attr]
    assert (stem.extent, stem.heads, stem.width) == (3, 8, 8)


def test_the_tied_space_has_one_cell_for_stages_1_3_5_and_one_for_2_4() -> None:
    tied = replace(SPACE, tied=True)
    assert tied.layout().sites == ("normal", "reduction", "normal", "reduction", "normal")
    assert count(tied.layout()) == 7**6
    genotype = sample(tied.layout(), 1)
    network = on_meta(SPACE, 32, genotype)  # a tied genotype needs no setting to be built
    ops = [[pick.op for pick in cell.cell.picks] for cell in network.cells]  # type: ignore[union-attr]
    assert ops[0] == ops[2] == ops[4] and ops[1] == ops[3]


def test_the_deep_variant_repeats_stages_1_3_5_once() -> None:
    deep = replace(SPACE, repeats=2)
    few = replace(SPACE, layers=1)
    assert deep.layout().sites == tuple(f"stage{i}" for i in (1, 1, 2, 3, 3, 4, 5, 5))
    assert count(deep.layout()) == 7**15
    found = shapes(on_meta(deep, 32, sample(few.layout(), 0)), 32)
    assert [shape[0] for shape in found] == [16, 16, 16, 32, 32, 32, 64, 64, 64, 10]


@pytest.mark.parametrize(("side", "first"), [(64, 64), (127, 127), (128, 43), (224, 56), (227, 46), (448, 56)])
def test_large_images_are_pooled_behind_the_stem(side: int, first: int) -> None:
    found = shapes(on_meta(replace(SPACE, layers=1, candidates=("non_local_sa",)), side), side)
    assert found[0] == (16, side, side) and found[1] == (16, first, first)


def test_weights_for_imagenet_fit_networks_for_birds_but_for_the_classifier() -> None:
    genotype = sample(SPACE.layout(), 3)
    space = replace(SPACE, channels=112)
    imagenet = on_meta(space, 224, genotype, classes=1000).state_dict()
    birds = on_meta(space, 448, genotype, classes=200).state_dict()
    differ = [name for name in birds if name not in imagenet or imagenet[name].shape != birds[name].shape]
    assert differ == ["skeleton.classifier.weight", "skeleton.classifier.bias"] and set(imagenet) == set(birds)


@pytest.mark.parametrize(
    ("candidates", "tied"),
    [(("local_sa_k3_h8", "local_sa_k7_h4"), False), (("local_sa_k3_h8", "local_sa_k7_h4", "non_local_sa"), True)],
)
def test_the_range_of_parameters_matches_all_networks(candidates: tuple[str, ...], tied: bool) -> None:
    space = FullAttentionSpace(channels=16, layers=1, tied=tied, candidates=candidates)
    tables = space.layout().tables
    everything = []
    for ops in itertools.product(space.candidates, repeat=len(tables)):
        cells = {t.name: Cell((Pick(0, 1, op),), (1,)) for t, op in zip(tables, ops, strict=True)}
        everything.append(parameters(on_meta(space, 8, Genotype(space.name, cells))))
    assert [parameters(on_meta(space, 8, g)) for g in space.extremes()] == [min(everything), max(everything)]


def parameters(network: Network) -> int:
    return sum(p.numel() for p in network.parameters())


def test_parameters_at_the_papers_widths_match_a_manual_count_of_the_blocks() -> None:
    """Non-local everywhere: linear layers and four projections, norms with scale and shift, the stem's embeddings."""

    def block(c_in: int, c: int) -> int:
        h = c // 2
        norms = 2 * h + 2 * c
        widen = 0 if c_in == c else c_in * c + 2 * c
        return c_in * h + 4 * h * h + h * c + norms + widen

    for channels, classes in ((96, 10), (80, 10), (112, 1000), (112, 200)):
        c = channels
        chain = [(c, c)] * 3 + [(c, 2 * c)] + [(2 * c, 2 * c)] * 5 + [(2 * c, 4 * c)] + [(4 * c, 4 * c)] * 5
        stem = block(3, c) + 2 * 3 * (c // 2)
        by_hand = stem + sum(block(*widths) for widths in chain) + 4 * c * classes + classes
        space = replace(SPACE, channels=channels)
        least, most = (parameters(on_meta(space, 32, g, classes)) for g in space.extremes())
        assert least == by_hand
        embeddings = sum(2 * 7 * (c_out // 2) for _, c_out in chain)
        assert most == by_hand + embeddings
    remarks, of_100 = SPACE.remarks(), SPACE.remarks(100)  # each builds every network
    assert [line.split(" over")[0] for line in remarks] == [
        "parameters at 96 channels, 10 classes: 2,344,474 to 2,370,682",
        "parameters at 80 channels, 10 classes: 1,630,530 to 1,652,370",
        "parameters at 112 channels, 1000 classes: 3,632,208 to 3,662,784",
        "parameters at 112 channels, 200 classes: 3,273,008 to 3,303,584",
    ]
    assert [line.split("; the paper prints ")[1] for line in remarks] == [
        "2.52M (CIFAR-10, Table III): -0.176M to -0.149M",
        "1.75M (CIFAR-10, Table VII): -0.119M to -0.098M",
        "4M (ImageNet, Table IV): -0.368M to -0.337M",
        "3.82M (CUB-200-2011, Table V): -0.547M to -0.516M",
    ]
    more = 2_344_474 + 90 * (4 * 96 + 1)  # a column of the classifier for each of 90 further classes
    assert of_100[0].startswith(f"parameters at 96 channels, 100 classes: {more:,} to")
    assert ["the paper prints" in line for line in of_100] == [False, False, True, True]


def test_no_width_has_the_parameters_that_the_paper_prints_for_cub() -> None:
    """As the page says: printed counts for CIFAR-10 are 273·C²; with this 3.82M would need 117 channels."""
    for printed in PRINTED[:2]:
        backbone = printed.parameters - (4 * printed.channels + 1) * printed.num_classes
        assert abs(backbone / printed.channels**2 - 273) < 0.1
    cub = PRINTED[-1].parameters
    fitting = [c for c in range(16, 400) if abs(273 * c * c + (4 * c + 1) * 200 - cub) < 3e4]
    assert fitting == [117], "no multiple of 16, which the stem's heads need"
    assert [round((273 * 112**2 + (4 * 112 + 1) * classes) / 1e6, 2) for classes in (1000, 200)] == [3.87, 3.51]


@pytest.mark.parametrize("change", [{"layers": 2}, {"repeats": 2}, {"tied": True}, {"candidates": FEW}])
def test_only_the_papers_own_space_is_compared_with_its_numbers(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fullattention, "PRINTED", PRINTED[1:2])  # one network is enough here
    assert all("the paper prints" in line for line in SPACE.remarks())
    for line in replace(SPACE, **change).remarks():
        assert line.startswith("parameters at") and line.endswith("over all choices")


def test_multiply_adds_of_local_attention_match_its_loop() -> None:
    """Per pixel and neighbour one product per channel for the logit and one for the value, and two of 1D positions."""
    module = LocalAttention(8, 5, 4)
    height, width = 6, 3
    pairs = sum(
        0 <= i + a < height and 0 <= j + b < width
        for i in range(height)
        for j in range(width)
        for a in range(-2, 3)
        for b in range(-2, 3)
    )
    projections, positions = 4 * 8 * 8 * height * width, 2 * 5 * 8 * height * width
    assert count_module(module, (8, height, width)).multiply_adds == projections + positions + 2 * 8 * pairs


def test_costs_tell_extents_apart_so_that_a_budget_can_steer() -> None:
    space = FullAttentionSpace(layers=1, candidates=CANDIDATES[::2])  # those of 4 heads, and non-local
    first = count_candidates(space, (3, 8, 8), 10).of("flops", "stage1")[0, 0]
    named = dict(zip(space.candidates, first.tolist(), strict=True))
    assert named["local_sa_k3_h4"] < named["local_sa_k5_h4"] < named["local_sa_k7_h4"] < named["non_local_sa"]


def test_norms_can_be_left_out() -> None:
    space = FullAttentionSpace(layers=1, norm="none", candidates=FEW)
    supernet = space.supernet((3, 8, 8), 5)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in supernet.modules())
    layout = space.layout()
    uniform = {t.name: torch.full(t.shape, 0.5) for t in layout.tables}
    assert supernet(torch.randn(2, 3, 8, 8), WeightMix(layout, uniform)).isfinite().all()


def test_several_candidates_in_a_layer_are_summed() -> None:
    space = FullAttentionSpace(layers=1, candidates=FEW)
    layout = space.layout()
    cells = {t.name: Cell(tuple(Pick(0, 1, op) for op in FEW), (1,)) for t in layout.tables}
    torch.manual_seed(0)
    supernet = space.supernet((3, 8, 8), 5).double().eval()
    child = supernet.child(Genotype(space.name, cells)).eval()
    ones = {t.name: torch.ones(t.shape, dtype=torch.float64) for t in layout.tables}
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(child(x), supernet(x, WeightMix(layout, ones)))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="multiple of 16"):
        build_space("fullattention", {"channels": 24})
    with pytest.raises(UserError, match="'sep_conv_3x3' cannot"):
        build_space("fullattention", {"candidates": ["sep_conv_3x3"]})
    with pytest.raises(UserError, match="`layers >= 1`"):
        build_space("fullattention", {"layers": 0})
    good = derive(SPACE.layout(), {t.name: torch.rand(t.shape) for t in SPACE.layout().tables})
    uneven = {**good.cells, "stage1": Cell(good.cells["stage1"].picks[:1], (1,))}
    with pytest.raises(UserError, match="equally many layers"):
        on_meta(SPACE, 8, Genotype("fullattention", uneven))
