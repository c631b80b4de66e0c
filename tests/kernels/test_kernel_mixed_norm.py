"""Weighted sums of norms by Triton's kernels against their twin and torch's own norm.

TRITON_INTERPRET=1 pytest tests/kernels/test_kernel_mixed_norm.py
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.kernels import mixed_norm as own
from softcell.kernels.backend import runs_triton, twins_only
from tests.helpers.kernel_runs import DEVICE, MARKS, replayed

SHAPES = [(2, 3, 5, 7, 6), (7, 2, 9, 8, 16), (3, 1, 4, 4, 70)]
"""Blocks, samples, height, width, channels."""


def inputs(shape: tuple[int, ...], dtype: torch.dtype, *, joined: bool, adds: bool) -> list[Tensor | None]:
    """z, weights and a shortcut, and a gradient; the mean of z is large."""
    torch.manual_seed(0)
    k, n, h, w, c = shape
    z = 3 * torch.randn(n, h, w, k, c) + 5
    z = z.to(DEVICE, dtype).permute(3, 0, 1, 2, 4)
    z = z if joined else z.contiguous()
    shortcut, grad = (
        torch.randn(n, c, h, w).to(DEVICE, dtype).contiguous(memory_format=torch.channels_last) for _ in range(2)
    )
    weights = (torch.rand(k) + 0.1).to(DEVICE)
    return [z.requires_grad_(), weights.requires_grad_(), shortcut.requires_grad_() if adds else None, grad]


def outcomes(given: list[Tensor | None], *, twin: bool = False) -> list[Tensor]:
    """y, mean, variance and all gradients."""
    z, weights, shortcut, grad = given
    assert z is not None and weights is not None
    run = own.mixed_norm_reference if twin else own.mixed_norm
    y, mean, variance = run(z, weights, 1e-5, shortcut=shortcut)
    leaves = [x for x in (z, weights, shortcut) if x is not None]
    return [y.detach(), mean, variance, *torch.autograd.grad(y, leaves, grad)]


def exactly(given: list[Tensor | None]) -> list[Tensor | None]:
    """In float64 on the CPU."""
    return [None if x is None else x.detach().cpu().double().requires_grad_(x.requires_grad) for x in given]


@pytest.mark.parametrize("adds", [False, True])
def test_the_twin_equals_torchs_batch_norms(adds: bool) -> None:
    given = exactly(inputs(SHAPES[0], torch.float32, joined=False, adds=adds))
    z, weights, shortcut, grad = given
    assert z is not None and weights is not None
    running_mean, running_var = (torch.zeros(2, 6, dtype=torch.float64) for _ in range(2))
    y = torch.zeros(())
    for k, weight in enumerate(weights):
        one = F.batch_norm(z[k].permute(0, 3, 1, 2), running_mean[k], running_var[k], training=True, momentum=1.0)
        y = y + weight * (one if shortcut is None else one + shortcut)
    leaves = [x for x in (z, weights, shortcut) if x is not None]
    expected = [y.detach(), running_mean, running_var * 104 / 105, *torch.autograd.grad(y, leaves, grad)]
    for a, b in zip(outcomes(given, twin=True), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_without_triton_the_twin_runs() -> None:
    given = inputs(SHAPES[0], torch.float32, joined=False, adds=True)
    with twins_only():
        found = outcomes(given)
    for a, b in zip(found, outcomes(given, twin=True), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        own.mixed_norm(torch.randn(2, 1, 1, 1, 3), torch.ones(2), 1e-5)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_the_kernels_equal_their_twin_in_float64(
    shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, joined: bool, adds: bool, mark: None
) -> None:
    given = inputs(shape, dtype, joined=joined, adds=adds)
    z = given[0]
    assert z is not None and runs_triton(z) and z.is_contiguous() != joined
    found = outcomes(given)
    for a, b in zip(found, outcomes(exactly(given), twin=True), strict=True):
        assert float((a.double().cpu() - b).norm()) <= tolerance * float(b.norm())
    y, dz = found[0], found[3]
    assert y.dtype == dz.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)
    assert dz.stride() == z.stride(), "what reads it must not copy it"
    assert all(torch.equal(a, b) for a, b in zip(found, outcomes(given), strict=True))  # no atomic sums


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)])
def test_only_what_is_wanted_is_computed(wanted: tuple[int, ...], mark: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight steps need no gradient of the weights, the first layer of an architecture step only that."""
    given = inputs(SHAPES[1], torch.float32, joined=False, adds=True)
    expected = outcomes(given)[3:]
    kernels = own.triton_kernels("mixed_norm")
    asked: list[tuple[bool, ...]] = []
    run = kernels.backward
    monkeypatch.setattr(kernels, "backward", lambda *own: asked.append(own[5:]) or run(*own))
    z, weights, shortcut, grad = given
    assert z is not None and weights is not None and shortcut is not None
    leaves = [z, weights, shortcut]
    inner = [one if i in wanted else one.detach() for i, one in enumerate(leaves)]
    y, *_ = own.mixed_norm(inner[0], inner[1], 1e-5, shortcut=inner[2])
    found = torch.autograd.grad(y, [leaves[i] for i in wanted], grad)
    assert asked == [tuple(i in wanted for i in range(3))]
    for i, a in zip(wanted, found, strict=True):
        assert torch.equal(a, expected[i])


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
def test_tiles_are_merged_in_several_rounds(mark: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OF_ONE", 128), ("OF_ALL", 64), ("MERGED", 4), ("COLUMNS", 8)):
        monkeypatch.setattr(own.triton_kernels("mixed_norm"), name, value)
    given = inputs((3, 3, 9, 7, 10), torch.float32, joined=True, adds=True)
    for a, b in zip(outcomes(given), outcomes(exactly(given), twin=True), strict=True):
        assert float((a.double().cpu() - b).norm()) <= 1e-5 * float(b.norm())


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
def test_second_derivatives_and_other_layouts_match_the_twin(mark: None) -> None:
    found = []
    for run in (own.mixed_norm, own.mixed_norm_reference):
        z, weights, shortcut, _ = inputs((2, 2, 3, 5, 6), torch.float32, joined=False, adds=True)
        assert z is not None and weights is not None
        gaps = z.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
        y, *_ = run(gaps, weights, 1e-5, shortcut=shortcut)
        first = torch.autograd.grad(y.square().sum(), (gaps, weights), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), (gaps, weights)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_graph_replays_it() -> None:
    given = inputs((7, 4, 16, 16, 32), torch.bfloat16, joined=False, adds=True)
    expected = outcomes(given)
    for a, b in zip(replayed(lambda: outcomes(given)), expected, strict=True):
        assert torch.equal(a, b)
