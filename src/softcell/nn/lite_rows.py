"""Attention rows of single images, gathered over a forward pass: those of all cells of a table become one vector.

A row [n, tokens + 1] is what an indicator token paid itself (column 0) and each candidate. Cells of a table share one
architecture, so a table's attention is the mean of its cells' rows; over images it is summed up by `Moments`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.arch import Layout
from softcell.nn.lite_transformer import by_position
from softcell.nn.moments import TableMoments


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
        into: TableMoments | None = None,
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
        if self._only is None:
            self._into[table].add(self.mean(table).flatten(1))
        else:
            first = choice * self._layout.table(table).width
            self._into[table].add(self.mean(table)[:, choice], first, counts=self._counts)
        for place in awaited:
            del self._rows[place]

    def mean(self, table: str) -> Tensor:
        """Attention to the candidates [n, choices, width] of every image, the mean over the table's cells."""
        own = self._layout.table(table)
        found: dict[int, list[Tensor]] = {}
        for site, choice in self._rows:
            if self._layout.sites[site] == table:
                row = self._by_position(site, choice)
                found.setdefault(choice, []).append(F.pad(row[:, 1:], (0, own.width + 1 - row.shape[1])))
        like = next(iter(found.values()))[0]
        n = like.shape[0]
        uniform = self._uniform(table).to(like.dtype)  # edges of zeros alone
        return torch.stack(
            [torch.stack(found[i]).mean(0) if i in found else uniform[i].expand(n, -1) for i in range(len(own))],
            dim=1,
        )

    def _by_position(self, site: int, choice: int) -> Tensor:
        """[n, tokens + 1]; laid out only here, since most rows are never read."""
        attention, order = self._rows[site, choice]
        if order is None:
            return attention
        table = self._layout.table(self._layout.sites[site])
        return by_position(attention, order, len(table.choices[choice].candidates))
