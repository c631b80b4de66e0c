"""Cells that cannot be fused as a whole: what leaves a node runs as one program, equal to module by module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.arch import Layout, Mix, WeightMix
from softcell.arch.mix import Live
from softcell.data import Batch
from softcell.search.child import norms_measured_anew
from softcell.spaces import build_space, cell
from softcell.spaces.fused import Departures, OutputsApart, literal, modules_only

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nos": ("nos", {"cells": 3, "channels": 4, "nodes": 2}),
    "nos, shared": ("nos", {"cells": 3, "channels": 4, "nodes": 2, "share_features": True}),
    "bottleneck": ("darts", {"cells": 3, "channels": 8, "nodes": 3, "bottleneck": 2}),
    "bottleneck, shared": ("darts", {"cells": 3, "channels": 8, "nodes": 3, "bottleneck": 2, "share_features": True}),
}


APART = {
    **CASES,
    "darts": ("darts", {"cells": 3, "channels": 4, "nodes": 3}),
    "nb201": ("nb201", {"cells_per_stage": 1, "channels": 4}),
}


class Singly(Mix):
    """The same sums, from outputs that arrive one by one."""

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
    """Cells are fused on the CPU too, by the kernels' plain twins; lists whether each departure found a plan."""
    found: list[bool] = []

    def watch(kind: type[Departures] | type[OutputsApart]) -> None:
        original = kind.of

        def of(self: Any, *arguments: Any) -> Any:
            departure = original(self, *arguments)
            found.append(departure is not None)
            return departure

        monkeypatch.setattr(kind, "of", of)

    watch(Departures)
    watch(OutputsApart)
    monkeypatch.setattr(cell, "serves", lambda x: not literal())
    return found


def outcome(
    name: str,
    settings: dict[str, Any],
    *,
    dropping: bool = False,
    some: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    singly: bool = False,
) -> list[Tensor]:
    """Output, gradients and running statistics of one training step."""
    torch.manual_seed(0)
    supernet = build_space(name, settings).supernet((3, 8, 8), 5).to(device=device, dtype=dtype)
    layout = supernet.layout
    if dropping:
        supernet.use_drop_path(0.5)
        supernet.drop_path.set_fraction(1.0)
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
    y = supernet(x, (Singly if singly else WeightMix)(layout, tables, lives))
    wanted = [*tables.values(), *supernet.parameters()]
    gradients = torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)
    found = [g if g is not None else torch.zeros_like(w) for g, w in zip(gradients, wanted, strict=True)]
    return [y, *found, *supernet.buffers()]


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


@pytest.mark.parametrize(("case", "some"), [*((case, False) for case in APART), ("nos", True), ("darts", True)])
def test_a_mix_that_wants_each_output_gets_what_modules_give(case: str, some: bool, planned: list[bool]) -> None:
    name, settings = APART[case]
    found = outcome(name, settings, dropping=True, some=some, singly=True)
    assert planned and all(planned)
    with modules_only():
        expected = outcome(name, settings, dropping=True, some=some, singly=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)  # drop-path's factors are float32


@pytest.mark.parametrize("before", [True, False], ids=["planned before", "planned then"])
@pytest.mark.parametrize("singly", [False, True], ids=["summed", "singly"])
@pytest.mark.parametrize("case", ["darts", "nb201", "nos"])
def test_norms_measured_anew_are_plain_means_and_leave_cells_as_they_were(
    case: str, singly: bool, before: bool, planned: list[bool]
) -> None:
    name, settings = APART[case]

    def measured() -> tuple[list[Tensor], list[Tensor], Tensor]:
        torch.manual_seed(0)
        supernet = build_space(name, settings).supernet((3, 8, 8), 5).double()
        layout = supernet.layout
        tables = {t.name: torch.randn(len(t), t.width, dtype=torch.float64).softmax(1) for t in layout.tables}
        mix = (Singly if singly else WeightMix)(layout, tables, None)
        images = torch.randn(4, 6, 3, 8, 8, dtype=torch.float64)
        with torch.no_grad():
            if before:
                supernet(images[0], mix)
            with norms_measured_anew(supernet, mix, [Batch(x, torch.zeros(6), torch.arange(6)) for x in images[1:]]):
                inside = [b.clone() for b in supernet.buffers()]
            after = supernet(images[0], mix)
        return inside, [b.clone() for b in supernet.buffers()], after

    found = measured()
    assert not planned or all(planned), "a cell that is planned while norms are measured is fused for good"
    with modules_only():
        expected = measured()
    for a, b in zip((*found[0], *found[1], found[2]), (*expected[0], *expected[1], expected[2]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none")
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("singly", [False, True], ids=["summed", "singly"])
@pytest.mark.parametrize("case", list(APART))
def test_on_a_gpu_the_kernels_give_what_modules_give_in_float64(
    case: str, singly: bool, some: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As every session does; torch's own convolutions here round to ten bits otherwise.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    name, settings = APART[case]
    expected = outcome(name, settings, some=some, singly=singly)
    found = outcome(name, settings, some=some, singly=singly, device="cuda", dtype=torch.float32)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        error = (a.cpu().double() - b).norm() / b.double().norm().clamp(min=1e-3)
        assert error < 1e-3
