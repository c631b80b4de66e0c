"""Random numbers of a step, and what uses them: drop-path, dropout and the noise candidate.

Everything random inside a step (samples, drop-path, noise candidates, hidden rectangles) is drawn by `draw_uniform`,
`draw_normal` and `draw_gamma`. A second-order step evaluates a batch at several weights and divides a difference by a
small ε. With new random numbers in each evaluation that would be noise divided by ε. Within `SharedDraws` the first
evaluation draws, and each later one gets the same tensors in the same order.

Tensors are kept, not the state of a generator: the state cannot be reset while a CUDA graph is captured. A captured
step draws each tensor once per replay and reads it several times, so replays still get new numbers. Afterwards the
generator is where one evaluation leaves it, so only its state has to be saved to resume a run.

Numbers per sample do not depend on how a batch is shared among processes. All ranks hold the same generator state. Each
draws the numbers of the global batch and uses its own contiguous slice, so two ranks on half batches equal one rank on
the whole, and their generators stay in step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from softcell.nn.candidates import Spec, candidate

_active: list[SharedDraws] = []


def draw_uniform(*shape: int, device: torch.device, of_batch: bool = False) -> Tensor:
    """Uniform numbers in [0, 1), float32 [*shape]; see `_draw`.

    Example:
        >>> import torch
        >>> from softcell.nn import draw_uniform
        >>> drawn = draw_uniform(1000, device=torch.device("cpu"))
        >>> bool((0 <= drawn).all() and (drawn < 1).all())
        True
    """
    return _draw(torch.rand, shape, device, of_batch)


def draw_normal(*shape: int, device: torch.device, of_batch: bool = False) -> Tensor:
    """Numbers from N(0, 1), float32 [*shape]; see `_draw`.

    Example:
        >>> import torch
        >>> from softcell.nn import draw_normal
        >>> draw_normal(2, 3, device=torch.device("cpu")).shape
        torch.Size([2, 3])
    """
    return _draw(torch.randn, shape, device, of_batch)


def draw_gamma(concentration: Tensor) -> Tensor:
    """Numbers from Gamma(concentration, 1), float32 like `concentration`, without gradients; see `_draw`.

    All evaluations of a step get the numbers of the first, so the concentration must not change within a step.
    """
    fixed = concentration.detach().float()

    def gammas(shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch._standard_gamma(fixed)

    return _draw(gammas, tuple(concentration.shape), concentration.device, of_batch=False)


def _draw(kind: Callable[..., Tensor], shape: tuple[int, ...], device: torch.device, of_batch: bool) -> Tensor:
    """`kind(shape)` in float32, so that the precision of a run does not change the samples.

    of_batch: the numbers belong to the images of a batch, so evaluations of another batch do not share them.
    """
    if not _active:
        return kind(shape, device=device, dtype=torch.float32)
    given: Tensor = _active[-1].give(kind, shape, device, of_batch)
    return given


class SharedDraws:
    """Draws of one step. Every evaluation runs within `evaluation`, in which draws come in the same order each time.

    Example:
        >>> draws, cpu = SharedDraws(), torch.device("cpu")
        >>> with draws.evaluation("train"):
        ...     first = draw_uniform(3, device=cpu)
        >>> with draws.evaluation("train"):
        ...     bool(torch.equal(draw_uniform(3, device=cpu), first))
        True
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[Tensor]] = {}
        self._next: dict[str, int] = {}
        self._batch = ""
        # Which tensor comes next changes with every call: compiled code would be compiled again for each of them.
        self.give: Any = torch.compiler.disable(self._give)  # type: ignore[no-untyped-call]

    @contextmanager
    def evaluation(self, batch: str) -> Iterator[None]:
        """One evaluation of the batch that `batch` names."""
        self._batch, self._next = batch, {}
        _active.append(self)
        try:
            yield
        finally:
            _active.pop()

    def _give(
        self, kind: Callable[..., Tensor], shape: tuple[int, ...], device: torch.device, of_batch: bool
    ) -> Tensor:
        """The next tensor of this evaluation: a new one in the first, the same one in each later."""
        tape = f"batch {self._batch}" if of_batch else "step"
        kept, position = self._kept.setdefault(tape, []), self._next.get(tape, 0)
        self._next[tape] = position + 1
        if position == len(kept):
            kept.append(kind(shape, device=device, dtype=torch.float32))
        assert kept[position].shape == shape, (
            f"draw {position} of the {tape} has shape {list(shape)}, but had {list(kept[position].shape)} before: "
            "all evaluations of a step must draw in the same order"
        )
        return kept[position]


