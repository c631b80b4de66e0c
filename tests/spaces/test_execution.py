"""The choice of an executor, and cells that run node by node as fused programs, equal to module by module."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import Layout, Mix, WeightMix
from softcell.arch.mix import Live
from softcell.data import Batch
from softcell.search.supernet import recalibrated
from softcell.spaces import MixedCell, Supernet, build_space, execution
from softcell.spaces._executors import NodeForms
from softcell.spaces.execution import (
    Execution,
    LayerExecution,
    fused_networks,
    is_modules_only,
    modules_only,
    plan,
    plan_layer,
    plan_modules,
    plan_network,
)
from tests.helpers.kernel_runs import without_tf32

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nos": ("nos", {"cells": 3, "channels": 4, "nodes": 2}),
    "nos, shared": ("nos", {"cells": 3, "channels": 4, "nodes": 2, "share_features": True}),
    "bottleneck": ("darts", {"cells": 3, "channels": 8, "nodes": 2, "bottleneck": 2}),
    "bottleneck, shared": ("darts", {"cells": 3, "channels": 8, "nodes": 2, "bottleneck": 2, "share_features": True}),
    "partial": ("darts", {"cells": 3, "channels": 8, "nodes": 2, "partial_channels": 2}),
}


APART = {
    **CASES,
    "darts": ("darts", {"cells": 3, "channels": 4, "nodes": 2}),
    "nb201": ("nb201", {"cells_per_stage": 1, "channels": 4}),
}


class Singly(Mix):
    """The same sums, from separate outputs."""

    def __init__(self, layout: Layout, tables: dict[str, Tensor], lives: dict[int, Live] | None) -> None:
        self._weights = [tables[name] for name in layout.sites]
        self._lives = lives or {}

    def live(self, site: int) -> Live | None:
        return self._lives.get(site)

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        terms = [self._weights[site][choice, k] * x for k, x in outputs.items() if x is not None]
        return torch.stack(terms).sum(0) if terms else None


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Cells are fused on the CPU too, by the kernels' plain twins; lists whether each node found a fused form."""
    found: list[bool] = []

    original = NodeForms.of

    def of(self: Any, *arguments: Any) -> Any:
        form = original(self, *arguments)
        found.append(form is not None)
        return form

    monkeypatch.setattr(NodeForms, "of", of)
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    return found


@functools.cache
def built(
    name: str, settings: tuple[tuple[str, Any], ...], device: str, dtype: torch.dtype
) -> tuple[Supernet, dict[str, Tensor]]:
    """A supernet that tests share, and its state at the start."""
    torch.manual_seed(0)
    supernet = build_space(name, dict(settings)).supernet((3, 8, 8), 5).to(device=device, dtype=dtype)
    return supernet, {key: value.clone() for key, value in supernet.state_dict().items()}


def outcome(
    name: str,
    settings: dict[str, Any],
    *,
    dropping: bool = False,
    some: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    singly: bool = False,
    offset: bool = False,
) -> list[Tensor]:
    """Output, gradients and running statistics of one training step."""
    supernet, state = built(name, tuple(settings.items()), device, dtype)
    supernet.load_state_dict(state)
    layout = supernet.layout
    supernet.use_drop_path(0.5 if dropping else 0.0)
    supernet.drop_path.set_fraction(1.0)
    torch.manual_seed(0)
    tables = {t.name: torch.randn(len(t), t.width, dtype=torch.float64).softmax(1) for t in layout.tables}
    tables = {key: value.to(device=device, dtype=dtype).requires_grad_() for key, value in tables.items()}
    lives = None
    if some:  # every second candidate of each choice
        lives = {
            site: tuple(tuple(range(i % 2, len(c.candidates), 2)) for i, c in enumerate(layout.table(own).choices))
            for site, own in enumerate(layout.sites)
        }
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64).to(device=device, dtype=dtype)
    torch.manual_seed(1)
    offsets = {key: torch.randn_like(value[:, 0]).requires_grad_() for key, value in tables.items()} if offset else {}
    mix = Singly(layout, tables, lives) if singly else WeightMix(layout, tables, lives, offsets=offsets)
    y = supernet(x, mix)
    wanted = [*tables.values(), *offsets.values(), *supernet.parameters()]
    gradients = torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)
    found = [g if g is not None else torch.zeros_like(w) for g, w in zip(gradients, wanted, strict=True)]
    return [y, *found, *(buffer.clone() for buffer in supernet.buffers())]


@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("dropping", [False, True], ids=["whole", "dropping"])
@pytest.mark.parametrize("case", list(CASES))
def test_a_step_equals_one_module_by_module(case: str, dropping: bool, some: bool, planned: list[bool]) -> None:
    name, settings = CASES[case]
    found = outcome(name, settings, dropping=dropping, some=some)
    assert planned and all(planned), "everything that leaves a node here has a fused form"
    planned.clear()
    with modules_only():
        expected = outcome(name, settings, dropping=dropping, some=some)
    assert not planned
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)  # drop-path's factors are float32


