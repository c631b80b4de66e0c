"""The reduced spaces S1 to S4, and the noise candidate of S4."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from scipy import stats

from softcell.arch import count, derive, sample
from softcell.errors import UserError
from softcell.evaluate.recipe import resolve
from softcell.nn.candidates import Spec, get_candidate
from softcell.nn.stochastic import fixed_noise, fixed_normal
from softcell.spaces import build_space
from softcell.spaces.base import evaluation_space
from softcell.spaces.costs import count_genotype

# Typed from the released spaces edge by edge: (source, target) to its two candidates.
S1_NORMAL = {
    (0, 2): {"skip_connect", "dil_conv_3x3"},
    (1, 2): {"skip_connect", "dil_conv_5x5"},
    (0, 3): {"skip_connect", "dil_conv_5x5"},
    (1, 3): {"skip_connect", "sep_conv_3x3"},
    (2, 3): {"skip_connect", "dil_conv_3x3"},
    (0, 4): {"max_pool_3x3", "skip_connect"},
    (3, 4): {"skip_connect", "dil_conv_3x3"},
    (1, 5): {"max_pool_3x3", "skip_connect"},
    (3, 5): {"dil_conv_3x3", "dil_conv_5x5"},
    (4, 5): {"dil_conv_3x3", "dil_conv_5x5"},
}
S1_REDUCE = {
    (0, 2): {"max_pool_3x3", "avg_pool_3x3"},
    (1, 2): {"max_pool_3x3", "dil_conv_3x3"},
    (2, 3): {"skip_connect", "dil_conv_5x5"},
    (1, 4): {"max_pool_3x3", "sep_conv_3x3"},
    (2, 4): {"skip_connect", "dil_conv_3x3"},
    (0, 5): {"max_pool_3x3", "avg_pool_3x3"},
    (4, 5): {"skip_connect", "dil_conv_5x5"},
}


def test_s1_has_its_published_pair_on_every_edge() -> None:
    layout = build_space("s1").layout()
    for name, pairs in (("normal", S1_NORMAL), ("reduce", S1_REDUCE)):
        found = {(c.source, c.target): set(c.candidates) for c in layout.table(name).choices}
        assert len(found) == 14
        assert {edge: found[edge] for edge in pairs} == pairs
        assert all(len(pair) == 2 for pair in found.values())


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("s2", {"skip_connect", "sep_conv_3x3"}),
        ("s3", {"none", "skip_connect", "sep_conv_3x3"}),
        ("s4", {"sep_conv_3x3", "noise"}),
    ],
)
def test_s2_to_s4_have_the_same_candidates_everywhere(name: str, candidates: set[str]) -> None:
    for table in build_space(name).layout().tables:
        assert all(set(choice.candidates) == candidates for choice in table.choices)


@pytest.mark.parametrize("name", ["s1", "s2", "s3", "s4"])
def test_reduced_spaces_hold_as_many_cells_as_two_choices_per_kept_edge_give(name: str) -> None:
    # Two edges of 2, 3, 4, 5 incoming ones, two candidates each (none is never derived), for both kinds of cell.
    assert count(build_space(name).layout()) == (1 * 3 * 6 * 10 * 4**4) ** 2


def test_s3_never_derives_none() -> None:
    layout = build_space("s3").layout()
    strengths = {table.name: table.columns("none").double() for table in layout.tables}
    assert all(pick.op != "none" for cell in derive(layout, strengths).cells.values() for pick in cell.picks)


def test_s1_refuses_more_nodes_than_it_names_edges_for() -> None:
    with pytest.raises(UserError, match="nodes <= 4"):
        build_space("s1", {"nodes": 5})


def test_networks_are_trained_at_the_sizes_of_each_dataset() -> None:
    genotype = sample(build_space("s2").layout(), 0)
    sizes = {data: resolve(genotype, {"data": data}).space_settings for data in ("cifar10", "cifar100", "svhn")}
    assert {data: (s["cells"], s["channels"]) for data, s in sizes.items()} == {
        "cifar10": (20, 16),
        "cifar100": (8, 16),
        "svhn": (8, 16),
    }
    asked = resolve(genotype, {"data": "svhn", "recipe": "cifar"}).space_settings
    assert (asked["cells"], asked["channels"]) == (20, 16)
    assert evaluation_space("s1", "cifar10").channels == 36  # type: ignore[attr-defined]
    assert evaluation_space("s4", "svhn").cells == 8  # type: ignore[attr-defined]


def test_noise_is_standard_normal_and_new_at_every_step() -> None:
    torch.manual_seed(0)
    module = get_candidate("noise").build(Spec(16, 2))
    x = torch.full((8, 16, 9, 8), 1e6)
    first, second = module(x), module(x)
    assert first.shape == (8, 16, 5, 4)
    assert not torch.equal(first, second)
    assert stats.kstest(first.flatten().numpy(), "norm").pvalue > 0.01


@pytest.mark.parametrize("salt", [0, 1, 12345, 2**31 - 2])
def test_fixed_noise_is_standard_normal_too(salt: int) -> None:
    values = fixed_normal(torch.tensor(salt), 16, 16, 16)
    assert stats.kstest(values.flatten().numpy(), "norm").pvalue > 0.001
    flat = values.flatten()
    for lag in (1, 16, 256):  # neighbours in width, height and channel
        assert abs(float(torch.corrcoef(torch.stack([flat[:-lag], flat[lag:]]))[0, 1])) < 0.06


def test_noise_in_evaluation_repeats_and_does_not_depend_on_the_batch() -> None:
    one, other = (get_candidate("noise").build(Spec(4)).eval() for _ in range(2))
    x = torch.randn(5, 4, 6, 6)
    assert torch.equal(one(x), one(-x))
    assert torch.equal(one(x)[:2], one(x[:2]))
    assert not torch.equal(one(x), other(x))  # edges differ
    one.train()
    with fixed_noise():
        assert torch.equal(one(x), one.eval()(x))


def test_two_halves_of_a_batch_get_the_noise_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = get_candidate("noise").build(Spec(3)), torch.zeros(6, 3, 4, 4)
    torch.manual_seed(5)
    whole = module(x)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    parts = []
    for rank in (0, 1):
        torch.manual_seed(5)
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        parts.append(module(x[:3]))
    assert torch.equal(torch.cat(parts), whole)


def test_noise_costs_nothing_and_teaches_nothing() -> None:
    space = build_space("s4", {"cells": 3, "channels": 4, "nodes": 2})
    layout = space.layout()
    noisy = derive(layout, {table.name: table.columns("noise").double() for table in layout.tables})
    separable = derive(layout, {table.name: table.columns("sep_conv_3x3").double() for table in layout.tables})
    shape = (3, 8, 8)
    assert count_genotype(space, noisy, shape, 5).parameters < count_genotype(space, separable, shape, 5).parameters
    logits = space.network(noisy, shape, 5)(torch.randn(2, *shape))
    logits.sum().backward()  # nothing arrives at the stem, and nothing breaks
