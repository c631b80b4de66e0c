"""Means of windows by Triton's kernels against torch's average pool.

TRITON_INTERPRET=1 pytest tests/kernels/test_kernel_window_mean.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from softcell.kernels import window_mean as own
from softcell.kernels.backend import runs_triton, twins_only
from softcell.nn import conv
from softcell.nn.conv import AveragePool
from tests.helpers.kernel_runs import DEVICE, MARKS, replayed

SHAPES = [((2, 3, 7, 5), 2), ((1, 70, 4, 6), 2), ((3, 16, 8, 8), 2), ((2, 8, 9, 7), 4), ((1, 5, 2, 1), 3)]


def inputs(shape: tuple[int, ...], stride: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A map and a gradient of its means, channels-last."""
    torch.manual_seed(0)
    n, c, h, w = shape
    x, grad = torch.randn(shape), torch.randn(n, c, -(-h // stride), -(-w // stride))
    x, grad = (one.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last) for one in (x, grad))
    return x.requires_grad_(), grad


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("shape", "stride"), SHAPES)
def test_means_and_gradients_equal_torchs_in_float64(
    shape: tuple[int, ...], stride: int, dtype: torch.dtype, tolerance: float, mark: None
) -> None:
    x, grad = inputs(shape, stride, dtype)
    assert runs_triton(x)
    exact = x.detach().cpu().double().requires_grad_()
    expected = own.window_mean_reference(exact, stride)
    (back,) = torch.autograd.grad(expected, exact, grad.cpu().double())
    y = own.window_mean(x, stride)
    (dx,) = torch.autograd.grad(y, x, grad)
    for a, b in ((y, expected), (dx, back)):
        assert a.dtype == dtype and a.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(a.detach().cpu().double(), b.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
def test_second_derivatives_and_other_layouts(mark: None) -> None:
    x, grad = inputs((2, 3, 5, 4), 2, torch.float32)
    first = x.detach().contiguous().requires_grad_()  # channels-first
    found = []
    for run, given in ((own.window_mean, x), (own.window_mean, first), (own.window_mean_reference, x)):
        y = run(given, 2)
        (dx,) = torch.autograd.grad((y * y * grad.contiguous()).sum(), given, create_graph=True)
        found.append([y, dx, *torch.autograd.grad((dx * dx).sum(), given)])
    for other in found[:2]:
        for a, b in zip(other, found[2], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_without_triton_the_twin_runs() -> None:
    x = torch.randn(2, 3, 5, 4)
    with twins_only():
        assert torch.equal(own.window_mean(x, 2), own.window_mean_reference(x, 2))
    empty = torch.randn(0, 3, 4, 4)
    assert own.window_mean(empty, 2).shape == (0, 3, 2, 2)


POOLS = {
    "halves": (AveragePool(2, 2, ceil_mode=True, count_include_pad=False), True),
    "counts padding, but has none": (AveragePool(2, 2, ceil_mode=True), True),
    "tuples": (AveragePool((2, 2), (2, 2), ceil_mode=True), True),
    "leaves out the last column": (AveragePool(2, 2), False),
    "overlaps": (AveragePool(3, 2, ceil_mode=True), False),
    "padded": (AveragePool(3, 3, 1, ceil_mode=True), False),
    "not square": (AveragePool((2, 1), (2, 1), ceil_mode=True), False),
    "other divisor": (AveragePool(2, 2, ceil_mode=True, divisor_override=3), False),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools_use_it_where_windows_do_not_overlap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, expected = POOLS[name]
    kind = [getattr(pool, n) for n in ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")]
    x = torch.randn(2, 3, 6, 7).contiguous(memory_format=torch.channels_last)
    ran: list[int] = []
    monkeypatch.setattr(conv, "runs_triton", lambda x: True)
    monkeypatch.setattr(
        conv, "window_mean", lambda x, stride: ran.append(stride) or own.window_mean_reference(x, stride)
    )
    torch.testing.assert_close(pool(x), nn.AvgPool2d(*kind, pool.divisor_override)(x))
    assert ran == ([2] if expected else [])
    ran.clear()
    pool(x.contiguous())
    assert not ran, "a channels-first map would be copied"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_graph_replays_it() -> None:
    x, grad = inputs((4, 48, 16, 16), 2, torch.bfloat16)
    expected = [own.window_mean(x, 2).detach(), *torch.autograd.grad(own.window_mean(x, 2), x, grad)]

    def step() -> list[Tensor]:
        y = own.window_mean(x, 2)
        return [y.detach(), *torch.autograd.grad(y, x, grad)]

    for a, b in zip(replayed(step), expected, strict=True):
        assert torch.equal(a, b)
