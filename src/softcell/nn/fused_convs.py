"""Convolutions and norms around the cells of a supernet in training, with fewer launches than their modules.

weights       of all of them converted to the precision of the step by one launch, their gradients back by another
norms         with the ReLU, or the sum, that follows them (`kernels.block_norm`)
statistics    of all norms updated at the end of the forward pass (`updates_together`, which the caller opens)
ReLUs         of a map that two blocks read computed once
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.kernels.block_norm import normed
from softcell.kernels.shared import shares_norms
from softcell.nn.conv import FactorisedReduction, ReLUConvBN
from softcell.nn.norm import BatchNorm2d, update_running_by_plane
from softcell.nn.stack import has_hooks


class FusedConvs:
    """Runs blocks on one batch; those without a fused form run as modules.

    A block is a convolution, a convolution with its norm, a `ReLUConvBN` or a `FactorisedReduction`.

    Example:
        >>> import torch
        >>> from softcell.nn import ReLUConvBN
        >>> from softcell.nn.fused_convs import FusedConvs
        >>> block, x = ReLUConvBN(4, 8, kernel=3), torch.randn(2, 4, 6, 6)
        >>> y = FusedConvs([block], torch.float32).run(block, x, relu=True)
        >>> torch.allclose(y, block(x).relu(), atol=1e-5)
        True
    """

    def __init__(self, blocks: Iterable[nn.Module], dtype: torch.dtype) -> None:
        """dtype: of weights and maps."""
        self._dtype = dtype
        self._known = {id(block): block for block in blocks if fits(block)}
        convs = [m for block in self._known.values() for m in block.modules() if isinstance(m, nn.Conv2d)]
        weights = converted([conv.weight for conv in convs], dtype)
        self._weights = {id(conv): weight for conv, weight in zip(convs, weights, strict=True)}
        self._activated = deque[tuple[Tensor, Tensor]](maxlen=2)

    def run(self, block: nn.Module | None, x: Tensor, *, relu: bool = False, shortcut: Tensor | None = None) -> Tensor:
        """block(x), or its ReLU, or its sum with `shortcut`, for x [n, c, h, w]."""
        assert block is not None and not (relu and shortcut is not None)
        if id(block) not in self._known:
            y: Tensor = block(x)
            y = y if shortcut is None else shortcut + y
            return F.relu(y) if relu else y
        x = x.to(self._dtype)
        if isinstance(block, nn.Conv2d):
            assert not relu and shortcut is None
            return self._convolve(block, x)
        *first, conv, norm = block.children()
        if isinstance(block, FactorisedReduction):
            z = self._reduced(block, self._relu(x))
        else:
            assert isinstance(conv, nn.Conv2d)
            z = self._convolve(conv, self._relu(x) if first else x)
        assert isinstance(norm, nn.BatchNorm2d)
        return normed_by(norm, z, relu=relu, shortcut=shortcut)

    def run_activated(self, block: nn.Module, x: Tensor, *, shortcut: Tensor | None = None) -> Tensor:
        """`run` where x is a ReLU already."""
        self._activated.append((x, x))
        return self.run(block, x, shortcut=shortcut)

    def _convolve(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        return F.conv2d(x, self._weights[id(conv)], None, conv.stride, conv.padding, conv.dilation, conv.groups)

    def _relu(self, x: Tensor) -> Tensor:
        known = next((y for own, y in self._activated if own is x), None)
        if known is None:
            known = F.relu(x)
            self._activated.append((x, known))
        return known

    def _reduced(self, block: FactorisedReduction, x: Tensor) -> Tensor:
        """The concatenated convolutions of max(x, 0)."""
        height, width = x.shape[-2:]
        padded = F.pad(x, (0, width % 2, 0, height % 2)) if height % 2 or width % 2 else x
        halves = [self._convolve(block.odd, padded[:, :, 1:, 1:])]
        if block.even is not None:
            halves.insert(0, self._convolve(block.even, x))
        return torch.cat(halves, dim=1)


def fits(block: nn.Module) -> bool:
    """Whether a block has a fused form: one of ours, without hooks, whose norms use the statistics of this batch."""
    if shares_norms() or has_hooks(block):
        return False
    is_ours = type(block) in (nn.Conv2d, ReLUConvBN, FactorisedReduction) or (
        type(block) is nn.Sequential and [type(part) for part in block] == [nn.Conv2d, BatchNorm2d]
    )
    convs = [m for m in block.modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in block.modules() if isinstance(m, nn.BatchNorm2d)]
    if not is_ours or any(type(norm) is not BatchNorm2d for norm in norms):
        return False
    # Weights share a vector, and libraries want their addresses to be multiples of 16 bytes.
    if any(conv.bias is not None or conv.padding_mode != "zeros" or conv.weight.numel() % 8 for conv in convs):
        return False
    return all(norm.training and norm.running_mean is not None for norm in norms)


def normed_by(
    norm: nn.BatchNorm2d,
    z: Tensor,
    *,
    relu: bool = False,
    shortcut: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """z [n, c, h, w] by a norm in training, with what follows it (`kernels.block_norm`); updates running statistics."""
    given = (z, norm.weight, norm.bias, norm.eps)
    y, mean, variance = normed(*given, relu=relu, shortcut=shortcut, factors=factors)
    rows = z.numel() // z.shape[1]
    update_running_by_plane([(0, norm)], mean[None], variance[None], rows / max(rows - 1, 1))
    return y


def converted(weights: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Weights [c_out, c_in, k, k] in `dtype` by one launch; their gradients are converted back by another."""
    if not weights or all(weight.dtype == dtype for weight in weights):
        return weights
    result: tuple[Tensor, ...] = _Converted.apply(dtype, *weights)  # type: ignore[no-untyped-call]
    return result


class _Converted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*weights)
        ctx.set_materialize_grads(False)
        found = _together(weights, dtype)
        torch._foreach_copy_(found, list(weights))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        weights: tuple[Tensor, ...] = ctx.saved_tensors
        if torch.is_grad_enabled():  # a copy in place could not be differentiated once more
            pairs = zip(weights, gradients, strict=True)
            return None, *(None if own is None else own.to(weight.dtype) for weight, own in pairs)
        known = [(weight, own) for weight, own in zip(weights, gradients, strict=True) if own is not None]
        found = [torch.empty_like(weight) for weight, _ in known]
        if found:
            torch._foreach_copy_(found, [own for _, own in known])
        made = iter(found)
        return None, *(None if own is None else next(made) for own in gradients)


def _together(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of the sizes and strides of weights, in one memory."""
    vector = torch.empty(sum(weight.numel() for weight in weights), dtype=dtype, device=weights[0].device)
    parts = torch.split(vector, [weight.numel() for weight in weights])
    pairs = zip(parts, weights, strict=True)
    return [part.as_strided(weight.shape, weight.stride(), part.storage_offset()) for part, weight in pairs]
