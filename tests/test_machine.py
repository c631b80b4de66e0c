"""Cores and memory of the machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from softcell.machine import num_processes, total_memory, usable_cores

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these system calls and files")


@LINUX
def test_only_granted_cores_are_counted() -> None:
    granted = os.sched_getaffinity(0)
    assert usable_cores() == len(granted)
    try:
        os.sched_setaffinity(0, {min(granted)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, granted)


@LINUX
def test_memory_is_what_the_kernel_lists() -> None:
    (listed,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert total_memory() == 1024 * int(listed.split()[1])


def test_a_system_that_does_not_report_its_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", unknown)
    assert total_memory() is None


def test_torchrun_says_how_many_processes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert num_processes() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert num_processes() == 4
