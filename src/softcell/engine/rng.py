"""Seeds, saves and restores the random generators of a run.

The package draws from torch's generators only, so only those are saved; the others are seeded for user code.
"""

import random
import warnings
from typing import Any

import numpy
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """Seed torch (CPU and every CUDA device), numpy's and Python's global generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # numpy accepts 32 bits only


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's CPU generator and, for a CUDA `device`, of that device's one.

    Returns:
        `{"cpu": [bytes] uint8, "cuda": [bytes] uint8 or None}`
    """
    cuda: Tensor | None = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `rng_state` returned; warns when the run has moved between CPU and CUDA."""
    torch.set_rng_state(state["cpu"].cpu())
    if (device.type == "cuda") != (state["cuda"] is not None):
        before = "a CUDA device" if state["cuda"] is not None else "the CPU"
        warnings.warn(
            f"the random state was saved on {before} and is restored on {device}: the run goes on with other random "
            f"numbers than it would have had. Resume on the same kind of device for an exact repetition.",
            stacklevel=2,
        )
    elif device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
