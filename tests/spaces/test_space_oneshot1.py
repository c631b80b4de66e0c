"""NAS-Bench-1Shot1: three spaces, counted by three rules, with cells that concatenate as the paper's do."""

from __future__ import annotations

import itertools

import pytest
import torch

from softcell.arch import WeightMix, count, sample
from softcell.spaces import build_space
from softcell.spaces.oneshot1_count import SPACES, counts, raw_count
from softcell.testing import one_hot, tiny_space

RAW = {1: 14_580, 2: 29_160, 3: 1_312_200}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_raw_counts_are_those_of_the_rule_and_the_closed_form(number: int) -> None:
    layout = build_space(f"nb1shot1-{number}").layout()
    assert count(layout) == raw_count(SPACES[number][0]) == RAW[number]


@pytest.mark.parametrize("number", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_enumeration_gives_each_architecture_once(number: int) -> None:
    layout = build_space(f"nb1shot1-{number}").layout()
    (table,) = layout.tables
    found = sum(1 for _ in layout.rule.enumerate(table))  # type: ignore[attr-defined]
    assert found == RAW[number]


def test_every_architecture_has_the_parents_of_its_space() -> None:
    for number, parents in ((1, (1, 2, 2, 2, 2)), (2, (1, 1, 2, 2, 3)), (3, (1, 1, 1, 2, 2, 2))):
        space = build_space(f"nb1shot1-{number}")
        for seed in range(20):
            cell = sample(space.layout(), seed).cells["cell"]
            gathering = [n for n in cell.targets if n % 2 == 1]
            assert tuple(len(cell.incoming(node)) for node in gathering) == parents
            assert all(len(cell.incoming(node)) == 1 for node in cell.targets if node % 2 == 0)


def by_permutations(parents: tuple[int, ...]) -> tuple[int, int]:
    """Connected and isomorphic counts from adjacency matrices, by trying all orders of the blocks."""
    blocks, connected, graphs = len(parents) - 1, 0, set()
    for edges in itertools.product(*(itertools.combinations(range(i + 1), n) for i, n in enumerate(parents))):
        pairs = {(source, node + 1) for node, sources in enumerate(edges) for source in sources}
        alive = {blocks + 1}
        for _ in range(blocks + 1):
            alive |= {source for source, target in pairs if target in alive}
        kept = [block for block in range(1, blocks + 1) if block in alive]
        for ops in itertools.product(range(3), repeat=blocks):
            connected += len(kept) == blocks
            best = None
            for order in itertools.permutations(kept):
                place = {0: 0, blocks + 1: blocks + 1, **{block: i + 1 for i, block in enumerate(order)}}
                form = (
                    tuple(ops[block - 1] for block in order),
                    tuple(sorted((place[a], place[b]) for a, b in pairs if a in place and b in place)),
                )
                best = form if best is None or form < best else best
            graphs.add(best)
    return connected, len(graphs)


@pytest.mark.parametrize("parents", [(1, 1, 2), (1, 2, 2), (1, 1, 2, 2), (1, 2, 2, 2)])
def test_counts_up_to_isomorphism_are_those_of_all_permutations(parents: tuple[int, ...]) -> None:
    found = counts(parents)
    assert (found.connected, found.isomorphic) == by_permutations(parents)
    assert found.raw == raw_count(parents)


@pytest.mark.exhaustive
def test_counts_of_the_published_spaces_hold_against_permutations() -> None:
    for number in (1, 2):
        found = counts(SPACES[number][0])
        assert (found.connected, found.isomorphic) == by_permutations(SPACES[number][0])


def test_remarks_print_our_counts_beside_the_published_one() -> None:
    (text,) = build_space("nb1shot1-1").remarks()
    for part in ("raw 14,580", "without loose ends 3,078", "up to isomorphism 2,685", "published 6,240"):
        assert part in text
    assert "raw 1,312,200" in build_space("nb1shot1-3").remarks()[0]


def test_the_output_is_a_convolution_over_the_concatenated_parents() -> None:
    space = tiny_space("nb1shot1-2")
    genotype = sample(space.layout(), 1)
    network = space.network(genotype, (3, 8, 8), 5).eval()
    cell = network.cells[0]  # type: ignore[index]
    x = torch.randn(2, 4, 8, 8)
    nodes = cell([x])  # type: ignore[operator]
    parents = [pick.source for pick in genotype.cells["cell"].incoming(9)]
    assert len(parents) == 3
    weight = torch.cat([cell.edges.own[f"{p}_9"]["link_1x1"].weight for p in parents], dim=1)  # type: ignore[union-attr, index]
    joined = torch.cat([nodes[p] for p in parents], dim=1)
    torch.testing.assert_close(nodes[-1], torch.nn.functional.conv2d(joined, weight))


def test_a_parent_that_is_not_chosen_has_no_say() -> None:
    space = tiny_space("nb1shot1-1")
    layout, genotype = space.layout(), sample(space.layout(), 0)
    supernet = space.supernet((3, 8, 8), 5).double().train()
    weights = one_hot(layout, genotype)["cell"]
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    before = supernet(x, WeightMix(layout, {"cell": weights}))
    (table,) = layout.tables
    none = table.columns("none")
    changed = torch.where(none, torch.full_like(weights, 0.7), weights)  # the weight of `none` changes nothing
    torch.testing.assert_close(supernet(x, WeightMix(layout, {"cell": changed})), before)
