"""Modules that run again in the backward pass: the same values, gradients and statistics, with what they ran with."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from softcell.nn.conv import MBConv
from softcell.nn.norm import recomputed


def made() -> tuple[MBConv, Tensor]:
    torch.manual_seed(0)
    return MBConv(4, 4, 3, 1, 3).double(), torch.randn(3, 4, 5, 5, dtype=torch.float64, requires_grad=True)


def test_value_gradients_and_statistics_match_the_module() -> None:
    (plain, x), (again, y) = made(), made()
    expected, found = plain(x), recomputed(again, y)
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weight).sum(), [x, *plain.parameters()])
    mine = torch.autograd.grad((found * weight).sum(), [y, *again.parameters()])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for a, b in zip(mine, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    for (name, a), b in zip(again.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=f"{name}: the batch is counted once")


def test_only_the_input_is_kept() -> None:
    module, x = made()
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        recomputed(module, x)
        assert max(kept, default=0) <= x.numel()
        kept.clear()
        module(x)
        assert max(kept) == 3 * x.numel(), "else the test would see nothing"


def test_weights_on_loan_are_those_of_the_backward_pass_too() -> None:
    """Second-order search computes with weights that are put into a module for one call."""
    module, x = made()
    other = {name: (p + 0.1).detach().requires_grad_() for name, p in module.named_parameters()}

    class Run(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor, again: bool) -> Tensor:
            return (recomputed(self.inner, x) if again else self.inner(x)).square().sum()

    gradients = []
    for again in (False, True):
        loss = functional_call(Run(), {f"inner.{name}": p for name, p in other.items()}, (x, again))
        gradients.append(torch.autograd.grad(loss, [x, *other.values()]))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("training", [True, False])
def test_modules_without_weights_and_steps_without_gradients_run_as_they_are(training: bool) -> None:
    pool, x = nn.AvgPool2d(3, 1, 1).train(training), torch.randn(2, 3, 4, 4, requires_grad=True)
    torch.testing.assert_close(recomputed(pool, x), pool(x))
    module, x = made()
    with torch.no_grad():
        torch.testing.assert_close(recomputed(module.train(training), x), module(x))
