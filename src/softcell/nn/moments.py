"""Sums over images in float64, whatever precision a run has; nothing waits for the host until they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

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


class SiteSums(nn.Module):
    """Sums over images of the rows of a table's places, and of their logarithms: [places, width] each.

    places: (site, choice) of each row, in the order in which rows come.
    """

    total: Tensor
    logs: Tensor

    def __init__(self, places: Sequence[tuple[int, int]], width: int) -> None:
        super().__init__()
        self.places = tuple(places)
        for name in ("total", "logs"):
            self.register_buffer(name, torch.zeros(len(self.places), width, dtype=torch.float64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves like any module, but `.float()` and `.to(dtype)` leave float64 alone."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.total, self.logs = self.total.double(), self.logs.double()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Checkpoints from before there were sums by site have none: they are zero then."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            state_dict.setdefault(f"{prefix}{name}", torch.zeros_like(buffer))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @torch.no_grad()
    def add(self, rows: Tensor, places: slice = slice(None)) -> None:
        """rows [places, n, width] of images, in place, those of all places or of some in succession."""
        exact = rows.double()
        self.total[places] += exact.sum(1)
        self.logs[places] += logarithm(exact).sum(1)

    def sums(self) -> list[Tensor]:
        return [self.total, self.logs]

    def extra_repr(self) -> str:
        return f"places={len(self.places)}"


def logarithm(x: Tensor) -> Tensor:
    """log x in float64; of 0 that of the smallest float32: attention that vanished is small, not impossible."""
    return x.double().clamp(min=torch.finfo(torch.float32).tiny).log()


class TableMoments(nn.ModuleDict):
    """`Moments` of every table of a layout by its name, of vectors [choices · width]."""

    def __init__(self, layout: Layout) -> None:
        super().__init__({table.name: Moments(table.shape[0] * table.shape[1]) for table in layout.tables})
        self._read = tuple(layout.first_sites())  # tables that are read at all

    def __getitem__(self, key: str) -> Moments:
        found = super().__getitem__(key)
        assert isinstance(found, Moments)
        return found

    def sums(self) -> list[Tensor]:
        return [sums for name in self for sums in self[name].sums()]

    def images(self) -> int:
        """How many were added; waits for the device."""
        return int(self[self._read[0]].count)
