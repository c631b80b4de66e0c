"""NOS on a CUDA device: heterogeneous cells and a teacher in a recorded step, equal to an eager one and to a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu_steps import continue_without_waiting, search_task, session, warmed

from softcell.arch import WeightMix
from softcell.nn.classifiers import ResNet18
from softcell.search import resolve, search
from softcell.spaces.nos import NosSpace
from softcell.spaces.teacher import register_teacher
from tests.helpers.search_toys import settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
DEVICE = "cuda"


def guided(**changes: Any) -> dict[str, Any]:
    """A guided NOS search on digits."""
    torch.manual_seed(0)
    register_teacher("toy", ResNet18(width=4).build(1, 10))
    base = settings("darts", "digits", method="nos", device=DEVICE, batch_size=64, **changes)
    own = {"space": "nos", "space_settings": {"cells": 3, "channels": 4, "nodes": 2}}
    return {**base, **own, "guide": {"teacher": "toy", "weight": 10.0}}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_a_guided_step_never_waits_and_can_be_recorded(engine: str, precision: str) -> None:
    recipe = resolve(guided(engine=engine, threads=0, precision=precision))
    notes: list[Any] = []
    with session(precision) as opened:
        task = search_task(recipe, opened, notes)
        task.begin_epoch(1)
        ready = warmed(task)
        before = task.objective.gauges()["guide_loss"].clone()
        continue_without_waiting(task, ready)
        after = task.objective.gauges()["guide_loss"]
        assert float(after[1] - before[1]) == 4, "two steps, two levels each"
    assert notes == []


def test_a_recorded_guided_search_is_the_eager_one(tmp_path: Path) -> None:
    rows = {}
    for engine in ("eager", "graph"):
        rows[engine] = search(resolve(guided(engine=engine), {"precision": "float64"}), tmp_path / engine).metrics
    for plain, recorded in zip(rows["eager"], rows["graph"], strict=True):
        for key, value in plain.items():
            if isinstance(value, float) and key != "seconds":
                assert recorded[key] == pytest.approx(value, rel=1e-6, abs=1e-8), key


def test_heterogeneous_cells_compute_on_a_gpu_what_they_compute_on_a_cpu() -> None:
    space = NosSpace(cells=3, channels=4, nodes=2)
    layout = space.layout()
    torch.manual_seed(0)
    supernet, x = space.supernet((3, 9, 8), 5).double(), torch.randn(4, 3, 9, 8, dtype=torch.float64)
    weights = {table.name: torch.softmax(torch.randn(table.shape, dtype=torch.float64), 1) for table in layout.tables}
    outcomes = []
    for device in ("cpu", DEVICE):
        moved = supernet.to(device)
        y = moved(x.to(device), WeightMix(layout, {name: w.to(device) for name, w in weights.items()}))
        gradients = torch.autograd.grad(y.square().sum(), list(moved.parameters()))
        outcomes.append([tensor.cpu() for tensor in (y, *gradients)])
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
