"""Lite-Transformers of one shape run side by side: those of all edges that leave a node as one.

Alone, each costs a GPU some thirty launches forward and sixty backward, however small its maps are. Here the weights of
all Lite-Transformers of one shape are laid side by side once per step, and whatever no image changes is computed from
them for all at once: the query, what the keys make of it, the logits of the indicator token and of tokens of zeros.
Each group of edges then takes its share. The equations are `LiteTransformer`'s, which is the oracle in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.kernels.product import product
from softcell.nn.lite_transformer import LiteTransformer, summaries, summary, taken
from softcell.nn.stack import LARGEST


class Laid(NamedTuple):
    """What g Lite-Transformers bring to a step, side by side; m maps of d pooled values are attended to.

    asked, shift: a normalised token t̂ has the logit asked·t̂ + shift; pooled values lie channels last here, as they come
    out of the maps. itself, zeros: the logits of the IT and of tokens of zeros. From `own` on in the precision of the
    maps.
    """

    positions: Tensor  # [g, m, d]
    asked: Tensor  # [g, d, 1]
    shift: Tensor  # [g, 1, 1]
    itself: Tensor  # [g, 1]
    zeros: Tensor  # [g, tokens of zeros]
    own: Tensor  # [g, 1, h·w·c], the IT's map
    own_value: Tensor  # [g, 1, h·w·c], its value
    value: Tensor  # [g, c, c], from left to right
    attention_scale: Tensor  # [g, 1, 1, c], of the norm after it
    attention_shift: Tensor
    narrow: Tensor  # [g, c, inner]
    narrow_bias: Tensor  # [g, 1, inner]
    widen: Tensor  # [g, inner, c]
    widen_bias: Tensor  # [g, 1, c]
    ffn_scale: Tensor  # [g, 1, 1, c]
    ffn_shift: Tensor


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
        self.shape, self.sides, self._token_eps = first.shape, first.sides, first.norm.eps
        self._map_eps = first.after_attention.eps

    def serves(self, maps: Sequence[Tensor]) -> bool:
        """Whether running these maps together pays: on a GPU, and on a CPU where calls cost as much as arithmetic."""
        return bool(maps) and (maps[0].is_cuda or maps[0].numel() <= LARGEST)

    def lay(self, dtype: torch.dtype) -> list[Laid]:
        """One per group, for maps in `dtype`."""
        modules = [module for group in self._groups for module in group]
        first = modules[0]
        (c, h, w), width = first.shape, first.query.out_features
        with torch.autocast(first.positions.device.type, enabled=False):
            p = _side_by_side(modules)
            scale, shift = p["norm.weight"], p["norm.bias"]
            own = summary(p["indicator"], c, self.sides, scale.dtype)
            first_token = F.layer_norm(own + p["positions"][:, 0], own.shape[1:], eps=self._token_eps)
            token = torch.addcmul(shift, first_token, scale)
            query = torch.bmm(p["query.weight"], token[:, :, None])
            met = torch.bmm(p["key.weight"].transpose(1, 2), query)[:, :, 0] * width**-0.5
            asked, moved = scale * met, (shift * met).sum(1, keepdim=True)
            known = first_token[:, None]
            if len(self.order) > self.maps + 1:
                zeros = F.layer_norm(
                    taken(p["positions"], self.order[self.maps + 1 :], 1), own.shape[1:], eps=self._token_eps
                )
                known = torch.cat([known, zeros], dim=1)
            itself, zeros = torch.split((known * asked[:, None]).sum(2) + moved, [1, known.shape[1] - 1], dim=1)
            positions = taken(p["positions"], self.order[1 : self.maps + 1], 1)
            indicator = p["indicator"].permute(0, 2, 3, 1).reshape(len(modules), h * w, c)
            value = _turned(p["value.weight"])
            found = [
                *(self._channels_last(positions), self._channels_last(asked)[:, :, None], moved[:, :, None]),
                *(itself, zeros),
                indicator.flatten(1)[:, None].to(dtype),
                torch.bmm(indicator, value).flatten(1)[:, None].to(dtype),
                value.to(dtype),
                *_norm(p, "after_attention", dtype),
                _turned(p["ffn.0.weight"]).to(dtype),
                p["ffn.0.bias"][:, None].to(dtype),
                _turned(p["ffn.2.weight"]).to(dtype),
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
        c, h, w = self.shape
        g, m = len(laid.asked), self.maps
        with torch.autocast(maps[0].device.type, enabled=False):
            x = torch.stack([one.permute(0, 2, 3, 1) for one in maps])  # [g·m, n, h, w, c]
            n = x.shape[1]
            small = self._pooled(x, laid.positions.dtype).view(g, m, n, -1)
            tokens = F.layer_norm(small + laid.positions[:, :, None], small.shape[3:], eps=self._token_eps)
            logits = torch.baddbmm(laid.shift, tokens.view(g, m * n, -1), laid.asked).view(g, m, n)
            before, after = (part[:, :, None].expand(-1, -1, n) for part in (laid.itself, laid.zeros))
            attention = torch.softmax(torch.cat([before, logits, after], dim=1), dim=1)  # Eq 4, [g, tokens, n]
            to_itself, to_maps, _ = torch.split(attention.to(x.dtype), [1, m, laid.zeros.shape[1]], dim=1)
            total = (x.view(g, m, n, h * w, c) * to_maps[..., None, None]).sum(1)
            # The IT's own share of Z and the residual are W_v X_0 and X_0, which no image changes.
            base = torch.baddbmm(laid.own, to_itself.transpose(1, 2), laid.own_value)  # [g, n, h·w·c]
            total = product(total.view(g, -1, c), laid.value, base.view(g, -1, c)).view(g, n, h * w, c)
            total = self._normalised(total, laid.attention_scale, laid.attention_shift)
            inner = product(total.view(g, -1, c), laid.narrow, laid.narrow_bias)
            more = product(torch.relu(inner), laid.widen, laid.widen_bias)
            total = self._normalised(total + more.view_as(total), laid.ffn_scale, laid.ffn_shift)
        return total.view(g, n, h, w, c).permute(0, 1, 4, 2, 3), attention.transpose(1, 2)

    def _normalised(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """[g, n, h·w, c], every image by itself."""
        return scaled_and_shifted(F.layer_norm(x, x.shape[2:], eps=self._map_eps), scale, shift)

    def _pooled(self, x: Tensor, exact: torch.dtype) -> Tensor:
        """Maps [m, n, h, w, c] pooled to [m, n, d] in `exact`, channels last, as they come: nothing is moved."""
        (count, n, h, w, c), (rows, columns) = x.shape, self.sides
        if h % rows or w % columns:
            return self._channels_last(summaries(x, self.sides, exact))
        parts = x.view(count, n, rows, h // rows, columns, w // columns, c)
        return parts.mean(dim=(3, 5), dtype=exact).flatten(2)

    def _channels_last(self, x: Tensor) -> Tensor:
        """[…, d] with pooled values channel by channel, as `LiteTransformer` has them, to place by place."""
        return x.reshape(*x.shape[:-1], self.shape[0], -1).transpose(-1, -2).flatten(-2)


class _ScaledAndShifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return torch.addcmul(shift, x, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        both = (gradient * x).sum_to_size(scale.shape), gradient.sum_to_size(scale.shape)
        return gradient * scale, *both


def scaled_and_shifted(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x · scale + shift, scale and shift of one shape: in one operation, and in four backward.

    torch's own gradient of `addcmul` first multiplies either factor by a constant, which is 1: one more pass over x.
    """
    return _ScaledAndShifted.apply(x, scale, shift)  # type: ignore[no-any-return, no-untyped-call]


def _side_by_side(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters by name, those of all modules stacked: in one copy, whose gradient is one copy too."""
    tables = [dict(module.named_parameters()) for module in modules]
    shapes = {name: parameter.shape for name, parameter in tables[0].items()}
    flat = torch.cat([table[name].reshape(-1) for name in shapes for table in tables])
    pieces = torch.split(flat, [len(modules) * shape.numel() for shape in shapes.values()])
    return {name: piece.view(len(modules), *shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def _turned(weight: Tensor) -> Tensor:
    """Of 1×1 convolutions [f, out, in, 1, 1] to [f, in, out]."""
    return weight.flatten(2).transpose(1, 2)


def _norm(p: dict[str, Tensor], name: str, dtype: torch.dtype) -> list[Tensor]:
    """Scale and shift of group norms, each [f, 1, 1, c]."""
    return [p[f"{name}.{part}"][:, None, None].to(dtype) for part in ("weight", "bias")]
