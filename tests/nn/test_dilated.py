"""The dilated depthwise convolution on interleaved grids against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from softcell.nn.conv import DilatedDepthwise


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(8, 8), (6, 4), (2, 2), (7, 8), (5, 3)])
def test_grids_equal_the_dilated_convolution(kernel: int, stride: int, size: tuple[int, int]) -> None:
    module = DilatedDepthwise(5, kernel, stride).double()
    x = torch.randn(3, 5, *size, dtype=torch.float64, requires_grad=True)
    out = module(x)
    expected = F.conv2d(x, module.weight, stride=stride, padding=kernel - 1, dilation=2, groups=5)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(expected)
    own = torch.autograd.grad(out, [x, module.weight], grad)
    for a, b in zip(own, torch.autograd.grad(expected, [x, module.weight], grad), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_without_gradients_it_is_the_plain_call() -> None:
    module = DilatedDepthwise(4, 5, 1)
    x = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        expected = F.conv2d(x, module.weight, padding=4, dilation=2, groups=4)
        assert torch.equal(module(x), expected)


def test_second_derivatives_exist() -> None:
    """Second-order search differentiates a step twice."""
    module = DilatedDepthwise(2, 3, 1).double()
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(lambda x: module(x).square(), (x,))
