"""Blocks of attention of a derived network in training, with fewer launches than their modules and the same values.

    weights       of all blocks converted to the precision of the step by two launches, their gradients back by a few
    norms         with the ReLU, or the drop-path and the shortcut, that follows them (`kernels.block_norm`)
    statistics    of all norms updated at the end of the forward pass (`updates_together`, which the caller opens)
    heads         of local attention filled up with zeros to a multiple of eight channels where a map is large

A kept sample of a dropped block is x + (y − x) / p with y = norm(z) + x: x + norm(z) / p without computing y.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.kernels.shared import shares_norms
from softcell.nn.attention import AttentionBlock, LocalAttention
from softcell.nn.fused_convs import normed_by
from softcell.nn.stack import block_key, flat

EIGHT = 8
"""Channels of a head that a thread of the kernels loads at once; heads of 6 or 12 channels are loaded in parts."""
PADDED_FROM = 2**19
"""Pixels times neighbours from which filling up heads saves more time than its dozen launches take."""


class FusedBlocks:
    """Runs blocks on one batch; those without a fused form run as modules.

    Example:
        >>> import torch
        >>> from softcell.nn import Spec
        >>> from softcell.nn.attention import local_block
        >>> from softcell.nn.fused_blocks import FusedBlocks
        >>> block, x = local_block(Spec(16), extent=3, heads=4), torch.randn(2, 16, 8, 8)
        >>> y = FusedBlocks([block], torch.float32).run(block, x)
        >>> torch.allclose(y, block(x), atol=1e-5)
        True
    """

    def __init__(self, blocks: Iterable[nn.Module], dtype: torch.dtype) -> None:
        """dtype: of weights and maps."""
        self._dtype = dtype
        own = [block for block in blocks if fits(block)]
        groups = {id(block): _groups(block) for block in own}
        every = [group for found in groups.values() for group in found]
        weights = [conv.weight for group in every for conv in group]
        sizes = [sum(conv.weight.numel() for conv in group) for group in every]
        parts = iter(torch.split(flat(weights, dtype), sizes)) if weights else iter(())
        self._weights = {key: [_as_kernels(next(parts), group) for group in found] for key, found in groups.items()}

    def run(self, block: nn.Module | None, x: Tensor, factors: Tensor | None = None) -> Tensor:
        """block(x) for x [n, c, h, w]; factors [n] of drop-path, only for a block that keeps the shape of x."""
        assert block is not None
        if id(block) not in self._weights:
            y: Tensor = block(x)
            return y if factors is None else x + (y - x) * factors.to(x.dtype).view(-1, 1, 1, 1)
        assert isinstance(block, AttentionBlock)
        attention, (reduce, packed, project, expand, *widen) = block.attention, self._weights[id(block)]
        x = x.to(self._dtype)
        y = _norm(F.conv2d(x, reduce), block.reduce, relu=True)
        embeddings = attention.embeddings()
        if isinstance(attention, LocalAttention) and (zeros := _missing(attention, y)):
            heads, c = attention.heads, attention.width
            # Zeros add nothing to a product, and are what the values of these channels become.
            packed = F.pad(packed.view(3 * heads, -1, c), (0, 0, 0, zeros)).view(-1, c, 1, 1)
            project = F.pad(project.view(c, heads, -1), (0, zeros)).view(c, -1, 1, 1)
            embeddings = tuple(F.pad(part, (0, 0, 0, zeros)) for part in embeddings)
        y = attention.attend(F.conv2d(y, packed), *embeddings)
        z = F.conv2d(F.relu(F.conv2d(y, project)), expand)
        shortcut = block.pool(x)
        if widen:
            shortcut = _norm(F.conv2d(shortcut, widen[0]), block.widen)
        if isinstance(block.pool, nn.Identity):
            return _norm(z, block.expand, shortcut=shortcut, factors=factors)
        assert factors is None, "a block that pools keeps no shape"
        return block.pool(_norm(z, block.expand)) + shortcut  # type: ignore[no-any-return]


def fits(block: nn.Module) -> bool:
    """Whether a block has a fused form: one of ours, without hooks, whose norms use the statistics of this batch."""
    if block_key(block) is None or shares_norms():
        return False
    return all(norm.training for norm in block.modules() if isinstance(norm, nn.BatchNorm2d))


def _missing(attention: LocalAttention, x: Tensor) -> int:
    """Channels by which each head is filled up: none if that adds more than a third, or the map is small."""
    d = attention.width // attention.heads
    missing = -d % EIGHT
    pixels = x.numel() // attention.width
    return missing if 3 * missing <= d and pixels * attention.extent**2 >= PADDED_FROM else 0


def _groups(block: nn.Module) -> list[Sequence[nn.Conv2d]]:
    """The convolutions that read the same map, in the order in which they run."""
    assert isinstance(block, AttentionBlock)
    own = block.attention
    found: list[Sequence[nn.Conv2d]] = [
        [_conv(block.reduce)],
        [own.queries, own.keys, own.values],
        [own.project],
        [_conv(block.expand)],
    ]
    return found if isinstance(block.widen, nn.Identity) else [*found, [_conv(block.widen)]]


def _conv(part: nn.Module) -> nn.Conv2d:
    conv, _ = part.children()
    assert isinstance(conv, nn.Conv2d)
    return conv


def _as_kernels(vector: Tensor, group: Sequence[nn.Conv2d]) -> Tensor:
    """Weights of 1×1 convolutions, one after the other, as the kernels of one convolution."""
    return vector.view(-1, group[0].in_channels, 1, 1)


def _norm(
    z: Tensor, part: nn.Module, *, relu: bool = False, shortcut: Tensor | None = None, factors: Tensor | None = None
) -> Tensor:
    """The norm of a convolution with what follows it."""
    _, norm = part.children()
    assert isinstance(norm, nn.BatchNorm2d)
    return normed_by(norm, z, relu=relu, shortcut=shortcut, factors=factors)
