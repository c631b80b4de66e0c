"""Settings of fused cells: every one gives what the modules give, and captured steps with it the same bits each time.

TRITON_INTERPRET=1 pytest tests/kernels/test_kernel_settings.py
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.supernet import CHANGES, FEWER, changed
from softcell.kernels import cell as cell_kernels
from softcell.kernels import schedule
from softcell.kernels.backend import cell_settings, current_settings, default_settings, has_triton
from softcell.kernels.norm import combine, combine_reference
from softcell.kernels.schedule import uses_second_stream
from softcell.spaces import execution
from softcell.spaces.cell import MixedCell
from softcell.spaces.execution import modules_only
from tests.helpers.kernel_cells import OneSite, build_cell, fuse, outcome, random_inputs, require_same
from tests.helpers.kernel_runs import DEVICE, INTERPRETED, MARKS
from tests.helpers.no_device import HOPPER, take_for_gpu

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
COMPILES = pytest.mark.skipif(not has_triton() or INTERPRETED, reason="needs Triton's compiler")
CELLS = [("nb201", 3, (7, 6)), ("darts", 2, (4, 5))]
CELLS += [] if INTERPRETED else [("nb201", 16, (32, 32)), ("nb201", 64, (8, 8)), ("darts", 16, (16, 16))]
SETTINGS = {"fewer reads": FEWER, "small blocks": {"sums_values": 64, "splits": 2}}


def with_tail(function: Any) -> Any:
    for mark in MARKS:
        function = mark(function)
    return function


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """Memory that nothing was written to is not a number, so that reading it shows."""
    torch.use_deterministic_algorithms(INTERPRETED)
    yield
    torch.use_deterministic_algorithms(False)


def test_settings_hold_within_their_context_only() -> None:
    with cell_settings(splits=3):
        assert current_settings().splits == 3
        with cell_settings(second_stream=False):
            assert (current_settings().splits, current_settings().second_stream) == (3, False)
        with pytest.raises(TypeError), cell_settings(unknown=1):
            pass
    assert current_settings() == default_settings


def test_a_cpu_has_no_second_stream() -> None:
    assert default_settings.second_stream
    assert not uses_second_stream(torch.device("cpu"))
    cell = build_cell("nb201").double()
    states, weights = random_inputs(cell, (5, 5), 2)
    fuse(cell)(states, weights.flatten())[-1].sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in cell.parameters())


class Recorder:
    """Stands for a CUDA stream, or an event: notes what waits for what."""

    cuda_stream = 1

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait_stream(self, other: Recorder) -> None:
        self._log.append(f"{self._name} waits for {other._name}")

    def wait_event(self, event: Recorder) -> None:
        self._log.append(f"{self._name} waits for an event")

    def record(self, stream: Recorder) -> None:
        self._log.append(f"event on {stream._name}")


def test_a_backward_pass_waits_for_earlier_cells_and_at_its_end_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    first, second = Recorder(log, "first"), Recorder(log, "second")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: first)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: Recorder(log, "event"))
    monkeypatch.setattr(schedule, "second_stream", lambda device, number: second)
    monkeypatch.setattr(cell_kernels, "uses_second_stream", lambda device: True)
    monkeypatch.setattr(schedule, "uses_second_stream", lambda device: True)
    cells = [build_cell("nb201", 0) for _ in range(4)]
    states, weights = random_inputs(cells[0], (5, 5), 2, torch.float32)
    value = states[0]
    for cell in cells:
        value = fuse(cell)([value], weights.flatten())[-1]
    torch.autograd.grad(value.sum(), [p for cell in cells for p in cell.parameters()])
    assert log == [
        *["second waits for first", "event on second"] * 3,
        "first waits for an event",
        *["second waits for first", "event on second"],
        "first waits for an event",
        *["first waits for second"] * 4,
    ]
    assert not any(waiting for _, waiting in schedule._waiting.values()), "no memory is kept"
    schedule._waiting.clear()


@with_tail
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize(("space", "channels", "size"), CELLS)
def test_a_cell_with_other_settings_equals_its_modules(
    space: str, channels: int, size: tuple[int, int], name: str, training: bool, filled_memory: None
) -> None:
    cell = build_cell(space, channels=channels).train(training)
    found = []
    for device, dtype in ((DEVICE, torch.float32), ("cpu", torch.float64)):
        own = copy.deepcopy(cell).to(device, dtype)
        states, weights = random_inputs(own, size, 5, torch.float32)
        inputs = [t.to(device, dtype).requires_grad_() for t in (*states, weights)]
        if dtype == torch.float32:
            with cell_settings(**SETTINGS[name]):
                nodes = fuse(own)(inputs[:-1], inputs[-1].flatten())
                found.append(outcome(own, nodes[own.inputs :], inputs))
        else:
            with modules_only():
                found.append(outcome(own, own(inputs[:-1], OneSite(inputs[-1]), 0)[own.inputs :], inputs))
    mine, theirs = ({key: value.cpu() for key, value in one.items()} for one in found)
    require_same(mine, theirs, tolerance=1e-4)


@with_tail
def test_reading_ahead_and_dropped_paths_equal_the_twin() -> None:
    program = fuse(build_cell("nb201", channels=3)).program
    generator = torch.Generator().manual_seed(2)
    buffer = torch.randn(program.planes, 4, 5, 7, 3, generator=generator)
    moments, mix = torch.rand(3, program.planes, 3, generator=generator), torch.rand(40, generator=generator)
    given = torch.randint(3, (20, 4), generator=generator).float()
    for factors in (None, given):
        for j, terms in enumerate(program.terms):
            mine, theirs = buffer.to(DEVICE), buffer.clone()
            moved = None if factors is None else factors.to(DEVICE)
            with cell_settings(reads_ahead=True):
                combine(mine, moments.to(DEVICE), mix.to(DEVICE), moved, program.inputs + j, terms)
            combine_reference(theirs, moments, mix, factors, program.inputs + j, terms)
            torch.testing.assert_close(mine.cpu(), theirs)


def copied_along(space: str, *, training: bool, drops: bool, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """What a cell gives with copies by other kernels and with separate ones, from maps that are channels-last."""
    cell = build_cell(space, channels=6).train(training)
    found = []
    for along in (True, False):
        own = copy.deepcopy(cell).to(DEVICE)
        states, weights = random_inputs(own, (7, 6), 5, torch.float32)
        inputs = [s.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last) for s in states]
        inputs = [t.requires_grad_() for t in (*inputs, weights.to(DEVICE))]
        factors = torch.arange(len(own.table) * 5, device=DEVICE).remainder(3).view(-1, 5).float() if drops else None
        with cell_settings(copies_along=along):
            *_, last = fuse(own)(inputs[:-1], inputs[-1].flatten(), factors)
            slope = torch.randn(last.shape, generator=torch.Generator().manual_seed(1)).to(last)
            slope = slope.contiguous(memory_format=torch.channels_last)
            gradients = torch.autograd.grad(last, [*inputs, *own.parameters()], slope)
        found.append({"last": last, **{str(i): g for i, g in enumerate(gradients)}, **dict(own.named_buffers())})
    return found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("drops", [True, False])
def test_inputs_and_output_gradients_are_copied_by_kernels_that_read_them(
    training: bool, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    combine_gradient = cell_kernels.combine_gradient

    def noting(run: Any) -> Any:
        def noting_pool(*given: Any, copies: bool, **named: Any) -> None:
            seen.extend(["input"] * copies)
            run(*given, copies=copies, **named)

        return noting_pool

    def noting_gradient(*given: Any, arrived: Tensor | None, **named: Any) -> None:
        seen.extend(["gradient"] * (arrived is not None))
        combine_gradient(*given, arrived=arrived, **named)

    for name in ("pool", "convolve_and_pool"):
        monkeypatch.setattr(cell_kernels, name, noting(getattr(cell_kernels, name)))
    monkeypatch.setattr(cell_kernels, "combine_gradient", noting_gradient)
    for together in (True, False):
        seen.clear()
        with cell_settings(pools_together=together):
            mine, theirs = copied_along("nb201", training=training, drops=drops, dtype=torch.float32)
        assert seen == ["input", "gradient"]
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@with_tail
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("space", ["nb201", "darts"])
def test_copies_by_other_kernels_give_the_same_bits(
    space: str, dtype: torch.dtype, drops: bool, training: bool, filled_memory: None
) -> None:
    mine, theirs = copied_along(space, training=training, drops=drops, dtype=dtype)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@with_tail
@pytest.mark.parametrize("along", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "size"), [(3, (5, 7)), (16, (32, 32)), (48, (9, 11)), (64, (8, 8)), (65, (4, 4))])
def test_pools_in_the_launch_of_convolutions_give_the_same_bits(
    channels: int, size: tuple[int, int], dtype: torch.dtype, along: bool, filled_memory: None
) -> None:
    if INTERPRETED and channels * size[0] * size[1] > 5000:
        pytest.skip("takes minutes in the interpreter")
    cell = build_cell("nb201", channels=channels).to(DEVICE)
    states, weights = random_inputs(cell, size, 3, torch.float32)
    x = states[0].to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)
    found = []
    for together in (True, False):
        with cell_settings(pools_together=together, copies_along=along):
            found.append(fuse(copy.deepcopy(cell))([x], weights.to(DEVICE).flatten()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@with_tail
@pytest.mark.parametrize("number", [0, 1])
def test_averages_that_are_normalised_are_measured_in_the_launch_of_convolutions(number: int) -> None:
    """Cells without strides and with. The two launches add up a tile in other orders, so sums differ by rounding."""
    cell = build_cell("darts", number, candidates=("none", "avg_pool_3x3", "skip_connect", "sep_conv_3x3")).to(DEVICE)
    states, weights = random_inputs(cell, (9, 8), 3, torch.float32)
    found = []
    for together in (True, False):
        own = copy.deepcopy(cell)
        with cell_settings(pools_together=together):
            nodes = fuse(own)([s.to(DEVICE) for s in states], weights.to(DEVICE).flatten())
        found.append([*nodes, *own.buffers()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [True, False])
def test_pools_with_a_maximum_and_wide_cells_launch_on_their_own(norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    run = cell_kernels.convolve_and_pool
    monkeypatch.setattr(cell_kernels, "convolve_and_pool", lambda *g, **n: (called.append(1), run(*g, **n)))
    for space, channels, expected in (("nb201", 64, 3), ("nb201", 65, 0), ("darts", 4, 0)):
        called.clear()
        cell = build_cell(space, channels=channels)
        states, weights = random_inputs(cell, (4, 4), 2, torch.float32)
        with cell_settings(pools_together=norm):
            fuse(cell)(states, weights.flatten())
        assert len(called) == (min(expected, max(cell.table.targets)) if norm else 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [8, 3, 1])
@pytest.mark.parametrize("planes", [(2, 3, 4), (1, 2), (2,), (0, 2, 4), (3, 2, 1), ()])
def test_gradients_of_a_concatenation_are_copied_at_once(
    planes: tuple[int, ...], channels: int, dtype: torch.dtype
) -> None:
    """Whatever the planes and the memory of the parts, each part is in its plane and all other planes are untouched."""
    whole = torch.randn(4, 5, 3, 6 * channels).to(dtype)
    parts = torch.split(whole, channels, dim=3)
    for chosen in (parts[1:], parts[1::2], (parts[0], parts[2], parts[3]), tuple(x.clone() for x in parts)):
        maps = dict(zip(planes, chosen, strict=False))
        buffer = torch.full((6, 4, 5, 3, channels), 7.0, dtype=dtype)
        cell_kernels._copy_planes(buffer, maps)
        for plane in range(6):
            assert torch.equal(buffer[plane], maps.get(plane, torch.full_like(buffer[plane], 7.0)))
    # The gradient of a mean over pixels repeats one number.
    repeated = torch.split(torch.randn(4, 1, 1, 2 * channels).to(dtype).expand(4, 5, 3, -1), channels, dim=3)
    buffer = torch.empty(2, 4, 5, 3, channels, dtype=dtype)
    cell_kernels._copy_planes(buffer, dict(enumerate(repeated)))
    assert torch.equal(buffer, torch.stack(repeated))


@ON_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["chosen", "one stream", "early launch", "fewer reads", "separate copies"])
@pytest.mark.parametrize("space", ["nb201", "darts"])
def test_captured_gradients_are_the_same_bits_with_other_launches(space: str, name: str) -> None:
    """A chain of cells: what runs at the same time as the next cell must not see its memory."""
    cells = [build_cell(space, number, channels=16).cuda() for number in (0, 0, 0, 0)]
    states, weights = random_inputs(cells[0], (32, 32), 16, torch.float32)
    states, weights = [s.cuda().bfloat16() for s in states], weights.cuda()
    weights.requires_grad_()
    sums = {key: value for key, value in CHANGES[name].items() if key in FEWER}
    with changed({**sums, "second_stream": False}):
        expected = chained(cells, states, weights)
    with changed(CHANGES[name]):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                chained(cells, states, weights)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = chained(cells, states, weights)
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        for mine, theirs in zip(captured, expected, strict=True):
            assert torch.equal(mine, theirs)


def chained(cells: list[MixedCell], states: list[Tensor], weights: Tensor) -> list[Tensor]:
    """The last value of a chain of cells, and the gradients of the mix and of all weights."""
    own = states
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        for cell in cells:
            value = cell(own, OneSite(weights), 0)[-1]
            own = [*own, value.to(memory_format=torch.channels_last)][-len(states) :]
    leaves = [weights, *(p for cell in cells for p in cell.parameters())]
    found = torch.autograd.grad(own[-1].float().square().sum(), leaves, allow_unused=True)
    return [own[-1].detach(), *(one for one in found if one is not None)]


@COMPILES
def test_a_kernel_that_starts_early_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel of a cell that has the attribute of an early launch, and none without the setting."""
    from softcell.kernels import taps_triton
    from softcell.kernels.warm_up import Compilation, compile_one, dry_launches

    take_for_gpu(monkeypatch)
    monkeypatch.setattr(execution, "compute_type", lambda x: x.dtype)
    taps_triton._has_dependent_launch.cache_clear()
    for early in (True, False):
        jobs: list[Compilation] = []
        with cell_settings(early_launch=early), dry_launches(jobs.append):
            cell = build_cell("nb201", channels=16)
            states, weights = random_inputs(cell, (8, 8), 2, torch.float32)
            nodes = fuse(cell)(states, weights.flatten().requires_grad_())
            torch.autograd.grad(nodes[-1].sum(), list(cell.parameters()))
        launched = [job for job in jobs if json.loads(job.specialization)["options"]["launch_pdl"]]
        assert len(launched) == (len(jobs) if early else 0) and len({job.name for job in jobs}) >= 9
        if early:
            code = compile_one(next(job for job in jobs if job.name == "_combine_finish"), HOPPER).asm["ptx"]
            assert code.index("griddepcontrol.wait") < code.index("ld.global")
    taps_triton._has_dependent_launch.cache_clear()
