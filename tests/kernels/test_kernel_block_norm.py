"""Batch-norm with ReLU, or drop-path and a shortcut, by Triton's kernels against its twin and torch's own.

TRITON_INTERPRET=1 pytest tests/kernels/test_kernel_block_norm.py
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.kernels import block_norm
from softcell.kernels.backend import runs_triton, twins_only
from tests.helpers.kernel_runs import DEVICE, MARKS

KINDS = {
    "norm": (True, False, False, False),
    "without scale": (False, False, False, False),
    "relu": (True, True, False, False),
    "relu without scale": (False, True, False, False),
    "shortcut": (True, False, True, False),
    "drop-path": (True, False, True, True),
    "all": (True, True, True, True),
}
"""Scale and shift, ReLU, shortcut, drop-path."""


def inputs(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> list[Tensor | None]:
    """z, γ, β, shortcut and factors, and a gradient; the mean of z is large."""
    affine, _, adds, drops = KINDS[kind]
    torch.manual_seed(0)
    n, c = shape[:2]
    z, shortcut, grad = (
        x.to(device, dtype).contiguous(memory_format=torch.channels_last)
        for x in (3 * torch.randn(shape) + 5, torch.randn(shape), torch.randn(shape))
    )
    factors = torch.randint(0, 2, (n,)).float().to(device) / 0.7
    weight, bias = (x.to(device) for x in (torch.rand(c) + 0.5, torch.randn(c)))
    found = [
        z.requires_grad_(),
        weight.requires_grad_() if affine else None,
        bias.requires_grad_() if affine else None,
        shortcut.requires_grad_() if adds else None,
        factors if drops else None,
    ]
    return [*found, grad]


def outcomes(kind: str, given: list[Tensor | None], *, twin: bool = False) -> list[Tensor]:
    """y, mean, variance and all gradients."""
    z, weight, bias, shortcut, factors, grad = given
    assert z is not None
    run = block_norm.normed_reference if twin else block_norm.normed
    y, mean, variance = run(z, weight, bias, 1e-5, relu=KINDS[kind][1], shortcut=shortcut, factors=factors)
    own = [x for x in (z, weight, bias, shortcut) if x is not None]
    return [y.detach(), mean, variance, *torch.autograd.grad(y, own, grad)]


def exactly(given: list[Tensor | None]) -> list[Tensor | None]:
    """In float64 on the CPU."""
    return [None if x is None else x.detach().cpu().double().requires_grad_(x.requires_grad) for x in given]


@pytest.mark.parametrize("kind", KINDS)
def test_the_twin_equals_torchs_batch_norm(kind: str) -> None:
    _, relu, adds, drops = KINDS[kind]
    given = exactly(inputs(kind, (4, 6, 5, 3), torch.float32, "cpu"))
    z, weight, bias, shortcut, factors, grad = given
    assert z is not None
    running_mean, running_var = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    y = F.batch_norm(z, running_mean, running_var, weight, bias, training=True, momentum=1.0, eps=1e-5)
    y = F.relu(y) if relu else y
    y = y * factors.view(-1, 1, 1, 1) if drops and factors is not None else y
    y = y + shortcut if adds and shortcut is not None else y
    own = [x for x in (z, weight, bias, shortcut) if x is not None]
    expected = [y.detach(), running_mean, running_var * 59 / 60, *torch.autograd.grad(y, own, grad)]
    for a, b in zip(outcomes(kind, given, twin=True), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_without_triton_the_twin_runs(kind: str) -> None:
    given = inputs(kind, (4, 6, 5, 3), torch.float32, "cpu")
    with twins_only():
        found = outcomes(kind, given)
    for a, b in zip(found, outcomes(kind, given, twin=True), strict=True):
        assert torch.equal(a, b)


def test_a_single_value_per_channel_is_refused_as_by_torch() -> None:
    z = torch.randn(1, 3, 1, 1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        block_norm.normed(z, None, None, 1e-5)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        F.batch_norm(z, None, None, training=True)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(3, 6, 5, 7), (2, 48, 17, 16), (1, 100, 4, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_equal_their_twin_in_float64(
    kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, tolerance: float, mark: None
) -> None:
    given = inputs(kind, shape, dtype, DEVICE)
    assert given[0] is not None and runs_triton(given[0])
    found = outcomes(kind, given)
    for a, b in zip(found, outcomes(kind, exactly(given), twin=True), strict=True):
        assert float((a.double().cpu() - b).norm()) <= tolerance * float(b.norm())
    assert found[0].dtype == dtype and found[0].is_contiguous(memory_format=torch.channels_last)
    assert found[3].dtype == dtype and found[3].is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(a, b) for a, b in zip(found, outcomes(kind, given), strict=True))  # no atomic sums


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
@pytest.mark.parametrize(("parts", "shape"), [(2, (3, 6, 5, 7)), (7, (2, 56, 3, 4)), (3, (2, 48, 9, 16))])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_channels_in_several_parts(
    parts: int, shape: tuple[int, int, int, int], dtype: torch.dtype, tolerance: float, mark: None
) -> None:
    given = inputs("relu", shape, dtype, DEVICE)

    def found(own: list[Tensor | None], *, twin: bool = False) -> list[Tensor]:
        z, weight, bias, _, _, grad = own
        assert z is not None and weight is not None and bias is not None and grad is not None
        run = block_norm.normed_reference if twin else block_norm.normed
        y, *_ = run(z, weight, bias, 1e-5, relu=True, parts=parts)
        pull = grad.unflatten(1, (parts, -1)).permute(1, 0, 3, 4, 2)  # type: ignore[no-untyped-call]
        return [y.detach(), *torch.autograd.grad(y, (z, weight, bias), pull)]

    whole = outcomes("relu", given)
    mine = found(given)
    assert mine[0].is_contiguous() and mine[1].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(mine[0].permute(1, 0, 4, 2, 3).flatten(1, 2), whole[0])
    # Gradients are the same up to rounding: a compiler may contract other products and sums in another form.
    for a, b in zip(mine[1:], whole[3:], strict=True):
        assert float((a.double() - b.double()).norm()) <= tolerance * float(b.double().norm())
    for a, b in zip(mine, found(exactly(given), twin=True), strict=True):
        assert float((a.double().cpu() - b).norm()) <= tolerance * float(b.norm())


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
def test_tiles_are_merged_in_several_rounds(mark: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_norm.triton_kernels("block_norm"), "TILE", 16)
    monkeypatch.setattr(block_norm.triton_kernels("block_norm"), "MERGED", 4)
    given = inputs("all", (3, 10, 9, 7), torch.float32, DEVICE)
    for a, b in zip(outcomes("all", given), outcomes("all", exactly(given), twin=True), strict=True):
        assert float((a.double().cpu() - b).norm()) <= 1e-5 * float(b.norm())


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
def test_second_derivatives_match_the_twin(mark: None) -> None:
    found = []
    for run in (block_norm.normed, block_norm.normed_reference):
        z, weight, bias, shortcut, factors, _ = inputs("all", (2, 6, 3, 5), torch.float32, DEVICE)
        assert z is not None and weight is not None
        y, *_ = run(z, weight, bias, 1e-5, relu=True, shortcut=shortcut, factors=factors)
        first = torch.autograd.grad(y.square().sum(), (z, weight), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), (z, weight)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
