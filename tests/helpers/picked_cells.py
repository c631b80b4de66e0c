"""Derived cells for the tests of their fused form as one program of `cell`, and the comparison with their modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import softcell.spaces.oneshot1  # noqa: F401 registers its candidates
from softcell.arch import Cell, Pick
from softcell.nn import Spec
from softcell.nn.conv import ConvBNReLU
from softcell.nn.stochastic import DropPath
from softcell.spaces import PickedCell
from softcell.spaces._affine_cells import AffineCell

ONE, THREE, POOL, SKIP, ZERO = "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3", "skip_connect", "none"
CELLS: dict[str, tuple[tuple[int, int, str], ...]] = {
    "best": ((0, 1, THREE), (0, 2, THREE), (1, 2, THREE), (0, 3, SKIP), (1, 3, THREE), (2, 3, THREE)),
    "all five": ((0, 1, ONE), (0, 2, POOL), (1, 2, SKIP), (0, 3, POOL), (1, 3, ZERO), (2, 3, THREE)),
    "two on an edge": ((0, 1, THREE), (0, 1, ONE), (0, 2, SKIP), (1, 2, POOL), (1, 2, SKIP), (2, 3, ONE), (2, 3, POOL)),
    "nothing reaches 1": ((0, 1, ZERO), (0, 2, ONE), (1, 2, THREE), (0, 3, POOL), (1, 3, SKIP), (2, 3, THREE)),
    "nothing leaves 2": ((0, 1, THREE), (0, 2, ONE), (1, 2, POOL), (0, 3, SKIP), (1, 3, ONE)),
}
"""Of NAS-Bench-201: source, target and operation of every pick, by target, as drop-path draws its factors module by
module."""
CONV1, CONV3, MAX, LINK = "conv_1x1", "conv_3x3", "max_pool_3x3", "link_1x1"
RECTIFIED: dict[str, tuple[tuple[int, int, str], ...]] = {
    "space 1": (
        *((0, 1, SKIP), (1, 2, CONV3), (0, 3, SKIP), (2, 3, SKIP), (3, 4, MAX), (2, 5, SKIP), (4, 5, SKIP)),
        *((5, 6, CONV1), (4, 7, SKIP), (6, 7, SKIP), (7, 8, CONV3), (6, 9, LINK), (8, 9, LINK)),
    ),
    "space 2": (
        *((0, 1, SKIP), (1, 2, CONV1), (2, 3, SKIP), (3, 4, MAX), (0, 5, SKIP), (4, 5, SKIP), (5, 6, CONV3)),
        *((2, 7, SKIP), (6, 7, SKIP), (7, 8, MAX), (0, 9, LINK), (4, 9, LINK), (8, 9, LINK)),
    ),
    "space 3": (
        *((0, 1, SKIP), (1, 2, MAX), (2, 3, SKIP), (3, 4, CONV3), (4, 5, SKIP), (5, 6, CONV3), (2, 7, SKIP)),
        *((6, 7, SKIP), (7, 8, CONV1), (0, 9, SKIP), (8, 9, SKIP), (9, 10, CONV3), (6, 11, LINK), (10, 11, LINK)),
    ),
    "one input read often": (
        *((0, 1, SKIP), (1, 2, CONV3), (0, 3, SKIP), (3, 4, CONV3), (0, 5, SKIP), (5, 6, MAX), (0, 7, SKIP)),
        *((7, 8, MAX), (2, 9, LINK), (4, 9, LINK), (6, 9, LINK), (8, 9, LINK)),
    ),
    "loose ends": (
        *((0, 1, SKIP), (1, 2, CONV3), (0, 3, SKIP), (3, 4, CONV1), (2, 5, SKIP), (4, 5, SKIP), (5, 6, MAX)),
        *((0, 7, SKIP), (7, 8, CONV3), (2, 9, LINK)),
    ),
    "several in a block": (
        *((0, 1, SKIP), (1, 2, CONV3), (1, 2, MAX), (1, 2, CONV1), (0, 3, SKIP), (2, 3, SKIP), (3, 4, POOL)),
        *((3, 4, SKIP), (3, 4, CONV3), (2, 5, LINK), (4, 5, LINK)),
    ),
    "nothing reaches 2": (
        (0, 1, SKIP),
        (1, 2, ZERO),
        (0, 3, SKIP),
        (2, 3, SKIP),
        (3, 4, CONV3),
        (2, 5, LINK),
        (4, 5, LINK),
    ),
}
"""Of NAS-Bench-1Shot1 and cells like it: norms and ReLUs follow the convolutions."""


class Factors(DropPath):
    """Drop-path by given factors [picks, n], one row after the other."""

    def __init__(self, factors: Tensor | None) -> None:
        super().__init__(0.0 if factors is None else 0.5)
        self.rows: Iterator[Tensor] = iter(() if factors is None else factors)

    def forward(self, x: Tensor) -> Tensor:
        if self.probability == 0.0 or not self.training:
            return x
        return x * next(self.rows).to(x).view(-1, 1, 1, 1)


def picked(name: str, channels: int, factors: Tensor | None = None, **settings: Any) -> PickedCell:
    """A cell in float64 whose norms have random scales, shifts and running statistics."""
    torch.manual_seed(0)
    own = picks_of(name)
    picks = Cell(tuple(Pick(*one) for one in own), output=(own[-1][1],))
    spec = Spec(channels, **settings)
    cell = PickedCell(picks, 1, lambda source: spec, Factors(factors)).double()
    for norm in cell.modules():
        if isinstance(norm, nn.BatchNorm2d) and norm.affine:
            assert norm.running_mean is not None and norm.running_var is not None
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
    return cell


def num_dropped(name: str) -> int:
    """The number of picks that drop-path drops."""
    return sum(op not in (SKIP, ZERO) for _, _, op in picks_of(name))


def picks_of(name: str) -> tuple[tuple[int, int, str], ...]:
    return (CELLS | RECTIFIED)[name]


def is_rectified(cell: PickedCell) -> bool:
    return any(isinstance(module, ConvBNReLU) for module in cell.modules())


def form_of(cell: PickedCell) -> AffineCell:
    form = cell.fused_rectified() if is_rectified(cell) else cell.fused_affine()
    assert form is not None, "it has a fused form"
    return form


def inputs_of(name: str, channels: int, batch: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """An input [n, c, h, w], and factors [picks, n] of which some are 0."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(batch, channels, *size, generator=generator).double()
    return x, torch.randint(3, (num_dropped(name), batch), generator=generator).double()


