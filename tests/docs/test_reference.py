"""Names in the `__all__` of `softcell.api` and of packages are public: each has a page and an example that runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import softcell
from softcell import api
from softcell.methods import METHODS
from softcell.nn import candidates
from softcell.spaces import SPACES

ROOT = Path(__file__).parents[2]
SOURCE = Path(softcell.__file__).parent
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def exports(file: Path) -> bool:
    """Whether a module has an `__all__`."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return any(isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" for node in body)


def public_modules() -> list[str]:
    """Those that the reference has a page or a section for."""
    return [name for page in PAGES for name in re.findall(r"^<!-- public names of (\S+) -->$", page.read_text(), re.M)]


def public_names() -> list[tuple[str, Any]]:
    """Classes and functions, each once, however many modules export it."""
    found: dict[int, tuple[str, Any]] = {}
    for module in public_modules():
        loaded = importlib.import_module(module)
        for name in loaded.__all__:
            value = getattr(loaded, name)
            if inspect.isclass(value) or inspect.isroutine(value):
                found.setdefault(id(value), (f"{module}.{name}", value))
    return list(found.values())


def test_every_package_with_public_names_is_in_the_reference() -> None:
    packages = {
        ".".join(("softcell", *file.parent.relative_to(SOURCE).parts))
        for file in (*SOURCE.glob("*/__init__.py"), *SOURCE.glob("app/*/__init__.py"))
        if exports(file)
    }
    assert packages | {"softcell.api"} <= set(public_modules())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the search and the training that examples read."""
    folder = tmp_path_factory.mktemp("examples")
    sizes = {"cells_per_stage": 1, "channels": 2}
    found = api.search("darts", space="nb201", data="digits", epochs=1, space_settings=sizes, out=folder / "search")
    api.train(found.genotype, data="digits", epochs=1, space_settings=sizes, out=folder / "train")
    return folder


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    """A separate folder and registries, since examples write files and register names."""
    shutil.copytree(runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(candidates, "_REGISTRY", dict(candidates._REGISTRY))
    for registry in (METHODS, SPACES):
        assert list(registry), "discovered before the copy is made"
        monkeypatch.setattr(registry, "_known", dict(registry._known))


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(("name", "value"), public_names(), ids=[name for name, _ in public_names()])
def test_the_example_of_a_public_name_runs(name: str, value: Any) -> None:
    text = inspect.cleandoc(value.__doc__ or "")
    _, found, example = text.partition("\nExample:\n")
    assert found, f"the docstring of {name} needs an `Example:`"
    test = doctest.DocTestParser().get_doctest(example, {"__name__": "__main__"}, name, None, 0)
    assert any(step.want for step in test.examples), f"the example of {name} must show a result, which is compared"
    said: list[str] = []
    assert doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append).failed == 0, "".join(said)
