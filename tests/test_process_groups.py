"""Processes of a test end with it: through its fixture, and when the test process itself is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.process_groups import ProcessGroups

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""
TEST = """
import os, sys, time
from pathlib import Path
from tests.helpers.process_groups import ProcessGroups
child = ProcessGroups().start(["sleep", "60"], cwd=Path("."), env=dict(os.environ))
print(child.pid, flush=True)
time.sleep(60)
"""


def has_ended(process: int) -> bool:
    """Within ten seconds; a zombie counts as ended."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_the_end_of_a_test_ends_children_of_its_processes(tmp_path: Path) -> None:
    groups = ProcessGroups()
    parent = groups.start([sys.executable, "-c", PARENT], cwd=tmp_path, env=dict(os.environ))
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    groups.end()
    assert parent.returncode is not None and has_ended(child)


def test_a_killed_test_leaves_no_process(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", TEST]
    test = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, stdout=subprocess.PIPE, text=True
    )
    assert test.stdout is not None
    child = int(test.stdout.readline())
    test.kill()
    test.communicate()
    assert has_ended(child)
