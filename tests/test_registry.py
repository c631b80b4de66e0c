"""The registry of names and classes, and plugin files."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from softcell.errors import UserError
from softcell.methods import METHODS
from softcell.registry import Registry, load_plugin
from softcell.spaces import SPACES, build_space


class Kind:
    name = "kind"


def test_built_in_ones_are_discovered_and_sorted() -> None:
    assert list(SPACES) == sorted(SPACES)
    assert METHODS.get("darts").name == "darts"
    assert build_space("darts", {"cells": 3}).name == "darts"


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="no space 'dart'; did you mean 'darts'"):
        SPACES.get("dart")


def test_a_class_is_registered_once_under_its_name() -> None:
    registry: Registry[Kind] = Registry("kind", "softcell.arch")
    assert registry.add(Kind) is Kind
    assert registry.get("kind") is Kind
    assert list(registry) == ["kind"]
    registry.add(Kind)  # the same again is no conflict: a module may be run twice
    foreign = type("Foreign", (), {"name": "kind", "__module__": "elsewhere"})
    with pytest.raises(UserError, match="'kind' already exists"):
        registry.add(foreign)


def test_an_import_that_fails_is_repeated_by_the_next_look_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "discovered_here"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "broken.py").write_text("import discovered_elsewhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[Kind] = Registry("kind", package.name)
    for look_up in (lambda: registry.get("kind"), lambda: list(registry), lambda: registry.get("kind")):
        with pytest.raises(ModuleNotFoundError, match="discovered_elsewhere"):
            look_up()
    (tmp_path / "discovered_elsewhere.py").touch()
    importlib.invalidate_caches()
    assert list(registry) == []


@pytest.mark.parametrize("name", [None, "", 3])
def test_a_class_without_a_name_is_refused(name: object) -> None:
    with pytest.raises(UserError, match="class attribute `name`"):
        Registry("kind", "softcell.arch").add(type("Nameless", (), {"name": name}))


def test_a_plugin_runs_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    plugin = tmp_path / "plugin_once.py"
    plugin.write_text(f"open({str(log)!r}, 'a').write('x')\n")
    load_plugin(plugin)
    load_plugin(str(plugin))
    assert log.read_text() == "x"


@pytest.mark.parametrize(
    "text", ["1 / 0", "def broken(:", "from softcell.errors import UserError\nraise UserError('no')"]
)
def test_a_plugin_that_fails_is_named_each_time_it_is_loaded(tmp_path: Path, text: str) -> None:
    plugin = tmp_path / "plugin_failing.py"
    plugin.write_text(text)
    for _ in range(2):
        with pytest.raises(UserError, match=r"plugin_failing|no"):
            load_plugin(plugin)


def test_a_plugin_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.py"):
        with pytest.raises(UserError, match="--plugin must name a Python file"):
            load_plugin(path)
