"""Every registered candidate against the conformance suite, and those of the papers against literal twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import softcell.spaces  # noqa: F401  (registers the candidates that ship)
from softcell.errors import UserError
from softcell.nn.candidates import Spec, candidate, get_candidate, known_candidates
from softcell.nn.conv import AuxiliaryHead, FactorisedReduction
from softcell.testing import CANDIDATE_CHECKS, check_name
from tests.reference.reference_cells import copy_weights, literal

TWINS = (
    "none",
    "skip_connect",
    "max_pool_3x3",
    "avg_pool_3x3",
    "sep_conv_3x3",
    "sep_conv_5x5",
    "sep_conv_7x7",
    "dil_conv_3x3",
    "dil_conv_5x5",
    "nor_conv_1x1",
    "nor_conv_3x3",
)


@pytest.mark.parametrize("check", CANDIDATE_CHECKS, ids=check_name)
@pytest.mark.parametrize("name", known_candidates())
def test_every_candidate_keeps_its_contracts(name: str, check: Callable[[str], None]) -> None:
    check(name)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", TWINS)
def test_a_candidate_equals_its_literal_twin_forward_and_backward(
    name: str, stride: int, affine: bool, training: bool
) -> None:
    mine = get_candidate(name).build(Spec(6, stride, affine=affine, pool_norm=True)).double()
    twin = literal(name, 6, stride, affine=affine, pool_norm=True).double()
    with torch.no_grad():
        for tensor in mine.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.1, 0.9)
    copy_weights(mine, twin)
    outcomes = []
    for module in (mine, twin):
        x = torch.randn(3, 6, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
        y = module.train(training)(x)
        weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
        wanted = [x, *module.parameters()]
        gradients = torch.autograd.grad((y * weight).sum(), wanted, allow_unused=True) if y.requires_grad else []
        outcomes.append([y, *gradients, *module.state_dict().values()])
    if name == "none":
        assert torch.equal(outcomes[0][0], outcomes[1][0])
        return
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def average_without_padding(x: Tensor, stride: int) -> Tensor:
    """The mean over those of the 3×3 neighbours that exist, one output at a time."""
    n, c, height, width = x.shape
    rows = []
    for i in range(0, height, stride):
        for j in range(0, width, stride):
            rows.append(x[:, :, max(0, i - 1) : i + 2, max(0, j - 1) : j + 2].mean(dim=(2, 3)))
    return torch.stack(rows, dim=2).view(n, c, -(-height // stride), -(-width // stride))


@pytest.mark.parametrize("size", [(4, 4), (5, 3)])
@pytest.mark.parametrize("stride", [1, 2])
def test_average_pooling_leaves_padding_out_of_the_mean(stride: int, size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    pool = get_candidate("avg_pool_3x3").build(Spec(3, stride))
    torch.testing.assert_close(pool(x), average_without_padding(x, stride))


def test_pools_have_a_norm_only_if_the_spec_says_so() -> None:
    for name in ("max_pool_3x3", "avg_pool_3x3"):
        for pool_norm in (True, False):
            module = get_candidate(name).build(Spec(4, 1, affine=False, pool_norm=pool_norm))
            assert any(isinstance(part, nn.BatchNorm2d) for part in module.modules()) == pool_norm
        assert get_candidate(name).shared(Spec(4, 1, affine=False, pool_norm=True))
        assert not get_candidate(name).shared(Spec(4, 1, affine=True, pool_norm=True))


@pytest.mark.parametrize("size", [(7, 7), (8, 7), (7, 8), (1, 1)])
def test_a_factorised_reduction_rounds_odd_sizes_up(size: tuple[int, int]) -> None:
    module = FactorisedReduction(4, 6).double()
    expected = (3, 6, -(-size[0] // 2), -(-size[1] // 2))
    assert module(torch.randn(3, 4, *size, dtype=torch.float64)).shape == expected


def test_the_second_half_of_a_factorised_reduction_sees_zeros_beyond_an_odd_edge() -> None:
    """On 3×3, the shifted grid reads pixel (1, 1) and, beyond the edge, zeros."""
    module = FactorisedReduction(1, 2, affine=False).double().eval()
    with torch.no_grad():
        for conv in (module.even, module.odd):
            assert conv is not None
            conv.weight.fill_(1.0)
    x = torch.arange(1.0, 10.0, dtype=torch.float64).view(1, 1, 3, 3)
    y = module(x) * (1 + module.norm.eps) ** 0.5
    torch.testing.assert_close(y[0, 0], torch.tensor([[1.0, 3.0], [7.0, 9.0]], dtype=torch.float64))
    torch.testing.assert_close(y[0, 1], torch.tensor([[5.0, 0.0], [0.0, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_factorised_reduction_takes_odd_widths(channels: int) -> None:
    assert FactorisedReduction(4, channels)(torch.randn(2, 4, 6, 6)).shape == (2, channels, 3, 3)


def test_an_unknown_candidate_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean 'sep_conv_3x3'"):
        get_candidate("sep_conv_3x")


def test_a_candidate_cannot_take_a_known_name_or_a_name_that_is_none() -> None:
    with pytest.raises(UserError, match="already exists"):
        candidate("skip_connect")(lambda spec: nn.Identity())
    with pytest.raises(UserError, match="plain identifier"):
        candidate("my op")(lambda spec: nn.Identity())


def test_the_auxiliary_tower_has_the_published_size_and_takes_any_resolution() -> None:
    tower = AuxiliaryHead(16, 10, stem="cifar")
    # 1×1 to 128 and its norm, 2×2 to 768 and its norm, the classifier with its bias.
    assert sum(p.numel() for p in tower.parameters()) == 16 * 128 + 256 + 128 * 768 * 4 + 2 * 768 + 768 * 10 + 10
    for size in ((8, 8), (2, 2), (3, 5), (1, 1), (14, 14)):
        assert tower(torch.randn(2, 16, *size)).shape == (2, 10)
    without_norm = AuxiliaryHead(16, 10, stem="imagenet")
    assert sum(isinstance(part, nn.BatchNorm2d) for part in without_norm.modules()) == 1
    assert without_norm(torch.randn(2, 16, 7, 7)).shape == (2, 10)


def test_the_tower_pools_as_published_at_the_published_size() -> None:
    """8×8 by a 5×5 window of stride 3: the first output is the mean of rows and columns 0 to 4."""
    tower = AuxiliaryHead(1, 2, stem="cifar")
    seen: list[Tensor] = []
    tower.features.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    x = torch.rand(2, 1, 8, 8)
    tower(x)
    torch.testing.assert_close(seen[0][:, :, 0, 0], x[:, :, :5, :5].mean(dim=(2, 3)))
    torch.testing.assert_close(seen[0][:, :, 1, 1], x[:, :, 3:, 3:].mean(dim=(2, 3)))
