"""Lite-Transformers of one shape in one batch: those of all edges that leave a node run together.

Alone, each costs a GPU some thirty launches forward and sixty backward, however small its maps are. Here the weights of
all Lite-Transformers of one shape are stacked once per step, and all that does not depend on images is computed from
them at once: the query, its product with the keys, the logits of the indicator token and of tokens of zeros. Each group
of edges then uses its part (`softcell.kernels.indicator`). Groups of one kind share a `LiteEnsemble`, whichever cells
they are in. The equations are those of `LiteTransformer`, which is the oracle in the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from softcell.kernels.indicator import Form, Laid, indicate, indicate_by, normalised_tokens
from softcell.methods.itnas.transformer import LiteTransformer, Shape, order_of, summaries, summary, taken
from softcell.nn.stack import LARGEST


class LiteEnsemble(nn.Module):
    """The Lite-Transformers of one shape whose tokens are in the same order, group by group.

    groups: each the Lite-Transformers of a group, all with values. order: positions of the IT, of the maps and of
    tokens of zeros, as `order_of` gives them. maps: how many maps there are.
    """

    def __init__(self, groups: Sequence[Sequence[LiteTransformer]], order: Sequence[int], maps: int) -> None:
        super().__init__()
        self._groups = [list(group) for group in groups]  # lists: the method owns them
        self.order, self.maps = tuple(order), maps
        first = self._groups[0][0]
        self.shape, self.sides = first.shape, first.sides
        self._form = Form(first.sides, first.token_eps, first.after_attention.eps)

    def serves(self, maps: Sequence[Tensor]) -> bool:
        """Whether running these maps together is faster: on a GPU, and on a CPU if they are small."""
        return bool(maps) and (maps[0].is_cuda or maps[0].numel() <= LARGEST)

    def lay(self, dtype: torch.dtype) -> list[Laid]:
        """The stacked weights of each group, for maps in `dtype`."""
        modules = [module for group in self._groups for module in group]
        first = modules[0]
        (c, h, w), width = first.shape, first.query.out_features
        with torch.autocast(first.positions.device.type, enabled=False):
            p = _side_by_side(modules)
            own = summary(p["indicator"], c, self.sides, p["positions"].dtype)
            first_token = normalised_tokens(own + p["positions"][:, 0], self._form.token_eps)
            normed = self._form.token_eps is not None
            token = torch.addcmul(p["norm.bias"], first_token, p["norm.weight"]) if normed else first_token
            query = torch.bmm(p["query.weight"], token[:, :, None])
            met = torch.bmm(p["key.weight"].transpose(1, 2), query)[:, :, 0] * width**-0.5
            if normed:
                asked, moved = p["norm.weight"] * met, (p["norm.bias"] * met).sum(1, keepdim=True)
            else:  # the norm's scale and shift are 1 and 0
                asked, moved = met, met.new_zeros(len(modules), 1)
            known = first_token[:, None]
            if len(self.order) > self.maps + 1:
                zeros = taken(p["positions"], self.order[self.maps + 1 :], 1)
                known = torch.cat([known, normalised_tokens(zeros, self._form.token_eps)], dim=1)
            itself, zeros = torch.split((known * asked[:, None]).sum(2) + moved, [1, known.shape[1] - 1], dim=1)
            positions = taken(p["positions"], self.order[1 : self.maps + 1], 1)
            indicator = p["indicator"].permute(0, 2, 3, 1).reshape(len(modules), h * w, c)
            value = _transposed(p["value.weight"])
            found = [
                *(self._channels_last(positions), self._channels_last(asked)[:, :, None], moved[:, :, None]),
                *(itself, zeros),
                indicator.flatten(1)[:, None].to(dtype),
                torch.bmm(indicator, value).flatten(1)[:, None].to(dtype),
                value.to(dtype).contiguous(),
                *_norm(p, "after_attention", dtype),
                _transposed(p["ffn.0.weight"]).to(dtype).contiguous(),
                p["ffn.0.bias"][:, None].to(dtype),
                _transposed(p["ffn.2.weight"]).to(dtype).contiguous(),
                p["ffn.2.bias"][:, None].to(dtype),
                *_norm(p, "after_ffn", dtype),
            ]
        sizes = [len(group) for group in self._groups]
        # Split, not sliced: the gradients of all groups then come back in one piece.
        return [Laid(*pieces) for pieces in zip(*(torch.split(x, sizes) for x in found), strict=True)]

    def forward(self, laid: Laid, maps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The ITs' outputs [g, n, c, h, w] and attention [g, n, tokens in their order].

        maps: those of the first Lite-Transformer of the group, then those of the next, each [n, c, h, w].
        """
        with torch.autocast(maps[0].device.type, enabled=False):
            x = torch.stack([one.permute(0, 2, 3, 1) for one in maps])  # [g·m, n, h, w, c]
            if self.shape[1] % self.sides[0] or self.shape[2] % self.sides[1]:  # windows that overlap
                small = self._channels_last(summaries(x, self.sides, laid.positions.dtype))
                total, attention = indicate_by(small, x, laid, self._form)
            else:
                total, attention = indicate(x, laid, self._form)
        return total.permute(0, 1, 4, 2, 3), attention

    def _channels_last(self, x: Tensor) -> Tensor:
        """[…, d] with pooled values channel by channel, as `LiteTransformer` has them, to position by position."""
        return x.reshape(*x.shape[:-1], self.shape[0], -1).transpose(-1, -2).flatten(-2)


