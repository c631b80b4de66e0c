"""Training is fused by default; one line says if a GPU lacks Triton, or if only some cells are fused."""

from __future__ import annotations

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
from softcell.evaluate.task import TrainTask
from softcell.spaces import Network, build_space
from softcell.spaces import training as module
from softcell.spaces.training import warn_if_unfused
from tests.helpers.search_toys import ALONE, TINY, write_data
from tests.helpers.search_toys import training as settings_of

GPU = World(0, 1, 0, torch.device("cuda"))


def network_of(space: str, **settings: Any) -> Network:
    built = build_space(space, {**TINY.get(space, {}), **settings})
    return built.network(sample(built.layout(), 5), (1, 8, 8), 3)


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_fuse", lambda: True)


def said(network: Network, world: World = GPU, precision: str = "bfloat16") -> list[str]:
    notes: list[str] = []
    warn_if_unfused(network, precision, world, notes.append)
    return notes


@pytest.mark.parametrize(
    "space", ["darts", "nos", "nb201", "fullattention", "s1", "s2", "s3", "s4", "nb1shot1-1", "nb1shot1-3"]
)
def test_spaces_whose_cells_are_fused_on_a_gpu(space: str) -> None:
    network = network_of(space)
    assert network.has_fused_cells() and all(network.has_fused_cells())
    assert said(network) == []


def test_training_is_fused_by_default() -> None:
    assert TrainRecipe().fused
    assert resolve(network_of("nb201").genotype, {"recipe": "cifar", "data": "cifar10"}).fused


def test_networks_without_a_fused_form_say_nothing() -> None:
    assert said(network_of("proxyless")) == []
    genotype = notation.parse("|skip_connect~0|+|avg_pool_3x3~0|none~1|+|none~0|none~1|skip_connect~2|")
    network = build_space("nb201", TINY["nb201"]).network(genotype, (1, 8, 8), 3)
    assert not any(network.has_fused_cells()) and said(network) == []


def test_a_gpu_without_triton_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_fuse", lambda: False)
    network = network_of("darts")
    (text,) = said(network)
    assert "pip install triton" in text
    assert said(network, ALONE) == [] and said(network, precision="float64") == []
    assert said(network_of("proxyless")) == [], "no cell here has a fused form"


def test_cells_that_stay_unfused_are_counted() -> None:
    network: Any = network_of("darts")
    norm = next(m for m in network.pre[1].modules() if isinstance(m, nn.BatchNorm2d))
    norm.eval()  # its cell runs module by module while it is frozen
    assert said(network) == [f"1 of {len(network.cells)} cells have no fused form and run module by module"]


def test_a_training_run_on_a_cpu_does_not_mention_it(tmp_path: Path) -> None:
    data = load(str(write_data(tmp_path / "data.npz", train=16)))
    network = network_of("darts")
    recipe = resolve(network.genotype, {**chosen(tmp_path), "fused": True})
    batches = Feeds(data, 8, 0, torch.device("cpu"), torch.float32).training(torch.arange(16), data.augment)
    notes: list[str] = []
    TrainTask(recipe, network, ALONE, train=batches, held=None, notify=notes.append)
    assert notes == []


def chosen(folder: Path) -> dict[str, Any]:
    given = settings_of("darts", folder / "data.npz", epochs=1)
    return {key: value for key, value in given.items() if key not in ("in", "genotype")}
