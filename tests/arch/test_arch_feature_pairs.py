"""The rule of NOS against brute force, and its requirements on architectures derived by other rules."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from softcell.arch import Choice, FeaturePairs, Layout, Pick, StrongestEach, Table, derive

FEATURES = ("f", "g")
RULE = FeaturePairs(FEATURES)
# One block over inputs 0, 1 and one over 0, 1, 3; ragged, with an edge that has no feature at all.
TABLE = Table(
    "cell",
    (
        Choice(0, 2, ("f", "a", "d")),
        Choice(1, 2, ("g", "a")),
        Choice(2, 3, ("f", "a", "d")),
        Choice(0, 4, ("a", "f")),
        Choice(1, 4, ("a", "d")),
        Choice(3, 4, ("d", "g", "a")),
        Choice(4, 5, ("a", "f")),
    ),
    output=(3, 5),
)


def strength(strengths: Tensor, picks: tuple[Pick, ...]) -> float:
    rows = {(c.source, c.target): i for i, c in enumerate(TABLE.choices)}
    total = 0.0
    for pick in picks:
        i = rows[pick.source, pick.target]
        total += float(strengths[i, TABLE.choices[i].candidates.index(pick.op)])
    return total


def by_hand(target: int) -> list[tuple[Pick, ...]]:
    """Everything a node may keep, written down without the rule."""
    edges = [[Pick(c.source, target, op) for op in c.candidates] for c in TABLE.choices if c.target == target]
    if len(edges) == 1:
        return [(pick,) for pick in edges[0]]
    pairs = itertools.chain.from_iterable(itertools.product(a, b) for a, b in itertools.combinations(edges, 2))
    return [pair for pair in pairs if any(pick.op in FEATURES for pick in pair)]


def every() -> list[tuple[Pick, ...]]:
    return [tuple(itertools.chain(*nodes)) for nodes in itertools.product(*(by_hand(t) for t in (2, 3, 4, 5)))]


def test_derivation_is_the_best_of_all_architectures() -> None:
    generator = torch.Generator().manual_seed(0)
    architectures = every()
    for _ in range(60):
        strengths = torch.rand(TABLE.shape, generator=generator, dtype=torch.float64)
        best = max(architectures, key=lambda picks, s=strengths: strength(s, picks))  # type: ignore[misc]
        padded = torch.where(TABLE.mask(), strengths, 1e9)
        assert RULE(TABLE, padded) == best


def test_enumeration_and_count_match_a_manual_list() -> None:
    listed = list(RULE.enumerate(TABLE))
    assert sorted(map(str, listed)) == sorted(map(str, every()))
    assert RULE.count(TABLE) == len(listed)


def test_sampling_is_uniform() -> None:
    small = Table("cell", TABLE.choices[:3], output=(3,))
    rng, number = random.Random(0), 6000
    drawn = Counter(RULE.sample(small, rng) for _ in range(number))
    assert set(drawn) == set(RULE.enumerate(small))
    expected = number / RULE.count(small)
    assert sum((n - expected) ** 2 / expected for n in drawn.values()) < 40  # χ² with 11 degrees of freedom


def test_a_pair_of_attentions_is_replaced_by_the_best_pair_with_a_feature() -> None:
    """Both edges prefer an attention; the exchange that loses less wins, and the second tier is free."""
    strengths = torch.tensor([[0.1, 0.9, 0.0], [0.5, 0.8, 0.0], [0.1, 0.2, 0.7]])
    small = Table("cell", TABLE.choices[:3], output=(3,))
    assert RULE(small, strengths) == (Pick(0, 2, "a"), Pick(1, 2, "g"), Pick(2, 3, "d"))


@pytest.mark.parametrize("seed", range(5))
def test_architectures_of_other_rules_get_a_feature_where_they_lack_one(seed: int) -> None:
    layout = Layout("toy", (TABLE,), ("cell",), RULE)
    strengths = torch.rand(TABLE.shape, generator=torch.Generator().manual_seed(seed))
    strengths = strengths + TABLE.columns("a") + TABLE.columns("d")  # no feature would be picked anywhere
    plain = StrongestEach()(TABLE, strengths)
    assert not any(pick.op in FEATURES for pick in plain)
    completed = derive(layout, {"cell": strengths}, StrongestEach()).cells["cell"].picks
    assert [(p.source, p.target) for p in completed] == [(p.source, p.target) for p in plain]
    for target in (2, 4):
        changed = [(a, b) for a, b in zip(plain, completed, strict=True) if a.target == target and a != b]
        assert len(changed) == 1 and changed[0][1].op in FEATURES
        options = []
        for i, pick in enumerate(plain):
            others = [op for op in TABLE.choices[i].candidates if op in FEATURES]
            if pick.target == target:
                options += [
                    strength(strengths, (Pick(pick.source, target, op),)) - strength(strengths, (pick,))
                    for op in others
                ]
        before, after = changed[0]
        assert strength(strengths, (after,)) - strength(strengths, (before,)) == pytest.approx(max(options))
    assert [p for p in completed if p.target in (3, 5)] == [p for p in plain if p.target in (3, 5)]


def test_an_architecture_that_has_its_features_is_unchanged() -> None:
    layout = Layout("toy", (TABLE,), ("cell",), RULE)
    strengths = torch.rand(TABLE.shape) + TABLE.columns("f") + TABLE.columns("g")
    derived = derive(layout, {"cell": strengths}, StrongestEach())
    assert derived.cells["cell"].picks == StrongestEach()(TABLE, strengths)
