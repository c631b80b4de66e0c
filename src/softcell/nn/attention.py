"""Local multi-head self-attention with relative positions, and non-local self-attention (full-attention NAS, §III-A).

Local (Ramachandran et al.: Stand-Alone Self-Attention in Vision Models, NeurIPS 2019): a pixel attends to the k × k
pixels around it. With queries q, keys k and values v of one head, and r = row embedding + column embedding,

    y_ij = Σ_ab softmax_ab( q_ij·k_ab + q_ij·r_{a-i,b-j} ) v_ab

where a, b run over those of the k × k neighbours that are inside the image; pixels outside are ignored. As in that
paper the logits are not divided by √d. Non-local (Wang et al.: Non-Local Neural Networks, CVPR 2018, embedded
Gaussian): one head, every position attends to all, no positions.

A neighbourhood is never copied (`softcell.kernels.local`). On a CPU, maps so small that a neighbourhood is a good part
of them (h·w <= 4·k², or 8×8) are computed from all pairs of pixels by matrix products; pairs too far apart are masked.
Queries, keys and values are one convolution with the weights of the three.

The candidates of full-attention NAS (Table II) are bottlenecks around such an attention (Figure 1 c, d):

    linear -> ReLU -> attention -> ReLU -> linear (-> average pool where stride is 2), plus a shortcut

The inner width is half the outer one. A norm follows each linear layer; with `Spec.norm=False` a bias replaces it. The
shortcut is the identity, average-pooled where stride is 2, with a 1×1 convolution where the width changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from softcell.errors import UserError
from softcell.kernels.backend import runs_triton
from softcell.kernels.local import attend_by_shifts, attend_packed, unpacked
from softcell.nn.candidates import Spec, candidate
from softcell.nn.conv import AveragePool
from softcell.nn.norm import BatchNorm2d

EXTENTS = (3, 5, 7)
HEADS = (4, 8)
DENSE = 4
"""Maps of at most this many neighbourhoods are computed from all pairs of pixels."""
SMALL = 64
"""Maps of at most this many pixels are computed from all pairs, too."""
# Not empty within `shifts_only`; a list, so that contexts nest.
_SHIFTS_ONLY: list[bool] = []


@contextmanager
def shifts_only() -> Iterator[None]:
    """Within this context maps of any size use shifted views, whose products `uncounted` counts."""
    _SHIFTS_ONLY.append(True)
    try:
        yield
    finally:
        _SHIFTS_ONLY.pop()


def attend_local(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """q, k, v [n, heads, d, h, w] and embeddings [heads, d, extent] to [n, heads, d, h, w]."""
    rows, columns = rows.to(q.dtype), columns.to(q.dtype)
    if q.shape[-2] * q.shape[-1] <= max(SMALL, DENSE * rows.shape[-1] ** 2) and not _SHIFTS_ONLY:
        return _attend_dense(q, k, v, rows, columns)
    if torch.is_grad_enabled():
        return attend_by_shifts(q, k, v, rows, columns)
    return _attend_shifted(q, k, v, rows, columns)


def _attend_shifted(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`attend_local` without writing in place: for use without gradients, where a graph of it may be exported."""
    extent, (height, width) = rows.shape[-1], q.shape[-2:]
    reach = extent // 2
    around = (reach, reach, reach, reach)
    keys, values = F.pad(k, around), F.pad(v, around)
    # Keys of the padding are 0, which would give logits of 0: pixels outside must get -inf.
    inside = F.pad(torch.ones(height, width, dtype=q.dtype, device=q.device), around)
    by_row = torch.einsum("nedhw,edk->nekhw", q, rows)
    by_column = torch.einsum("nedhw,edk->nekhw", q, columns)
    offsets = [(dy, dx) for dy in range(extent) for dx in range(extent)]
    logits = torch.stack(
        [
            ((q * keys[..., dy : dy + height, dx : dx + width]).sum(2) + by_row[:, :, dy] + by_column[:, :, dx])
            .to(torch.promote_types(q.dtype, torch.float32))
            .masked_fill(inside[dy : dy + height, dx : dx + width] == 0, -torch.inf)
            for dy, dx in offsets
        ],
        2,
    )
    weights = torch.softmax(logits, 2)
    y = torch.zeros_like(q, dtype=weights.dtype)
    for number, (dy, dx) in enumerate(offsets):
        y = y + weights[:, :, number, None] * values[..., dy : dy + height, dx : dx + width]
    return y.to(v.dtype)


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`attend_local` from all pairs of pixels [n, heads, h·w, h·w]."""
    height, width = q.shape[-2:]
    exact = torch.promote_types(q.dtype, torch.float32)
    # [n, heads, i, j, a] and [n, heads, i, j, b]: what the row and the column of a neighbour add.
    by_row = torch.einsum("nedij,edia->neija", q, _lined_up(rows, height))
    by_column = torch.einsum("nedij,edjb->neijb", q, _lined_up(columns, width))
    dots = (q.flatten(3).transpose(2, 3) @ k.flatten(3)).unflatten(3, (height, width))  # type: ignore[no-untyped-call]
    positions = (by_row[..., None] + by_column[..., None, :]).flatten(2, 3)
    reach = rows.shape[-1] // 2
    near = _near(height, reach, q.device)[:, None, :, None] & _near(width, reach, q.device)[None, :, None, :]
    logits = (dots + positions).to(exact).masked_fill(~near.flatten(0, 1), -torch.inf)
    weights = torch.softmax(logits.flatten(3), 3).to(v.dtype)
    return (v.flatten(3) @ weights.transpose(2, 3)).unflatten(3, (height, width))  # type: ignore[no-any-return, no-untyped-call]


def _lined_up(embeddings: Tensor, side: int) -> Tensor:
    """[heads, d, extent] to those from each of `side` positions i to each a, [heads, d, i, a]; 0 beyond the extent."""
    reach = embeddings.shape[-1] // 2
    wide = F.pad(embeddings, (side, side))
    # Entry a of slice i is embedding a - i + reach, or padding.
    return torch.stack([wide[..., side + reach - i : 2 * side + reach - i] for i in range(side)], 2)


def _near(side: int, reach: int, device: torch.device) -> Tensor:
    """Whether positions of a line are within reach of each other: bool [side, side]."""
    positions = torch.arange(side, device=device)
    return (positions[:, None] - positions[None]).abs() <= reach


def _check_heads(width: int, heads: int) -> None:
    """Raises `UserError` unless every head gets equally many of the `width` channels, at least one."""
    if width % heads or width < heads:
        raise UserError(
            f"`heads` must divide the width of attention, but got {heads} heads for {width} channels (half of the "
            f"block's {2 * width}); use a multiple of {2 * heads} channels, or candidates with fewer heads"
        )


class Attention(nn.Module):
    """Common parts of both kinds: 1×1 projections to queries, keys and values, and one of the result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.queries, self.keys, self.values, self.project = (nn.Conv2d(width, width, 1, bias=False) for _ in range(4))

    def packed(self, x: Tensor) -> Tensor:
        """Queries, keys and values of [n, width, h, w], concatenated: [n, 3·width, h, w]."""
        return F.conv2d(x, torch.cat([part.weight for part in (self.queries, self.keys, self.values)]))

    def embeddings(self) -> tuple[Tensor, ...]:
        """Further inputs of `attend`, in addition to queries, keys and values."""
        return ()

    def attend(self, packed: Tensor, *embeddings: Tensor) -> Tensor:
        """[n, 3·width, h, w] to [n, width, h, w]"""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[n, width, h, w] to the same."""
        return self.project(self.attend(self.packed(x), *self.embeddings()))  # type: ignore[no-any-return]

    def uncounted(self, height: int, width: int) -> int:
        """Multiply-adds for one image outside of convolutions and matrix products."""
        return 0


_FUSED: list[Callable[[Tensor, Tensor, Tensor], Tensor | None]] = []
"""Faster forms, tried first: packed maps and embeddings to [n, c, h, w], or None. Exported networks have none."""


def _by_triton(packed: Tensor, rows: Tensor, columns: Tensor) -> Tensor | None:
    return attend_packed(packed, rows, columns) if runs_triton(packed) else None


_FUSED.append(_by_triton)


class LocalAttention(Attention):
    """[n, width, h, w] to the same: `heads` heads over `extent` × `extent` pixels; borders see fewer of them."""

    def __init__(self, width: int, extent: int, heads: int) -> None:
        _check_heads(width, heads)
        if extent < 1 or extent % 2 == 0:
            raise UserError(f"the extent of local attention must be odd, so that a pixel is its centre, got {extent}")
        super().__init__(width)
        self.extent, self.heads = extent, heads
        # Row and column embeddings of the full head dimension, added; the head dimension may be 1.
        size = (heads, width // heads, extent)
        self.rows, self.columns = (nn.Parameter(torch.randn(size) * 0.02) for _ in range(2))

    def embeddings(self) -> tuple[Tensor, ...]:
        return self.rows, self.columns

    def attend(self, packed: Tensor, *embeddings: Tensor) -> Tensor:
        for fused in _FUSED:
            y = fused(packed, *embeddings)
            if y is not None:
                return y
        # Plane by plane: a shifted view then is rows of neighbours in memory, not single numbers.
        y = attend_local(*unpacked(packed.contiguous(), self.heads), *embeddings)
        return y.flatten(1, 2)

    def uncounted(self, height: int, width: int) -> int:
        """Logits and weighted values of all neighbours; those of positions are products of matrices."""
        down, across = (sum(_reached(self.extent, side)) for side in (height, width))
        return 2 * self.width * down * across


def _reached(extent: int, side: int) -> Iterator[int]:
    """For every pixel of a line the number of its neighbours on it."""
    reach = extent // 2
    return (min(side, i + reach + 1) - max(0, i - reach) for i in range(side))


TRUSTED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""torch's backends except cuDNN's, its first choice on Hopper since torch 2.11, which returns NaN for some gradients
(pytorch issue 196678, cudnn-frontend issues 160 and 1072); it probably ended a search on an H200.
"""


class NonLocalAttention(Attention):
    """[n, width, h, w] to the same: every position attends to all, by torch's own fused attention."""

    def attend(self, packed: Tensor, *embeddings: Tensor) -> Tensor:
        return self.attend_rows(*packed.permute(0, 2, 3, 1).chunk(3, 3)).permute(0, 3, 1, 2)

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [n, h, w, width] to the same."""
        with sdpa_kernel(TRUSTED) if q.is_cuda else nullcontext():
            # [n, 1, h·w, c]; the embedded Gaussian has no 1/√d
            q_rows, k_rows, v_rows = (part.flatten(1, 2)[:, None] for part in (q, k, v))
            y = F.scaled_dot_product_attention(q_rows, k_rows, v_rows, scale=1.0)
        # Not y[:, 0], whose gradient would be a copy into zeros.
        return y.squeeze(1).reshape(q.shape)


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
