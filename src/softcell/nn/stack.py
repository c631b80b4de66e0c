"""Convolutions of one kind that read the same input, run as one: their weights stacked, one norm over all channels.

On a CPU a call costs as much as the arithmetic of a small convolution, so that a third of them takes little more than
a third of the time; large inputs gain nothing, and outputs that are views of one tensor are read more slowly. On a GPU,
in cells that no kernel of ours fuses, a launch costs more than any of these convolutions.
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


def stacks(x: Tensor) -> bool:
    """Whether convolutions of `x` should be stacked."""
    return x.device.type == "cuda" or (x.device.type == "cpu" and x.numel() <= LARGEST)


def stack_key(module: nn.Module | None) -> Hashable | None:
    """What modules have in common that can be stacked; None for a module that runs alone."""
    if type(module) is not ReLUConvBN:
        return None
    conv, norm = conv_and_norm(module)
    kind = norm_key(norm)
    if kind is None or listened(module):
        return None
    shape = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.in_channels, conv.out_channels)
    return (*shape, kind)


def norm_key(norm: nn.BatchNorm2d) -> Hashable | None:
    """What norms have in common that can stand side by side; None for one that stands alone."""
    if norm.momentum is None or not norm.track_running_stats:
        return None
    return (norm.eps, norm.momentum, norm.affine, norm.training)


def listened(module: nn.Module) -> bool:
    """Whether somebody listens to a module or a part of it, and must hear it."""
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in module.modules()
    )


def grouped(
    modules: Iterable[nn.Module | None], key: Callable[[nn.Module | None], K | None]
) -> dict[K, dict[int, Any]]:
    """Modules by what they have in common and by id; those whose key is None are left out."""
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
    """y [n, Σ c, h, w] by norms of one kind that stand side by side; each keeps its own running statistics."""
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
