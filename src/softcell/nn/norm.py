"""Batch normalisation by the statistics of the whole batch, regardless of how many processes share it.

How statistics are merged, and the setting that keeps them to each process, are in `softcell.kernels.shared`.

`statistics_kept` and `recomputed` belong together: a module that runs again in the backward pass must not update its
running statistics twice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from softcell.kernels.shared import merge_over_ranks, shares_norms

_kept = False


@contextmanager
def statistics_kept() -> Iterator[None]:
    """Within this context running statistics stay: a batch that is recomputed has been counted already."""
    global _kept
    before, _kept = _kept, True
    try:
        yield
    finally:
        _kept = before


def running_statistics(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Running means and variances [C] of all norms in training mode.

    With local statistics these differ between ranks until they are averaged. Both are linear in the statistics of the
    batches, so the mean of the running values is the running value of the means.
    """
    norms = [m for module in modules for m in module.modules() if isinstance(m, nn.BatchNorm2d) and m.training]
    return [x for norm in norms for x in (norm.running_mean, norm.running_var) if x is not None]


def shared_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return count [], mean [C] and biased variance [C] of `x` [N, C, H, W] over the batches of all ranks.

    N may differ between ranks and may be 0. Half-precision input is reduced in float32.
    """
    channels = x.shape[1]
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    local = x.numel() // channels
    # An empty batch has no mean; zero works, since its count is zero.
    mean = x.sum((0, 2, 3)) / max(local, 1)
    return merge_over_ranks(local, mean, (x - mean[:, None, None]).square().sum((0, 2, 3)))


def normalise_over_ranks(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`x` [N, C, H, W] normalised by the statistics of all ranks, then scaled and shifted by `weight` and `bias` [C].

    Also returns, without gradient, the count [] of values per channel, their mean [C] and their unbiased variance [C].
    """
    count, mean, variance = shared_moments(x)
    y = (x - mean[:, None, None]) * torch.rsqrt(variance + eps)[:, None, None]
    if weight is not None and bias is not None:
        y = y * weight[:, None, None] + bias[:, None, None]
    unbiased = variance.detach() * (count / (count - 1).clamp(min=1))
    return y.to(x.dtype), count, mean.detach(), unbiased


