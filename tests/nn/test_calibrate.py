"""Attentions and dynamic kernels against twins written straight from Appendix A.1."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

import reference_nos as literal

from softcell.errors import UserError
from softcell.nn.calibrate import (
    Calibration,
    ChannelAttention,
    DynamicKernel,
    SpatialAttention,
    convolve,
)
from softcell.nn.candidates import Spec, candidate, get_candidate

SHAPES = [(3, 6, 7, 5), (2, 33, 4, 4), (2, 1, 5, 6)]


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_channel_attention_is_that_of_the_appendix(shape: tuple[int, ...]) -> None:
    module, x = ChannelAttention(shape[1]).double(), data(*shape)
    found = module(x)
    assert found.shape == (*shape[:2], 1, 1)
    torch.testing.assert_close(found, literal.channel_attention(x, module.state_dict()))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_spatial_attention_is_that_of_the_appendix_at_the_target_resolution(
    shape: tuple[int, ...], stride: int
) -> None:
    module, x = SpatialAttention(shape[1], stride, affine=False).double(), data(*shape)
    found = module(x)
    assert found.shape == (shape[0], 1, -(-shape[2] // stride), -(-shape[3] // stride))
    torch.testing.assert_close(found, literal.spatial_attention(x, module.state_dict(), stride))


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_dynamic_kernel_is_that_of_the_appendix(shape: tuple[int, ...], size: int) -> None:
    module, x = DynamicKernel(shape[1], size, affine=False).double(), data(*shape)
    found = module(x)
    assert found.shape == (*shape[:2], size, size)
    torch.testing.assert_close(found, literal.dynamic_kernel(x, module.state_dict(), size))
    torch.testing.assert_close(found.sum((2, 3)), torch.ones(shape[:2], dtype=torch.float64))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("size", [3, 5])
def test_one_grouped_convolution_is_a_loop_over_samples(size: int, dilation: int, layout: torch.memory_format) -> None:
    x = data(3, 4, 7, 6).contiguous(memory_format=layout).requires_grad_()
    kernels = data(3, 4, size, size, seed=1).requires_grad_()
    weight = data(3, 4, 7, 6, seed=2)
    outcomes = []
    for form in (convolve, literal.convolve):
        y = form(x, kernels, dilation)
        outcomes.append((y, *torch.autograd.grad((y * weight).sum(), (x, kernels))))
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives_flow_through_the_dynamic_convolution() -> None:
    x, kernels = data(2, 2, 3, 3).requires_grad_(), data(2, 2, 3, 3, seed=1).requires_grad_()
    assert torch.autograd.gradgradcheck(convolve, (x, kernels))


@pytest.mark.parametrize("channels", [1, 7, 8, 16, 36])
def test_widths_below_the_reduction_keep_one_channel(channels: int) -> None:
    assert ChannelAttention(channels).squeeze.out_channels == max(1, channels // 16)
    assert SpatialAttention(channels).squeeze.out_channels == max(1, channels // 16)
    assert DynamicKernel(channels, 3).compress.out_channels == max(1, channels // 8)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = DynamicKernel(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return convolve(x, self.kernel(x))


def test_an_exported_dynamic_convolution_takes_any_batch() -> None:
    module = Convolved().eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(module, (torch.randn(3, 4, 6, 6),), dynamic_shapes=({0: batch},))
    for n in (1, 5):
        x = torch.randn(n, 4, 6, 6)
        torch.testing.assert_close(program.module()(x), module(x))


def test_only_dilated_names_dilate() -> None:
    x, kernels = data(1, 2, 7, 7), data(1, 2, 3, 3, seed=1)
    for name, dilation in (("dynamic_conv_3x3", 1), ("dil_dynamic_conv_3x3", 2)):
        module = get_candidate(name).build(Spec(2))
        assert isinstance(module, Calibration) and get_candidate(name).kind == "kernel"
        torch.testing.assert_close(module.applied(x, kernels), literal.convolve(x, kernels, dilation))


def test_a_candidate_has_one_of_three_kinds() -> None:
    with pytest.raises(UserError, match="must be one of feature, attention, kernel"):
        candidate("of_no_kind", kind="texture")  # type: ignore[arg-type]


def test_calibrating_candidates_follow_the_precision_of_a_run() -> None:
    x = torch.randn(2, 16, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        for name in ("spatial_attention", "channel_attention", "dynamic_conv_3x3"):
            module = get_candidate(name).build(Spec(16))
            assert isinstance(module, Calibration)
            y = module.applied(x, module(x))
            assert y.shape == x.shape and bool(y.isfinite().all())
