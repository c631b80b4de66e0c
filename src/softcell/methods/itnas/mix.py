"""The mix of IT-NAS: Lite-Transformers combine the candidates' feature maps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor
from torch.func import functional_call

from softcell.arch import Live, Mix, Plan
from softcell.arch.choice import LINK
from softcell.kernels.indicator import Laid
from softcell.methods.itnas.attention import AttentionRows, AttentionSums
from softcell.methods.itnas.transformer import Group, LiteEnsemble, order_of
from softcell.nn.norm import inputs_kept_alone

if TYPE_CHECKING:
    from softcell.methods.itnas.method import ItNas

T = TypeVar("T")


class ItMix(Mix):
    """Combines a choice's outputs by its Lite-Transformer; `rows` collects the attention of every image."""

    def __init__(
        self,
        method: ItNas,
        sums: AttentionSums | None = None,
        plan: Plan | None = None,
        only: tuple[str, int] | None = None,
    ) -> None:
        """sums: of the attention over images. plan: what runs at each site; None: all candidates.

        only: the one choice of a table that is recorded under a plan. Its table's first choice counts the images.
        """
        self._method, self._plan = method, plan
        self._learns = torch.is_grad_enabled()  # weight steps of a bilevel search relax without gradients
        self._attention: dict[tuple[int, int], Tensor] = {}  # by site and choice, where outputs are combined in parts
        self._laid: dict[tuple[int, torch.dtype], list[Laid]] = {}  # by ensemble
        self._whole: dict[tuple[int, torch.dtype], list[Tensor | None]] = {}  # what has their gradients instead
        counts = only is None or only[1] == method.selection.attended(only[0])[0]
        self.rows = AttentionRows(method.layout, method.edges, method.uniform, sums, only, counts=counts)

    def live(self, site: int) -> Live | None:
        if self._plan is not None:
            return self._plan[site]
        return self._method.live[self._method.layout.sites[site]]

    def recomputes(self, site: int, choice: int) -> bool:
        """The one choice of a path that runs all its candidates: its activations exceed those of all others."""
        if self._plan is None or not self._method.settings.recompute:
            return False
        live = self._plan[site]
        return live is not None and len(live[choice]) > 1

    def signature(self) -> Hashable:
        return ("it-nas", self.rows.is_summed, self._plan)

    @torch.no_grad()
    def take(self, other: Self) -> None:
        """Copies the Lite-Transformers' weights again into the memory that a captured step reads."""
        for (number, dtype), own in self._laid.items():
            for old, new in zip(own, self._method.ensembles[number].lay(dtype), strict=True):
                for kept, now in zip(old, new, strict=True):
                    kept.copy_(now)

    def meet(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> None:
        """Deviation: where outputs are of different kinds (NOS) only attention is computed, over all of them."""
        if any(x is not None for x in outputs.values()) and not self._passes(outputs):
            (self._attention[site, choice],) = self._run(site, choice, outputs, attention_alone=True)
            self.rows.note(site, choice, self._attention[site, choice])

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        if all(x is None for x in outputs.values()):
            return None
        if self._passes(outputs):
            (only,) = outputs.values()
            return only
        if (site, choice) in self._attention:
            weights = self._attention[site, choice]
            # Column 0 is the IT's attention to itself.
            terms = [
                weights[:, k + 1].to(x.dtype)[:, None, None, None] * x for k, x in outputs.items() if x is not None
            ]
            return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]
        output, attention = self._run(site, choice, outputs)
        self.rows.note(site, choice, attention)
        return output

    def compete(self, site: int, outputs: Mapping[int, Mapping[int, Tensor | None]]) -> Tensor | None:
        """The links of a contest are the tokens of one Lite-Transformer: the IT attends to all of them together."""
        contest = self._method.layout.table(self._method.layout.sites[site]).contest_of[next(iter(outputs))]
        numbered = {contest.index(choice): own[LINK] for choice, own in outputs.items() if LINK in own}
        if all(x is None for x in numbered.values()):
            return None
        output, attention = self._run(site, contest[0], numbered)
        nothing = torch.zeros_like(attention[:, 0])
        for choice in outputs:
            link = attention[:, contest.index(choice) + 1]
            self.rows.note(site, choice, torch.stack([attention[:, 0], nothing, link], dim=1))
        return output

    def combine_together(
        self, site: int, outputs: Mapping[int, Mapping[int, Tensor | None]]
    ) -> Mapping[int, Tensor | None]:
        """All outgoing edges of a node at once, where all candidates run; equal to each edge's `LiteTransformer`."""
        found: dict[int, Tensor | None] = {}
        for group in self._method.groups.get(site, ()) if self._plan is None else ():
            own = [outputs.get(choice, {}) for choice in group.choices]
            ensemble = self._method.ensembles[group.ensemble]
            maps = [x for one in own for x in one.values() if x is not None]
            if not ensemble.serves(maps) or any(tuple(order_of(one)) != ensemble.order for one in own):
                continue
            output, attention = self._run_together(group, ensemble, maps)
            # One output is the whole tensor: its gradient needs no copy.
            values = output.unbind() if len(output) > 1 else (output.squeeze(0),)
            for choice, value, row in zip(group.choices, values, attention.unbind(), strict=True):
                found[choice] = value
                self.rows.note(site, choice, row, ensemble.order)
        return found

    def _run_together(self, group: Group, ensemble: LiteEnsemble, maps: list[Tensor]) -> tuple[Tensor, Tensor]:
        dtype = reduce(torch.promote_types, (x.dtype for x in maps))
        key = (group.ensemble, dtype)
        if key not in self._laid:
            with torch.set_grad_enabled(self._learns and torch.is_grad_enabled()):
                if ensemble.runs_whole(maps, dtype):
                    found = ensemble.lay_whole(dtype)
                    self._laid[key], self._whole[key] = [laid for laid, _ in found], [whole for _, whole in found]
                else:
                    self._laid[key] = ensemble.lay(dtype)
        laid, whole = self._laid[key][group.number], self._whole.get(key)
        if whole is None:
            output, attention = self._economical(ensemble, laid, maps)
        else:  # kernels recompute less themselves than `_economical` would
            output, attention = ensemble(laid, maps, whole[group.number], self._method.settings.recompute)
        return output, attention

    def _passes(self, outputs: Mapping[int, Tensor | None]) -> bool:
        """Whether a choice that is not attended to runs its sampled candidate, with a coefficient of exactly 1."""
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
            # A weight step of a bilevel search: gradients pass to the maps, not to the Lite-Transformer.
            fixed = {name: p.detach() for name, p in module.named_parameters()}
            return functional_call(module, fixed, (ordered, attention_alone))  # type: ignore[no-any-return]

        return self._economical(forward, *(x for x in outputs.values() if x is not None))

    def _economical(self, run: Callable[..., T], *given: Any) -> T:
        """run(*given); with `recompute` only the candidates' maps are kept for the backward pass."""
        return inputs_kept_alone(run, *given) if self._method.settings.recompute else run(*given)
