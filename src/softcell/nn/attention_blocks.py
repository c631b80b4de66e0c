"""The seven candidate blocks of full-attention NAS (Table II): bottlenecks around a self-attention (Figure 1 c, d).

    linear -> ReLU -> attention -> ReLU -> linear (-> average pool where stride is 2), plus a shortcut

The inner width is half the outer one. A norm follows each linear layer; `Spec.norm=False` leaves it out (its place is
taken by a bias). The shortcut is the identity, average-pooled where stride is 2, with a 1×1 convolution where the width
changes.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from softcell.errors import UserError
from softcell.nn.attention_local import Attention, LocalAttention, NonLocalAttention
from softcell.nn.candidates import Spec, candidate
from softcell.nn.norm import BatchNorm2d
from softcell.nn.pool import AveragePool

EXTENTS = (3, 5, 7)
HEADS = (4, 8)


class AttentionBlock(nn.Module):
    """[n, c_in, h, w] to [n, channels, ⌈h/stride⌉, ⌈w/stride⌉]; `make` builds the attention for the inner width."""

    def __init__(self, spec: Spec, make: Callable[[int], Attention]) -> None:
        super().__init__()
        if spec.channels % 2:
            raise UserError(f"a block of attention needs an even number of channels, but got {spec.channels}")
        inner = spec.channels // 2
        self.reduce = _linear(spec.c_in, inner, spec)
        self.attention = make(inner)
        self.expand = _linear(inner, spec.channels, spec)
        self.relu = nn.ReLU()
        self.pool = _pool(spec.stride)
        self.widen = nn.Identity() if spec.c_in == spec.channels else _linear(spec.c_in, spec.channels, spec)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.attention(self.relu(self.reduce(x))))
        return self.pool(self.expand(y)) + self.widen(self.pool(x))  # type: ignore[no-any-return]


def _linear(c_in: int, c_out: int, spec: Spec) -> nn.Module:
    if not spec.norm:
        return nn.Conv2d(c_in, c_out, 1)
    return nn.Sequential(nn.Conv2d(c_in, c_out, 1, bias=False), BatchNorm2d(c_out, affine=spec.affine))


def _pool(stride: int) -> nn.Module:
    # ceil_mode: sizes are halved by rounding up, as everywhere; a window at an odd border is the mean of what it has
    return nn.Identity() if stride == 1 else AveragePool(stride, stride, ceil_mode=True, count_include_pad=False)


def local_block(spec: Spec, extent: int, heads: int) -> AttentionBlock:
    return AttentionBlock(spec, lambda width: LocalAttention(width, extent, heads))


def local_name(extent: int, heads: int) -> str:
    return f"local_sa_k{extent}_h{heads}"


def _register(extent: int, heads: int) -> None:
    @candidate(local_name(extent, heads), widens=True, multiple=2 * heads)
    def build(spec: Spec) -> nn.Module:
        return local_block(spec, extent, heads)


for _extent in EXTENTS:
    for _heads in HEADS:
        _register(_extent, _heads)


@candidate("non_local_sa", widens=True, multiple=2)
def non_local_sa(spec: Spec) -> nn.Module:
    return AttentionBlock(spec, NonLocalAttention)
