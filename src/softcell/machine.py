"""Cores and memory that a process may use, and the number of processes that share a command."""

from __future__ import annotations

import os
import sys


def usable_cores() -> int:
    """The number of cores that this process may use; a container or scheduler may grant fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def total_memory() -> int | None:
    """Bytes of memory of this machine; None where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def num_processes() -> int:
    """The number of processes that `torchrun` started for this command; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))
