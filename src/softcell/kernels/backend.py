"""What all kernels share: the choice between Triton and the plain twins, launch settings, and tables on the device.

Triton's kernels run for tensors on a GPU if Triton is installed, otherwise their plain PyTorch twins.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

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


def compute_type(x: Tensor) -> torch.dtype:
    """The dtype of computations on `x`: its own, or the dtype of autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def runs_triton(x: Tensor) -> bool:
    """Whether operations on `x` use Triton. Its interpreter (`TRITON_INTERPRET=1`) also accepts CPU tensors."""
    if not torch.compiler.is_compiling() and _TWINS_ONLY.get():  # torch.compile cannot trace a context variable
        return False
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (x.device.type == "cuda" or interpreted) and x.dtype in (torch.float32, torch.bfloat16) and has_triton()


@dataclass(frozen=True, slots=True)
class CellSettings:
    """Launch settings of `kernels.cell`; results differ at most by rounding.

    moments_values, moments_warps: values that a program of the kernel that merges statistics reads at once (a multiple
    of the channels), and its warps. sums_values: the same for the sums in gradients of norms and mixes, whose rows are
    split into at most `splits` parts. reads_ahead: several inputs of a node are read before the first is used.
    second_stream: gradients of weights run on a second stream, since nothing else in a backward pass waits for them;
    this takes 3 to 4 % less time per search step on an H200 and gives the same bits. early_launch: programs of a kernel
    start while the last programs of the previous kernel are still running, and wait for its end (programmatic dependent
    launch, compute capability 9.0 or higher). library_channels: from this width on, convolutions that read no negative
    values (NAS-Bench-1Shot1) run by the library inside the fused cell (`kernels.library_conv`).
    batch_kernels: searches and training with fused cells augment each batch, and count the metrics of a step, by one
    launch each.
    copies_along: the input of a cell, and the gradient of its output, are copied by kernels that read them anyway.
    mixes_together: gradients of a table of mixing weights that several cells read are summed by one launch.
    pools_together: average pools without a maximum share a launch with the convolutions that read the same nodes.
    block_norms: norms around the cells of a supernet run with what follows them (`softcell.nn.fused_convs`).
    """

    moments_values: int = 8192
    moments_warps: int = 8
    sums_values: int = 4096
    splits: int = 128
    reads_ahead: bool = True
    second_stream: bool = True
    early_launch: bool = False
    library_channels: int = 128
    batch_kernels: bool = True
    copies_along: bool = True
    mixes_together: bool = True
    pools_together: bool = True
    block_norms: bool = True


default_settings = CellSettings()
# Not a context variable: backward passes run in an autograd thread and must see it too.
_settings = default_settings


def current_settings() -> CellSettings:
    return _settings


@contextmanager
def cell_settings(**changes: Any) -> Iterator[None]:
    """Changes these fields for fused cells inside this context.

    `python -m benchmarks.supernet` compares settings. A captured step keeps those of its capture.

    Example:
        >>> from softcell.kernels.backend import cell_settings, current_settings
        >>> with cell_settings(splits=128):
        ...     current_settings().splits
        128
    """
    global _settings
    before, _settings = _settings, replace(_settings, **changes)
    try:
        yield
    finally:
        _settings = before


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

    def __init__(
        self, rows: tuple[tuple[int, ...], ...], device: torch.device, dtype: torch.dtype = torch.int32
    ) -> None:
        own = torch.tensor(rows, dtype=dtype)
        self._copied: torch.cuda.Event | None = None
        self._on_gpu = device.type == "cuda"
        if not self._on_gpu or torch.cuda.is_current_stream_capturing():
            self.tensor = own.to(device)
            return
        self.tensor = own.pin_memory().to(device, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def await_copy(self, owner: object = None) -> None:
        """owner: what captured launches refer to besides; once it is freed, they cannot run, nor need the table."""
        # All copies finish before a capture begins, and a capture must not query events recorded outside it.
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            _captured.add(self)
            if owner is not None:
                weakref.finalize(owner, _captured.discard, self).atexit = False
            return
        if self._copied is None:
            return
        if current_settings().early_launch:  # these kernels read tables before they wait for the preceding kernel
            self._copied.synchronize()
        if self._copied.query():  # type: ignore[no-untyped-call]
            self._copied = None
        else:
            self._copied.wait()


_captured: set[KeptTable] = set()
"""Kept forever, or as long as an owner: a captured step reads these tables by address, which Python's reference counts
do not see."""


@contextmanager
def captured_tables(kept: set[KeptTable]) -> Iterator[None]:
    """A capture in this context puts the tables that it reads into `kept`, which must live as long as the capture."""
    global _captured  # not a context variable: backward passes run in an autograd thread
    before, _captured = _captured, kept
    try:
        yield
    finally:
        _captured = before


@functools.lru_cache(maxsize=4096)
def kept_table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> KeptTable:
    return KeptTable(rows, device)
