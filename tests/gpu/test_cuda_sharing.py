"""Runs that share a GPU, each on its stream with its own random numbers, equal those that have it alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from softcell.app.baseline import FOUND, draw_random, train_with_random
from softcell.engine.checkpoint import load_latest
from softcell.evaluate.train import train
from softcell.recipes import train_recipe
from softcell.search import resolve, search
from softcell.seeds import search_seeds
from tests.helpers.cli_calls import CELL

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_concurrent_searches_equal_separate_ones(engine: str, tmp_path: Path) -> None:
    given = {
        "method": "snas",
        "space": "nb201",
        "data": "digits",
        "scale": "small",
        "space_settings": {"cells_per_stage": 1, "channels": 4},
        "epochs": 2,
        "drop_path": 0.3,
        "device": "cuda",
        "deterministic": True,
        "engine": engine,
    }
    recipe = resolve(given)
    result = search_seeds(recipe, tmp_path / "all", [0, 1, 2])
    assert not result.errors
    for seed in (0, 1, 2):
        search(resolve(given, {"seed": seed}), tmp_path / f"alone-{seed}")
        together, alone = load_latest(tmp_path / "all" / f"seed-{seed}"), load_latest(tmp_path / f"alone-{seed}")
        assert together is not None and alone is not None
        for part in ("supernet", "method"):
            for name, value in alone.state["task"][part].items():
                assert torch.equal(together.state["task"][part][name], value), (seed, part, name)


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_random_architectures_beside_the_found_network_equal_separate_ones(engine: str, tmp_path: Path) -> None:
    given = {
        "data": "digits",
        "space_settings": {"cells_per_stage": 1, "channels": 4},
        "epochs": 2,
        "drop_path": 0.3,
        "device": "cuda",
        "deterministic": True,
        "engine": engine,
    }
    found, recipe = train_recipe(CELL, given)
    others = draw_random(found, recipe, 2)
    ran = train_with_random(found, others, recipe, tmp_path / "all", at_once=3)
    assert not ran.errors
    for name, genotype in zip((FOUND, "random-1", "random-2"), (found, *others), strict=True):
        alone = train(genotype, recipe, tmp_path / f"alone-{name}")
        together = ran.results[name]
        weights = [(run.folder / "model.safetensors").read_bytes() for run in (together, alone)]
        assert weights[0] == weights[1], name
        assert (together.accuracy, together.metrics[-1]["train_loss"]) == (
            alone.accuracy,
            alone.metrics[-1]["train_loss"],
        )
