"""Stacked convolutions equal their modules: values, gradients, running statistics."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import WeightMix
from softcell.nn.conv import DilatedConv, ReLUConvBN
from softcell.nn.stack import LARGEST, flat, run_stacked, stack_key, stacking_pays
from softcell.spaces import _executors, build_space
from softcell.spaces.execution import modules_only


def made(affine: bool, kernel: int = 3, stride: int = 1) -> list[ReLUConvBN]:
    torch.manual_seed(0)
    modules = [ReLUConvBN(4, 6, kernel, stride, affine=affine).double() for _ in range(3)]
    for module in modules:
        norm: Any = module[2]
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        if affine:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return modules


def outcome(modules: list[ReLUConvBN], x: Tensor, stacked: bool) -> list[Tensor]:
    x = x.clone().requires_grad_()
    outputs = run_stacked(modules, torch.relu(x)) if stacked else [module(x) for module in modules]
    loss = sum(((i + 1) * y.sin()).sum() for i, y in enumerate(outputs))
    assert isinstance(loss, Tensor)
    parameters = [p for module in modules for p in module.parameters()]
    first = torch.autograd.grad(loss, [x, *parameters], create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
    buffers = [b.clone() for module in modules for b in module.buffers()]
    return [*outputs, *first, *second, *buffers]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (3, 2)])
def test_values_gradients_and_statistics_match_the_modules(
    training: bool, affine: bool, kernel: int, stride: int
) -> None:
    x = torch.randn(5, 4, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, found = (
        outcome([m.train(training) for m in made(affine, kernel, stride)], x, stacked) for stacked in (False, True)
    )
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


def test_what_differs_or_has_hooks_is_not_stacked() -> None:
    assert stack_key(None) is None
    assert stack_key(DilatedConv(4, 3, 1, affine=False)) is None
    one, other = made(True)[:2]
    assert stack_key(one) == stack_key(other)
    assert stack_key(one) != stack_key(ReLUConvBN(4, 6, 1).double())
    assert stack_key(one) != stack_key(other.eval()), "norms in another mode"
    one[1].register_forward_hook(lambda *_: None)
    assert stack_key(one) is None
    assert stacking_pays(torch.zeros(LARGEST))
    assert not stacking_pays(torch.zeros(LARGEST + 1))


@pytest.mark.parametrize("bottleneck", [1, 2])
def test_a_supernet_computes_the_same_with_and_without_stacking(
    bottleneck: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(_executors, "run_stacked", lambda ms, x: calls.append(len(ms)) or run_stacked(ms, x))
    results = []
    for literal in (False, True):
        torch.manual_seed(0)
        space = build_space("nb201", {"cells_per_stage": 1, "channels": 4, "bottleneck": bottleneck})
        supernet = space.supernet((3, 8, 8), 5).double()
        tables = {t.name: torch.randn(len(t), t.width, dtype=torch.float64).softmax(1) for t in supernet.layout.tables}
        x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
        before = len(calls)
        if literal:
            with modules_only():
                y = supernet(x, WeightMix(supernet.layout, tables))
            assert len(calls) == before
        else:
            y = supernet(x, WeightMix(supernet.layout, tables))
        results.append((y, torch.autograd.grad(y.sum(), list(supernet.parameters())), list(supernet.buffers())))
    assert calls, "several convolutions leave a node"
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-10)


def test_gradients_of_flat_weights_are_parts_of_one_buffer() -> None:
    """Copying them apart would cost a launch for every fused cell."""
    weights = [torch.randn(3, 2, 1, 1), torch.randn(4, 1, 3, 3), torch.randn(2, 3, 3, 3)]
    weights[2] = weights[2].to(memory_format=torch.channels_last)
    for w in weights:
        w.requires_grad_()
    vector = flat(weights)
    given = torch.arange(float(vector.numel()))
    found = torch.autograd.grad(vector, weights, given)
    assert len({g.untyped_storage().data_ptr() for g in found}) == 1
    assert [g.stride() for g in found] == [w.stride() for w in weights]
    torch.testing.assert_close(torch.cat([g.permute(0, 2, 3, 1).flatten() for g in found]), given)