def uniform_for_batch(x: Tensor, *tail: int) -> Tensor:
    """Return this rank's uniform numbers in [0, 1), shape [N, *tail], for `x` [N, ...].

    Always float32, so that the precision of a run does not change the dropped paths.
    """
    start, total = _slice_of(x)
    return draw_uniform(total, *tail, device=x.device, of_batch=True)[start : start + x.shape[0]]


def _normal_for_batch(x: Tensor, *tail: int) -> Tensor:
    """Return this rank's numbers from N(0, 1), shape [N, *tail], for `x` [N, ...]; float32 as above."""
    start, total = _slice_of(x)
    return draw_normal(total, *tail, device=x.device, of_batch=True)[start : start + x.shape[0]]


def _slice_of(x: Tensor) -> tuple[int, int]:
    """Where this rank's part of the global batch starts, and the size of that batch; all parts have the same size."""
    batch = x.shape[0]
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() * batch, dist.get_world_size() * batch
    return 0, batch


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


PRIME = 2**31 - 1  # squares of numbers below it fit 64 bits
_FIXED: list[bool] = []


@contextmanager
def fixed_noise() -> Iterator[None]:
    """Within this context noise is its fixed pattern in training too, so that two networks can be compared."""
    _FIXED.append(True)
    try:
        yield
    finally:
        _FIXED.pop()


def fixed_normal(salt: Tensor, channels: int, height: int, width: int) -> Tensor:
    """N(0, 1) numbers [channels, height, width] in float32 that depend only on `salt` (int64 []) and the position.

    Whole numbers are scattered by a quadratic map modulo a prime, two of them make a normal one (Box, Muller 1958).
    """
    positions = torch.arange(channels * height * width, device=salt.device, dtype=torch.int64) + salt
    first = (positions * 48271 + 11) % PRIME
    first = (first * first + positions) % PRIME
    second = (positions * 69621 + 7) % PRIME
    second = (second * second + first) % PRIME
    # u is never 0, whose logarithm is infinite.
    u, v = (first + 1).to(torch.float32) / (PRIME + 1), second.to(torch.float32) / PRIME
    normal = torch.sqrt(-2.0 * torch.log(u)) * torch.cos(2.0 * math.pi * v)
    return normal.view(channels, height, width)


class Noise(nn.Module):
    """[n, c, h, w] to noise [n, c, ⌈h/stride⌉, ⌈w/stride⌉] from N(0, 1), independent of the input (RobustDARTS's S4).

    Zela et al.: Understanding and Robustifying Differentiable Architecture Search, ICLR 2020, §3. Nothing can be
    learned through it, so a sound search avoids it. In training values are redrawn at every step. Deviation: in
    evaluation they are one fixed pattern per edge (`salt`), the same for every image, so that a measured accuracy
    repeats, does not depend on the batch size, and a derived network can be exported.
    """

    salt: Tensor

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.register_buffer("salt", torch.randint(PRIME, ()))

    def forward(self, x: Tensor) -> Tensor:
        n, c, height, width = x.shape
        height, width = -(-height // self.stride), -(-width // self.stride)
        if self.training and not _FIXED:
            return _normal_for_batch(x, c, height, width).to(x.dtype)
        return fixed_normal(self.salt, c, height, width).to(x.dtype).expand(n, c, height, width)


@candidate("noise", blind=True)
def noise(spec: Spec) -> nn.Module:
    return Noise(spec.stride)
