"""IT-NAS: Integrating Lite-Transformer into NAS for Architecture Selection (anonymous; under review at ICLR 2023).

    Eq 3-4  Z_it = softmax(q_it K^T / √d_q) V, a = [a_0, a_1, …, a_n]  -> `LiteTransformer`, `ItMix`
    Eq 5    supernet and Lite-Transformers from one loss, single-level   -> `softcell.search.steps.single_level`
    §3.3    all images of the validation half pass once                  -> `ItNas.looking`, `AttentionRows`
    Eq 6    A* = argmax(a[1:]) of the mean                               -> `ItNas.derive`, `aggregate`
    §4.1    DARTS cells: the inputs with the strongest attention stay    -> the space's rule on a[1:]

Every cell and edge has a Lite-Transformer of its own; a table's indicator is the mean of the indicator token's rows
over its cells and the images (`aggregate` has other ways). Candidates that the space never derives (`none` in DARTS and
S3) take no part; `none` of NAS-Bench-201 is a token of zeros. Lite-Transformers learn as the weights do (A.3: SGD,
0.025, momentum 0.9, 3e-4).
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from softcell.arch import Genotype, Layout, Mix, Plan, Rule, Table, count, derive
from softcell.arch.mix import live_where, uniform_path, widened
from softcell.errors import UserError
from softcell.methods.base import Masks, Method, Regime
from softcell.methods.itnas.attention import Looked, SiteSums, TableMoments, logarithm
from softcell.methods.itnas.ensemble import Group, LiteEnsemble, Member, form_groups
from softcell.methods.itnas.margins import Aggregate, Margin, Selection, SiteRows, aggregate, margins, scores
from softcell.methods.itnas.mix import ItMix
from softcell.methods.itnas.transformer import LiteTransformer
from softcell.methods.registry import register_method
from softcell.settings import not_negative
from softcell.spaces.shapes import Shapes

HALVES = {"weights": 0.5, "validation": 0.5}


@dataclass(frozen=True)
class ItNasSettings:
    """The Lite-Transformer and how its attention is read.

    `tokens`: queries and keys are read off each map pooled to `pool` × `pool`, or off the `flat` map. `width`: d_q.
    `token_norm`: a LayerNorm on the tokens before queries and keys; the paper's encoder is post-norm and has none.
    `learned_values`, `feed_forward`: whether W_v learns, or stays the identity, and whether there is a feed-forward
    network; both give every edge a 1×1 convolution of its own. `shared`: cells whose maps have one shape share the
    Lite-Transformer of an edge; else each has its own.
    `recompute`: what the Lite-Transformer keeps for its backward pass is computed again there, and with single paths
    what the candidates under attention keep: memory saved for some time. `aggregate`: how the rows of a table's cells
    become one: their `mean`; `log-mean`, the geometric mean; `vote`, the share of cells where a candidate is first;
    `last`, the last cell alone; `last-stage`, the mean over cells of its shape. `close`: an edge is called close when
    its best candidate leads by less than so many standard errors, over images and over cells. `paths`: what runs in a
    step. `all` under attention; `single`: all of one random choice, one random candidate of every other (SPOS);
    `pairwise`: one random candidate everywhere, attended to alone, which ranks weakly.
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
    needs_shapes: ClassVar[bool] = True
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

    key: Tensor

    def __init__(self, layout: Layout, settings: ItNasSettings) -> None:
        super().__init__(layout, settings)
        self.left_out = layout.rule.never_picked if isinstance(layout.rule, Rule) else ()
        self.masks = Masks(layout, self.left_out)
        self.live = {table.name: live_where(self.masks[table.name]) for table in layout.tables}
        if settings.paths != "all" and any(table.contests for table in layout.tables):
            raise UserError(
                f"method.paths={settings.paths} attends to the candidates of one edge, but in space {layout.space} "
                "edges into a node compete with each other; set method.paths=all"
            )
        self.transformers = nn.ModuleDict()
        self._named: dict[tuple[int, int], str] = {}  # by site and choice
        self.moments = TableMoments(layout)
        self.site_sums = nn.ModuleDict()  # by table
        self.stages: dict[int, int] = {}  # by site; maps of one shape
        self.places: dict[str, list[tuple[int, int]]] = {table.name: [] for table in layout.tables}
        self.ensembles: list[LiteEnsemble] = []
        self.groups: dict[int, list[Group]] = {}  # by site
        self._known_key: int | None = None
        if settings.paths != "all":
            self.register_buffer("key", torch.randint(2**31, (1,)))
            self.register_load_state_dict_post_hook(_forget_key)  # type: ignore[no-untyped-call]

    def fit(self, shapes: Shapes) -> None:
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
            self.places[table.name].append((site, choice))
        for table in self.layout.tables:
            self.site_sums[table.name] = SiteSums(self.places[table.name], table.width)
        self.stages = self._stages()
        self.ensembles, self.groups = form_groups(self._put_together(shapes))

    def _stages(self) -> dict[int, int]:
        """By site a number that grows where the shape of its maps changes."""
        found, shapes = dict[int, int](), list[object]()
        for site in range(len(self.layout.sites)):
            own = [self.transformer(*at).shape for places in self.places.values() for at in places if at[0] == site]
            if own and own[-1] not in shapes[-1:]:
                shapes.append(own[-1])
            found[site] = len(shapes)
        return found

    def _put_together(self, shapes: Shapes) -> Iterator[Member]:
        """The edges whose outputs Lite-Transformers put together; others are attended to alone."""
        for site, choice in (place for places in self.places.values() for place in places):
            table, outputs = self.layout.table(self.layout.sites[site]), shapes[site, choice]
            if not outputs.in_parts and choice not in table.contest_of:
                seen = {k: outputs.by_candidate[k] for k in self.live[table.name][choice]}
                yield Member(site, table.choices[choice].source, choice, self.transformer(site, choice), seen)

    def transformer(self, site: int, choice: int) -> LiteTransformer:
        found = self.transformers[self._named[site, choice]]
        assert isinstance(found, LiteTransformer)
        return found

    def regions(self) -> Sequence[nn.Module]:
        return [*self.ensembles, *self.transformers.values()]

    def relax(self) -> Mix:
        return ItMix(self, plan=None if self.settings.paths == "all" else self.planned())

    @property
    def many_cells(self) -> bool:
        return bool(self.settings.paths != "all")

    @property
    def reads(self) -> Literal["always", "validated", "last"]:
        return "validated" if self.settings.paths == "all" else "last"

    def looking(self) -> Mix | None:
        return ItMix(self, self.begin_look()) if self.settings.paths == "all" else None

    def looking_in_turn(self) -> Sequence[tuple[Mix, Mix]]:
        """Every choice under full attention once, at all its sites, while the others run a random path."""
        if self.settings.paths == "all":
            return ()
        into = self.begin_look()
        places = [(table.name, choice) for table in self.layout.tables for choice in self.attended(table.name)]
        plans = [self._path(f"{int(self.key)} look {n}", place) for n, place in enumerate(places)]
        return [
            (ItMix(self, plan=plan), ItMix(self, into, plan, place)) for plan, place in zip(plans, places, strict=True)
        ]

    def attending(self, table: str, choice: int) -> Mix:
        if self.settings.paths == "all":
            return self.relax()
        return ItMix(self, plan=self._path(f"{int(self.key)} attending", (table, choice)))

    def attended(self, table: str) -> list[int]:
        """The choices of a table that leave something to choose."""
        lives = self.live[table]
        return sorted({choice for _, choice in self.places[table] if len(lives[choice]) > 1})

    def draw(self, step: int) -> Plan | None:
        """In step number `step` one random path, with all candidates of one random choice unless `pairwise`."""
        if self.settings.paths == "all":
            return None
        if self._known_key is None:
            self._known_key = int(self.key)  # waits for the device, once per run
        return self._path(f"{self._known_key} {step}")

    def num_plans(self) -> int | None:
        return None if self.settings.paths == "all" else count(self.layout)

    def reading(self) -> Tensor | None:
        """The path that runs outside of steps, so that the supernet's accuracy is always that of the same one."""
        return None if self.settings.paths == "all" else self.key

    def plan(self, reading: Tensor) -> Plan:
        return self._path(str(int(reading)))

    def _path(self, seed: str, place: tuple[str, int] | None = None) -> Plan:
        """One uniform architecture; a random site's choice, or `place` at all its sites, runs all its candidates."""
        rng = random.Random(seed)
        path = uniform_path(self.layout, rng)
        if place is not None:
            whole = [(site, place[1]) for site in self.layout.sites_of(place[0])]
        else:
            known = [at for places in self.places.values() for at in places]
            whole = [rng.choice(known)] if self.settings.paths == "single" else []
        return widened(self.layout, path, whole, self.live)

    def looked(self) -> Sequence[Tensor]:
        return [*self.moments.sums(), *(sums for name in self.site_sums for sums in self._sites(name).sums())]

    def _sites(self, table: str) -> SiteSums:
        found = self.site_sums[table]
        assert isinstance(found, SiteSums)
        return found

    def begin_look(self) -> Looked:
        """Where the rows of a new pass go; forgets those of the one before."""
        for sums in self.looked():
            sums.zero_()
        sites = {name: self._sites(name) for name in self.site_sums}
        return Looked(self.moments, sites, self.settings.aggregate, self.stages)

    def indicator(self) -> dict[str, Tensor]:
        """a[1:] per table [choices, width] in float64, aggregated over cells and images of the latest pass."""
        return {table.name: self._aggregated(table, self.settings.aggregate) for table in self.layout.tables}

    def _aggregated(self, table: Table, how: Aggregate) -> Tensor:
        """Strengths [choices, width]; uniform before the first pass, and where an edge attends to nothing."""
        if how == self.settings.aggregate == "mean":  # also of runs from before there were sums by site
            seen = self.moments[table.name].mean().view(table.shape)
        else:
            own = self.by_site(table.name)
            seen = aggregate(own, how) * self.masks[table.name] * own.means.any()
        return torch.where(seen.any(1, keepdim=True), seen, self.uniform(table.name).double())

    def by_site(self, table: str) -> SiteRows:
        """The rows of every site that reads a table, as means over the images of the latest pass."""
        own, sums = self.layout.table(table), self._sites(table)
        sites, images = self.layout.sites_of(table), self.moments[table].count.clamp(min=1.0)
        means, logs = (sums.total.new_zeros(len(sites), *own.shape) for _ in range(2))
        present = torch.zeros(len(sites), len(own), dtype=torch.bool)
        for row, (site, choice) in enumerate(sums.places):
            at = sites.index(site)
            means[at, choice], logs[at, choice] = sums.total[row] / images, sums.logs[row] / images
            present[at, choice] = True
        return SiteRows(means, logs, present, [self.stages[site] for site in sites])

    def probabilities(self) -> dict[str, Tensor]:
        """The indicator without the IT's attention to itself: sums to 1 per choice. Uniform before the first pass."""
        return {name: self.masks.shares(name, rows).to(self._dtype()) for name, rows in self.indicator().items()}

    def derive(self) -> Genotype:
        return derive(self.layout, self.indicator(), self.rule, about={"method": self.name})  # Eq 6

    def penalised(self, mix: Mix) -> dict[str, Tensor]:
        """The attention of this step's images, with gradients to the Lite-Transformers and to the weights."""
        assert isinstance(mix, ItMix)
        found = {}
        for table in self.layout.tables:
            if table.name not in mix.rows.tables():
                found[table.name] = self.uniform(table.name)
                continue
            found[table.name] = self.masks.shares(table.name, mix.rows.mean(table.name).mean(0))
        return found

    def is_steerable(self) -> bool:
        return bool(self.settings.paths == "all")  # elsewhere a step sees the attention of one choice

    def strengths(self) -> dict[str, Tensor] | None:
        """With single paths the indicator: no penalty reaches the attention of more than one choice in a step."""
        return None if self.is_steerable() else self.indicator()

    def findings(self) -> dict[str, Any]:
        """Images looked at, and per edge the best candidate, its lead and the standard error of that."""
        return {"selection": self.selection().to_dict()} if self.moments.images() else {}

    def remarks(self) -> Sequence[str]:
        return [str(self.selection())]

    def selection(self) -> Selection:
        return Selection(self.moments.images(), self.settings.close, self.margins(), self.settings.aggregate)

    def margins(self) -> dict[str, list[Margin]]:
        """By table one per edge, from the latest pass; in logarithms where those are averaged."""
        how, found = self.settings.aggregate, {}
        for table in self.layout.tables:
            moments, own = self.moments[table.name], self.by_site(table.name)
            has_sites = bool(own.means.any())  # unlike runs from before there were sums by site
            strengths = self.indicator()[table.name]
            found[table.name] = margins(
                table,
                logarithm(strengths) if how == "log-mean" else strengths,
                None if how == "vote" else moments.mean_products(),
                self.moments.images(),
                self.left_out,
                self.settings.close,
                scores(own, how) if has_sites else None,
            )
        return found

    def readings(self) -> dict[str, Any]:
        """`attention.jsonl`: means over images of every site's rows, and of their logarithms, in nine digits."""
        if not self.moments.images():
            return {}
        tables = {}
        for table in self.layout.tables:
            own = self.by_site(table.name)
            tables[table.name] = {
                "sites": list(self.layout.sites_of(table.name)),
                "stages": list(own.stages),
                "mean": rounded(own.means),
                "log": rounded(own.logs),
            }
        return {"attention": {"images": self.moments.images(), "tables": tables}}

    def gauges(self) -> dict[str, Tensor]:
        """The share of its attention that the IT keeps to itself, by table."""
        found = {}
        for table in self.layout.tables:
            given = self._aggregated(table, "mean").sum(1)
            together = [given[list(contest)].sum() for contest in table.contests]
            alone = [given[i] for i in range(len(table)) if i not in table.contest_of]
            found[f"own_attention_{table.name}"] = 1.0 - torch.stack(together + alone).mean()
        return found

    def uniform(self, table: str) -> Tensor:
        """1 / (candidates + 1) at all that take part [choices, width]: what attention starts near."""
        mask, members = self.masks[table].to(self._dtype()), self.masks.members(table)
        tokens = mask.sum(1)
        if members is not None:  # as many as there are links in the contest
            sizes = torch.where(members, members.sum(1, keepdim=True), 0).sum(0)
            tokens = torch.where(sizes > 0, sizes, tokens)
        return mask / (tokens[:, None] + 1.0)

    def _dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.parameters()), torch.get_default_dtype())


def rounded(values: Tensor) -> Any:
    """Nested lists in nine digits: leads may be in the seventh, and more would make long files."""
    if values.dim() == 0:
        return float(f"{float(values):.9g}")
    return [rounded(one) for one in values.cpu()]


def _forget_key(method: ItNas, incompatible: object) -> None:
    method._known_key = None
