"""Chooses the device and sets torch's global numeric switches, each by an explicit call."""

import os
import sys
import warnings

import torch

from softcell.errors import UserError
from softcell.settings import at_most

# The two workspaces for which cuBLAS promises repeatable results; the larger one costs 24 MiB and no speed.
_CUBLAS_WORKSPACE = ":4096:8"
MOST_THREADS = 64  # or as many as there are cores: more wait for each other for ever


def resolve_device(name: str) -> torch.device:
    """Turn "cpu", "cuda", "cuda:1" or "auto" (CUDA where there is one) into a device that exists here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f'the device must be "auto", "cpu", "cuda" or "cuda:N", but got {name!r}')
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise UserError(
                f"device {name!r} needs more than {device.index or 0} usable CUDA device(s), but torch "
                f"{torch.__version__} finds {count}. Use 'cpu' or 'auto', or install a CUDA build of torch and check "
                f"the driver and CUDA_VISIBLE_DEVICES."
            )
    return device


def set_deterministic(on: bool, *, warn_only: bool = False) -> None:
    """Make every operation repeatable bit by bit, or (off) let torch take its fastest ones.

    Operations without a repeatable form raise torch's own error, or warn if `warn_only`.
    """
    if on and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (_CUBLAS_WORKSPACE, ":16:8"):
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # cuBLAS has read the variable already when it made its handle.
            warnings.warn(
                "CUBLAS_WORKSPACE_CONFIG is set after CUDA was started, so matrix products may still differ between "
                "runs. Call set_deterministic before the first CUDA operation.",
                stacklevel=2,
            )
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = _CUBLAS_WORKSPACE
    # Only where it changes something: torch imports its compiler to say it, which takes seconds.
    if (on, on and warn_only) != (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    ):
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
    torch.backends.cudnn.deterministic = on
    # Timing candidates is what makes cuDNN choose differently from run to run.
    torch.backends.cudnn.benchmark = not on


def set_tf32(allowed: bool) -> None:
    """Allow or forbid TensorFloat-32 (10-bit mantissa) in float32 matrix products and convolutions on CUDA.

    torch's own default differs between the two (products exact, convolutions TF32); here it is one policy.
    """
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def usable_cores() -> int:
    """The cores that this process may use: a container or a scheduler may grant fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_threads(count: int) -> int:
    """Use `count` CPU threads per operation (0 leaves torch's choice) and return how many are in use."""
    if count < 0:
        raise UserError(f"`threads >= 0` must hold, but got threads={count}; 0 leaves the choice to torch")
    cores = usable_cores()
    at_most("threads", count, max(MOST_THREADS, cores))
    if count > cores:
        warnings.warn(
            f"threads={count} is more than the {cores} cores that this process may use, which makes it slower; lower "
            "--threads",
            stacklevel=2,
        )
    if count > 0:
        torch.set_num_threads(count)
    return torch.get_num_threads()
