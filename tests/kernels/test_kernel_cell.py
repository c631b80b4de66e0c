"""The fused cell against the cell's own modules, by the twins on the CPU: values, gradients, statistics."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import WeightMix
from softcell.kernels.cell import mixed_cell, mixed_cell_reference
from softcell.kernels.norm import gradient_sums
from softcell.kernels.taps import Group, Window, masked_input_gradient, tiles
from softcell.nn.norm import updates_together
from softcell.spaces import build_space
from softcell.spaces._fused_plan import Entry, Unfit, plan
from softcell.spaces.execution import kernels_serve, modules_only
from tests.helpers.kernel_cells import (
    OneSite,
    both_paths,
    build_cell,
    fuse,
    leaving,
    random_inputs,
    require_rounding_only,
    require_same,
    short_outcomes,
)

CELLS = [("darts", 0), ("darts", 1), ("shared", 0), ("shared", 1), ("nb201", 0)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("space", "number"), CELLS)
def test_fused_cell_equals_its_modules(space: str, number: int, training: bool) -> None:
    cell = build_cell(space, number).double().train(training)
    for module in cell.modules():  # running statistics that are not those of a fresh norm
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
    require_same(*both_paths(cell, (7, 6), 2), tolerance=1e-10)


@pytest.mark.parametrize(("space", "number"), CELLS)
def test_dropped_paths_equal_those_of_modules(space: str, number: int) -> None:
    cell = build_cell(space, number).double()
    dropped, expected = both_paths(cell, (7, 6), 6, drops=True)
    require_same(dropped, expected, tolerance=1e-10)
    whole, _ = both_paths(cell, (7, 6), 6)
    with pytest.raises(AssertionError):  # something was dropped
        require_same(dropped, whole, tolerance=1e-2)


def test_live_candidates_alone_run() -> None:
    cell = build_cell("darts").double()
    widths = [len(choice.candidates) for choice in cell.table.choices]
    live = tuple(tuple(k for k in range(width) if (k + i) % 3) for i, width in enumerate(widths))
    mine, theirs = both_paths(cell, (5, 6), 2, live)
    require_same(mine, theirs, tolerance=1e-10)
    idle = {name for name, _ in cell.named_parameters()} - mine.keys()
    assert idle, "some candidates must not have run"


@pytest.mark.parametrize("apart", [False, True])
def test_the_function_equals_its_twin_in_both_orders(apart: bool) -> None:
    """Second derivatives go through the twin; they are what unrolled search with exact derivatives needs."""
    cell = build_cell("darts", nodes=1, channels=2).double()
    states, weights = random_inputs(cell, (4, 4), 2)
    fused = fuse(cell)
    if apart:
        fused, states = leaving("darts", 0, 0, apart=True, nodes=1, channels=2), states[:1]
        fused = replace(fused, convolutions=tuple(conv.double() for conv in fused.convolutions))
    flat = fused.flatten(fused.parameters()).detach()
    factors = torch.tensor([[0.0, 1.5], [2.0, 1.0]])[: len(cell.table)]
    found = []
    for function in (mixed_cell, mixed_cell_reference):
        inputs = given = [t.clone().requires_grad_() for t in (weights.flatten(), flat, *states)]
        nodes, moments = function(fused.program, torch.float64, given[0], given[1], None, factors, *given[2:])
        loss = sum((node**3).sum() for node in nodes)
        assert isinstance(loss, Tensor)
        inputs = inputs[1:] if apart else inputs  # nothing is mixed
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), inputs)  # type: ignore[arg-type]
        plain = torch.autograd.grad(
            sum(
                (node**3).sum()
                for node in function(fused.program, torch.float64, *given[:2], None, factors, *given[2:])[0]
            ),  # type: ignore[arg-type]
            inputs,
        )
        normed = [plane for plane, _ in fused.norms]  # statistics of others are undefined
        found.append([*nodes, moments[:, normed], *first, *second, *plain])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("used", [[0, 3], [5], []])
def test_unused_separate_outputs_give_no_gradient(used: list[int], training: bool) -> None:
    """Each output by itself, of the batch's statistics and of the running ones: the twin's gradients, to the last."""
    fused = leaving("darts", 1, 0, apart=True, nodes=1, channels=2)
    program = fused.program
    generator = torch.Generator().manual_seed(2)
    flat = fused.flatten([conv.weight.double() for conv in fused.convolutions]).detach()
    x = torch.randn(3, program.channels, 7, 5, generator=generator, dtype=torch.float64)
    inputs = [flat.requires_grad_(), x.requires_grad_()]
    mean, variance = torch.rand(2, program.planes, program.channels, generator=generator, dtype=torch.float64)
    running = torch.stack([mean - 0.5, variance + 0.5])
    found = []
    for function in (mixed_cell, mixed_cell_reference):
        given = None if training else running
        outputs, _ = function(program, torch.float64, flat.detach(), inputs[0], given, None, inputs[1])
        ignored: Tensor = _Ignored.apply(*outputs)  # type: ignore[no-untyped-call]
        loss = sum((outputs[i] ** 3).sum() for i in used) + ignored
        found.append(torch.autograd.grad(loss, inputs, materialize_grads=True))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    assert bool(used) == bool(found[0][1].any())


class _Ignored(torch.autograd.Function):
    """Takes everything and hands no gradient back."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> Tensor:
        ctx.count = len(values)
        return values[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        return (None,) * ctx.count


def test_sums_for_the_gradient_of_a_norm_are_float32_for_any_input() -> None:
    """Large terms that nearly cancel: products rounded to bfloat16 would leave nothing of their sum."""
    generator = torch.Generator().manual_seed(0)
    y, dy = (torch.randn(3, 2, 13, 11, 5, generator=generator).bfloat16() for _ in range(2))
    dy[:, 1] = -dy[:, 0] * (1 + 2.0**-7)
    y[:, 1] = y[:, 0]
    wide = torch.stack([dy.double(), dy.double() * y.double()]).sum((2, 3, 4))
    partial = torch.full((2, tiles(286), 3, 5), torch.nan)
    gradient_sums(y, dy, partial, range(1, 3))
    torch.testing.assert_close(partial[:, :, 1:].double().sum(1), wide[:, 1:], rtol=1e-5, atol=1e-5)
    assert partial[:, :, 0].isnan().all(), "other planes are left alone"
    kernel = torch.randn(5 * 9 * 5, generator=generator).bfloat16()
    masked_input_gradient(dy, kernel, y, dy, partial, [Group(Window(3, 1, 1, 1), 1, 2, 1, 0)])
    wide = torch.stack([dy[1].double(), dy[1].double() * y[1].double()]).sum((1, 2, 3))
    torch.testing.assert_close(partial[:, :, 1].double().sum(1), wide, rtol=1e-5, atol=1e-4)


def test_gradients_have_the_layout_of_their_weights() -> None:
    """Fused optimisers refuse others."""
    for space, number in (("darts", 1), ("nb201", 0)):
        cell = build_cell(space, number).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        states, weights = random_inputs(cell, (6, 6), 2, torch.float32)
        nodes = fuse(cell)(states, weights.flatten())
        parameters = list(cell.parameters())
        gradients = torch.autograd.grad(nodes[-1].sum(), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert gradient is None or gradient.stride() == parameter.stride()


def test_weight_gradients_are_formed_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr("softcell.kernels.cell.weight_gradient", lambda *args: calls.append(1))
    cell = build_cell("nb201")
    states, weights = random_inputs(cell, (5, 5), 2, torch.float32)
    weights.requires_grad_()
    nodes = fuse(cell)(states, weights.flatten())
    torch.autograd.grad(nodes[-1].sum(), weights, retain_graph=True)
    assert not calls
    torch.autograd.grad(nodes[-1].sum(), list(cell.parameters()), allow_unused=True)
    assert calls


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("space", "number", "channels"), [("darts", 0, 8), ("darts", 1, 5), ("shared", 1, 4), ("nb201", 0, 8)]
)
def test_bfloat16_errors_are_no_larger_than_those_of_modules(
    space: str, number: int, channels: int, training: bool
) -> None:
    cell = build_cell(space, number, channels=channels).train(training)
    require_rounding_only(*short_outcomes(cell, (9, 8), 4))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_the_same_when_they_are_updated_together(momentum: float | None) -> None:
    """Two cells, one of which runs twice, with maps of different sizes."""
    found = []
    for context in (nullcontext, updates_together):
        cells = [build_cell("nb201", number) for number in (0, 1)]
        for module in (module for cell in cells for module in cell.modules()):
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = momentum
        forms = [fuse(cell) for cell in cells]
        with context():
            for number, size in ((0, 7), (1, 5), (0, 6), (1, 9)):
                states, weights = random_inputs(cells[number], (size, size), 2, torch.float32)
                forms[number](states, weights.flatten())
        found.append([buffer for cell in cells for buffer in cell.buffers()])
    assert any(int(buffer) == 2 for buffer in found[0] if not buffer.dim())
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("space", ["nb201", "darts"])
def test_only_the_last_node_may_have_a_gradient(space: str) -> None:
    """A node that is read by later ones and a node that is not, each without a gradient of its own."""
    cell = build_cell(space).double()
    states, weights = random_inputs(cell, (5, 6), 2)
    inputs = [t.requires_grad_() for t in (*states, weights)]
    for last in (-1, cell.inputs):
        mine = torch.autograd.grad(fuse(cell)(states, weights.flatten())[last].square().sum(), inputs)
        with modules_only():
            node = cell(states, OneSite(weights), 0)[last]
        theirs = torch.autograd.grad(node.square().sum(), inputs)
        for own, expected in zip(mine, theirs, strict=True):
            torch.testing.assert_close(own, expected)


def test_bfloat16_stays_bfloat16() -> None:
    cell = build_cell("darts", channels=4)
    states, weights = random_inputs(cell, (8, 8), 4, torch.float32)
    nodes = fuse(cell)([s.bfloat16() for s in states], weights.flatten())
    assert {node.dtype for node in nodes} == {torch.bfloat16}


def test_a_node_that_nothing_reaches_is_zero() -> None:
    cell = build_cell("nb201").double()
    states, weights = random_inputs(cell, (5, 5), 2)
    none = 0
    live = tuple(
        (none,) if choice.target == 1 else tuple(range(len(choice.candidates))) for choice in cell.table.choices
    )
    nodes = fuse(cell, live)(states, weights.flatten())
    with modules_only():
        expected = cell(states, OneSite(weights, live), 0)
    assert nodes[1].abs().max() == 0
    torch.testing.assert_close(nodes[2], expected[2])


def test_an_unknown_candidate_is_refused_by_name() -> None:
    convolution = build_cell("nb201").edges.module(2)
    entries = [Entry(0, 1, 0, convolution), Entry(0, 1, 1, nn.Conv2d(3, 3, 3, padding=1))]
    with pytest.raises(Unfit, match="Conv2d"):
        plan(entries, inputs=1, nodes=2, channels=3, stride=1)


def test_norms_with_scale_and_shift_are_refused() -> None:
    cell = build_cell("nb201")
    for module in cell.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.affine = True
    with pytest.raises(Unfit, match="scale and shift"):
        fuse(cell)


def test_training_needs_more_than_one_value_per_channel() -> None:
    cell = build_cell("nb201").double()
    states, weights = random_inputs(cell, (1, 1), 1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fuse(cell)(states, weights.flatten())


def test_the_cpu_runs_modules() -> None:
    assert not kernels_serve(torch.zeros(1))


def test_a_supernet_keeps_the_names_of_its_state() -> None:
    space = build_space("nb201", {"cells_per_stage": 1, "channels": 2})
    supernet = space.supernet((3, 8, 8), 10)
    before = list(supernet.state_dict())
    uniform = {t.name: torch.full(t.shape, 0.2) for t in supernet.layout.tables}
    supernet(torch.randn(2, 3, 8, 8), WeightMix(supernet.layout, uniform))
    assert list(supernet.state_dict()) == before
