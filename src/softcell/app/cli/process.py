"""When this process began: whoever states a time starts counting at the return key."""

from __future__ import annotations

import os
import time
from pathlib import Path

_entered: list[float] = []


def enter() -> None:
    """Called by the entry point: this process is one command, from its start to its end."""
    _entered[:] = [time.perf_counter() - age()]


def began() -> float:
    """On the clock of `perf_counter`; now, where a command is called from within another program."""
    return _entered[0] if _entered else time.perf_counter()


def age() -> float:
    """Seconds since the system started this process; 0 where it does not tell."""
    try:
        # The 22nd field, in ticks since the machine started; the second is a name that may hold spaces.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
