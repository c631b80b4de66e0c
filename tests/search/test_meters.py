"""An epoch's metrics come from a list of meters, and checkpoints keep the keys that earlier versions wrote."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from softcell.data import load
from softcell.engine.session import open_session
from softcell.search import resolve
from softcell.search._meters import EpochMeter, mean_entropy
from softcell.search.build import build_task
from softcell.search.task import SearchTask
from tests.helpers.search_toys import settings, write_data


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data.npz")


def task_of(data: Path, **given: Any) -> SearchTask:
    recipe = resolve(settings("nb201", data, **given))
    dataset = load(recipe.data)
    with open_session(device="cpu", seed=0, precision="float32", deterministic=False, threads=1) as session:
        made = build_task(recipe, dataset, recipe.parts(dataset.train), session, None)
    assert isinstance(made, SearchTask)
    made.begin_epoch(0)
    return made


class Counting(EpochMeter):
    key: ClassVar[str | None] = "counting"

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def measure(self, task: SearchTask, epoch: Any) -> dict[str, Any]:
        self.epochs.append(epoch.number)
        return {"counted": len(self.epochs), "earlier": "train_loss" in epoch.metrics}

    def records(self, task: SearchTask, epoch: Any) -> dict[str, Any]:
        return {"counts": {"epoch": epoch.number, "all": "later" in epoch.metrics}}

    def state_dict(self) -> list[int]:
        return list(self.epochs)

    def load_state_dict(self, state: list[int]) -> None:
        self.epochs = list(state)


class Later(EpochMeter):
    def measure(self, task: SearchTask, epoch: Any) -> dict[str, Any]:
        return {"later": epoch.metrics["counted"]}


def test_meters_measure_in_order_and_their_records_are_joined(data: Path) -> None:
    task, counting = task_of(data), Counting()
    task._meters = (*task._meters, counting, Later())
    found = task.end_epoch(0)
    assert found["counted"] == found["later"] == 1 and found["earlier"] is True
    assert found["_records"]["counts"] == {"epoch": 0, "all": True}
    assert found["_records"]["architecture"]["epoch"] == 0
    twin, restored = task_of(data), Counting()
    twin._meters = (*twin._meters, restored)
    twin.load_state_dict(task.state_dict())
    assert restored.epochs == [0]


def test_checkpoints_have_the_keys_of_earlier_versions(data: Path) -> None:
    state = task_of(data, method="snas").state_dict()
    assert set(state) == {
        *("supernet", "method", "objective", "resource", "weight_optimiser", "architecture_optimiser"),
        *("collapse", "budget", "plans", "step", "_local"),
    }
    assert set(state["_local"]) == {"meter", "diagnostics", "objective"}
    assert set(state["_local"]["diagnostics"]) == {"credit"}
    assert set(state["collapse"]) == {"streaks", "warned", "healthy", "kept"}


def test_sums_of_an_observer_are_restored_within_an_epoch_and_zeroed_before_the_next(data: Path) -> None:
    task, twin = task_of(data, method="snas"), task_of(data, method="snas")
    draft, *_ = task.batches(0, 0)
    task.step(draft)
    assert task.method.observer is not None and twin.method.observer is not None
    sums = task.method.observer.sums()["credit"]["cell"]
    assert bool(sums.any())
    twin.load_state_dict(task.state_dict())
    assert torch.equal(twin.method.observer.sums()["credit"]["cell"], sums)
    twin.begin_epoch(1)
    assert not bool(twin.method.observer.sums()["credit"]["cell"].any())


def test_mean_entropy_matches_all_choices() -> None:
    even, sure = torch.full((1, 4), 0.25), torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 3)
    assert mean_entropy([even, sure]) == pytest.approx(float(torch.tensor(4.0).log()) / 4)
