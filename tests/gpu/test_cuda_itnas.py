"""IT-NAS on a CUDA device: Lite-Transformers, their recomputation and the selecting pass inside recorded steps."""

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


@pytest.mark.parametrize("space", ["nb201", "darts"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "own", [{}, {"recompute": False}, {"token_norm": False}, {"shared": True}, {"feed_forward": False}], ids=str
)
def test_a_step_never_waits_and_can_be_recorded(space: str, precision: str, own: dict[str, bool]) -> None:
    given = settings(space, "digits", method="itnas", device=DEVICE, engine="graph", threads=0)
    more = {"method_settings": own, "precision": precision, "resource": {"preset": "mild"}}
    recipe = resolve(given, more)
    notes: list[Any] = []
    with session(precision) as opened:
        task = search_task(recipe, opened, notes)
        task.begin_epoch(1)
        notes.clear()
        ready = warmed(task)
        before = next(task.method.parameters()).clone()
        continue_without_waiting(task, ready)
        assert not torch.equal(before, next(task.method.parameters())), "a recorded step keeps learning"
    assert notes == []


@pytest.mark.parametrize("own", [{}, {"token_norm": False, "aggregate": "log-mean"}], ids=str)
@pytest.mark.parametrize("space", ["nb201", "darts", "nb1shot1-1"])
def test_a_recorded_search_selects_as_an_eager_one(space: str, own: dict[str, Any], tmp_path: Path) -> None:
    rows, genotypes = {}, {}
    for engine in ("eager", "graph"):
        given = settings(space, "digits", method="itnas", device=DEVICE, engine=engine, batch_size=64)
        result = search(resolve(given, {"precision": "float64", "method_settings": own}), tmp_path / engine)
        rows[engine], genotypes[engine] = result.metrics, result.genotype
    assert genotypes["eager"] == genotypes["graph"]
    for plain, recorded in zip(rows["eager"], rows["graph"], strict=True):
        for key, value in plain.items():
            if isinstance(value, float) and key != "seconds":
                assert recorded[key] == pytest.approx(value, rel=1e-6, abs=1e-8), key


def test_a_deterministic_search_repeats(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        given = settings("darts", "digits", method="itnas", device=DEVICE, batch_size=64, deterministic=True, epochs=1)
        found.append(search(resolve(given, {"precision": "float32"}), tmp_path / name))
    assert found[0].genotype == found[1].genotype
    assert found[0].metrics[-1]["entropy"] == found[1].metrics[-1]["entropy"]
