"""Connections of a heterogeneous cell that are kept several to a choice, each with a weight of 1 (EnTranNAS-DST)."""

from __future__ import annotations

import torch
from torch import Tensor

from softcell.arch import Cell, Pick, WeightMix
from softcell.arch.mix import live_of
from softcell.methods import METHODS
from softcell.nn.calibrate import Calibration
from softcell.nn.candidates import Spec
from softcell.nn.stochastic import DropPath
from softcell.settings import build
from softcell.spaces import build_space
from softcell.spaces.cell import MixedCell, PickedCell
from softcell.spaces.nos import NosSpace

SPACE = NosSpace(cells=3, channels=4, nodes=2)
PICKS = (
    Pick(0, 2, "skip_connect"),
    Pick(0, 2, "channel_attention"),
    Pick(0, 2, "dynamic_conv_3x3"),
    Pick(1, 2, "spatial_attention"),
    Pick(2, 3, "skip_connect"),
    Pick(2, 3, "dynamic_conv_5x5"),
    Pick(3, 4, "skip_connect"),
    Pick(4, 5, "skip_connect"),
)


def spec(source: int) -> Spec:
    return Spec(4, affine=False, pool_norm=True)


def states() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 5, 6, generator=generator, dtype=torch.float64) for _ in range(2)]


def picked() -> PickedCell:
    torch.manual_seed(0)
    return PickedCell(Cell(PICKS, (3, 5)), 2, spec, DropPath(0.0), residual=(3, 5)).double()


def test_what_multiplies_is_shared_by_the_connections_of_its_choice() -> None:
    cell, (a, b) = picked(), states()
    modules = [cell.edges.module(number) for number in range(len(PICKS))]

    def applied(number: int, base: Tensor, x: Tensor) -> Tensor:
        module = modules[number]
        assert isinstance(module, Calibration)
        return module.applied(base, module(x))

    x, y = cell([a, b])[2:4]
    torch.testing.assert_close(x, a + (applied(1, a, a) + applied(2, a, a)) / 3 + applied(3, a, b))
    torch.testing.assert_close(y, x + applied(5, x, x) / 2)


def test_a_supernet_whose_cells_keep_several_computes_what_is_derived() -> None:
    derived, table, layout = picked(), SPACE.layout().tables[0], SPACE.layout()
    mixed = MixedCell(table, 2, spec, residual=table.output).double()
    own = mixed.state_dict()
    assert derived.state_dict().keys() <= own.keys()
    mixed.load_state_dict({**own, **derived.state_dict()})
    live = live_of(table, PICKS)
    ones = torch.tensor([[float(k in row) for k in range(table.width)] for row in live], dtype=torch.float64)
    weights = {t.name: torch.rand(t.shape, dtype=torch.float64) for t in layout.tables}
    found = mixed(states(), WeightMix(layout, weights, picked={0: (live, ones)}), 0)
    for mine, theirs in zip(found, derived(states()), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_maps_of_the_standard_cell_stay_within_bounds_when_all_connections_are_kept() -> None:
    """Undivided, attentions and kernels multiply from node to node: millions, and no learning."""
    largest = {}
    for name in ("nos", "darts"):
        torch.manual_seed(0)
        supernet = build_space(name, {"cells": 3, "channels": 4, "nodes": 4}).supernet((3, 16, 16), 10)
        kind = METHODS.get("entrannas-dst")
        method = kind.for_supernet(build(kind.Settings, {}, name), supernet)  # type: ignore[arg-type]
        with torch.no_grad():
            maps = supernet.features(torch.randn(8, 3, 16, 16), method.relax())
        largest[name] = max(float(one.abs().mean()) for one in maps)
    assert largest["nos"] < 20 * largest["darts"]