@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
def test_a_step_with_offsets_equals_one_module_by_module(some: bool, planned: list[bool]) -> None:
    """A cell that has a fused form as a whole runs node by node then, since offsets are added between the nodes."""
    name, settings = APART["nb201"]
    found = outcome(name, settings, some=some, offset=True)
    assert planned and all(planned)
    with modules_only():
        expected = outcome(name, settings, some=some, offset=True)
    assert found[2].any(), "the gradient of the offsets"
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("case", "some"), [*((case, False) for case in APART), ("nos", True), ("darts", True)])
def test_a_mix_that_needs_each_output_gets_what_modules_give(case: str, some: bool, planned: list[bool]) -> None:
    name, settings = APART[case]
    found = outcome(name, settings, dropping=True, some=some, singly=True)
    assert planned and all(planned)
    with modules_only():
        expected = outcome(name, settings, dropping=True, some=some, singly=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)  # drop-path's factors are float32


@pytest.mark.parametrize("frozen_first", [False, True])
@pytest.mark.parametrize(("case", "singly"), [("darts", False), ("nos", False), ("darts", True)])
def test_norms_may_be_frozen_at_any_time(case: str, singly: bool, frozen_first: bool, planned: list[bool]) -> None:
    """Every second norm keeps its running statistics in every second pass."""
    name, settings = APART[case]
    torch.manual_seed(0)
    fused = build_space(name, settings).supernet((3, 8, 8), 5).double()
    modules = copy.deepcopy(fused)
    tables = {t.name: torch.rand(t.shape, dtype=torch.float64) for t in fused.layout.tables}
    mix = Singly(fused.layout, tables, None) if singly else WeightMix(fused.layout, tables)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    for frozen in (frozen_first, not frozen_first, frozen_first, not frozen_first):
        found = []
        for supernet in (fused, modules):
            norms = [module for module in supernet.train().modules() if isinstance(module, nn.BatchNorm2d)]
            for norm in norms[:: 2 if frozen else len(norms)]:
                norm.train(not frozen)
            with modules_only() if supernet is modules else nullcontext():
                y = supernet(x, mix)
            gradients = torch.autograd.grad(y.square().sum(), list(supernet.parameters()), allow_unused=True)
            found.append([y, *(g for g in gradients if g is not None), *supernet.buffers()])
        for a, b in zip(*found, strict=True):
            # By norms: with running statistics, elements of one gradient differ by orders of magnitude.
            assert (a - b).double().norm() <= 1e-6 * b.double().norm() + 1e-9
        if not frozen and (case, singly) == ("darts", False):
            assert all(cell.fused(None) is not None for cell in fused.cells), "fused again"  # type: ignore[union-attr]
        elif not frozen:
            assert planned and all(planned), "fused again"
        planned.clear()


