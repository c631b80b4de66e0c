"""Searches by single paths and evolution: bit for bit after a resume, within budgets, on any method's supernet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.arch.evolve import evolve
from softcell.errors import UserError
from softcell.search import resolve, search, selection
from softcell.search.task import SearchTask
from softcell.spaces.base import evaluation_space
from softcell.spaces.costs import count_genotype

TINY = {
    "method": "spos",
    "space": "nb201",
    "data": "digits",
    "epochs": 2,
    "batch_size": 256,
    "space_settings": {"cells_per_stage": 1, "channels": 4},
    "evolution": {"generations": 2, "population": 4, "parents": 2, "norm_batches": 1},
    "device": "cpu",
}


def run(out: Path, **changes: Any) -> Any:
    return search(resolve(TINY, changes), out)


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def test_a_search_selects_by_evolution_and_says_what_it_measured(tmp_path: Path) -> None:
    result = run(tmp_path / "a")
    found = manifest(tmp_path / "a")["results"]["evolution"]
    assert found["measured"] <= 8 and len(found["best_by_generation"]) == 2
    assert found["accuracy"] == found["best_by_generation"][-1] >= found["mean_accuracy"]
    assert 0.0 <= found["accuracy_of_own"] <= 1.0 and found["split"] == "validation"
    again = run(tmp_path / "b")
    assert again.genotype == result.genotype
    assert [row["train_loss"] for row in again.metrics] == [row["train_loss"] for row in result.metrics]


def test_a_resumed_search_draws_the_paths_of_an_unbroken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tmp_path / "whole")
    original, steps = SearchTask.step, [0]

    def breaking(self: SearchTask, batch: Any) -> None:
        steps[0] += 1
        if steps[0] == 6:
            raise KeyboardInterrupt
        original(self, batch)

    monkeypatch.setattr(SearchTask, "step", breaking)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken")
    monkeypatch.setattr(SearchTask, "step", original)
    resumed = search(resolve(TINY), tmp_path / "broken", resume=True)
    assert resumed.genotype == whole.genotype
    for key in ("train_loss", "val_loss"):
        assert [row[key] for row in resumed.metrics] == [row[key] for row in whole.metrics]


def test_a_budget_limits_what_is_selected(tmp_path: Path) -> None:
    limit = 140_000
    result = run(tmp_path / "a", resource={"max_params": limit})
    space = evaluation_space("nb201", "digits")
    assert count_genotype(space, result.genotype, (1, 8, 8), 10).parameters <= limit
    results = manifest(tmp_path / "a")["results"]
    assert results["budget_met"] is True
    with pytest.raises(UserError, match="have no gradient"):
        run(tmp_path / "b", resource={"preset": "mild"})
    with pytest.raises(UserError, match="have no gradient"):
        run(tmp_path / "c", resource={"max_params": limit}, evolution={"generations": 0})


def test_evolution_selects_on_the_supernet_of_another_method_too(tmp_path: Path) -> None:
    run(tmp_path / "a", method="darts", epochs=1)
    found = manifest(tmp_path / "a")["results"]["evolution"]
    own = json.loads((tmp_path / "a" / "architecture.jsonl").read_text().splitlines()[-1])["genotype"]
    assert found["own"] == own and found["accuracy"] >= found["accuracy_of_own"]


def test_learned_architectures_enter_evolution_and_sampled_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def noting(*arguments: Any) -> Any:
        given["own"] = arguments[6]
        return evolve(*arguments)

    monkeypatch.setattr(selection, "evolve", noting)
    run(tmp_path / "learned", method="darts", epochs=1)
    assert [genotype.to_dict()["cells"] for genotype in given["own"]] == [
        manifest(tmp_path / "learned")["results"]["evolution"]["own"]
    ]
    run(tmp_path / "drawn", epochs=1)
    assert given["own"] == []


def test_only_the_weights_of_drawn_paths_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[set[str], set[str]]] = []
    original = SearchTask.step

    def noting(self: SearchTask, batch: Any) -> None:
        before = {name: p.detach().clone() for name, p in self.supernet.named_parameters()}
        plan = self.method.planner.draw(self._number)
        original(self, batch)
        moved = {name for name, p in self.supernet.named_parameters() if not torch.equal(p, before[name])}
        assert plan is not None and plan[0] is not None
        (table,) = self.supernet.layout.tables
        live = {
            f"{c.source}_{c.target}.{c.candidates[k]}"
            for c, row in zip(table.choices, plan[0], strict=True)
            for k in row
        }
        own = {name.split("edges.own.")[1] for name in moved if "edges.own." in name}
        seen.append(({".".join(name.split(".")[:2]) for name in own}, live))

    monkeypatch.setattr(SearchTask, "step", noting)
    run(tmp_path / "a", epochs=1, weights={"weight_decay": 0.0, "momentum": 0.0}, evolution={"generations": 0})
    assert seen and all(moved <= live for moved, live in seen)
    assert any(moved for moved, _ in seen)


def test_recipes_match_the_paper() -> None:
    recipe = resolve({"method": "spos", "data": "imagenet"})
    assert (recipe.space, recipe.scale, recipe.epochs, recipe.batch_size) == ("proxyless", "imagenet", 240, 512)
    assert recipe.split == {"weights": 0.1, "validation": 0.025}
    assert (recipe.weights.lr, recipe.weights.lr_min, recipe.weights.weight_decay) == (0.25, 5e-4, 4e-5)
    assert (recipe.evolution.generations, recipe.evolution.population) == (20, 50)
