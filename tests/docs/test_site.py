"""`make docs` fails on dead links and on pages outside the menu."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(place: Path) -> subprocess.CompletedProcess[str]:
    """What the Makefile runs for `make docs`, in a copy of the documentation."""
    (line,) = re.findall(r"^\t.*\$\(BIN\)/mkdocs (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "mkdocs", *line.split()]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    pytest.importorskip("mkdocs", reason="a development tool")
    for name in ("docs", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("page", "text", "message"),
    [
        ("learn.md", "\n[nowhere](nowhere.md)\n", "nowhere.md"),
        ("learn.md", "\n[no such part](report.md#no-such-part)\n", "no-such-part"),
        ("lost.md", "# A page outside the menu\n", "lost.md"),
    ],
)
def test_a_fault_of_the_documentation_fails_the_build(place: Path, page: str, text: str, message: str) -> None:
    with open(place / "docs" / page, "a", encoding="utf-8") as file:
        file.write(text)
    found = build(place)
    assert found.returncode != 0
    assert message in found.stderr