@pytest.mark.parametrize("before", [True, False], ids=["planned before", "planned then"])
@pytest.mark.parametrize("singly", [False, True], ids=["summed", "singly"])
@pytest.mark.parametrize("case", ["darts", "nb201", "nos"])
def test_recalibrated_norms_are_plain_means_and_leave_cells_unchanged(
    case: str, singly: bool, before: bool, planned: list[bool]
) -> None:
    name, settings = APART[case]
    settings = {**settings, "nodes": 2} if name == "nb201" else {**settings, "nodes": 1}

    def measured() -> tuple[list[Tensor], list[Tensor], Tensor]:
        torch.manual_seed(0)
        supernet = build_space(name, settings).supernet((3, 8, 8), 5).double()
        layout = supernet.layout
        tables = {t.name: torch.randn(len(t), t.width, dtype=torch.float64).softmax(1) for t in layout.tables}
        mix = (Singly if singly else WeightMix)(layout, tables, None)
        images = torch.randn(3, 6, 3, 8, 8, dtype=torch.float64)
        with torch.no_grad():
            if before:
                supernet(images[0], mix)
            with recalibrated(supernet, mix, [Batch(x, torch.zeros(6), torch.arange(6)) for x in images[1:]]):
                inside = [b.clone() for b in supernet.buffers()]
            after = supernet(images[0], mix)
        return inside, [b.clone() for b in supernet.buffers()], after

    found = measured()
    assert not planned or all(planned), "a cell planned during recalibration stays fused"
    with modules_only():
        expected = measured()
    for a, b in zip((*found[0], *found[1], found[2]), (*expected[0], *expected[1], expected[2]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


# --- the choice of an executor ---

CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    **APART,
    "noise": ("s4", {"cells": 3, "channels": 4, "nodes": 2}),
    "one shot": ("nb1shot1-1", {"cells_per_stack": 1, "channels": 4}),
}
FUSED = {"all": ("darts", "nb201"), "first": ("noise",)}
"""Cells with a fused form by their live candidates: noise has no kernel, and `none`, DARTS's first, no convolution."""
DEVICES = ("cpu", "cuda", "mps")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(scope="module")
def mixed_cells() -> dict[str, tuple[MixedCell, Layout]]:
    """Per case the first cell, and a reduction cell of DARTS's."""
    found = {}
    for name, (space, settings) in CELLS.items():
        supernet = build_space(space, settings).supernet((3, 8, 8), 5)
        for own in supernet.modules():
            if isinstance(own, MixedCell):
                found.setdefault(name, (own, supernet.layout))
                if own.spec.stride == 2:
                    found[f"{name}, stride 2"] = own, supernet.layout
    return found


def expected_execution(served: bool, plain: bool, whole: bool) -> Execution:
    """The conditions one by one, as a table."""
    return {
        (False, False, False): Execution.MODULES,
        (False, False, True): Execution.MODULES,
        (False, True, False): Execution.MODULES,
        (False, True, True): Execution.MODULES,
        (True, False, False): Execution.FUSED_OUTPUTS,
        (True, False, True): Execution.FUSED_OUTPUTS,
        (True, True, False): Execution.FUSED_SUMS,
        (True, True, True): Execution.FUSED_CELL,
    }[served, plain, whole]


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("triton", [False, True])
def test_the_executor_follows_device_type_mix_and_cell(
    triton: bool,
    only: bool,
    mixed_cells: dict[str, tuple[MixedCell, Layout]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execution, "has_triton", lambda: triton)
    seen = set()
    for device, dtype in itertools.product(DEVICES, DTYPES):
        x: Any = SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype, numel=lambda: 1)
        served = device == "cuda" and dtype in (torch.float32, torch.bfloat16) and triton and not only
        for name, (cell, layout) in mixed_cells.items():
            tables = {table.name: torch.zeros(table.shape) for table in layout.tables}
            live = {site: ((0,),) * len(layout.table(own)) for site, own in enumerate(layout.sites)}
            for mix in (WeightMix(layout, tables), WeightMix(layout, tables, live), Singly(layout, tables, None)):
                whole = name.removesuffix(", stride 2") in FUSED["all" if mix.live(0) is None else "first"]
                with modules_only() if only else nullcontext():
                    chosen = plan(cell, mix, 0, x)
                assert chosen is expected_execution(served, isinstance(mix, WeightMix), whole), (name, device, dtype)
                seen.add(chosen)
        with modules_only() if only else nullcontext():
            assert plan_modules(x) == (not only and device in ("cpu", "cuda"), not only)
            assert not plan_network(x), "only within `fused_networks`"
            with fused_networks():
                assert plan_network(x) == served
    assert (len(seen) == 4) == (triton and not only)


@pytest.mark.parametrize("only", [False, True])
def test_the_executor_of_a_layer_follows_device_and_mix(only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = build_space("fullattention", {"layers": 1, "channels": 16}).layout()
    tables = {table.name: torch.zeros(table.shape) for table in layout.tables}
    ones = torch.zeros(layout.tables[0].shape)
    ones[0, 0] = 1.0
    weights, picked = WeightMix(layout, tables), WeightMix(layout, tables, None, {0: (((0,),), ones)})
    singly, again = Singly(layout, tables, None), Singly(layout, tables, None)
    monkeypatch.setattr(again, "recomputes", lambda site, choice: True, raising=False)
    for device in DEVICES:
        x: Any = SimpleNamespace(device=SimpleNamespace(type=device))
        together = device == "cuda" and not only
        expected = {
            weights: LayerExecution.STACKED if together else LayerExecution.MODULES,
            picked: LayerExecution.GROUPED if together else LayerExecution.MODULES,
            singly: LayerExecution.GROUPED if together else LayerExecution.MODULES,
            again: LayerExecution.MODULES,
        }
        with modules_only() if only else nullcontext():
            for mix, chosen in expected.items():
                assert plan_layer(mix, 0, 0, x) is chosen


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none")
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("singly", [False, True], ids=["summed", "singly"])
@pytest.mark.parametrize("case", list(APART))
@without_tf32()
def test_on_a_gpu_the_kernels_give_what_modules_give_in_float64(case: str, singly: bool, some: bool) -> None:
    name, settings = APART[case]
    expected = outcome(name, settings, some=some, singly=singly)
    found = outcome(name, settings, some=some, singly=singly, device="cuda", dtype=torch.float32)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        error = (a.cpu().double() - b).norm() / b.double().norm().clamp(min=1e-3)
        assert error < 1e-3
