"""Means of gradients over ranks, reduced in flat buckets while the backward pass still runs.

DistributedDataParallel does not fit: its hooks belong to one parameter set and one backward pass. A search step has two
sets (weights and architecture) and two losses and differentiates one with respect to the other. Here hooks exist for
one call of `gradients_of` only: gradients arrive in reverse order of use, and every 25 MB of one dtype are summed over
the ranks as one flat tensor, asynchronously, while autograd computes the next ones.

Only what has a gradient is sent, so a step that runs one sampled path sends only that path. The order of arrival is
that of autograd's graph, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from softcell.engine.capture import between_parts
from softcell.engine.distributed import World

GRADIENT_BUCKET_BYTES = 25 * 2**20
"""As in DistributedDataParallel: large enough for the full bandwidth, small enough to start early."""


class Gradients(NamedTuple):
    """Gradients of a loss: `means` over the ranks, `local` ones of this rank, and local ones of `watched` tensors."""

    means: list[Tensor | None]
    local: list[Tensor | None]
    watched: list[Tensor | None]


def gradients_of(
    loss: Tensor,
    tensors: Sequence[Tensor],
    world: World,
    *,
    watched: Sequence[Tensor] = (),
    also: Sequence[Tensor] = (),
    create_graph: bool = False,
) -> Gradients:
    """Differentiate `loss` [] by leaf `tensors` and average over the ranks; None where it does not depend on one.

    watched: further tensors, whose gradients are not averaged. also: floating-point tensors (any shapes) that are
    replaced by their means in place; they travel with the last bucket.

    Example:
        >>> import torch
        >>> from softcell.engine import World
        >>> from softcell.engine.reduce import gradients_of
        >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> found = gradients_of(weight.square().sum(), [weight], World(0, 1, 0, torch.device("cpu")))
        >>> found.means
        [tensor([2., 4.])]
    """
    wanted = [*tensors, *watched]

    def differentiate() -> list[Tensor | None]:
        if not wanted:
            return []
        return list(torch.autograd.grad(loss, wanted, allow_unused=True, create_graph=create_graph))

    if world.size == 1:
        found = differentiate()
        return Gradients(found[: len(tensors)], found[: len(tensors)], found[len(tensors) :])
    buckets = _Buckets(tensors, world)
    handles = [
        tensor.register_hook(partial(buckets.arrived, number))  # type: ignore[no-untyped-call]
        for number, tensor in enumerate(tensors)
    ]
    try:
        found = differentiate()
    finally:
        for handle in handles:
            handle.remove()
    return Gradients(buckets.finish(also), found[: len(tensors)], found[len(tensors) :])


class _Buckets:
    """Gradients that have arrived: those on their way to the other ranks, and those that wait for a full bucket."""

    def __init__(self, tensors: Sequence[Tensor], world: World) -> None:
        self._tensors, self._world = tensors, world
        self._open: dict[tuple[torch.dtype, torch.device], list[_Part]] = {}
        self._sent: list[tuple[list[_Part], Tensor, Any]] = []
        # gloo cannot run inside a capture, nor may autograd's thread interrupt one: it is called after the backward.
        self._overlaps = not (world.device.type == "cuda" and dist.get_backend() == "gloo")
        self._on_stream: Callable[[], AbstractContextManager[Any]] = nullcontext
        if world.device.type == "cuda":
            # Hooks run in autograd's thread; what they launch must follow the step, and be captured with it.
            self._on_stream = partial(torch.cuda.stream, torch.cuda.current_stream(world.device))

    def arrived(self, number: int, gradient: Tensor) -> None:
        """Called by autograd with the whole gradient of tensor `number`."""
        if gradient.numel() == 0:
            return
        like, gradient = self._tensors[number], gradient.detach()
        key = (gradient.dtype, gradient.device)
        waiting = self._open.setdefault(key, [])
        with self._on_stream():
            waiting.append(_Part(number, like, _flatten(gradient, like)))
            if self._overlaps and sum(part.num_bytes for part in waiting) >= GRADIENT_BUCKET_BYTES:
                self._send(self._open.pop(key))

    @torch.no_grad()
    def finish(self, also: Sequence[Tensor]) -> list[Tensor | None]:
        """Send what is left, wait, and return the means by the numbers of their tensors."""
        for tensor in also:
            part = _Part(None, tensor, _flatten(tensor, tensor))
            self._open.setdefault((tensor.dtype, tensor.device), []).append(part)
        for waiting in self._open.values():
            self._send(waiting)
        means: list[Tensor | None] = [None] * len(self._tensors)
        for parts, flat, work in self._sent:
            if work is not None:
                work.wait()
            flat.div_(self._world.size)
            for part, values in zip(parts, torch.split(flat, [part.flat.numel() for part in parts]), strict=True):
                mean = _unflatten(values, part.like)
                if part.number is None:
                    part.like.copy_(mean)
                else:
                    means[part.number] = mean
        return means

    @torch.no_grad()
    def _send(self, parts: list[_Part]) -> None:
        flat = torch.cat([part.flat for part in parts])
        work = None
        if self._overlaps:
            work = dist.all_reduce(flat, async_op=True)
        else:
            between_parts(partial(_sum_now, flat))
        self._sent.append((parts, flat, work))


def _sum_now(flat: Tensor) -> None:
    dist.all_reduce(flat)


class _Part(NamedTuple):
    """A tensor's share of a bucket: its number (None: it is averaged in place), the tensor, the values in a row."""

    number: int | None
    like: Tensor
    flat: Tensor

    @property
    def num_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


def _flatten(values: Tensor, like: Tensor) -> Tensor:
    """values [*] as [n], in the memory order of `like`: fused optimisers require gradients like that."""
    return (values.permute(0, 2, 3, 1) if _is_channels_last(like) else values).reshape(-1)


def _unflatten(flat: Tensor, like: Tensor) -> Tensor:
    if not _is_channels_last(like):
        return flat.view(like.shape)
    n, c, h, w = like.shape
    return flat.view(n, h, w, c).permute(0, 3, 1, 2)


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
