"""Local and non-local self-attention against literal loops, finite differences and what a block must do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from softcell.errors import UserError
from softcell.nn.attention import (
    AttentionBlock,
    LocalAttention,
    NonLocalAttention,
    attend_local,
    local_block,
    shifts_only,
)
from softcell.nn.candidates import Spec, get_candidate
from tests.reference.reference_attention import local_attention, non_local_attention

SIZES = [(5, 4), (1, 3)]


def matrices(module: LocalAttention | NonLocalAttention) -> list[Tensor]:
    parts = (module.queries, module.keys, module.values, module.project)
    return [part.weight[:, :, 0, 0] for part in parts]


def outcomes(y: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad((y * weight).sum(), wanted)]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("extent", "heads"), [(3, 4), (3, 8), (5, 4), (5, 8), (7, 4), (7, 8)])
def test_local_attention_equals_its_loop_forward_and_backward(extent: int, heads: int, inside: bool) -> None:
    """On maps where every pixel is at a border, and on maps where some have all their neighbours."""
    size = (extent, extent + 1) if inside else (1, 3)
    torch.manual_seed(0)
    module = LocalAttention(8, extent, heads).double()
    with torch.no_grad():
        module.rows.normal_()
        module.columns.normal_()
    x = torch.randn(1 if inside else 2, 8, *size, dtype=torch.float64, requires_grad=True)
    wanted = [x, *module.parameters()]
    mine = outcomes(module(x), wanted)
    twin = outcomes(local_attention(x, *matrices(module), module.rows, module.columns), wanted)
    with shifts_only():
        shifted = outcomes(module(x), wanted)
        with torch.no_grad():
            torch.testing.assert_close(module(x), twin[0], rtol=1e-10, atol=1e-12)
    for form in (mine, shifted):
        for a, b in zip(form, twin, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_non_local_attention_equals_its_loop_forward_and_backward(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    module = NonLocalAttention(4).double()
    x = torch.randn(2, 4, *size, dtype=torch.float64, requires_grad=True)
    wanted = [x, *module.parameters()]
    twin = outcomes(non_local_attention(x, *matrices(module)), wanted)
    for a, b in zip(outcomes(module(x), wanted), twin, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_local_attention_has_right_first_and_second_derivatives() -> None:
    torch.manual_seed(0)
    maps = [torch.randn(1, 2, 2, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    embeddings = [torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    with shifts_only():
        assert torch.autograd.gradcheck(attend_local, (*maps, *embeddings))
        assert torch.autograd.gradgradcheck(attend_local, (*maps, *embeddings), fast_mode=True)


def test_what_is_kept_for_the_backward_pass_does_not_grow_with_the_extent() -> None:
    """Queries, keys, values and embeddings, whatever the extent: no neighbourhoods, no logits."""
    kept = []
    for extent in (3, 7):
        q, k, v = (torch.randn(1, 4, 2, 16, 16, requires_grad=True) for _ in range(3))
        embeddings = [torch.randn(4, 2, extent, requires_grad=True) for _ in range(2)]
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            attend_local(q, k, v, *embeddings)
        kept.append(sum(sizes) - sum(e.numel() for e in embeddings))
    assert kept == [3 * q.numel()] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_numbers_stay_close_to_exact_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 2, 6, 5, dtype=torch.float64) for _ in range(3))
    rows, columns = (torch.randn(4, 2, 3, dtype=torch.float64) for _ in range(2))
    exact = attend_local(q, k, v, rows, columns)
    given = [t.to(dtype) for t in (q, k, v)]
    dense = attend_local(given[0], given[1], given[2], rows.float(), columns.float())
    with shifts_only():
        shifted = attend_local(given[0], given[1], given[2], rows.float(), columns.float())
    for short in (dense, shifted):
        assert short.dtype == dtype
        assert (short.double() - exact).abs().max() < (0.2 if dtype == torch.bfloat16 else 1e-4)


def test_any_resolution_works() -> None:
    with torch.no_grad():
        for side in (32, 75, 448):
            assert LocalAttention(8, 3, 8)(torch.randn(1, 8, side, side)).shape == (1, 8, side, side)


@pytest.mark.parametrize(("channels", "heads"), [(12, 4), (24, 8), (8, 8)])
def test_heads_that_do_not_divide_the_width_are_refused(channels: int, heads: int) -> None:
    with pytest.raises(UserError, match=f"{heads} heads for {channels // 2} channels"):
        get_candidate(f"local_sa_k3_h{heads}").build(Spec(channels))


def test_bad_extents_and_odd_widths_are_refused() -> None:
    with pytest.raises(UserError, match="must be odd"):
        LocalAttention(8, 4, 4)
    with pytest.raises(UserError, match="even number of channels"):
        get_candidate("non_local_sa").build(Spec(7))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("norm", [True, False])
def test_a_block_is_the_bottleneck_of_figure_1(stride: int, norm: bool) -> None:
    torch.manual_seed(0)
    block = local_block(Spec(16, stride, channels_in=6, norm=norm), 3, 4).double().train()
    x = torch.randn(3, 6, 7, 5, dtype=torch.float64)
    assert any(isinstance(part, nn.BatchNorm2d) for part in block.modules()) == norm
    y = torch.relu(block.attention(torch.relu(block.reduce(x))))
    y = block.expand(y)

    def halved(m: Tensor) -> Tensor:
        """Means of 2×2 windows, at odd borders of what there is."""
        if stride == 1:
            return m
        rows = [
            torch.stack([m[:, :, i : i + 2, j : j + 2].mean((2, 3)) for j in range(0, m.shape[3], 2)], 2)
            for i in range(0, m.shape[2], 2)
        ]
        return torch.stack(rows, 2)

    torch.testing.assert_close(block(x), halved(y) + block.widen(halved(x)))


def test_a_block_that_keeps_its_width_adds_its_input_itself() -> None:
    block = local_block(Spec(16), 3, 4)
    assert isinstance(block, AttentionBlock) and isinstance(block.widen, nn.Identity)
    with torch.no_grad():
        for p in block.expand.parameters():
            p.zero_()
    x = torch.randn(2, 16, 4, 4)
    torch.testing.assert_close(block.eval()(x), x)


@pytest.mark.parametrize("layer", [LocalAttention(8, 3, 4), NonLocalAttention(8)])
def test_a_batch_without_images_passes(layer: nn.Module) -> None:
    assert layer(torch.zeros(0, 8, 5, 6)).shape == (0, 8, 5, 6)
