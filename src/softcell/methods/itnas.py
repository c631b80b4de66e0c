"""IT-NAS: Integrating Lite-Transformer into NAS for Architecture Selection (anonymous; under review at ICLR 2023).

    Eq 3-4  Z_it = softmax(q_it K^T / √d_q) V, a = [a_0, a_1, …, a_n]  -> `softcell.nn.lite_transformer`, `ItMix`
    Eq 5    supernet and Lite-Transformers from one loss, single-level   -> `softcell.search.steps.single_level`
    §3.3    all images of the validation half pass once                  -> `ItNas.looking`, `Moments`
    Eq 6    A* = argmax(a[1:]) of the mean                               -> `ItNas.derive`
    §4.1    DARTS cells: the inputs with the strongest attention stay    -> the space's rule on a[1:]

Every cell and edge has a Lite-Transformer of its own; a table's indicator is the mean of the indicator token's rows
over its cells and the images. Candidates that the space never derives (`none` in DARTS and S3) take no part; `none` of
NAS-Bench-201 is a token of zeros. Lite-Transformers learn as the weights do (A.3: SGD, 0.025, momentum 0.9, 3e-4).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from softcell.arch import Genotype, Layout, Live, Mix, Plan, Rule, count, derive
from softcell.arch.margins import Margin, margins
from softcell.arch.mix import live_of
from softcell.errors import UserError
from softcell.methods.base import Masks, Method, Regime
from softcell.methods.registry import register_method
from softcell.nn.lite_ensemble import Laid, LiteEnsemble
from softcell.nn.lite_transformer import LiteTransformer, Shape, by_position, order_of
from softcell.nn.moments import Moments
from softcell.settings import not_negative
from softcell.spaces.shapes import Shapes

T = TypeVar("T")
HALVES = {"weights": 0.5, "validation": 0.5}


@dataclass(frozen=True)
class ItNasSettings:
    """The Lite-Transformer and how its attention is read.

    `tokens`: queries and keys are read off each map pooled to `pool` × `pool`, or off the `flat` map. `width`: d_q.
    `recompute`: what the Lite-Transformer keeps for its backward pass is computed again there, and with single paths
    what the candidates under attention keep: memory saved for some time. `close`: an edge is called close when its best
    candidate leads by less than so many standard errors. `paths`: what runs in a step. `all` under attention;
    `single`: all of one random choice, one random candidate of every other (SPOS); `pairwise`: one random candidate
    everywhere, attended to alone, which ranks weakly.
    """

    tokens: Literal["pooled", "flat"] = "pooled"
    pool: int = 4
    width: int = 64
    recompute: bool = True
    close: float = 2.0
    paths: Literal["all", "single", "pairwise"] = "all"

    def __post_init__(self) -> None:
        for name in ("pool", "width"):
            if getattr(self, name) < 1:
                raise UserError(f"`method.{name} >= 1` must hold, but got {name}={getattr(self, name)}")
        not_negative("method.close", self.close)


class ItMix(Mix):
    """Combines a choice's outputs by its Lite-Transformer; `into` takes the attention of every image, by table."""

    def __init__(
        self,
        method: ItNas,
        into: Mapping[str, Moments] | None = None,
        plan: Plan | None = None,
        place: tuple[str, int] | None = None,
    ) -> None:
        """plan: what runs at each site; None: all. place: the one choice of a table that is looked at under a plan."""
        self._method, self._into, self._plan, self._place = method, into, plan, place
        self._learns = torch.is_grad_enabled()  # weight steps of a bilevel search relax without gradients
        self._met: dict[tuple[int, int], Tensor] = {}
        self._laid: dict[tuple[int, torch.dtype], list[Laid]] = {}  # by ensemble
        self.rows: dict[tuple[int, int], Callable[[], Tensor]] = {}  # laid out when they are asked for

    def live(self, site: int) -> Live | None:
        if self._plan is not None:
            return self._plan[site]
        return self._method.live[self._method.layout.sites[site]]

    def recomputes(self, site: int, choice: int) -> bool:
        """The one choice of a path that runs all its candidates, which would keep more than all others together."""
        if self._plan is None or not self._method.settings.recompute:
            return False
        live = self._plan[site]
        return live is not None and len(live[choice]) > 1

    def signature(self) -> Hashable:
        return ("it-nas", self._into is not None, self._plan)

    def meet(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> None:
        """Deviation: where outputs are of different kinds (NOS) attention alone is computed, over all of them."""
        if any(x is not None for x in outputs.values()) and not self._passes(outputs):
            (self._met[site, choice],) = self._run(site, choice, outputs, attention_alone=True)
            self._note(site, choice, self._met[site, choice])

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        if all(x is None for x in outputs.values()):
            return None
        if self._passes(outputs):
            (only,) = outputs.values()
            return only
        if (site, choice) in self._met:
            weights = self._met[site, choice]
            terms = [
                weights[:, k + 1].to(x.dtype)[:, None, None, None] * x for k, x in outputs.items() if x is not None
            ]
            return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]
        output, attention = self._run(site, choice, outputs)
        self._note(site, choice, attention)
        return output

    def combine_together(
        self, site: int, outputs: Mapping[int, Mapping[int, Tensor | None]]
    ) -> Mapping[int, Tensor | None]:
        """All edges that leave a node as one, where all candidates run; each edge is `LiteTransformer`'s still."""
        found: dict[int, Tensor | None] = {}
        for group in self._method.groups.get(site, ()) if self._plan is None else ():
            own = [outputs.get(choice, {}) for choice in group.choices]
            ensemble = self._method.ensembles[group.ensemble]
            maps = [x for one in own for x in one.values() if x is not None]
            if not ensemble.serves(maps) or any(tuple(order_of(one)) != ensemble.order for one in own):
                continue
            output, attention = self._run_together(group, ensemble, maps)
            for choice, value, row in zip(group.choices, output.unbind(), attention.unbind(), strict=True):
                found[choice] = value
                self._note(site, choice, row, ensemble.order)
        return found

    def _run_together(self, group: Group, ensemble: LiteEnsemble, maps: list[Tensor]) -> tuple[Tensor, Tensor]:
        dtype = reduce(torch.promote_types, (x.dtype for x in maps))
        key = (group.ensemble, dtype)
        if key not in self._laid:
            with torch.set_grad_enabled(self._learns and torch.is_grad_enabled()):
                self._laid[key] = ensemble.lay(dtype)
        return self._economical(ensemble, self._laid[key][group.place], maps)  # type: ignore[no-any-return]

    def _passes(self, outputs: Mapping[int, Tensor | None]) -> bool:
        """Whether a choice off the attended one runs its sampled candidate, with a coefficient of exactly 1."""
        return self._plan is not None and len(outputs) == 1 and self._method.settings.paths == "single"

    def _run(
        self, site: int, choice: int, outputs: Mapping[int, Tensor | None], *, attention_alone: bool = False
    ) -> tuple[Tensor, ...]:
        module = self._method.transformer(site, choice)
        present = [k for k, x in outputs.items() if x is not None]

        def forward(*maps: Tensor) -> tuple[Tensor, ...]:
            given = dict.fromkeys(outputs) | dict(zip(present, maps, strict=True))
            ordered = {k: given[k] for k in outputs}
            if self._learns or not torch.is_grad_enabled():
                return module(ordered, attention_alone)  # type: ignore[no-any-return]
            fixed = {name: p.detach() for name, p in module.named_parameters()}
            return functional_call(module, fixed, (ordered, attention_alone))  # type: ignore[no-any-return]

        return self._economical(forward, *(x for x in outputs.values() if x is not None))

    def _economical(self, run: Callable[..., T], *given: Any) -> T:
        """run(*given); with `recompute`, candidates' maps, which others keep too, are all that stays of it."""
        if not self._method.settings.recompute or not torch.is_grad_enabled():
            return run(*given)
        return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    def _note(self, site: int, choice: int, attention: Tensor, order: Sequence[int] | None = None) -> None:
        """Keeps a row [n, tokens + 1], or of tokens in an `order`; when all of a table are there, hands them on."""

        def row() -> Tensor:
            if order is None:
                return attention
            table = self._method.layout.table(self._method.layout.sites[site])
            return by_position(attention, order, len(table.choices[choice].candidates))

        if self._into is None:
            if torch.is_grad_enabled():
                self.rows[site, choice] = row
            return
        table = self._method.layout.sites[site]
        if self._place is not None and self._place != (table, choice):
            return
        attention = attention.detach()
        self.rows[site, choice] = row
        places = self._method.places[table]
        if self._place is not None:
            self._hand_on_one(table, choice)
        elif all(place in self.rows for place in places):
            self._into[table].add(self.mean_rows(table).flatten(1))
            for place in places:
                del self.rows[place]

    def _hand_on_one(self, table: str, choice: int) -> None:
        """Of a pass in turns: the one choice that is attended to, once all sites of its table are there."""
        assert self._into is not None
        places = [place for place in self._method.places[table] if place[1] == choice]
        if all(place in self.rows for place in places):
            width = self._method.layout.table(table).width
            first = self._method.attended(table)[0]
            rows = self.mean_rows(table)[:, choice]
            self._into[table].add(rows, choice * width, counts=choice == first)
            for place in places:
                del self.rows[place]

    def mean_rows(self, table: str) -> Tensor:
        """a[1:] [n, choices, width] of every image, the mean over the table's cells."""
        own = self._method.layout.table(table)
        found: dict[int, list[Tensor]] = {}
        for (site, choice), laid_out in self.rows.items():
            if self._method.layout.sites[site] == table:
                row = laid_out()
                found.setdefault(choice, []).append(F.pad(row[:, 1:], (0, own.width + 1 - row.shape[1])))
        like = next(iter(found.values()))[0]
        n = like.shape[0]
        uniform = self._method.uniform(table).to(like.dtype)  # edges of zeros alone
        return torch.stack(
            [torch.stack(found[i]).mean(0) if i in found else uniform[i].expand(n, -1) for i in range(len(own))],
            dim=1,
        )


