"""Every method in every space on a CUDA device: steps never wait and are recorded; exceptions are listed here."""

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from test_gpu_steps import continue_without_waiting, search_task, session, step_without_waiting, warmed

from softcell.engine.capture import CapturedStep
from softcell.methods import METHODS
from softcell.methods.base import Sampler
from softcell.search import resolve
from softcell.spaces import SPACES
from softcell.testing import tiny_space
from tests.helpers.search_toys import settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
SEARCHING = [name for name in METHODS if not issubclass(METHODS.get(name), Sampler)]  # a sampler has no supernet
SINGLE = {"method_settings": {"paths": "single"}}
"""IT-NAS on one drawn path per step."""
CASES = [
    *((method, space, {}) for method in SEARCHING for space in SPACES),
    *(("itnas", space, SINGLE) for space in SPACES if not any(t.contests for t in tiny_space(space).layout().tables)),
]
ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "random": {"samples": 2},
    "evolution": {"samples": 2, "population": 1, "tournament": 1},
}
"""Methods that train architectures one by one, in fused cells."""
DRAWN = "rarely repeat"


def draws_paths(method: str, settings: dict[str, Any]) -> bool:
    """Those that draw one of many paths per step: nothing else may go unrecorded."""
    return method == "spos" or (method == "itnas" and settings == SINGLE)


def settings_of(method: str, space: str) -> dict[str, Any]:
    """A search in a space of the smallest size, with recorded steps."""
    tiny: Any = tiny_space(space)
    sizes = {field.name: getattr(tiny, field.name) for field in dataclasses.fields(tiny) if field.init}
    given: dict[str, Any] = {**settings("nb201", "digits", device="cuda", threads=0), "space": space, "method": method}
    return {**given, "space_settings": sizes, "engine": "graph", "split": {"weights": 240, "validation": 240}}


@pytest.mark.parametrize(
    ("method", "space", "own"), CASES, ids=[f"{m}{'-single' if own else ''}-{s}" for m, s, own in CASES]
)
def test_a_step_of_every_pair_is_recorded_and_never_waits(method: str, space: str, own: dict[str, Any]) -> None:
    given = {**settings_of(method, space), **own}
    given["architecture"] = {"lr": 1e-6}  # a derivation that rests, for methods that record one step per derivation
    notes: list[Any] = []
    with session() as opened:
        task = search_task(resolve(given), opened, notes)
        step_without_waiting(task)
        reasons = [str(event) for event in notes if "record" in str(event) or "CUDA graph" in str(event)]
        if draws_paths(method, own):
            assert len(reasons) == 1 and DRAWN in reasons[0]
        else:
            assert reasons == [], "nothing else may go unrecorded"
            assert isinstance(task._run, CapturedStep) and task._run._graphs
        assert all(bool(value.isfinite().all()) for value in task.supernet.state_dict().values())
        assert task.failed() is None


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("method", ONE_BY_ONE)
def test_architectures_trained_one_by_one_are_recorded_and_never_wait(method: str, space: str, precision: str) -> None:
    given = {**settings_of(method, space), "epochs": 1, "method_settings": ONE_BY_ONE[method], "precision": precision}
    notes: list[Any] = []
    before: list[weakref.ref[Any]] = []
    with session(precision) as opened:
        task = search_task(resolve(given), opened, notes)
        for epoch in range(2):
            task.begin_epoch(epoch)
            assert all(one() is None for one in before), "an architecture's memory is free when the next one begins"
            continue_without_waiting(task, warmed(task, epoch))
            assert isinstance(task._run, CapturedStep) and task._run._graphs
            assert all(bool(value.isfinite().all()) for value in task._network.state_dict().values())
            assert task.end_epoch(epoch)["val_count"] == 240
            before = [weakref.ref(task._network), weakref.ref(task._run), *map(weakref.ref, task._network.parameters())]
    reasons = [str(event) for event in notes if "no fused form" not in str(event)]
    assert reasons == [], "nothing goes unrecorded, and kernels are compiled ahead"


@pytest.mark.parametrize("space", ["nb201", "darts"])
def test_random_search_learns_the_same_in_fused_cells_and_module_by_module(space: str) -> None:
    found: list[dict[str, Any]] = []
    for fused in (True, False):
        given = {**settings_of("random", space), "epochs": 2, "method_settings": {"samples": 1}, "fused": fused}
        with session() as opened:
            task = search_task(resolve({**given, "precision": "float32"}), opened, [])
            for epoch in range(2):
                task.begin_epoch(epoch)
                for one in task.batches(epoch, 0):
                    task.step(one)
                row = task.end_epoch(epoch)
            found.append(row)
    assert found[0]["train_loss"] == pytest.approx(found[1]["train_loss"], rel=0.05)
    assert found[0]["val_loss"] == pytest.approx(found[1]["val_loss"], rel=0.2)
