"""A dry pass before the first step changes nothing in a search, whatever values it computes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softcell.data import load
from softcell.engine.capture import CapturedStep
from softcell.engine.checkpoint import load_latest
from softcell.engine.session import open_session
from softcell.engine.task import Event, Note, Stepped
from softcell.search import SearchRecipe, dry_pass, resolve, search
from softcell.search.build import build_task
from softcell.search.task import SearchTask
from tests.helpers.engine_launch import on_ranks
from tests.helpers.search_toys import THREE_EDGES, remains, same, settings, write_data

DARTS = {"cells": 3, "channels": 2, "nodes": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bilevel": ("nb201", {"drop_path": 0.3, "resource": {"preset": "mild"}}),
    "unrolled": ("nb201", {"method": "snas", "regime": "unrolled", "drop_path": 0.3}),
    "single-level": ("nb201", {"method": "drnas", "regime": "single-level"}),
    "observed": ("nb201", {"method": "snas", "method_settings": {"record_credit": True}}),
    "weights first": ("nb201", {"architecture": {"lr": 0.05, "after": 0.5}}),
    "planned": ("darts", {"method": "entrannas-dst", "space_settings": DARTS}),
    "sampled": ("nb201", {"method": "gdas"}),
    "drawn paths": ("nb201", {"method": "spos"}),
    "selected from images": ("nb201", {"method": "itnas"}),
    "unsupervised": ("nb201", {"objective": "context"}),
    "partial channels": ("darts", {"method": "pc-darts", "space_settings": {**DARTS, "channels": 8}}),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data.npz", train=75)


@pytest.fixture
def rehearsals(monkeypatch: pytest.MonkeyPatch) -> list[SearchTask]:
    """Dry passes as on a GPU, but for the kernels; all values behind the first convolution are NaN."""
    found: list[SearchTask] = []

    def run_spoilt(run: Callable[[], None], notify: Any) -> int:
        run()
        return 0

    rehearse = SearchTask.rehearse

    def spoilt(task: SearchTask, batch: Any) -> None:
        first = next(module for module in task.supernet.modules() if isinstance(module, nn.Conv2d))
        handle = first.register_forward_hook(lambda module, given, y: y * torch.nan)
        try:
            rehearse(task, batch)
        finally:
            handle.remove()
        averages = [b for name, b in task.supernet.named_buffers() if name.endswith("running_mean")]
        assert any(bool(average.isnan().any()) for average in averages)
        found.append(task)

    monkeypatch.setattr(SearchTask, "rehearse", spoilt)
    monkeypatch.setattr(dry_pass, "launches_kernels", lambda *given: True)
    monkeypatch.setattr(dry_pass, "warm_up_by_run", run_spoilt)
    return found


def outcome(folder: Path) -> tuple[dict[str, Any], Any]:
    """Results, and the last checkpoint with its random state."""
    loaded = load_latest(folder)
    assert loaded is not None
    records = {file.name: file.read_text() for file in folder.glob("*.jsonl") if file.name != "metrics.jsonl"}
    return {**remains(folder), "records": records}, {key: loaded.state[key] for key in ("task", "rng", "epoch", "step")}


def recipe_of(case: str, data: Path) -> SearchRecipe:
    space, changes = CASES[case]
    sizes = {"space_settings": THREE_EDGES} if space == "nb201" else {}
    return resolve(settings(space, data, epochs=2, **{**sizes, **changes}))


def assert_equals_one_without(recipe: SearchRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search in `with` ended in the same state as one without a dry pass."""
    monkeypatch.setattr(dry_pass, "launches_kernels", lambda *given: False)
    search(recipe, tmp_path / "without")
    (given, state), (expected, before) = outcome(tmp_path / "with"), outcome(tmp_path / "without")
    assert given == expected
    assert same(state, before)


@pytest.mark.parametrize("case", CASES)
def test_a_search_with_a_dry_pass_equals_one_without(
    case: str, data: Path, tmp_path: Path, rehearsals: list[SearchTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(case, data)
    search(recipe, tmp_path / "with")
    assert len(rehearsals) == 1, "one dry pass, before the first step"
    assert_equals_one_without(recipe, tmp_path, monkeypatch)


def test_so_does_one_that_is_resumed_within_an_epoch(
    data: Path, tmp_path: Path, rehearsals: list[SearchTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of("unrolled", data)

    def strike(event: Event) -> None:
        if isinstance(event, Stepped) and (event.epoch, event.step) == (1, 1):
            os.kill(os.getpid(), signal.SIGTERM)

    assert search(recipe, tmp_path / "with", on_event=strike).genotype is None
    search(recipe, tmp_path / "with", resume=True)
    assert len(rehearsals) == 2
    assert_equals_one_without(recipe, tmp_path, monkeypatch)


def test_a_dry_pass_that_fails_is_reported_and_changes_nothing(
    data: Path, tmp_path: Path, rehearsals: list[SearchTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of("weights first", data)
    learn, calls = SearchTask._learn, [0]

    def failing(task: SearchTask, *drafts: Tensor) -> None:
        learn(task, *drafts)
        calls[0] += 1
        if calls[0] == 1:
            raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(SearchTask, "_learn", failing)
    notes: list[str] = []
    search(recipe, tmp_path / "with", on_event=lambda e: notes.append(e.text) if isinstance(e, Note) else None)
    said = [note for note in notes if "kernels" in note]
    assert said == [
        "kernels were not compiled in parallel (RuntimeError: out of memory); they are compiled on first use, "
        "one by one"
    ]
    assert_equals_one_without(recipe, tmp_path, monkeypatch)


def test_a_rank_makes_its_dry_pass_without_the_others(tmp_path: Path) -> None:
    """A collective in it would wait for the second rank, or receive what belongs to a step."""
    write_data(tmp_path / "data.npz", train=75)
    found = on_ranks(2, "dry_ranks", "searches_on_rank", tmp_path)
    assert [rank["made"] for rank in found] == [["with"], []]
    (given, state), (expected, before) = outcome(tmp_path / "with"), outcome(tmp_path / "without")
    assert given == expected
    assert same(state, before)


def test_plans_of_recorded_steps_are_not_used_up(data: Path) -> None:
    recipe = recipe_of("planned", data)
    with open_session(device="cpu", seed=0, precision="float32", deterministic=False, threads=1) as session:
        dataset = load(recipe.data)
        task = build_task(recipe, dataset, recipe.parts(dataset.train), session, None)
    assert isinstance(task, SearchTask)
    task._run = CapturedStep(task._learn, pytest.fail)
    task.begin_epoch(0)
    before = task._plans.state_dict()
    with dry_pass.without_effects(task):
        task.rehearse(next(iter(task.batches(0, 0))))
    assert before == task._plans.state_dict() == {"reading": None, "before": None}


def test_no_dry_pass_where_no_kernel_of_tritons_runs(data: Path, tmp_path: Path) -> None:
    """On a CPU: `rehearse` would raise here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SearchTask, "rehearse", lambda task, batch: pytest.fail("a dry pass on a CPU"))
        search(recipe_of("bilevel", data), tmp_path / "run")
