"""What a run sets up before anything else: device, processes, threads, numeric switches, seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from softcell.engine import distributed
from softcell.engine.device import resolve_device, set_deterministic, set_tf32, set_threads
from softcell.engine.distributed import World
from softcell.engine.rng import seed_everything

DTYPES = {"auto": torch.float32, "float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
"""What weights, optimisers and statistics are kept in: with `bfloat16` only the computing between them is short."""


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context whose products and convolutions are short with `bfloat16`."""
    if precision != "bfloat16":
        return nullcontext()
    # Nothing is cached: a recorded step must cast its weights anew each time.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def in_precision(step: Callable[..., None], precision: str, device: torch.device) -> Callable[..., None]:
    """`step` computing in `precision`; accuracies of derived networks are measured outside, in full precision."""

    def run(*inputs: Tensor) -> None:
        with computing_in(precision, device):
            step(*inputs)

    return run if precision == "bfloat16" else step


M = TypeVar("M", bound=nn.Module)


def place(module: M, device: torch.device, dtype: torch.dtype = torch.float32) -> M:
    """Moves a module; convolution weights are laid out channels-last.

    Outputs then are channels-last too. Not a choice: fused cells keep their planes so, and on a CPU a search step by
    modules takes 1.3 to 1.5 times as long the other way (benchmarks/NOTES.md).
    """
    module.to(device=device, dtype=dtype)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


@dataclass(frozen=True, slots=True)
class Session:
    """The surroundings of one run."""

    world: World
    dtype: torch.dtype
    threads: int

    @property
    def device(self) -> torch.device:
        return self.world.device

    def place(self, module: M) -> M:
        """The module on this run's device, in its precision and memory format."""
        return place(module, self.device, self.dtype)


@contextmanager
def open_session(*, device: str, seed: int, precision: str, deterministic: bool, threads: int) -> Iterator[Session]:
    """Sets everything up, and leaves the process group when the block ends.

    Every rank seeds alike: what is random is drawn for the global batch on all ranks.
    """
    set_deterministic(deterministic)
    # float32 means float32: speed by lower precision is a choice the user makes by name.
    set_tf32(False)
    count = set_threads(threads)
    already = torch.distributed.is_available() and torch.distributed.is_initialized()
    world = distributed.current() if already else distributed.start(resolve_device(device))
    seed_everything(seed)
    try:
        yield Session(world, DTYPES[precision], count)
    finally:
        if not already:
            distributed.stop()
