"""The setup of a process for a run: device, numeric switches, threads, seeds, process group, signals."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy
import torch
from torch import Tensor, nn

from softcell.engine import distributed
from softcell.engine.distributed import World
from softcell.engine.heartbeat import Heartbeat
from softcell.errors import UserError
from softcell.machine import usable_cores
from softcell.settings import at_most
from softcell.text import count_of

# The two workspaces for which cuBLAS promises repeatable results; the larger one costs 24 MiB and no speed.
_CUBLAS_WORKSPACE = ":4096:8"
MAX_THREADS = 64  # or the number of cores: more threads only wait for each other


def resolve_device(name: str) -> torch.device:
    """Turn "cpu", "cuda", "cuda:1", "mps" or "auto" (CUDA where there is one) into a device that exists here.

    Apple's GPUs ("mps") run the plain path: no captured steps and no Triton. They must be requested, because nothing of
    Softcell was tested on one.

    Example:
        >>> from softcell.engine import resolve_device
        >>> resolve_device("cpu")
        device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f'the device must be "auto", "cpu", "cuda", "cuda:N" or "mps", but got {name!r}')
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(
            f"device {name!r} needs an Apple GPU, but torch {torch.__version__} finds none; use 'cpu' or 'auto'"
        )
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise UserError(
                f"device {name!r} requires {f'at least {device.index + 1} CUDA devices' if device.index else 'CUDA'}, "
                f"but torch {torch.__version__} finds {count_of(count, 'usable CUDA device')}. Use 'cpu' or 'auto', or "
                f"install a CUDA build of torch and check the driver and CUDA_VISIBLE_DEVICES."
            )
    return device


def set_deterministic(on: bool, *, warn_only: bool = False) -> None:
    """Make every operation repeatable bit by bit, or (off) let torch use its fastest ones.

    Operations without a repeatable form raise torch's own error, or warn if `warn_only`.

    Example:
        >>> import torch
        >>> from softcell.engine import set_deterministic
        >>> set_deterministic(True)
        >>> torch.are_deterministic_algorithms_enabled()
        True
        >>> set_deterministic(False)
    """
    if on and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (_CUBLAS_WORKSPACE, ":16:8"):
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # cuBLAS reads the variable when it creates its handle.
            warnings.warn(
                "CUBLAS_WORKSPACE_CONFIG is set after CUDA was started, so matrix products may still differ between "
                "runs. Call set_deterministic before the first CUDA operation.",
                stacklevel=2,
            )
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = _CUBLAS_WORKSPACE
    # Only if it changes something: torch imports its compiler for this call, which takes seconds.
    if (on, on and warn_only) != (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    ):
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
    torch.backends.cudnn.deterministic = on
    # cuDNN times its candidates, which makes it choose differently from run to run.
    torch.backends.cudnn.benchmark = not on


def set_tf32(allowed: bool) -> None:
    """Allow or forbid TensorFloat-32 (10-bit mantissa) in float32 matrix products and convolutions on CUDA.

    torch's default differs between the two (products exact, convolutions TF32); here both follow one setting.

    Example:
        >>> import torch
        >>> from softcell.engine import set_tf32
        >>> set_tf32(False)
        >>> torch.backends.cuda.matmul.allow_tf32
        False
    """
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def set_threads(count: int) -> int:
    """Use `count` CPU threads per operation (0 leaves torch's choice) and return how many are in use.

    Example:
        >>> from softcell.engine import set_threads
        >>> set_threads(1)
        1
    """
    if count < 0:
        raise UserError(f"`threads >= 0` must hold, but got threads={count}; 0 leaves the choice to torch")
    cores = usable_cores()
    at_most("threads", count, max(MAX_THREADS, cores))
    if count > cores:
        warnings.warn(
            f"threads={count} is more than the {cores} cores that this process may use, which makes it slower; lower "
            "--threads",
            stacklevel=2,
        )
    if count > 0:
        torch.set_num_threads(count)
    return torch.get_num_threads()


@functools.cache
def keep_freed_memory() -> bool:
    """Ask glibc to keep freed memory in the process; returns whether it does. Values are not affected.

    A training step frees and allocates the same tensors again. By default glibc returns them to the system in between
    and the kernel clears the pages each time, which took a tenth of a step of DARTS cells on a CPU. Thresholds that the
    user has set (`MALLOC_TRIM_THRESHOLD_`, ...) are left alone.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library, such as musl
        return False
    trim_threshold, mmap_threshold = -1, -3  # their numbers in malloc.h
    return all([mallopt(trim_threshold, 256 << 20), mallopt(mmap_threshold, 32 << 20)])  # 32 MiB is the most it accepts


def seed_everything(seed: int) -> None:
    """Seed torch (CPU and every CUDA device), numpy's and Python's global generators.

    Softcell draws from torch's generators only, so checkpoints keep only those; the others are seeded for user code.

    Example:
        >>> import torch
        >>> from softcell.engine import seed_everything
        >>> seed_everything(7)
        >>> first = torch.rand(2)
        >>> seed_everything(7)
        >>> torch.equal(torch.rand(2), first)
        True
    """
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # numpy accepts 32 bits only


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's CPU generator and, for a GPU, of that device's one.

    Returns:
        `{"cpu": [bytes] uint8, "cuda": [bytes] uint8 or None}`, on an Apple GPU also `"mps": [bytes] uint8`
    """
    cuda: Tensor | None = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    state = {"cpu": torch.get_rng_state(), "cuda": cuda}
    return {**state, "mps": torch.mps.get_rng_state()} if device.type == "mps" else state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `rng_state` returned; warns when the run has moved between kinds of devices."""
    torch.set_rng_state(state["cpu"].cpu())
    kind = "cuda" if state["cuda"] is not None else "mps" if "mps" in state else "cpu"
    if device.type != kind:
        before = {"cuda": "a CUDA device", "mps": "an Apple GPU", "cpu": "the CPU"}[kind]
        warnings.warn(
            f"the random state was saved on {before} and is restored on {device}, so the random numbers will differ. "
            f"Resume on the same kind of device for identical results.",
            stacklevel=2,
        )
    elif kind == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    elif kind == "mps":
        torch.mps.set_rng_state(state["mps"].cpu())


def forked_rng(device: torch.device) -> AbstractContextManager[None]:
    """Restores the random state of the CPU and of `device` at the end of the block."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


