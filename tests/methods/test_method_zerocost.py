"""Zero-cost search as a sampler: it proposes what the evolution requests, in any order of calls."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from softcell.arch import Genotype, WeightMix, count, notation
from softcell.arch.evolve import Evolution, evolve
from softcell.errors import UserError
from softcell.methods.parts import naswot, score_untrained, synflow
from softcell.methods.zerocost import ZeroCost, ZeroCostSettings
from softcell.spaces import build_space
from softcell.spaces.execution import literal_modules

LAYOUT = build_space("nb201").layout()
SETTINGS = ZeroCostSettings(generations=5, population=6, parents=3)


def toy(genotype: Genotype) -> float:
    return -float(sum(pick.op != "nor_conv_3x3" for pick in genotype.cells["cell"].picks))


def run(sampler: ZeroCost, number: int) -> tuple[list[Genotype], list[float]]:
    found: list[Genotype] = []
    scores: list[float] = []
    for n in range(number):
        found.append(sampler.propose(n, list(scores)))
        scores.append(toy(found[-1]))
    return found, scores


def test_proposals_are_what_the_evolution_scores_in_order() -> None:
    sampler = ZeroCost(LAYOUT, SETTINGS, seed=4)
    found, _ = run(sampler, sampler.num_samples)
    wanted = evolve(LAYOUT, Evolution(5, 6, 3), toy, lambda genotype: True, 4)
    assert found == list(wanted.scored)


def test_a_proposal_follows_from_the_scores_it_is_given() -> None:
    sampler = ZeroCost(LAYOUT, SETTINGS, seed=1)
    found, scores = run(sampler, 30)
    others = [float(n % 7) for n in range(30)]
    for given in (others, scores, scores[:8] + others[8:]):
        for number in (29, 7, 0, 18):
            fresh = ZeroCost(LAYOUT, SETTINGS, seed=1).propose(number, given[:number])
            assert sampler.propose(number, given[:number]) == fresh
    assert sampler.propose(29, scores[:29]) == found[29]
    assert sampler.propose(29, others[:29]) != found[29]


def test_the_best_is_proposed_again_once_all_are_known() -> None:
    small = build_space("nb201", {"candidates": ["skip_connect", "nor_conv_3x3"], "nodes": 3}).layout()
    assert count(small) == 8
    found, scores = run(ZeroCost(small, ZeroCostSettings(generations=5, population=4), seed=0), 20)
    assert len(set(found)) == 8
    assert set(found[8:]) == {found[scores.index(0.0)]}


def test_what_is_not_allowed_is_never_proposed() -> None:
    sampler = ZeroCost(LAYOUT, SETTINGS, seed=0)
    sampler.allowed = lambda genotype: toy(genotype) <= -4
    assert max(run(sampler, 30)[1]) == -4.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"proxy": "guess"}, "must be one of naswot, synflow, got 'guess'"),
        ({"images": 1}, "`method.images >= 2` must hold, but got images=1"),
        ({"generations": 0}, "generations=0"),
        ({"mutation": 0.0}, "`0 < method.mutation <= 1` must hold"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ZeroCostSettings(**given)


def test_naswot_counts_agreeing_relus_one_by_one() -> None:
    torch.manual_seed(0)
    first, second, x = nn.Linear(3, 7), nn.Linear(7, 5), torch.randn(4, 3)
    found = naswot(nn.Sequential(first, nn.ReLU(), second, nn.ReLU()), x)
    hidden = first(x)
    units = torch.cat([hidden, second(hidden.clamp(min=0))], 1) > 0
    kernel = [[sum(a == b for a, b in zip(r, s, strict=True)) for s in units.tolist()] for r in units.tolist()]
    assert found == pytest.approx(math.log(abs(torch.tensor(kernel, dtype=torch.float64).det().item())))


@pytest.mark.parametrize(
    ("cell", "convolutions"),
    [
        ("|nor_conv_1x1~0|+|nor_conv_3x3~0|nor_conv_1x1~1|+|nor_conv_3x3~0|skip_connect~1|none~2|", 4),
        ("|nor_conv_1x1~0|+|none~0|none~1|+|avg_pool_3x3~0|none~1|nor_conv_3x3~2|", 2),  # a node without an input
    ],
)
def test_naswot_counts_the_relu_of_every_module(cell: str, convolutions: int) -> None:
    """Modules that read the same node share its ReLU, but the score counts it once for each of them."""
    torch.manual_seed(0)
    space = build_space("nb201", {"cells_per_stage": 2, "channels": 3})
    network, x = space.network(notation.parse(cell), (3, 8, 8), 10).double().train(), torch.randn(5, 3, 8, 8).double()
    shared = network(x)
    codes: list[torch.Tensor] = []
    for module in network.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda module, given, out: codes.append((out > 0).flatten(1).double()))
    found = naswot(network, x)
    # A cell has one ReLU per convolution; each of two reductions has two, and the end of the network one.
    assert len(codes) == 6 * convolutions + 2 * 2 + 1
    kernel = sum(code @ code.T + (1 - code) @ (1 - code).T for code in codes)
    assert found == pytest.approx(float(torch.linalg.slogdet(kernel).logabsdet))
    with literal_modules():
        assert torch.equal(network(x), shared)


def test_naswot_counts_the_relu_of_every_candidate_of_a_supernet() -> None:
    """Convolutions of a supernet that read the same node can be stacked, with one ReLU for all of them."""
    torch.manual_seed(0)
    supernet = build_space("nb201", {"cells_per_stage": 1, "channels": 3}).supernet((3, 8, 8), 10).double().train()
    mix = WeightMix(LAYOUT, {"cell": torch.full(LAYOUT.tables[0].shape, 0.2).double()})
    x, counted = torch.randn(4, 3, 8, 8).double(), 0

    class Relus(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal counted
            counted += func is torch.ops.aten.relu.default
            return func(*args, **(kwargs or {}))

    def forward(images: torch.Tensor) -> torch.Tensor:
        with Relus():
            return supernet(images, mix)

    forward(x)
    shared, counted = counted, 0
    naswot(forward, x)
    # Two convolutions on each of six edges in three cells; two reductions and the end of the network.
    assert counted == 3 * 6 * 2 + 2 * 2 + 1 > shared


def test_naswot_of_equal_images_is_minus_infinity() -> None:
    assert score_untrained(nn.Sequential(nn.Linear(3, 7), nn.ReLU()), "naswot", torch.ones(2, 3)) == -math.inf


def test_synflow_of_a_linear_chain_is_its_depth_times_its_output() -> None:
    """R is a product of |W|, so Σ θ·∂R/∂θ counts R once per layer."""
    torch.manual_seed(0)
    chain = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    product = torch.ones(1, 4, dtype=torch.float64)
    for layer in chain:
        assert isinstance(layer, nn.Linear)
        product = product @ layer.weight.detach().double().abs().T
    assert score_untrained(chain, "synflow", torch.randn(5, 4)) == pytest.approx(3 * float(product.sum()))
    assert synflow(chain, chain.parameters(), torch.zeros(1, 4, dtype=torch.float64)) == pytest.approx(
        3 * float(product.sum())
    ), "the images' values do not matter"
