"""Messages are for users: no code decides by the words of an error. Facts travel as types, attributes or files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import softcell

ROOT = Path(softcell.__file__).parent

FOREIGN = {
    "app/process.py:explain_failure": "PyTorch has no exception type for memory of the CPU",
    "engine/heartbeat.py:is_lost_connection": "gloo has no exception type",
}
"""Functions that must read the messages of other libraries, with the reason."""

READERS = {
    "startswith",
    "endswith",
    "find",
    "index",
    "count",
    "partition",
    "rpartition",
    "removeprefix",
    "removesuffix",
}
"""Methods of a text that look for words in it."""


def errors_in(function: ast.AST) -> set[str]:
    """Names of exceptions in a function: caught there, or given to it."""
    found = {node.name for node in ast.walk(function) if isinstance(node, ast.ExceptHandler) and node.name}
    given = [node for node in ast.walk(function) if isinstance(node, ast.arg) and node.annotation is not None]
    return found | {
        one.arg for one in given if one.annotation and ast.unparse(one.annotation).endswith(("Error", "Exception"))
    }


def mentions(node: ast.AST, errors: set[str], texts: set[str]) -> bool:
    """Whether an expression has the text of an exception in it: `str(error)`, or a name that stands for it."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in texts:
            return True
        is_text = isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id in ("str", "repr")
        if is_text and any(isinstance(one, ast.Name) and one.id in errors for one in ast.iter_child_nodes(part)):
            return True
    return False


def readings(source: str) -> Iterator[str]:
    """Functions that compare the text of an exception with words, or search it."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        errors, texts = errors_in(function), set[str]()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and mentions(node.value, errors, set()):
                texts |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Compare):
                is_read = mentions(node, errors, texts)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_pattern = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
                read = node if is_pattern else node.func.value
                is_read = (is_pattern or node.func.attr in READERS) and mentions(read, errors, texts)
            else:
                is_read = False
            if is_read:
                yield function.name
                break


def test_no_code_reads_the_text_of_an_error() -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()}:{name}"
        for path in ROOT.rglob("*.py")
        for name in readings(path.read_text(encoding="utf-8"))
    }
    assert found == set(FOREIGN)


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ("if 'memory' in str(error): pass", True),
        ("text = str(error)\n        if 'memory' in text: pass", True),
        ("re.search('memory', str(error))", True),
        ("str(error).startswith('memory')", True),
        ("print(' '.join(str(error).split())[:200])", False),
        ("if error.code == 3: pass", False),
    ],
)
def test_the_reader_of_functions_finds_all_forms(body: str, is_found: bool) -> None:
    source = f"def f():\n    try: g()\n    except ValueError as error:\n        {body}\n"
    assert list(readings(source)) == (["f"] if is_found else [])
