"""Sums over images in float64, whatever precision a run has; nothing waits for the host until they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from softcell.arch import Layout


class Moments(nn.Module):
    """Number, sum [size] and sum of products [size, size] of vectors, one per image."""

    count: Tensor
    total: Tensor
    products: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("total", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("products", torch.zeros(size, size, dtype=torch.float64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves like any module, but `.float()` and `.to(dtype)` leave float64 alone."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.double()
        return self

    @torch.no_grad()
    def add(self, vectors: Tensor, first: int = 0, *, counts: bool = True) -> None:
        """vectors [n, m], in place, to the `m` places from `first` on; `counts`: as images not seen before."""
        exact, places = vectors.double(), slice(first, first + vectors.shape[1])
        if counts:
            self.count += vectors.shape[0]
        self.total[places] += exact.sum(0)
        self.products[places, places] += exact.T @ exact

    def reset(self) -> None:
        for buffer in self.sums():
            buffer.zero_()

    def sums(self) -> list[Tensor]:
        return [self.count, self.total, self.products]

    def mean(self) -> Tensor:
        """[size]; zeros where nothing was added."""
        return self.total / self.count.clamp(min=1.0)

    def mean_products(self) -> Tensor:
        """[size, size]"""
        return self.products / self.count.clamp(min=1.0)

    def extra_repr(self) -> str:
        return f"size={self.total.shape[0]}"


class TableMoments(nn.ModuleDict):
    """`Moments` of every table of a layout by its name, of vectors [choices · width]."""

    def __init__(self, layout: Layout) -> None:
        super().__init__({table.name: Moments(table.shape[0] * table.shape[1]) for table in layout.tables})
        self._read = tuple(layout.first_sites())  # tables that are read at all

    def __getitem__(self, key: str) -> Moments:
        found = super().__getitem__(key)
        assert isinstance(found, Moments)
        return found

    def begun_anew(self) -> Self:
        for name in self:
            self[name].reset()
        return self

    def sums(self) -> list[Tensor]:
        return [sums for name in self for sums in self[name].sums()]

    def images(self) -> int:
        """How many were added; waits for the device."""
        return int(self[self._read[0]].count)
