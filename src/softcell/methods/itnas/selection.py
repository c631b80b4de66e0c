"""Selection by attention: passes over the validation half, and the candidates' strengths from them (§3.3, Eq 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from softcell.arch import Mix, Table
from softcell.methods.itnas.attention import AttentionSums, SiteSums, logarithm
from softcell.methods.itnas.margins import Aggregate, Margins, SiteRows, aggregate, margins, scores
from softcell.methods.itnas.mix import ItMix
from softcell.methods.parts import Pass, Selection

if TYPE_CHECKING:
    from softcell.methods.itnas.method import ItNas


class ItSelection(Selection):
    """With all paths one pass of the whole supernet; with single paths one pass for each choice, after the last epoch.

    The sums are modules of the method, so that they are saved and moved with it.
    """

    def __init__(self, method: ItNas) -> None:
        self._method, self._layout = method, method.layout
        self._how: Aggregate = method.settings.aggregate
        self.last_epoch_only = method.runs_paths
        self.accepts_penalty = not method.runs_paths  # with paths a step has the attention of one choice only

    def passes(self) -> Sequence[Pass]:
        """With paths, every choice is attended to once, at all its sites, while the others run a random path."""
        method, sums = self._method, self.clear()
        if not method.runs_paths:
            return [Pass(ItMix(method, sums))]
        choices = [(table.name, choice) for table in self._layout.tables for choice in self.attended(table.name)]
        plans = [self._path(f"look {n}", choice) for n, choice in enumerate(choices)]
        return [
            Pass(ItMix(method, sums, plan, choice), calibration=ItMix(method, plan=plan))
            for plan, choice in zip(plans, choices, strict=True)
        ]

    def mix_with(self, table: str, choice: int) -> Mix:
        if not self._method.runs_paths:
            return self._method.relax()
        return ItMix(self._method, plan=self._path("attending", (table, choice)))

    def _path(self, purpose: str, choice: tuple[str, int]) -> Any:
        return self._method.path(f"{int(self._method.get_buffer('key'))} {purpose}", choice)

    def attended(self, table: str) -> list[int]:
        """The choices of a table with more than one candidate."""
        lives = self._method.live[table]
        return sorted({choice for _, choice in self._method.edges[table] if len(lives[choice]) > 1})

    def sums(self) -> Sequence[Tensor]:
        method = self._method
        return [*method.moments.sums(), *(sums for name in method.site_sums for sums in self._of_sites(name).sums())]

    def clear(self) -> AttentionSums:
        """Zeroes the sums and returns where the rows of a new pass go."""
        for sums in self.sums():
            sums.zero_()
        sites = {name: self._of_sites(name) for name in self._method.site_sums}
        return AttentionSums(self._method.moments, sites, self._how, self._method.stages)

    def _of_sites(self, table: str) -> SiteSums:
        found = self._method.site_sums[table]
        assert isinstance(found, SiteSums)
        return found

    def indicator(self) -> dict[str, Tensor]:
        """a[1:] per table [choices, width] in float64, aggregated over cells and images of the latest pass."""
        return {table.name: self.aggregated(table, self._how) for table in self._layout.tables}

    def aggregated(self, table: Table, how: Aggregate) -> Tensor:
        """Strengths [choices, width]; uniform before the first pass, and where an edge attends to nothing."""
        if how == self._how == "mean":  # also of runs that have no sums by site
            seen = self._method.moments[table.name].mean().view(table.shape)
        else:
            own = self.by_site(table.name)
            seen = aggregate(own, how) * self._method.masks[table.name] * own.means.any()
        return torch.where(seen.any(1, keepdim=True), seen, self._method.uniform(table.name).double())

    def by_site(self, table: str) -> SiteRows:
        """The rows of every site that reads a table, as means over the images of the latest pass."""
        own, sums = self._layout.table(table), self._of_sites(table)
        sites, images = self._layout.sites_of(table), self._method.moments[table].count.clamp(min=1.0)
        means, logs = (sums.total.new_zeros(len(sites), *own.shape) for _ in range(2))
        present = torch.zeros(len(sites), len(own), dtype=torch.bool)
        for row, (site, choice) in enumerate(sums.edges):
            at = sites.index(site)
            means[at, choice], logs[at, choice] = sums.total[row] / images, sums.logs[row] / images
            present[at, choice] = True
        return SiteRows(means, logs, present, [self._method.stages[site] for site in sites])

    def strengths(self) -> dict[str, Tensor] | None:
        """The indicator, with paths: there a penalty would reach the attention of one choice per step only."""
        return None if self.accepts_penalty else self.indicator()

    def findings(self) -> dict[str, Any]:
        """The number of images, and per edge the best candidate, its lead and the standard error of the lead."""
        return {"selection": self.margins().to_dict()} if self._method.moments.images() else {}

    def margins(self) -> Margins:
        """The margins of the latest pass; of logarithms where those are averaged."""
        how, images, close = self._how, self._method.moments.images(), self._method.settings.close
        strengths, found = self.indicator(), {}
        for table in self._layout.tables:
            moments, own = self._method.moments[table.name], self.by_site(table.name)
            has_sites = bool(own.means.any())  # older checkpoints have no sums by site
            found[table.name] = margins(
                table,
                logarithm(strengths[table.name]) if how == "log-mean" else strengths[table.name],
                None if how == "vote" else moments.mean_products(),
                images,
                self._method.left_out,
                close,
                scores(own, how) if has_sites else None,
            )
        return Margins(images, close, found, how)

    def records(self) -> dict[str, Any]:
        """`attention.jsonl`: means over images of every site's rows, and of their logarithms, in nine digits."""
        images = self._method.moments.images()
        if not images:
            return {}
        tables = {}
        for table in self._layout.tables:
            own = self.by_site(table.name)
            tables[table.name] = {
                "sites": list(self._layout.sites_of(table.name)),
                "stages": list(own.stages),
                "mean": rounded(own.means),
                "log": rounded(own.logs),
            }
        return {"attention": {"images": images, "tables": tables}}


def rounded(values: Tensor) -> Any:
    """Nested lists in nine digits: leads may be in the seventh, and more digits would make long files."""
    if values.dim() == 0:
        return float(f"{float(values):.9g}")
    return [rounded(one) for one in values.cpu()]
