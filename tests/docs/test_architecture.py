"""The architecture page names existing files and functions, and its picture and walks match the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import draw_layers, signature_tables
from tests.test_layers import CORE, GROUND, ORDER

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_picture_shows_the_layers_that_are_enforced() -> None:
    drawn = draw_layers.picture(ORDER, CORE, GROUND)
    same = draw_layers.PICTURE.read_text(encoding="utf-8") == drawn
    assert same, "the layers changed: run `python scripts/draw_layers.py` and look at docs/images/layers.svg"
    for layer in (*set().union(*ORDER), "testing"):
        assert f">{layer.replace('app.', 'app/')}<" in drawn


@pytest.mark.parametrize("term", re.findall(r"^\| ([^|]+) \| .* \| ([^|]+) \|$", PAGE, re.MULTILINE)[1:])
def test_every_term_is_defined_where_the_glossary_says(term: tuple[str, str]) -> None:
    for path in re.findall(r"`([^`]+)`", term[1]):
        base = ROOT if path.startswith("tests/") else ROOT / "src" / "softcell"
        assert (base / path).exists(), f"{term[0]}: {path}"


def test_the_tables_of_signatures_are_those_of_the_code() -> None:
    page = signature_tables.PAGE.read_text(encoding="utf-8")
    assert "| `Space` |" in page and "| `Method` |" in page
    same = signature_tables.written(page) == page
    assert same, "signatures changed: run `python scripts/signature_tables.py` and read docs/extend.md"


PATHS = re.compile(r"`([a-z_]+(?:/[a-z0-9_]+)+\.py)`")
"""Names of Python files in the documentation, such as `arch/mix.py`."""


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    for path in PATHS.findall(page.read_text(encoding="utf-8")):
        places = (ROOT, ROOT / "src" / "softcell", ROOT / "tests")
        assert any((place / path).is_file() for place in places), f"{page.name} names {path}"
