"""PC-DARTS: edge normalisation by hand-computed values, partial channels against a literal twin."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import Choice, Layout, Table, TopInputs, WeightMix, sample
from softcell.errors import UserError
from softcell.methods.pcdarts import EdgeNormalised, EdgeNormalisedSettings, edge_groups, edge_weights
from softcell.nn import Spec
from softcell.search import resolve, search
from softcell.spaces import MixedCell, build_space
from softcell.spaces.oneshot1 import OneShot1Space1
from softcell.testing import tiny_space
from tests.helpers.search_toys import settings, write_data
from tests.reference.reference_cells import copy_weights, literal

TABLE = Table(
    "cell",
    (
        Choice(0, 2, ("skip_connect", "nor_conv_3x3")),
        Choice(0, 3, ("skip_connect", "nor_conv_3x3", "none")),
        Choice(1, 3, ("skip_connect", "nor_conv_3x3")),
        Choice(2, 3, ("skip_connect", "nor_conv_3x3")),
    ),
    (3,),
)
LAYOUT = Layout("toy", (TABLE,), ("cell",), TopInputs(2))


def planted() -> EdgeNormalised:
    """Odds of the edges into node 3 are 1:2:5, those of their candidates 1:1:2, 1:4 and 3:2; node 2 has one edge."""
    method = EdgeNormalised(LAYOUT, EdgeNormalisedSettings()).double()
    rows = [[1, 3, 1e9], [1, 1, 2], [1, 4, 1e9], [3, 2, 1e9]]  # the large ones are padding
    with torch.no_grad():
        method.alpha["cell"].copy_(torch.tensor(rows, dtype=torch.float64).log())
        method.beta["cell"].copy_(torch.tensor([7.0, 0.0, math.log(2), math.log(5)], dtype=torch.float64))
    return method


def test_edges_into_a_node_share_one_softmax_that_multiplies_their_candidates() -> None:
    mix = planted().relax()
    assert isinstance(mix, WeightMix)
    expected = [[0.25, 0.75, 0], [0.25 / 8, 0.25 / 8, 0.5 / 8], [0.4 / 8, 1.6 / 8, 0], [3 / 8, 2 / 8, 0]]
    torch.testing.assert_close(mix.weights(0), torch.tensor(expected, dtype=torch.float64))


def test_the_gradient_of_an_edge_weight_matches_a_softmax() -> None:
    logits = torch.tensor([7.0, 0.0, math.log(2), math.log(5)], dtype=torch.float64, requires_grad=True)
    edge_weights(logits, edge_groups(TABLE))[2].backward()
    # p = (1, 2, 5) / 8 into node 3: ∂p_2/∂β = p_2 (δ - p) at odds 2; the edge into node 2 has no effect.
    expected = torch.tensor([0, -2 / 64, 12 / 64, -10 / 64], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected)


def test_the_derived_inputs_are_the_strongest_by_both_softmaxes() -> None:
    # By α alone node 3 would take inputs 1 (0.8) and 2 (0.6).
    method = planted()
    with torch.no_grad():
        method.beta["cell"][1] = math.log(
            40
        )  # input 0: 0.25 · 40/47 = 0.21, input 1: 0.8 · 2/47 = 0.03, 2: 0.6 · 5/47 = 0.06
    picks = [str(pick) for pick in method.derive().cells["cell"].picks]
    assert picks == ["nor_conv_3x3(0->2)", "skip_connect(0->3)", "skip_connect(2->3)"]


def test_links_that_compete_already_keep_their_weights() -> None:
    for table in OneShot1Space1().layout().tables:
        weights = edge_weights(torch.randn(len(table)), edge_groups(table))
        assert table.contest_of and torch.equal(weights[list(table.contest_of)], torch.ones(len(table.contest_of)))


def test_a_chain_has_no_edges_to_normalise() -> None:
    assert not EdgeNormalised(tiny_space("proxyless").layout(), EdgeNormalisedSettings()).beta
    assert set(EdgeNormalised(tiny_space("darts").layout(), EdgeNormalisedSettings()).beta) == {"normal", "reduce"}


# --- partial channels ---

OPS = ("none", "skip_connect", "max_pool_3x3", "sep_conv_3x3")
CELL = Table(
    "cell",
    (Choice(0, 2, OPS), Choice(1, 2, OPS[1:]), Choice(0, 3, OPS), Choice(1, 3, OPS), Choice(2, 3, OPS[::-1])),
    (2, 3),
)


class LiteralPartialCell(nn.Module):
    """Edge by edge as in the paper: split, mix the first part, join, shuffle channel by channel, then add up."""

    def __init__(self, cell: MixedCell, k: int, channels: int, stride: int) -> None:
        super().__init__()
        self.k, self.stride, entry = k, stride, 0
        self.ops = nn.ModuleList()
        for choice in CELL.choices:
            row = nn.ModuleList()
            for op in choice.candidates:
                twin = literal(op, channels // k, stride if choice.source < 2 else 1).double()
                mine, entry = cell.edges.module(entry), entry + 1
                if mine is not None:
                    copy_weights(mine, twin)
                row.append(twin)
            self.ops.append(row)

    def forward(self, nodes: list[Tensor], weights: Tensor, beta: Tensor) -> list[Tensor]:
        for node in (2, 3):
            total: Tensor | float = 0.0
            for edge, choice in enumerate(CELL.choices):
                if choice.target == node:
                    x = nodes[choice.source]
                    few = x.shape[1] // self.k
                    mixed = sum(w * op(x[:, :few]) for w, op in zip(weights[edge], self.ops[edge], strict=False))
                    rest = x[:, few:]
                    if self.stride == 2 and choice.source < 2:
                        rest = torch.stack([rest[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]).amax(0)
                    joined = torch.cat([mixed, rest], 1)  # type: ignore[list-item]
                    order = [group * few + i for i in range(few) for group in range(self.k)]
                    total = total + beta[edge] * joined[:, order]
            nodes = [*nodes, total]  # type: ignore[list-item]
        return nodes


@pytest.mark.parametrize(("k", "stride"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_a_cell_with_partial_channels_equals_its_literal_twin(k: int, stride: int) -> None:
    """Forward, and the gradients of all weights, of α's softmax and of β's."""
    torch.manual_seed(0)
    spec = {True: Spec(8, stride, affine=False, pool_norm=True), False: Spec(8, 1, affine=False, pool_norm=True)}
    cell = MixedCell(CELL, 2, lambda source: spec[source < 2], partial=k).double()
    twin = LiteralPartialCell(cell, k, 8, stride)
    states = [torch.randn(3, 8, 6, 4, dtype=torch.float64) for _ in range(2)]
    found = []
    for own in (cell, twin):
        alpha = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4).requires_grad_()
        beta = torch.linspace(1, 2, 5, dtype=torch.float64).requires_grad_()
        weights = alpha.masked_fill(~CELL.mask(), -torch.inf).softmax(1)
        if own is cell:
            layout = Layout("toy", (CELL,), ("cell",), TopInputs(2))
            nodes = cell(states, WeightMix(layout, {"cell": beta[:, None] * weights}), 0)
        else:
            nodes = twin(states, weights, beta)
        y = torch.cat(nodes[2:], 1)
        loss = (y * torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)).sum()
        found.append([y, *torch.autograd.grad(loss, [alpha, beta, *own.parameters()])])
    assert len(found[0]) == len(found[1]) > 10
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_zero_edge_still_passes_the_channels_that_bypass_it() -> None:
    """One edge 0 -> 1 with `none` alone: [0, x1, x2, x3] in groups of K = 4 is unchanged by the shuffle."""
    table = Table("cell", (Choice(0, 1, ("none",)),), (1,))
    cell = MixedCell(table, 1, lambda source: Spec(4, 1, affine=False), partial=4)
    x = torch.arange(4.0).view(1, 4, 1, 1) + 1
    layout = Layout("toy", (table,), ("cell",), TopInputs(1))
    assert cell([x], WeightMix(layout, {"cell": torch.ones(1, 1)}), 0)[1].flatten().tolist() == [0, 2, 3, 4]
    # With K = 2 the groups are [0, 0] and [3, 4].
    cell = MixedCell(table, 1, lambda source: Spec(4, 1, affine=False), partial=2)
    assert cell([x], WeightMix(layout, {"cell": torch.ones(1, 1)}), 0)[1].flatten().tolist() == [0, 3, 0, 4]


def test_networks_to_train_have_no_partial_channels() -> None:
    whole, partial = (build_space("darts", {"channels": 8, "cells": 3, "partial_channels": k}) for k in (1, 4))
    genotype = sample(whole.layout(), 0)
    shapes = [{n: p.shape for n, p in s.network(genotype, (3, 8, 8), 10).named_parameters()} for s in (whole, partial)]
    assert shapes[0] == shapes[1]
    sizes = [sum(p.numel() for p in s.supernet((3, 8, 8), 10).cells.parameters()) for s in (whole, partial)]  # type: ignore[union-attr]
    assert sizes[1] < sizes[0] / 4, "depthwise weights shrink by 4, pointwise ones by 16"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"partial_channels": 0}, "partial_channels >= 1"),
        ({"partial_channels": 3, "channels": 16}, "multiple of `partial_channels`.*channels=16, partial_channels=3"),
        ({"partial_channels": 2, "bottleneck": 2}, "set one of them to 1"),
    ],
)
@pytest.mark.parametrize("space", ["darts", "nb201"])
def test_impossible_ratios_are_refused(space: str, given: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_space(space, given)


# --- recipes ---


def test_the_recipes_match_the_released_code() -> None:
    cifar, imagenet = (resolve({"method": "pc-darts", "data": data}) for data in ("cifar10", "imagenet"))
    assert (cifar.space, cifar.epochs, cifar.batch_size, cifar.regime) == ("darts", 50, 256, "bilevel")
    assert (cifar.space_settings["partial_channels"], cifar.space_settings["channels"]) == (4, 16)
    assert (cifar.weights.lr, cifar.weights.lr_min, cifar.weights.weight_decay, cifar.weights.clip) == (0.1, 0, 3e-4, 5)
    adam = cifar.architecture
    assert (adam.lr, adam.beta1, adam.beta2, adam.weight_decay) == (6e-4, 0.5, 0.999, 1e-3)
    assert (adam.after * cifar.epochs, imagenet.architecture.after * imagenet.epochs) == (15, 35)
    assert (imagenet.batch_size, imagenet.weights.lr, imagenet.weights.warmup) == (1024, 0.5, 5)
    assert (imagenet.architecture.lr, imagenet.space_settings["partial_channels"]) == (6e-3, 2)
    assert "partial_channels" not in resolve({"method": "pc-darts", "space": "nos"}).space_settings, "not defined there"


@pytest.mark.parametrize("regime", ["bilevel", "unrolled", "single-level"])
def test_the_architecture_waits_for_its_share_of_the_epochs(regime: str, tmp_path: Path) -> None:
    given = settings("nb201", write_data(tmp_path / "data.npz"), method="pc-darts", regime=regime)
    given |= {"space_settings": {"cells_per_stage": 1, "channels": 4, "nodes": 2, "partial_channels": 2}}
    given |= {"architecture": {"lr": 0.05, "after": 0.5}, "epochs": 4}
    search(resolve(given), tmp_path / "run")
    rows = [line for line in (tmp_path / "run" / "architecture.jsonl").read_text().splitlines() if line]
    tables = [row.partition('"tables"')[2] for row in rows]
    assert len(tables) == 4
    assert tables[0] == tables[1] and len({*tables[1:]}) == 3, "two of four epochs train the weights alone"
