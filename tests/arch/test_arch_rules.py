"""Derivation rules against hand-computed values and brute force."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softcell.arch import Choice, Layout, Pick, Positive, Rule, StrongestEach, Table, TopInputs, count, derive, sample
from softcell.errors import UserError

OPS = ("none", "skip", "conv")
NODE = Table("cell", tuple(Choice(source, 3, OPS) for source in range(3)), (3,))
RAGGED = Table(
    "cell",
    (Choice(0, 2, ("none", "skip")), Choice(1, 2, ("conv",)), Choice(0, 3, ("skip", "conv", "none"))),
    (2, 3),
)


def picks(rule: Rule, table: Table, rows: list[list[float]]) -> list[str]:
    return [str(pick) for pick in rule(table, torch.tensor(rows, dtype=torch.float64))]


def test_the_two_strongest_inputs_are_kept_each_with_its_strongest_operation() -> None:
    # Edge 0 is worth .5 (conv), edge 1 only .3 (skip), edge 2 .6 (skip).
    rows = [[0.1, 0.4, 0.5], [0.5, 0.3, 0.2], [0.2, 0.6, 0.2]]
    assert picks(TopInputs(2), NODE, rows) == ["conv(0->3)", "skip(2->3)"]
    assert picks(TopInputs(1), NODE, rows) == ["skip(2->3)"]
    assert picks(TopInputs(3), NODE, rows) == ["conv(0->3)", "skip(1->3)", "skip(2->3)"]


def test_none_makes_an_edge_neither_stronger_nor_weaker() -> None:
    # `none` has .9 on edge 0: excluded, that edge is worth only .06.
    rows = [[0.9, 0.06, 0.04], [0.4, 0.3, 0.3], [0.5, 0.1, 0.4]]
    assert picks(TopInputs(2), NODE, rows) == ["skip(1->3)", "conv(2->3)"]
    assert picks(TopInputs(2, exclude=()), NODE, rows) == ["none(0->3)", "none(2->3)"]
    assert picks(StrongestEach(), NODE, rows) == ["none(0->3)", "none(1->3)", "none(2->3)"]
    assert picks(StrongestEach(exclude=("none",)), NODE, rows) == ["skip(0->3)", "skip(1->3)", "conv(2->3)"]


def test_a_node_with_fewer_edges_keeps_all_of_them() -> None:
    table = Table("cell", (Choice(0, 1, OPS),), (1,))
    assert picks(TopInputs(2), table, [[0.8, 0.1, 0.2]]) == ["conv(0->1)"]


def test_ties_go_to_the_lower_source_and_the_earlier_candidate() -> None:
    rows = [[0.2, 0.4, 0.4]] * 3
    assert picks(TopInputs(2), NODE, rows) == ["skip(0->3)", "skip(1->3)"]
    assert picks(StrongestEach(), NODE, rows) == ["skip(0->3)", "skip(1->3)", "skip(2->3)"]


def test_padding_of_a_ragged_table_is_never_looked_at() -> None:
    nan = float("nan")
    for padding in (9.0, nan, float("inf")):
        rows = [[0.6, 0.4, padding], [0.1, padding, padding], [0.2, 0.3, 0.5]]
        assert picks(TopInputs(1), RAGGED, rows) == ["skip(0->2)", "conv(0->3)"]
        assert picks(StrongestEach(), RAGGED, rows) == ["none(0->2)", "conv(1->2)", "none(0->3)"]


def test_excluded_candidates_stay_if_there_are_no_others() -> None:
    table = Table("cell", (Choice(0, 2, ("none",)), Choice(1, 2, ("conv",))), (2,))
    assert picks(TopInputs(2), table, [[0.9], [0.1]]) == ["none(0->2)", "conv(1->2)"]


def test_a_strength_that_is_no_number_is_refused_with_its_place() -> None:
    rows = torch.ones(NODE.shape)
    rows[1, 2] = float("nan")
    for rule in (TopInputs(2), StrongestEach()):
        with pytest.raises(UserError, match="conv on 1->3"):
            rule(NODE, rows)


def test_strengths_of_another_shape_are_refused() -> None:
    with pytest.raises(AssertionError, match="strengths"):
        StrongestEach()(NODE, torch.ones(3, 2))


def test_a_rule_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="inputs=0"):
        TopInputs(0)


def total(table: Table, rows: Tensor, chosen: tuple[Pick, ...]) -> float:
    """The summed strength of an architecture, looked up pick by pick."""
    return sum(
        float(rows[i, choice.candidates.index(pick.op)])
        for pick in chosen
        for i, choice in enumerate(table.choices)
        if (choice.source, choice.target) == (pick.source, pick.target)
    )


def by_hand(table: Table, inputs: int | None) -> set[tuple[Pick, ...]]:
    """Every architecture, written without the rules: all ways to leave out an edge or to pick one of its candidates."""
    options = []
    for choice in table.choices:
        allowed = [op for op in choice.candidates if op != "none" or inputs is None] or list(choice.candidates)
        options.append([None, *(Pick(choice.source, choice.target, op) for op in allowed)])
    found = set()
    for combination in itertools.product(*options):
        chosen = tuple(pick for pick in combination if pick is not None)
        sizes = Counter(pick.target for pick in chosen)
        wanted = {
            t: len(table.incoming(t)) if inputs is None else min(inputs, len(table.incoming(t))) for t in table.targets
        }
        if all(sizes[target] == wanted[target] for target in table.targets):
            found.add(tuple(sorted(chosen, key=lambda pick: (pick.target, pick.source))))
    return found


DEEP = Table(
    "cell",
    (
        Choice(0, 2, ("none", "skip")),
        Choice(1, 2, ("none", "skip", "conv")),
        Choice(0, 3, ("conv",)),
        Choice(1, 3, ("skip", "none")),
        Choice(2, 3, ("conv", "skip")),
    ),
    (2, 3),
)


@pytest.mark.parametrize("table", [NODE, RAGGED, DEEP], ids=["node", "ragged", "deep"])
@pytest.mark.parametrize(
    ("rule", "inputs"), [(TopInputs(1), 1), (TopInputs(2), 2), (StrongestEach(), None)], ids=["top-1", "top-2", "each"]
)
def test_rules_enumerate_count_and_derive_what_brute_force_does(rule: Rule, inputs: int | None, table: Table) -> None:
    architectures = by_hand(table, inputs)
    assert set(rule.enumerate(table)) == architectures
    assert rule.count(table) == len(architectures) == len(list(rule.enumerate(table)))
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        rows = torch.rand(table.shape, generator=generator, dtype=torch.float64)
        assert rule(table, rows) == max(architectures, key=lambda chosen: total(table, rows, chosen))


def subsets_by_hand(table: Table) -> set[tuple[Pick, ...]]:
    """Every architecture with any number of candidates per edge and at least one per node."""
    every = [Pick(c.source, c.target, op) for c in table.choices for op in c.candidates]
    only_none = {(c.source, c.target) for c in table.choices if c.candidates == ("none",)}
    every = [pick for pick in every if pick.op != "none" or (pick.source, pick.target) in only_none]
    found = set()
    for size in range(1, len(every) + 1):
        for chosen in itertools.combinations(every, size):
            if {pick.target for pick in chosen} == set(table.targets):
                found.add(chosen)
    return found


@pytest.mark.parametrize("table", [NODE, RAGGED, DEEP], ids=["node", "ragged", "deep"])
def test_every_positive_candidate_is_derived_as_brute_force_does(table: Table) -> None:
    rule, architectures = Positive(), subsets_by_hand(table)
    assert set(rule.enumerate(table)) == architectures
    assert rule.count(table) == len(architectures) == len(list(rule.enumerate(table)))
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        rows = torch.randn(table.shape, generator=generator, dtype=torch.float64)
        # The largest sum takes all that is positive, and where a node has nothing positive the least negative.
        assert rule(table, rows) == max(architectures, key=lambda chosen: total(table, rows, chosen))
    rows = torch.where(table.mask(), -1.0, 9.0)
    assert rule(table, rows) in architectures, "padding is ignored"


@pytest.mark.parametrize(
    "rule", [TopInputs(1), TopInputs(2), StrongestEach(), Positive()], ids=["top-1", "top-2", "each", "positive"]
)
def test_sampling_is_uniform_even_if_edges_have_different_numbers_of_candidates(rule: Rule) -> None:
    architectures, rng = list(rule.enumerate(DEEP)), random.Random(0)
    seen = Counter(rule.sample(DEEP, rng) for _ in range(300 * len(architectures)))
    assert set(seen) == set(architectures)
    # Pearson's statistic has mean f and variance 2f for f degrees of freedom: 5 deviations are no accident.
    freedom = len(architectures) - 1
    statistic = sum((seen[a] - 300) ** 2 / 300 for a in architectures)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=3, max_size=3), seed=st.integers(0, 9)
)
def test_a_derivation_does_not_depend_on_scale_or_on_small_noise_in_untied_rows(
    rows: list[list[int]], seed: int
) -> None:
    strengths = torch.tensor(rows, dtype=torch.float64)
    rule = TopInputs(2)
    assert rule(NODE, strengths) == rule(NODE, 3.0 * strengths + 1.0)
    assert rule(NODE, strengths) == rule(NODE, strengths.float())


def test_sizes_of_the_published_spaces() -> None:
    darts_edges = tuple(Choice(s, t, tuple(f"op{k}" for k in range(7))) for t in range(2, 6) for s in range(t))
    # Per node: choose 2 of its inputs, 7 operations each: 1, 3, 6 and 10 pairs.
    assert TopInputs(2).count(Table("cell", darts_edges, (2, 3, 4, 5))) == 1 * 3 * 6 * 10 * 7**8
    nb201 = tuple(Choice(s, t, tuple(f"op{k}" for k in range(5))) for t in range(1, 4) for s in range(t))
    assert StrongestEach().count(Table("cell", nb201, (3,))) == 15_625


def layout(rule: Rule) -> Layout:
    return Layout("toy", (RAGGED, Table("other", NODE.choices, (3,))), ("cell", "other"), rule, {"tiers": 2})


def test_a_genotype_is_derived_table_by_table_and_records_its_origin() -> None:
    strengths = {"cell": torch.rand(3, 3), "other": torch.rand(3, 3)}
    genotype = derive(layout(TopInputs(1)), strengths, about={"method": "hand"})
    assert genotype.space == "toy"
    assert genotype.settings == {"tiers": 2}
    assert genotype.about == {"method": "hand"}
    assert genotype.cells["cell"].output == (2, 3)
    assert genotype.cells["cell"].picks == TopInputs(1)(RAGGED, strengths["cell"])
    other = derive(layout(TopInputs(1)), strengths, rule=StrongestEach())
    assert len(other.cells["other"].picks) == 3


def test_samples_repeat_by_seed_and_the_size_is_the_product_over_tables() -> None:
    toy = layout(TopInputs(2))
    assert sample(toy, 4) == sample(toy, 4)
    assert len({sample(toy, seed) for seed in range(30)}) > 10
    # RAGGED: skip only, conv only, two candidates; NODE: 3 pairs of edges, 2 candidates each.
    assert count(toy) == (1 * 1 * 2) * (3 * 4)
