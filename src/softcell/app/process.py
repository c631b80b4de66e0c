"""The process of a command: when it started, a notice while it shows no progress, and why it failed."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from softcell.errors import UserError
from softcell.files import atomic_write_text, read_json

NOTICE_AFTER = 2.0
"""Seconds without output after which a user at a terminal would wonder whether anything happens."""
_displays = [0]  # how many progress displays are open
_entered: list[float] = []


def enter() -> None:
    """Called by the entry point: this process is one command, from its start to its end."""
    _entered[:] = [time.perf_counter() - age()]


def start_time() -> float:
    """When the command began, on the clock of `perf_counter`; now, if it is called from within another program."""
    return _entered[0] if _entered else time.perf_counter()


def age() -> float:
    """Seconds since the system started this process; 0 if unknown."""
    try:
        # The 22nd field, in ticks since the machine started; the second is a name that may hold spaces.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        # The field counts from boot, suspended time included, as this clock does.
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    # Systems other than Linux have no /proc, or no such clock.
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


@contextmanager
def showing_progress() -> Iterator[None]:
    """Inside this context a display shows progress, so no notice is needed."""
    _displays[0] += 1
    try:
        yield
    finally:
        _displays[0] -= 1


@contextmanager
def notice_when_slow(what: str) -> Iterator[None]:
    """After two seconds, prints once on standard error that `what` is still running, if that is a terminal."""

    def notice() -> None:
        if not _displays[0]:
            print(f"{what} is running; press Ctrl-C to stop it", file=sys.stderr)

    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(NOTICE_AFTER, notice)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# `torch.OutOfMemoryError` is raised for accelerators only. On the CPU PyTorch raises a plain RuntimeError (as of 2.13),
# so the words of its allocators are the only sign.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
_REDUCE = (
    "reduce --batch-size, --image-size, or the size of the network (--channels and --cells, or --set space.channels=N)"
)


def explain_failure(error: BaseException) -> str | None:
    """One sentence for failures that are neither bugs nor bad input: out of memory, a lost process. None otherwise."""
    text = " ".join(str(error).split())
    torch = sys.modules.get("torch")  # an error raised by torch comes from a torch that is loaded
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return f"not enough free GPU memory for this run; {_REDUCE}; with --seeds or --random also --at-once"
    is_runtime_error = isinstance(error, RuntimeError)
    if isinstance(error, MemoryError) or (is_runtime_error and any(part in text for part in _OUT_OF_MEMORY)):
        return f"not enough free memory for this run; {_REDUCE}"
    if torch is not None and torch.distributed.is_available():
        # Imported here because the engine imports torch, and this module must not.
        from softcell.engine.heartbeat import is_lost_connection

        if is_lost_connection(error):  # before all processes have joined; afterwards the rank is known
            return (
                "another process of this run ended or cannot be reached; see its own error for the cause. Restart all "
                "processes with the same command."
            )
    return None


ERROR_FILE = "SOFTCELL_ERROR_FILE"
"""The variable with which a program that starts a command, such as a sweep, asks for its error as a file."""


def exit_code_of(returncode: int) -> int:
    """The exit code of a child process as shells report it: 128 + n after signal n, which Popen reports as -n."""
    return 128 - returncode if returncode < 0 else returncode


def record_error(text: str) -> None:
    """Writes the error that ends this command to the file that its caller asked for, if it did."""
    if os.environ.get(ERROR_FILE):
        with suppress(UserError, OSError):  # a full disk must not hide the error itself
            write_error(Path(os.environ[ERROR_FILE]), text)


def write_error(file: Path, text: str) -> None:
    """Stores an error for `read_error`, in one step."""
    atomic_write_text(file, json.dumps({"error": text}) + "\n")


def read_error(file: Path) -> str | None:
    """The error that a command wrote; None if it did not write one, as after a crash of the interpreter."""
    try:
        found = read_json(file)
    except (OSError, UserError):
        return None
    return str(found["error"]) if isinstance(found, dict) and "error" in found else None
