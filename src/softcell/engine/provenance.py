"""Collects where a result comes from: versions, hardware, command, commit. The unknown is None."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from softcell import __version__
from softcell.engine.device import usable_cores


def now() -> str:
    """Return the time in UTC, as ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str | None]:
    """Return the versions of Python, torch, numpy and Softcell."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # the build too, which the installed version may leave out
        "numpy": _installed("numpy"),
        "softcell": __version__,  # of the code that runs, installed or not
    }


def hardware() -> dict[str, Any]:
    """Return the CPU's name, the cores this process may use, the bytes of memory, the CUDA devices' names."""
    return {"cpu": _cpu_name(), "cores": usable_cores(), "memory": _memory(), "gpus": _gpus()}


def commit(folder: str | os.PathLike[str] = ".") -> dict[str, Any] | None:
    """Return `{"commit": hash, "dirty": bool}` of the git checkout around `folder`, or None without one."""
    head = _git(["rev-parse", "HEAD"], folder)
    if head is None:
        return None
    changes = _git(["status", "--porcelain", "--untracked-files=no"], folder)
    return {"commit": head.strip(), "dirty": None if changes is None else bool(changes.strip())}


def collect() -> dict[str, Any]:
    """Return all of this, the command line and the number of threads as fields of a run's manifest."""
    return {
        "versions": versions(),
        "hardware": hardware(),
        "command": list(sys.argv),
        "git": commit(),
        "threads": torch.get_num_threads(),
    }


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine() or None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    try:
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError):
        return []  # a driver that is present but broken


def _git(arguments: list[str], folder: str | os.PathLike[str]) -> str | None:
    try:
        answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return answer.stdout
