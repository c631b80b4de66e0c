"""Exports of folders made by someone else: nothing in them becomes code."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from softcell.app.cli.main import run
from softcell.app.export import export
from softcell.app.export._python import import_file
from softcell.app.export._source import Sources
from softcell.app.export._tree import Tree, _snake
from softcell.errors import UserError

TEXTS = (
    '"""\n{code}\n"""',
    '"""\r{code}\r"""',
    "\n{code}\n#",
    "'\n{code}\n'",
    "\u2028{code}\u2028",
    "\u2029{code}\u2029",
    "\x85{code}\x85",
    "\x0c{code}\x0c",
    "\\",
    '\\"""\n{code}\n',
    "{{0}}{code}{{facts}}",
    "'); {code}; ('",
    "\x00{code}",
    "größe 犬 🐕 {code}",
)


@pytest.fixture
def foreign(trained: Path, tmp_path: Path) -> Path:
    """A folder as `softcell export --to safetensors` writes it, to be tampered with."""
    folder = tmp_path / "foreign"
    export(trained, "safetensors", folder)
    return folder


def tamper(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    described = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    change(described)
    (folder / "model.json").write_text(json.dumps(described), encoding="utf-8")


@pytest.mark.parametrize("text", TEXTS)
def test_no_text_of_a_folder_becomes_code(
    text: str, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "ran"
    crafted = text.replace("{code}", f"open({str(mark)!r}, 'w').close()")

    def change(described: dict[str, Any]) -> None:
        described["about"] = {crafted: "as a key", "as a value": crafted}
        described["data"]["classes"][0] = crafted

    tamper(foreign, change)
    assert run(["export", str(foreign), "--to", "python", "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    written = import_file(tmp_path / "out" / "predict.py")
    assert not mark.exists()
    assert written.ABOUT[crafted] == "as a key" and written.ABOUT["as a value"] == crafted, "kept, as data"
    assert written.CLASSES[0] == crafted
    tree = ast.parse((tmp_path / "out" / "predict.py").read_text(encoding="utf-8"))
    network = (tmp_path / "out" / "model.py").read_text(encoding="utf-8")
    assert "as a key" not in network and crafted not in network, "the network has no text of the folder"
    assert "as a key" not in (ast.get_docstring(tree) or "")


@pytest.mark.parametrize("place", ["shape", "classes", "mean", "std", "scaled_to", "whole", "about", "about-key"])
def test_values_of_wrong_types_are_refused(
    place: str, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "ran"
    crafted = f'8]"""\nopen({str(mark)!r}, "w").close()\n"""'

    def change(described: dict[str, Any]) -> None:
        data = described["data"]
        match place:
            case "shape":
                data["shape"][1] = crafted
            case "classes":
                data["classes"][0] = {"name": crafted}
            case "mean" | "std":
                data[place] = [crafted]
            case "scaled_to":
                data["scaled_to"] = [crafted, 8]
            case "whole":
                data["whole"] = crafted
            case "about":
                described["about"] = {"data": [crafted]}
            case "about-key":
                described["about"] = {"\ud800": "no Unicode"}

    tamper(foreign, change)
    assert run(["export", str(foreign), "--to", "python", "--out", str(tmp_path / "out")]) == 2
    assert "must be" in capsys.readouterr().err
    assert not mark.exists() and not (tmp_path / "out").exists()


def test_an_exported_folder_can_be_exported_again(foreign: Path, tmp_path: Path) -> None:
    done = export(foreign, "python", tmp_path / "out")
    described = json.loads((foreign / "model.json").read_text(encoding="utf-8"))
    written = import_file(done.files[1])
    assert {"space": "nb201", **described["about"]} == written.ABOUT


def test_part_names_must_be_identifiers() -> None:
    module = nn.Module()
    module.add_module("x=print(1), y", nn.Linear(1, 1))
    with pytest.raises(UserError, match="cannot be written into a Python file"):
        Tree(Sources([]))._call("Part", Tree(Sources([]))._parts(module), "")


@pytest.mark.parametrize("hint", ["a\nb", "²", "x(", "犬", "class"])
def test_function_names_are_identifiers(hint: str) -> None:
    assert _snake(hint).isidentifier() and _snake(hint).isascii()
