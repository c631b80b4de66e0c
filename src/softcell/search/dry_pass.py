"""Compiles the kernels of a search before its first step.

A dry pass runs the code of a step and of a validation pass without launching a kernel of Triton's
(`softcell.kernels.warm_up.dry_launches`), which shows what has to be compiled. Its values are those of uninitialised
memory. Therefore nothing learns from them, and everything that they reach is restored: the search is bit for bit the
same with and without a dry pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from softcell.arch import Mix
from softcell.data.batches import Draft
from softcell.engine.distributed import World
from softcell.engine.metrics import Tally
from softcell.engine.optim import rehearse_gradients
from softcell.engine.session import forked_rng
from softcell.kernels.backend import has_triton
from softcell.kernels.shared import without_exchange
from softcell.kernels.warm_up import failure_reported, is_enabled, warm_up_by_run
from softcell.search.steps import StepState

if TYPE_CHECKING:
    from softcell.search.task import SearchTask


def compile_ahead(task: SearchTask, batch: Draft) -> None:
    """Compile what the first step and the first validation launch, in parallel; batch: that of the first step.

    A failure is reported, and kernels are then compiled on first use.
    """
    if not launches_kernels(task.world, task.recipe.precision):
        return
    with failure_reported(task.notify), without_effects(task):
        warm_up_by_run(lambda: task.rehearse(batch), task.notify)
    if task.world.device.type == "cuda":
        torch.cuda.empty_cache()  # steps run on another stream, which cannot use what is cached here


def launches_kernels(world: World, precision: str) -> bool:
    """Whether searches may launch kernels that can be compiled ahead."""
    return world.device.type == "cuda" and precision != "float64" and has_triton() and is_enabled()


class Unlearning(StepState):
    """A step that computes gradients and launches what applies them, but changes nothing, without other ranks."""

    __slots__ = ()

    @classmethod
    def of(cls, state: StepState) -> Self:
        own = {field.name: getattr(state, field.name) for field in fields(state)}
        return cls(**{**own, "world": replace(state.world, rank=0, size=1)})

    def observe(self, mix: Mix, gradients: Sequence[Tensor | None]) -> None:
        pass

    def learn_weights(self, means: Sequence[Tensor | None]) -> None:
        rehearse_gradients(self.weight_optimiser, self.weights(), means, self.clip_weights)

    def learn_architecture(self, means: Sequence[Tensor | None]) -> None:
        rehearse_gradients(self.architecture_optimiser, self.architecture(), means, self.clip_architecture)


@contextmanager
def without_effects(task: SearchTask) -> Iterator[None]:
    """Within this context `task.rehearse` learns nothing; at its end all values and random numbers are as before."""
    device, state, tally = task.world.device, task.step_state, task.tally
    modules: list[nn.Module | None] = [state.supernet, state.method, state.objective, state.resource]
    kept = _Values([module for module in modules if module is not None], state.objective.gauges().values())
    task.step_state, task.tally = Unlearning.of(state), Tally(device)
    try:
        with forked_rng(device), without_exchange():
            yield
    finally:
        task.step_state, task.tally = state, tally
        kept.restore()


class _Values:
    """Copies of all parameters and buffers of modules, non-persistent buffers too, and the modules' modes.

    others: further tensors.
    """

    def __init__(self, roots: Sequence[nn.Module], others: Iterable[Tensor]) -> None:
        modules = [module for root in roots for module in root.modules()]
        self._modes = [(module, module.training) for module in modules]
        self._buffers = [
            (module, name, buffer)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        tensors = [
            *(p for root in roots for p in root.parameters()),
            *(buffer for *_, buffer in self._buffers),
            *others,
        ]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        for module, mode in self._modes:
            module.training = mode
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer
        for tensor, before in self._tensors:
            tensor.copy_(before)
