"""EnTranNAS on a CUDA device: plans that do not stall a step, recordings by plan, and the same search again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu_steps import continue_without_waiting, search_task, session, warmed

from softcell.engine.capture import CapturedStep
from softcell.search import resolve, search
from tests.helpers.search_toys import remains, same, settings, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
DEVICE = "cuda"
METHODS = ("entrannas", "entrannas-dst")


def given(method: str, space: str = "darts", **changes: Any) -> dict[str, Any]:
    return settings(space, "digits", method=method, device=DEVICE, threads=0, child_every=0, **changes)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_recorded_step_never_waits_for_the_device(method: str, fused: bool) -> None:
    """The architecture hardly moves, so that its plan is recorded; then nothing may ask the device for a value."""
    recipe = resolve(given(method, engine="graph", fused=fused, architecture={"lr": 1e-9}))
    notes: list[Any] = []
    with session() as opened:
        task = search_task(recipe, opened, notes)
        task.begin_epoch(0)
        first, *ready = warmed(task, epoch=0, more=4)
        task.step(first)
        assert isinstance(task._run, CapturedStep)
        assert len(task._run._graphs) == 1
        continue_without_waiting(task, ready)  # waits for an event of the step before, never for the device as a whole
    assert notes == []


def test_each_derivation_has_its_recording_and_the_search_learns(tmp_path: Path) -> None:
    recipe = resolve(given("entrannas", engine="graph", epochs=6, batch_size=64))
    result = search(recipe, tmp_path / "run")
    assert result.genotype is not None
    assert result.metrics[-1]["train_loss"] < result.metrics[0]["train_loss"]


@pytest.mark.parametrize("method", METHODS)
def test_with_a_resting_architecture_recorded_and_eager_searches_are_the_same(method: str, tmp_path: Path) -> None:
    """Where the derivation does not change, one step late is not late at all."""
    rows = {}
    for engine in ("eager", "graph"):
        recipe = resolve(
            given(method, engine=engine, batch_size=64, architecture={"lr": 1e-9}), {"precision": "float64"}
        )
        rows[engine] = search(recipe, tmp_path / engine).metrics
    for plain, recorded in zip(rows["eager"], rows["graph"], strict=True):
        for key, value in plain.items():
            if isinstance(value, float) and key != "seconds":
                assert recorded[key] == pytest.approx(value, rel=1e-6, abs=1e-8), key


@pytest.mark.parametrize("method", METHODS)
def test_a_recorded_search_repeats_bit_by_bit(method: str, tmp_path: Path) -> None:
    recipe = resolve(given(method, engine="graph", batch_size=64, deterministic=True))
    for name in ("first", "second"):
        search(recipe, tmp_path / name)
    assert remains(tmp_path / "first") == remains(tmp_path / "second")
    assert same(state_of(tmp_path / "first"), state_of(tmp_path / "second"))
