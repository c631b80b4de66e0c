"""Weighted sums against their literal twin and products against torch: values, gradients, and what they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.kernels import mix
from softcell.kernels.mix import product, small_weighted_sum, stacked_sum, weighted_sum, weighted_sum_reference


def terms(number: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(number)
    shape = (2, 3, 4, 5)
    return tuple(torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad) for _ in range(number))


def scales(number: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    return torch.randn(number, generator=torch.Generator().manual_seed(9), dtype=dtype).requires_grad_(grad)


def test_hand_computed_value() -> None:
    inputs = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]), torch.tensor([100.0, 200.0])]
    assert weighted_sum(inputs, torch.tensor([1.0, 0.5, -2.0])).tolist() == [-194.0, -388.0]


@pytest.mark.parametrize("number", [1, 2, 7])
def test_values_and_gradients_equal_the_twin(number: int) -> None:
    found = []
    for function in (weighted_sum, weighted_sum_reference):
        x, w = terms(number), scales(number)
        y = function(x, w)
        gradients = torch.autograd.grad((y**3).sum(), [w, *x])
        found.append([y, *gradients])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_channels_last_inputs_mix_with_others() -> None:
    x, w = list(terms(3)), scales(3)
    x[1] = x[1].detach().to(memory_format=torch.channels_last).requires_grad_()
    mine = torch.autograd.grad(weighted_sum(x, w).square().sum(), [w, *x])
    theirs = torch.autograd.grad(weighted_sum_reference(x, w).square().sum(), [w, *x])
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_small_sums_equal_the_twin_in_both_orders_if_copies_are_cheap(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mix, "copies_cheaply", lambda x: True)
    found = []
    for function in (small_weighted_sum, weighted_sum_reference):
        x, w = (
            [t.detach().to(memory_format=torch.channels_last).requires_grad_() for t in terms(number)],
            scales(number),
        )
        y = function(x, w)
        first = torch.autograd.grad((y**3).sum(), [w, *x], create_graph=True)
        found.append([y, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), [w, *x])])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
    ],
)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_sums_keep_the_type_of_their_terms_under_autocast(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mix, "copies_cheaply", lambda x: True)
    x, w = [t.to(device, dtype) for t in terms(3, grad=False)], scales(3, torch.float32, grad=False).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = small_weighted_sum(x, w)
    assert found.dtype == dtype
    expected = weighted_sum_reference([t.double() for t in x], w.double())
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_derivatives_of_both_orders_equal_finite_differences() -> None:
    x, w = tuple(t[:1, :1, :2, :2].detach().requires_grad_() for t in terms(3)), scales(3)

    def function(w: Tensor, *x: Tensor) -> Tensor:
        return weighted_sum(x, w)

    assert torch.autograd.gradcheck(function, (w, *x))
    assert torch.autograd.gradgradcheck(function, (w, *x))


def test_a_gradient_of_a_gradient_reaches_the_weights() -> None:
    """d/dw of ‖dy/dx‖²: what second-order search needs, and what a detached factor would lose in silence."""
    x, w = terms(2), scales(2)
    (slope,) = torch.autograd.grad(weighted_sum(x, w).sum(), x[:1], create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), w)
    expected = torch.tensor([2 * w[0].item() * x[0].numel(), 0.0], dtype=torch.float64)
    torch.testing.assert_close(second, expected)


def saved(function: Any) -> list[Tensor]:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function()
    return kept


def test_inputs_are_kept_only_when_the_weights_want_a_gradient() -> None:
    x = terms(4)
    without = saved(lambda: weighted_sum(x, scales(4, grad=False)))
    assert [t.dim() for t in without] == [1]
    with_gradient = saved(lambda: weighted_sum(x, scales(4)))
    assert sorted(t.dim() for t in with_gradient) == [1, 4, 4, 4, 4]


def test_inputs_without_gradient_get_none() -> None:
    x, w = list(terms(3)), scales(3)
    x[1] = x[1].detach()
    weighted_sum(x, w).sum().backward()
    assert x[1].grad is None
    torch.testing.assert_close(x[2].grad, torch.full_like(x[2], w[2].item()))


def test_inputs_stay_as_they_were() -> None:
    x = terms(3, grad=False)
    before = [t.clone() for t in x]
    weighted_sum(x, scales(3, grad=False))
    assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_is_near_the_twin_in_float32(weight_dtype: torch.dtype) -> None:
    x, w = terms(5, torch.bfloat16), scales(5, torch.float32).detach().to(weight_dtype).requires_grad_()
    y = weighted_sum(x, w)
    assert y.dtype == torch.bfloat16
    gradients = torch.autograd.grad(y.float().sum(), [w, *x])
    wide = [t.detach().float().requires_grad_() for t in (w, *x)]
    expected = weighted_sum_reference(wide[1:], wide[0])
    # bfloat16 has 8 bits: each of the 5 additions rounds by 2⁻⁹ of values of a few units.
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.1)
    assert gradients[0].dtype == weight_dtype
    for mine, theirs in zip(gradients, torch.autograd.grad(expected.sum(), wide), strict=True):
        torch.testing.assert_close(mine.float(), theirs, rtol=0.02, atol=0.2)


def test_the_path_for_devices_reads_no_values() -> None:
    x = [t.detach().to("meta") for t in terms(3)]
    assert weighted_sum(x, scales(3).detach().to("meta")).shape == x[0].shape


@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize("learns", [True, False])
def test_sums_of_stacked_inputs_equal_the_twin_in_both_orders(number: int, learns: bool) -> None:
    found = []
    for stacked in (True, False):
        x, w = terms(number), scales(number, grad=learns)
        y = stacked_sum(torch.stack(x, 1), w) if stacked else weighted_sum_reference(x, w)
        wanted = [*x, *([w] if learns else [])]
        first = torch.autograd.grad((y**3).sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(part.square().sum() for part in first), wanted)
        found.append([y, *first, *second])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_stacked_inputs_are_kept_only_if_weights_learn_and_get_gradients_in_their_layout() -> None:
    rows = torch.randn(2, 5, 6, 4, 3)  # the memory layout of maps computed together
    for learns, kept in ((True, 2), (False, 1)):
        x = rows.permute(0, 3, 4, 1, 2).detach().requires_grad_()
        y = stacked_sum(x, scales(4, torch.float32, grad=learns))
        assert len(y.grad_fn.saved_tensors) == kept  # type: ignore[union-attr]
        assert y.is_contiguous(memory_format=torch.channels_last)
        (back,) = torch.autograd.grad(y.square().sum(), x)
        assert back.stride() == x.stride()


def test_a_weighted_sum_stays_in_one_graph_of_torch_compile() -> None:
    """One graph per number of terms, whatever their weights; gradients are those of the plain sum."""
    torch._dynamo.utils.counters.clear()
    run = torch.compile(weighted_sum, backend="aot_eager", dynamic=False)
    for number in (1, 2, 5, 5, 2):
        x = [torch.randn(2, 3, requires_grad=True) for _ in range(number)]
        weights = torch.rand(number, requires_grad=True)
        found, expected = (
            [y, *torch.autograd.grad(y.square().sum(), [weights, *x])]
            for y in (run(x, weights), weighted_sum(x, weights))
        )
        torch.testing.assert_close(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    assert not torch._dynamo.utils.counters["graph_break"]


def given(rows: int, added: int | None) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, rows, 3), (2, 3, 5), *([] if added is None else [(2, added, 5)])]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("rows", [128, 7, 96])
@pytest.mark.parametrize("added", [None, "one", "all"])
def test_values_and_gradients_of_both_orders_match_torch(rows: int, added: str | None) -> None:
    leaves = given(rows, {None: None, "one": 1, "all": rows}[added])
    found = []
    for own in (True, False):
        x, weight, *more = leaves
        y = product(x, weight, *more) if own else x @ weight + (more[0] if more else 0)
        first = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves, materialize_grads=True)
        found.append([y, *first, *second])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_rows_may_have_different_strides() -> None:
    x = torch.randn(64, 2, 3, dtype=torch.float64).transpose(0, 1).requires_grad_()
    weight = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(64, 2, 5, dtype=torch.float64).transpose(0, 1)
    mine = torch.autograd.grad(product(x, weight.transpose(1, 2)), (x, weight), pull)
    theirs = torch.autograd.grad(x @ weight.transpose(1, 2), (x, weight), pull)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_unrequested_gradients_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    inner = mix._of_rows

    def of_rows(*parts: Any) -> Tensor:
        made.append(1)
        return inner(*parts)

    monkeypatch.setattr(mix, "_of_rows", of_rows)
    x, weight = given(64, None)
    y = product(x * 2, weight * 2)  # not leaves: torch does not know it of those
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert made == []
    torch.autograd.grad(y.sum(), weight, retain_graph=True)
    y.sum().backward()
    assert made == [1, 1]
    with torch.no_grad():
        assert not product(x, weight).requires_grad


def test_the_gradient_of_a_turned_weight_has_its_memory_order() -> None:
    torch.manual_seed(0)
    x, stored = torch.randn(3, 20, 4, requires_grad=True), torch.randn(3, 5, 4, requires_grad=True)
    grad = torch.randn(3, 20, 5)
    seen: list[Tensor] = []
    weight = stored.transpose(1, 2)
    weight.register_hook(seen.append)
    found = torch.autograd.grad(product(x, weight), (x, stored), grad)
    expected = torch.autograd.grad(torch.bmm(x, stored.transpose(1, 2)), (x, stored), grad)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert seen[0].stride() == weight.stride(), "it would be copied"
