"""A step of SGD for all parameters at once equals torch's clipping and optimiser.

TRITON_INTERPRET=1 pytest tests/kernels/test_kernel_sgd.py
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softcell.engine.distributed import World
from softcell.engine.optim import apply_gradients, fill_momenta
from softcell.kernels import sgd
from softcell.kernels.backend import has_triton
from tests.helpers.kernel_runs import replayed

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RUNS = has_triton() and (INTERPRETED or DEVICE.type == "cuda")
WORLD = World(0, 1, 0, DEVICE)
SHAPES = ((3,), (5, 4, 1, 1), (6, 1, 3, 3), (2, 3, 3, 3), (1500,))


def made(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator).to(DEVICE) for shape in SHAPES]
    values[3] = values[3].to(memory_format=torch.channels_last)
    return [nn.Parameter(value) for value in values]


def drawn(parameters: list[nn.Parameter], seed: int) -> list[Tensor]:
    """The first three gradients are parts of one buffer, in another order; the others have separate ones."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [p.numel() for p in parameters[:3]]
    buffer = torch.randn(sum(sizes), generator=generator).to(DEVICE)
    third, first, second = torch.split(buffer, [sizes[2], sizes[0], sizes[1]])
    parts = [part.view(p.shape) for part, p in zip((first, second, third), parameters, strict=False)]
    return parts + [torch.randn(p.shape, generator=generator).to(DEVICE) for p in parameters[3:]]


def optimiser(parameters: list[nn.Parameter], *, nesterov: bool, at_once: bool) -> torch.optim.SGD:
    """at_once: with a rate on the device, as on a GPU."""
    lr = torch.tensor(0.1, device=DEVICE) if at_once else 0.1
    options = {"momentum": 0.9, "weight_decay": 0.03, "nesterov": nesterov}
    found = torch.optim.SGD(parameters, lr=lr, foreach=False, **options)  # type: ignore[arg-type]
    fill_momenta(found)
    return found


