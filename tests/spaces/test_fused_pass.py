"""What runs once for all cells in a fused pass: drop-path's factors are drawn, running statistics are collected."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from softcell.arch import sample
from softcell.nn.stochastic import DropPath
from softcell.spaces import Network, PickedCell, _fused_cell, build_space, execution
from softcell.spaces._affine_cells import AffineCell
from softcell.spaces._fused_cell import running_of
from softcell.spaces.execution import fused_networks, is_modules_only, modules_only
from tests.helpers.fused_passes import two_passes
from tests.helpers.segmented_cells import twins

SPACES = ["nb1shot1-1", "nb1shot1-2", "nb1shot1-3", "nb201"]


def network_of(space: str) -> Network:
    sizes = {"cells_per_stage": 1} if space == "nb201" else {"cells_per_stack": 1}
    torch.manual_seed(0)
    built = build_space(space, {**sizes, "channels": 3})
    network = built.network(sample(built.layout(), 4), (3, 9, 8), 5).double().train()
    network.use_drop_path(0.5)
    return network


@pytest.mark.parametrize("space", SPACES)
def test_a_fused_pass_through_modules_equals_one_module_by_module(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    fused = network_of(space)
    for cell in fused.cells:  # type: ignore[union-attr]
        # a program measures all norms or none
        next(m for m in cell.modules() if isinstance(m, nn.BatchNorm2d)).eval()
    cells = [module for module in fused.modules() if isinstance(module, PickedCell)]
    assert not any(fused.has_fused_cells())
    paths = sum(cell.num_dropped() for cell in cells)
    factors = torch.randint(3, (paths, 4), generator=torch.Generator().manual_seed(2)).double()
    modules = copy.deepcopy(fused)
    mine = two_passes(fused, factors, fused=True, monkeypatch=monkeypatch)
    theirs = two_passes(modules, factors, fused=False, monkeypatch=monkeypatch)
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(mine[name], expected, rtol=1e-10, atol=1e-12, msg=name)


def test_cells_with_and_without_a_fused_form_get_their_own_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each a factor of its own per path; fused cells have a row of ones before theirs."""
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    network = network_of("nb201")
    cells = [module for module in network.modules() if isinstance(module, PickedCell)]
    next(m for m in cells[1].modules() if isinstance(m, nn.BatchNorm2d)).eval()
    counts = [cell.num_dropped() for cell in cells]
    drawn = torch.arange(sum(counts) * 4).view(-1, 4).double()
    monkeypatch.setattr(DropPath, "factors", lambda own, x, paths: drawn[:paths])
    seen: list[Tensor] = []
    for kind, name in ((PickedCell, "forward"), (AffineCell, "__call__")):
        original = getattr(kind, name)

        def noted(own, states, factors=None, original=original, **more):  # type: ignore[no-untyped-def]
            seen.append(factors)
            return original(own, states, factors, **more)

        monkeypatch.setattr(kind, name, noted)
    with fused_networks():
        network(torch.randn(4, 3, 9, 8).double())
    ones = torch.ones(1, 4).double()
    first, second, third = torch.split(drawn, counts)
    expected = [torch.cat([ones, first]), second, torch.cat([ones, third])]
    assert len(seen) == 3
    for a, b in zip(seen, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("space", SPACES)
def test_nothing_is_drawn_where_nothing_is_dropped(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    monkeypatch.setattr(DropPath, "factors", lambda *_: pytest.fail("factors were drawn"))
    network = network_of(space)
    images = torch.randn(4, 3, 9, 8).double()
    with fused_networks():
        network.eval()(images)
        network.use_drop_path(0.0)
        network.train()(images)


@pytest.mark.parametrize("space", SPACES)
def test_running_statistics_are_collected_once_for_all_cells(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    network = network_of(space)
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None and norm.running_var is not None
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
    calls: list[int] = []

    def noted(cells: Any) -> Any:
        calls.append(len(cells))
        return running_of(cells)

    monkeypatch.setattr(_fused_cell, "running_of", noted)
    images = torch.randn(4, 3, 9, 8).double()
    with fused_networks():
        mine = network.eval()(images)
    assert calls == [3] and all(network.has_fused_cells())
    torch.testing.assert_close(mine, network(images))


class Counts(TorchDispatchMode):
    """Counts additions to a single counter of batches."""

    num_alone = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_alone += func is torch.ops.aten.add_.Tensor and args[0].dtype == torch.int64
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("space", ["nb1shot1-1", "nos"])
def test_batches_are_counted_for_all_norms_at_once(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twins(monkeypatch)
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    if space == "nos":
        built = build_space(space, {"cells": 3, "channels": 3})
        network = built.network(sample(built.layout(), 4), (3, 9, 8), 5).double().train()
    else:
        network = network_of(space)
    images = torch.randn(4, 3, 9, 8).double()
    with Counts() as modules, modules_only():
        network(images)
    with Counts() as fused, fused_networks():
        network(images)
    outside = 1 if space == "nos" else 0  # the stem comes before the cells
    assert modules.num_alone > 10 and fused.num_alone == outside