class Interrupt:
    """Turns Ctrl-C and a scheduler's SIGTERM into a flag that the loop reads between two steps.

    Within the context the first SIGINT or SIGTERM is stored in `signal`; 0 means none. A second SIGINT raises
    KeyboardInterrupt at once. Outside the main thread, where Python allows no handlers, nothing is caught. Nested
    contexts share the outermost one: a signal stops all runs of a process.
    """

    _active: ClassVar[Interrupt | None] = None

    def __init__(self) -> None:
        self._caught = 0
        self._before: dict[int, Any] = {}
        self._outer: Interrupt | None = None

    @property
    def signal(self) -> int:
        return self._caught if self._outer is None else self._outer.signal

    def __enter__(self) -> Self:
        if Interrupt._active is not None:
            self._outer = Interrupt._active
        elif threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
            Interrupt._active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outer is not None:
            self._caught, self._outer = self._outer.signal, None
            return
        if Interrupt._active is self:
            Interrupt._active = None
        for number, handler in self._before.items():
            # None: the handler was not installed from Python and cannot be restored from it.
            if handler is not None:
                signal.signal(number, handler)
        self._before.clear()

    def request(self) -> None:
        """Ask all runs of this context to stop and save their state, as SIGTERM would."""
        if self._outer is not None:
            self._outer.request()
        else:
            self._caught = self._caught or signal.SIGTERM

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._caught:
            raise KeyboardInterrupt
        self._caught = self._caught or number


def exit_code(number: int) -> int:
    """The exit code that shells use for an end by signal `number`: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + number


DTYPES = {"auto": torch.float32, "float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
"""The dtype of weights, optimisers and statistics; `bfloat16` only affects the computation between them."""


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context that runs matrix products and convolutions in `precision`."""
    if precision != "bfloat16":
        return nullcontext()
    # No cache: a captured step must cast its weights at every replay.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def in_precision(step: Callable[..., None], precision: str, device: torch.device) -> Callable[..., None]:
    """`step` in `precision`; the accuracy of derived networks is measured outside, in full precision."""

    def run(*inputs: Tensor) -> None:
        with computing_in(precision, device):
            step(*inputs)

    return run if precision == "bfloat16" else step


M = TypeVar("M", bound=nn.Module)


def place(module: M, device: torch.device, dtype: torch.dtype = torch.float32) -> M:
    """Move a module to a device and dtype, with convolution weights channels-last.

    Outputs then are channels-last too. This is not a setting: fused cells require it, and on a CPU a search step takes
    1.3 to 1.5 times as long channels-first (benchmarks/NOTES.md).
    """
    module.to(device=device, dtype=dtype)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


@dataclass(frozen=True, slots=True)
class Session:
    """Processes, dtype and CPU threads of one run."""

    world: World
    dtype: torch.dtype
    threads: int

    @property
    def device(self) -> torch.device:
        return self.world.device

    def place(self, module: M) -> M:
        """Move a module to this run's device, dtype and memory format."""
        return place(module, self.device, self.dtype)


@contextmanager
def join_processes(device: str, deterministic: bool) -> Iterator[World]:
    """Joins the processes of torchrun until the block ends; within such a block, returns the same world again.

    A block around several runs keeps the processes together between them, so that all agree on folders.
    """
    set_deterministic(deterministic)  # before CUDA starts, which is when cuBLAS reads its setting
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        yield distributed.current()
        return
    world = distributed.start(resolve_device(device))
    if world.size == 1:
        yield world
        return
    heartbeat, failure = Heartbeat(world), None
    try:
        yield world
    except BaseException as error:
        failure = heartbeat.explain(error) or error
        if failure is error:
            raise
        raise failure from error
    finally:
        heartbeat.stop(failure)
        distributed.stop()


class RunSettings(Protocol):
    """The process settings that every recipe has."""

    @property
    def device(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def precision(self) -> str: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def threads(self) -> int: ...


def session_of(recipe: RunSettings) -> AbstractContextManager[Session]:
    """`open_session` for a recipe."""
    return open_session(
        device=recipe.device,
        seed=recipe.seed,
        precision=recipe.precision,
        deterministic=recipe.deterministic,
        threads=recipe.threads,
    )


@contextmanager
def open_session(*, device: str, seed: int, precision: str, deterministic: bool, threads: int) -> Iterator[Session]:
    """Set up the process for a run; leave the process group when the block ends.

    All ranks use the same seed: random numbers are drawn for the global batch on every rank.
    """
    with join_processes(device, deterministic) as world:
        if precision == "float64" and world.device.type == "mps":
            raise UserError("an Apple GPU has no float64, but got precision=float64; use float32, or --device cpu")
        # float32 means float32: lower precision is an explicit choice of the user.
        set_tf32(False)
        count = set_threads(threads)
        if world.device.type == "cpu":
            keep_freed_memory()
        seed_everything(seed)
        yield Session(world, DTYPES[precision], count)
