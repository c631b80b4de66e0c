"""A dry pass finds what a step and a validation pass launch; compiled for sm_90 without a device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.data import load
from softcell.engine.optim import fill_momenta
from softcell.engine.session import open_session
from softcell.kernels.backend import has_triton
from softcell.kernels.warm_up import Compilation, compile_one, dry_launches
from softcell.search import dry_pass, resolve
from softcell.search._meters import Epoch
from softcell.search.build import build_task
from softcell.search.dry_pass import Unlearning, compile_ahead, without_effects
from softcell.search.task import SearchTask
from tests.helpers.kernel_runs import INTERPRETED
from tests.helpers.no_device import HOPPER, all_kernels, take_for_gpu
from tests.helpers.search_toys import same, settings, write_data

pytestmark = [
    pytest.mark.skipif(not has_triton() or INTERPRETED, reason="needs Triton's compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would be launched; see tests/gpu/test_cuda_cold.py"),
]

DARTS = {"cells": 3, "channels": 4, "nodes": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "darts": ("darts", {"space_settings": DARTS, "drop_path": 0.3}),
    "nb201": ("nb201", {"space_settings": {"cells_per_stage": 1, "channels": 4}}),
    "weights first": ("nb201", {"architecture": {"lr": 0.05, "after": 0.5}}),
    "single-level": ("nb201", {"method": "snas", "regime": "single-level"}),
    "unrolled": ("nb201", {"regime": "unrolled"}),
    "planned": ("darts", {"method": "entrannas", "space_settings": DARTS}),
    "itnas": ("nb201", {"method": "itnas", "space_settings": {"cells_per_stage": 1, "channels": 4}}),
    "nos": ("nos", {"method": "nos", "space_settings": {"cells": 3, "channels": 4, "nodes": 1}}),
    "fullattention": (
        "fullattention",
        {
            "method": "fullattention",
            "space_settings": {"layers": 1, "channels": 16, "candidates": ("local_sa_k3_h4", "non_local_sa")},
        },
    ),
}


def make_task(case: str, folder: Path, precision: str = "bfloat16") -> SearchTask:
    """A task of two ranks' size of data: its last batches are shorter than others."""
    space, changes = CASES[case]
    data = folder / "data.npz"
    if not data.exists():
        write_data(data, shape=(16, 16, 3), train=45)
    recipe = resolve(settings(space, data, epochs=2, batch_size=8, precision=precision, **changes))
    with open_session(device="cpu", seed=0, precision=precision, deterministic=False, threads=1) as session:
        dataset = load(recipe.data)
        task = build_task(recipe, dataset, recipe.parts(dataset.train), session, None)
    assert isinstance(task, SearchTask)
    task.begin_epoch(0)
    return task


def launched(run: Callable[[], None]) -> set[Compilation]:
    found: set[Compilation] = set()
    with dry_launches(found.add):
        run()
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_dry_pass_finds_what_a_step_and_a_validation_launch(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, other = (make_task(case, tmp_path) for _ in range(2))
    take_for_gpu(monkeypatch)
    batch = next(iter(task.batches(0, 0)))

    def rehearse() -> None:
        with without_effects(task):
            task.rehearse(batch)

    before = [parameter.clone() for parameter in task.supernet.parameters()], task.state_dict()
    found = launched(rehearse)
    assert same([*task.supernet.parameters()], before[0])
    assert same(task.state_dict(), before[1])

    other.step_state = Unlearning.of(other.step_state)  # what a step learns from values of nowhere is of no use

    def step_and_validate() -> None:
        other.step(next(iter(other.batches(0, 0))))
        other.begin_epoch(1)
        other.step(next(iter(other.batches(1, 0))))
        other._validates.measure(other, Epoch(other.method, 0, False, True))

    needed = launched(step_and_validate)
    assert needed, "nothing was fused"
    assert needed <= found, sorted({job.name for job in needed - found})


@pytest.mark.parametrize("case", ["nb201", "itnas"])
def test_a_dry_pass_finds_what_applies_gradients(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, other = (make_task(case, tmp_path) for _ in range(2))
    for state in (task.step_state, other.step_state):
        for optimiser in (state.weight_optimiser, state.architecture_optimiser):
            if isinstance(optimiser, torch.optim.SGD):  # as on a GPU
                optimiser.param_groups[0]["lr"] = torch.tensor(0.1)
                optimiser.param_groups[0]["foreach"] = False
                fill_momenta(optimiser)
    take_for_gpu(monkeypatch)
    batch = next(iter(task.batches(0, 0)))
    momenta = copy.deepcopy(task.step_state.weight_optimiser.state_dict())
    with without_effects(task):
        found = launched(lambda: task.rehearse(batch))
    assert same(task.step_state.weight_optimiser.state_dict(), momenta)
    needed = launched(lambda: other.step(next(iter(other.batches(0, 0)))))
    assert {"_squares", "_step"} <= {job.name for job in needed}
    assert needed <= found, sorted({job.name for job in needed - found})


def test_kernels_of_a_search_compile_from_what_a_dry_pass_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of each kernel, and a launch finds it in Triton's cache."""
    take_for_gpu(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    task = make_task("nb201", tmp_path)
    batch = next(iter(task.batches(0, 0)))
    with without_effects(task):
        found = launched(lambda: task.rehearse(batch))
    for job in {job.name: job for job in found}.values():
        assert compile_one(job, HOPPER).asm["cubin"]


def test_compiling_ahead_asks_for_all_of_it_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_for_gpu(monkeypatch)
    task = make_task("nb201", tmp_path)
    notes: list[str] = []
    asked: list[int] = []

    def warm_up(run: Callable[[], None], notify: Callable[[str], None]) -> int:
        asked.append(len(launched(run)))
        notify("compiling")
        return asked[0]

    task.notify = notes.append
    monkeypatch.setattr(dry_pass, "launches_kernels", lambda *given: True)
    monkeypatch.setattr(dry_pass, "warm_up_by_run", warm_up)
    compile_ahead(task, next(iter(task.batches(0, 0))))
    assert asked[0] > 20
    assert notes == ["compiling"]
    assert all(not any(cache[0] for cache in kernel.device_caches.values()) for kernel in all_kernels())
