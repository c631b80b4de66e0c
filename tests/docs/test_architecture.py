"""The architecture page names existing files and functions, and its picture and walks match the code."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import softcell
from scripts import draw_layers, signature_tables
from softcell.app.cli.main import COMMANDS, run
from softcell.evaluate.task import TrainTask
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


def test_the_tables_of_signatures_match_the_code() -> None:
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


def test_every_file_of_the_shell_is_described() -> None:
    section = PAGE.partition("\n## The shell, file by file\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(app/\w+/)` \| (.+) \|$", section, re.MULTILINE))
    app = ROOT / "src" / "softcell" / "app"
    assert set(rows) == {f"app/{file.parent.name}/" for file in app.glob("*/__init__.py")}
    commands = {f"{module}.py" for module, _ in COMMANDS.values()}  # "each other file a few commands"
    for file in (path for path in app.rglob("*.py") if path.name != "__init__.py"):
        if file.parent == app:
            assert f"`app/{file.name}`" in section
        elif not (file.parent.name == "cli" and file.name in commands):
            assert f"`{file.name}`" in rows[f"app/{file.parent.name}/"], file


def walk(heading: str) -> list[str]:
    """`file::function` of every row of the table under a heading of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w/]+\.py::[\w.<>]+)` \|", section, re.MULTILINE)


class Reached(BaseException):
    """The step began; nothing after it is needed."""


def called(arguments: list[str], patch: Callable[[Callable[..., None]], None]) -> list[str]:
    """The functions of Softcell on the stack when the step of a command begins, outermost first."""
    source = Path(softcell.__file__).parent
    stack: list[str] = []

    def step(*_: object, **__: object) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(source):
                stack.insert(0, f"{file.relative_to(source).as_posix()}::{frame.f_code.co_qualname}")
            frame = frame.f_back
        raise Reached

    patch(step)
    with pytest.raises(Reached):
        run(arguments)
    return stack


CELL = "|nor_conv_3x3~0|+|none~0|skip_connect~1|+|none~0|none~1|skip_connect~2|"


def test_the_walk_through_a_search_is_the_stack_of_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["search", "darts", "--space", "nb201", "--epochs", "1", "--quiet"]
    stack = called(arguments, lambda step: monkeypatch.setattr("softcell.search.task.bilevel", step))
    assert walk("A walk through a search") == [*stack, "search/steps.py::bilevel"]
    assert len(stack) < 10, "from the command line to the step in at most 10 calls"


def test_the_walk_through_a_training_run_is_the_stack_of_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["train", CELL, "--epochs", "1", "--quiet"]
    stack = called(arguments, lambda step: monkeypatch.setattr(TrainTask, "step", step))
    assert walk("A walk through a training run") == [*stack, "evaluate/task.py::TrainTask.step"]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/]+\.py::[\w.]+)`", PAGE))))
def test_functions_that_the_page_names_exist(name: str) -> None:
    path, _, qualified = name.partition("::")
    body = ast.parse((ROOT / "src" / "softcell" / path).read_text(encoding="utf-8")).body
    for part in qualified.split("."):
        found = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part]
        assert found, f"{path} has no {qualified}"
        body = found[0].body
