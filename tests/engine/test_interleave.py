"""How many runs share a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch

from softcell.engine import interleave as interleaving
from softcell.engine.capture import MAX_SHARING_RUNS, STREAM_POOL, STREAM_PRIORITIES
from softcell.engine.interleave import Running, Steps, drain, interleave


class RunState:
    """Stands in for one of a CUDA device."""

    def __init__(self, device: torch.device) -> None: ...

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.parametrize(("device", "most"), [("cuda", MAX_SHARING_RUNS), ("cpu", 3 * MAX_SHARING_RUNS)])
def test_a_gpu_is_shared_by_no_more_than_have_streams(device: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaving, "RunState", RunState)
    under_way, seen = set[int](), set[int]()

    def steps(number: int) -> Steps[int]:
        for _ in range(3):
            seen.add(len(under_way))
            yield
        return number

    def run(number: int) -> Running[int]:
        under_way.add(number)
        result: int = yield steps(number)
        under_way.remove(number)
        return result

    count = 3 * MAX_SHARING_RUNS
    results = interleave([partial(run, number) for number in range(count)], torch.device(device), at_once=count)
    assert results == list(range(count)) and max(seen) == most
    assert STREAM_POOL * len(STREAM_PRIORITIES) >= 4 * MAX_SHARING_RUNS, (
        "run, steps, validation, selection: a stream each"
    )


def two_loops(log: list[str], fail_at: str = "") -> Running[list[str]]:
    """Two loops of two steps each; the second begins with what the first returned."""

    def steps(name: str) -> Steps[str]:
        for number in range(2):
            log.append(f"{name}{number}")
            if log[-1] == fail_at:
                raise ValueError(fail_at)
            yield
        return name.upper()

    found = []
    try:
        found.append((yield steps("a")))
        found.append((yield steps(found[0].lower() + "b")))
    except ValueError as error:
        log.append(f"failed at {error}")
        raise
    finally:
        log.append("closed")
    return found


def test_a_run_may_have_several_loops_one_after_the_other() -> None:
    alone: list[str] = []
    assert drain(two_loops(alone)) == ["A", "AB"]
    assert alone == ["a0", "a1", "ab0", "ab1", "closed"]
    first, second = list[str](), list[str]()
    results = interleave([partial(two_loops, first), partial(two_loops, second)], torch.device("cpu"), 2)
    assert results == [["A", "AB"]] * 2 and first == second == alone


def test_an_error_of_a_step_is_raised_inside_the_run_that_made_it() -> None:
    log: list[str] = []
    with pytest.raises(ValueError, match="ab0"):
        drain(two_loops(log, fail_at="ab0"))
    assert log == ["a0", "a1", "ab0", "failed at ab0", "closed"]
    other: list[str] = []
    failed, done = interleave([partial(two_loops, other, "a1"), partial(two_loops, [])], torch.device("cpu"), 2)
    assert isinstance(failed, ValueError) and other == ["a0", "a1", "failed at a1", "closed"]
    assert done == ["A", "AB"], "one that fails does not stop the others"


def test_an_interrupt_within_a_step_unwinds_the_run() -> None:
    log: list[str] = []

    def steps() -> Steps[None]:
        yield
        raise KeyboardInterrupt

    def run() -> Running[None]:
        try:
            yield steps()
        except KeyboardInterrupt:
            log.append("interrupted")
            raise

    with pytest.raises(KeyboardInterrupt):
        drain(run())
    assert log == ["interrupted"]
