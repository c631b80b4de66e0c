"""The method interface stays small: behaviour needed by one paper is a part, not a hook of every method."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell import methods
from softcell.methods import METHODS, Method, PathPlanner
from softcell.testing import tiny_space

PARTS = ("selection", "planner", "observer")


def defined(kind: type) -> set[str]:
    """Names of methods and properties that a class defines itself, without `__init__`."""
    found = {name for name, value in vars(kind).items() if callable(value) or isinstance(value, property | classmethod)}
    return {name for name in found if not name.startswith("__") and name not in ("_abc_impl", "Settings")}


def test_a_method_has_at_most_twelve_methods() -> None:
    assert len(defined(Method)) <= 12, sorted(defined(Method))
    assert Method.__abstractmethods__ == {"relax", "probabilities"}


@pytest.mark.parametrize("name", METHODS)
def test_methods_have_the_parts_that_their_paper_needs(name: str) -> None:
    kind = METHODS.get(name)
    if not issubclass(kind, Method):
        return
    method = kind.for_supernet(kind.Settings(), tiny_space("nb201").supernet((3, 8, 8), 4))
    has = {part for part in PARTS if getattr(method, part) is not None}
    expected: dict[str, set[str]] = {
        "entrannas": {"planner"},
        "entrannas-dst": {"planner"},
        "gdas": {"planner"},
        "itnas": {"selection"},
        "snas": {"observer"},
        "spos": {"planner"},
    }
    assert has == expected.get(name, set())


def test_a_copied_method_has_separate_parts() -> None:
    kind: Any = METHODS.get("spos")
    torch.manual_seed(0)
    method = kind(tiny_space("nb201").layout(), kind.Settings())
    twin = copy.deepcopy(method)
    drawn = [method.planner.draw(step) for step in range(4)]
    assert isinstance(twin.planner, PathPlanner) and [twin.planner.draw(step) for step in range(4)] == drawn
    twin.load_state_dict({**twin.state_dict(), "key": twin.key + 1})
    assert [twin.planner.draw(step) for step in range(4)] != drawn, "a loaded key is read again"
    assert [method.planner.draw(step) for step in range(4)] == drawn


def test_folders_are_discovered_as_files_are() -> None:
    root = Path(methods.__file__).parent
    folders = {path.parent.name for path in root.glob("*/__init__.py")}
    assert "itnas" in folders
    modules = [METHODS.get(name).__module__.split(".") for name in METHODS]
    homes = {parts[2] for parts in modules if parts[:2] == ["softcell", "methods"]}  # other tests may load plugins
    assert folders <= homes, "a folder whose `__init__.py` does not import its method registers nothing"
