"""Optimisers whose parameters do not all have a gradient in every step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from softcell.engine.distributed import World
from softcell.engine.optim import (
    _laid_out_like,
    _owned,
    apply_gradients,
    fill_momenta,
    load_optimiser,
    rmsprop,
    set_lr,
    sgd,
)

CPU = torch.device("cpu")


def late(optimiser: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """The second parameter has a gradient from the third step on."""
    for step in range(5):
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, 1.0 + step + i) if i == 0 or step >= 2 else None
        optimiser.step()


def made() -> tuple[torch.optim.SGD, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    return sgd(parameters, CPU, lr=0.1, momentum=0.9, weight_decay=0.01), parameters


def test_momenta_of_zero_change_nothing() -> None:
    (plain, expected), (filled, found) = made(), made()
    fill_momenta(filled)
    assert all("momentum_buffer" in filled.state[p] for p in found)
    late(plain, expected)
    late(filled, found)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_parameters_may_join_late_on_a_gpu_and_after_a_resume() -> None:
    expected = made()
    late(*expected)
    for resumed in (False, True):
        parameters = [nn.Parameter(torch.ones(n, device="cuda")) for n in (3, 2)]
        optimiser = sgd(parameters, torch.device("cuda"), lr=0.1, momentum=0.9, weight_decay=0.01)
        if resumed:  # from a state of a CPU, which lacks momenta of parameters without gradients so far
            load_optimiser(optimiser, made()[0].state_dict())
        late(optimiser, parameters)
        for a, b in zip(parameters, expected[1], strict=True):
            torch.testing.assert_close(a.detach().cpu(), b.detach())


def test_gradients_are_copied_only_if_they_share_memory() -> None:
    buffer = torch.arange(12.0)
    apart = [buffer[4:8].view(2, 2), buffer[:4], None, buffer[8:]]
    assert [a is b for a, b in zip(_owned(apart), apart, strict=True)] == [True] * 4
    for meeting in (
        [buffer[:6], buffer[5:]],
        [buffer[5:], buffer[:6]],
        [buffer, buffer],
        [buffer[2:4], buffer],
        [buffer[0:12:2], buffer[1:12:2]],  # interleaved: copied, though they do not overlap
    ):
        first, second = _owned(meeting)
        assert first is meeting[0]
        assert second is not None and second.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
        torch.testing.assert_close(second, meeting[1])
    weight = torch.zeros(2, 3, 1, 1).to(memory_format=torch.channels_last)
    gradient = buffer[:6].view(2, 3, 1, 1)  # the same layout, though strides of size 1 differ
    assert gradient.stride() != weight.stride()
    seen = _laid_out_like(weight, gradient)
    assert seen is not None and seen.data_ptr() == buffer.data_ptr() and seen.stride() == weight.stride()
    torch.testing.assert_close(seen, gradient)
    wide = torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
    copied = _laid_out_like(wide, torch.arange(24.0).view(2, 3, 2, 2))
    assert copied is not None and copied.stride() == wide.stride() and copied.flatten().tolist() == list(range(24))
    (spread,) = _owned([buffer[:1].expand(5)])
    assert spread is not None and spread.stride() == (1,)


def test_rmsprop_matches_tensorflow_number_by_number() -> None:
    """ε under the root, squares from 1, the learning rate inside the momentum; resumed in the middle."""
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(3, generator=generator).tolist(), torch.randn(6, 3, generator=generator).tolist()
    rates = [0.1, 0.1, 0.1, 0.05, 0.05, 0.05]
    expected = []
    for i, value in enumerate(start):
        v, m = 1.0, 0.0
        for rate, row in zip(rates, gradients, strict=True):
            g = row[i] + 0.01 * value
            v = 0.9 * v + 0.1 * g * g
            m = 0.8 * m + rate * g / math.sqrt(v + 1e-3)
            value -= m
        expected.append(value)

    def make(values: torch.Tensor) -> tuple[torch.optim.Optimizer, nn.Parameter]:
        parameter = nn.Parameter(values.double())
        return rmsprop([parameter], CPU, lr=0.1, momentum=0.8, weight_decay=0.01), parameter

    optimiser, parameter = make(torch.tensor(start))
    for step, row in enumerate(gradients):
        if step == 3:
            state, values = optimiser.state_dict(), parameter.detach().clone()
            optimiser, parameter = make(values)
            load_optimiser(optimiser, state)
            set_lr(optimiser, 0.05)
        parameter.grad = torch.tensor(row).double()
        optimiser.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-7)


def test_gradients_of_all_layers_are_averaged_in_one_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks are pretended: the other one has the same gradients, so the sum is twice as large."""
    sent: list[int] = []

    def all_reduce(tensor: torch.Tensor) -> None:
        sent.append(tensor.numel())
        tensor.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    net = nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(20)))
    parameters = list(net.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    given = [gradient.clone() for gradient in gradients]
    optimiser = torch.optim.SGD(parameters, lr=1.0)
    apply_gradients(optimiser, parameters, gradients, World(0, 2, 0, torch.device("cpu")), clip=0.0)
    assert sent == [sum(parameter.numel() for parameter in parameters)]
    for parameter, start, gradient in zip(parameters, before, given, strict=True):
        torch.testing.assert_close(parameter.detach(), start - gradient)
