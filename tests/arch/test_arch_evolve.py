"""Evolution stays within rule and limits, finds planted optima and is reproducible."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from softcell.arch import Choice, Genotype, Layout, StrongestEach, Table, TopInputs, check_against, derive, sample
from softcell.arch.evolve import Evolution, crossover, evolve, mutate, mutate_one
from softcell.errors import UserError
from softcell.testing import tiny_space

CHAIN = Layout(
    "toy",
    (Table("chain", tuple(Choice(i, i + 1, ("a", "b", "c", "d")[: 3 + i % 2]) for i in range(8)), (8,)),),
    ("chain",),
    StrongestEach(),
)
CELL = Layout(
    "toy",
    (Table("cell", tuple(Choice(s, t, ("none", "x", "y")) for t in (2, 3, 4) for s in range(t)), (2, 3, 4)),),
    ("cell",),
    TopInputs(2),
)


def ops(genotype: Genotype) -> list[str]:
    return [pick.op for cell in genotype.cells.values() for pick in cell.picks]


@pytest.mark.parametrize("layout", [CHAIN, CELL], ids=["chain", "cell"])
def test_children_are_architectures_of_the_space(layout: Layout) -> None:
    rng = random.Random(0)
    first, second = sample(layout, 1), sample(layout, 2)
    for _ in range(30):
        for child in (crossover(layout, first, second, rng), mutate(layout, first, 0.3, rng)):
            check_against(child, layout)
            (table,) = layout.tables
            assert {p.target for p in child.cells[table.name].picks} == set(table.targets)
            assert "none" not in ops(child)


def test_a_crossed_child_has_each_layer_from_a_parent_and_both_give() -> None:
    first, second, rng = sample(CHAIN, 1), sample(CHAIN, 2), random.Random(0)
    seen = set()
    for _ in range(20):
        for a, b, c in zip(ops(first), ops(second), ops(crossover(CHAIN, first, second, rng)), strict=True):
            assert c in (a, b)
            seen.add((c == a, c == b))
    assert {(True, False), (False, True)} <= seen


def test_one_mutation_reaches_every_neighbour_equally_often_and_nothing_else() -> None:
    even = Layout(
        "toy",
        (Table("chain", tuple(Choice(i, i + 1, ("a", "b", "c")) for i in range(4)), (4,)),),
        ("chain",),
        StrongestEach(),
    )
    parent, rng, num = sample(even, 0), random.Random(0), 4000
    found = Counter("".join(ops(mutate_one(even, parent, rng))) for _ in range(num))
    own = "".join(ops(parent))
    assert set(found) == {own[:i] + op + own[i + 1 :] for i in range(4) for op in "abc" if op != own[i]}
    # 8 neighbours: 500 each, deviation 21
    assert all(abs(times - num / 8) < 100 for times in found.values())


@pytest.mark.parametrize("space", ["darts", "nb201", "nos", "nb1shot1-3", "fullattention"])
def test_one_mutation_replaces_one_pick_in_every_kind_of_space(space: str) -> None:
    layout, rng = tiny_space(space).layout(), random.Random(0)
    for seed in range(300):
        parent = sample(layout, seed)
        child = mutate_one(layout, parent, rng)
        check_against(child, layout)
        lost = [
            pick for name, cell in parent.cells.items() for pick in cell.picks if pick not in child.cells[name].picks
        ]
        new = [
            pick for name, cell in child.cells.items() for pick in cell.picks if pick not in parent.cells[name].picks
        ]
        assert len(lost) == len(new) == 1
        assert lost[0].target == new[0].target


def test_the_only_architecture_of_a_space_stays_itself() -> None:
    single = Layout("toy", (Table("chain", (Choice(0, 1, ("a",)),), (1,)),), ("chain",), StrongestEach())
    assert mutate_one(single, sample(single, 0), random.Random(0)).cells == sample(single, 0).cells


def test_mutation_changes_about_as_many_layers_as_its_probability_says() -> None:
    parent, rng = sample(CHAIN, 0), random.Random(0)
    children = [ops(mutate(CHAIN, parent, 0.2, rng)) for _ in range(400)]
    changed = sum(a != b for child in children for a, b in zip(ops(parent), child, strict=True))
    expected = sum(0.2 * (1 - 1 / len(c.candidates)) for c in CHAIN.tables[0].choices) * 400
    assert changed == pytest.approx(expected, rel=0.15)
    assert ops(mutate(CHAIN, parent, 1e-12, rng)) == ops(parent)


def test_evolution_finds_a_planted_optimum_that_random_search_of_equal_size_misses() -> None:
    target = ops(sample(CHAIN, 99))

    def score(genotype: Genotype) -> float:
        return sum(a == b for a, b in zip(ops(genotype), target, strict=True)) / len(target)

    settings = Evolution(generations=12, population=20, parents=5, mutation=0.2)
    found = evolve(CHAIN, settings, score, lambda genotype: True, seed=3)
    assert found.score == 1.0 and ops(found.best) == target
    assert len(found.scored) <= 240 and list(found.history) == sorted(found.history)
    assert max(score(sample(CHAIN, seed)) for seed in range(1000, 1240)) < 1.0
    again = evolve(CHAIN, settings, score, lambda genotype: True, seed=3)
    assert list(again.scored.items()) == list(found.scored.items())


def test_nothing_outside_the_limits_is_measured() -> None:
    def allowed(genotype: Genotype) -> bool:
        return ops(genotype).count("a") >= 2

    def score(genotype: Genotype) -> float:
        assert allowed(genotype)
        return -float(ops(genotype).count("a"))

    found = evolve(CHAIN, Evolution(generations=4, population=12), score, allowed, seed=0)
    assert found.score == -2.0


def test_a_space_that_is_exhausted_ends_the_evolution() -> None:
    layout = Layout("toy", (Table("t", (Choice(0, 1, ("a", "b")),), (1,)),), ("t",), StrongestEach())
    found = evolve(layout, Evolution(generations=5, population=4), lambda g: float(ops(g) == ["b"]), lambda g: True, 0)
    assert len(found.scored) == 2 and ops(found.best) == ["b"]


def test_mutation_continues_from_a_given_architecture_if_random_ones_exceed_the_limits() -> None:
    cheapest = derive(CHAIN, {"chain": torch.tensor([[1.0, 0.0, 0.0, 0.0]]).expand(8, 4)})

    def allowed(genotype: Genotype) -> bool:
        return ops(genotype).count("a") >= 6

    settings = Evolution(generations=3, population=6)
    found = evolve(CHAIN, settings, lambda g: -float(ops(g).count("a")), allowed, 0, [cheapest])
    assert all(allowed(genotype) for genotype in found.scored) and len(found.scored) > 3


def test_given_architectures_are_measured_first_unless_they_break_the_limits() -> None:
    given = [sample(CHAIN, seed) for seed in (7, 8, 7)]

    def score(genotype: Genotype) -> float:
        return float(genotype == given[1])  # nothing leads there

    settings = Evolution(generations=2, population=4)
    found = evolve(CHAIN, settings, score, lambda g: True, 0, first=given)
    assert list(found.scored)[:2] == given[:2] and found.best == given[1]
    assert len(found.scored) <= 8
    limited = evolve(CHAIN, settings, score, lambda g: g != given[1], 0, first=given)
    assert next(iter(limited.scored)) == given[0] and given[1] not in limited.scored


def test_limits_out_of_reach_and_wrong_settings_are_refused() -> None:
    with pytest.raises(UserError, match="within the limits"):
        evolve(CHAIN, Evolution(generations=1, population=4), lambda g: 0.0, lambda g: False, 0)
    for wrong in ({"generations": -1}, {"population": 1}, {"parents": 0}, {"mutation": 0.0}, {"norm_batches": 0}):
        with pytest.raises(UserError, match=r"evolution\."):
            Evolution(**wrong)  # type: ignore[arg-type]
