"""Batch-norm statistics over the rows of all ranks, and the setting that keeps them local to each rank.

Statistics are merged by the parallel rule of Chan, Golub & LeVeque (1983): with count n_i, mean m_i and sum
of centred squares s_i on rank i,

    n = sum n_i        m = sum n_i m_i / n        s = sum s_i + sum n_i (m_i - m)^2

which, unlike "mean of squares minus square of mean", loses no digits when the mean is large. One collective gathers all
(n_i, m_i, s_i) on all ranks. It is differentiable and everything else is plain tensor arithmetic, so gradients of any
order flow across the processes: second-order search differentiates a gradient step.

Fused cells use the same rule between their passes (`SharedRows`): kernels reduce the rows of a rank, one collective per
norm group merges the results, and later kernels read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Norms = Literal["shared", "local"]
"""Whether ranks merge batch statistics, or each uses the statistics of its part."""

# Not a context variable: a backward pass that recomputes runs in an autograd thread and must see it too.
_local = False
_exchanges = True


@contextmanager
def local_norms() -> Iterator[None]:
    """Inside this context every rank normalises with the statistics of its part of the batch.

    Example:
        >>> from softcell.kernels.shared import local_norms, shares_norms
        >>> with local_norms():
        ...     shares_norms()
        False
    """
    global _local
    before, _local = _local, True
    try:
        yield
    finally:
        _local = before


def norms_of(kind: Norms) -> AbstractContextManager[None]:
    """The context of a step whose recipe has `norms` = `kind`."""
    return local_norms() if kind == "local" else nullcontext()


def shares_norms() -> bool:
    """Whether batch-norm statistics are currently merged over several ranks."""
    return not _local and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def without_exchange() -> Iterator[None]:
    """Inside this context sums over ranks exclude all other ranks, for passes whose values are not used."""
    global _exchanges
    before, _exchanges = _exchanges, False
    try:
        yield
    finally:
        _exchanges = before


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks. Each rank's loss depends on every rank's input, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        sum_in_place(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return sum_over_ranks(gradient)


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of `x` (any shape, the same on all ranks) over the ranks, differentiable at any order.

    Gradients are those of the sum of all ranks' losses. All ranks must call this function, and backward, in the same
    order.
    """
    return _SumOverRanks.apply(x)  # type: ignore[no-untyped-call, no-any-return]


def sum_in_place(x: Tensor) -> None:
    """Replace `x` (any shape, the same on all ranks) by its sum over the ranks, without gradient."""
    if _exchanges:
        dist.all_reduce(x)


def merge_over_ranks(count: int, mean: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count [], mean and biased variance (both shaped like `mean`) of the rows of all ranks, with one collective.

    count, mean, squares: number, mean and sum of centred squares of this rank's rows, any shape. The count may differ
    between ranks and may be 0; mean and squares must then be finite and have no effect.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    row = torch.cat([mean.reshape(-1), squares.reshape(-1), mean.new_full((1,), count)])
    # Summing zero-padded rows is a gather, by a collective that is its own adjoint.
    rows = sum_over_ranks(F.pad(row[None], (0, 0, rank, size - rank - 1)))
    length = mean.numel()
    means, parts, counts = rows[:, :length], rows[:, length:-1], rows[:, -1:]
    total = counts.sum()
    merged = (counts * means).sum(0) / total
    variance = (parts.sum(0) + (counts * (means - merged).square()).sum(0)) / total
    return total.detach(), merged.view(mean.shape), variance.view(mean.shape)


class SharedRows:
    """Merges statistics of a fused cell with `rows` rows on this rank, for one forward pass and its backward pass.

    `total` [] is the number of rows of all ranks, available once statistics have been merged.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.total: Tensor | None = None

    def merge_moments(self, moments: Tensor, planes: range, eps: float) -> None:
        """Replace statistics of this rank's rows by those of all ranks, in place.

        moments [3, planes, c]: mean, 1/√(variance + eps) and biased variance.
        """
        if planes:
            own = moments[:, planes.start : planes.stop]
            self.total, mean, variance = merge_over_ranks(self.rows, own[0], own[2] * self.rows)
            own.copy_(torch.stack([mean, torch.rsqrt(variance + eps), variance]))

    def merge_norm(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [c] and biased variance [c] of `y` [n, h, w, c] over all ranks, differentiable at any order."""
        mean = y.mean((0, 1, 2))
        self.total, mean, variance = merge_over_ranks(self.rows, mean, (y - mean).square().sum((0, 1, 2)))
        return mean, variance

    def merge_tiles(self, partial: Tensor, planes: range) -> Tensor:
        """`merge_sums` of sums per tile [2, tiles, planes, c], as one tile [2, 1, planes, c]; other planes are 0."""
        sums = torch.zeros_like(partial[:, :1])
        own = slice(planes.start, planes.stop)
        if planes:
            sums[:, 0, own] = self.merge_sums(partial[:, :, own].sum(1))
        return sums

    def merge_sums(self, sums: Tensor) -> Tensor:
        """Sums over all ranks, scaled by rows / total: dividing by this rank's `rows` gives means over all rows.

        sums: over this rank's rows, any shape. Kernels divide by the number of rows of this rank.
        """
        assert self.total is not None
        return sum_over_ranks(sums) * (self.rows / self.total)
