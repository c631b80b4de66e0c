"""Attention rows of single images, gathered over a forward pass: those of all cells of a table become one vector.

A row [n, tokens + 1] is what an indicator token paid itself (column 0) and each candidate. Cells of a table share one
architecture, so a table's attention is an aggregate of its cells' rows, as a rule their mean. Over images it is summed
up by `Moments`; the rows of every cell by `SiteSums`.
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


class Looked(NamedTuple):
    """Where rows of a pass over images go: sums of the tables' vectors by `aggregate`, and of every site's rows.

    stages: a number for every site; those with maps of one shape have the same.
    """

    tables: TableMoments
    sites: Mapping[str, SiteSums]
    aggregate: Aggregate
    stages: Mapping[int, int]


class AttentionRows:
    """The rows of one pass by site and choice.

    places: by table the sites and choices that attend. uniform: a table's name to [choices, width], what choices
    count that attend to nothing. into: takes the vectors [n, choices · width] of a table when all its rows are there,
    which are let go then; without it rows stay to be read by `mean`, where gradients are enabled. only: the one choice
    of a table that is noted, in a pass that `counts` its images or is one more over the same.
    """

    def __init__(
        self,
        layout: Layout,
        places: Mapping[str, Sequence[tuple[int, int]]],
        uniform: Callable[[str], Tensor],
        into: Looked | None = None,
        only: tuple[str, int] | None = None,
        *,
        counts: bool = True,
    ) -> None:
        self._layout, self._places, self._uniform = layout, places, uniform
        self._into, self._only, self._counts = into, only, counts
        self._rows: dict[tuple[int, int], tuple[Tensor, Sequence[int] | None]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_summed(self) -> bool:
        """Whether rows go into moments."""
        return self._into is not None

    def tables(self) -> set[str]:
        """Names of the tables that have rows."""
        return {self._layout.sites[site] for site, _ in self._rows}

    def note(self, site: int, choice: int, attention: Tensor, order: Sequence[int] | None = None) -> None:
        """Keeps a row [n, tokens + 1], or of tokens in an `order`; when all of a table are there, hands them on."""
        if self._into is None:
            if torch.is_grad_enabled():
                self._rows[site, choice] = attention, order
            return
        table = self._layout.sites[site]
        if self._only is not None and self._only != (table, choice):
            return
        self._rows[site, choice] = attention.detach(), order
        awaited = [place for place in self._places[table] if self._only is None or place[1] == choice]
        if any(place not in self._rows for place in awaited):
            return
        sums, sites = self._into.tables[table], self._into.sites[table]
        if self._only is None:
            sums.add(self.viewed(table).flatten(1))
            sites.add(torch.stack([self._candidates(*place) for place in sites.places]))
        else:
            first = choice * self._layout.table(table).width
            sums.add(self.viewed(table)[:, choice], first, counts=self._counts)
            for place in awaited:
                at = sites.places.index(place)
                sites.add(self._candidates(*place)[None], slice(at, at + 1))
        for place in awaited:
            del self._rows[place]

    def viewed(self, table: str) -> Tensor:
        """What every image says of the candidates [n, choices, width], by the aggregate of what is looked at.

        The mean over the sites that count, of attention or of its logarithm, in float64: without a norm on tokens
        candidates may differ in the seventh digit. A vote is one of sites, not of images: there it is the mean over
        all sites.
        """
        assert self._into is not None
        how = self._into.aggregate
        own, found = self._layout.table(table), dict[int, Tensor]()
        for choice in {choice for site, choice in self._rows if self._layout.sites[site] == table}:
            sites = [s for s in self._layout.sites_of(table) if (s, choice) in self._rows]
            used = used_sites([True] * len(sites), [self._into.stages[s] for s in sites], how)
            rows = torch.stack([self._candidates(sites[i], choice) for i in used])
            found[choice] = (logarithm(rows) if how == "log-mean" else rows.double()).mean(0)
        n = next(iter(found.values())).shape[0]
        uniform = self._uniform(table).double()
        uniform = logarithm(uniform) if how == "log-mean" else uniform
        return torch.stack([found[i] if i in found else uniform[i].expand(n, -1) for i in range(len(own))], dim=1)

    def mean(self, table: str) -> Tensor:
        """Attention to the candidates [n, choices, width] of every image, the mean over the table's cells."""
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
        """[n, tokens + 1]; laid out only here, since most rows are never read."""
        attention, order = self._rows[site, choice]
        if order is None:
            return attention
        table = self._layout.table(self._layout.sites[site])
        return by_position(attention, order, len(table.choices[choice].candidates))
