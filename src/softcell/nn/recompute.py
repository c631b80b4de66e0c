"""Modules and functions that keep only their inputs for the backward pass, and compute what lies between anew there."""

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
    """`run(*given)`, which draws no random numbers and has no running statistics; of it only `given` is kept."""
    if not torch.is_grad_enabled():
        return run(*given)
    return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def recomputed(module: nn.Module, *inputs: Tensor) -> Tensor:
    """`module(*inputs)` with the same value and gradients; batch-norm counts the batch once.

    Modules without weights keep little and may draw random numbers: they run as they are.
    """
    # What the backward pass computes with must be what stands in the module now, which may be on loan.
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
