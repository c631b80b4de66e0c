"""The Lite-Transformer of IT-NAS: an indicator token attends to feature maps, and its output replaces their sum.

A token is a feature map [c, h, w]; the indicator token (IT) is a learned one. Queries and keys are read off small
summaries of the maps, values stay maps:

    t_k = LayerNorm(pool(X_k) + p_k),  q = W_q t_0,  k_k = W_k t_k
    a   = softmax(q·K^T / √d_q)                          (Eq 3-4; a_0 is the IT's attention to itself)
    Z   = W_v Σ_k a_k X_k                                 (W_v commutes with the sum, so it is applied once)
    Y   = LN(X_0 + Z),  output = LN(Y + FFN(Y))

Only the IT's row is computed: nobody reads the other tokens' outputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from softcell.nn.pool import adaptive_windows

Shape = tuple[int, int, int]
NARROWING = 4
"""How many times fewer channels the feed-forward network has inside than outside."""


class LiteTransformer(nn.Module):
    """One encoder layer with a single head over the IT and up to `tokens` maps of `shape`, positions 1 to `tokens`.

    `pool`: side of the summary that queries and keys are read off; None reads the whole map. `width`: d_q. Without
    `values` there is attention alone (`attend`), for maps that are not put together here.
    """

    def __init__(
        self, shape: Shape, tokens: int, *, pool: int | None = 4, width: int = 64, values: bool = True
    ) -> None:
        super().__init__()
        c, h, w = shape
        self.shape, self.tokens, self.pool, self.has_values = shape, tokens, pool, values
        size = c * (h * w if pool is None else pool * pool)
        self.indicator = nn.Parameter(0.02 * torch.randn(c, h, w))
        self.positions = nn.Parameter(0.02 * torch.randn(tokens + 1, size))
        self.norm = nn.LayerNorm(size)
        self.query = nn.Linear(size, width, bias=False)
        self.key = nn.Linear(size, width, bias=False)  # a bias would shift all logits alike
        if values:
            inner = max(1, c // NARROWING)
            self.value = nn.Conv2d(c, c, 1, bias=False)
            with torch.no_grad():  # an edge starts as the attention's mean of its candidates
                self.value.weight.copy_(torch.eye(c)[:, :, None, None])
            self.after_attention, self.after_ffn = nn.GroupNorm(1, c), nn.GroupNorm(1, c)
            self.ffn = nn.Sequential(nn.Conv2d(c, inner, 1), nn.ReLU(), nn.Conv2d(inner, c, 1))

    def forward(self, outputs: Mapping[int, Tensor | None], attention_alone: bool = False) -> tuple[Tensor, ...]:
        """The IT's output [n, c, h, w] and its attention [n, tokens + 1] to itself and all candidates; or that alone.

        outputs: maps [n, c, h, w] by position (0 is the first candidate); None stands for zeros. Candidates that are
        not there take no part: their attention is 0.
        """
        attention = self.attend(outputs)
        return (attention,) if attention_alone else (self.combine(outputs, attention), attention)

    def attend(self, outputs: Mapping[int, Tensor | None]) -> Tensor:
        """a [n, tokens + 1], in float32 at least whatever the maps are in; all-zero columns for absent candidates."""
        like = _first(outputs)
        with torch.autocast(like.device.type, enabled=False):
            exact = self.positions.dtype  # float32 at least: weights are never kept shorter
            summaries = [self._summary(self.indicator[None], exact) + self.positions[0].to(exact)]
            for k, x in outputs.items():
                place = self.positions[k + 1].to(exact)[None]
                summaries.append(place if x is None else self._summary(x, exact) + place)
            n = like.shape[0]
            tokens = self.norm(torch.stack([s.expand(n, -1) for s in summaries[1:]], dim=1))  # [n, m, d]
            first = self.norm(summaries[0])  # [1, d]
            keys = torch.cat([self.key(first).expand(n, 1, -1), self.key(tokens)], dim=1)
            logits = (keys @ self.query(first)[0]) * keys.shape[-1] ** -0.5  # Eq 4: [n, m + 1]
            present = torch.softmax(logits, dim=1)
            if len(outputs) == self.tokens and all(k == i for i, k in enumerate(outputs)):
                return present
            absent = present.new_zeros(n)
            columns = {k: present[:, i + 1] for i, k in enumerate(outputs)}
            return torch.stack([present[:, 0], *(columns.get(k, absent) for k in range(self.tokens))], dim=1)

    def combine(self, outputs: Mapping[int, Tensor | None], attention: Tensor) -> Tensor:
        """The IT's output [n, c, h, w] given its attention [n, tokens + 1]."""
        like = _first(outputs)
        weights = attention.unbind(1)
        total = weights[0][:, None, None, None] * self.indicator
        for k, x in outputs.items():
            if x is not None:
                total = torch.addcmul(total, x.to(total.dtype), weights[k + 1][:, None, None, None])
        total = self.after_attention(self.indicator + self.value(total))
        output: Tensor = self.after_ffn(total + self.ffn(total))
        return output.to(like.dtype)

    def _summary(self, x: Tensor, exact: torch.dtype) -> Tensor:
        """[n, c, h, w], or [n, 1, h, w] or [n, c, h', w'] of a calibrating candidate, to [n, d] in `exact`."""
        (c, h, w), (n, own, *sides) = self.shape, x.shape
        rows, columns = (h, w) if self.pool is None else (self.pool, self.pool)
        if sides == [rows, columns]:
            small = x.to(exact)
        elif sides[0] % rows == 0 and sides[1] % columns == 0:
            small = x.reshape(n, own, rows, sides[0] // rows, columns, sides[1] // columns)
            small = small.mean(dim=(3, 5), dtype=exact)
        else:
            across = adaptive_windows(sides[0], rows, x.device, exact)
            along = adaptive_windows(sides[1], columns, x.device, exact)
            small = across @ x.to(exact) @ along.T
        return small.expand(n, c, rows, columns).reshape(n, -1)


def _first(outputs: Mapping[int, Tensor | None]) -> Tensor:
    found = next((x for x in outputs.values() if x is not None), None)
    assert found is not None, "tokens of zeros alone have no attention"
    return found
