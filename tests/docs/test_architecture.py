"""The page on the architecture names files and functions that exist, and its picture shows the layers as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import draw_layers
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