@pytest.mark.skipif(not RUNS, reason="needs a GPU, or TRITON_INTERPRET=1 with Triton")
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip", [0.0, 2.0, 1e4])
def test_steps_of_all_parameters_at_once(clip: float, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    step = sgd.sgd_step

    def counted(*given: object, **rule: object) -> None:
        calls.append(1)
        step(*given, **rule)  # type: ignore[arg-type]

    monkeypatch.setattr("softcell.engine.optim.sgd_step", counted)
    plain, fast = made(0), made(0)
    torchs, ours = optimiser(plain, nesterov=nesterov, at_once=False), optimiser(fast, nesterov=nesterov, at_once=True)
    for number in range(3):
        given = [g.clone() for g in drawn(plain, number)]
        for parameter, gradient in zip(plain, given, strict=True):
            parameter.grad = gradient
        if clip > 0:
            nn.utils.clip_grad_norm_(plain, clip)
        torchs.step()
        apply_gradients(ours, fast, drawn(fast, number), WORLD, clip, averaged=True)
        for p, q in zip(fast, plain, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            a, b = ours.state[p]["momentum_buffer"], torchs.state[q]["momentum_buffer"]
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert all(p.grad is None for p in fast)
    assert len(calls) == 3


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip", [0.0, 2.0])
def test_the_twin_equals_torch(clip: float, nesterov: bool) -> None:
    plain, own = made(1), made(1)
    torchs = optimiser(plain, nesterov=nesterov, at_once=False)
    momenta = [torch.zeros_like(p) for p in own]
    for number in range(3):
        for parameter, gradient in zip(plain, drawn(plain, number), strict=True):
            parameter.grad = gradient.clone()
        if clip > 0:
            nn.utils.clip_grad_norm_(plain, clip)
        torchs.step()
        with torch.no_grad():
            lr = torch.tensor(0.1, device=DEVICE)
            sgd.sgd_step_reference(own, drawn(own, number), momenta, lr, clip, 0.9, 0.03, nesterov)
    for p, q in zip(own, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not RUNS, reason="needs a GPU, or TRITON_INTERPRET=1 with Triton")
def test_gradients_that_are_not_numbers_reach_the_parameters() -> None:
    """As in torch: the run is then reported as failed, instead of continuing with clipped noise."""
    parameters = made(2)
    gradients = drawn(parameters, 0)
    gradients[4][0] = math.nan
    apply_gradients(
        optimiser(parameters, nesterov=False, at_once=True), parameters, gradients, WORLD, 2.0, averaged=True
    )
    assert all(bool(p.isnan().all()) for p in parameters)


@pytest.mark.skipif(not RUNS, reason="needs a GPU, or TRITON_INTERPRET=1 with Triton")
def test_steps_with_missing_gradients_change_only_the_others() -> None:
    plain, fast = made(3), made(3)
    torchs, ours = optimiser(plain, nesterov=False, at_once=False), optimiser(fast, nesterov=False, at_once=True)
    for number, absent in enumerate((None, 1, None)):
        given: list[Tensor | None] = [g.clone() for g in drawn(plain, number)]
        found: list[Tensor | None] = list(drawn(fast, number))
        if absent is not None:
            given[absent] = found[absent] = None
        for parameter, gradient in zip(plain, given, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(plain, 2.0)
        torchs.step()
        apply_gradients(ours, fast, found, WORLD, 2.0, averaged=True)
    for p, q in zip(fast, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not RUNS, reason="needs a GPU, or TRITON_INTERPRET=1 with Triton")
def test_a_graph_from_before_a_step_is_not_differentiated() -> None:
    """Weights of the graph have changed: its gradients would be wrong."""
    parameters = made(5)
    loss = parameters[0].square().sum()
    given = drawn(parameters, 0)
    apply_gradients(optimiser(parameters, nesterov=False, at_once=True), parameters, given, WORLD, 2.0, averaged=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, parameters[0])


class Own(torch.optim.SGD):
    """An optimiser with a step of its own."""

    calls: list[int]

    def step(self, closure: Any = None) -> Any:
        self.calls.append(1)
        return super().step(closure)


@pytest.mark.parametrize("kind", ["subclass", "hook", "rate elsewhere"])
def test_optimisers_that_do_more_make_their_own_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softcell.engine.optim.runs_triton", lambda x: True)
    calls: list[int] = []
    monkeypatch.setattr("softcell.engine.optim.sgd_step", lambda *given, **rule: calls.append(0))
    parameters = made(6)
    given = [g.clone() for g in drawn(parameters, 0)]
    kept = optimiser(parameters, nesterov=False, at_once=True)
    apply_gradients(kept, parameters, given, WORLD, 2.0, averaged=True)
    assert calls == [0]
    if kind == "subclass":
        kept = own = Own(parameters, lr=torch.tensor(0.1, device=DEVICE), momentum=0.9, foreach=False)
        fill_momenta(own)
        own.calls = calls
    elif kind == "hook":
        kept.register_step_post_hook(lambda *given: calls.append(1))
    else:
        kept.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
        monkeypatch.setattr(kept, "step", lambda: calls.append(1))
    apply_gradients(kept, parameters, given, WORLD, 2.0, averaged=True)
    assert calls == [0, 1]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda" or not has_triton(), reason="needs a CUDA device with Triton")
def test_a_step_can_be_captured() -> None:
    """The table of addresses exists since the eager step before; gradients are elsewhere in the capture."""
    plain, fast = made(4), made(4)
    torchs, ours = optimiser(plain, nesterov=False, at_once=False), optimiser(fast, nesterov=False, at_once=True)
    given = drawn(plain, 0)

    def step() -> list[Tensor]:
        apply_gradients(ours, fast, [2 * g for g in given], WORLD, 2.0, averaged=True)
        return []

    replayed(step)
    for _ in range(2):
        for parameter, gradient in zip(plain, given, strict=True):
            parameter.grad = 2 * gradient
        nn.utils.clip_grad_norm_(plain, 2.0)
        torchs.step()
    for p, q in zip(fast, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not RUNS, reason="needs a GPU, or TRITON_INTERPRET=1 with Triton")
def test_tables_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture must find the table of the eager step before, whatever other runs do in between."""
    monkeypatch.setattr(sgd, "ROOM", 3)
    monkeypatch.setattr(sgd, "_tables", {})
    lists = [[torch.zeros(2, device=DEVICE)] for _ in range(4)]
    first = sgd._table(lists[0], lists[0])
    for other in lists[1:]:
        sgd._table(other, other)
        assert sgd._table(lists[0], lists[0]) is first
    assert len(sgd._tables) == 3


def test_parts_of_a_buffer_that_follow_each_other_are_one_vector() -> None:
    buffer = torch.arange(12.0)
    own = torch.full((2, 2), -1.0)
    order, runs = sgd._ordered([buffer[6:9], own, buffer[:4].view(2, 2), buffer[4:6], buffer[10:]])
    assert order == [2, 3, 0, 4, 1]
    assert [run.tolist() for run in runs] == [list(range(9)), [10, 11], [-1] * 4]
