"""Collects the source of modules that cannot be traced into one file that imports only torch.

Starting from classes, every name that their code uses is followed: definitions of Softcell or a plugin are copied,
those of torch and the standard library are imported. Of a class only the methods whose names occur in the code are
copied, and of a module never `__init__`: instances are written out with their parts (see `_tree`).
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from torch import nn

from softcell.errors import UserError

Key = tuple[str, str]
"""The module in which something is defined, and its name there."""

REPLACED: dict[Key, str] = {
    ("softcell.nn.norm", "BatchNorm2d"): "nn.BatchNorm2d",  # the same where one process computes
    ("softcell.nn.conv", "AveragePool"): "nn.AvgPool2d",  # these two differ only in how gradients are computed
    ("softcell.nn.conv", "DilatedDepthwise"): "nn.Conv2d",
    ("softcell.nn.stochastic", "DropPath"): "nn.Identity",  # nothing is dropped outside training
    ("softcell.nn.stochastic", "Dropout"): "nn.Identity",
}
"""Modules that plain torch provides under another name."""
DROPPED_BASES = {"ABC", "Generic", "Protocol", "Module"}
KEPT_SPECIAL = {"__call__", "__len__", "__iter__", "__getitem__", "__contains__", "__enter__", "__exit__"}
_EXAMPLE = re.compile(r'\n\s*Example:\n.*?(?="""$)', re.DOTALL | re.MULTILINE)  # examples import the package
_COMMENT = re.compile(r"\s*#\s*(type: ignore|noqa)\b.*$", re.MULTILINE)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file, parsed: definitions at its top level, and where imported names come from."""

    name: str
    lines: tuple[str, ...]
    definitions: dict[str, ast.stmt]
    imports: dict[str, tuple[str, str | None]]  # local name: module, and the name in it (None: the module itself)

    def segment(self, node: ast.stmt | ast.expr) -> list[str]:
        assert node.end_lineno is not None
        return list(self.lines[node.lineno - 1 : node.end_lineno])


@cache
def parsed(name: str) -> Module:
    """The module `name` from its file."""
    file = getattr(importlib.import_module(name) if name not in sys.modules else sys.modules[name], "__file__", None)
    if file is None:
        raise UserError(f"the source of module {name!r} cannot be found, so it cannot be exported as Python")
    text = Path(file).read_text(encoding="utf-8")
    definitions: dict[str, ast.stmt] = {}
    imports: dict[str, tuple[str, str | None]] = {}
    for node in _top_level(ast.parse(text).body):
        if isinstance(node, ast.ClassDef | _Function):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign):
            definitions |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            definitions[node.target.id] = node
        elif isinstance(node, ast.Import):
            imports |= {
                a.asname or a.name.split(".")[0]: (a.name if a.asname else a.name.split(".")[0], None)
                for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, name)
            imports |= {alias.asname or alias.name: (base, alias.name) for alias in node.names}
    return Module(name, tuple(text.splitlines()), definitions, imports)


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those behind `if TYPE_CHECKING` too."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _top_level(node.body)
        else:
            yield node


def _absolute(node: ast.ImportFrom, importer: str) -> str:
    if not node.level:
        return node.module or ""
    package = importer.split(".")[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def is_foreign(module: str) -> bool:
    """Whether a module is torch's or Python's own, and is imported instead of being copied."""
    root = module.split(".")[0]
    return root == "torch" or root in sys.stdlib_module_names


@dataclass(frozen=True)
class Found:
    """The meaning of a name: a definition, an import, or a whole module of ours."""

    key: Key | None = None
    line: str | None = None
    module: str | None = None


def locate(module: str, name: str) -> Found | None:
    """The meaning of `name` inside `module`; None for builtins and names that are bound elsewhere."""
    source = parsed(module)
    if name in source.definitions:
        return Found(key=(module, name))
    if name not in source.imports:
        return None
    origin, inner = source.imports[name]
    if is_foreign(origin):
        return Found(line=import_line(origin, inner, name))
    if inner is None:
        return Found(module=origin)
    found = locate(origin, inner)
    if found is not None:
        return found
    try:
        # The imported name may also be a submodule of its package.
        importlib.import_module(f"{origin}.{inner}")
    except ImportError:
        raise UserError(
            f"{module} uses {name} of {origin}: a network exported as Python may use only torch; use --to onnx"
        ) from None
    return Found(module=f"{origin}.{inner}")


def import_line(origin: str, inner: str | None, name: str) -> str:
    """The statement that binds `name`."""
    if inner is None:
        return f"import {origin}" if origin == name else f"import {origin} as {name}"
    return f"from {origin} import {inner}" if inner == name else f"from {origin} import {inner} as {name}"


@dataclass
class Piece:
    """One definition as it is written into the file."""

    text: str
    needs: list[Key] = field(default_factory=list)
    first: list[Key] = field(default_factory=list)  # those of them that must be defined before: bases, class bodies


class Sources:
    """The closure of a set of classes; `attributes` are the names after a dot in all collected code."""

    def __init__(self, roots: Iterable[Key]) -> None:
        self._roots = list(dict.fromkeys(roots))
        self.imports: set[str] = set()
        self.attributes: set[str] = set()
        self.own: dict[Key, set[str]] = {}  # per class, the names after `self.`
        self.names: dict[Key, str] = {}
        self.pieces: dict[Key, Piece] = {}
        before = None
        while before != (len(self.attributes), len(self.pieces)):  # a copied method may need another one
            before = len(self.attributes), len(self.pieces)
            self.pieces, self.imports = {}, set()
            waiting = list(self._roots)
            while waiting:
                key = waiting.pop(0)
                if key not in self.pieces:
                    self._name(key)
                    self.pieces[key] = self._piece(key)
                    waiting += self.pieces[key].needs

    def ordered(self) -> list[str]:
        """The definitions, each after its dependencies."""
        done: list[Key] = []

        def visit(key: Key) -> None:
            for other in self.pieces[key].first:
                if other not in done and other != key:
                    visit(other)
            if key not in done:
                done.append(key)

        for key in sorted(self.pieces, key=lambda key: isinstance(self._node(key), ast.ClassDef | _Function)):
            visit(key)
        return [self.pieces[key].text for key in done]

    def _node(self, key: Key) -> ast.stmt:
        return parsed(key[0]).definitions[key[1]]

    def _name(self, key: Key) -> str:
        """The name of a definition in the file: its own, or with a number where two have the same."""
        if key not in self.names:
            taken, name, number = set(self.names.values()), key[1], 2
            while name in taken:
                name, number = f"{key[1]}_{number}", number + 1
            self.names[key] = name
        return self.names[key]

    def _piece(self, key: Key) -> Piece:
        module, node = parsed(key[0]), self._node(key)
        if isinstance(node, ast.ClassDef):
            return self._class(module, node, key)
        writer = _Writer(self, module)
        if isinstance(node, _Function):
            text = writer.text(node, skip_decorators=True)
            text = re.sub(rf"^def {node.name}\b", f"def {self._name(key)}", text)
            return Piece(text, writer.needs)
        text = writer.text(node)
        text = re.sub(rf"^{re.escape(key[1])}\b", self._name(key), text)
        return Piece(text, writer.needs, writer.needs)

    def _class(self, module: Module, node: ast.ClassDef, key: Key) -> Piece:
        kind = getattr(sys.modules[module.name], node.name)
        is_module, is_data = issubclass(kind, nn.Module), hasattr(kind, "__dataclass_fields__")
        head, body = _Writer(self, module), _Writer(self, module)
        own = self.own.setdefault(key, set())
        bases = [base for base in (head.base(b) for b in node.bases) if base not in DROPPED_BASES]
        # `Part` has the only `__init__`: that of the module itself is not copied.
        if is_module and not any(issubclass(b, nn.Module) and b is not nn.Module for b in kind.__bases__):
            bases.append("Part")
        decorators = [f"@{head.expression(d)}" for d in node.decorator_list if "dataclass" in ast.dump(d)]
        parts: list[str] = []
        for statement in node.body:
            if isinstance(statement, _Function):
                if self._keeps(statement, is_module=is_module):
                    parts.append(body.text(statement))
                    own |= _own_attributes(statement)
            elif isinstance(statement, ast.Expr) and statement is node.body[0]:
                parts.append(_EXAMPLE.sub("", "\n".join(module.segment(statement))))
            elif is_data and isinstance(statement, ast.AnnAssign):
                parts.append(self._field(head, statement))
            elif isinstance(statement, ast.AnnAssign | ast.Assign) and (is_data or self._is_used(statement)):
                parts.append(head.text(statement))
        listed = f"({', '.join(bases)})" if bases else ""
        lines = [*decorators, f"class {self._name(key)}{listed}:", *_spaced(parts or ["    pass"])]
        return Piece("\n".join(lines), [*head.needs, *body.needs], head.needs)

    def _field(self, writer: _Writer, node: ast.AnnAssign) -> str:
        """A field of a dataclass. Its type has a dot: others are looked up in `sys.modules`, but a file that is loaded
        by its path need not be there."""
        value = "" if node.value is None else f" = {writer.expression(node.value)}"
        if "ClassVar" in ast.unparse(node.annotation):
            return f"    {ast.unparse(node.target)}{value}"
        self.imports.add("import typing")
        return f"    {ast.unparse(node.target)}: typing.Any{value}"

    def _keeps(self, node: _Function, *, is_module: bool) -> bool:
        if any("abstractmethod" in ast.dump(decorator) for decorator in node.decorator_list):
            return False
        if node.name == "__init__":
            return not is_module
        return node.name in ("forward", "backward") or node.name in KEPT_SPECIAL or node.name in self.attributes

    def _is_used(self, node: ast.Assign | ast.AnnAssign) -> bool:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return node.value is not None and any(
            isinstance(target, ast.Name) and target.id in self.attributes for target in targets
        )


class _Writer:
    """Copies statements of one module, following and renaming the names in them."""

    def __init__(self, sources: Sources, module: Module) -> None:
        self._sources, self._module = sources, module
        self.needs: list[Key] = []

    def text(self, node: ast.stmt, *, skip_decorators: bool = False) -> str:
        decorators = [] if skip_decorators or not isinstance(node, _Function) else node.decorator_list
        lines = [f"{' ' * node.col_offset}@{self.expression(decorator)}" for decorator in decorators]
        return "\n".join([*lines, self._copy(node)])

    def expression(self, node: ast.expr) -> str:
        return self._copy(node)[node.col_offset :]

    def base(self, node: ast.expr) -> str:
        plain = ast.unparse(node).split("[")[0].split(".")[-1]
        return plain if plain in DROPPED_BASES else self.expression(node)

    def _copy(self, node: ast.stmt | ast.expr) -> str:
        assert node.end_lineno is not None and node.end_col_offset is not None
        lines = self._module.segment(node)
        # Column offsets of `ast` count bytes of UTF-8, not characters.
        lines[-1] = lines[-1].encode()[: node.end_col_offset].decode()
        lines[0] = " " * node.col_offset + lines[0].encode()[node.col_offset :].decode()
        # From the end, so that the positions of earlier names stay valid.
        for (row, start, end), text in sorted(self._edits(node).items(), reverse=True):
            line = lines[row - node.lineno].encode()
            lines[row - node.lineno] = (line[:start] + text.encode() + line[end:]).decode()
        return _EXAMPLE.sub("", _COMMENT.sub("", "\n".join(lines)))

    def _edits(self, root: ast.AST) -> dict[tuple[int, int, int], str]:
        """By position in the file the new text of names."""
        edits: dict[tuple[int, int, int], str] = {}
        annotations = {id(part) for part in _annotations(root)}
        skipped: set[int] = set()
        local = _bound(root)
        for node in ast.walk(root):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._check_inner_import(node)
            if isinstance(node, ast.Attribute):
                if id(node) not in annotations:
                    self._sources.attributes.add(node.attr)
                if isinstance(node.value, ast.Name) and node.value.id not in local:
                    found = locate(self._module.name, node.value.id)
                    if found is not None and found.module is not None:  # a module of ours: its members are copied
                        skipped.add(id(node.value))
                        edits[_place(node)] = self._resolve(found.module, node.attr)
            elif isinstance(node, ast.Name) and id(node) not in skipped and node.id not in local:
                text = self._renamed(node, annotation=id(node) in annotations)
                if text != node.id:
                    edits[_place(node)] = text
        return edits

    def _check_inner_import(self, node: ast.Import | ast.ImportFrom) -> None:
        origin = _absolute(node, self._module.name) if isinstance(node, ast.ImportFrom) else node.names[0].name
        if not is_foreign(origin):
            raise UserError(
                f"{self._module.name} imports {origin} inside a function (line {node.lineno}), which cannot be written "
                "into one Python file; use --to onnx or --to torch-export"
            )

    def _renamed(self, node: ast.Name, *, annotation: bool) -> str:
        if node.id not in self._module.definitions and node.id not in self._module.imports:
            return node.id  # a builtin, or bound by a comprehension, a lambda or an enclosing function
        if annotation:
            found = locate(self._module.name, node.id)
            if found is not None and found.line is not None:
                self._sources.imports.add(found.line)
                return node.id
            if found is not None and found.key in self._sources.pieces:
                return self._sources.names[found.key]
            return "object"  # annotations are not evaluated; a type that is used nowhere else is not copied
        return self._resolve(self._module.name, node.id)

    def _resolve(self, module: str, name: str) -> str:
        found = locate(module, name)
        if found is None:
            return name
        if found.line is not None:
            self._sources.imports.add(found.line)
            return name
        if found.module is not None:
            raise UserError(
                f"{self._module.name} uses the module {found.module} as a value, which cannot be written into one "
                "Python file; use --to onnx or --to torch-export"
            )
        assert found.key is not None
        if found.key in REPLACED:
            return REPLACED[found.key]
        self.needs.append(found.key)
        return self._sources._name(found.key)


def _place(node: ast.expr) -> tuple[int, int, int]:
    assert node.end_col_offset is not None and node.lineno == node.end_lineno
    return node.lineno, node.col_offset, node.end_col_offset


def _annotations(root: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(root):
        found = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for annotation in found:
            if annotation is not None:
                yield from ast.walk(annotation)


def _bound(root: ast.AST) -> set[str]:
    """Names that a statement binds itself: arguments, variables, inner functions."""
    found = {node.arg for node in ast.walk(root) if isinstance(node, ast.arg)}
    if isinstance(root, _Function):
        found |= {n.id for n in ast.walk(root) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        found |= {n.name for n in ast.walk(root) if isinstance(n, _Function) and n is not root}
    return found


def _own_attributes(node: ast.AST) -> set[str]:
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
    }


def _spaced(parts: list[str]) -> list[str]:
    """Parts of a class with an empty line before each method."""
    spaced: list[str] = []
    for number, part in enumerate(parts):
        if number and (part.lstrip().startswith(("def ", "@")) or parts[number - 1].lstrip().startswith('"""')):
            spaced.append("")
        spaced.append(part)
    return spaced
