"""A training run says in one line where `fused=true` has no effect, or only on some of its cells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from softcell.arch import notation, sample
from softcell.data import load
from softcell.data.batches import Feeds
from softcell.engine.distributed import World
from softcell.evaluate import TrainRecipe, resolve
from softcell.evaluate import task as module
from softcell.evaluate.task import TrainTask, why_unfused
from softcell.spaces import Network, build_space
from tests.helpers.search_toys import ALONE, TINY, training, write_data

GPU = World(0, 1, 0, torch.device("cuda"))


def network_of(space: str, **settings: Any) -> Network:
    built = build_space(space, {**TINY.get(space, {}), **settings})
    return built.network(sample(built.layout(), 5), (1, 8, 8), 3)


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_fuse", lambda: True)


@pytest.mark.parametrize(
    "space", ["darts", "nos", "nb201", "fullattention", "s1", "s2", "s3", "s4", "nb1shot1-1", "nb1shot1-3"]
)
def test_spaces_whose_cells_are_fused_on_a_gpu(space: str) -> None:
    assert why_unfused(TrainRecipe(fused=True), network_of(space), GPU) is None


def test_spaces_without_fused_cells_are_named() -> None:
    found = why_unfused(TrainRecipe(fused=True), network_of("proxyless"), GPU)
    assert found == "has no effect: cells of this space have no fused form"


def test_networks_of_which_no_cell_is_fused_say_so() -> None:
    genotype = notation.parse("|skip_connect~0|+|avg_pool_3x3~0|none~1|+|none~0|none~1|skip_connect~2|")
    network = build_space("nb201", TINY["nb201"]).network(genotype, (1, 8, 8), 3)
    found = why_unfused(TrainRecipe(fused=True), network, GPU)
    assert found is not None and "fuses no cell" in found


def test_where_nothing_is_fused_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    network, recipe = network_of("darts"), TrainRecipe(fused=True)
    assert "on a GPU only" in str(why_unfused(recipe, network, ALONE))
    assert "not in float64" in str(why_unfused(replace(recipe, precision="float64"), network, GPU))
    monkeypatch.setattr(module, "can_fuse", lambda: False)
    assert "pip install triton" in str(why_unfused(recipe, network, GPU))


def test_cells_that_stay_unfused_are_counted() -> None:
    network: Any = network_of("darts")
    norm = next(m for m in network.pre[1].modules() if isinstance(m, nn.BatchNorm2d))
    norm.eval()  # its cell runs module by module while it is frozen
    found = why_unfused(TrainRecipe(fused=True), network, GPU)
    assert found == f"has no effect on 1 of {len(network.cells)} cells, which have no fused form"


@pytest.mark.parametrize("fused", [True, False])
def test_a_training_run_says_it_once(fused: bool, tmp_path: Path) -> None:
    data = load(str(write_data(tmp_path / "data.npz", train=16)))
    network = network_of("darts")
    recipe = resolve(network.genotype, {**chosen(tmp_path), "fused": fused})
    batches = Feeds(data, 8, 0, torch.device("cpu"), torch.float32).training(torch.arange(16), data.augment)
    notes: list[str] = []
    TrainTask(recipe, network, ALONE, train=batches, held=None, notify=notes.append)
    assert notes == (["fused=true has no effect: cells are fused on a GPU only"] if fused else [])


def chosen(folder: Path) -> dict[str, Any]:
    given = training("darts", folder / "data.npz", epochs=1)
    return {key: value for key, value in given.items() if key not in ("in", "genotype")}
