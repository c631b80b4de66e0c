"""Processes that do not outlive a test: not when it fails, nor when its own process is killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_C = ctypes.CDLL(None) if sys.platform == "linux" else None
_PARENT_DEATH_SIGNAL = 1


class ProcessGroups:
    """Starts processes, each as the leader of a group; `end` kills the groups."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[str], *, cwd: Path, env: dict[str, str]) -> subprocess.Popen[str]:
        """Output and errors are pipes of text."""
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
        self.started.append(process)
        return process

    def end(self) -> None:
        for process in self.started:
            # The group may have members after its leader has ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _die_with_parent() -> None:
    if _C is not None:
        _C.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
