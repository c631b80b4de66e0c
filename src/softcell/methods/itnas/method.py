"""IT-NAS: Integrating Lite-Transformer into NAS for Architecture Selection (anonymous; under review at ICLR 2023).

    Eq 3-4  Z_it = softmax(q_it K^T / √d_q) V, a = [a_0, a_1, …, a_n]  -> `LiteTransformer`, `ItMix`
    Eq 5    supernet and Lite-Transformers from one loss, single-level   -> `softcell.search.steps.single_level`
    §3.3    one pass over all images of the validation half              -> `ItSelection.passes`, `AttentionRows`
    Eq 6    A* = argmax(a[1:]) of the mean                               -> `ItNas.derive`, `aggregate`
    §4.1    DARTS cells: the inputs with the strongest attention stay    -> the space's rule on a[1:]

Every cell and edge has its own Lite-Transformer; a table's indicator is the mean of the indicator token's rows
over its cells and the images (`aggregate` has other ways). Candidates that the space never derives (`none` in DARTS and
S3) are ignored; `none` of NAS-Bench-201 is a token of zeros. Lite-Transformers learn as the weights do (A.3: SGD,
0.025, momentum 0.9, 3e-4).
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from softcell.arch import Genotype, Layout, Mix, Plan, Rule, Table, derive
from softcell.arch.mix import live_where, uniform_path, widened
from softcell.errors import UserError
from softcell.methods.base import Masks, Method, Regime, register_method
from softcell.methods.itnas.attention import (
    Aggregate,
    AttentionSums,
    Margins,
    SiteRows,
    SiteSums,
    TableMoments,
    aggregate,
    logarithm,
    margins,
    scores,
)
from softcell.methods.itnas.mix import ItMix
from softcell.methods.itnas.transformer import Group, LiteEnsemble, LiteTransformer, Member, form_groups
from softcell.methods.parts import Pass, PathPlanner, Selection
from softcell.settings import not_negative
from softcell.spaces import Supernet
from softcell.spaces.costs import Shapes, output_shapes


class ItSelection(Selection):
    """Selection by attention: passes over the validation half, and the candidates' strengths from them (§3.3, Eq 6).

    With all paths one pass of the whole supernet; with single paths one pass for each choice, after the last epoch.

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
            # The last factor: of rows of zeros, before the first pass, a geometric mean is 1 and votes have a winner.
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


HALVES = {"weights": 0.5, "validation": 0.5}


@dataclass(frozen=True)
class ItNasSettings:
    """The Lite-Transformer and how its attention is read.

    `tokens`: queries and keys are read off each map pooled to `pool` × `pool`, or off the `flat` map. `width`: d_q.
    `token_norm`: a LayerNorm on the tokens before queries and keys; the paper's encoder is post-norm and has none.
    `learned_values`, `feed_forward`: whether W_v learns, or stays the identity, and whether there is a feed-forward
    network; both add a separate 1×1 convolution to every edge. `shared`: cells whose maps have one shape share the
    Lite-Transformer of an edge; else each has its own.
    `recompute`: the backward pass recomputes activations of the Lite-Transformer, and with single paths those of the
    candidates under attention: less memory, more time. `aggregate`: how the rows of a table's cells become one: their
    `mean`; `log-mean`, the geometric mean; `vote`, the share of cells where a candidate is first; `last`, only the last
    cell; `last-stage`, the mean over cells of its shape. `close`: an edge is called close when its best candidate
    leads by fewer standard errors than this, over images and over cells. `paths`: what runs in a step. `all` under
    attention; `single`: all of one random choice, one random candidate of every other (SPOS); `pairwise`: one random
    candidate everywhere, attended to alone, which ranks weakly.
    """

    tokens: Literal["pooled", "flat"] = "pooled"
    pool: int = 4
    width: int = 64
    token_norm: bool = True
    learned_values: bool = True
    feed_forward: bool = True
    shared: bool = False
    recompute: bool = True
    aggregate: Aggregate = "mean"
    close: float = 2.0
    paths: Literal["all", "single", "pairwise"] = "all"

    def __post_init__(self) -> None:
        for name in ("pool", "width"):
            if getattr(self, name) < 1:
                raise UserError(f"`method.{name} >= 1` must hold, but got {name}={getattr(self, name)}")
        not_negative("method.close", self.close)


