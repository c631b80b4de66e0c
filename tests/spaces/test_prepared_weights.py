"""Weights of all fused cells of a pass are flattened and converted together; each cell alone is the oracle."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from softcell.arch import WeightMix
from softcell.arch.notation import from_nb201
from softcell.kernels.backend import cell_settings
from softcell.kernels.cell import readers
from softcell.kernels.taps import compose
from softcell.methods.itnas import ItNas, ItNasSettings
from softcell.spaces import Supernet, _executors, _fused_cell, build_space, execution
from softcell.spaces._fused_cell import FusedCell, prepare
from softcell.spaces.execution import fused_networks, is_modules_only, modules_only

SIZES: dict[str, dict[str, Any]] = {"nb201": {"cells_per_stage": 1}, "darts": {"cells": 3, "nodes": 2}}


def supernet_of(space: str, channels: int = 4) -> Supernet:
    torch.manual_seed(0)
    return build_space(space, {**SIZES[space], "channels": channels}).supernet((3, 8, 8), 5).train()


def mix_of(supernet: Supernet, *, dtype: torch.dtype = torch.float32) -> tuple[WeightMix, list[Tensor]]:
    """A mix, and the leaves that it depends on."""
    generator = torch.Generator().manual_seed(1)
    logits = {
        table.name: torch.randn(len(table), table.width, generator=generator).to(dtype).requires_grad_()
        for table in supernet.layout.tables
    }
    weights = {name: torch.softmax(own, dim=1) for name, own in logits.items()}
    return WeightMix(supernet.layout, weights), list(logits.values())


def results(supernet: Supernet, *, autocast: bool) -> list[Tensor]:
    """Logits, gradients of weights and architecture, and buffers."""
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    mix, leaves = mix_of(supernet)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        logits = supernet(images, mix)
    logits.float().square().sum().backward()
    gradients = [p.grad for p in [*supernet.parameters(), *leaves] if p.grad is not None]
    return [logits.detach(), *gradients, *supernet.buffers()]


class Named(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("space", SIZES)
def test_cells_that_share_launches_have_the_same_bits(
    space: str, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    together = supernet_of(space)
    alone = copy.deepcopy(together)
    calls: list[int] = []

    def noted(cells: Any, x: Tensor) -> Any:
        calls.append(len(cells))
        return prepare(cells, x)

    monkeypatch.setattr("softcell.spaces._fused_cell.prepare", noted)
    mine = results(together, autocast=autocast)
    assert calls == [3], "one call serves all cells"
    calls.clear()
    monkeypatch.setattr(_executors, "prepared", lambda cells, x: nullcontext())
    expected = results(alone, autocast=autocast)
    assert calls == [1, 1, 1]
    assert len(mine) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


@pytest.mark.parametrize(("paths", "num_prepared"), [("all", 9), ("single", None)])
def test_programs_with_separate_outputs_share_launches(
    paths: Any, num_prepared: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IT-NAS combines the outputs of candidates itself: three nodes of every cell have one program each."""
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    supernet, images = supernet_of("nb201"), torch.randn(4, 3, 8, 8)
    method = ItNas.for_supernet(ItNasSettings(paths=paths), supernet)
    buffers, calls, found = copy.deepcopy(dict(supernet.named_buffers())), list[int](), list[list[Tensor]]()

    def noted(cells: Any, x: Tensor) -> Any:
        calls.append(len(cells))
        return prepare(cells, x)

    monkeypatch.setattr("softcell.spaces._fused_cell.prepare", noted)
    for _ in range(2):
        supernet.load_state_dict(buffers, strict=False)
        with torch.autocast("cpu", torch.bfloat16):
            logits = supernet(images, method.relax())
        wanted = [*supernet.parameters(), *method.parameters()]
        gradients = torch.autograd.grad(logits.float().square().sum(), wanted, materialize_grads=True)
        found.append([logits.detach(), *gradients, *(buffer.clone() for buffer in supernet.buffers())])
        monkeypatch.setattr(_executors, "prepared", lambda cells, x: nullcontext())
    (together, *alone), (mine, expected) = calls, found
    assert together == len(alone) and set(alone) == {1}, "what runs is prepared, and nothing else"
    assert num_prepared in (None, together)
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def cells_of(supernet: Supernet) -> list[FusedCell]:
    return [form for cell in supernet.cells if (form := cell.fused(None)) is not None]  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("space", SIZES)
