"""The heterogeneous space of NOS: its block against a twin of Eq 2-5, its size, and cells that are never zero."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.arch import Cell, Genotype, Pick, Positive, StrongestEach, WeightMix, count, derive, sample
from softcell.errors import UserError
from softcell.nn.calibrate import Calibration
from softcell.nn.candidates import Spec, get_candidate
from softcell.nn.stochastic import DropPath
from softcell.spaces import build_space
from softcell.spaces.cell import MixedCell, PickedCell
from softcell.spaces.costs import count_candidates
from softcell.spaces.darts import DartsSpace
from softcell.spaces.nos import ATTENTIONS, DYNAMICS, FEATURES, NosSpace, check_tiers
from tests.reference import reference_nos as literal

SMALL = NosSpace(cells=3, channels=4, nodes=2)


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixed_cell(stride: int, **settings: object) -> tuple[MixedCell, NosSpace]:
    space = dataclasses.replace(SMALL, **settings)  # type: ignore[arg-type]
    table = space.layout().tables[0]

    def spec(source: int) -> Spec:
        return Spec(4, stride if source < 2 else 1, affine=False, pool_norm=True)

    torch.manual_seed(0)
    return MixedCell(table, 2, spec, residual=table.output).double(), space


@pytest.mark.parametrize("stride", [1, 2])
def test_a_mixed_cell_computes_equations_2_to_5(stride: int) -> None:
    """Node by node from the equations, with every weight of every candidate, attentions and kernels one by one."""
    cell, space = mixed_cell(stride)
    table, layout = cell.table, space.layout()
    generator = torch.Generator().manual_seed(1)
    weights = torch.softmax(torch.randn(table.shape, generator=generator, dtype=torch.float64), dim=1)
    states = [data(3, 4, 7, 6, seed=s) for s in (2, 3)]
    nodes: dict[int, Tensor] = dict(enumerate(states))
    entries = [(i, k) for i, choice in enumerate(table.choices) for k in range(len(choice.candidates))]
    for target in table.targets:
        sorted_by: dict[str, list[tuple[float, Tensor]]] = {"feature": [], "attention": [], "kernel": []}
        for number, (i, k) in enumerate(entries):
            choice = table.choices[i]
            if choice.target == target:
                module = cell.edges.module(number)
                assert module is not None
                kind = get_candidate(choice.candidates[k]).kind
                sorted_by[kind].append((float(weights[i, k]), module(nodes[choice.source])))
        if target in table.output:
            nodes[target] = literal.second_tier(
                nodes[target - 1], sorted_by["feature"], sorted_by["attention"], sorted_by["kernel"]
            )
        else:
            weighted = {kind: [w * t for w, t in found] for kind, found in sorted_by.items()}
            zero = torch.zeros_like(weighted["feature"][0])
            nodes[target] = literal.first_tier(weighted["feature"], weighted["attention"], weighted["kernel"], zero)
    tables = dict.fromkeys(("normal", "reduce"), weights)
    found = cell(states, WeightMix(layout, tables), 0)
    assert len(found) == len(nodes)
    for number, value in enumerate(found):
        torch.testing.assert_close(value, nodes[number], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("op", [*FEATURES, *ATTENTIONS, *DYNAMICS])
def test_a_derived_second_tier_is_a_feature_or_calibrates_its_surrogate(op: str) -> None:
    """One-hot: o_f(x) for a feature, x + x ⊙ A for an attention, x + x ⊛ D for a kernel; never zero."""
    picks = (Pick(0, 2, "skip_connect"), Pick(1, 2, "spatial_attention"), Pick(2, 3, op))
    torch.manual_seed(0)
    cell = PickedCell(Cell(picks, (3,)), 2, lambda source: Spec(4), DropPath(0.0), residual=(3,)).double()
    states = [data(2, 4, 5, 6, seed=s) for s in (0, 1)]
    x, node = cell(states)[2:]
    attention = cell.edges.module(1)
    assert attention is not None
    torch.testing.assert_close(x, states[0] + states[0] * attention(states[1]))
    module = cell.edges.module(2)
    assert module is not None
    made = module(x)
    expected = x + module.applied(x, made) if isinstance(module, Calibration) else made
    torch.testing.assert_close(node, expected)
    assert float(node.detach().abs().min(dim=0).values.max()) > 0


def test_no_derived_node_is_ever_zero() -> None:
    """Any architecture of the space, and any that a foreign rule derives in it: every node of every cell is alive."""
    layout = SMALL.layout()
    x = data(2, 3, 9, 8)
    hostile = {
        t.name: sum((t.columns(op) for op in (*ATTENTIONS, *DYNAMICS)), start=torch.zeros(t.shape))
        for t in layout.tables
    }
    genotypes = [
        *(sample(layout, seed) for seed in range(6)),
        derive(layout, hostile),
        derive(layout, hostile, StrongestEach()),
    ]
    for genotype in genotypes:
        network = SMALL.network(genotype, (3, 9, 8), 5).double()
        zeros: list[str] = []
        for cell in network.cells:  # type: ignore[union-attr]
            cell.register_forward_hook(
                lambda module, given, nodes, zeros=zeros: zeros.extend(
                    str(i) for i, v in enumerate(nodes) if not bool(v.any())
                )
            )
        network(x)
        assert not zeros, f"nodes {zeros} are zero in {genotype.cells}"


def test_the_standard_cell_has_18_choices_of_11_candidates_and_the_printed_size() -> None:
    space = NosSpace()
    layout = space.layout()
    assert [table.shape for table in layout.tables] == [(18, 11), (18, 11)]
    assert len([c for c in layout.tables[0].choices if c.target in layout.tables[0].output]) == 4
    printed = literal.paper_count(4, 11, 3)
    assert 1e14 < printed < 1e15 and f"{printed:.1e}" in space.remarks()[0]
    conventional = literal.paper_count(4, 7, 2)
    assert 1e9 < conventional < 1.1e9 and f"{conventional:.1e}" in space.remarks()[0]
    # Ours leaves out pairs without a feature: 121 - 16 of 121.
    assert count(layout) == (printed * 105**4 // 121**4) ** 2


def test_features_alone_are_the_conventional_space() -> None:
    space = NosSpace(attentions=(), dynamics=(), cells=3, channels=4)
    darts = DartsSpace(candidates=FEATURES, cells=3, channels=4)
    mine, theirs = space.layout(), darts.layout()
    assert mine.tables == theirs.tables and mine.sites == theirs.sites
    assert count(mine) == literal.paper_count(4, 7, 2) ** 2 == count(theirs)
    genotype = sample(mine, 0)
    twin = Genotype("darts", genotype.cells)
    torch.manual_seed(0)
    a = space.network(genotype, (3, 8, 8), 5)
    torch.manual_seed(0)
    b = darts.network(twin, (3, 8, 8), 5)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(a(x), b(x))


@pytest.mark.parametrize("off", [{"attentions": ()}, {"dynamics": ()}])
def test_kinds_are_switched_off_one_by_one(off: dict[str, tuple[str, ...]]) -> None:
    space = dataclasses.replace(SMALL, **off)  # type: ignore[arg-type]
    layout = space.layout()
    assert {table.width for table in layout.tables} == {9}
    network = space.network(sample(layout, 0), (3, 8, 8), 5)
    assert network(torch.randn(2, 3, 8, 8)).shape == (2, 5)


@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_any_number_of_nodes(nodes: int) -> None:
    table = NosSpace(nodes=nodes).layout().tables[0]
    assert len(table) == sum(2 + n for n in range(nodes)) + nodes
    assert table.output == tuple(3 + 2 * n for n in range(nodes))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"features": []}, "at least one candidate"),
        ({"features": ["spatial_attention"]}, "kind feature"),
        ({"attentions": ["sep_conv_3x3"]}, "kind attention"),
        ({"dynamics": ["channel_attention"]}, "kind kernel"),
        ({"features": ["none", "skip_connect"]}, "constant zero"),
        ({"candidates": ["skip_connect"]}, "no setting 'candidates'"),
        ({"features": ["skip_connect", "skip_connect"]}, "`features` must name every candidate once.*'skip_connect'"),
        ({"attentions": [ATTENTIONS[0], *ATTENTIONS]}, "`attentions` must name every candidate once.*'spatial_att"),
        ({"dynamics": [*DYNAMICS, DYNAMICS[1]]}, "`dynamics` must name every candidate once.*'dynamic_conv_5x5'"),
    ],
)
def test_settings_that_make_no_space_are_refused(settings: dict[str, list[str]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_space("nos", settings)


@pytest.mark.parametrize(
    ("picks", "output", "message"),
    [
        ([(0, 2, "spatial_attention"), (1, 2, "channel_attention"), (2, 3, "skip_connect")], (3,), "would be zero"),
        ([(0, 2, "skip_connect"), (1, 3, "skip_connect")], (3,), "from a surrogate to its node"),
        ([(0, 2, "skip_connect"), (2, 3, "skip_connect"), (2, 4, "skip_connect")], (3,), "to a surrogate"),
        ([(0, 2, "skip_connect"), (2, 3, "skip_connect")], (2,), "odd numbers"),
        ([(0, 2, "none"), (1, 2, "channel_attention"), (2, 3, "skip_connect")], (3,), "surrogate 2 would be zero"),
        ([(0, 2, "skip_connect"), (2, 3, "none")], (3,), "node 3 would be zero"),
        ([(0, 2, "skip_connect"), (2, 3, "skip_connect")], (3, 5), "node 5 would be zero.*no edge leads to it"),
        ([(0, 2, "skip_connect")], (3,), "node 3 would be zero.*no edge leads to it"),
        ([(2, 3, "skip_connect")], (3,), "surrogate 2 would be zero.*no edge leads to it"),
        (
            [(0, 2, "skip_connect"), (2, 3, "skip_connect"), (5, 6, "skip_connect"), (6, 7, "skip_connect")],
            (3, 7),
            "node 5 would be zero",
        ),
    ],
)
def test_genotypes_that_are_no_heterogeneous_cells_are_refused(
    picks: list[tuple[int, int, str]], output: tuple[int, ...], message: str
) -> None:
    cell = Cell(tuple(Pick(*pick) for pick in picks), output)
    with pytest.raises(UserError, match=message):
        SMALL.network(Genotype("nos", {"normal": cell, "reduce": cell}), (3, 8, 8), 5)


@pytest.mark.parametrize(
    ("picks", "output", "message"),
    [
        ([(0, 2, "skip_connect"), (1, 2, "channel_attention")], (2,), "tiers` = 1.*kind attention"),
        ([(0, 2, "skip_connect"), (1, 3, "dynamic_conv_3x3")], (2, 3), "tiers` = 1.*kind kernel"),
        ([(0, 2, "skip_connect")], (2, 3), "node 3 would be zero.*no edge leads to it"),
        ([(0, 2, "none"), (1, 2, "none")], (2,), "node 2 would be zero"),
        ([(2, 2, "skip_connect")], (2,), "cell 'normal': an edge must lead from an earlier node"),
    ],
)
def test_genotypes_of_one_tier_that_calibrate_or_vanish_are_refused(
    picks: list[tuple[int, int, str]], output: tuple[int, ...], message: str
) -> None:
    cell = Cell(tuple(Pick(*pick) for pick in picks), output)
    with pytest.raises(UserError, match=message):
        SMALL.network(Genotype("nos", {"normal": cell, "reduce": cell}, {"tiers": 1}), (3, 8, 8), 5)


@pytest.mark.parametrize("off", [{}, {"attentions": (), "dynamics": ()}])
def test_what_any_rule_derives_is_accepted(off: dict[str, tuple[str, ...]]) -> None:
    """EnTranNAS-DST keeps any number of connections per edge and node, in one tier or two."""
    space = dataclasses.replace(SMALL, **off)  # type: ignore[arg-type]
    layout = space.layout()
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        strengths = {t.name: torch.randn(t.shape, generator=generator) - 1.5 * (seed % 3) for t in layout.tables}
        for rule in (None, Positive(), StrongestEach()):
            check_tiers(derive(layout, strengths, rule))
        check_tiers(sample(layout, seed))


def test_features_alone_are_described_as_such() -> None:
    space = NosSpace(attentions=(), dynamics=())
    remarks = " ".join(space.remarks())
    assert f"7²: {literal.paper_count(4, 7, 2):.1e}" in remarks and "1.0e+09" in remarks
    assert "³" not in remarks and "first tiers" not in remarks
    assert "one tier" in space.about


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, NosSpace.about),
        ({"attentions": ()}, "features and dynamic convolutions in two tiers, 18 edges, 9 candidates"),
        ({"dynamics": (), "nodes": 1}, "features and attentions in two tiers, 3 edges, 9 candidates"),
        ({"nodes": 8}, "features, attentions and dynamic convolutions in two tiers, 52 edges, 11 candidates"),
    ],
)
def test_a_space_is_described_as_configured(settings: dict[str, Any], words: str) -> None:
    space = NosSpace(**settings)
    assert space.about.endswith(words)
    assert f" {len(space.layout().tables[0])} edges" in space.about


def test_weights_beyond_one_leave_nothing_of_the_surrogate() -> None:
    """Two features of weight 1 each: their plain sum, as in a cell that keeps several candidates per edge."""
    cell, space = mixed_cell(1)
    table = cell.table
    weights = torch.zeros(table.shape, dtype=torch.float64)
    weights[0, FEATURES.index("skip_connect")] = 1.0
    second = table.incoming(3)[0]
    for op in ("skip_connect", "max_pool_3x3"):
        weights[second, table.choices[second].candidates.index(op)] = 1.0
    states = [data(2, 4, 6, 6, seed=s) for s in (0, 1)]
    found = cell(states, WeightMix(space.layout(), {"normal": weights, "reduce": weights}), 0)
    pooled = torch.nn.functional.max_pool2d(states[0], 3, 1, 1)
    norm = torch.nn.functional.batch_norm(pooled, None, None, training=True)
    torch.testing.assert_close(found[3], states[0] + norm)


def test_drop_path_keeps_what_a_second_tier_starts_from() -> None:
    """With everything dropped a node is its base: of the surrogate alone, zero, and of a node what its source gives."""
    picks = (Pick(0, 2, "skip_connect"), Pick(1, 2, "spatial_attention"), Pick(2, 3, "channel_attention"))
    drop_path = DropPath(1.0)
    cell = PickedCell(Cell(picks, (3,)), 2, lambda source: Spec(4), drop_path, residual=(3,)).double().train()
    states = [data(2, 4, 5, 6, seed=s) for s in (0, 1)]
    drop_path.train()
    nodes = cell(states)
    torch.testing.assert_close(nodes[2], states[0])
    torch.testing.assert_close(nodes[3], states[0])
    second = (Pick(0, 2, "skip_connect"), Pick(1, 2, "sep_conv_3x3"), Pick(2, 3, "sep_conv_3x3"))
    cell = PickedCell(Cell(second, (3,)), 2, lambda source: Spec(4), drop_path, residual=(3,)).double().train()
    nodes = cell(states)
    torch.testing.assert_close(nodes[2], states[0])
    torch.testing.assert_close(nodes[3], cell.edges.module(2)(nodes[2]))  # a feature is all that its node gets
    assert bool(nodes[3].any())
    mixed, space = mixed_cell(1)
    mixed.use_drop_path(DropPath(1.0))
    mixed.train()
    weights = torch.full(mixed.table.shape, 1.0 / 11, dtype=torch.float64)
    for value in mixed(states, WeightMix(space.layout(), {"normal": weights, "reduce": weights}), 0)[2::2]:
        assert not bool(value.any())


def test_costs_count_the_application_of_kernels_at_the_target() -> None:
    costs = count_candidates(dataclasses.replace(SMALL, channels=8), (3, 8, 8), 10)
    flops = costs.kinds["flops"]
    table = costs.layout.tables[0]
    k = {op: table.choices[0].candidates.index(op) for op in table.choices[0].candidates}
    # Site 0 at 8×8 with 8 channels: compress 8→1, score 8→9, transform 1·64·9, decode 1→8 on 9 taps, apply 64·8·9.
    assert float(flops[0][0, k["dynamic_conv_3x3"]]) == 64 * (8 + 72) + 64 * 9 + 9 * 8 + 64 * 8 * 9
    assert float(flops[0][0, k["spatial_attention"]]) == 64 * 8 + 64 * 9
    assert float(flops[0][0, k["channel_attention"]]) == 16
    # Site 1 reduces: 16 channels; the kernel is made at 8×8 and applied at 4×4.
    assert float(flops[1][0, k["dynamic_conv_3x3"]]) == 64 * 16 * (2 + 9) + 2 * 64 * 9 + 9 * 2 * 16 + 16 * 16 * 9
    assert float(costs.kinds["parameters"][1][0, k["channel_attention"]]) == 32


def test_features_can_be_shared_by_source() -> None:
    cell, space = mixed_cell(1)
    table = space.layout().tables[0]
    shared = MixedCell(table, 2, lambda source: Spec(4), share_features=True, residual=table.output)
    assert sum(p.numel() for p in shared.parameters()) < sum(p.numel() for p in cell.parameters())
    weights = torch.full(table.shape, 1.0 / 11)
    states = [torch.randn(2, 4, 5, 5) for _ in range(2)]
    values = shared(states, WeightMix(space.layout(), {"normal": weights, "reduce": weights}), 0)
    assert len(values) == 6 and all(bool(v.isfinite().all()) for v in values)


def test_evaluation_networks_match_the_paper() -> None:
    assert NosSpace.evaluation["cifar"] == {"cells": 20, "channels": 36}
    assert NosSpace.evaluation["imagenet"] == {"cells": 14, "channels": 48, "stem": "imagenet"}
    assert NosSpace.has_auxiliary
