"""Convolutions and norms around cells, fused, equal their modules: values, gradients, running statistics.

TRITON_INTERPRET=1 pytest tests/nn/test_fused_convs.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.arch import WeightMix
from softcell.kernels import shared
from softcell.kernels.backend import cell_settings, runs_triton
from softcell.nn import fused_convs
from softcell.nn.conv import FactorisedReduction, ReLUConvBN
from softcell.nn.fused_convs import FusedConvs, converted, fits
from softcell.nn.norm import BatchNorm2d
from softcell.spaces import Bound, Supernet, build_space, execution
from softcell.spaces.execution import is_modules_only, modules_only
from tests.helpers.kernel_runs import DEVICE, MARKS, without_tf32

BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(8, 6, 1, bias=False),
    "convolution and norm": lambda: nn.Sequential(nn.Conv2d(8, 6, 3, padding=1, bias=False), BatchNorm2d(6)),
    "ReLU, convolution, norm": lambda: ReLUConvBN(8, 6, 3, stride=2),
    "without scale": lambda: ReLUConvBN(8, 16, 1, affine=False),
    "reduction": lambda: FactorisedReduction(8, 6),
    "one channel": lambda: FactorisedReduction(8, 1),
}
SUPERNETS: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "nb201": ("nb201", {"cells_per_stage": 1, "channels": 8}, (3, 9, 7)),
    "darts": ("darts", {"cells": 4, "channels": 8, "nodes": 2}, (3, 9, 8)),
    "imagenet": ("darts", {"cells": 3, "channels": 8, "nodes": 1, "stem": "imagenet"}, (3, 33, 34)),
}


def made(kind: str, *, device: str = "cpu", dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return randomised(BLOCKS[kind]()).to(device, dtype).train()


def randomised(module: nn.Module) -> nn.Module:
    """Fresh norms would hide a forgotten scale, shift or running value."""
    for norm in (m for m in module.modules() if isinstance(m, nn.BatchNorm2d)):
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        if norm.affine:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return module


def outcome(block: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Value, gradients and buffers."""
    x = x.detach().clone(memory_format=torch.channels_last).requires_grad_()
    y = run(x)
    slope = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    found = torch.autograd.grad(y, [x, *block.parameters()], slope)
    return [y.detach(), *found, *(buffer.clone() for buffer in block.buffers())]


def both(kind: str, device: str = "cpu", dtype: torch.dtype = torch.float64, **after: Any) -> list[list[Tensor]]:
    block, x = made(kind, device=device, dtype=dtype), torch.randn(4, 8, 7, 5).to(device, dtype)
    module = copy.deepcopy(block)
    if "shortcut" in after:
        after["shortcut"] = torch.randn_like(module(x)).contiguous(memory_format=torch.channels_last)
        module = copy.deepcopy(block)

    def expected(given: Tensor) -> Tensor:
        y: Tensor = module(given)
        y = y + after["shortcut"] if "shortcut" in after else y
        return F.relu(y) if after.get("relu") else y

    mine = outcome(block, x, lambda given: FusedConvs([block], dtype).run(block, given, **after))
    return [mine, outcome(module, x, expected)]


