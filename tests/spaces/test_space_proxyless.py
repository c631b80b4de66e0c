"""The chain of ProxylessNAS: its layers, costs, skips, small images and budgets."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from softcell.arch import Cell, Genotype, Pick, WeightMix, count, sample
from softcell.errors import UserError
from softcell.evaluate import train
from softcell.evaluate.recipe import resolve
from softcell.evaluate.task import learning_rate
from softcell.nn.conv import MBConv, SqueezeExcite
from softcell.spaces import build_space
from softcell.spaces.costs import count_candidates, count_genotype
from softcell.spaces.proxyless import ProxylessSpace
from softcell.testing import check_space, one_hot

IMAGE = (3, 224, 224)
TINY = {"width": 0.25, "depths": (2, 1, 1, 1, 1, 1), "head": 16}


def mbconv_multiply_adds(c_in: int, c_out: int, kernel: int, expansion: int, size: int, stride: int) -> int:
    """By hand: expansion at the old resolution, filter and projection at the new one."""
    wide, small = c_in * expansion, size // stride
    expand = c_in * wide * size * size if expansion > 1 else 0
    return expand + (wide * kernel * kernel + wide * c_out) * small * small


def test_there_are_21_layers_of_six_bottlenecks_of_which_15_can_be_skipped() -> None:
    (table,) = build_space("proxyless").layout().tables
    assert len(table) == 21
    skippable = [i for i, choice in enumerate(table.choices) if "skip_connect" in choice.candidates]
    # Not the first layers of the six stages.
    assert skippable == [i for i in range(21) if i not in (0, 4, 8, 12, 16, 20)]
    assert all(len(choice.candidates) == 6 + (i in skippable) for i, choice in enumerate(table.choices))
    assert count(build_space("proxyless").layout()) == 6**6 * 7**15


@pytest.mark.parametrize("largest", [True, False])
def test_multiply_adds_match_a_manual_count(largest: bool) -> None:
    space = ProxylessSpace()
    total = 3 * 32 * 9 * 112 * 112 + mbconv_multiply_adds(32, 16, 3, 1, 112, 1)
    before, size = 16, 112
    for width, stride, depth in zip((24, 40, 80, 96, 192, 320), (2, 2, 2, 1, 2, 1), (4, 4, 4, 4, 4, 1), strict=True):
        for layer in range(depth if largest else 1):  # the smallest network skips all it can
            step = stride if layer == 0 else 1
            kernel, expansion = (7, 6) if largest else (3, 3)
            total += mbconv_multiply_adds(before, width, kernel, expansion, size, step)
            before, size = width, size // step
    total += 320 * 1280 * 7 * 7 + 1280 * 1000
    assert count_genotype(space, space.extreme(largest=largest), IMAGE, 1000).multiply_adds == total


@pytest.mark.parametrize("se", [False, True])
def test_at_width_095_every_network_stays_under_600_million_multiply_adds(se: bool) -> None:
    narrow, full = (ProxylessSpace(width=width, se=se) for width in (0.95, 1.0))
    largest = full.extreme(largest=True)
    assert count_genotype(narrow, largest, IMAGE, 1000).multiply_adds < 600e6
    assert 600e6 < count_genotype(full, largest, IMAGE, 1000).multiply_adds < 620e6


def test_costs_of_candidates_add_up_to_the_difference_of_networks() -> None:
    space, shape = ProxylessSpace(**TINY), (3, 32, 32)  # type: ignore[arg-type]
    costs = count_candidates(space, shape, 10).of("flops", "chain")[0]
    pair = sample(space.layout(), 3), space.extreme(largest=False)
    by_candidates = [float((costs * one_hot(space.layout(), genotype)["chain"]).sum()) for genotype in pair]
    whole = [count_genotype(space, genotype, shape, 10).multiply_adds for genotype in pair]
    assert by_candidates[0] - by_candidates[1] == whole[0] - whole[1] != 0


def test_squeeze_and_excitation_is_in_every_bottleneck_when_requested() -> None:
    with_se, without = (ProxylessSpace(**TINY, se=se) for se in (True, False))  # type: ignore[arg-type]
    for space, expected in ((with_se, True), (without, False)):
        network = space.network(sample(space.layout(), 0), (3, 32, 32), 10)
        blocks = [m for m in network.chain.modules() if isinstance(m, MBConv)]  # type: ignore[union-attr]
        assert blocks and all((block.squeeze is not None) == expected for block in blocks)
    gate = SqueezeExcite(8)
    x = torch.randn(2, 8, 3, 3)
    mean = x.mean((2, 3))
    hidden = torch.relu(mean @ gate.squeeze.weight[:, :, 0, 0].T + gate.squeeze.bias)
    factor = torch.sigmoid(hidden @ gate.excite.weight[:, :, 0, 0].T + gate.excite.bias)
    torch.testing.assert_close(gate(x), x * factor[:, :, None, None])


def test_small_images_keep_their_resolution_longer() -> None:
    space = ProxylessSpace(**TINY)  # type: ignore[arg-type]
    genotype = sample(space.layout(), 0)
    sizes = {}
    for side in (32, 96):
        with torch.device("meta"):
            network = space.network(genotype, (3, side, side), 10)
            sizes[side] = [f.shape[-1] for f in network.features(torch.zeros(2, 3, side, side))]
    assert sizes == {32: [32, 16, 8, 4], 96: [48, 24, 12, 6, 3]}
    forced = dataclasses.replace(space, stem="imagenet")
    assert forced.strides_for((3, 32, 32)) == space.strides_for((3, 224, 224))


def test_variants_with_se_and_single_candidates_keep_the_contracts() -> None:
    check_space(ProxylessSpace(**TINY, se=True, kernels=(5,), expansions=(3,)))  # type: ignore[arg-type]


def test_drop_path_hands_on_the_input_of_a_dropped_layer() -> None:
    space = ProxylessSpace(**TINY, skip=False)  # type: ignore[arg-type]
    genotype, x = sample(space.layout(), 0), torch.randn(6, 3, 16, 16)
    supernet = space.supernet((3, 16, 16), 5)
    supernet.use_drop_path(0.999999)
    supernet.drop_path.set_fraction(1.0)
    mix = WeightMix(space.layout(), {"chain": one_hot(space.layout(), genotype)["chain"].float()})
    nodes = supernet.chain([supernet.ends.stem(x)], mix, 0)  # type: ignore[operator, union-attr]
    torch.testing.assert_close(nodes[2], nodes[1])  # the second layer of the first stage
    assert float(nodes[3].detach().abs().max()) > 0  # a layer that changes the width is not dropped
    network = space.network(genotype, (3, 16, 16), 5)
    network.use_drop_path(0.999999)
    network.drop_path.set_fraction(1.0)
    nodes = network.chain([network.ends.stem(x)])  # type: ignore[operator, union-attr]
    torch.testing.assert_close(nodes[2], nodes[1])
    network.use_drop_path(0.0)
    nodes = network.chain([network.ends.stem(x)])  # type: ignore[operator, union-attr]
    assert not torch.equal(nodes[2], nodes[1])


@pytest.mark.parametrize(
    ("picks", "message"),
    [
        ([(0, 1, "mbconv_e3_k3")], "has 1 layers"),
        ([(i, i + 1, "skip_connect") for i in range(7)], "cannot; choose an inverted bottleneck"),
        (
            [(0, 2, "mbconv_e3_k3"), *((i, i + 1, "mbconv_e3_k3") for i in range(1, 7))],
            "layers of a chain lead from node to node",
        ),
        ([(0, 1, "none"), *((i, i + 1, "mbconv_e3_k3") for i in range(1, 7))], "none"),
    ],
)
def test_genotypes_that_are_no_chain_are_refused(picks: list[tuple[int, int, str]], message: str) -> None:
    genotype = Genotype("proxyless", {"chain": Cell(tuple(Pick(*pick) for pick in picks), (7,))})
    with pytest.raises(UserError, match=message):
        ProxylessSpace(**TINY).network(genotype, (3, 16, 16), 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"width": 0}, {"depths": [1, 2]}, {"kernels": [4]}, {"expansions": []}, {"head": 0}, {"kernels": [3, 3]}]
)
def test_settings_that_make_no_chain_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match="must"):
        build_space("proxyless", wrong)


def test_retraining_on_imagenet_follows_the_paper() -> None:
    recipe = resolve(sample(ProxylessSpace().layout(), 0), {"data": "imagenet"})
    assert (recipe.recipe, recipe.epochs, recipe.batch_size) == ("proxyless-imagenet", 240, 1024)
    assert (recipe.lr, recipe.weight_decay, recipe.auxiliary) == (0.5, 4e-5, 0.0)


def test_the_recipe_of_dna_trains_by_rmsprop(tmp_path: Path) -> None:
    """A.6 of IT-NAS; a network of the chain learns a little by its optimiser and rates."""
    space = build_space("proxyless", {"se": True, "width": 0.25, "depths": (1, 1, 1, 1, 1, 1), "head": 16})
    genotype = sample(space.layout(), 0)
    recipe = resolve(genotype, {"data": "imagenet", "recipe": "dna-imagenet"})
    assert (recipe.optimiser, recipe.epochs, recipe.lr, recipe.clip) == ("rmsprop", 500, 0.064, 0.0)
    assert learning_rate(recipe, 5) == pytest.approx(0.064) and learning_rate(recipe, 8) == pytest.approx(0.064 * 0.963)
    sizes = {"width": 0.25, "head": 16, "se": True}
    given = {"data": "digits", "optimiser": "rmsprop", "epochs": 2, "lr": 0.01, "space_settings": sizes}
    result = train(genotype, resolve(genotype, given, {"device": "cpu"}), tmp_path / "run")
    losses = [row["train_loss"] for row in result.metrics]
    assert losses[1] < losses[0]