class BatchNorm2d(nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` over the whole batch of all processes; with one it is exactly that class.

    N ranks on parts of a batch compute what one rank computes on the whole. Within
    `softcell.kernels.shared.local_norms` each rank normalises by its own part instead, as `torch.nn.BatchNorm2d` does.
    Where batch statistics are used (training, or no running statistics kept), all ranks must run it equally often; a
    rank without samples passes an empty batch.

    Example:
        >>> import torch
        >>> from softcell.nn import BatchNorm2d
        >>> y = BatchNorm2d(3)(torch.randn(16, 3, 8, 8) + 5.0)
        >>> bool(y.mean().abs() < 1e-4), bool((y.std() - 1).abs() < 1e-2)
        (True, True)
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` [N, C, H, W] per channel and return the same shape."""
        by_batch = self.training or self.running_mean is None
        if not (by_batch and shares_norms()):
            if self.training and _kept:
                # Copies: what is kept for the backward pass must be of the same number and shapes.
                mean, variance = (None if x is None else x.clone() for x in (self.running_mean, self.running_var))
                return F.batch_norm(input, mean, variance, self.weight, self.bias, training=True, eps=self.eps)
            # Without a momentum the count is part of the update, so it cannot be increased later.
            if self.training and self.momentum is not None and _counted_later(self.num_batches_tracked):
                self._check_input_dim(input)
                given = (self.running_mean, self.running_var, self.weight, self.bias)
                return F.batch_norm(input, *given, training=True, momentum=self.momentum, eps=self.eps)
            return super().forward(input)
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:
            raise ValueError(f"input must have {self.num_features} channels, but its shape is {tuple(input.shape)}")
        y, count, mean, variance = normalise_over_ranks(input, self.weight, self.bias, self.eps)
        # Reading the count costs nothing on the CPU, but would stall a CUDA stream.
        if self.training and count.device.type == "cpu" and count <= 1:
            raise ValueError(f"training needs more than 1 value per channel over all ranks, but got {int(count)}")
        if self.training and not _kept:
            self._update_running(mean, variance)
        return y

    @torch.no_grad()
    def _update_running(self, mean: Tensor, unbiased: Tensor) -> None:
        """Update the running statistics towards `mean` [C] and the variance `unbiased` [C]."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # momentum=None asks for the plain average over all batches so far; kept on the device for graph
        # capture.
        momentum = self.num_batches_tracked.to(mean.dtype).reciprocal() if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.add_((new - running) * momentum)


@torch.no_grad()
def update_running(norms: Sequence[nn.BatchNorm2d], means: Sequence[Tensor], variances: Sequence[Tensor]) -> None:
    """running = (1 − momentum) · running + momentum · new, as `nn.BatchNorm2d` does; variances are unbiased.

    Without a momentum it is the plain mean over all batches. Read at every call: recalibration removes the momentum for
    a while, from cells that were planned before.
    """
    if not norms:
        return
    running = [required(m.running_mean) for m in norms] + [required(m.running_var) for m in norms]
    new = [*means, *variances]
    seen = [required(m.num_batches_tracked) for m in norms]
    torch._foreach_add_(seen, 1)
    momentum = norms[0].momentum
    if momentum is None:
        for old, value, count in zip(running, new, seen + seen, strict=True):
            old.add_((value - old) / count)
        return
    torch._foreach_mul_(running, 1 - momentum)
    torch._foreach_add_(running, new, alpha=momentum)


class _Batch(NamedTuple):
    """Statistics of a batch by plane: mean and biased variance, each [planes, c], for norms of one momentum."""

    norms: Sequence[tuple[int, nn.BatchNorm2d]]
    mean: Tensor
    variance: Tensor
    correction: float | Tensor
    """From biased to unbiased variances."""


_batches: list[_Batch] | None = None
_counts: dict[int, Tensor] = {}
"""`num_batches_tracked` of the modules that have seen a batch since `updates_together` began, by id."""


@contextmanager
def updates_together() -> Iterator[None]:
    """Within this context fused cells hand in their statistics; at its end all running statistics are updated at once.

    Modules do the same with their counts of batches. A launch for each of them would take longer than the arithmetic.
    The results are the same.
    """
    global _batches
    # Nested: the outermost context updates.
    if _batches is not None:
        yield
        return
    _batches = []
    try:
        yield
        _update_all(_batches)
        if _counts:
            torch._foreach_add_(list(_counts.values()), 1)
    finally:
        _batches = None
        _counts.clear()


def _counted_later(count: Tensor | None) -> bool:
    """Whether `updates_together` will count this batch; a norm that runs twice counts the second one itself."""
    if _batches is None or count is None or id(count) in _counts:
        return False
    _counts[id(count)] = count
    return True


def update_running_by_plane(
    norms: Sequence[tuple[int, nn.BatchNorm2d]], mean: Tensor, variance: Tensor, correction: float | Tensor
) -> None:
    """`update_running` from statistics by plane, each [planes, c]; correction: from biased to unbiased variances."""
    batch = _Batch(norms, mean, variance, correction)
    if _batches is None or (norms and norms[0][1].momentum is None):
        _update_all([batch])
        return
    known = {id(norm) for one in _batches for _, norm in one.norms}
    if any(id(norm) in known for _, norm in norms):  # a norm is updated by one batch after the other
        _update_all(_batches)
        _batches.clear()
    _batches.append(batch)


@torch.no_grad()
def _update_all(batches: Sequence[_Batch]) -> None:
    by_momentum: dict[float | None, list[_Batch]] = {}
    for one in batches:
        if one.norms:
            by_momentum.setdefault(one.norms[0][1].momentum, []).append(one)
    for own in by_momentum.values():
        # Corrections that the host knows take one launch. Those of norms shared by ranks are on the device.
        known = [one for one in own if isinstance(one.correction, float)]
        scaled = {id(one): one.variance * one.correction for one in own if isinstance(one.correction, Tensor)}
        if known:
            factors = [float(one.correction) for one in known]
            corrected = torch._foreach_mul([one.variance for one in known], factors)
            scaled |= {id(one): value for one, value in zip(known, corrected, strict=True)}
        update_running(
            [norm for one in own for _, norm in one.norms],
            [one.mean[plane] for one in own for plane, _ in one.norms],
            [scaled[id(one)][plane] for one in own for plane, _ in one.norms],
        )


def required(buffer: Tensor | None) -> Tensor:
    """A running statistic of a norm that keeps them."""
    assert buffer is not None
    return buffer


T = TypeVar("T")


def inputs_kept_alone(run: Callable[..., T], *given: Any) -> T:
    """`run(*given)`, keeping only `given`; `run` must draw no random numbers and have no running statistics."""
    if not torch.is_grad_enabled():
        return run(*given)
    return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def recomputed(module: nn.Module, *inputs: Tensor) -> Tensor:
    """`module(*inputs)` with the same value and gradients; batch-norm counts the batch once.

    Modules without weights keep little and may draw random numbers: they are not recomputed.
    """
    # The backward pass must use the current parameters, which may be temporary ones.
    state: dict[str, Tensor] = dict(module.named_parameters())
    if not state or not torch.is_grad_enabled():
        return module(*inputs)  # type: ignore[no-any-return]

    def forward(*given: Tensor) -> Tensor:
        return functional_call(module, state, given)  # type: ignore[no-any-return]

    # No random state is kept: modules with weights draw nothing, and a capture could not restore it.
    return checkpoint(  # type: ignore[no-any-return]
        forward, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts
    )


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), statistics_kept()
