"""Local attention by Triton's kernels against its twin: on a GPU, or on a CPU by Triton's interpreter.

TRITON_INTERPRET=1 pytest tests/kernels/test_kernel_local.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.kernels import local
from softcell.kernels.backend import runs_triton, triton_kernels
from softcell.nn.attention import LocalAttention
from tests.helpers.kernel_runs import DEVICE, MARKS

pytestmark = MARKS
CASES = [(2, 4, 2, (5, 4), 3), (2, 8, 1, (8, 5), 7), (1, 4, 3, (2, 3), 5), (2, 8, 6, (9, 11), 5), (3, 8, 24, (4, 4), 7)]


def outcomes(packed: Tensor, rows: Tensor, columns: Tensor, grad: Tensor, *, plain: bool) -> list[Tensor]:
    y = (local._plainly if plain else local.attend_packed)(packed, rows, columns)
    return [y, *torch.autograd.grad(y, (packed, rows, columns), grad)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("n", "heads", "d", "size", "extent"), CASES)
@pytest.mark.parametrize("last", [True, False])
def test_the_kernels_equal_their_twin_in_float64(
    n: int, heads: int, d: int, size: tuple[int, int], extent: int, dtype: torch.dtype, tolerance: float, last: bool
) -> None:
    torch.manual_seed(0)
    packed = torch.randn(n, 3 * heads * d, *size, device=DEVICE).to(dtype)
    packed = packed.to(memory_format=torch.channels_last if last else torch.contiguous_format).requires_grad_()
    embeddings = [torch.randn(heads, d, extent, device=DEVICE, requires_grad=True) for _ in range(2)]
    grad = torch.randn(n, heads * d, *size, device=DEVICE).to(dtype)
    assert runs_triton(packed)
    mine = outcomes(packed, embeddings[0], embeddings[1], grad, plain=False)
    exact = [t.detach().cpu().double().requires_grad_() for t in (packed, *embeddings)]
    theirs = outcomes(exact[0], exact[1], exact[2], grad.cpu().double(), plain=True)
    for a, b, given in zip(mine, theirs, (packed, packed, *embeddings), strict=True):
        assert a.dtype == given.dtype
        assert float((a.detach().double().cpu() - b.detach()).norm()) <= tolerance * float(b.detach().norm())
    again = outcomes(packed, embeddings[0], embeddings[1], grad, plain=False)
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))  # no atomic sums


def test_positions_are_summed_over_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last program may have fewer pixels than the others, or one program may have all of them."""
    torch.manual_seed(0)
    packed = torch.randn(3, 3 * 64, 5, 7, device=DEVICE, requires_grad=True)
    rows, columns = (torch.randn(8, 8, 3, device=DEVICE, requires_grad=True) for _ in range(2))
    grad = torch.randn(3, 64, 5, 7, device=DEVICE)
    exact = [t.detach().cpu().double().requires_grad_() for t in (packed, rows, columns)]
    theirs = outcomes(exact[0], exact[1], exact[2], grad.cpu().double(), plain=True)
    for values in (4, 8, 64):
        monkeypatch.setattr(triton_kernels("local"), "WIDE", values)
        for a, b in zip(outcomes(packed, rows, columns, grad, plain=False), theirs, strict=True):
            assert float((a.detach().double().cpu() - b.detach()).norm()) <= 1e-5 * float(b.detach().norm())


def test_second_derivatives_match_the_twin() -> None:
    torch.manual_seed(0)
    found = []
    packed = torch.randn(1, 12, 3, 4, device=DEVICE, requires_grad=True)
    rows, columns = (torch.randn(2, 2, 3, device=DEVICE, requires_grad=True) for _ in range(2))
    for form in (local.attend_packed, local._plainly):
        (first,) = torch.autograd.grad(form(packed, rows, columns).square().sum(), packed, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (packed, rows, columns)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_gradients_of_positions_are_computed_only_if_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    backward = triton_kernels("local").backward

    def noted(*given: Any, positions: bool) -> tuple[Tensor, ...]:
        made.append(positions)
        return tuple(backward(*given, positions=positions))

    monkeypatch.setattr(triton_kernels("local"), "backward", noted)
    packed = torch.randn(1, 12, 3, 4, device=DEVICE, requires_grad=True)
    both = torch.randn(2, 2, 2, 3, device=DEVICE, requires_grad=True)
    y = local.attend_packed(packed, *(2 * both).unbind())
    (alone,) = torch.autograd.grad(y.sum(), packed, retain_graph=True)
    together, positions = torch.autograd.grad(y.sum(), (packed, both))
    assert made == [False, True]
    assert torch.equal(alone, together) and bool(positions.any())


def test_a_layer_runs_them_and_keeps_no_neighbourhood() -> None:
    """What is kept of maps does not grow with the extent: queries, keys, values, the result and one number per head."""
    kept = []
    for extent in (3, 7):
        torch.manual_seed(0)
        layer = LocalAttention(8, extent, 4).to(DEVICE)
        x = torch.randn(2, 8, 12, 12, device=DEVICE)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):  # type: ignore[misc]
            y = layer(x)
        kept.append(sum(sizes) - 4 * layer.rows.numel())  # embeddings, and a joined copy of them
        exact = layer.double().cpu()(x.double().cpu())
        assert float((y.detach().cpu() - exact).norm() / exact.norm()) < 1e-5
    assert kept[0] == kept[1]