def _side_by_side(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters by name, stacked over modules in one copy, so that their gradients are one copy too."""
    tables = [dict(module.named_parameters()) for module in modules]
    shapes = {name: parameter.shape for name, parameter in tables[0].items()}
    flat = torch.cat([table[name].reshape(-1) for name in shapes for table in tables])
    pieces = torch.split(flat, [len(modules) * shape.numel() for shape in shapes.values()])
    return {name: piece.view(len(modules), *shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def _transposed(weight: Tensor) -> Tensor:
    """Weights of 1×1 convolutions [f, out, in, 1, 1] to [f, in, out]."""
    return weight.flatten(2).transpose(1, 2)


def _norm(p: dict[str, Tensor], name: str, dtype: torch.dtype) -> list[Tensor]:
    """Scale and shift of group norms, each [f, 1, 1, c]."""
    return [p[f"{name}.{part}"][:, None, None].to(dtype) for part in ("weight", "bias")]


class Member(NamedTuple):
    """The Lite-Transformer of one edge, and by candidate the shapes [c, h, w] it attends to; None for zeros."""

    site: int
    source: int
    choice: int
    module: LiteTransformer
    outputs: Mapping[int, Shape | None]


class Group(NamedTuple):
    """Choices of one site that leave one node: group `number` of an ensemble."""

    choices: tuple[int, ...]
    ensemble: int
    number: int


def form_groups(members: Iterable[Member]) -> tuple[list[LiteEnsemble], dict[int, list[Group]]]:
    """The ensembles, and the groups of every site; edges whose maps are not all of one shape are left out."""
    kinds: dict[tuple[Shape, int, tuple[int, ...], int], dict[tuple[int, int], list[Member]]] = {}
    for member in members:
        module = member.module
        maps = [shape for shape in member.outputs.values() if shape is not None]
        if any(shape != module.shape for shape in maps):
            continue
        kind = (module.shape, module.tokens, tuple(order_of(member.outputs)), len(maps))
        kinds.setdefault(kind, {}).setdefault((member.site, member.source), []).append(member)
    ensembles: list[LiteEnsemble] = []
    groups: dict[int, list[Group]] = {}
    for (_, _, order, num_maps), alike in kinds.items():
        for number, ((site, _), own) in enumerate(alike.items()):
            groups.setdefault(site, []).append(Group(tuple(m.choice for m in own), len(ensembles), number))
        ensembles.append(LiteEnsemble([[m.module for m in own] for own in alike.values()], order, num_maps))
    return ensembles, groups