def outcome(
    cell: PickedCell,
    x: Tensor,
    factors: Tensor | None,
    *,
    fused: bool,
    last: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    part: slice = slice(None),
) -> dict[str, Tensor]:
    """Values of the inner nodes, gradients of a random linear function of them (`last`: of the last), and buffers.

    dtype: float32 or float64, or bfloat16: of inputs and, by autocast, of modules. part: the images that are used; the
    function is part of that of the whole batch.
    """
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    own = copy.deepcopy(cell).to(device, wide)
    given = x[part].to(device, dtype).requires_grad_()
    entered = given.relu() if is_rectified(own) else given
    dropped = None if factors is None else factors[:, part].to(device, wide)
    if fused:
        ones = None if dropped is None else torch.cat([torch.ones_like(dropped[:1]), dropped])
        nodes = form_of(own)([entered], ones)[1:]
    else:
        own._drop_path = [Factors(dropped).train(own.training)]
        with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.bfloat16):
            nodes = own([entered])[1:]
    generator = torch.Generator().manual_seed(7)
    slopes = [torch.randn(len(x), *node.shape[1:], generator=generator)[part].to(node) for node in nodes]
    chosen = list(zip(nodes, slopes, strict=True))[-1 if last else 0 :]
    loss: Any = sum((node * slope).sum() for node, slope in chosen)
    wanted = [given, *own.parameters()]
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    names = ["input 0", *(name for name, _ in own.named_parameters())]
    found = {f"node {1 + i}": node.detach() for i, node in enumerate(nodes)}
    for name, one, gradient in zip(names, wanted, gradients, strict=True):
        found[name] = torch.zeros_like(one) if gradient is None else gradient
    return found | dict(own.named_buffers())


def require_close(mine: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """By the norm of each tensor; where that is rounding, by the number of elements."""
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        wide = expected.double().cpu()
        error = (mine[name].double().cpu() - wide).norm() / max(float(wide.norm()), 1e-2 * wide.numel() ** 0.5)
        assert error <= tolerance, f"{name}: {error}"


def whole_of(first: dict[str, Tensor], second: dict[str, Tensor], cell: nn.Module) -> dict[str, Tensor]:
    """Of two ranks' outcomes: gradients of parameters summed, maps one after the other, statistics, which are equal."""
    parameters, buffers = dict(cell.named_parameters()), dict(cell.named_buffers())
    assert all(torch.equal(first[key], second[key]) for key in buffers), "both ranks have the same statistics"

    def joined(key: str, value: Tensor) -> Tensor:
        if key in buffers:
            return value
        return value + second[key] if key in parameters else torch.cat([value, second[key]])

    return {key: joined(key, value) for key, value in first.items()}


def require_modules_results(
    both: Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]], name: str, *, training: bool, drops: bool
) -> None:
    """The two results of `both`, fused and module by module, agree; with `drops` they differ from those without."""
    mine, theirs = both(name, training=training, drops=drops)
    require_close(mine, theirs, 1e-10)
    if drops:  # something was dropped
        with pytest.raises(AssertionError):
            require_close(mine, both(name, training=training, drops=False)[0], 1e-2)