def test_weights_of_all_cells_are_concatenated_and_converted_once(space: str) -> None:
    cells = cells_of(supernet_of(space))
    with Named() as operations, torch.autocast("cpu", torch.bfloat16):
        found = prepare(cells, torch.zeros(1))
    counts = [operations.seen.count(name) for name in ("aten.cat", "aten._foreach_copy_", "aten._to_copy")]
    assert counts == [1, 1, 0]
    for cell, own in zip(cells, found, strict=True):
        assert torch.equal(own.flat, cell.flatten(cell.parameters()))
        assert torch.equal(own.flat, cell.connected(own)) and cell.connected(own).requires_grad
        assert torch.equal(own.converted, own.flat.bfloat16()) and not own.converted.requires_grad


def test_vectors_of_odd_sizes_are_not_shared() -> None:
    """Kernels may read weights of a cell as whole words, so each vector must begin at the start of one."""
    for channels, num_shared in ((3, 1), (4, 3)):
        cells = cells_of(supernet_of("nb201", channels=channels))
        assert any(cell.program.size % 16 for cell in cells) is (channels == 3)
        found = prepare(cells, torch.zeros(1))
        storages = [own.converted.untyped_storage().data_ptr() for own in found]
        assert all(storages.count(one) == num_shared for one in storages)
        assert not any(own.converted.storage_offset() % 16 for own in found)