TOGETHER = [((3, 8), (7, 4), (5, 8)), ((3, 4), (3, 4))]


def together(packed: Tensor, embeddings: Tensor, kinds: local.Kinds, grad: Tensor, *, plain: bool) -> list[Tensor]:
    y = (local.attend_together_reference if plain else local.attend_together)(packed, embeddings, kinds)
    return [y, *torch.autograd.grad(y, (packed, embeddings), grad)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("c", [8, 48])
@pytest.mark.parametrize("kinds", TOGETHER)
def test_attentions_together_equal_separate_ones(
    kinds: local.Kinds, c: int, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    count, size = len(kinds), sum(2 * c * extent for extent, _ in kinds)
    packed = torch.randn(count, 2, 5, 6, 3 * c, device=DEVICE).to(dtype).requires_grad_()
    embeddings = torch.randn(size, device=DEVICE, requires_grad=True)
    grad = torch.randn(count, 2, 5, 6, c, device=DEVICE).to(dtype)
    found = together(packed, embeddings, kinds, grad, plain=False)
    exact = [x.detach().cpu().double().requires_grad_() for x in (packed, embeddings)]
    for a, b in zip(found, together(*exact, kinds, grad.cpu().double(), plain=True), strict=True):  # type: ignore[misc]
        assert float((a.detach().double().cpu() - b.detach()).norm()) <= tolerance * float(b.detach().norm())
    parts = torch.split(embeddings.detach(), [2 * c * extent for extent, _ in kinds])
    for own, part, one, (extent, heads) in zip(packed, parts, found[0], kinds, strict=True):
        alone = local.attend_packed(own.detach().permute(0, 3, 1, 2), *part.view(2, heads, -1, extent))
        assert float((one.detach().permute(0, 3, 1, 2) - alone).norm()) <= tolerance * float(alone.norm())


@pytest.mark.parametrize("used", [True, False], ids=["in the room", "elsewhere"])
@pytest.mark.parametrize("others", [0, 1, 2])
def test_results_and_gradients_of_other_attentions_lie_behind(others: int, used: bool) -> None:
    torch.manual_seed(0)
    kinds = ((3, 4), (5, 2))
    packed = torch.randn(2 + others, 2, 5, 6, 24, device=DEVICE).requires_grad_()
    embeddings, grad = torch.randn(2 * 8 * 8, device=DEVICE), torch.randn(2 + others, 2, 5, 6, 8, device=DEVICE)

    def run(x: Tensor, *, plain: bool) -> list[Tensor]:
        room = local.Room()
        if plain:
            first, rest = x[:2], [one.chunk(3, -1) for one in x[2:]]
        else:
            first, *parts = local.divided(x, 2, room)
            rest = [tuple(parts[i : i + 3]) for i in range(0, 3 * others, 3)]
        made = [q * k.sin() + v for q, k, v in rest]
        if plain:
            y = local.attend_together_reference(first, embeddings.to(x), kinds, made)
        else:
            y = local.attend_together(first if used else 1 * first, embeddings, kinds, made, room)
        (dx,) = torch.autograd.grad(y, x, grad.to(y))
        assert room.gradient is None, "what is left there would keep its memory"
        return [y.detach(), dx]

    found = run(packed, plain=False)
    for a, b in zip(found, run(packed.detach().cpu().double().requires_grad_(), plain=True), strict=True):
        assert float((a.cpu().double() - b).norm()) <= 1e-5 * float(b.norm())


def test_the_gradients_are_computed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of other attentions are copied."""
    packed = torch.randn(3, 1, 4, 4, 24, device=DEVICE).requires_grad_()
    room, copied = local.Room(), []
    first, q, k, v = local.divided(packed, 2, room)
    y = local.attend_together(first, torch.randn(2 * 8 * 6, device=DEVICE), ((3, 4), (3, 2)), [q + k + v], room)
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda given, *own, **more: copied.append(len(given)) or cat(given, *own, **more))  # type: ignore[func-returns-value]
    (dx,) = torch.autograd.grad(y.sum(), packed)
    assert copied == [3] and torch.equal(dx[2], torch.ones_like(dx[2]))


def test_second_derivatives_with_other_attentions() -> None:
    found = []
    for plain in (True, False):
        torch.manual_seed(0)
        x = torch.randn(3, 1, 3, 4, 12, device=DEVICE).requires_grad_()
        embeddings = torch.randn(2 * 4 * 6, device=DEVICE).requires_grad_()
        room = local.Room()
        first, q, k, v = (x[:2], *x[2].chunk(3, -1)) if plain else local.divided(x, 2, room)
        given = (first, embeddings, ((3, 4), (3, 2)), [q * k * v])
        y = local.attend_together_reference(*given) if plain else local.attend_together(*given, room)
        grads = torch.autograd.grad(y.square().sum(), (x, embeddings), create_graph=True)
        found.append([y, *grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), (x, embeddings))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("programs", "extent", "c"), [(1, 3, 8), (300, 5, 12), (1500, 0, 24)])
def test_sums_over_programs(programs: int, extent: int, c: int) -> None:
    lines = 2 * extent if extent else 10
    partial = torch.randn(programs, lines, c, device=DEVICE)
    found, expected = local.triton_kernels("local").summed(partial, extent), partial.cpu().double().sum(0)
    if extent:
        expected = expected.view(2, extent, c).transpose(1, 2)
    assert found.is_contiguous() and torch.equal(found, local.triton_kernels("local").summed(partial, extent))
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-4)
