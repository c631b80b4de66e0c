"""EnTranNAS and EnTranNAS-DST against their equations: literal twins, random trials, hand-computed values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from softcell.arch import Choice, Layout, Live, Positive, StrongestEach, Table, TopInputs, WeightMix
from softcell.arch.mix import live_of
from softcell.errors import UserError
from softcell.methods.entrannas import (
    EnTranNas,
    EnTranNasDst,
    EnTranNasDstSettings,
    EnTranNasSettings,
    connection_normalised,
    engine_sites,
    operation_normalised,
    pruned,
    reaches_output,
    sparsity,
    thresholds,
)
from softcell.nn.candidates import Spec
from softcell.settings import build
from softcell.spaces.cell import MixedCell
from softcell.spaces.darts import CANDIDATES, DartsSpace
from softcell.testing import tiny_space
from softcell.testing.tools import build_supernet, called_modules, images
from tests.reference.reference_cells import copy_weights, literal
from tests.reference.reference_entrannas import (
    Key,
    SharingCell,
    equation_5,
    equation_7,
    equation_8,
    equation_9,
    equation_11,
)

RAGGED = Table(
    "cell",
    (
        Choice(0, 2, ("skip_connect", "nor_conv_3x3", "max_pool_3x3")),
        Choice(1, 2, ("nor_conv_1x1",)),
        Choice(0, 3, ("nor_conv_3x3", "skip_connect")),
        Choice(1, 3, ("skip_connect", "sep_conv_3x3", "nor_conv_1x1")),
        Choice(2, 3, ("max_pool_3x3", "nor_conv_3x3")),
    ),
    (2, 3),
)
LAYOUT = Layout("toy", (RAGGED,), ("cell",) * 4, TopInputs(2))
KEYS = [(c.source, c.target, k) for c in RAGGED.choices for k in range(len(c.candidates))]
ROWS = {(c.source, c.target): i for i, c in enumerate(RAGGED.choices)}


def table_of(values: dict[Key, float]) -> Tensor:
    rows = torch.zeros(RAGGED.shape, dtype=torch.float64)
    for (i, j, k), value in values.items():
        rows[ROWS[i, j], k] = value
    return rows


def dst(alpha: dict[Key, float], beta: dict[int, float], **given: Any) -> EnTranNasDst:
    method = EnTranNasDst(LAYOUT, EnTranNasDstSettings(**given)).double()
    method.begin_epoch(0.0)  # fills the temperature in float64
    with torch.no_grad():
        method.alpha["cell"].copy_(table_of(alpha))
        method.alpha["cell"][~RAGGED.mask()] = 77.0  # whoever reads padding finds the largest logit there
        method.beta["cell"].copy_(torch.tensor([beta[j] for j in RAGGED.targets], dtype=torch.float64))
    return method


logit = st.floats(-6, 6)
alphas = st.lists(logit, min_size=len(KEYS), max_size=len(KEYS)).map(lambda v: dict(zip(KEYS, v, strict=True)))
betas = st.lists(st.floats(-8, 60), min_size=2, max_size=2).map(lambda v: dict(zip((2, 3), v, strict=True)))
temperatures = st.sampled_from([1.0, 0.3, 0.1])


# --- Eq 5 to 11 ---


@settings(max_examples=60, deadline=None)
@given(alpha=alphas, beta=betas, tau=temperatures)
def test_coefficients_are_equations_5_to_9(alpha: dict[Key, float], beta: dict[int, float], tau: float) -> None:
    method = dst(alpha, beta, first_temperature=tau)
    p = equation_5(alpha, tau)
    p_hat = equation_7(p)
    torch.testing.assert_close(method.softened("cell").detach(), table_of(p), rtol=1e-12, atol=1e-14)
    members = method.members_cell
    assert isinstance(members, Tensor)
    torch.testing.assert_close(connection_normalised(table_of(p), members), table_of(p_hat), rtol=1e-12, atol=1e-14)
    q = equation_8(p_hat, beta)
    t = thresholds(torch.tensor([beta[2], beta[3]], dtype=torch.float64))
    torch.testing.assert_close(pruned(table_of(p_hat), t, members), table_of(q), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(operation_normalised(table_of(q)), table_of(equation_9(q)), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        sparsity(torch.tensor([beta[2], beta[3]], dtype=torch.float64)),
        torch.tensor(equation_11(beta), dtype=torch.float64),
        rtol=1e-9,
        atol=1e-15,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=60, deadline=None)
@given(alpha=alphas, beta=betas, tau=temperatures)
def test_laws_of_the_coefficients(
    dtype: torch.dtype, alpha: dict[Key, float], beta: dict[int, float], tau: float
) -> None:
    """A connection per node survives, also where sigmoid(β) rounds to 1; kept edges sum to 1; the rest is exactly 0."""
    method = dst(alpha, beta, first_temperature=tau).to(dtype)
    found = method.probabilities()["cell"].detach()
    assert found.isfinite().all()
    assert (found >= 0).all()
    assert not found[~RAGGED.mask()].any()
    for target in RAGGED.targets:
        assert (found[list(RAGGED.incoming(target))] > 0).any()
    sums = found.sum(1)
    kept = found.gt(0).any(1)
    torch.testing.assert_close(sums[kept], torch.ones_like(sums[kept]))
    assert not sums[~kept].any()
    picks = method.derive().cells["cell"].picks
    derived = {
        (ROWS[p.source, p.target], RAGGED.choices[ROWS[p.source, p.target]].candidates.index(p.op)) for p in picks
    }
    assert derived == {(int(i), int(k)) for i, k in found.nonzero()}, (
        "what is not derived has a coefficient of exactly 0"
    )


def test_coefficients_match_hand_computed_values() -> None:
    """One node, two edges: p = (.5, .5) and (.8, .2); p̂ = (.625, .625) and (1, .25); t = .5."""
    table = Table("cell", (Choice(0, 2, ("a", "b")), Choice(1, 2, ("a", "b"))), (2,))
    method = EnTranNasDst(Layout("toy", (table,), ("cell", "cell"), Positive()), EnTranNasDstSettings()).double()
    with torch.no_grad():
        method.alpha["cell"].copy_(torch.tensor([[0.0, 0.0], [math.log(4), 0.0]]))
        method.beta["cell"].zero_()
    found = method.probabilities()["cell"].tolist()
    assert found[0] == pytest.approx([0.5, 0.5], abs=1e-12)
    assert found[1] == [1.0, 0.0]
    mix = method.relax()
    assert isinstance(mix, WeightMix)
    assert mix.weights(1).tolist() == [[1.0, 1.0], [1.0, 0.0]], "transit connections have a coefficient of exactly 1"
    assert mix.live(1) == ((0, 1), (0,))
    penalty = method.penalty(mix)
    assert penalty is not None
    assert float(penalty.detach()) == pytest.approx(0.1 * math.log(2), abs=1e-7)


def test_the_penalty_is_one_mean_over_the_nodes_of_all_tables() -> None:
    """Eq 11 has one sum over n - 1 nodes. With tables of one, two and three nodes neither a sum of means per table nor
    a mean of such means equals it; every node pulls on its threshold with the same weight λ / 6."""
    nodes = {"one": (2,), "two": (2, 3), "three": (2, 3, 4)}
    tables = tuple(
        Table(name, tuple(Choice(s, t, ("a", "b")) for t in targets for s in range(2)), targets)
        for name, targets in nodes.items()
    )
    method = EnTranNasDst(Layout("toy", tables, (*nodes,), Positive()), EnTranNasDstSettings(sparsity=0.7)).double()
    beta = {"one": [-3.0], "two": [-1.0, 0.5], "three": [2.0, 0.25, -0.75]}
    with torch.no_grad():
        for name, values in beta.items():
            method.beta[name].copy_(torch.tensor(values))
    every = [value for values in beta.values() for value in values]
    penalty = method.penalty(method.relax())
    assert penalty is not None
    assert float(penalty.detach()) == pytest.approx(0.7 * equation_11(dict(enumerate(every))), rel=1e-12)
    penalty.backward()  # type: ignore[no-untyped-call]
    for name, values in beta.items():
        slope = method.beta[name].grad
        assert slope is not None
        assert slope.tolist() == pytest.approx([-0.7 / 6 / (1 + math.exp(b)) for b in values], rel=1e-12)


def test_gradients_reach_logits_and_thresholds_gradcheck() -> None:
    """Away from the kinks of ReLU and maximum; connections of either side of the threshold are there."""
    generator = torch.Generator().manual_seed(4)
    alpha = torch.randn(RAGGED.shape, generator=generator, dtype=torch.float64, requires_grad=True)
    beta = torch.tensor([-1.6, -1.2], dtype=torch.float64, requires_grad=True)
    method = dst(dict.fromkeys(KEYS, 0.0), {2: 0.0, 3: 0.0})
    members, mask = method.members_cell, RAGGED.mask()
    assert isinstance(members, Tensor)

    def coefficients(a: Tensor, b: Tensor) -> Tensor:
        p = torch.softmax(a.masked_fill(~mask, -torch.inf), 1)
        return operation_normalised(pruned(connection_normalised(p, members), thresholds(b), members))

    found = coefficients(alpha, beta)
    assert 0 < int((found > 0).sum()) < int(mask.sum()), "some are pruned, some are not"
    assert torch.autograd.gradcheck(coefficients, (alpha, beta))
    assert torch.autograd.gradcheck(sparsity, (beta,))
    by_beta = torch.autograd.grad(found.square().sum(), [alpha, beta])
    assert all(bool(g.any()) for g in by_beta)


# --- cells ---

CHANNELS = 4


def spec_of(source: int) -> Spec:
    return Spec(CHANNELS, 1, affine=False, pool_norm=True)


def twins(share: bool, bottleneck: int) -> tuple[MixedCell, SharingCell]:
    torch.manual_seed(0)
    cell = MixedCell(RAGGED, 2, spec_of, share_features=share, bottleneck=bottleneck).double()
    shared: dict[tuple[int, str], nn.Module] = {}
    ops: dict[tuple[int, int, str], nn.Module] = {}
    for entry, (i, j, k) in enumerate(KEYS):
        op = RAGGED.choices[ROWS[i, j]].candidates[k]
        mine, twin = cell.edges.module(entry), literal(op, CHANNELS // bottleneck, 1).double()
        assert mine is not None
        copy_weights(mine, twin)
        ops[i, j, op] = shared.setdefault((i, op), twin) if share else twin
    around: list[dict[int, nn.Module] | None] = [None, None]
    if cell.bottleneck is not None:
        for n, parts in enumerate((cell.bottleneck.reduce, cell.bottleneck.recover)):
            around[n] = {}
            for node, part in parts.items():
                assert isinstance(part, nn.Conv2d)
                twin = nn.Conv2d(part.in_channels, part.out_channels, 1, bias=False).double()
                copy_weights(part, twin)
                around[n][int(node)] = twin  # type: ignore[index]
    return cell, SharingCell(2, ops, *around)  # type: ignore[arg-type]


def states() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, CHANNELS, 6, 5, generator=generator, dtype=torch.float64) for _ in range(2)]


def as_twins_know_them(values: dict[Key, float | Tensor]) -> dict[Any, float | Tensor]:
    """Coefficients by (source, target, operation): the twin finds modules by source and operation."""
    return {(i, j, RAGGED.choices[ROWS[i, j]].candidates[k]): value for (i, j, k), value in values.items()}


@pytest.mark.parametrize("bottleneck", [1, 2])
@pytest.mark.parametrize("share", [True, False])
def test_an_engine_cell_equals_its_literal_twin(share: bool, bottleneck: int) -> None:
    """Forward, and the gradient of every weight, shared or not, and of every coefficient."""
    cell, twin = twins(share, bottleneck)
    results = []
    for literally in (False, True):
        rows = torch.rand(RAGGED.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        rows = (rows * RAGGED.mask()).requires_grad_()
        if literally:
            values = as_twins_know_them({(i, j, k): rows[ROWS[i, j], k] for i, j, k in KEYS})
            nodes = twin(states(), values)
        else:
            nodes = cell(states(), WeightMix(LAYOUT, {"cell": rows}), 0)
        y = torch.cat(nodes[2:], 1)
        weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
        parameters = list((twin if literally else cell).parameters())
        gradients = torch.autograd.grad((y * weight).sum(), [rows, *parameters], allow_unused=True)
        ordered = sorted((g for g in gradients[1:] if g is not None), key=lambda g: (g.shape, float(g.sum())))
        results.append([y, gradients[0], *ordered])
    assert len(results[0]) == len(results[1])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("bottleneck", [1, 2])
@pytest.mark.parametrize("share", [True, False])
def test_a_transit_cell_sums_its_derived_connections_with_coefficient_1(share: bool, bottleneck: int) -> None:
    live: Live = ((1,), (0,), (), (0, 2), (1,))
    chosen = {(c.source, c.target, k): 1.0 for c, row in zip(RAGGED.choices, live, strict=True) for k in row}
    mix = WeightMix(LAYOUT, {"cell": torch.rand(RAGGED.shape).double()}, picked={1: (live, table_of(chosen))})
    cell, twin = twins(share, bottleneck)
    expected = twin(states(), as_twins_know_them(dict(chosen)))
    for mine, theirs in zip(cell(states(), mix, 1), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


@settings(max_examples=15, deadline=None)
@given(alpha=alphas, beta=st.lists(st.floats(-4, 3), min_size=2, max_size=2))
def test_an_engine_cell_equals_the_derived_cell_with_the_same_coefficients(
    alpha: dict[Key, float], beta: list[float]
) -> None:
    """The law of §2.4: what is not derived has no part in the engine cell, so leaving it out changes nothing."""
    method = dst(alpha, dict(zip((2, 3), beta, strict=True)))
    torch.manual_seed(0)
    cell = MixedCell(RAGGED, 2, spec_of, share_features=True).double()
    mix = method.relax()
    assert isinstance(mix, WeightMix)
    live = mix.live(1)
    assert live is not None
    derived = WeightMix(LAYOUT, mix.tables, lives={0: live})
    with torch.no_grad():
        engine, derived_nodes = cell(states(), mix, 0), cell(states(), derived, 0)
    assert mix.live(0) is None
    for mine, theirs in zip(engine, derived_nodes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("share", "connections"), [(False, 56), (True, 20)])
def test_sharing_leaves_20_of_56_parametrised_connections(share: bool, connections: int) -> None:
    """§2.3: from |E|·K̄ = 14 × 4 to (n-1)·K̄ = 5 × 4 in the standard normal cell."""
    space = DartsSpace(cells=3, channels=2, share_features=share)
    with torch.device("meta"):
        cell = space.supernet((3, 8, 8), 10).cells[0]  # type: ignore[index]
    owners = {id(m) for i in range(14 * 8) if (m := cell.edges.module(i)) is not None and list(m.parameters())}
    assert len(owners) == connections


def test_a_shared_feature_runs_once_per_source_and_candidate() -> None:
    torch.manual_seed(0)
    cell = MixedCell(RAGGED, 2, spec_of, share_features=True).double()
    calls: list[str] = []
    for name, module in cell.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    cell(states(), WeightMix(LAYOUT, {"cell": torch.rand(RAGGED.shape).double()}), 0)
    assert len(calls) == len(set(calls))


# --- engines and transits ---


def test_the_first_normal_and_the_first_reduction_cell_are_engines() -> None:
    """Figure 4: 8 cells, reductions at 2 and 5."""
    layout = DartsSpace().layout()
    assert engine_sites(layout, "first") == {0, 2}
    assert engine_sites(layout, "last") == {7, 5}
    assert engine_sites(layout, "all") == set(range(8))
    assert engine_sites(layout, (1, 3, 5)) == {1, 3, 5}


@pytest.mark.parametrize(
    ("engines", "message"), [((0, 8), "cells 0 to 7"), ((0,), "at least one 'reduce' cell"), ((), "at least one")]
)
def test_engines_that_do_not_fit_are_refused(engines: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine_sites(DartsSpace().layout(), engines)


@pytest.mark.parametrize("kind", [EnTranNas, EnTranNasDst])
@pytest.mark.parametrize("engines", ["first", "last", "all", (0, 1, 2)])
def test_transit_cells_run_what_is_derived_and_nothing_else(kind: Any, engines: Any) -> None:
    space = DartsSpace(cells=4, channels=2, nodes=2)
    supernet, layout = build_supernet(space), space.layout()
    torch.manual_seed(0)
    method = kind(layout, kind.Settings(engines=engines)).double()
    with torch.no_grad():
        for p in method.parameters():
            p.copy_(torch.randn(p.shape))
    genotype, mix = method.derive(), method.relax()
    called = called_modules(supernet, lambda: supernet(images(), mix))
    for site, name in enumerate(layout.sites):
        ran = {tuple(n.split(".")[3:6]) for n in called if n.startswith(f"cells.{site}.edges")}
        if site in method.engines:
            assert mix.live(site) is None
            continue
        assert (mix.weights(site).sum()) == len(genotype.cells[name].picks)
        picks = {(p.source, p.target, p.op) for p in genotype.cells[name].picks}
        for group, row, op in ran:
            source, _, target = row.partition("_")
            assert group in ("own", "shared")
            assert any(p[0] == int(source) and p[2] == op and (not target or p[1] == int(target)) for p in picks)
        assert len(ran) <= len(picks)


def test_derivation_happens_at_every_call_of_relax() -> None:
    space = DartsSpace(cells=4, channels=2, nodes=2)
    method = EnTranNas(space.layout(), EnTranNasSettings())
    before = method.relax().live(3)
    with torch.no_grad():
        for alpha in method.alpha.values():
            alpha.neg_()
    after = method.relax().live(3)
    assert before != after


def test_only_engine_cells_teach_the_architecture() -> None:
    """The gradient of α is that of a network whose transit cells are fixed to the derived ones."""
    space = DartsSpace(cells=3, channels=2, nodes=2)
    supernet, layout = build_supernet(space), space.layout()
    torch.manual_seed(0)
    method = EnTranNas(layout, EnTranNasSettings(engines=(0, 2))).double()
    mix = method.relax()
    assert isinstance(mix, WeightMix)
    assert not mix.weights(1).requires_grad
    gradients = torch.autograd.grad(supernet(images(), mix).square().sum(), list(method.parameters()))
    assert all(bool(g.any()) for g in gradients)


@pytest.mark.parametrize("kind", [EnTranNas, EnTranNasDst])
def test_the_temperature_falls_exponentially_also_in_dst(kind: type[EnTranNas] | type[EnTranNasDst]) -> None:
    """§2.2 anneals τ of Eq 5 with the epoch, and §2.4 computes p by Eq 5."""
    layout = tiny_space("darts").layout()
    falling, constant = kind(layout, kind.Settings()), kind(layout, kind.Settings(schedule="constant"))
    seen = []
    for progress in (0.0, 0.5, 1.0):
        falling.begin_epoch(progress)
        constant.begin_epoch(progress)
        seen.append(float(falling.temperature))
        assert float(constant.temperature) == 1.0
    assert seen == pytest.approx([1.0, math.sqrt(0.1), 0.1], rel=1e-6)


def test_annealing_thins_a_topology_that_thresholds_alone_leave_dense() -> None:
    """Logits as far apart as the recipe's small steps move them (deviation 0.1), thresholds of 0.65.

    At a temperature of 1 nearly all of the 24.5 connections per node stay; at 0.1 there are about 3.
    """
    layout = DartsSpace().layout()
    counts = {}
    for progress in (0.0, 1.0):
        method, kept = EnTranNasDst(layout, EnTranNasDstSettings()), []
        method.begin_epoch(progress)
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for logits in method.alpha.values():
                    logits.copy_(0.1 * torch.randn(logits.shape, generator=generator))
                for beta in method.beta.values():
                    beta.fill_(math.log(0.65 / 0.35))
            kept += [float(method.gauges()[f"connections_{name}"]) for name in ("normal", "reduce")]
        counts[progress] = sum(kept) / len(kept)
    assert counts[0.0] > 22
    assert 2 < counts[1.0] < 4


def test_thresholds_have_a_separate_optimiser_group_without_weight_decay() -> None:
    method = dst(dict.fromkeys(KEYS, 0.0), {2: 0.0, 3: 0.0}, threshold_speed=5.0)
    logits, bounds = method.parameter_groups(0.01, 1e-3)
    assert (logits["lr"], logits["weight_decay"]) == (0.01, 1e-3)
    assert (bounds["lr"], bounds["weight_decay"]) == (0.05, 0.0)
    assert [p.shape for p in bounds["params"]] == [(2,)]
    assert EnTranNasDst(LAYOUT, EnTranNasDstSettings()).beta["cell"].tolist() == [-3.0, -3.0]


def test_gauges_report_every_threshold_and_the_connections_per_node() -> None:
    method = dst({key: 0.1 * n for n, key in enumerate(KEYS)}, {2: 0.0, 3: 2.0})
    found = {name: float(value) for name, value in method.gauges().items()}
    assert found["threshold_cell_2"] == pytest.approx(0.5)
    assert found["threshold_cell_3"] == pytest.approx(1 / (1 + math.exp(-2)))
    assert found["connections_cell"] == len(method.derive().cells["cell"].picks) / 2


def test_costs_of_dst_match_the_derived_network() -> None:
    """Several candidates on one edge cost as much as they do in the derived network, and thresholds feel it."""
    method = dst({key: 0.3 * n for n, key in enumerate(KEYS)}, {2: -1.0, 3: 0.0})
    found = method.occupancy(method.relax())["cell"]
    assert int(found.sum()) == len(method.derive().cells["cell"].picks)
    assert set(found.unique().tolist()) <= {0.0, 1.0}
    costs = torch.rand(RAGGED.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine = torch.autograd.grad((found * costs).sum(), [method.alpha["cell"], method.beta["cell"]])
    way = method.softened("cell") + method._pruned()["cell"]
    theirs = torch.autograd.grad((way * costs).sum(), [method.alpha["cell"], method.beta["cell"]])
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert bool((mine[1] < 0).all()), "a higher threshold costs less"


def test_dst_omits_none_if_there_is_another_candidate() -> None:
    table = Table(
        "cell", (Choice(0, 1, ("none", "skip_connect")), Choice(0, 2, ("none",)), Choice(1, 2, CANDIDATES)), (2,)
    )
    method = EnTranNasDst(Layout("toy", (table,), ("cell",), Positive()), EnTranNasDstSettings())
    with torch.no_grad():
        method.alpha["cell"][0, 0] = 99.0
    p = method.softened("cell").detach()
    assert p[0].tolist()[:2] == [0.0, 1.0]
    assert float(p[1, 0]) == 1.0
    assert float(p[2, 0]) == 0.0


@pytest.mark.parametrize("cut", ["none", "noise"])
def test_transit_cells_stay_connected_if_none_or_noise_would_cut_them(cut: str) -> None:
    """NAS-Bench-201's rule may pick `none` everywhere, S4's noise; such transit cells would end all learning."""
    table = Table(
        "cell", tuple(Choice(s, t, (cut, "skip_connect", "nor_conv_1x1")) for t in (1, 2) for s in range(t)), (2,)
    )
    layout = Layout("toy", (table,), ("cell", "cell"), StrongestEach())
    method = EnTranNas(layout, EnTranNasSettings())
    with torch.no_grad():
        method.alpha["cell"].copy_(torch.tensor([[9.0, 1.0, 0.0], [9.0, 0.0, 1.0], [0.0, 9.0, 1.0]]))
    assert [pick.op for pick in method.derive().cells["cell"].picks] == [cut, cut, "skip_connect"]
    assert method.planner.current()[1] == ((1,), (2,), (1,))
    assert not reaches_output(table, method.derive().cells["cell"].picks)
    with torch.no_grad():
        method.alpha["cell"][1, 2] = 12.0
    assert method.planner.current()[1] == ((0,), (2,), (1,)), "a whole cell runs as derived, what cuts included"


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (EnTranNasSettings, {"last_temperature": 0.0}, r"last_temperature > 0"),
        (EnTranNasDstSettings, {"sparsity": -1.0}, r"sparsity >= 0"),
        (EnTranNasDstSettings, {"threshold_speed": 0.0}, r"threshold_speed > 0"),
        (EnTranNasDstSettings, {"first_temperature": -1.0}, r"first_temperature > 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        kind(**given)


@pytest.mark.parametrize("space", ["darts", "nb201", "nos", "s1"])
@pytest.mark.parametrize("kind", [EnTranNas, EnTranNasDst])
def test_transit_cells_run_what_would_be_derived(space: str, kind: type[EnTranNas] | type[EnTranNasDst]) -> None:
    layout = tiny_space(space).layout()
    for seed in range(20):
        torch.manual_seed(seed)
        method = kind(layout, kind.Settings(engines="last"))
        with torch.no_grad():
            for logits in method.alpha.values():
                logits.normal_(0.0, 2.0)
            for beta in getattr(method, "beta", nn.ParameterDict()).values():
                beta.fill_(2.0)
        genotype = method.derive()
        for site, live in enumerate(method.planner.current()):
            table = layout.table(layout.sites[site])
            picks = genotype.cells[table.name].picks
            if live is not None and reaches_output(table, picks):
                assert live == live_of(table, picks)


def test_costs_are_recorded_for_every_connection_that_is_kept() -> None:
    method = EnTranNasDst(tiny_space("nb201").layout(), EnTranNasDstSettings())
    found, coefficients = method.occupancy()["cell"], method.probabilities()["cell"]
    assert torch.equal(found, (coefficients > 0).float())
    assert found.sum() > len(found), "several on an edge, each in full"


def test_a_wrong_assignment_of_engines_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(UserError, match=r"must be one of first, last, all, or a list, got 'middle'"):
        build(EnTranNasSettings, {"engines": "middle"})