def test_running_statistics_of_all_cells_are_collected_by_one_concatenation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    supernet = supernet_of("nb201")
    for norm in (module for module in supernet.modules() if isinstance(module, nn.BatchNorm2d)):
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    (mix, _), images = mix_of(supernet), torch.randn(4, 3, 8, 8)
    with Named() as operations, torch.no_grad():
        mine = supernet.eval()(images, mix)
    assert (operations.seen.count("aten.cat"), operations.seen.count("aten.stack")) == (2, 3)
    with modules_only(), torch.no_grad():
        torch.testing.assert_close(mine, supernet(images, mix), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("space", SIZES)
def test_second_derivatives_are_those_of_plain_concatenation(space: str) -> None:
    cells = cells_of(supernet_of(space).double())
    (own, *_), cell = prepare(cells, torch.zeros(1).double()), cells[0]
    weights = cell.parameters()
    found = []
    for flat in (cell.connected(own), cell.flatten(weights)):
        (first, *_) = torch.autograd.grad(flat.pow(3).sum(), weights, create_graph=True)
        found.append(torch.autograd.grad(first.pow(2).sum(), weights[0])[0])
    torch.testing.assert_close(*found)


def test_cells_whose_weights_are_not_used_get_no_gradient() -> None:
    cells = cells_of(supernet_of("darts"))
    first, second, _ = (cell.connected(own) for cell, own in zip(cells, prepare(cells, torch.zeros(1)), strict=True))
    second.sum().backward()
    assert all(w.grad is None for w in cells[0].parameters())
    assert all(w.grad is not None for w in cells[1].parameters())
    assert first.requires_grad


@pytest.mark.parametrize("channels", [3, 4])
def test_cells_of_several_widths_are_composed_by_one_launch_for_each(
    channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []

    def noted(factors: Tensor, out: Tensor, recipes: Any, width: int) -> None:
        widths.append(width)
        compose(factors, out, recipes, width)

    monkeypatch.setattr(_fused_cell, "compose", noted)
    cells = cells_of(supernet_of("darts", channels=channels))
    found = prepare(cells, torch.zeros(1))
    assert widths == sorted({cell.program.channels for cell in cells}) and len(widths) == 3
    for cell, own in zip(cells, found, strict=True):
        assert torch.equal(own.flat, cell.flatten(cell.parameters())) and own.flat.storage_offset() % 16 == 0


def test_programs_of_nodes_are_prepared_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    calls: list[int] = []

    def noted(cells: Any, x: Tensor) -> Any:
        calls.append(len(cells))
        return prepare(cells, x)

    monkeypatch.setattr("softcell.spaces._fused_cell.prepare", noted)
    supernet = build_space("nos", {"cells": 3, "nodes": 2, "channels": 4}).supernet((3, 8, 8), 5)
    supernet(torch.randn(4, 3, 8, 8), mix_of(supernet)[0])
    assert calls == [3 * 5], "in each cell of the inputs, two surrogates, and the node between them"


def test_a_derived_network_concatenates_its_parameters_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of convolutions, and scales and shifts of norms: twice each for three cells before."""
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    space = build_space("nb201", {"cells_per_stage": 1, "channels": 4})
    cell = "|nor_conv_3x3~0|+|skip_connect~0|nor_conv_1x1~1|+|avg_pool_3x3~0|none~1|nor_conv_3x3~2|"
    network = space.network(from_nb201(cell), (3, 8, 8), 5).train()
    with fused_networks():
        network(torch.randn(4, 3, 8, 8))
        with Named() as operations:
            network(torch.randn(4, 3, 8, 8))
    assert operations.seen.count("aten.cat") == 2


def gradients_of_the_mix(
    supernet: Supernet, *, together: bool, stage: int = -1, again: bool = False
) -> tuple[list[Tensor], list[str]]:
    """Gradients of the architecture alone in float64, or of their squares, and the operations of the backward pass."""
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2)).double()
    with cell_settings(mixes_together=together):
        mix, leaves = mix_of(supernet, dtype=torch.float64)
        loss = supernet.features(images, mix)[stage].square().sum()
        with Named() as named:
            found = torch.autograd.grad(loss, leaves, create_graph=again, retain_graph=True, allow_unused=True)
        if again:
            known = [g for g in found if g is not None]
            found = torch.autograd.grad(sum(g.square().sum() for g in known), leaves, allow_unused=True)
        else:
            for a, b in zip(found, torch.autograd.grad(loss, leaves, allow_unused=True), strict=True):
                assert a is b is None or torch.equal(a, b), "a second backward pass writes to the same memory"
    return [torch.zeros(()) if g is None else g for g in found], named.seen


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("stage", [-1, 0, 1])
@pytest.mark.parametrize("space", SIZES)
def test_gradients_of_a_table_that_cells_share_are_summed_at_once(
    space: str, stage: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    supernet = supernet_of(space).double()
    mine, seen = gradients_of_the_mix(supernet, together=True, stage=stage, again=again)
    theirs, expected = gradients_of_the_mix(supernet, together=False, stage=stage, again=again)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    if stage == -1 and not again:
        cells = {"nb201": 3, "darts": 2}[space]  # of DARTS the reductions
        assert expected.count("aten.zeros_like") - seen.count("aten.zeros_like") == cells
        assert len(seen) < len(expected)


def test_a_table_that_one_cell_reads_and_a_mix_without_gradient_stay_as_they_are() -> None:
    table = torch.rand(6, requires_grad=True)
    with torch.no_grad():
        assert all(read.mix is table and read.room is None for read in readers(table, 3))
    assert all(read.mix is table.detach() or read.room is None for read in readers(table.detach(), 3))
    found = readers(table, 3)
    assert [read.room is not None for read in found] == [True] * 3
    loss = sum((i + 1) * read.mix.sum() for i, read in enumerate(found[:2]))
    [gradient] = torch.autograd.grad(loss, table)
    assert torch.equal(gradient, torch.full((6,), 3.0)), "of readers that are no cells"
