"""No import points the wrong way: a layer imports only from the layers below it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import softcell

ROOT = Path(softcell.__file__).parent

# From the lowest up. Layers in one row do not import each other.
ORDER = (
    {"arch"},
    {"nn", "kernels", "data", "engine"},
    {"spaces"},
    {"methods"},
    {"search", "evaluate"},
    {"seeds"},
    {"recipes"},
    {"app.report", "app.export"},
    {"app.process"},
    {"app.progress", "app.jobs"},
    {"app.baseline"},
    {"app.sweep", "app.pipeline"},
    {"app.reproduce"},
    {"api"},
    {"app.cli"},
)
CORE = {
    "arch",
    "nn",
    "kernels",
    "data",
    "engine",
    "spaces",
    "methods",
    "search",
    "evaluate",
    "seeds",
    "recipes",
    "testing",
}
"""What a researcher imports. It never imports the shell: `softcell.app`, and `softcell.api`, which uses both."""

GROUND = {"errors", "settings", "registry", "trust", "files", "text", "machine"}
"""All layers may import these, and they import only each other."""

ALLOWED = {
    ("nn", "kernels"): "blocks may be built on kernels; kernels import no blocks",
    ("data", "kernels"): "a kernel augments a batch; kernels import no data",
    ("engine", "kernels"): "a kernel counts a step's metrics, a graph keeps its tables; kernels import no engine",
}
"""Imports between layers of one row, with the reason."""


def level(layer: str) -> int:
    return next(i for i, together in enumerate(ORDER) if layer in together)


def layer_of(module: str) -> str | None:
    """`softcell.nn.conv` to `nn`, `softcell.app.cli.main` to `app.cli`; None for the package itself."""
    parts = module.split(".")
    if parts[1:2] == ["app"]:
        return ".".join(parts[1:3]) if len(parts) > 2 else None
    return parts[1] if len(parts) > 1 else None


def imports(source: str, package: str) -> set[str]:
    """Modules of softcell that a file imports, at its top or anywhere inside; relative ones resolved."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ""
            if node.level:
                base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
            module = ".".join(part for part in (base, node.module or "") if part)
            # `from softcell import nn` names a layer only in its last part.
            found |= {_part(module, alias.name) for alias in node.names}
    return {name for name in found if name.split(".")[0] == "softcell"}


def _part(package: str, name: str) -> str:
    """What `from softcell import name` imports: a module, or something of the package itself such as its version."""
    folder = ROOT.joinpath(*package.split(".")[1:])
    return f"{package}.{name}" if (folder / name).is_dir() or (folder / f"{name}.py").is_file() else package


