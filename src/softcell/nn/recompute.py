"""Activation checkpointing: modules and functions that keep only their inputs and run again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from softcell.nn.norm import statistics_kept

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
    # The backward pass must use the parameters of now, which may be temporary ones.
    state: dict[str, Tensor] = dict(module.named_parameters())
    if not state or not torch.is_grad_enabled():
        return module(*inputs)  # type: ignore[no-any-return]

    def forward(*given: Tensor) -> Tensor:
        return functional_call(module, state, given)  # type: ignore[no-any-return]

    return checkpoint(  # type: ignore[no-any-return]
        forward, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts
    )


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), statistics_kept()
