"""The table of all papers: every file and test it names exists, and every row says what was measured."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/papers.md"
HEADER = ["capability", "paper", "file", "test", "evidence", "deviation"]
METHODS = (
    "DARTS",
    "β-DARTS",
    "DARTS−",
    "PC-DARTS",
    "SNAS",
    "GDAS",
    "DrNAS",
    "EnTranNAS and EnTranNAS-DST",
    "NOS",
    "IT-NAS",
    "Full attention",
    "DARTS-PT",
    "Samplers",
    "All methods",
)


def rows() -> list[tuple[str, list[str]]]:
    """Section and cells of every row."""
    found, section = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("|") and not line.startswith("|---"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells != HEADER:
                found.append((section, cells))
    return found


ROWS = rows()


@cache
def names_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def anchor(heading: str) -> str:
    """A heading's address, as GitHub and the site make it."""
    plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower())
    return re.sub(r"\s", "-", plain.strip())


def test_every_paper_has_its_rows() -> None:
    assert tuple(dict.fromkeys(section for section, _ in ROWS)) == METHODS
    assert len(ROWS) > 50


@pytest.mark.parametrize(
    ("section", "cells"), ROWS, ids=lambda value: value[0][:40] if isinstance(value, list) else value
)
def test_a_row_names_files_and_tests_that_exist_and_says_what_was_measured(section: str, cells: list[str]) -> None:
    assert len(cells) == len(HEADER) and all(cells), cells
    _, _, files, tests, evidence, _ = cells
    named = re.findall(r"`([^`]+)`", files)
    assert named and re.sub(r"`[^`]+`", "", files).strip(", ") == ""
    for name in named:
        top = ROOT if name.startswith(("studies/", "benchmarks/")) else ROOT / "src/softcell"
        assert (top / name).is_file(), f"there is no file {name}"
    named = re.findall(r"`([^`]+)`", tests)
    assert named and re.sub(r"`[^`]+`", "", tests).strip(", ") == ""
    for name in named:
        file, _, test = name.partition("::")
        assert (ROOT / "tests" / file).is_file(), f"there is no file tests/{file}"
        assert test in names_in(ROOT / "tests" / file), f"tests/{file} has no {test}"
    links = re.findall(r"\]\(([^)]+)\)", evidence)
    assert links or "not measured" in evidence or evidence.startswith("by test"), evidence
    for link in links:
        path, _, part = link.partition("#")
        assert (PAGE.parent / path).is_file(), f"there is no {path}"
        if part:
            text = (PAGE.parent / path).read_text(encoding="utf-8")
            assert part in {anchor(h) for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}, f"{path} has no #{part}"


def test_every_page_of_a_paper_is_linked() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for page in (ROOT / "docs/papers").glob("*.md"):
        assert f"[Page](papers/{page.name})" in text, f"{page.name} is not linked"
