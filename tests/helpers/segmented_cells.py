"""Derived cells that calibrate, or have modules without a kernel, for tests of their fused form."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from softcell.arch import Cell, Pick
from softcell.nn import Spec
from softcell.nn.calibrate import Calibration
from softcell.nn.stochastic import DropPath, fixed_noise
from softcell.spaces import PickedCell, _derived_plan
from softcell.spaces._derived_plan import DerivedPass
from softcell.spaces._segment_plan import SegmentedCell
from softcell.spaces.darts import CellPlan, Preprocess
from tests.helpers.picked_cells import Factors

SAME = "skip_connect"
S3, S5, D3, D5 = "sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5"
AVERAGE, LARGEST = "avg_pool_3x3", "max_pool_3x3"
CHANNEL, SPATIAL, K3, K5 = "channel_attention", "spatial_attention", "dynamic_conv_3x3", "dynamic_conv_5x5"

CELLS: dict[str, tuple[tuple[int, int, str], ...]] = {
    "a pair at each tier": (
        (0, 2, S3), (1, 2, SPATIAL), (2, 3, D3),
        (1, 4, LARGEST), (3, 4, S5), (4, 5, K3),
        (0, 6, CHANNEL), (5, 6, AVERAGE), (6, 7, SAME),
        (3, 8, SAME), (7, 8, S3), (8, 9, CHANNEL),
    ),
    "only features": (
        (0, 2, S3), (1, 2, D5), (2, 3, SAME), (0, 4, SAME), (3, 4, S5), (4, 5, AVERAGE), (4, 6, LARGEST), (6, 7, D3),
    ),
    "one calibration after the other": (
        (0, 2, S3), (0, 2, SAME), (2, 3, K5), (3, 4, K3), (3, 4, AVERAGE), (4, 5, SPATIAL), (5, 6, SAME), (1, 6, D3),
        (6, 7, CHANNEL),
    ),
    "several on an edge": (
        (0, 2, S3), (0, 2, CHANNEL), (0, 2, K3), (1, 2, CHANNEL), (1, 2, SPATIAL), (1, 2, "none"), (2, 3, K3),
        (2, 3, "dil_dynamic_conv_3x3"), (2, 3, S3), (2, 4, K5), (3, 4, SAME), (3, 4, LARGEST), (4, 5, SPATIAL),
    ),
    "inputs are read late": (
        (0, 2, S3), (1, 2, K3), (2, 3, SPATIAL), (3, 4, SAME), (0, 4, SAME), (1, 4, D3), (4, 5, S3), (1, 6, LARGEST),
        (5, 6, K3), (6, 7, SAME),
    ),
    "sums between calibrations": (
        (0, 2, S3), (1, 2, CHANNEL), (2, 3, CHANNEL), (3, 4, SAME), (2, 4, SAME), (4, 5, SPATIAL), (5, 6, SAME),
    ),
    "modules without a kernel": (
        (0, 2, "noise"), (1, 2, S3), (2, 3, "noise"), (3, 4, S3), (0, 4, "nor_conv_3x3"), (4, 5, K3), (5, 6, "noise"),
        (2, 6, D3), (6, 7, AVERAGE),
    ),
    "calibrations of sums": (
        (0, 2, S3), (1, 2, SPATIAL), (0, 3, "noise"), (1, 3, S3), (2, 3, K3), (2, 4, D3), (3, 4, CHANNEL),
    ),
    "only modules leave the inputs": (
        (0, 2, "noise"), (1, 2, "noise"), (2, 3, S3), (1, 3, "noise"), (3, 4, D3), (2, 4, SAME),
    ),
    "nothing reaches 2": ((0, 3, S3), (1, 3, SPATIAL), (2, 4, S3), (3, 4, K3), (3, 4, AVERAGE)),
}  # fmt: skip
"""Source, target and operation of every pick, by target, as drop-path draws its factors module by module."""
SUMS = ("calibrations of sums", "nothing reaches 2")
"""Cells in which whatever is calibrated has features."""
RESIDUAL = (3, 5, 7, 9)
WIDTHS = (5, 6)


class Segmented(nn.Module):
    """A cell with its preprocessing, whose norms have random scales, shifts and running statistics, in float64."""

    def __init__(
        self, name: str, channels: int, *, stride: int = 1, residual: bool = True, older_is_larger: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        picks = tuple(Pick(*one) for one in CELLS[name])
        nodes = sorted({pick.target for pick in picks})
        plan = CellPlan("reduce" if stride == 2 else "normal", channels, WIDTHS, older_is_larger)
        self.stride, self.channels, self.drop_path = stride, channels, DropPath(0.0)
        self.pre = Preprocess(plan, affine=True)
        self.residual = set(RESIDUAL) & set(nodes) if residual else set()
        self.cell = PickedCell(
            Cell(picks, output=tuple(nodes)),
            2,
            lambda source: Spec(channels, stride if source < 2 else 1),
            self.drop_path,
            residual=self.residual,
        )
        self.outputs = range(2, max(nodes) + 1)
        self.double()
        for norm in self.modules():
            if isinstance(norm, nn.BatchNorm2d):
                assert norm.running_mean is not None and norm.running_var is not None
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)
                norm.running_mean.uniform_(-1, 1)
                norm.running_var.uniform_(0.5, 2)

    def form(self) -> SegmentedCell:
        form = self.cell.fused((self.pre.older, self.pre.newer), self.channels, self.stride)
        assert isinstance(form, SegmentedCell), "it has a fused form of several programs"
        return form

    def dropped(self) -> Iterator[int]:
        """The numbers of the picks that drop-path drops, counted without zeros, in the order of the modules."""
        present = [one for one in CELLS[self.name_of()] if one[2] != "none"]
        modules = [m for i in range(len(self.cell.cell.picks)) if (m := self.cell.edges.module(i)) is not None]
        for node in self.outputs:
            for number, ((_, target, _), module) in enumerate(zip(present, modules, strict=True)):
                calibrates = isinstance(module, Calibration)
                feature = not isinstance(module, nn.Identity) and node not in self.residual
                if target == node and (calibrates or feature):
                    yield number

    def name_of(self) -> str:
        picks = tuple((p.source, p.target, p.op) for p in self.cell.cell.picks)
        return next(name for name, own in CELLS.items() if own == picks)

    def in_programs(self, states: list[Tensor], factors: Tensor | None) -> list[Tensor]:
        """factors [picks, n]: of drop-path, by number of the pick."""
        form = self.form()
        self.drop_path.probability = 0.0 if factors is None else 0.5
        given = None if factors is None else factors[list(form.dropped)]
        with patch.object(DropPath, "factors", lambda own, x, paths: given), fixed_noise():
            shared = DerivedPass([form], states[-1])
            nodes = form.run(shared, states, self.outputs)
            shared.finish()
        return nodes

    def one_by_one(self, states: list[Tensor], factors: Tensor | None) -> list[Tensor]:
        given = None if factors is None else factors[list(self.dropped())]
        self.cell._drop_path = [Factors(given).train(self.training)]
        with fixed_noise():
            nodes = self.cell(self.pre(*states))[2:]
        self.cell._drop_path = [self.drop_path]
        return nodes  # type: ignore[no-any-return]


def inputs_of(
    cell: Segmented, n: int, size: tuple[int, int], *, older_is_larger: bool = False, seed: int = 3
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    larger = (2 * size[0], 2 * size[1] - 1) if older_is_larger else size
    shapes = ((n, WIDTHS[0], *larger), (n, WIDTHS[1], *size))
    return [torch.randn(shape, generator=generator).double() for shape in shapes]


def factors_of(cell: Segmented, n: int, seed: int = 5) -> Tensor:
    """[picks, n], some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, (len(cell.cell.cell.picks), n), generator=generator).double()


