"""Selects kernels: Triton's for tensors on a GPU if Triton is installed, otherwise the plain PyTorch twins."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from softcell.kernels.settings import current

_TWINS_ONLY: ContextVar[bool] = ContextVar("twins_only", default=False)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@contextmanager
def twins_only() -> Iterator[None]:
    """Disables Triton kernels inside this context, for one-off work that is not worth compiling for."""
    token = _TWINS_ONLY.set(True)
    try:
        yield
    finally:
        _TWINS_ONLY.reset(token)


def runs_triton(x: Tensor) -> bool:
    """Whether operations on `x` use Triton. Its interpreter (`TRITON_INTERPRET=1`) also accepts CPU tensors."""
    if not torch.compiler.is_compiling() and _TWINS_ONLY.get():  # torch.compile cannot trace a context variable
        return False
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (x.device.type == "cuda" or interpreted) and x.dtype in (torch.float32, torch.bfloat16) and has_triton()


def is_wanted(ctx: Any, number: int) -> bool:
    """Whether a backward pass needs the gradient of an input; `number` is its position among the tensor inputs.

    `needs_input_grad` only shows that the tensor requires a gradient, not that this pass computes it. torch does not
    report this for leaves, so they count as needed.
    """
    node = ctx.next_functions[number][0]
    if node is None:
        return False
    return node.name().endswith("AccumulateGrad") or bool(torch._C._will_engine_execute_node(node))


def padded(count: int, least: int = 16) -> int:
    """The next power of two, at least `least`; 16 is the smallest side that `tl.dot` supports."""
    return max(least, 1 << max(count - 1, 0).bit_length())


def by_twin(
    twin: Callable[..., Sequence[Tensor]], given: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of `twin(*given)`. Unlike a kernel's gradients, they can be differentiated again.

    Each tensor is treated as an independent input, even if one of them was computed from another.
    """
    own = [None if one is None else one.view_as(one) for one in given]
    known = [(y, grad) for y, grad in zip(twin(*own), grads, strict=True) if grad is not None]
    wanted = [one for one in own if one is not None and one.requires_grad]
    outputs, pulls = [y for y, _ in known], [grad for _, grad in known]
    found = iter(torch.autograd.grad(outputs, wanted, pulls, create_graph=True, allow_unused=True))
    return [next(found) if one is not None and one.requires_grad else None for one in own]


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory available to a Triton program on this device; unlimited in the interpreter."""
    if device.type != "cuda":
        return 2**30
    from triton.runtime import driver  # type: ignore[import-not-found, unused-ignore]

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


@functools.cache
def triton_kernels(family: str) -> ModuleType:
    """The Triton module of a kernel family, imported on first use so that other code does not need Triton."""
    return importlib.import_module(f"softcell.kernels.{family}_triton")


def table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Rows of numbers as an int32 tensor on the device, cached because copying them in every step is expensive."""
    kept = kept_table(rows, device)
    kept.await_copy()
    return kept.tensor


class KeptTable:
    """A small tensor copied to the device asynchronously: streams that use it wait for the copy, the host does not."""

    def __init__(self, rows: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        own = torch.tensor(rows, dtype=torch.int32)
        self._copied: torch.cuda.Event | None = None
        self._on_gpu = device.type == "cuda"
        if not self._on_gpu or torch.cuda.is_current_stream_capturing():
            self.tensor = own.to(device)
            return
        self.tensor = own.pin_memory().to(device, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def await_copy(self) -> None:
        # All copies finish before a capture begins, and a capture must not query events recorded outside it.
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            _captured.add(self)
            return
        if self._copied is None:
            return
        if current().early_launch:  # these kernels read tables before they wait for the preceding kernel
            self._copied.synchronize()
        if self._copied.query():  # type: ignore[no-untyped-call]
            self._copied = None
        else:
            self._copied.wait()


_captured: set[KeptTable] = set()
"""Kept forever: a captured step reads these tables by address, which Python's reference counts do not see."""


@functools.lru_cache(maxsize=4096)
def kept_table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> KeptTable:
    return KeptTable(rows, device)
