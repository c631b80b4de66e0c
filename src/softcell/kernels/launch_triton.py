# mypy: ignore-errors
"""Programmatic dependent launch: a kernel starts while the previous one in the stream is still running.

Launching and starting a kernel takes about as long as most kernels of a NAS-Bench-201 cell run. With this attribute,
programs start as soon as all programs of the previous kernel have started, and wait for its end before they read
anything that it may have written. Tables are read before this wait: nothing writes them during a step.
"""

import functools
import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from softcell.kernels.backend import current_settings


@triton.jit
def await_previous(EARLY: tl.constexpr):
    """Wait until the previous kernel has finished and its results are visible, and allow the next one to start."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def _has_dependent_launch():
    if os.environ.get("TRITON_INTERPRET") == "1":
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


def launching():
    """Additional launch arguments of a kernel that calls `await_previous`."""
    if current_settings().early_launch and _has_dependent_launch():
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
