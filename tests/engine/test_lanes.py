"""How many runs share a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch

from softcell.engine import interleave as lanes
from softcell.engine.capture import MAX_SHARING_RUNS, STREAM_POOL, STREAM_PRIORITIES
from softcell.engine.interleave import Running, interleave


class RunState:
    """Stands in for one of a CUDA device."""

    def __init__(self, device: torch.device) -> None: ...

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.parametrize(("device", "most"), [("cuda", MAX_SHARING_RUNS), ("cpu", 3 * MAX_SHARING_RUNS)])
def test_a_gpu_is_shared_by_no_more_than_have_streams(device: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "RunState", RunState)
    under_way, seen = set[int](), set[int]()

    def run(number: int) -> Running[int]:
        under_way.add(number)
        for _ in range(3):
            seen.add(len(under_way))
            yield
        under_way.remove(number)
        return number

    count = 3 * MAX_SHARING_RUNS
    results = interleave([partial(run, number) for number in range(count)], torch.device(device), at_once=count)
    assert results == list(range(count)) and max(seen) == most
    assert STREAM_POOL * len(STREAM_PRIORITIES) >= 4 * MAX_SHARING_RUNS, (
        "run, steps, validation, selection: a stream each"
    )
