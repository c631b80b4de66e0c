"""Attentions and dynamic kernels that read the same map, run together: weights stacked, one pass for each stage.

A GPU needs 3-4 µs to launch a kernel, and each of these modules launches many small ones. Together all modules of a
node launch little more than one of them does. Maps are read as rows [n·h·w, c], the memory order of channels-last.

    channel attentions                one mean, one product to all hidden channels, one batched product back
    spatial attentions and kernels    one product to all hidden channels, one norm
    spatial attentions                one grouped convolution
    dynamic kernels                   one kernel of ours where it fits (`softcell.kernels.dynamic`); else one product to
                                      all scores and one softmax over h·w, whatever their sizes; one product of all
                                      hidden channels with all scores, although a module needs only its own block:
                                      arithmetic is cheaper than launches; the rest once per size
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.kernels.backend import is_wanted
from softcell.kernels.dynamic import dynamic_kernels, fits
from softcell.nn.calibrate import ChannelAttention, DynamicKernel, SpatialAttention
from softcell.nn.norm import BatchNorm2d
from softcell.nn.stack import flat, grouped, has_hooks, norm_key, normalise

LARGEST = 2**20
"""Elements of an input up to which running them together was faster on a CPU."""

KINDS = (DynamicKernel, SpatialAttention, ChannelAttention)
CHANNEL = "channel"
Normed = DynamicKernel | SpatialAttention


def grouping_calibrations_pays(x: Tensor) -> bool:
    """Whether calibrations on `x` should run together; a compiler groups modules in its own way."""
    return not torch.compiler.is_compiling() and (x.device.type != "cpu" or x.numel() <= LARGEST)


def family(module: nn.Module | None) -> tuple[Hashable, ...] | None:
    """A key that modules whose weights can be stacked share; None for a module that must run separately.

    Modules of one key have one size; those that share its first item use one norm.
    """
    if module is None or type(module) not in KINDS or has_hooks(module):
        return None
    if isinstance(module, ChannelAttention):
        return CHANNEL, module.squeeze.out_channels
    assert isinstance(module, DynamicKernel | SpatialAttention)
    kind = norm_key(module.norm) if type(module.norm) is BatchNorm2d else None
    if kind is None:
        return None
    size = module.size if isinstance(module, DynamicKernel) else 0
    return (_entrance(module).stride, kind), size, module.norm.num_features


def run_calibrations(modules: Iterable[nn.Module | None], x: Tensor, least: int = 2) -> dict[int, Tensor]:
    """The result of each module for x [n, c, h, w], by its id; those that must run separately are skipped.

    least: the fewest modules that run together.
    """
    families = grouped(modules, family)
    if sum(map(len, families.values())) < least:
        return {}
    groups: dict[Hashable, list[list[Any]]] = {}
    for key, own in families.items():
        groups.setdefault(key[0], []).append(list(own.values()))
    channel = groups.pop(CHANNEL, [])
    normed = [_Normed(group) for group in groups.values()]
    # One cast here instead of one by autocast for every module.
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    x = x if dtype is None else x.to(dtype)
    stacks = [[m.squeeze for m in own] for own in channel] + [[m.excite for m in own] for own in channel]
    weights = _Weights([*stacks, *(stack for one in normed for stack in one.stacks())], dtype)
    made: dict[int, Tensor] = {}
    if channel:
        mean = _mean(x)
        for alike in channel:
            made |= _by_id(alike, _channel_attentions(alike, mean, weights))
    for one in normed:
        made |= one.run(x, weights)
    return made


class _Weights:
    """Stacked weights of lists of convolutions: views of one tensor, known by the first of each list."""

    def __init__(self, lists: Sequence[Sequence[nn.Conv2d]], dtype: torch.dtype | None) -> None:
        vector = flat([conv.weight for convs in lists for conv in convs], dtype)
        parts = torch.split(vector, [sum(conv.weight.numel() for conv in convs) for convs in lists])
        self._parts: dict[int, Tensor] = {id(convs[0]): part for convs, part in zip(lists, parts, strict=True)}

    def of(self, first: nn.Conv2d) -> Tensor:
        """[count · c_out, k, k, c_in] of the list that begins with `first`; without k, k where they are 1."""
        _, c_in, size, _ = first.weight.shape
        shape = (-1, c_in) if size == 1 else (-1, size, size, c_in)
        return self._parts[id(first)].view(shape)


def _mean(x: Tensor) -> Tensor:
    """x [n, c, h, w] to [n, c]."""
    return _Mean.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _Mean(torch.autograd.Function):
    """Plain autograd divides the gradient after it has expanded it: one more pass over a map, in the wrong layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return torch.mean(x, dim=(2, 3))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        n, c, height, width = ctx.shape
        small: Tensor = gradient / (height * width)
        return small[:, :, None, None].expand(n, c, height, width)


