"""A schedule runs its steps in order on named tensors, and calls compiled kernels directly from the second run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.kernels.schedule import Name, Schedule, StandIn

CPU = torch.device("cpu")


class Kernel:
    """Adds a table and a number to x, in place of a kernel of Triton's; counts how often its launcher ran."""

    arg_names = ("x", "table", "number", "BLOCK")

    def __init__(self) -> None:
        self.launched: list[dict[str, int]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        assert grid == (2, 1, 1)

        def run(*arguments: Any, **options: int) -> Compiled:
            self.launched.append(options)
            add(*arguments)
            return Compiled()

        return run


class Compiled:
    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return add


def add(x: Tensor, table: Tensor, number: float, block: int) -> None:
    x += table.flatten() + number


def planned(kernel: Kernel) -> Schedule:
    schedule = Schedule(CPU, {"given": torch.float32})
    y = schedule.new("y", 5, torch.float32, zeroed=True)
    rest = schedule.view("rest", y, 3)
    schedule.launch(kernel, (2,), rest, schedule.table([(1, 2)]), BLOCK=16, number=0.5, num_warps=4)
    schedule.launch(kernel, (2,), Name("given"), schedule.table([(1, 2)]), 1.5, BLOCK=16)
    schedule.free(rest)
    return schedule


def test_later_runs_call_the_compiled_kernel_with_their_own_tensors() -> None:
    kernel = Kernel()
    schedule = planned(kernel)
    for run in range(3):
        tensors = {"given": torch.full((2,), float(run))}
        schedule.run(tensors)
        assert tensors["y"].tolist() == [0, 0, 0, 1.5, 2.5]
        assert tensors["given"].tolist() == [run + 2.5, run + 3.5]
        assert "rest" not in tensors
    assert kernel.launched == [{"num_warps": 4}, {}]


def test_stand_ins_have_the_type_and_alignment_of_tensors() -> None:
    schedule = planned(Kernel())
    table = StandIn(torch.int32, 0)
    first, second = (schedule.stand_ins(launch) for launch in schedule.launches)
    assert first == [StandIn(torch.float32, 12), table, 0.5, 16]
    assert second == [StandIn(torch.float32, 0), table, 1.5, 16]


def test_a_missing_argument_is_an_error() -> None:
    with pytest.raises(KeyError, match="number"):
        Schedule(CPU, {}).launch(Kernel(), (2,), Name("x"), 0, BLOCK=16)


def test_what_runs_beside_runs_no_later_than_when_it_is_joined_and_keeps_its_tensors() -> None:
    kernel = Kernel()
    schedule = Schedule(CPU, {})
    first = schedule.new("first", 2, torch.float32, zeroed=True)
    last = schedule.new("last", 2, torch.float32, zeroed=True)
    with schedule.beside():
        inner = schedule.new("inner", 2, torch.float32, zeroed=True)
        schedule.launch(kernel, (2,), inner, schedule.table([(1, 2)]), 0.0, BLOCK=16)
        schedule.launch(kernel, (2,), first, schedule.table([(1, 2)]), 0.0, BLOCK=16)
        schedule.free(inner)
    seen: list[tuple[list[float], bool]] = []
    schedule.launch(kernel, (2,), last, schedule.table([(1, 2)]), 1.0, BLOCK=16)
    schedule.free(first, last)
    schedule.new("kept", 1, torch.float32)
    schedule._steps.append(lambda tensors: seen.append((tensors["first"].tolist(), "last" in tensors)))
    schedule.join()
    for _ in range(2):
        tensors: dict[str, Tensor] = {}
        schedule.run(tensors)
        assert list(tensors) == ["kept"]  # the others were freed, those of launches beside at the join
    assert seen == [([0.0, 0.0], False)] * 2


def test_a_join_without_anything_beside_is_no_step() -> None:
    schedule = Schedule(CPU, {})
    schedule.join()
    assert not schedule._steps
