"""Several seeds in one process: each search equals a separate one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.engine.checkpoint import load_latest
from softcell.engine.interleave import Running, RunState, Steps, drain, interleave
from softcell.engine.task import Event, Finished, Stepped
from softcell.errors import UserError
from softcell.search import SearchRecipe, resolve, search
from softcell.seeds import search_seeds
from tests.helpers.search_toys import THREE_EDGES, settings, write_data

CPU = torch.device("cpu")


@pytest.fixture
def recipe(tmp_path: Path) -> SearchRecipe:
    """Concrete samples and dropped paths draw in every step."""
    data = write_data(tmp_path / "data.npz")
    return resolve(settings("nb201", data, method="snas", drop_path=0.3, epochs=2, space_settings=THREE_EDGES))


def state(folder: Path) -> dict[str, Any]:
    loaded = load_latest(folder)
    assert loaded is not None
    state: dict[str, Any] = loaded.state
    return state


def require_same(mine: Any, theirs: Any, where: str = "state") -> None:
    if isinstance(theirs, dict):
        assert mine.keys() == theirs.keys()
        for key in theirs:
            if key not in ("seconds", "history"):
                require_same(mine[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(mine, theirs), where
    elif isinstance(theirs, list | tuple):
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            require_same(a, b, f"{where}[{i}]")
    else:
        assert mine == theirs, where


def test_concurrent_searches_equal_separate_ones(recipe: SearchRecipe, tmp_path: Path) -> None:
    result = search_seeds(recipe, tmp_path / "all", [0, 1, 2], at_once=2)
    assert result.exit_code == 0 and not result.errors
    for seed in (0, 1, 2):
        alone = search(resolve(recipe.to_dict(), {"seed": seed}), tmp_path / f"alone-{seed}")
        together = tmp_path / "all" / f"seed-{seed}"
        require_same(state(together), state(alone.folder))
        assert result.results[seed].genotype == alone.genotype
    listed = json.loads((tmp_path / "all" / "seeds.json").read_text())
    accuracies = {one["seed"]: one["val_accuracy"] for one in listed["seeds"]}
    assert accuracies[listed["best"]] == max(accuracies.values())
    best = tmp_path / "all" / f"seed-{listed['best']}" / "genotype.json"
    assert (tmp_path / "all" / "genotype.json").read_text() == best.read_text()


def test_a_signal_stops_all_and_resuming_matches_an_uninterrupted_run(recipe: SearchRecipe, tmp_path: Path) -> None:
    whole = search_seeds(recipe, tmp_path / "whole", [0, 1], at_once=2)

    def listener(seed: int) -> Any:
        def hear(event: Event) -> None:
            if seed == 1 and isinstance(event, Stepped) and (event.epoch, event.step) == (1, 1):
                os.kill(os.getpid(), signal.SIGINT)

        return hear

    broken = search_seeds(recipe, tmp_path / "broken", [0, 1], at_once=2, on_event=listener)
    assert broken.exit_code == 130 and broken.best is None
    assert [one.genotype for one in broken.results.values()] == [None, None]
    mended = search_seeds(recipe, tmp_path / "broken", [0, 1], at_once=2, resume=True)
    assert mended.exit_code == 0 and mended.best == whole.best
    for seed in (0, 1):
        require_same(state(tmp_path / "broken" / f"seed-{seed}"), state(tmp_path / "whole" / f"seed-{seed}"))
    again = search_seeds(recipe, tmp_path / "broken", [0, 1], resume=True, on_event=lambda seed: pytest.fail)
    assert again.best == whole.best, "what is finished is not run again"
    with pytest.raises(UserError, match="resumed with its own seeds"):
        search_seeds(recipe, tmp_path / "broken", [0, 2], resume=True)


def test_seeds_that_have_not_begun_are_not_started_after_a_signal(recipe: SearchRecipe, tmp_path: Path) -> None:
    heard: dict[int, list[Event]] = {0: [], 1: [], 2: []}

    def listener(seed: int) -> Any:
        def hear(event: Event) -> None:
            heard[seed].append(event)
            if isinstance(event, Finished):
                os.kill(os.getpid(), signal.SIGTERM)

        return hear

    out = tmp_path / "out"
    stopped = search_seeds(recipe, out, [0, 1, 2], at_once=1, keep="best", on_event=listener)
    assert heard[0] and not heard[1] and not heard[2] and stopped.exit_code == 143
    assert list(stopped.results) == [0] and not stopped.errors and not (out / "seed-1").exists()
    rows = json.loads((out / "seeds.json").read_text())["seeds"]
    assert [one["status"] for one in rows] == ["finished", "open", "open"]
    stopped = search_seeds(recipe, out, [0, 1, 2], at_once=1, keep="best", resume=True, on_event=listener)
    assert list(stopped.results) == [0, 1] and not heard[2]
    assert all((out / f"seed-{seed}" / "checkpoint.bin").exists() for seed in (0, 1)), "not all are finished"
    resumed = search_seeds(recipe, out, [0, 1, 2], at_once=1, keep="best", resume=True)
    whole = search_seeds(recipe, tmp_path / "whole", [0, 1, 2])
    assert resumed.exit_code == 0 and resumed.best == whole.best
    assert [one.genotype for one in resumed.results.values()] == [one.genotype for one in whole.results.values()]


def test_only_the_best_keeps_its_checkpoint_when_asked(recipe: SearchRecipe, tmp_path: Path) -> None:
    result = search_seeds(recipe, tmp_path / "out", [3, 4], keep="best")
    for seed in (3, 4):
        kept = (tmp_path / "out" / f"seed-{seed}" / "checkpoint.bin").exists()
        assert kept == (seed == result.best)
        assert (tmp_path / "out" / f"seed-{seed}" / "genotype.json").exists()
    with pytest.raises(UserError, match="empty folder"):
        search_seeds(recipe, tmp_path / "out", [3, 4])


def test_an_error_of_the_recipe_is_raised_and_one_of_a_seed_is_reported(
    recipe: SearchRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError):
        search_seeds(resolve(recipe.to_dict(), {"data": str(tmp_path / "nowhere")}), tmp_path / "bad", [0, 1])

    def listener(seed: int) -> Any:
        def hear(event: Event) -> None:
            if seed == 0:
                raise RuntimeError("this seed is unlucky")

        return hear

    result = search_seeds(recipe, tmp_path / "out", [0, 1], at_once=2, on_event=listener)
    assert result.exit_code == 1 and list(result.errors) == [0] and result.best == 1
    listed = json.loads((tmp_path / "out" / "seeds.json").read_text())["seeds"]
    assert [one["status"] for one in listed] == ["failed", "finished"]
    assert listed[0]["error"] == "this seed is unlucky"


def draws(seed: int, count: int) -> Running[list[float]]:
    def steps() -> Steps[list[float]]:
        found = []
        for _ in range(count):
            found.append(float(torch.rand(())))
            yield
        return found

    torch.manual_seed(seed)
    result: list[float] = yield steps()
    return result


def test_interleaved_runs_draw_the_same_numbers_as_alone_and_restore_the_process() -> None:
    torch.manual_seed(9)
    before = torch.get_rng_state()
    starts: Any = [lambda seed=seed: draws(seed, 5 + seed) for seed in range(3)]
    found = interleave(starts, CPU, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert found == [drain(draws(seed, 5 + seed)) for seed in range(3)]


def test_a_run_state_keeps_its_own_random_numbers() -> None:
    torch.manual_seed(1)
    state = RunState(CPU)
    with state.active():
        first = torch.rand(3)
    torch.rand(100)
    with state.active():
        second = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(3), torch.rand(3)]))
