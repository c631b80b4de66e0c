"""Teachers that ship: sizes from formulas, shapes at odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softcell.nn.conv  # noqa: F401  (candidates that make features)
from softcell.errors import UserError
from softcell.nn.calibrate import Calibration
from softcell.nn.classifiers import PyramidNet, ResNet18, build_classifier


def pyramid_parameters(depth: int, alpha: int, in_channels: int, classes: int) -> int:
    """Counted by hand: stem, bottlenecks of width w_k = round(16 + α·k/K) with 4·w_k outputs, last norm, classifier."""
    blocks = (depth - 2) // 3
    total, before = 9 * in_channels * 16 + 2 * 16, 16
    for k in range(1, blocks + 1):
        w = round(16 + alpha * k / blocks)
        total += 2 * before + before * w + 2 * w + 9 * w * w + 2 * w + 4 * w * w + 2 * 4 * w
        before = 4 * w
    return total + 2 * before + before * classes + classes


def resnet_parameters(width: int, classes: int) -> int:
    total, before = 27 * width + 2 * width, width
    for stage in range(4):
        c = width * 2**stage
        total += 9 * before * c + 3 * 9 * c * c + 4 * 2 * c
        total += (before * c + 2 * c) if before != c else 0
        before = c
    return total + before * classes + classes


def test_pyramidnet_110_has_two_and_a_half_million_parameters() -> None:
    with torch.device("meta"):
        network = PyramidNet().build(3, 10)
    found = sum(p.numel() for p in network.parameters())
    assert found == pyramid_parameters(110, 84, 3, 10) and 2.4e6 < found < 2.6e6


def test_resnet18_has_eleven_million_parameters() -> None:
    with torch.device("meta"):
        network = ResNet18().build(3, 10)
    assert sum(p.numel() for p in network.parameters()) == resnet_parameters(64, 10) == 11_173_962


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Batch norm by running statistics, written out."""
    state = norm.state_dict()
    mean, var, scale, shift = (state[k].view(1, -1, 1, 1) for k in ("running_mean", "running_var", "weight", "bias"))
    return (x - mean) / torch.sqrt(var + 1e-5) * scale + shift


def scrambled(network: nn.Module) -> nn.Module:
    """The network in float64 and eval mode, with statistics, scales and shifts of no special value."""
    torch.manual_seed(0)
    for name, tensor in network.double().state_dict().items():
        if tensor.dim() == 1 and tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + (0.5 if name.endswith(("running_var", "weight")) else -0.5))
    return network.eval()


def resnet(net: nn.Module, x: Tensor) -> list[Tensor]:
    """He et al., with an operation after stages 1 to 3 that is added to what it calibrates (NOS, §4.1)."""
    x, maps = F.relu(normed(net.stem[1], net.stem[0](x))), []
    for number, stage in enumerate(net.stages):
        for block in stage:
            y = F.relu(normed(block.norm1, block.first(x)))
            y = normed(block.norm2, block.second(y))
            short = block.shortcut
            x = F.relu(y + (normed(short[1], short[0](x)) if isinstance(short, nn.Sequential) else x))
        if number < 3 and net.calibrations:
            module = net.calibrations[number]
            assert isinstance(module, Calibration)
            x = x + module.applied(x, module(x))
        maps.append(x)
    return maps


def pyramid(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Han et al., Figure 6 (d): norm, 1×1, norm, ReLU, 3×3, norm, ReLU, 1×1, norm; missing channels are zeros."""
    x, maps = normed(net.stem[1], net.stem[0](x)), []
    for stage in net.stages:
        for block in stage:
            y = block.reduce(normed(block.norm0, x))
            y = block.middle(F.relu(normed(block.norm1, y)))
            y = normed(block.norm3, block.expand(F.relu(normed(block.norm2, y))))
            short = F.avg_pool2d(x, 2) if y.shape[2] < x.shape[2] else x
            n, c, h, w = y.shape
            x = y + torch.cat([short, torch.zeros(n, c - short.shape[1], h, w, dtype=x.dtype)], 1)
        maps.append(x)
    return maps


@pytest.mark.parametrize(
    ("name", "settings", "literal"),
    [
        ("resnet18", {"width": 2}, resnet),
        ("resnet18", {"width": 2, "operation": "spatial_attention"}, resnet),
        ("resnet18", {"width": 2, "operation": "dynamic_conv_3x3"}, resnet),
        ("pyramidnet", {"depth": 20, "alpha": 9}, pyramid),
    ],
)
def test_a_classifier_computes_what_is_written_down(name: str, settings: dict[str, object], literal: Any) -> None:
    network: Any = scrambled(build_classifier(name, settings, 1, 5))
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    maps, expected = network.features(x), literal(network, x)
    for a, b in zip(maps, expected, strict=True):
        torch.testing.assert_close(a, b)
    last = expected[-1] if name == "resnet18" else F.relu(normed(network.norm, expected[-1]))
    torch.testing.assert_close(network(x), network.classifier(last.mean((2, 3))))
    assert len(network.features(x, 2)) == 2


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("resnet18", {"width": 4}),
        ("pyramidnet", {"depth": 20, "alpha": 9}),
        ("resnet18", {"width": 4, "operation": "dynamic_conv_3x3"}),
    ],
)
def test_stages_halve_by_rounding_up(name: str, settings: dict[str, object]) -> None:
    network = build_classifier(name, settings, 1, 7)
    x = torch.randn(2, 1, 13, 9)
    sizes = [tuple(m.shape[-2:]) for m in network.features(x)]
    assert sizes[:3] == [(13, 9), (7, 5), (4, 3)]
    assert network(x).shape == (2, 7)


def test_settings_that_make_no_network_are_refused() -> None:
    with pytest.raises(UserError, match="depth = 9n"):
        PyramidNet(depth=100)
    with pytest.raises(UserError, match="makes features"):
        ResNet18(operation="sep_conv_3x3")
    with pytest.raises(UserError, match="no built-in classifier 'resnet19'"):
        build_classifier("resnet19", {}, 3, 10)
