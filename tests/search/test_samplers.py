"""Searches that train architectures one by one use the same fused cells as training runs do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from softcell.data import Batches
from softcell.engine.metrics import Tally
from softcell.search import resolve, samplers, search
from softcell.spaces import execution, nb201
from softcell.spaces.teacher import register_teacher
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


def test_a_note_of_one_kind_hides_none_of_another(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling ahead speaks first; why steps are not captured is said once for all architectures."""

    def compile_network(*given: Any) -> None:
        given[-1]("compiling 2 kernels on 1 core")
        given[-1]("compiled 2 kernels in 3 s")

    monkeypatch.setattr(samplers, "compile_network", compile_network)
    monkeypatch.setattr(samplers, "warn_if_unfused", lambda network, precision, world, notify: notify("unfused"))
    notes: list[str] = []
    own = {"engine": "graph", "method_settings": {"samples": 2}}
    recipe = resolve(settings("nb201", data, method="random", epochs=1, **own))
    search(recipe, tmp_path / "run", on_event=lambda event: notes.append(getattr(event, "text", "")))
    assert sum("needs a CUDA device" in text for text in notes) == 1
    assert notes.count("unfused") == 1
    assert notes.count("compiling 2 kernels on 1 core") == notes.count("compiled 2 kernels in 3 s") == 2


def test_a_teacher_runs_module_by_module_beside_fused_cells(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks read its layers, and fused cells call none; nor are kernels compiled ahead for it."""
    seen: dict[str, set[bool]] = {"teacher": set(), "student": set()}

    class Teacher(nn.Module):
        def features(self, x: torch.Tensor) -> list[torch.Tensor]:
            seen["teacher"].add(execution._NETWORKS.get())
            return [nn.functional.avg_pool2d(x, side) for side in (1, 2, 4)]

    def plan(x: torch.Tensor) -> bool:
        if torch.is_grad_enabled():
            seen["student"].add(execution._NETWORKS.get())
        return False

    monkeypatch.setattr(nb201, "plan_network", plan)
    register_teacher("seen_in_samplers", Teacher())
    own = {"method_settings": {"samples": 1}, "guide": {"teacher": "seen_in_samplers", "weight": 1.0}}
    search(resolve(settings("nb201", data, method="random", epochs=1, **own)), tmp_path / "run")
    assert True in seen["student"] and seen["teacher"] == {False}
