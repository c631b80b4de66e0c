"""`make docs` fails on dead links and on pages outside the navigation."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import docs_hooks
from softcell.app.cli.main import COMMANDS, load_command
from softcell.evaluate import TrainRecipe
from softcell.search import SearchRecipe
from softcell.settings import flat, to_dict

ROOT = Path(__file__).parents[2]


def build(place: Path) -> subprocess.CompletedProcess[str]:
    """What the Makefile runs for `make docs`, in a copy of the documentation."""
    (line,) = re.findall(r"^\t.*\$\(BIN\)/mkdocs (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "mkdocs", *line.split()]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two pages of the documentation with the settings of all."""
    pytest.importorskip("mkdocs", reason="a development tool")
    pytest.importorskip("mkdocstrings", reason="a development tool")
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs").mkdir()
    for name in ("index", "learn"):
        (tmp_path / "docs" / f"{name}.md").write_text(f"# The page {name}\n", encoding="utf-8")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    menu = "nav:\n  - Home: index.md\n  - Learn: learn.md\n"
    (tmp_path / "mkdocs.yml").write_text(
        re.sub(r"^nav:\n(?:  .*\n)+", menu, text, flags=re.MULTILINE), encoding="utf-8"
    )
    (tmp_path / "src").symlink_to(ROOT / "src")
    return tmp_path


def test_two_pages_without_faults_are_built(place: Path) -> None:
    found = build(place)
    assert found.returncode == 0, found.stderr
    assert (place / "build" / "site" / "learn.html").exists()


def test_faults_of_the_documentation_fail_the_build(place: Path) -> None:
    with open(place / "docs" / "learn.md", "a", encoding="utf-8") as file:
        file.write("\n[nowhere](nowhere.md) [no such part](index.md#no-such-part)\n")
    (place / "docs" / "lost.md").write_text("# A page outside the menu\n", encoding="utf-8")
    found = build(place)
    assert found.returncode != 0
    for message in ("nowhere.md", "no-such-part", "lost.md"):
        assert message in found.stderr


@pytest.mark.parametrize("name", ["page.css", "page.js"])
def test_the_report_in_the_gallery_has_the_current_style(name: str) -> None:
    own = (ROOT / "src" / "softcell" / "app" / "report" / name).read_text(encoding="utf-8")
    page = (ROOT / "docs" / "gallery" / "report.html").read_text(encoding="utf-8")
    assert own.strip() in page, f"{name} changed: put it into docs/gallery/report.html, run scripts/draw_pictures.py"


def test_the_gallery_draws_every_cell_of_the_records() -> None:
    files = [file for file in (ROOT / "results").glob("*/*.json") if "digits" not in file.name]
    number = sum(len(re.findall(r'"format": ?"softcell-genotype"', file.read_text())) for file in files)
    page = docs_hooks.gallery()
    pictures = re.findall(r'<img alt="([^"]+)" src="data:image/svg[^,]+,([^"]+)">', page)
    assert number == len(pictures) > 10
    assert "## entrannas/search-cifar10" in page and ("darts, seed 0") in dict(pictures)
    assert base64.b64decode(dict(pictures)["darts, seed 0"]).startswith(b"<svg")


def test_a_notebook_becomes_a_page_with_its_outputs() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {
            "cell_type": "code",
            "source": ["1 < 2"],
            "outputs": [
                {"output_type": "stream", "text": ["a < b\n"]},
                {"output_type": "execute_result", "data": {"text/html": ["<b>x</b>\n\n<i>y</i>"]}},
            ],
        },
    ]
    page = docs_hooks.notebook_page({"cells": cells})
    assert page.startswith("# Title\ntext\n\n```python\n1 < 2\n```")
    assert "<pre>a &lt; b\n</pre>" in page and '<div class="output"><b>x</b>\n<i>y</i></div>' in page


def test_the_reference_has_every_command_option_and_setting() -> None:
    page = docs_hooks.commands()
    for name in COMMANDS:
        section = page.partition(f"## softcell {name}\n")[2].partition("\n## ")[0]
        for one in load_command(name).params:
            assert all(option in section for option in one.opts if option.startswith("--")), (name, one.opts)
    page = docs_hooks.settings()
    for row in ("| `weights.lr` | float | `0.025` |", "| `space.cells` | int |", "| `lr_min` | float | `0.0` |"):
        assert row in page
    for kind in (SearchRecipe, TrainRecipe):
        for name in flat(to_dict(kind())):
            assert f"| `{name}` |" in page or name in ("split", "resource.network"), name
