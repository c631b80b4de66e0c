"""Attention rows of single images: collected over a forward pass, aggregated over cells, summed over images.

A row [n, tokens + 1] is the attention of an indicator token to itself (column 0) and to each candidate. Cells of a
table share one architecture, so a table's attention is an aggregate of its cells' rows, usually their mean. `Moments`
sums it over images, `SiteSums` the rows of every cell: in float64, for any precision of the run.

Every cell has its own indicator token, so a choice has as many rows as there are cells. With the mean, one
saturated cell outweighs many others; the other aggregates avoid that. `margins` compares the leads of the strongest
candidates, which are means over images, with their standard errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.arch import Layout
from softcell.arch.choice import Table
from softcell.arch.rules import rows, strongest
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
        """The number of images added; synchronises with the device."""
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


Aggregate = Literal["mean", "log-mean", "vote", "last", "last-stage"]
AGGREGATES: tuple[Aggregate, ...] = get_args(Aggregate)


@dataclass(frozen=True, slots=True)
class SiteRows:
    """The rows of every site of a table, as means over images.

    means, logs: [sites, choices, width], of the values and of their logarithms. present: bool [sites, choices], whether
    a site has a row for a choice. stages: one number per site; sites of one stage have maps of one shape.
    """

    means: Tensor
    logs: Tensor
    present: Tensor
    stages: Sequence[int]


def used_sites(present: Sequence[bool], stages: Sequence[int], how: Aggregate) -> list[int]:
    """The sites whose rows count for a choice, given at which sites it is present."""
    own = [site for site, is_there in enumerate(present) if is_there]
    if how == "last":
        return own[-1:]
    if how == "last-stage":
        return [site for site in own if stages[site] == stages[own[-1]]]
    return own


def scores(rows: SiteRows, how: Aggregate) -> list[Tensor]:
    """Per choice the scores of its sites [sites that count, width]: values, logarithms, or a 1 for each winner."""
    found = []
    for choice in range(rows.present.shape[1]):
        used = used_sites(rows.present[:, choice].tolist(), rows.stages, how)
        own = (rows.logs if how == "log-mean" else rows.means)[used, choice]
        if how == "vote":
            own = torch.nn.functional.one_hot(own.argmax(1), own.shape[1]).to(own.dtype)
        found.append(own)
    return found


def aggregate(rows: SiteRows, how: Aggregate) -> Tensor:
    """Strengths [choices, width] of a table; zeros for a choice without rows.

    mean: over sites. log-mean: the geometric mean. vote: the share of sites where a candidate is first; ties are
    broken by the mean. last, last-stage: only the last site, the mean over those with maps of the last one's shape.
    """
    found = torch.zeros_like(rows.means[0])
    for choice, own in enumerate(scores(rows, how)):
        if not len(own):
            continue
        if how == "log-mean":
            found[choice] = own.mean(0).exp()
        elif how == "vote":
            mean = rows.means[:, choice][rows.present[:, choice]].mean(0)  # below 1, so it decides ties alone
            found[choice] = (own.sum(0) + mean) / (len(own) + 1)
        else:
            found[choice] = own.mean(0)
    return found


@dataclass(frozen=True, slots=True)
class Margin:
    """The lead of an edge's strongest candidate over the second, and its standard error.

    The error has two parts: `image_error`, over images, and `site_error`, over the sites that were averaged. `wins`:
    the number of `sites` at which the strongest candidate leads the second.
    """

    edge: str
    best: str
    strength: float
    runner_up: str | None
    margin: float | None
    standard_error: float | None
    close: bool
    image_error: float | None = None
    site_error: float | None = None
    wins: int | None = None
    sites: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        text = f"{self.edge} {self.best} over {self.runner_up} by {self.margin:.2g} ± {self.standard_error:.2g}"
        return text if self.sites is None else f"{text}, at {self.wins} of {self.sites} sites"


@dataclass(frozen=True, slots=True)
class Margins:
    """The margins of all edges by table, over a number of `images`.

    An edge is close when its margin is below `close_below` standard errors. `aggregate`: how sites were combined.
    """

    images: int
    close_below: float
    edges: Mapping[str, Sequence[Margin]]
    aggregate: str = "mean"

    def to_dict(self) -> dict[str, Any]:
        return {
            "images": self.images,
            "aggregate": self.aggregate,
            "close_below": self.close_below,
            "close_edges": sum(m.close for own in self.edges.values() for m in own),
            "edges": {name: [m.to_dict() for m in own] for name, own in self.edges.items()},
        }

    def __str__(self) -> str:
        found = [(name, m) for name, own in self.edges.items() for m in own]
        close = [f"{name} {m}" for name, m in found if m.close]
        text = f"selection from {self.images:,} images: {len(close)} of {len(found)} edges are close"
        return f"{text} (a lead below {self.close_below:g} standard errors)" + "".join(f"; {c}" for c in close)


def margins(
    table: Table,
    mean: Tensor,
    products: Tensor | None,
    images: int,
    exclude: Sequence[str] = (),
    close: float = 2.0,
    sites: Sequence[Tensor] | None = None,
) -> list[Margin]:
    """One margin per choice.

    mean [choices, width] of the strengths over images, products [choices·width, choices·width] the mean of their
    products of two; None where strengths are not means over images. sites: per choice the strengths [sites, width] that
    were averaged. An edge is close when its margin is below `close` standard errors, over images and over sites: a
    candidate that leads by a little in all cells is clearer than one that leads by much in some and trails in others.
    """
    values, found = rows(table, mean), []
    second: list[list[float]] | None = None if products is None else products.double().cpu().tolist()
    for index, (choice, row) in enumerate(zip(table.choices, values, strict=True)):
        allowed = [k for k, op in enumerate(choice.candidates) if op not in exclude] or list(
            range(len(choice.candidates))
        )
        ranked = sorted(allowed, key=strongest(row), reverse=True)
        best, names = ranked[0], choice.candidates
        if len(ranked) == 1:
            found.append(Margin(str(choice), names[best], row[best], None, None, None, False))
            continue
        other, start = ranked[1], index * table.width
        a, b = start + best, start + other
        lead = row[best] - row[other]
        by_image = 0.0
        if second is not None:
            # Var(a - b) = E[a²] - 2 E[ab] + E[b²] - (E[a] - E[b])², unbiased
            # Rounding may take it just below 0.
            variance = max(0.0, second[a][a] - 2 * second[a][b] + second[b][b] - lead**2)
            by_image = sqrt(variance / max(1, images - 1))
        by_site, wins, count = 0.0, None, None
        if sites is not None and len(sites[index]):
            leads = (sites[index][:, best] - sites[index][:, other]).double().cpu().tolist()
            wins, count, centre = sum(one > 0 for one in leads), len(leads), sum(leads) / len(leads)
            # The standard error of a mean over `count` sites.
            by_site = sqrt(sum((one - centre) ** 2 for one in leads) / max(1, count - 1) / count)
        error = sqrt(by_image**2 + by_site**2)
        found.append(
            Margin(
                *(str(choice), names[best], row[best], names[other], lead, error, lead < close * error),
                *(by_image, by_site, wins, count),
            )
        )
    return found
