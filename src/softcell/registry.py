"""Names to classes for spaces and methods: filled by discovery, extended by users.

Built-in ones are found by walking their package, so a new paper is one new file. A user's own come from a Python file
passed on the command line (`--plugin my_space.py`) or imported before use.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from softcell.errors import UserError, nearest
from softcell.trust import Content, is_trusted, trust, trusted

__all__ = ["Registry", "load_plugin"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes of one kind by their `name`.

    Example:
        >>> from softcell.methods import METHODS  # a Registry
        >>> "darts" in list(METHODS), METHODS.get("darts").name
        (True, 'darts')
    """

    def __init__(self, kind: str, package: str) -> None:
        self._kind, self._package = kind, package
        self._known: dict[str, type[T]] = {}
        self._discovered = False

    def add(self, cls: type[Any]) -> type[Any]:
        """Registers a class under its `name`; usable as a decorator.

        Example:
            >>> from dataclasses import dataclass
            >>> from softcell.spaces import SPACES, register_space
            >>> from softcell.testing import RaggedSpace
            >>> @register_space
            ... @dataclass(frozen=True)
            ... class WideSpace(RaggedSpace):
            ...     name = "wide"
            ...     channels: int = 32
            >>> "wide" in list(SPACES)
            True
        """
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not name:
            raise UserError(f"a {self._kind} needs a class attribute `name`, but {cls.__name__} has none")
        known = self._known.get(name)
        # The same module may define it again: a notebook cell runs twice, and a plugin that failed is loaded again.
        if known is not None and known.__module__ != cls.__module__:
            raise UserError(f"{self._kind} {name!r} already exists (from {known.__module__}); choose another name")
        self._known[name] = cls
        return cls

    def get(self, name: str) -> type[T]:
        self._discover()
        if name not in self._known:
            raise UserError(f"no {self._kind} {name!r}; {nearest(name, self._known)}")
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        self._discover()
        return iter(sorted(self._known))

    def _discover(self) -> None:
        if self._discovered:
            return
        # Set before the imports, so that a module that looks up a name while it is imported does not start this again.
        self._discovered = True
        try:
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")
        except BaseException:
            self._discovered = False  # the next look-up must fail with the same error, not with "no such name"
            raise


def load_plugins(paths: Iterable[str | Path], asked_by: str = "the recipe") -> None:
    """Runs the Python files that a recipe, a run or a sweep names, in this order; all must be trusted (`trust`).

    A missing file, such as one of a run from another machine, may be replaced by one of the same name that was loaded
    before.
    """
    if isinstance(paths, str) or not isinstance(paths, Iterable):
        raise UserError(f"plugins must be a list of files, got {paths!r:.80}")
    for path in paths:
        if not isinstance(path, str | Path):
            raise UserError(f"plugins must be a list of files, got {path!r:.80} among them")
        file = Path(path).resolve()
        if _is_there(file):
            continue
        if not file.exists():
            raise UserError(
                f"{asked_by} needs the plugin {path}, but there is no such file here; name your copy with --plugin "
                f"{file.name} (in Python: `softcell.registry.load_plugin`)"
            )
        _run(trusted(path, asked_by), path)


def load_plugin(path: str | Path) -> None:
    """Runs a user's Python file, which registers its own spaces, methods or candidates.

    Calling this, or passing the file with `--plugin`, trusts it: it then runs without asking where a run names it.

    Example:
        >>> from pathlib import Path
        >>> from softcell.nn import known_candidates
        >>> from softcell.registry import load_plugin
        >>> _ = Path("my_plugin.py").write_text('''
        ... from torch import nn
        ... from softcell.nn import candidate
        ... @candidate("my_identity")
        ... def build(spec):
        ...     return nn.Identity()
        ... ''')
        >>> load_plugin("my_plugin.py")
        >>> "my_identity" in known_candidates()
        True
    """
    content = trust(path)
    if not _is_loaded(content.path):
        _run(content, path)


def refused(paths: Iterable[str | Path]) -> list[str]:
    """The files that `load_plugins` would reject, or ask about."""
    return [str(path) for path in paths if not _is_there(Path(path).resolve()) and not is_trusted(path)]


def _is_there(file: Path) -> bool:
    """Whether a plugin needs no loading: it is loaded, or one of its name is and it does not exist here."""
    return _is_loaded(file) or (not file.exists() and _module_name(file) in sys.modules)


def _module_name(file: Path) -> str:
    return f"softcell_plugin_{file.stem}"


def _is_loaded(file: Path) -> bool:
    module = sys.modules.get(_module_name(file))
    return module is not None and getattr(module, "__file__", None) == str(file)


def _run(content: Content, path: str | Path) -> None:
    name = _module_name(content.path)
    spec = importlib.util.spec_from_file_location(name, content.path)
    if spec is None:
        raise UserError(f"--plugin must name a Python file, with a name that ends in .py, but got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as in an import: dataclasses look up their module by its name
    try:
        # The bytes that were checked, not the file as it is now, nor a compiled one from a __pycache__ next to it.
        # Without `dont_inherit` the plugin would be compiled with the future imports of this file.
        exec(compile(content.data, str(content.path), "exec", dont_inherit=True), module.__dict__)
    except UserError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]  # a second attempt must fail again
        raise UserError(f"plugin {path} failed: {type(error).__name__}: {error}") from error