def _channel_attentions(modules: Sequence[ChannelAttention], mean: Tensor, weights: _Weights) -> Tensor:
    """mean [n, c] to [count, n, c, 1, 1]"""
    (n, c), count = mean.shape, len(modules)
    hidden = F.relu(F.linear(mean, weights.of(modules[0].squeeze)))  # [n, count · c/16]
    back = weights.of(modules[0].excite).view(count, c, -1)
    y = torch.bmm(hidden.view(n, count, -1).transpose(0, 1), back.transpose(1, 2))
    return torch.sigmoid(y)[..., None, None]


class _Normed:
    """Kernels and spatial attentions, each list of one shape, that go through one norm."""

    def __init__(self, families: Sequence[list[Any]]) -> None:
        self._kernels: list[list[DynamicKernel]] = [own for own in families if isinstance(own[0], DynamicKernel)]
        self._spatial: list[list[SpatialAttention]] = [own for own in families if isinstance(own[0], SpatialAttention)]
        self._all: list[Normed] = [*chain(*self._kernels), *chain(*self._spatial)]

    def stacks(self) -> Iterator[list[nn.Conv2d]]:
        yield [_entrance(module) for module in self._all]
        if self._kernels:
            yield [module.score for module in chain(*self._kernels)]
        yield from ([module.decode for module in own] for own in self._decoded())
        for spatial in self._spatial:
            yield [module.gather for module in spatial]

    def _decoded(self) -> list[list[DynamicKernel]]:
        """Kernels whose last weights have one shape: as a rule all of them."""
        alike = len({module.norm.num_features for module in chain(*self._kernels)}) == 1
        return [[*chain(*self._kernels)]] if alike else self._kernels

    def run(self, x: Tensor, weights: _Weights) -> dict[int, Tensor]:
        first = _entrance(self._all[0])
        y = _pointwise(x, weights.of(first), first.stride)
        y = F.relu(normalise(y, [module.norm for module in self._all]))
        kernels: list[list[Any]] = [[*chain(*self._kernels)]] if self._kernels else []
        widths = [sum(module.norm.num_features for module in own) for own in [*kernels, *self._spatial]]
        # As rows: their gradients are then concatenated as rows too, the layout that norms read.
        rows = y.permute(0, 2, 3, 1).flatten(1, 2)
        parts = [*torch.split(rows, widths, dim=2)] if len(widths) > 1 else [rows]
        made = self._make_kernels(x, parts.pop(0), weights) if self._kernels else {}
        for own, hidden in zip(self._spatial, parts, strict=True):
            gather = weights.of(own[0].gather).permute(0, 3, 1, 2)
            image = hidden.transpose(1, 2).reshape(len(y), -1, *y.shape[2:])
            maps = torch.sigmoid(F.conv2d(image, gather, padding=1, groups=len(own)))
            made |= _by_id(own, maps[:, :, None], dim=1)
        return made

    def _make_kernels(self, x: Tensor, compressed: Tensor, weights: _Weights) -> dict[int, Tensor]:
        """x [n, c, h, w] and relu(norm(W1 x)) of all modules [n, h·w, Σ c/8]"""
        c, rows = x.shape[1], x.permute(0, 2, 3, 1).flatten(1, 2)
        score = weights.of(self._kernels[0][0].score)
        decode = [weights.of(own[0].decode).view(len(own), c, -1) for own in self._decoded()]
        every = [*chain(*self._kernels)]
        taps = tuple(module.size**2 for module in every)
        if len(decode) == 1 and fits(rows, compressed, taps):
            made = torch.split(dynamic_kernels(rows, compressed, score, decode[0], taps), list(taps), dim=1)
            return {id(module): _as_kernels(one, module.size) for module, one in zip(every, made, strict=True)}
        if len(decode) == 1:
            decode = [*torch.split(decode[0], [len(own) for own in self._kernels])]
        scores = _scored(rows, score)
        with torch.autocast(x.device.type, enabled=False):  # to float32 and back: the sums are float32 in any case
            attention = torch.softmax(scores, dim=2)
        latent = torch.bmm(compressed.transpose(1, 2), attention.transpose(1, 2))  # [n, Σ c/8, Σ k²]
        sizes = tuple((len(own), own[0].norm.num_features, own[0].size ** 2) for own in self._kernels)
        found: dict[int, Tensor] = {}
        for own, back, block in zip(self._kernels, decode, _blocks(latent, sizes), strict=True):
            count, size = len(own), own[0].size
            wanted = torch.bmm(block, back.transpose(1, 2)).view(count, len(x), size * size, c)
            kernels = torch.softmax(wanted, dim=2)
            found |= _by_id(own, kernels.view(count, len(x), size, size, c).permute(0, 1, 4, 2, 3))
        return found


