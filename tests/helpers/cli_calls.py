"""What the tests of commands share: tiny settings, known cells, and commands as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import softcell

TINY = ("--space", "nb201", "--set", "space.channels=2", "--batch-size", "256", "--threads", "1")
"""What a search needs beside `--epochs` to take a fraction of a second."""
TINY_TRAIN = ("--channels", "2", "--batch-size", "256", "--epochs", "1", "--threads", "1")
CELL = "|nor_conv_3x3~0|+|none~0|skip_connect~1|+|nor_conv_1x1~0|none~1|avg_pool_3x3~2|"


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    error: str


Softcell = Callable[..., Answer]


def process(*arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
    """`softcell ...` as a separate process."""
    source = str(Path(softcell.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-m", "softcell", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
