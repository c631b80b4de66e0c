"""The plain formulation used by other toolkits: one module per candidate and edge, a sum of products per edge.

It is a baseline: it uses the same modules as our supernets, shares nothing between edges,
multiplies zeros for `none`, and lets autograd keep every product.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from softcell.arch import Table, WeightMix
from softcell.nn.candidates import get_candidate
from softcell.spaces import Supernet
from softcell.spaces.cell import MixedCell
from softcell.spaces.edges import SpecOf


class PlainCell(nn.Module):
    """Every candidate of every edge as a separate module."""

    block = None  # it has no calibrations, which a pass of all cells would prepare together

    def __init__(self, table: Table, inputs: int, spec_of: SpecOf) -> None:
        super().__init__()
        self.table, self.inputs = table, inputs
        self.edges = nn.ModuleList(
            nn.ModuleList(get_candidate(op).build(spec_of(choice.source)) for op in choice.candidates)
            for choice in table.choices
        )

    def drops(self) -> bool:
        return False

    def forward(self, states: list[Tensor], mix: WeightMix, site: int) -> list[Tensor]:
        values, weights = list(states), mix.weights(site)
        for node in range(self.inputs, max(self.table.targets) + 1):
            arriving: list[Any] = []
            for index in self.table.incoming(node):
                x = values[self.table.choices[index].source]
                row, edge = weights[index], cast(nn.ModuleList, self.edges[index])
                arriving.append(sum(w * op(x) for w, op in zip(row, edge, strict=False)))
            values.append(sum(arriving))
        return values


def make_plain(supernet: Supernet) -> Supernet:
    """Replaces every cell of a supernet with its plain formulation, with new weights."""
    cells = supernet.cells
    assert isinstance(cells, nn.ModuleList)
    for i, cell in enumerate(cells):
        assert isinstance(cell, MixedCell)
        parameter = next(supernet.parameters())
        plain = PlainCell(cell.table, cell.inputs, cell.spec_of)
        cells[i] = plain.to(device=parameter.device, dtype=parameter.dtype)
    return supernet
