"""A run that is killed at any point and resumed equals an uninterrupted one."""

import json
import subprocess
import sys
from pathlib import Path

from tests.helpers.engine_launch import HERE, environment


def test_a_killed_and_resumed_run_repeats_an_unbroken_one_bit_by_bit(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, str(HERE / "engine_kill.py"), str(tmp_path), "11"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    kills = {line["trials"]: line["kills"] for line in map(json.loads, answer.stdout.splitlines())}
    assert kills["random"] > 5
    # Three checkpoints and six .jsonl writes, each with several operations.
    assert kills["points"] > 20
