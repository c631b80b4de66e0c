"""Derived cells with every kind of candidate, for tests of their fused form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from softcell.nn.candidates import Spec, get_candidate
from softcell.nn.conv import FactorisedReduction, ReLUConvBN
from softcell.nn.stochastic import DropPath
from softcell.spaces._derived_plan import DerivedCell, Pick, plan_derived

EDGES = [
    (0, 2, "sep_conv_3x3"),
    (1, 2, "max_pool_3x3"),
    (0, 3, "sep_conv_5x5"),
    (1, 3, "skip_connect"),
    (2, 4, "dil_conv_3x3"),
    (1, 4, "dil_conv_5x5"),
    (3, 5, "skip_connect"),
    (2, 5, "avg_pool_3x3"),
    (0, 5, "skip_connect"),
    (1, 5, "nor_conv_1x1"),
]
WIDTHS = (7, 9)


def edges_of_one_size(size: int) -> list[tuple[int, int, str]]:
    """Edges whose windows all have one size, some of them dilated, with pools and identities."""
    plain, dilated = f"sep_conv_{size}x{size}", f"dil_conv_{size}x{size}"
    return [
        (0, 2, plain),
        (1, 2, dilated),
        (0, 3, dilated),
        (2, 3, plain),
        (1, 4, "skip_connect"),
        (2, 4, plain),
        (2, 4, dilated),
        (2, 5, "max_pool_3x3"),
        (3, 5, "avg_pool_3x3"),
        (3, 5, dilated),
    ]


class Cell(nn.Module):
    """A cell of four inner nodes with its preprocessing; 7 and 9 channels arrive, the older may be twice as large."""

    def __init__(
        self,
        channels: int,
        stride: int,
        *,
        older_is_larger: bool,
        pool_norm: bool,
        affine: bool = True,
        edges: Sequence[tuple[int, int, str]] = EDGES,
    ) -> None:
        super().__init__()
        self.channels, self.stride, self.edges = channels, stride, edges
        first = FactorisedReduction if older_is_larger else lambda i, o, affine: ReLUConvBN(i, o, 1, affine=affine)
        self.older = first(WIDTHS[0], channels, affine=affine)
        self.newer = ReLUConvBN(WIDTHS[1], channels, 1, affine=affine)
        self.drop_path = DropPath(0.3)
        self.modules_of_edges = nn.ModuleList(
            get_candidate(op).build(Spec(channels, stride if source < 2 else 1, affine=affine, pool_norm=pool_norm))
            for source, _, op in edges
        )
        for norm in self.modules():
            if isinstance(norm, nn.BatchNorm2d) and norm.affine:
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)

    def plan(self) -> DerivedCell:
        picks = [Pick(s, t, m) for (s, t, _), m in zip(self.edges, self.modules_of_edges, strict=True)]
        return plan_derived((self.older, self.newer), picks, 4, self.channels, self.stride, self.drop_path)

    def forward(self, older: Tensor, newer: Tensor, factors: Tensor | None) -> Tensor:
        """Module by module; factors [paths, n] scale what every module but an identity gives."""
        values = [self.older(older), self.newer(newer)]
        for node in range(2, 6):
            total, path = None, 0
            for (source, target, _), module in zip(self.edges, self.modules_of_edges, strict=True):
                identity = isinstance(module, nn.Identity)
                if target == node:
                    value = module(values[source])
                    if factors is not None and not identity:
                        value = value * factors[path].view(-1, 1, 1, 1)
                    total = value if total is None else total + value
                path += not identity
            assert total is not None
            values.append(total)
        return torch.cat(values[2:], 1)


def states(n: int, size: tuple[int, int], *, older_is_larger: bool) -> list[Tensor]:
    """What arrives: random maps, the older of odd width where it is larger."""
    height, width = size
    larger = (2 * height, 2 * width - 1) if older_is_larger else size
    return [torch.randn(n, WIDTHS[0], *larger), torch.randn(n, WIDTHS[1], *size)]
