"""Convolutions of one kind that read the same input, run as one: their weights stacked, one norm over all channels.

On a CPU a call costs as much as the arithmetic of a small convolution, so fewer calls take less time; large inputs gain
nothing, and outputs that are views of one tensor are read more slowly. On a GPU, in cells that are not fused, a launch
costs more than any of these convolutions.

`flat` puts the weights of many modules into one vector by one copy; the backward pass distributes the gradients by one
more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.nn.conv import ReLUConvBN

K = TypeVar("K", bound=Hashable)
LARGEST = 2**17
"""Elements of an input up to which stacking pays on a CPU."""


def stacking_pays(x: Tensor) -> bool:
    """Whether convolutions of `x` should be stacked."""
    return x.device.type == "cuda" or (x.device.type == "cpu" and x.numel() <= LARGEST)


def stack_key(module: nn.Module | None) -> Hashable | None:
    """A key that modules which can be stacked share; None for a module that runs alone."""
    if type(module) is not ReLUConvBN:
        return None
    conv, norm = conv_and_norm(module)
    kind = norm_key(norm)
    if kind is None or has_hooks(module):
        return None
    shape = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.in_channels, conv.out_channels)
    return (*shape, kind)


def norm_key(norm: nn.BatchNorm2d) -> Hashable | None:
    """A key that norms which can be concatenated share; None for one that cannot."""
    if norm.momentum is None or not norm.track_running_stats:
        return None
    return (norm.eps, norm.momentum, norm.affine, norm.training)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module or a part of it has hooks, which must be called."""
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in module.modules()
    )


def grouped(
    modules: Iterable[nn.Module | None], key: Callable[[nn.Module | None], K | None]
) -> dict[K, dict[int, Any]]:
    """Modules by key and by id; those whose key is None are left out."""
    found: dict[K, dict[int, Any]] = {}
    for module in modules:
        if module is not None and (kind := key(module)) is not None:
            found.setdefault(kind, {})[id(module)] = module
    return found


def run_stacked(modules: Sequence[nn.Module], activated: Tensor) -> tuple[Tensor, ...]:
    """Modules of one key on max(x, 0) [n, c, h, w]: their outputs, each [n, c_out, h', w'], as views of one tensor."""
    convs, norms = zip(*(conv_and_norm(module) for module in modules), strict=True)
    first = convs[0]
    weight = torch.cat([conv.weight for conv in convs])
    y = F.conv2d(activated, weight, None, first.stride, first.padding, first.dilation)
    return torch.split(normalise(y, norms), first.out_channels, dim=1)


def normalise(y: Tensor, norms: Sequence[nn.BatchNorm2d]) -> Tensor:
    """y [n, Σ c, h, w] by concatenated norms of one key; each keeps its own running statistics."""
    norm, sizes = norms[0], [n.num_features for n in norms]
    running = [*_buffers(norms, "running_mean"), *_buffers(norms, "running_var")]
    both = torch.cat(running)
    mean, variance = both.chunk(2)
    scale = torch.cat([n.weight for n in norms]) if norm.affine else None
    shift = torch.cat([n.bias for n in norms]) if norm.affine else None
    y = F.batch_norm(y, mean, variance, scale, shift, norm.training, norm.momentum, norm.eps)  # type: ignore[arg-type]
    if norm.training:
        with torch.no_grad():
            torch._foreach_copy_(running, torch.split(both, [*sizes, *sizes]))
            torch._foreach_add_(_buffers(norms, "num_batches_tracked"), 1)
    return y


def _buffers(norms: Sequence[nn.BatchNorm2d], name: str) -> list[Tensor]:
    return [norm.get_buffer(name) for norm in norms]


def conv_and_norm(module: nn.Module) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """The last two parts of a module."""
    *_, conv, norm = module.children()
    assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
    return conv, norm


def as_vector(weight: Tensor) -> Tensor:
    """A weight [c_out, c_in, k, k] as a vector ordered (c_out, tap, c_in): a view of one that is channels-last."""
    return weight.permute(0, 2, 3, 1).reshape(-1)


def like(vector: Tensor, weight: Tensor) -> Tensor:
    """The reverse of `as_vector`: a view, with the weight's strides where its memory has the same order."""
    c_out, c_in, height, width = weight.shape
    if height * width == 1 or c_in == 1:  # any order of the dimensions is the same memory
        offset = vector.storage_offset()
        return vector.as_strided(weight.shape, weight.stride(), offset)
    return vector.view(c_out, height, width, c_in).permute(0, 3, 1, 2)


def owned(vector: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The part of each weight in a vector of all of them.

    Each gets memory of its own: clipping or averaging gradients in place must not change another's.
    """
    parts = torch.split(vector, [w.numel() for w in weights])
    own = [torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=w.device) for w in weights]
    torch._foreach_copy_(own, [like(part, w) for part, w in zip(parts, weights, strict=True)])
    return own


def flat(weights: Sequence[Tensor]) -> Tensor:
    """Weights [c_out, c_in, k, k] of any sizes, one after the other, each ordered (c_out, tap, c_in): [total]"""
    result: Tensor = _Flat.apply(*weights)  # type: ignore[no-untyped-call]
    return result


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return torch.cat([as_vector(w) for w in weights])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        weights: tuple[Tensor, ...] = ctx.saved_tensors
        if torch.is_grad_enabled():  # a copy in place could not be differentiated once more
            parts = torch.split(gradient, [w.numel() for w in weights])
            shaped = (part.view(w.permute(0, 2, 3, 1).shape) for part, w in zip(parts, weights, strict=True))
            return tuple(part.permute(0, 3, 1, 2) for part in shaped)
        return tuple(owned(gradient.contiguous(), weights))
