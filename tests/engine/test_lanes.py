"""How many runs share a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch

from softcell.engine import interleave as lanes
from softcell.engine.capture import AT_ONCE, POOL, PRIORITIES
from softcell.engine.interleave import Running, interleave


class Lane:
    """Stands in for one of a CUDA device."""

    def __init__(self, device: torch.device) -> None: ...

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.parametrize(("device", "most"), [("cuda", AT_ONCE), ("cpu", 3 * AT_ONCE)])
def test_a_gpu_is_shared_by_no_more_than_have_streams(device: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "Lane", Lane)
    under_way, seen = set[int](), set[int]()

    def run(number: int) -> Running[int]:
        under_way.add(number)
        for _ in range(3):
            seen.add(len(under_way))
            yield
        under_way.remove(number)
        return number

    count = 3 * AT_ONCE
    results = interleave([partial(run, number) for number in range(count)], torch.device(device), at_once=count)
    assert results == list(range(count)) and max(seen) == most
    assert POOL * len(PRIORITIES) >= 4 * AT_ONCE, "a lane, steps, validation and selection have a stream each"