@pytest.mark.parametrize("after", [{}, {"relu": True}, {"shortcut": None}], ids=str)
@pytest.mark.parametrize("kind", BLOCKS)
def test_fused_blocks_equal_their_modules(kind: str, after: dict[str, Any]) -> None:
    if kind == "convolution" and after:
        pytest.skip("nothing follows a convolution without a norm")
    for a, b in zip(*both(kind, **after), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
@pytest.mark.parametrize("after", [{}, {"relu": True}, {"shortcut": None}], ids=str)
@pytest.mark.parametrize("kind", list(BLOCKS)[1:])
def test_their_kernels_do_too(kind: str, after: dict[str, Any], mark: None) -> None:
    for a, b in zip(*both(kind, DEVICE, torch.float32, **after), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_relu_that_two_blocks_read_is_computed_once() -> None:
    blocks = [made("ReLU, convolution, norm"), made("reduction")]
    x = torch.randn(4, 8, 7, 5, dtype=torch.float64)
    convs, seen = FusedConvs(blocks, torch.float64), list[Tensor]()
    convs._relu = lambda x, own=convs._relu: seen.append(own(x)) or seen[-1]  # type: ignore[method-assign, misc]
    for block in blocks:
        convs.run(block, x)
    assert len(seen) == 2 and seen[0] is seen[1]


def test_blocks_without_a_fused_form_run_as_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = made("ReLU, convolution, norm")
    frozen[2].eval()  # type: ignore[index]
    hooked = made("convolution and norm")
    called: list[Any] = []
    hooked[1].register_forward_hook(lambda *given: called.append(given))  # type: ignore[index]
    odd = ReLUConvBN(8, 3, 1).double()
    odd[1] = nn.Conv2d(3, 5, 1, bias=False).double()  # 15 numbers: the next weights would not begin at 16 bytes
    biased = nn.Conv2d(8, 6, 1)
    assert not any(fits(block) for block in (frozen, hooked, odd, biased, nn.ReLU(), nn.Identity()))
    x = torch.randn(4, 8, 7, 5, dtype=torch.float64)
    for block in (frozen, hooked):
        other = copy.deepcopy(block)
        found = FusedConvs([block], torch.float64).run(block, x, relu=True)
        assert torch.equal(found, F.relu(other(x)))
        assert all(torch.equal(a, b) for a, b in zip(block.buffers(), other.buffers(), strict=True))
    assert called
    monkeypatch.setattr(fused_convs, "shares_norms", lambda: True)
    assert not fits(made("reduction")), "ranks that share norms merge their statistics in the modules"
    assert shared.shares_norms() is False


def test_converted_weights_and_their_gradients() -> None:
    weights = [nn.Conv2d(4, 6, 3).weight, nn.Conv2d(2, 8, 1).weight.to(memory_format=torch.channels_last)]
    weights = [w.detach().requires_grad_() for w in weights]
    found = converted(weights, torch.bfloat16)
    for mine, w in zip(found, weights, strict=True):
        assert torch.equal(mine, w.bfloat16()) and mine.stride() == w.stride()
    slopes = [torch.randn_like(w).bfloat16() for w in weights]
    gradients = torch.autograd.grad(found, weights, slopes)
    assert all(torch.equal(a, b.float()) and a.dtype == torch.float32 for a, b in zip(gradients, slopes, strict=True))
    alone = torch.autograd.grad(converted(weights, torch.bfloat16)[1].sum(), weights, allow_unused=True)
    assert alone[0] is None and torch.equal(alone[1], torch.ones_like(weights[1]))
    assert converted(weights, torch.float32) is weights and converted([], torch.bfloat16) == []
    [first] = torch.autograd.grad(converted(weights, torch.float64)[0].pow(3).sum(), weights[0], create_graph=True)
    [second] = torch.autograd.grad(first.sum(), weights[0])
    torch.testing.assert_close(second, 6 * weights[0])


def supernet(kind: str) -> tuple[Supernet, Tensor, dict[str, Tensor]]:
    space, settings, shape = SUPERNETS[kind]
    torch.manual_seed(0)
    found = randomised(build_space(space, settings).supernet(shape, 5)).double().train()
    assert isinstance(found, Supernet)
    tables = {t.name: torch.rand(len(t), t.width, dtype=torch.float64).requires_grad_() for t in found.layout.tables}
    return found, torch.randn(4, *shape, dtype=torch.float64), tables


def passes(own: Supernet, x: Tensor, tables: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """After two passes: logits, gradients and buffers; and the gradients of the mix alone, as in architecture steps."""
    for _ in range(2):
        bound = Bound(own, WeightMix(own.layout, tables))
        logits = bound.head(bound.features(x)[-1])
    parameters = [p for p in own.parameters() if p.requires_grad]
    alone = torch.autograd.grad(logits.square().sum(), list(tables.values()), retain_graph=True)
    found = torch.autograd.grad(logits.square().sum(), [*tables.values(), *parameters], allow_unused=True)
    named = {str(i): g for i, g in enumerate(found) if g is not None}
    return {"logits": logits.detach(), **named, **dict(own.named_buffers())}, list(alone)


@pytest.mark.parametrize("kind", SUPERNETS)
def test_supernets_with_fused_surroundings_equal_their_modules(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, x, tables = supernet(kind)
    other = copy.deepcopy(own)
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    used: list[nn.Module] = []
    run = FusedConvs.run

    def noting(self: FusedConvs, block: nn.Module | None, x: Tensor, **more: Any) -> Tensor:
        assert block is not None and id(block) in self._known
        used.append(block)
        return run(self, block, x, **more)

    monkeypatch.setattr(FusedConvs, "run", noting)
    mine, alone = passes(own, x, tables)
    assert len(used) == 2 * {"nb201": 7, "darts": 9, "imagenet": 6}[kind]
    with modules_only():
        theirs, alone_there = passes(other, x, tables)
    assert len(used) == 2 * {"nb201": 7, "darts": 9, "imagenet": 6}[kind]
    assert mine.keys() == theirs.keys() and own.state_dict().keys() == other.state_dict().keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(mine[name], expected, rtol=1e-7, atol=1e-8, msg=name)
    for a, b in zip(alone, alone_there, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)
    # In evaluation mode, and without the setting, modules run.
    used.clear()
    own.eval()
    Bound(own, WeightMix(own.layout, tables)).features(x)
    with cell_settings(block_norms=False):
        passes(own.train(), x, tables)
    assert not used


@pytest.mark.parametrize("kind", ["nb201", "darts"])
def test_second_derivatives_equal_those_of_modules(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, x, tables = supernet(kind)
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    weights = [p for p in own.parameters() if p.dim() == 4][:3]
    found = []
    for context in (cell_settings(), modules_only()):
        with context:
            bound = Bound(own, WeightMix(own.layout, tables))
            loss = bound.head(bound.features(x)[-1]).square().sum()
            first = torch.autograd.grad(loss, weights, create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in first), list(tables.values())))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_hooks_of_blocks_around_cells_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    for kind, name in (("nb201", "skeleton.reductions.0"), ("darts", "pre.1"), ("darts", "stem")):
        own, x, tables = supernet(kind)
        called: list[Any] = []
        own.get_submodule(name).register_forward_hook(lambda *given, called=called: called.append(given))  # type: ignore[misc]
        Bound(own, WeightMix(own.layout, tables)).features(x)
        assert len(called) == 1


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
@pytest.mark.parametrize("kind", ["nb201", "darts"])
@without_tf32()  # in the convolutions around the cells
def test_supernets_by_kernels_equal_their_modules(kind: str, mark: None, monkeypatch: pytest.MonkeyPatch) -> None:
    own, x, tables = supernet(kind)
    other = copy.deepcopy(own)
    if DEVICE == "cpu":
        monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    given = {name: table.detach().float().to(DEVICE).requires_grad_() for name, table in tables.items()}
    x32 = x.float().to(DEVICE).contiguous(memory_format=torch.channels_last)
    assert runs_triton(x32)
    mine, _ = passes(own.float().to(DEVICE, memory_format=torch.channels_last), x32, given)  # type: ignore[call-overload]
    with modules_only():
        theirs, _ = passes(other, x, tables)
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        if expected.is_floating_point() and expected.norm() > 1e-6:
            error = float((mine[name].detach().double().cpu() - expected).norm() / expected.norm())
            assert error < 2e-3, f"{name}: {error}"
