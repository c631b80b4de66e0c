"""Teachers that ship: sizes from formulas, shapes at odd sizes."""

from __future__ import annotations

import pytest
import torch

from softcell.errors import UserError
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
