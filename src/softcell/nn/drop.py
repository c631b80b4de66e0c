"""Random dropping of paths and activations that does not depend on how a batch is shared among processes.

All ranks hold the same generator state. Each draws the numbers of the global batch and uses its own
contiguous slice, so that two ranks on half batches equal one rank on the whole, and the generators stay in
step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from softcell.nn.draws import draw_normal, draw_uniform

_declared: list[tuple[int, int]] = []


@contextmanager
def batch_slice(start: int, total: int) -> Iterator[None]:
    """Within this context, local batches are samples `start...` of a global batch of `total`.

    Needed only where ranks hold unequal parts; otherwise equal parts in the order of the ranks are taken for
    granted.
    """
    if not 0 <= start <= total:
        raise ValueError(f"`0 <= start <= total` must hold, but got start={start}, total={total}")
    _declared.append((start, total))
    try:
        yield
    finally:
        _declared.pop()


def uniform_for_batch(x: Tensor, *tail: int) -> Tensor:
    """Return this rank's uniform numbers in [0, 1), shape [N, *tail], for `x` [N, ...].

    Always float32, so that the precision of a run does not change what is dropped.
    """
    start, total = _slice_of(x)
    return draw_uniform(total, *tail, device=x.device, of_batch=True)[start : start + x.shape[0]]


def normal_for_batch(x: Tensor, *tail: int) -> Tensor:
    """Return this rank's numbers from N(0, 1), shape [N, *tail], for `x` [N, ...]; float32 as above."""
    start, total = _slice_of(x)
    return draw_normal(total, *tail, device=x.device, of_batch=True)[start : start + x.shape[0]]


def _slice_of(x: Tensor) -> tuple[int, int]:
    """Where this rank's part of the global batch starts, and the size of that batch."""
    batch = x.shape[0]
    if _declared:
        start, total = _declared[-1]
    elif dist.is_available() and dist.is_initialized():
        start, total = dist.get_rank() * batch, dist.get_world_size() * batch
    else:
        start, total = 0, batch
    if start + batch > total:
        raise ValueError(f"`start + batch <= total` must hold, but got start={start}, batch={batch}, total={total}")
    return start, total


def drop_path(x: Tensor, probability: float | Tensor, training: bool) -> Tensor:
    """Zero whole samples of `x` [N, ...] with `probability`; scale the others by 1 / (1 - probability).

    The form of DARTS (arXiv:1806.09055, drop-path of its evaluation network).

    Args:
        x: [N, ...]
        probability: a number, or a tensor [] that is read on the device only.
        training: without it, `x` itself is returned.
    """
    return _drop(x, probability, training, (1,) * (x.dim() - 1))


def dropout(x: Tensor, probability: float | Tensor, training: bool) -> Tensor:
    """Zero elements of `x` [N, ...] with `probability`; scale the others by 1 / (1 - probability)."""
    return _drop(x, probability, training, tuple(x.shape[1:]))


def _drop(x: Tensor, probability: float | Tensor, training: bool, tail: tuple[int, ...]) -> Tensor:
    if not isinstance(probability, Tensor):
        _check_probability(probability)
        if probability == 0.0:
            return x
    if not training:
        return x
    return x * _factors(x, probability, tail).to(x.dtype)


def _factors(x: Tensor, probability: float | Tensor, tail: tuple[int, ...]) -> Tensor:
    """0 for what is dropped and 1 / (1 - probability) for what is kept, [N, *tail], in at least float32."""
    kept = uniform_for_batch(x, *tail) >= probability
    # With probability 1 nothing is kept: the bound only keeps 0 / 0 out.
    keep = (1.0 - probability).clamp(min=1e-12) if isinstance(probability, Tensor) else max(1.0 - probability, 1e-12)
    return kept.to(torch.promote_types(x.dtype, torch.float32)) / keep


def _check_probability(probability: float) -> None:
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"`0 <= probability <= 1` must hold, but got probability={probability}")


class _Drop(nn.Module):
    """Holds a drop probability that a schedule moves between 0 and `probability`.

    The moving value is a buffer filled in place, so that a captured graph sees it change. `probability`
    itself is the constant upper end: when it is 0 the module is known to do nothing, in every later step too.
    The buffer is not saved: it follows from the epoch.
    """

    current: Tensor

    def __init__(self, probability: float) -> None:
        super().__init__()
        _check_probability(probability)
        self.probability = float(probability)
        self.register_buffer("current", torch.tensor(self.probability), persistent=False)

    def set_fraction(self, fraction: float) -> None:
        """Drop with `fraction` (0 to 1) of the full probability from now on."""
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"`0 <= fraction <= 1` must hold, but got fraction={fraction}")
        self.current.fill_(self.probability * fraction)

    def extra_repr(self) -> str:
        return f"probability={self.probability}"


class DropPath(_Drop):
    """`drop_path` with a scheduled probability."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` [N, ...] with some samples dropped while training."""
        return x if self.probability == 0.0 else drop_path(x, self.current, self.training)

    def factors(self, x: Tensor, paths: int) -> Tensor:
        """What each of `paths` paths is scaled by for each sample of `x` [N, ...]: [paths, N], drawn at once."""
        return _factors(x, self.current, (paths,)).t().contiguous()


class Dropout(_Drop):
    """`dropout` with a scheduled probability."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` [N, ...] with some elements dropped while training."""
        return x if self.probability == 0.0 else dropout(x, self.current, self.training)


def set_drop_fraction(module: nn.Module, fraction: float) -> None:
    """Set the fraction of every `DropPath` within `module`; DARTS has `epoch / num_epochs`."""
    for part in module.modules():
        if isinstance(part, DropPath):
            part.set_fraction(fraction)
