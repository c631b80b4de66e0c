"""Searches that train architectures one by one use the same fused cells as training runs do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.data import Batches
from softcell.engine.metrics import Tally
from softcell.search import resolve, samplers, search
from softcell.spaces import execution, nb201
from tests.helpers.search_toys import settings, write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("method", ["random", "evolution"])
def test_training_and_validation_are_fused_if_the_recipe_says_so(
    method: str, fused: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: set[tuple[bool, bool]] = set()
    by_kernel: set[bool] = set()
    compiled: list[tuple[Any, ...]] = []

    def plan(x: torch.Tensor) -> bool:
        passes.add((torch.is_grad_enabled(), execution._NETWORKS.get()))
        return False

    def asking(original: Any) -> Any:
        def run(*given: Any, by_kernel: bool = False) -> Any:
            seen.add(by_kernel)
            return original(*given)

        seen = by_kernel
        return run

    monkeypatch.setattr(nb201, "plan_network", plan)
    monkeypatch.setattr(Batches, "finish", asking(Batches.finish))
    monkeypatch.setattr(Tally, "update", asking(Tally.update))
    monkeypatch.setattr(samplers, "compile_network", lambda network, *given: compiled.append((id(network), *given[:3])))
    own = {"samples": 2} if method == "random" else {"population": 1, "tournament": 1, "samples": 2}
    recipe = resolve(settings("nb201", data, method=method, epochs=2, method_settings=own, fused=fused))
    search(recipe, tmp_path / "run")
    assert passes >= {(True, fused), (False, fused)} and (True, not fused) not in passes
    assert (True in by_kernel) == fused, "batches and metrics of validation are not counted by kernels"
    # Once for each of the two networks, before its first step; the validation split's batch may be larger.
    assert [given[1] for given in compiled] == ([recipe.batch_size] * 2 if fused else [])
    assert len({given[0] for given in compiled}) == len(compiled)