def _as_kernels(taps: Tensor, size: int) -> Tensor:
    """[n, k², c] to [n, c, k, k]"""
    return taps.view(len(taps), size, size, -1).permute(0, 3, 1, 2)


def _entrance(module: Normed) -> nn.Conv2d:
    return module.compress if isinstance(module, DynamicKernel) else module.squeeze


def _by_id(modules: Sequence[nn.Module], outputs: Tensor, dim: int = 0) -> dict[int, Tensor]:
    """The part of each module along a dimension of `outputs`; the gradient of a single one needs no stacking."""
    parts = outputs.unbind(dim) if len(modules) > 1 else (outputs.squeeze(dim),)
    return {id(module): output for module, output in zip(modules, parts, strict=True)}


def _pointwise(x: Tensor, weight: Tensor, stride: tuple[int, ...] = (1, 1)) -> Tensor:
    """A 1×1 convolution of x [n, c, h, w] with weight [c_out, c]."""
    if stride != (1, 1):
        return F.conv2d(x, weight[:, :, None, None], stride=stride)
    return F.linear(x.permute(0, 2, 3, 1), weight).permute(0, 3, 1, 2)


def _scored(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [n, h·w, c] and weight [s, c] to [n, s, h·w]: contiguous for a softmax over h·w."""
    return _Scored.apply(rows, weight)  # type: ignore[no-any-return, no-untyped-call]


class _Scored(torch.autograd.Function):
    """Plain autograd would give the rows a channel-by-channel gradient, which slows down everything that adds to it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return torch.bmm(weight.expand(len(rows), -1, -1), rows.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, weight = ctx.saved_tensors
        back = torch.bmm(gradient.transpose(1, 2), weight.expand(len(rows), -1, -1))
        # In architecture steps weights need no gradient.
        return back, torch.bmm(gradient, rows).sum(0) if is_wanted(ctx, 1) else None


Sizes = tuple[tuple[int, int, int], ...]
"""Count, rows and columns of blocks."""


def _blocks(x: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """Blocks on the diagonal of x [n, Σ count · rows, Σ count · columns]: per size [count, n · columns, rows]."""
    result: tuple[Tensor, ...] = _Blocks.apply(x, sizes)  # type: ignore[no-untyped-call]
    return result


def _diagonal(x: Tensor, sizes: Sizes) -> Iterator[Tensor]:
    """The blocks that `_blocks` returns, as views [count, n, columns, rows]."""
    row = column = 0
    for count, rows, columns in sizes:
        square = x[:, row : row + count * rows, column : column + count * columns]
        square = square.view(len(x), count, rows, count, columns)
        yield square.diagonal(dim1=1, dim2=3).permute(3, 0, 2, 1)
        row, column = row + count * rows, column + count * columns


class _Blocks(torch.autograd.Function):
    """Plain autograd would fill a whole matrix of zeros for each view; here one is filled for all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.shape = sizes, x.shape
        own = [block.clone(memory_format=torch.contiguous_format) for block in _diagonal(x, sizes)]
        return tuple(block.flatten(1, 2) for block in own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Placed.apply(ctx.shape, ctx.sizes, *gradients), None  # type: ignore[no-untyped-call]


class _Placed(torch.autograd.Function):
    """The reverse of `_Blocks`: puts blocks on the diagonal of a matrix of zeros."""

    @staticmethod
    def forward(ctx: Any, shape: torch.Size, sizes: Sizes, *blocks: Tensor) -> Tensor:
        ctx.sizes = sizes
        x = blocks[0].new_zeros(shape)
        for place, block in zip(_diagonal(x, sizes), blocks, strict=True):
            place.copy_(block.reshape(place.shape))
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_blocks(gradient, ctx.sizes)