class Group(NamedTuple):
    """Choices of one site that leave one node: the Lite-Transformers of an ensemble's group."""

    choices: tuple[int, ...]
    ensemble: int
    place: int


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
        self.live = {table.name: _live(self.masks[table.name]) for table in layout.tables}
        self.transformers = nn.ModuleDict()
        self.moments = nn.ModuleDict({t.name: Moments(t.shape[0] * t.shape[1]) for t in layout.tables})
        self.places: dict[str, list[tuple[int, int]]] = {table.name: [] for table in layout.tables}
        self.ensembles: list[LiteEnsemble] = []
        self.groups: dict[int, list[Group]] = {}  # by site
        self._known_key: int | None = None
        if settings.paths != "all":
            self.register_buffer("key", torch.randint(2**31, (1,)))
            self.register_load_state_dict_post_hook(_forget_key)  # type: ignore[no-untyped-call]

    def fit(self, shapes: Shapes) -> None:
        s = self.settings
        for (site, choice), outputs in shapes.items():
            table = self.layout.table(self.layout.sites[site])
            taking_part = [k for k, is_in in enumerate(self.masks[table.name][choice].tolist()) if is_in]
            shape = outputs.feature()
            if shape is None or all(outputs.by_candidate.get(k) is None for k in taking_part):
                continue  # zeros alone: nothing to attend to
            self.transformers[f"{site}_{choice}"] = LiteTransformer(
                shape,
                len(table.choices[choice].candidates),
                pool=s.pool if s.tokens == "pooled" else None,
                width=s.width,
                values=not outputs.in_parts,
            )
            self.places[table.name].append((site, choice))
        self._form_groups(shapes)

    def _form_groups(self, shapes: Shapes) -> None:
        """Edges that leave one node run together; all of one shape lay their weights side by side."""
        kinds: dict[tuple[Shape, int, tuple[int, ...], int], dict[tuple[int, int], list[int]]] = {}
        for site, choice in (place for places in self.places.values() for place in places):
            table, module = self.layout.table(self.layout.sites[site]), self.transformer(site, choice)
            outputs = shapes[site, choice]
            seen = {k: outputs.by_candidate[k] for k in self.live[table.name][choice]}
            maps = [shape for shape in seen.values() if shape is not None]
            if outputs.in_parts or any(shape != module.shape for shape in maps):
                continue  # attended to, but put together elsewhere
            kind = (module.shape, module.tokens, tuple(order_of(seen)), len(maps))
            kinds.setdefault(kind, {}).setdefault((site, table.choices[choice].source), []).append(choice)
        for (_, _, order, maps_count), found in kinds.items():
            modules: list[list[LiteTransformer]] = []
            for (site, _), choices in found.items():
                self.groups.setdefault(site, []).append(Group(tuple(choices), len(self.ensembles), len(modules)))
                modules.append([self.transformer(site, choice) for choice in choices])
            self.ensembles.append(LiteEnsemble(modules, order, maps_count))

    def transformer(self, site: int, choice: int) -> LiteTransformer:
        found = self.transformers[f"{site}_{choice}"]
        assert isinstance(found, LiteTransformer)
        return found

    def regions(self) -> Sequence[nn.Module]:
        return [*self.ensembles, *self.transformers.values()]

    def relax(self) -> Mix:
        return ItMix(self, plan=None if self.settings.paths == "all" else self.planned())

    def looking(self) -> Mix | None:
        return ItMix(self, self._begun_anew()) if self.settings.paths == "all" else None

    def looking_in_turn(self) -> Sequence[tuple[Mix, Mix]]:
        """Every choice under full attention once, at all its sites, while the others run a random path."""
        if self.settings.paths == "all":
            return ()
        into = self._begun_anew()
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
        rng, rule = random.Random(seed), self.layout.rule
        assert isinstance(rule, Rule)
        lives = [live_of(t, rule.sample(t, rng)) for t in self.layout.tables]
        by_table = dict(zip((t.name for t in self.layout.tables), lives, strict=True))
        plan = [list(by_table[name]) for name in self.layout.sites]
        if place is not None:
            whole = [(site, place[1]) for site in self.layout.sites_of(place[0])]
        else:
            known = [at for places in self.places.values() for at in places]
            whole = [rng.choice(known)] if self.settings.paths == "single" else []
        for site, choice in whole:
            plan[site][choice] = self.live[self.layout.sites[site]][choice]
        return tuple(tuple(live) for live in plan)

    def _begun_anew(self) -> dict[str, Moments]:
        found = {table.name: self._moments(table.name) for table in self.layout.tables}
        for moments in found.values():
            moments.reset()
        return found

    def looked(self) -> Sequence[Tensor]:
        return [sums for name in self.moments for sums in self._moments(name).sums()]

    def indicator(self) -> dict[str, Tensor]:
        """a[1:] per table [choices, width] in float64, the mean over cells and images of the latest pass."""
        found = {}
        for table in self.layout.tables:
            moments = self._moments(table.name)
            seen = moments.mean().view(table.shape)
            found[table.name] = torch.where(seen.any(1, keepdim=True), seen, self.uniform(table.name).double())
        return found

    def probabilities(self) -> dict[str, Tensor]:
        """The indicator without the IT's attention to itself: sums to 1 per choice. Uniform before the first pass."""
        return {name: _normalised(rows).to(self._dtype()) for name, rows in self.indicator().items()}

    def derive(self) -> Genotype:
        return derive(self.layout, self.indicator(), self.rule, about={"method": self.name})  # Eq 6

    def penalised(self, mix: Mix) -> dict[str, Tensor]:
        """The attention of this step's images, with gradients to the Lite-Transformers and to the weights."""
        assert isinstance(mix, ItMix)
        found = {}
        for table in self.layout.tables:
            if not any(table.name == self.layout.sites[site] for site, _ in mix.rows):
                found[table.name] = self.uniform(table.name)
                continue
            found[table.name] = _normalised(mix.mean_rows(table.name).mean(0))
        return found

    def is_steerable(self) -> bool:
        return bool(self.settings.paths == "all")  # elsewhere a step sees the attention of one choice

    def findings(self) -> dict[str, Any]:
        """Images looked at, and per edge the best candidate, its lead and the standard error of that."""
        if not self._looked_at():
            return {}
        found = self.margins()
        return {
            "selection": {
                "images": self._looked_at(),
                "close_below": self.settings.close,
                "close_edges": sum(m.close for own in found.values() for m in own),
                "edges": {name: [m.to_dict() for m in own] for name, own in found.items()},
            }
        }

    def remarks(self) -> Sequence[str]:
        found = [(name, m) for name, own in self.margins().items() for m in own]
        close = [f"{name} {m}" for name, m in found if m.close]
        text = f"selection from {self._looked_at():,} images: {len(close)} of {len(found)} edges are close"
        return [f"{text} (a lead below {self.settings.close:g} standard errors)" + "".join(f"; {c}" for c in close)]

    def margins(self) -> dict[str, list[Margin]]:
        """By table one per edge, from the latest pass."""
        return {
            table.name: margins(
                table,
                self.indicator()[table.name],
                self._moments(table.name).mean_products(),
                self._looked_at(),
                self.left_out,
                self.settings.close,
            )
            for table in self.layout.tables
        }

    def gauges(self) -> dict[str, Tensor]:
        """The share of its attention that the IT keeps to itself, by table."""
        rows = self.indicator()
        return {f"own_attention_{name}": 1.0 - row.sum(1).mean() for name, row in rows.items()}

    def uniform(self, table: str) -> Tensor:
        """1 / (candidates + 1) at all that take part [choices, width]: what attention starts near."""
        mask = self.masks[table].to(self._dtype())
        return mask / (mask.sum(1, keepdim=True) + 1.0)

    def _moments(self, table: str) -> Moments:
        found = self.moments[table]
        assert isinstance(found, Moments)
        return found

    def _looked_at(self) -> int:
        return int(next(self._moments(name).count for name in self.layout.first_sites()))

    def _dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.parameters()), torch.get_default_dtype())


def _normalised(rows: Tensor) -> Tensor:
    return rows / rows.sum(-1, keepdim=True)


def _forget_key(method: ItNas, incompatible: object) -> None:
    method._known_key = None


def _live(mask: Tensor) -> Live:
    return tuple(tuple(k for k, is_in in enumerate(row) if is_in) for row in mask.tolist())
