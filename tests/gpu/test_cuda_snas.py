"""SNAS on a CUDA device: samples, drop-path, penalty and credit inside a recorded step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu_steps import continue_without_waiting, search_task, session, warmed

from softcell.search import resolve, search
from tests.helpers.search_toys import settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
DEVICE = "cuda"
RESOURCE = {"preset": "mild", "max_params": "100k"}


@pytest.mark.parametrize("regime", ["single-level", "bilevel"])
@pytest.mark.parametrize("engine", ["eager", "graph"])
@pytest.mark.parametrize("drop_path", [0.0, 0.3])
def test_a_step_never_waits_and_can_be_recorded(regime: str, engine: str, drop_path: float) -> None:
    given = settings("darts", "digits", method="snas", device=DEVICE, engine=engine, regime=regime, threads=0)
    recipe = resolve(given, {"drop_path": drop_path, "resource": RESOURCE})
    notes: list[Any] = []
    with session() as opened:
        task = search_task(recipe, opened, notes)
        task.begin_epoch(1)
        notes.clear()
        ready = warmed(task)
        before = task.method.observer.sums()["credit"]["normal"].clone()
        continue_without_waiting(task, ready)
        after = task.method.observer.sums()["credit"]["normal"]
        assert not torch.equal(before, after), "a recorded step keeps adding credit"
    assert notes == []


def test_a_recorded_search_draws_and_credits_as_an_eager_one(tmp_path: Path) -> None:
    """The temperature, the multiplier and the drop rate move from epoch to epoch: one frozen in would show."""
    rows = {}
    for engine in ("eager", "graph"):
        given = settings("nb201", "digits", method="snas", device=DEVICE, engine=engine, batch_size=64)
        more = {"precision": "float64", "drop_path": 0.3, "resource": RESOURCE}
        rows[engine] = search(resolve(given, more), tmp_path / engine).metrics
    for plain, recorded in zip(rows["eager"], rows["graph"], strict=True):
        for key, value in plain.items():
            if isinstance(value, float) and key != "seconds":
                assert recorded[key] == pytest.approx(value, rel=1e-6, abs=1e-8), key
    credits = [
        [json.loads(line)["tables"]["cell"] for line in (tmp_path / engine / "credit.jsonl").read_text().splitlines()]
        for engine in rows
    ]
    torch.testing.assert_close(torch.tensor(credits[0]), torch.tensor(credits[1]), rtol=1e-4, atol=1e-7)
