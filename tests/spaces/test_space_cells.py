"""The mixed cell against cells written literally: one module per candidate and edge, plain loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import Cell, Choice, Layout, Pick, StrongestEach, Table, WeightMix
from softcell.errors import UserError
from softcell.nn.candidates import Spec
from softcell.nn.stochastic import DropPath
from softcell.spaces import build_space
from softcell.spaces.cell import MixedCell, PickedCell
from softcell.spaces.darts import CANDIDATES as DARTS_OPS
from softcell.spaces.edges import Edges
from softcell.spaces.nb201 import CANDIDATES as NB201_OPS
from tests.reference.reference_cells import LiteralCell, copy_weights, literal

CHANNELS = 4


def table_of(inputs: int, nodes: int, ops: tuple[str, ...]) -> Table:
    choices = tuple(Choice(s, t, ops) for t in range(inputs, inputs + nodes) for s in range(t))
    return Table("cell", choices, tuple(range(inputs, inputs + nodes)))


def normal(source: int) -> Spec:
    return Spec(CHANNELS, 1, affine=False, pool_norm=True)


def reduction(source: int) -> Spec:
    return Spec(CHANNELS, 2 if source < 2 else 1, affine=False, pool_norm=True)


def bench(source: int) -> Spec:
    return Spec(CHANNELS, 1, affine=False, pool_norm=False)


CASES = {
    "DARTS normal": (table_of(2, 3, DARTS_OPS), 2, normal),
    "DARTS reduction": (table_of(2, 3, DARTS_OPS), 2, reduction),
    "NAS-Bench-201": (table_of(1, 3, NB201_OPS), 1, bench),
}


def twins(table: Table, inputs: int, spec_of: Callable[[int], Spec]) -> tuple[MixedCell, LiteralCell, Layout]:
    """A mixed cell and its literal twin with equal weights."""
    torch.manual_seed(0)
    cell = MixedCell(table, inputs, spec_of).double()
    ops: list[list[nn.Module]] = []
    entry = 0
    for choice in table.choices:
        row = []
        for op in choice.candidates:
            spec, mine = spec_of(choice.source), cell.edges.module(entry)
            twin = literal(op, CHANNELS, spec.stride, pool_norm=spec.pool_norm).double()
            if mine is not None:
                copy_weights(mine, twin)
            row.append(twin)
            entry += 1
        ops.append(row)
    edges = [(choice.source, choice.target) for choice in table.choices]
    return cell, LiteralCell(inputs, edges, ops), Layout("toy", (table,), ("cell",), StrongestEach())


def inputs_of(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, CHANNELS, 8, 6, generator=generator, dtype=torch.float64) for _ in range(number)]


@pytest.mark.parametrize("name", CASES)
def test_a_mixed_cell_equals_its_literal_twin_forward_and_backward(name: str) -> None:
    table, number, spec_of = CASES[name]
    cell, twin, layout = twins(table, number, spec_of)
    found = []
    for literally in (False, True):
        states = [x.clone().requires_grad_() for x in inputs_of(number)]
        alpha = torch.rand(table.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        alpha.requires_grad_()
        nodes = twin(states, alpha) if literally else cell(states, WeightMix(layout, {"cell": alpha}), 0)
        y = torch.cat([nodes[n] for n in table.output], dim=1)
        weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
        parameters = list((twin if literally else cell).parameters())
        gradients = torch.autograd.grad((y * weight).sum(), [alpha, *states, *parameters], allow_unused=True)
        # Parameters stand in another order in the two, but each has its twin: compare them sorted by their sum.
        ordered = sorted((g for g in gradients[1 + number :] if g is not None), key=lambda g: (g.shape, float(g.sum())))
        found.append([y, *(g for g in gradients[: 1 + number]), *ordered])
    assert len(found[0]) == len(found[1])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_a_mixed_cell_equals_its_literal_twin_in_evaluation_after_training(name: str) -> None:
    """Running statistics of shared pools are those that each edge would have gathered on its own."""
    table, number, spec_of = CASES[name]
    cell, twin, layout = twins(table, number, spec_of)
    alpha = torch.rand(table.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mix = WeightMix(layout, {"cell": alpha})
    with torch.no_grad():
        for _ in range(2):
            cell(inputs_of(number), mix, 0)
            twin(inputs_of(number), alpha)
        mine, theirs = cell.eval()(inputs_of(number), mix, 0), twin.eval()(inputs_of(number), alpha)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_identical_outgoing_operations_of_a_node_run_once() -> None:
    table, number, spec_of = CASES["DARTS normal"]
    cell, _, layout = twins(table, number, spec_of)
    calls: list[str] = []
    for name, module in cell.named_modules():
        if isinstance(module, nn.MaxPool2d | nn.AvgPool2d):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    weights = torch.full(table.shape, 0.125, dtype=torch.float64)
    cell(inputs_of(number), WeightMix(layout, {"cell": weights}), 0)
    # Nodes 0 to 3 have leaving edges; each pools once for all of them, by maximum and by average.
    assert len(calls) == len(set(calls)) == 8


def test_features_shared_by_source_are_the_same_modules_on_all_edges() -> None:
    picks = [Pick(0, 2, "sep_conv_3x3"), Pick(0, 3, "sep_conv_3x3"), Pick(1, 2, "sep_conv_3x3")]
    apart, shared = Edges(picks, normal), Edges(picks, normal, share_features=True)
    assert len({id(apart.module(i)) for i in range(3)}) == 3
    assert shared.module(0) is shared.module(1)
    assert shared.module(0) is not shared.module(2)


def test_an_operation_twice_on_one_edge_has_its_own_weights_each_time() -> None:
    picks = (
        Pick(0, 1, "nor_conv_3x3"),
        Pick(0, 1, "nor_conv_3x3"),
        Pick(0, 1, "skip_connect"),
        Pick(0, 1, "skip_connect"),
    )
    cell = PickedCell(Cell(picks, (1,)), 1, bench, DropPath(0.0)).double()
    first, second = cell.edges.module(0), cell.edges.module(1)
    assert first is not second
    assert first is not None
    assert second is not None
    (x,) = inputs_of(1)
    torch.testing.assert_close(cell([x])[1], first(x) + second(x) + 2 * x)


def test_a_node_that_nothing_reaches_is_zeros_at_the_resolution_of_its_cell() -> None:
    picks = (Pick(0, 2, "none"), Pick(1, 3, "max_pool_3x3"))
    cell = PickedCell(Cell(picks, (2, 3)), 2, reduction, DropPath(0.0)).double()
    nodes = cell([x[:, :, :7, :5] for x in inputs_of(2)])
    assert nodes[2].shape == nodes[3].shape == (3, CHANNELS, 4, 3)
    assert not nodes[2].any()


@pytest.mark.parametrize("pick", [Pick(2, 2, "none"), Pick(4, 2, "none"), Pick(0, 1, "none")])
def test_a_cell_whose_edges_do_not_lead_forward_is_refused(pick: Pick) -> None:
    with pytest.raises(UserError, match="earlier node"):
        PickedCell(Cell((pick,), (2,)), 2, normal, DropPath(0.0))


def test_identity_is_never_dropped_and_everything_else_is() -> None:
    """With certain dropping only the skip connection is left (DARTS, evaluation network)."""
    picks = (Pick(0, 1, "skip_connect"), Pick(0, 1, "nor_conv_3x3"))
    drop = DropPath(1.0)
    cell = PickedCell(Cell(picks, (1,)), 1, bench, drop).double()
    (x,) = inputs_of(1)
    torch.testing.assert_close(cell([x])[1], x)
    drop.eval()
    assert not torch.equal(cell([x])[1], x)


def test_a_copied_mix_takes_the_numbers_of_another_in_place() -> None:
    """Sites that share a table still do, and what runs is not part of the numbers."""
    layout = build_space("darts", {"cells": 4, "channels": 2}).layout()
    first = {t.name: torch.rand(t.shape) for t in layout.tables}
    second = {t.name: torch.rand(t.shape) for t in layout.tables}
    live = tuple((0,) for _ in layout.table(layout.sites[0]).choices)
    mix, other = WeightMix(layout, first, {0: live}), WeightMix(layout, second, {0: live})
    own = mix.copy()
    before = [own.weights(site) for site in range(len(layout.sites))]
    own.take(other)
    for site in range(len(layout.sites)):
        assert own.weights(site) is before[site], "in place"
        assert torch.equal(own.weights(site), other.weights(site))
        assert not torch.equal(mix.weights(site), other.weights(site)), "the original is untouched"
    same = [site for site, name in enumerate(layout.sites) if name == layout.sites[0]]
    assert len({id(own.weights(site)) for site in same}) == 1
    assert own.signature() == other.signature() != WeightMix(layout, first).signature()
