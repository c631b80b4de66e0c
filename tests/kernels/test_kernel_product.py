"""Products of rows with small weights against torch's own, and what a backward pass does not ask for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.kernels import product as products
from softcell.kernels.product import product


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
    inner = products._of_rows

    def of_rows(*parts: Any) -> Tensor:
        made.append(1)
        return inner(*parts)

    monkeypatch.setattr(products, "_of_rows", of_rows)
    x, weight = given(64, None)
    y = product(x * 2, weight * 2)  # not leaves: torch does not know it of those
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert made == []
    torch.autograd.grad(y.sum(), weight, retain_graph=True)
    y.sum().backward()
    assert made == [1, 1]
    with torch.no_grad():
        assert not product(x, weight).requires_grad
