"""Blocks of attention that read the same map, run together: weights stacked, one pass for each of their layers.

On a GPU each of the seven blocks of a layer launches about a dozen small kernels forward and twice as many backward;
only the attention itself differs between blocks. Here everything before and after it runs for all blocks at once:

    reduce                             one convolution, one norm
    queries, keys, values              one batched product of rows [n·h·w, inner]
    attention                          one after the other
    projection, expand                 two batched products, one norm
    shortcut                           once; where the width changes one convolution, one norm
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.kernels.product import product
from softcell.nn.attention import Attention, AttentionBlock, LocalAttention, NonLocalAttention
from softcell.nn.norm import BatchNorm2d
from softcell.nn.stack import conv_and_norm, grouped, has_hooks, norm_key, normalise


def grouping_blocks_pays(x: Tensor) -> bool:
    """Whether blocks on `x` should run together; a compiler groups modules in its own way."""
    return x.device.type == "cuda" and not torch.compiler.is_compiling()


def block_key(module: nn.Module | None) -> Hashable | None:
    """A key that blocks which can run together share; None for a module that runs alone."""
    if type(module) is not AttentionBlock or has_hooks(module):
        return None
    if type(module.attention) not in (LocalAttention, NonLocalAttention):
        return None  # another one may do more than `attend`
    parts = [module.reduce, module.expand]
    if not isinstance(module.widen, nn.Identity):
        parts.append(module.widen)
    kinds = tuple(_linear_key(part) for part in parts)
    return None if None in kinds else (kinds, type(module.pool), getattr(module.pool, "stride", None))


def _linear_key(part: nn.Module) -> Hashable | None:
    """Of a convolution and its norm."""
    if [type(child) for child in part.children()] != [nn.Conv2d, BatchNorm2d]:
        return None  # without norms there is a bias
    conv, norm = conv_and_norm(part)
    kind = norm_key(norm) if conv.bias is None else None
    return None if kind is None else (conv.in_channels, conv.out_channels, kind)


def run_blocks(modules: Iterable[nn.Module | None], x: Tensor) -> dict[int, Tensor]:
    """What each block makes of x [n, c, h, w], by its id; modules that must run alone are left out."""
    found: dict[int, Tensor] = {}
    for own in grouped(modules, block_key).values():
        if len(own) > 1:
            found.update(zip(own, _run(list(own.values()), x).unbind(1), strict=True))
    return found


def run_alike(modules: Sequence[nn.Module | None], x: Tensor) -> Tensor | None:
    """What several blocks make of x [n, c, h, w], side by side [n, blocks, c', h', w']; None unless all can."""
    groups = list(grouped(modules, block_key).values())
    if len(groups) != 1 or len(modules) < 2 or len(groups[0]) < len(modules):
        return None
    return _run(list(groups[0].values()), x)


def _run(blocks: Sequence[AttentionBlock], x: Tensor) -> Tensor:
    first, count, attentions = blocks[0], len(blocks), [block.attention for block in blocks]
    n, _, h, w = x.shape
    y = torch.relu(_linears([block.reduce for block in blocks], x))
    rows = y.permute(0, 2, 3, 1).reshape(n * h * w, count, -1).transpose(0, 1).contiguous()  # [blocks, n·h·w, inner]
    packed = product(rows, _stacked([(a.queries, a.keys, a.values) for a in attentions]).to(rows.dtype))
    maps = (own.view(n, h, w, -1).permute(0, 3, 1, 2) for own in packed.unbind())
    rows = torch.stack(
        [
            attention.attend(own, *given).permute(0, 2, 3, 1).reshape(n * h * w, -1)
            for attention, own, given in zip(attentions, maps, _embeddings(attentions), strict=True)
        ]
    )
    rows = torch.relu(product(rows, _stacked([(a.project,) for a in attentions]).to(rows.dtype)))
    last, norms = zip(*(conv_and_norm(block.expand) for block in blocks), strict=True)
    rows = product(rows, _stacked([(conv,) for conv in last]).to(rows.dtype))
    y = normalise(rows.transpose(0, 1).reshape(n, h, w, -1).permute(0, 3, 1, 2), norms)
    small, y = first.pool(x), first.pool(y)
    if isinstance(first.widen, nn.Identity):
        outputs: Tensor = y.unflatten(1, (count, -1)) + small[:, None]
    else:
        outputs = (y + _linears([block.widen for block in blocks], small)).unflatten(1, (count, -1))
    return outputs


def _embeddings(attentions: Sequence[Attention]) -> list[list[Tensor]]:
    """The embeddings of each, as parts of one copy: a backward pass skips tensors that are no leaves and not needed."""
    own = [attention.embeddings() for attention in attentions]
    every = [part for parts in own for part in parts]
    if not every:
        return [[] for _ in attentions]
    pieces = iter(torch.split(torch.cat([part.reshape(-1) for part in every]), [part.numel() for part in every]))
    return [[next(pieces).view(part.shape) for part in parts] for parts in own]


def _linears(parts: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Convolutions of x [n, c, h, w] with their norms, side by side: [n, parts · c', h, w]"""
    convs, norms = zip(*(conv_and_norm(part) for part in parts), strict=True)
    return normalise(F.conv2d(x, torch.cat([conv.weight for conv in convs])), norms)


def _stacked(convs: Sequence[tuple[nn.Conv2d, ...]]) -> Tensor:
    """Weights of 1×1 convolutions, concatenated per block: [blocks, c_in, Σ c_out], by one copy."""
    flat = torch.cat([conv.weight for own in convs for conv in own])
    return flat.view(len(convs), -1, flat.shape[1]).transpose(1, 2)