@register_method
class ItNas(Method):
    """Lite-Transformers at every edge, and the attention they gave in the latest pass over the validation half."""

    name: ClassVar[str] = "itnas"
    about: ClassVar[str] = "IT-NAS: an indicator token attends to the candidates' feature maps; single-level"
    regime: ClassVar[Regime] = "single-level"
    Settings: ClassVar[type] = ItNasSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {
            "epochs": 50,
            "batch_size": 64,
            "split": HALVES,
            "architecture": {"optimiser": "weights", "clip": 5.0},
        },
        "chain": {  # A.3: the ProxylessNAS chain on ImageNet, trained by single paths
            "epochs": 240,
            "batch_size": 512,
            "split": {"weights": 0.1, "validation": 0.025},
            "method_settings": {"paths": "single"},
            "weights": {"lr": 0.25, "lr_min": 5e-4, "weight_decay": 4e-5},
            "architecture": {"optimiser": "weights", "clip": 5.0},
        },
        "small": {
            "epochs": 8,
            "batch_size": 64,
            "split": HALVES,
            "weights": {"lr": 0.1},
            "architecture": {"optimiser": "weights", "clip": 5.0},
        },
    }

    def __init__(self, layout: Layout, settings: ItNasSettings) -> None:
        super().__init__(layout, settings)
        self.left_out = layout.rule.never_picked if isinstance(layout.rule, Rule) else ()
        self.masks = Masks(layout, self.left_out)
        self.live = {table.name: live_where(self.masks[table.name]) for table in layout.tables}
        self.runs_paths = settings.paths != "all"
        if self.runs_paths and any(table.contests for table in layout.tables):
            raise UserError(
                f"method.paths={settings.paths} attends to the candidates of one edge, but in space {layout.space} "
                "edges into a node compete with each other; set method.paths=all"
            )
        self.transformers = nn.ModuleDict()
        self._named: dict[tuple[int, int], str] = {}  # by site and choice
        self.moments = TableMoments(layout)
        self.site_sums = nn.ModuleDict()  # by table
        self.stages: dict[int, int] = {}  # by site; maps of one shape
        self.edges: dict[str, list[tuple[int, int]]] = {table.name: [] for table in layout.tables}
        self.ensembles: list[LiteEnsemble] = []
        self.groups: dict[int, list[Group]] = {}  # by site
        self.selection: ItSelection = ItSelection(self)
        self.many_cells = self.runs_paths
        if self.runs_paths:
            self.planner = PathPlanner(self, layout, self.path)

    @classmethod
    def for_supernet(cls, settings: ItNasSettings, supernet: Supernet) -> Self:
        method = cls(supernet.layout, settings)
        method.fit(output_shapes(supernet))
        return method

    def fit(self, shapes: Shapes) -> None:
        """Builds a Lite-Transformer for every site and choice, given the shapes of the candidates' outputs."""
        s, known = self.settings, dict[Hashable, str]()
        for (site, choice), outputs in shapes.items():
            table = self.layout.table(self.layout.sites[site])
            taking_part = [k for k, is_in in enumerate(self.masks[table.name][choice].tolist()) if is_in]
            shape = outputs.feature()
            if shape is None or all(outputs.by_candidate.get(k) is None for k in taking_part):
                continue  # zeros alone: nothing to attend to
            contest = table.contest_of.get(choice)  # whose links are the tokens of one
            first = choice if contest is None else contest[0]
            alike = (table.name, first, shape, outputs.in_parts) if s.shared else (site, first)
            name = self._named[site, choice] = known.setdefault(alike, f"{site}_{choice}")
            if name not in self.transformers:
                self.transformers[name] = LiteTransformer(
                    shape,
                    len(table.choices[choice].candidates if contest is None else contest),
                    pool=s.pool if s.tokens == "pooled" else None,
                    width=s.width,
                    values=not outputs.in_parts,
                    token_norm=s.token_norm,
                    learned_values=s.learned_values,
                    feed_forward=s.feed_forward,
                )
            self.edges[table.name].append((site, choice))
        for table in self.layout.tables:
            self.site_sums[table.name] = SiteSums(self.edges[table.name], table.width)
        self.stages = self._stages()
        self.ensembles, self.groups = form_groups(self._members(shapes))

    def _stages(self) -> dict[int, int]:
        """By site a number that grows where the shape of its maps changes."""
        found, shapes = dict[int, int](), list[object]()
        for site in range(len(self.layout.sites)):
            own = [self.transformer(*edge).shape for edges in self.edges.values() for edge in edges if edge[0] == site]
            if own and own[-1] not in shapes[-1:]:
                shapes.append(own[-1])
            found[site] = len(shapes)
        return found

    def _members(self, shapes: Shapes) -> Iterator[Member]:
        """The edges that a group may run: those whose outputs the Lite-Transformer combines, outside of contests."""
        for site, choice in (edge for edges in self.edges.values() for edge in edges):
            table, outputs = self.layout.table(self.layout.sites[site]), shapes[site, choice]
            if not outputs.in_parts and choice not in table.contest_of:
                seen = {k: outputs.by_candidate[k] for k in self.live[table.name][choice]}
                yield Member(site, table.choices[choice].source, choice, self.transformer(site, choice), seen)

    def transformer(self, site: int, choice: int) -> LiteTransformer:
        found = self.transformers[self._named[site, choice]]
        assert isinstance(found, LiteTransformer)
        return found

    def relax(self) -> Mix:
        return ItMix(self, plan=None if self.planner is None else self.planner.current())

    def path(self, seed: str, attended: tuple[str, int] | None = None) -> Plan:
        """One uniform architecture, in which one choice runs all its candidates.

        attended: a table and the choice in it, at all its sites. None: the choice of one random site; with `pairwise`
        none at all.
        """
        rng = random.Random(seed)
        path = uniform_path(self.layout, rng)
        if attended is not None:
            whole = [(site, attended[1]) for site in self.layout.sites_of(attended[0])]
        else:
            known = [edge for edges in self.edges.values() for edge in edges]
            whole = [rng.choice(known)] if self.settings.paths == "single" else []
        return widened(self.layout, path, whole, self.live)

    def probabilities(self) -> dict[str, Tensor]:
        """The indicator without the IT's attention to itself: sums to 1 per choice. Uniform before the first pass."""
        found = self.selection.indicator()
        return {name: self.masks.shares(name, rows).to(self._dtype()) for name, rows in found.items()}

    def derive(self) -> Genotype:
        return derive(self.layout, self.selection.indicator(), self.rule, about={"method": self.name})  # Eq 6

    def occupancy(self, mix: Mix | None = None) -> dict[str, Tensor]:
        """In a step the attention of its images, with gradients to the Lite-Transformers and to the weights."""
        if mix is None:
            return self.probabilities()
        assert isinstance(mix, ItMix)
        found = {}
        for table in self.layout.tables:
            if table.name not in mix.rows.tables():
                found[table.name] = self.uniform(table.name)
                continue
            found[table.name] = self.masks.shares(table.name, mix.rows.mean(table.name).mean(0))
        return found

    def gauges(self) -> dict[str, Tensor]:
        """The share of its attention that the IT pays to itself, by table."""
        found = {}
        for table in self.layout.tables:
            given = self.selection.aggregated(table, "mean").sum(1)
            together = [given[list(contest)].sum() for contest in table.contests]
            alone = [given[i] for i in range(len(table)) if i not in table.contest_of]
            found[f"own_attention_{table.name}"] = 1.0 - torch.stack(together + alone).mean()
        return found

    def remarks(self) -> Sequence[str]:
        return [str(self.selection.margins())]

    def uniform(self, table: str) -> Tensor:
        """1 / (candidates + 1) at all included candidates [choices, width]: what attention starts near."""
        mask, members = self.masks[table].to(self._dtype()), self.masks.members(table)
        tokens = mask.sum(1)
        if members is not None:  # as many as there are links in the contest
            sizes = torch.where(members, members.sum(1, keepdim=True), 0).sum(0)
            tokens = torch.where(sizes > 0, sizes, tokens)
        return mask / (tokens[:, None] + 1.0)

    def _dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.parameters()), torch.get_default_dtype())