def outcome(
    cell: Segmented,
    states: list[Tensor],
    factors: Tensor | None,
    *,
    fused: bool,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    part: slice = slice(None),
) -> dict[str, Tensor]:
    """Values of the inner nodes, gradients of a random linear function of them, and buffers.

    dtype: float32 or float64, or bfloat16: of inputs and, by autocast, of modules. part: the images that are used.
    """
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    own = copy.deepcopy(cell).to(device, wide)
    given = [x[part].to(device, dtype).requires_grad_() for x in states]
    dropped = None if factors is None else factors[:, part].to(device, wide)
    with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.bfloat16):
        nodes = (own.in_programs if fused else own.one_by_one)(given, dropped)
    generator = torch.Generator().manual_seed(7)
    loss = torch.zeros((), device=device, dtype=wide)
    for node in nodes:
        pull = torch.randn(len(states[0]), *node.shape[1:], generator=generator, dtype=torch.float64)
        loss = loss + (node.to(wide) * pull[part].to(node.device, wide)).sum()
    names, wanted = zip(*own.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, (*given, *wanted), allow_unused=True)
    found = {f"node {i}": node.detach() for i, node in zip(own.outputs, nodes, strict=True)}
    keys = [*(f"gradient of input {i}" for i in range(len(given))), *names]
    for name, one, gradient in zip(keys, (*given, *wanted), gradients, strict=True):
        found[name] = torch.zeros_like(one) if gradient is None else gradient
    return found | dict(own.named_buffers())


def twins(monkeypatch: Any) -> None:
    """Programs run by their twins in plain autograd."""
    from softcell.kernels.derived import derived_cell_reference, derived_nodes_reference

    monkeypatch.setattr(_derived_plan, "derived_cell", derived_cell_reference)
    monkeypatch.setattr(_derived_plan, "derived_nodes", derived_nodes_reference)
