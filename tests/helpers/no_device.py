"""Stands for a GPU where there is none: cells are fused and kernels can be compiled for it, but nothing is launched."""

from __future__ import annotations

import importlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import softcell.kernels
from softcell.data import batches
from softcell.engine import metrics, optim
from softcell.kernels import (
    block_norm,
    calibrate,
    indicator,
    library_conv,
    local,
    mixed_norm,
    norm,
    pool,
    sgd,
    taps,
    window_mean,
)
from softcell.kernels.warm_up import Target
from softcell.nn import attention, conv, stack
from softcell.spaces import _executors, execution
from softcell.spaces.execution import is_modules_only

HOPPER = Target("cuda", 90, 32)


class Driver:
    """Stands for Triton's driver of a GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found, unused-ignore]

        return GPUTarget(*HOPPER)


def take_for_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU count as a GPU until the test ends. Callers must end every launch of a kernel."""
    from triton.runtime import driver  # type: ignore[import-not-found, unused-ignore]

    monkeypatch.setattr(driver, "_active", Driver())
    for kernel in all_kernels():  # without what earlier tests have compiled
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    monkeypatch.setattr(execution, "kernels_serve", lambda x: bool(x.numel()) and not is_modules_only())
    kernels = (block_norm, calibrate, indicator, library_conv, local, mixed_norm, norm, pool, sgd, taps, window_mean)
    for module in (*kernels, _executors, attention, conv, stack, batches, metrics, optim):
        monkeypatch.setattr(module, "runs_triton", _runs_triton)


def all_kernels() -> list[Any]:
    """Triton's functions of all families of kernels."""
    from triton.runtime.jit import JITFunction  # type: ignore[import-not-found, unused-ignore]

    families = sorted(path.stem for path in Path(softcell.kernels.__file__).parent.glob("*_triton.py"))
    modules = [importlib.import_module(f"softcell.kernels.{family}") for family in families]
    return [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]


def _runs_triton(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.bfloat16)
