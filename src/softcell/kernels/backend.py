"""Which kernels run: Triton's where the tensors are on a GPU and Triton is installed, the plain twins elsewhere."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_triton(x: Tensor) -> bool:
    """Whether operations on `x` go to Triton. Its interpreter (`TRITON_INTERPRET=1`) also takes CPU tensors."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (x.device.type == "cuda" or interpreted) and x.dtype in (torch.float32, torch.bfloat16) and has_triton()


def is_wanted(ctx: Any, number: int) -> bool:
    """In a backward pass: whether it asks for the gradient of this tensor, by its number among those of the forward.

    `needs_input_grad` says that it could be asked for. Of leaves torch cannot tell; they count as wanted.
    """
    node = ctx.next_functions[number][0]
    if node is None:
        return False
    return node.name().endswith("AccumulateGrad") or bool(torch._C._will_engine_execute_node(node))


@functools.cache
def triton_kernels(family: str) -> ModuleType:
    """The Triton half of a family of kernels; imported on first use, so that nobody else needs Triton."""
    return importlib.import_module(f"softcell.kernels.{family}_triton")


def table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Rows of numbers as int32 on the device; kept, since copying them each step would cost more than using them."""
    kept = _kept(rows, device)
    kept.await_copy()
    return kept.tensor


class _Kept:
    """A small tensor on its way to the device: the host does not wait for it, streams that use it do."""

    def __init__(self, rows: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        own = torch.tensor(rows, dtype=torch.int32)
        self._copied: torch.cuda.Event | None = None
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            self.tensor = own.to(device)
            return
        self.tensor = own.pin_memory().to(device, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def await_copy(self) -> None:
        # Before a recording begins everything has arrived, and inside one events of outside must not be asked.
        if self._copied is None or torch.cuda.is_current_stream_capturing():
            return
        if self._copied.query():  # type: ignore[no-untyped-call]
            self._copied = None
        else:
            self._copied.wait()


_kept = functools.lru_cache(maxsize=4096)(_Kept)
