"""Single-path uniform sampling: what is drawn, when, and how often."""

from __future__ import annotations

from collections import Counter

import torch

from softcell.arch import WeightMix, count
from softcell.methods.base import NoSettings
from softcell.methods.spos import Spos
from softcell.spaces import build_space
from softcell.testing import tiny_space


def make(space: str = "proxyless", seed: int = 0) -> Spos:
    torch.manual_seed(seed)
    return Spos(tiny_space(space).layout(), NoSettings())


def test_every_step_runs_one_candidate_per_layer_with_weight_one() -> None:
    method = make()
    for step in range(5):
        plan = method.planner.draw(step)
        with method.planner.following(plan):
            mix = method.relax()
        assert isinstance(mix, WeightMix) and mix.is_picked(0)
        live = mix.live(0)
        assert live is not None and all(len(row) == 1 for row in live)
        weights = mix.weights(0)
        assert torch.equal(weights.sum(1), torch.ones(len(live)))
        assert all(weights[i, row[0]] == 1 for i, row in enumerate(live))


def test_paths_depend_only_on_seed_and_step() -> None:
    first, second, other = make(seed=1), make(seed=1), make(seed=2)
    drawn = [first.planner.draw(step) for step in range(20)]
    assert [second.planner.draw(step) for step in reversed(range(20))] == drawn[::-1]
    assert [other.planner.draw(step) for step in range(20)] != drawn
    assert len(set(drawn)) > 15
    torch.rand(7)  # other random numbers change nothing
    assert first.planner.draw(3) == drawn[3]


def test_a_loaded_method_draws_what_the_saved_one_would() -> None:
    first, other = make(seed=1), make(seed=2)
    assert first.planner.draw(0) != other.planner.draw(0) or first.planner.draw(1) != other.planner.draw(1)
    other.load_state_dict(first.state_dict())
    assert [other.planner.draw(step) for step in range(5)] == [first.planner.draw(step) for step in range(5)]


def test_architectures_are_drawn_uniformly_from_the_space() -> None:
    torch.manual_seed(0)
    layout = build_space("nb201", {"nodes": 3, "candidates": ["none", "skip_connect"]}).layout()
    method = Spos(layout, NoSettings())
    assert count(layout) == method.planner.num_plans() == 8
    found = Counter(method.planner.draw(step) for step in range(4000))
    assert len(found) == 8
    expected = 4000 / 8
    chi = sum((n - expected) ** 2 / expected for n in found.values())
    assert chi < 24.3  # 7 degrees of freedom: one in a thousand


def test_all_sites_of_a_table_run_the_same_cell_of_the_space() -> None:
    method = make("darts")
    plan = method.planner.draw(0)
    by_table: dict[str, set[object]] = {}
    for name, live in zip(method.layout.sites, plan, strict=True):
        by_table.setdefault(name, set()).add(live)
    assert all(len(lives) == 1 for lives in by_table.values())
    for live in plan:
        assert live is not None
        assert sum(len(row) for row in live) == 2 * 2  # two inputs for each of two nodes


def test_outside_of_steps_always_the_same_path_runs() -> None:
    method = make()
    assert method.relax().live(0) == method.relax().live(0)
