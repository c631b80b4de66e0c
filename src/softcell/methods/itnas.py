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

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from softcell.arch import Genotype, Layout, Live, Mix, Rule, derive
from softcell.arch.margins import Margin, margins
from softcell.errors import UserError
from softcell.methods.base import Masks, Method, Regime
from softcell.methods.registry import register_method
from softcell.nn.lite_transformer import LiteTransformer
from softcell.nn.moments import Moments
from softcell.settings import not_negative
from softcell.spaces.shapes import Shapes

HALVES = {"weights": 0.5, "validation": 0.5}


@dataclass(frozen=True)
class ItNasSettings:
    """The Lite-Transformer and how its attention is read.

    `tokens`: queries and keys are read off each map pooled to `pool` × `pool`, or off the `flat` map. `width`: d_q.
    `recompute`: what the Lite-Transformer keeps for its backward pass is computed again there, which saves memory for
    some time. `close`: an edge is called close when its best candidate leads by less than so many standard errors.
    """

    tokens: Literal["pooled", "flat"] = "pooled"
    pool: int = 4
    width: int = 64
    recompute: bool = True
    close: float = 2.0

    def __post_init__(self) -> None:
        for name in ("pool", "width"):
            if getattr(self, name) < 1:
                raise UserError(f"`method.{name} >= 1` must hold, but got {name}={getattr(self, name)}")
        not_negative("method.close", self.close)


class ItMix(Mix):
    """Combines a choice's outputs by its Lite-Transformer; `into` takes the attention of every image, by table."""

    def __init__(self, method: ItNas, into: Mapping[str, Moments] | None = None) -> None:
        self._method, self._into = method, into
        self._learns = torch.is_grad_enabled()  # weight steps of a bilevel search relax without gradients
        self._met: dict[tuple[int, int], Tensor] = {}
        self.rows: dict[tuple[int, int], Tensor] = {}

    def live(self, site: int) -> Live | None:
        return self._method.live[self._method.layout.sites[site]]

    def signature(self) -> Hashable:
        return ("it-nas", self._into is not None)

    def meet(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> None:
        """Deviation: where outputs are of different kinds (NOS) attention alone is computed, over all of them."""
        if any(x is not None for x in outputs.values()):
            (self._met[site, choice],) = self._run(site, choice, outputs, attention_alone=True)
            self._note(site, choice, self._met[site, choice])

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        if all(x is None for x in outputs.values()):
            return None
        if (site, choice) in self._met:
            weights = self._met[site, choice]
            terms = [
                weights[:, k + 1].to(x.dtype)[:, None, None, None] * x for k, x in outputs.items() if x is not None
            ]
            return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]
        output, attention = self._run(site, choice, outputs)
        self._note(site, choice, attention)
        return output

    def _run(
        self, site: int, choice: int, outputs: Mapping[int, Tensor | None], *, attention_alone: bool = False
    ) -> tuple[Tensor, ...]:
        module = self._method.transformers[f"{site}_{choice}"]
        assert isinstance(module, LiteTransformer)
        present = [k for k, x in outputs.items() if x is not None]

        def forward(*maps: Tensor) -> tuple[Tensor, ...]:
            given = dict.fromkeys(outputs) | dict(zip(present, maps, strict=True))
            ordered = {k: given[k] for k in outputs}
            if self._learns or not torch.is_grad_enabled():
                return module(ordered, attention_alone)  # type: ignore[no-any-return]
            fixed = {name: p.detach() for name, p in module.named_parameters()}
            return functional_call(module, fixed, (ordered, attention_alone))  # type: ignore[no-any-return]

        maps = [x for x in outputs.values() if x is not None]
        if self._method.settings.recompute and torch.is_grad_enabled():
            # Candidates' maps, which others keep too, are all that stays until the backward pass.
            return checkpoint(forward, *maps, use_reentrant=False, preserve_rng_state=False)  # type: ignore
        return forward(*maps)

    def _note(self, site: int, choice: int, attention: Tensor) -> None:
        """Keeps a row [n, tokens + 1]; when all of a table are there, hands them on."""
        if self._into is None:
            if torch.is_grad_enabled():
                self.rows[site, choice] = attention
            return
        self.rows[site, choice] = attention.detach()
        table = self._method.layout.sites[site]
        places = self._method.places[table]
        if all(place in self.rows for place in places):
            self._into[table].add(self.mean_rows(table).flatten(1))
            for place in places:
                del self.rows[place]

    def mean_rows(self, table: str) -> Tensor:
        """a[1:] [n, choices, width] of every image, the mean over the table's cells."""
        own = self._method.layout.table(table)
        found: dict[int, list[Tensor]] = {}
        for (site, choice), row in self.rows.items():
            if self._method.layout.sites[site] == table:
                found.setdefault(choice, []).append(F.pad(row[:, 1:], (0, own.width + 1 - row.shape[1])))
        n, like = next((row.shape[0], row) for row in self.rows.values())
        uniform = self._method.uniform(table).to(like.dtype)  # edges of zeros alone
        return torch.stack(
            [torch.stack(found[i]).mean(0) if i in found else uniform[i].expand(n, -1) for i in range(len(own))],
            dim=1,
        )


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
        self.live = {table.name: _live(self.masks[table.name]) for table in layout.tables}
        self.transformers = nn.ModuleDict()
        self.moments = nn.ModuleDict({t.name: Moments(t.shape[0] * t.shape[1]) for t in layout.tables})
        self.places: dict[str, list[tuple[int, int]]] = {table.name: [] for table in layout.tables}

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

    def relax(self) -> Mix:
        return ItMix(self)

    def looking(self) -> Mix:
        found = {}
        for name, moments in self.moments.items():
            assert isinstance(moments, Moments)
            moments.reset()
            found[name] = moments
        return ItMix(self, found)

    def looked(self) -> Sequence[Tensor]:
        return [sums for name in self.moments for sums in self._moments(name).sums()]

    def indicator(self) -> dict[str, Tensor]:
        """a[1:] per table [choices, width] in float64, the mean over cells and images of the latest pass."""
        found = {}
        for table in self.layout.tables:
            moments = self._moments(table.name)
            seen = moments.mean().view(table.shape)
            found[table.name] = torch.where(moments.count > 0, seen, self.uniform(table.name).double())
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
        return True

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


def _live(mask: Tensor) -> Live | None:
    return tuple(tuple(k for k, is_in in enumerate(row) if is_in) for row in mask.tolist())
