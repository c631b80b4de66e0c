"""Attention rows of single images: collected over a forward pass, aggregated over cells, summed over images.

A row [n, tokens + 1] is the attention of an indicator token to itself (column 0) and to each candidate. Cells of a
table share one architecture, so a table's attention is an aggregate of its cells' rows, usually their mean. `Moments`
sums it over images, `SiteSums` the rows of every cell: in float64, whatever the precision of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.arch import Layout
from softcell.methods.itnas.margins import Aggregate, used_sites
from softcell.methods.itnas.transformer import by_position


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
        """Moves like any module, but stays in float64 under `.float()` and `.to(dtype)`."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.double()
        return self

    @torch.no_grad()
    def add(self, vectors: Tensor, first: int = 0, *, counts: bool = True) -> None:
        """Adds vectors [n, m] in place to the `m` entries from `first` on; counts: whether the images are new."""
        exact, entries = vectors.double(), slice(first, first + vectors.shape[1])
        if counts:
            self.count += vectors.shape[0]
        self.total[entries] += exact.sum(0)
        self.products[entries, entries] += exact.T @ exact

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
    """Sums over images of the rows of a table's edges, and of their logarithms: [edges, width] each.

    edges: (site, choice) of each row, in the order of the forward pass.
    """

    total: Tensor
    logs: Tensor

    def __init__(self, edges: Sequence[tuple[int, int]], width: int) -> None:
        super().__init__()
        self.edges = tuple(edges)
        for name in ("total", "logs"):
            self.register_buffer(name, torch.zeros(len(self.edges), width, dtype=torch.float64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves like any module, but stays in float64 under `.float()` and `.to(dtype)`."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.total, self.logs = self.total.double(), self.logs.double()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Older checkpoints have no sums by site: these are zero then."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            state_dict.setdefault(f"{prefix}{name}", torch.zeros_like(buffer))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @torch.no_grad()
    def add(self, rows: Tensor, edges: slice = slice(None)) -> None:
        """Adds rows [edges, n, width] of images in place, for all edges or a range of them."""
        exact = rows.double()
        self.total[edges] += exact.sum(1)
        self.logs[edges] += logarithm(exact).sum(1)

    def sums(self) -> list[Tensor]:
        return [self.total, self.logs]

    def extra_repr(self) -> str:
        return f"edges={len(self.edges)}"


def logarithm(x: Tensor) -> Tensor:
    """log x in float64; 0 counts as the smallest float32, since attention that vanished is small, not impossible."""
    return x.double().clamp(min=torch.finfo(torch.float32).tiny).log()


class TableMoments(nn.ModuleDict):
    """`Moments` of every table of a layout by its name, of vectors [choices · width]."""

    def __init__(self, layout: Layout) -> None:
        super().__init__({table.name: Moments(table.shape[0] * table.shape[1]) for table in layout.tables})
        self._read = tuple(layout.first_sites())  # tables that a site reads

    def __getitem__(self, key: str) -> Moments:
        found = super().__getitem__(key)
        assert isinstance(found, Moments)
        return found

    def sums(self) -> list[Tensor]:
        return [sums for name in self for sums in self[name].sums()]

    def images(self) -> int:
        """The number of images added; waits for the device."""
        return int(self[self._read[0]].count)


class AttentionSums(NamedTuple):
    """The sums that a pass over images fills: of the tables' vectors by `aggregate`, and of every site's rows.

    stages: by site a number; sites with maps of one shape have the same one.
    """

    tables: TableMoments
    sites: Mapping[str, SiteSums]
    aggregate: Aggregate
    stages: Mapping[int, int]


class AttentionRows:
    """The rows of one pass by site and choice.

    edges: by table the (site, choice) pairs that attend. uniform: a table's name to [choices, width], used for choices
    that attend to nothing. sums: receives the vectors [n, choices · width] of a table once all its rows are there; the
    rows are dropped then. Without it rows are kept for `mean` where gradients are enabled. only: the one choice of a
    table that is recorded. counts: whether the pass counts its images; False for a further pass over the same ones.
    """

    def __init__(
        self,
        layout: Layout,
        edges: Mapping[str, Sequence[tuple[int, int]]],
        uniform: Callable[[str], Tensor],
        sums: AttentionSums | None = None,
        only: tuple[str, int] | None = None,
        *,
        counts: bool = True,
    ) -> None:
        self._layout, self._edges, self._uniform = layout, edges, uniform
        self._sums, self._only, self._counts = sums, only, counts
        self._rows: dict[tuple[int, int], tuple[Tensor, Sequence[int] | None]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_summed(self) -> bool:
        """Whether rows are added to sums."""
        return self._sums is not None

    def tables(self) -> set[str]:
        """Names of the tables that have rows."""
        return {self._layout.sites[site] for site, _ in self._rows}

    def note(self, site: int, choice: int, attention: Tensor, order: Sequence[int] | None = None) -> None:
        """Records a row [n, tokens + 1], or one of tokens in an `order`; adds a table's rows once they are complete."""
        if self._sums is None:
            if torch.is_grad_enabled():
                self._rows[site, choice] = attention, order
            return
        table = self._layout.sites[site]
        if self._only is not None and self._only != (table, choice):
            return
        self._rows[site, choice] = attention.detach(), order
        expected = [edge for edge in self._edges[table] if self._only is None or edge[1] == choice]
        if any(edge not in self._rows for edge in expected):
            return
        sums, sites = self._sums.tables[table], self._sums.sites[table]
        if self._only is None:
            sums.add(self.by_image(table).flatten(1))
            sites.add(torch.stack([self._candidates(*edge) for edge in sites.edges]))
        else:
            first = choice * self._layout.table(table).width
            sums.add(self.by_image(table)[:, choice], first, counts=self._counts)
            for edge in expected:
                at = sites.edges.index(edge)
                sites.add(self._candidates(*edge)[None], slice(at, at + 1))
        for edge in expected:
            del self._rows[edge]

    def by_image(self, table: str) -> Tensor:
        """The attention of every image to the candidates [n, choices, width], aggregated over sites.

        The mean over the sites that count, of attention or of its logarithm, in float64: without a norm on tokens
        candidates may differ in the seventh digit. With `vote` sites vote, not images: here the mean over all sites.
        """
        assert self._sums is not None
        how = self._sums.aggregate
        own, found = self._layout.table(table), dict[int, Tensor]()
        for choice in {choice for site, choice in self._rows if self._layout.sites[site] == table}:
            sites = [s for s in self._layout.sites_of(table) if (s, choice) in self._rows]
            used = used_sites([True] * len(sites), [self._sums.stages[s] for s in sites], how)
            rows = torch.stack([self._candidates(sites[i], choice) for i in used])
            found[choice] = (logarithm(rows) if how == "log-mean" else rows.double()).mean(0)
        n = next(iter(found.values())).shape[0]
        uniform = self._uniform(table).double()
        uniform = logarithm(uniform) if how == "log-mean" else uniform
        return torch.stack([found[i] if i in found else uniform[i].expand(n, -1) for i in range(len(own))], dim=1)

    def mean(self, table: str) -> Tensor:
        """Attention of every image to the candidates [n, choices, width], the mean over the table's cells."""
        own = self._layout.table(table)
        found: dict[int, list[Tensor]] = {}
        for site, choice in self._rows:
            if self._layout.sites[site] == table:
                found.setdefault(choice, []).append(self._candidates(site, choice))
        like = next(iter(found.values()))[0]
        n = like.shape[0]
        uniform = self._uniform(table).to(like.dtype)  # edges of zeros alone
        return torch.stack(
            [torch.stack(found[i]).mean(0) if i in found else uniform[i].expand(n, -1) for i in range(len(own))],
            dim=1,
        )

    def _candidates(self, site: int, choice: int) -> Tensor:
        """Attention to the candidates [n, width] of the table."""
        row, width = self._by_position(site, choice), self._layout.table(self._layout.sites[site]).width
        return F.pad(row[:, 1:], (0, width + 1 - row.shape[1]))

    def _by_position(self, site: int, choice: int) -> Tensor:
        """[n, tokens + 1]; reordered only here, since most rows are never read."""
        attention, order = self._rows[site, choice]
        if order is None:
            return attention
        table = self._layout.table(self._layout.sites[site])
        return by_position(attention, order, len(table.choices[choice].candidates))
