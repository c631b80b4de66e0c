"""Random numbers of a step, and how several evaluations of one step share them.

Everything random inside a step (samples, drop-path, noise candidates, hidden rectangles) is drawn by `draw_uniform`,
`draw_normal` and `draw_gamma`. A second-order step evaluates a batch at several weights and divides a difference by a
small ε. With new random numbers in each evaluation that would be noise divided by ε. Within `SharedDraws` the first
evaluation draws, and each later one gets the same tensors in the same order.

Tensors are kept, not the state of a generator: the state cannot be set back while a CUDA graph is recorded. A recorded
step draws each tensor once per replay and reads it several times, so replays still get new numbers. Afterwards the
generator is where one evaluation leaves it, so nothing more than its state has to be saved to resume a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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
    """`kind(shape)` in float32, so that the precision of a run does not change what is drawn.

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
