"""Attentions and dynamic kernels against twins written straight from Appendix A.1."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from softcell.errors import UserError
from softcell.kernels.calibrate import convolve
from softcell.nn.calibrate import Calibration, ChannelAttention, DynamicKernel, SpatialAttention, calibrated
from softcell.nn.candidates import Spec, candidate, get_candidate
from tests.reference import reference_nos as literal

SHAPES = [(3, 6, 7, 5), (2, 33, 4, 4), (2, 1, 5, 6)]


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_channel_attention_matches_the_appendix(shape: tuple[int, ...]) -> None:
    module, x = ChannelAttention(shape[1]).double(), data(*shape)
    found = module(x)
    assert found.shape == (*shape[:2], 1, 1)
    torch.testing.assert_close(found, literal.channel_attention(x, module.state_dict()))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_spatial_attention_matches_the_appendix_at_the_target_resolution(shape: tuple[int, ...], stride: int) -> None:
    module, x = SpatialAttention(shape[1], stride, affine=False).double(), data(*shape)
    found = module(x)
    assert found.shape == (shape[0], 1, -(-shape[2] // stride), -(-shape[3] // stride))
    torch.testing.assert_close(found, literal.spatial_attention(x, module.state_dict(), stride))


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_dynamic_kernel_matches_the_appendix(shape: tuple[int, ...], size: int) -> None:
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


class Subtracts(DynamicKernel):
    """A custom calibration with its own `applied`."""

    def applied(self, base: Tensor, made: Tensor) -> Tensor:
        return base - made.mean((2, 3), keepdim=True)


MODULES: list[Calibration] = [
    ChannelAttention(4),
    DynamicKernel(4, 3),
    DynamicKernel(4, 3, dilation=2),
    SpatialAttention(4),
    DynamicKernel(4, 5),
    Subtracts(4, 3),
    DynamicKernel(4, 1),
    DynamicKernel(4, 5, dilation=2),
]


@pytest.mark.parametrize("chosen", [range(8), (1, 4), (4, 1), (0, 3), (3,), (2,), (5,), ()], ids=str)
def test_what_is_summed_and_applied_once_is_what_every_module_applies(chosen: Sequence[int]) -> None:
    modules = [MODULES[i] for i in chosen]
    base = data(2, 4, 6, 7).contiguous(memory_format=torch.channels_last).requires_grad_()
    shapes = [(2, 1, 6, 7) if isinstance(m, SpatialAttention) else (2, 4, 1, 1) for m in modules]
    made = [
        data(*((2, 4, m.size, m.size) if isinstance(m, DynamicKernel) else shape), seed=i).requires_grad_()
        for i, (m, shape) in enumerate(zip(modules, shapes, strict=True))
    ]
    pairs = list(zip(modules, made, strict=True))
    outcomes = []
    for y in (calibrated(base, pairs), sum((m.applied(base, one) for m, one in pairs), start=1 * base)):
        gradients = torch.autograd.grad(y.square().sum(), [base, *made], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in gradients), [base, *made])
        outcomes.append([y, *gradients, *second])
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_gradients_after_attentions_have_the_memory_layout_of_the_map() -> None:
    base = data(2, 4, 6, 7).contiguous(memory_format=torch.channels_last).requires_grad_()
    made = [data(2, 4, 1, 1), data(2, 4, 3, 3), data(2, 1, 6, 7)]
    y = calibrated(base, list(zip([MODULES[0], MODULES[1], MODULES[3]], made, strict=True)))
    assert y.is_contiguous(memory_format=torch.channels_last)
    (gradient,) = torch.autograd.grad(y, base, torch.ones_like(y))
    assert gradient.is_contiguous(memory_format=torch.channels_last)


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
