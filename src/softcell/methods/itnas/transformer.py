"""The Lite-Transformer of IT-NAS: an indicator token attends to feature maps, and its output replaces their sum.

A token is a feature map [c, h, w]; the indicator token (IT) is a learned one. Queries and keys are read off small
summaries of the maps, values stay maps:

    t_k = LN(pool(X_k) + p_k),  q = W_q t_0,  k_k = W_k t_k        (without `token_norm`: t_k = pool(X_k) + p_k)
    a   = softmax(q·K^T / √d_q)                          (Eq 3-4; a_0 is the IT's attention to itself)
    Z   = W_v Σ_k a_k X_k                                 (W_v commutes with the sum, so it is applied once)
    Y   = LN(X_0 + Z),  output = LN(Y + FFN(Y))

Only the IT's row is computed: the other tokens' outputs are not used. Maps are stacked, channels last, so that a step
has few large operations instead of many small ones: on a GPU each costs a launch.

`LiteEnsemble` runs Lite-Transformers of one shape in one batch: those of all outgoing edges of a node run together.
Separately, each costs a GPU some thirty launches forward and sixty backward, no matter how small its maps are. Here the
weights of all Lite-Transformers of one shape are stacked once per step, and all that does not depend on images is
computed from them at once: the query, its product with the keys, the logits of the indicator token and of tokens of
zeros. Each group of edges then uses its part (`softcell.kernels.indicator`). Groups of one kind share a `LiteEnsemble`,
whichever cells they are in. The equations are those of `LiteTransformer`, which is the oracle in the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.kernels.indicator import (
    Form,
    Laid,
    indicate,
    indicate_again,
    indicate_by,
    normalised_tokens,
    runs_kernels,
    vector,
)
from softcell.nn.conv import adaptive_windows
from softcell.nn.exact import exact_product
from softcell.nn.stack import LARGEST

Shape = tuple[int, int, int]
NARROWING = 4
"""The feed-forward network has this many times fewer channels inside than outside."""


class LiteTransformer(nn.Module):
    """One encoder layer with a single head over the IT and up to `tokens` maps of `shape`, positions 1 to `tokens`.

    `pool`: side of the summary that queries and keys are read off; None reads the whole map. `width`: d_q. Without
    `values` there is only attention (`attend`), for maps that are combined elsewhere. `token_norm`: a LayerNorm
    on the tokens before queries and keys; without it the encoder is post-norm, as in the paper. Without
    `learned_values` W_v stays the identity, without `feed_forward` the feed-forward network stays 0: an edge then has
    no convolution that could do a candidate's work.
    """

    def __init__(
        self,
        shape: Shape,
        tokens: int,
        *,
        pool: int | None = 4,
        width: int = 64,
        values: bool = True,
        token_norm: bool = True,
        learned_values: bool = True,
        feed_forward: bool = True,
    ) -> None:
        super().__init__()
        c, h, w = shape
        self.shape, self.tokens, self.pool = shape, tokens, pool
        size = c * (h * w if pool is None else pool * pool)
        self.indicator = nn.Parameter(0.02 * torch.randn(c, h, w))
        self.positions = nn.Parameter(0.02 * torch.randn(tokens + 1, size))
        self.norm = nn.LayerNorm(size) if token_norm else None
        self.query = nn.Linear(size, width, bias=False)
        self.key = nn.Linear(size, width, bias=False)  # a bias would shift all logits equally
        if values:
            inner = max(1, c // NARROWING)
            self.value = nn.Conv2d(c, c, 1, bias=False)
            with torch.no_grad():  # an edge starts as the attention's mean of its candidates
                self.value.weight.copy_(torch.eye(c)[:, :, None, None])
            self.after_attention, self.after_ffn = nn.GroupNorm(1, c), nn.GroupNorm(1, c)
            self.ffn = nn.Sequential(nn.Conv2d(c, inner, 1), nn.ReLU(), nn.Conv2d(inner, c, 1))
            self.value.requires_grad_(learned_values)
            self.ffn.requires_grad_(feed_forward)
            if not feed_forward:
                for parameter in self.ffn[2].parameters():
                    nn.init.zeros_(parameter)

    def forward(self, outputs: Mapping[int, Tensor | None], attention_alone: bool = False) -> tuple[Tensor, ...]:
        """The IT's output [n, c, h, w] and its attention [n, tokens + 1] to itself and all candidates; or that alone.

        outputs: maps [n, c, h, w] by position (0 is the first candidate); None means zeros. Candidates that are
        missing are ignored: their attention is 0.
        """
        if attention_alone:
            return (self.attend(outputs),)
        maps = self._stacked([x for x in outputs.values() if x is not None])
        weights = self._attention(self._summaries(maps[:, 1:]), order_of(outputs))
        return self.combine(maps, weights), by_position(weights, order_of(outputs), self.tokens)

    def attend(self, outputs: Mapping[int, Tensor | None]) -> Tensor:
        """a [n, tokens + 1], at least in float32; 0 for absent candidates."""
        present = [x for x in outputs.values() if x is not None]
        assert present, "tokens of zeros alone have no attention"
        if all(x.shape[1:] == self.shape for x in present):
            summaries = self._summaries(self._stacked(present)[:, 1:])
        else:
            summaries = torch.stack([self._summary(x) for x in present], dim=1)
        return by_position(self._attention(summaries, order_of(outputs)), order_of(outputs), self.tokens)

    def _attention(self, summaries: Tensor, order: Sequence[int]) -> Tensor:
        """a [n, tokens that are there] from the summaries [n, m, d] of the maps.

        order: the positions of all tokens that are there: the IT, the maps and, last, those of zeros.
        """
        n, m, d = summaries.shape
        with torch.autocast(summaries.device.type, enabled=False):
            parts = [self._summary(self.indicator[None]).expand(n, 1, d), summaries]
            if len(order) > m + 1:
                parts.append(summaries.new_zeros(1).expand(n, len(order) - m - 1, d))
            tokens = torch.cat(parts, dim=1) + taken(self.positions, order)
            if self.norm is not None:
                tokens = self.norm(tokens)
            # q·(W_k t) = (W_k^T q)·t: tokens are multiplied by a vector instead of a matrix. The IT's token is the same
            # for all images.
            asked = exact_product(self.key.weight.T, exact_product(self.query.weight, tokens[0, 0][:, None]))
            met = exact_product(tokens, asked)[..., 0]
            return torch.softmax(met * self.query.out_features**-0.5, dim=1)  # Eq 4

    def combine(self, maps: Tensor, weights: Tensor) -> Tensor:
        """The IT's output [n, c, h, w], given maps [n, m + 1, h, w, c] that begin with its own, and its attention."""
        n, m, h, w, c = maps.shape
        with torch.autocast(maps.device.type, enabled=False):  # in the maps' own precision from here to the end
            # Tokens of zeros are last (`order_of`) and add nothing.
            short = weights[:, None, :m].to(maps.dtype)
            total = torch.bmm(short, maps.view(n, m, -1)).view(n, h * w, c)
            value = self.value.weight.flatten(1).T.to(maps.dtype)
            own = self.indicator.to(maps.dtype).permute(1, 2, 0).reshape(1, h * w, c)
            # X_0 + W_v Σ a_k X_k
            total = torch.baddbmm(own, total, value.expand(n, c, c))
            total = normalised(total, self.after_attention, written_out=maps.is_cuda)
            inner = torch.relu(_pointwise(total, self.ffn[0]))
            total = normalised(total + _pointwise(inner, self.ffn[2]), self.after_ffn, written_out=maps.is_cuda)
        return total.view(n, h, w, c).permute(0, 3, 1, 2)

    def _stacked(self, maps: Sequence[Tensor]) -> Tensor:
        """The IT's map and others [n, c, h, w] as one tensor [n, m + 1, h, w, c]."""
        first = self.indicator.to(maps[0].dtype).expand(maps[0].shape)
        return torch.stack([x.permute(0, 2, 3, 1) for x in (first, *maps)], dim=1)

    def _summaries(self, maps: Tensor) -> Tensor:
        """[n, m, h, w, c] to [n, m, d] in the precision of the positions."""
        return summaries(maps, self.sides, self.positions.dtype)

    def _summary(self, x: Tensor) -> Tensor:
        """[n, c, h, w], or [n, 1, h, w] or [n, c, h', w'] of a calibrating candidate, to [n, d], as exact as that."""
        return summary(x, self.shape[0], self.sides, self.positions.dtype)

    @property
    def token_eps(self) -> float | None:
        """The epsilon of the tokens' norm; None where tokens are not normalised."""
        return None if self.norm is None else self.norm.eps

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the summaries."""
        return self.shape[1:] if self.pool is None else (self.pool, self.pool)


def summaries(maps: Tensor, sides: tuple[int, int], exact: torch.dtype) -> Tensor:
    """Maps [n, m, h, w, c] pooled to `sides` and laid flat, [n, m, d] in `exact`."""
    n, m, h, w, c = maps.shape
    rows, columns = sides
    if h % rows or w % columns:
        return summary(maps.permute(0, 1, 4, 2, 3).reshape(n * m, c, h, w), c, sides, exact).view(n, m, -1)
    small = maps.view(n, m, rows, h // rows, columns, w // columns, c)
    small = small.mean(dim=(3, 5), dtype=exact)
    return small.permute(0, 1, 4, 2, 3).reshape(n, m, -1)


def summary(x: Tensor, channels: int, sides: tuple[int, int], exact: torch.dtype) -> Tensor:
    """[n, channels or 1, h, w] of any resolution to [n, d] in `exact`."""
    n, own, *given = x.shape
    rows, columns = sides
    if given == [rows, columns]:
        small = x.to(exact)
    elif given[0] % rows == 0 and given[1] % columns == 0:
        small = x.reshape(n, own, rows, given[0] // rows, columns, given[1] // columns)
        small = small.mean(dim=(3, 5), dtype=exact)
    else:
        across = adaptive_windows(given[0], rows, x.device, exact)
        along = adaptive_windows(given[1], columns, x.device, exact)
        small = exact_product(exact_product(across, x.to(exact)), along.T)
    return small.expand(n, channels, rows, columns).reshape(n, -1)


def by_position(weights: Tensor, order: Sequence[int], tokens: int) -> Tensor:
    """Attention [n, tokens that are there], in their `order`, to [n, tokens + 1]: 0 for those that are not."""
    columns = dict(zip(order, weights.unbind(1), strict=True))
    absent = weights.new_zeros(1).expand(weights.shape[0]) if len(order) <= tokens else None
    return torch.stack([columns.get(k, absent) for k in range(tokens + 1)], dim=1)  # type: ignore[misc]


def order_of(outputs: Mapping[int, object | None]) -> list[int]:
    """The positions of the IT, of the maps, and of tokens of zeros."""
    maps = [k + 1 for k, x in outputs.items() if x is not None]
    return [0, *maps, *(k + 1 for k, x in outputs.items() if x is None)]


def taken(x: Tensor, wanted: Sequence[int], dim: int = 0) -> Tensor:
    """Entries of a dimension, in runs: an index tensor would have to be copied to the device first."""
    runs: list[list[int]] = []
    for k in wanted:
        if runs and runs[-1][1] == k:
            runs[-1][1] = k + 1
        else:
            runs.append([k, k + 1])
    parts = [x.narrow(dim, start, end - start) for start, end in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _pointwise(x: Tensor, layer: nn.Module) -> Tensor:
    """A 1×1 convolution of [n, h·w, c], as the linear layer that it is."""
    assert isinstance(layer, nn.Conv2d) and layer.bias is not None
    return F.linear(x, layer.weight.flatten(1).to(x.dtype), layer.bias.to(x.dtype))


def normalised(x: Tensor, norm: nn.GroupNorm, *, written_out: bool) -> Tensor:
    """`norm` of tokens [n, h·w, c], which are channels-last: group norm would copy them on a GPU.

    written_out: scale and shift, one per channel, are laid out for all places, and layer norm applies them and sums
    their gradients in its own passes: fewer operations, which pays on a GPU, but not on a CPU.
    """
    scale, shift = norm.weight.to(x.dtype), norm.bias.to(x.dtype)
    if written_out:
        return F.layer_norm(x, x.shape[1:], scale.expand(x.shape[1:]), shift.expand(x.shape[1:]), norm.eps)
    return torch.addcmul(shift, F.layer_norm(x, x.shape[1:], eps=norm.eps), scale)


class LiteEnsemble(nn.Module):
    """The Lite-Transformers of one shape whose tokens are in the same order, group by group.

    groups: each the Lite-Transformers of a group, all with values. order: positions of the IT, of the maps and of
    tokens of zeros, as returned by `order_of`. maps: how many maps there are.
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

    def runs_whole(self, maps: Sequence[Tensor], dtype: torch.dtype) -> bool:
        """Whether kernels run on these maps, stacked in `dtype`: they return gradients of all weights in one piece."""
        n, c, h, w = maps[0].shape
        return runs_kernels(maps[0].new_empty((), dtype=dtype).expand(1, n, h, w, c), self._form)

    def lay(self, dtype: torch.dtype) -> list[Laid]:
        """The stacked weights of each group, for maps in `dtype`."""
        fields = self._fields()
        return self._by_group([x.to(_dtype_of(name, x, dtype)).contiguous() for name, x in fields._asdict().items()])

    def lay_whole(self, dtype: torch.dtype) -> list[tuple[Laid, Tensor | None]]:
        """`lay` without gradients, which flow through the `vector` of each group instead; None: there are none.

        Weights are converted by one launch, and the gradients of all groups joined by one.
        """
        fields = self._fields()
        with torch.no_grad():
            parts = {name: x.detach().contiguous() for name, x in fields._asdict().items()}
            low = {name: x for name, x in parts.items() if x.dtype != _dtype_of(name, x, dtype)}
            if low:
                made = {name: torch.empty_like(x, dtype=dtype) for name, x in low.items()}
                torch._foreach_copy_(list(made.values()), list(low.values()))
                parts |= made
            groups = self._by_group(list(parts.values()))
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in fields)):
            return [(laid, None) for laid in groups]
        return list(zip(groups, torch.split(vector(fields), [len(group) for group in self._groups]), strict=True))

    def _by_group(self, fields: Sequence[Tensor]) -> list[Laid]:
        sizes = [len(group) for group in self._groups]
        # Split, not sliced: the gradients of all groups then come back in one piece.
        return [Laid(*pieces) for pieces in zip(*(torch.split(x, sizes) for x in fields), strict=True)]

    def _fields(self) -> Laid:
        """The fields of all groups, one group after the other, in the precision of the weights."""
        modules = [module for group in self._groups for module in group]
        first = modules[0]
        (c, h, w), width = first.shape, first.query.out_features
        with torch.autocast(first.positions.device.type, enabled=False):
            p = _side_by_side(modules)
            own = summary(p["indicator"], c, self.sides, p["positions"].dtype)
            first_token = normalised_tokens(own + p["positions"][:, 0], self._form.token_eps)
            normed = self._form.token_eps is not None
            token = torch.addcmul(p["norm.bias"], first_token, p["norm.weight"]) if normed else first_token
            query = exact_product(p["query.weight"], token[:, :, None])
            met = exact_product(p["key.weight"].transpose(1, 2), query)[:, :, 0] * width**-0.5
            if normed:
                # (scale ⊙ t̂ + shift)·met = t̂·(scale ⊙ met) + shift·met: t̂ is needed without its scale and shift.
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
            (scale, shift), (last_scale, last_shift) = _norm(p, "after_attention"), _norm(p, "after_ffn")
            return Laid(
                positions=self._channels_last(positions),
                asked=self._channels_last(asked)[:, :, None],
                shift=moved[:, :, None],
                itself=itself,
                zeros=zeros,
                own=indicator.flatten(1)[:, None],
                own_value=exact_product(indicator, value).flatten(1)[:, None],
                value=value,
                attention_scale=scale,
                attention_shift=shift,
                narrow=_transposed(p["ffn.0.weight"]),
                narrow_bias=p["ffn.0.bias"][:, None],
                widen=_transposed(p["ffn.2.weight"]),
                widen_bias=p["ffn.2.bias"][:, None],
                ffn_scale=last_scale,
                ffn_shift=last_shift,
            )

    def forward(
        self, laid: Laid, maps: Sequence[Tensor], whole: Tensor | None = None, again: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The ITs' outputs [g, n, c, h, w] and attention [g, n, tokens in their order].

        maps: those of the first Lite-Transformer of the group, then those of the next, each [n, c, h, w]. whole: from
        `lay_whole`. again: keep only the maps for the backward pass. Both are for maps with `runs_whole`.
        """
        with torch.autocast(maps[0].device.type, enabled=False):
            rows = [one.permute(0, 2, 3, 1) for one in maps]
            if again and torch.is_grad_enabled():
                total, attention = indicate_again(rows, laid, self._form, whole)
                return total.permute(0, 1, 4, 2, 3), attention
            x = torch.stack(rows)  # [g·m, n, h, w, c]
            if self.shape[1] % self.sides[0] or self.shape[2] % self.sides[1]:  # windows that overlap
                small = self._channels_last(summaries(x, self.sides, laid.positions.dtype))
                total, attention = indicate_by(small, x, laid, self._form)
            else:
                total, attention = indicate(x, laid, self._form, whole)
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


def _norm(p: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Scale and shift of group norms, each [f, 1, 1, c]."""
    return p[f"{name}.weight"][:, None, None], p[f"{name}.bias"][:, None, None]


def _dtype_of(field: str, x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a field of `Laid` for maps in `dtype`; x: its values. What makes the logits keeps their dtype."""
    return dtype if Laid._fields.index(field) >= Laid._fields.index("own") else x.dtype


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
