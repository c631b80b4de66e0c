"""Which kernels run: Triton's where the tensors are on a GPU and Triton is installed, the plain twins elsewhere."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_triton(x: Tensor) -> bool:
    """Whether operations on `x` go to Triton. Its interpreter (`TRITON_INTERPRET=1`) also takes CPU tensors."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (x.device.type == "cuda" or interpreted) and x.dtype in (torch.float32, torch.bfloat16) and has_triton()


@functools.cache
def triton_kernels(family: str) -> ModuleType:
    """The Triton half of a family of kernels; imported on first use, so that nobody else needs Triton."""
    return importlib.import_module(f"softcell.kernels.{family}_triton")


@functools.lru_cache(maxsize=4096)
def table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Rows of numbers as int32 on the device; kept, since copying them each step would stall a GPU."""
    return torch.tensor(rows, dtype=torch.int32, device=device)