def is_wrong(importer: str | None, imported: str | None) -> bool:
    """Whether a module of layer `importer` must not import from layer `imported`."""
    if imported is None or importer is None or importer == imported:
        return False
    if importer == "__main__":
        return False
    if importer in GROUND:
        return imported not in GROUND
    if imported in GROUND:
        return False
    if importer in CORE and imported not in CORE:
        return True
    if importer == "testing":
        return False
    if imported == "testing":
        return importer != "testing"
    if (importer, imported) in ALLOWED:
        return False
    return level(imported) >= level(importer)


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = ["softcell", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def all_imports() -> tuple[tuple[str, str], ...]:
    """(importing module, imported module) of the whole package."""
    found = list[tuple[str, str]]()
    for path in files():
        module = module_of(path)
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found += [(module, other) for other in sorted(imports(path.read_text(encoding="utf-8"), package))]
    return tuple(found)


def test_every_import_points_to_a_lower_layer() -> None:
    wrong = [f"{a} imports {b}" for a, b in all_imports() if is_wrong(layer_of(a), layer_of(b))]
    assert not wrong


def test_every_folder_is_in_the_order() -> None:
    known = set().union(*ORDER) | GROUND | {"testing", "__main__", None}
    assert {layer_of(module_of(path)) for path in files()} <= known


def test_private_modules_are_imported_by_their_own_package_only() -> None:
    """A module is private if its name begins with an underscore."""
    packages = {module_of(path): path.parent for path in files()}
    private = {module_of(path): path.parent for path in files() if path.stem.startswith("_") and path.stem[1] != "_"}
    assert len(private) > 10
    assert not [f"{a} imports {b}" for a, b in all_imports() if b in private and packages[a] != private[b]]


# Each of their modules is a plug-in that is loaded by name, or a twin of one that is.
LOADED_BY_NAME = ("softcell.kernels", "softcell.methods", "softcell.spaces", "softcell.app.cli")
INTERNAL_BUT_NAMED = {
    "softcell.search.perturb": "the file of a paper, DARTS-PT",
    "softcell.app.sweep.local": "workers of a cluster import its `run_job` by name",
}
"""Modules that only their own package imports, and whose names nevertheless have no underscore."""


def used_outside() -> set[str]:
    """Modules that another package or another program of the repository imports, or whose names a package exports."""
    packages = {module_of(path): path.parent for path in files()}
    initial = {module_of(path) for path in files() if path.name == "__init__.py"}
    found = {b for a, b in all_imports() if a in initial or packages[a] != packages.get(b)}
    for folder in ("studies", "benchmarks", "scripts", "examples"):
        for path in (ROOT.parents[1] / folder).rglob("*.py"):
            found |= imports(path.read_text(encoding="utf-8"), folder)
    return found


def test_modules_that_only_their_own_package_uses_are_private() -> None:
    known = {module_of(path) for path in files() if path.name != "__init__.py" and not path.stem.startswith("_")}
    inner = {name for name in known - used_outside() if not name.startswith(LOADED_BY_NAME) and name.count(".") > 1}
    assert inner == set(INTERNAL_BUT_NAMED)


SHARED = {"__init__", "base", "parts", "proxies", "registry"}
"""Modules of `softcell.methods` that belong to no paper."""


def paper_of(module: str) -> str | None:
    """`softcell.methods.darts` to `darts`, `softcell.methods.itnas.mix` to `itnas`; None for shared modules."""
    parts = module.split(".")
    if parts[:2] != ["softcell", "methods"] or len(parts) < 3 or parts[2] in SHARED:
        return None
    return parts[2]


def test_no_method_imports_another() -> None:
    wrong = [
        f"{a} imports {b}"
        for a, b in all_imports()
        if layer_of(a) == "methods" and paper_of(b) is not None and paper_of(a) != paper_of(b)
    ]
    assert not wrong


def test_nothing_outside_methods_imports_a_paper() -> None:
    wrong = [f"{a} imports {b}" for a, b in all_imports() if layer_of(a) != "methods" and paper_of(b) is not None]
    assert not wrong


def test_papers_are_files_or_folders() -> None:
    assert {paper_of(module_of(path)) for path in files()} >= {"darts", "itnas", "snas"}
    assert paper_of("softcell.methods.itnas.mix") == paper_of("softcell.methods.itnas") == "itnas"
    assert paper_of("softcell.methods.base") is paper_of("softcell.search.task") is paper_of("softcell.methods") is None


@pytest.mark.parametrize(
    ("importer", "imported", "wrong"),
    [
        ("arch", "nn", True),
        ("nn", "arch", False),
        ("nn", "spaces", True),
        ("data", "engine", True),
        ("engine", "data", True),
        ("nn", "kernels", False),
        ("api", "app.cli", True),
        ("app.pipeline", "api", True),
        ("kernels", "nn", True),
        ("search", "evaluate", True),
        ("methods", "search", True),
        ("app.cli", "app.report", False),
        ("app.report", "app.cli", True),
        ("errors", "arch", True),
        ("settings", "errors", False),
        ("arch", "errors", False),
        ("testing", "search", False),
        ("testing", "app.cli", True),
        ("search", "app.report", True),
        ("evaluate", "api", True),
        ("methods", "testing", True),
    ],
)
def test_is_wrong_follows_the_order_of_layers(importer: str, imported: str, wrong: bool) -> None:
    assert is_wrong(importer, imported) is wrong


def test_imports_of_all_forms_are_found() -> None:
    source = """
import softcell.nn.conv as conv, os
from softcell import __version__, data
from softcell.arch import Cell
from . import base
from ..search.steps import bilevel
def later():
    from softcell.engine.loop import run
"""
    assert imports(source, "softcell.methods") == {
        "softcell",
        "softcell.nn.conv",
        "softcell.data",
        "softcell.arch",
        "softcell.methods.base",
        "softcell.search.steps",
        "softcell.engine.loop",
    }
