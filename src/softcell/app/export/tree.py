"""Writes a network out as one Python expression: every module with its parts, repeated ones as functions."""

from __future__ import annotations

import dataclasses
import inspect
import keyword
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from softcell.app.export.source import REPLACED, Key, Sources, is_foreign
from softcell.errors import UserError

WIDTH = 110
LARGEST_CONSTANT = 100_000
"""Values of a constant tensor that are still written out."""
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList)


@dataclass(frozen=True)
class Expression:
    """`open` + `parts` + `close`, on one line where it fits; a part is a prefix (`name=`) and an expression."""

    open: str
    parts: tuple[tuple[str, Expression], ...] = ()
    close: str = ""
    hint: str = ""  # what a function that returns it could be called

    def line(self) -> str:
        return self.open + ", ".join(prefix + part.line() for prefix, part in self.parts) + self.close

    def lines(self, room: int = WIDTH, prefix: str = "") -> list[str]:
        """Broken to `room` columns, where `prefix` will stand before the first line."""
        if not self.parts or len(prefix) + len(self.line()) <= room:
            return [self.line()]
        result = [self.open]
        for prefix, part in self.parts:
            first, *rest = part.lines(room - 4, prefix)
            result += [f"    {prefix}{first}", *(f"    {line}" for line in rest)]
            result[-1] += ","
        return [*result, self.close]


def classes_of(network: nn.Module) -> list[Key]:
    """The classes of all modules that are neither torch's own nor replaced by them."""
    found = []
    for module in network.modules():
        key = _key(type(module))
        if not is_foreign(key[0]) and key not in REPLACED:
            found.append(key)
    return found


def _key(kind: type) -> Key:
    return kind.__module__, kind.__qualname__


class Tree:
    """Expressions for modules and values, with the attributes that the collected code reads."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self.needs: list[Key] = []
        """Classes of plain values that the expressions name."""

    def module(self, module: nn.Module, hint: str = "") -> Expression:
        key = _key(type(module))
        if key in REPLACED and REPLACED[key] == "nn.Identity":
            return Expression("nn.Identity()")
        if isinstance(module, _CONTAINERS):
            return self._container(module, hint or key[1])
        base = _torch_base(type(module))
        if base is nn.Module:
            return self._call(self._class_name(type(module)), self._parts(module), hint or key[1])
        made = Expression(f"{self._class_name(type(module))}(", _arguments(module, base), ")")
        extra = self._parts(module, without=_names_of(base, module)) if type(module) is not base else {}
        if not extra or key in REPLACED:
            return made
        parts = tuple((_keyword(name), value) for name, value in extra.items())
        return Expression("having(", (("", made), *parts), ")", hint or key[1])

    def _class_name(self, kind: type) -> str:
        key = _key(kind)
        if key in REPLACED:
            return REPLACED[key]
        return f"nn.{kind.__name__}" if is_foreign(key[0]) else self._sources.names[key]

    def _container(self, module: nn.Module, hint: str) -> Expression:
        name = self._class_name(type(module))
        if isinstance(module, nn.ParameterList):
            items = tuple(("", _parameter(value)) for value in module)
            return Expression(f"{name}([", items, "])")
        children = module._modules
        if isinstance(module, nn.ModuleDict):
            named = tuple((f"{_text(key)}: ", self.module(child, key)) for key, child in module.items())
            return Expression(f"{name}({{", named, "})")
        inner = tuple(("", self.module(child)) for child in children.values() if child is not None)
        if list(children) != [str(number) for number in range(len(inner))]:
            raise UserError(f"{name} has named parts, which cannot be written out; use --to onnx")
        if isinstance(module, nn.ModuleList):
            return Expression(f"{name}([", inner, "])")
        return Expression(f"{name}(", inner, ")", hint)

    def _parts(self, module: nn.Module, without: frozenset[str] = frozenset()) -> dict[str, Expression]:
        """Parameters, buffers, children and the plain values that the code of the class reads."""
        parts: dict[str, Expression] = {}
        read = self._read(type(module)) - without
        for name, value in module.__dict__.items():
            if name not in _OF_EVERY_MODULE and name in read:
                parts[name] = self.value(value, f"{type(module).__name__}.{name}")
        for name, parameter in module._parameters.items():
            if name not in without:
                parts[name] = Expression("None") if parameter is None else _parameter(parameter)
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                if name in read:
                    parts[name] = _constant(buffer)
            elif name not in without:
                parts[name] = Expression(f"nn.Buffer(torch.zeros({_shape(buffer)}, dtype={buffer.dtype}))")
        for name, child in module._modules.items():
            if child is None:
                if name in read:
                    parts[name] = Expression("None")
            elif name in read or child.state_dict():
                parts[name] = self.module(child, name)
        return parts

    def _read(self, kind: type) -> set[str]:
        """Names that the code reads of instances of `kind`: behind `self.`, or behind a dot where no tensor has one."""
        own: set[str] = set()
        for base in kind.__mro__:
            own |= self._sources.own.get(_key(base), set())
        return own | {name for name in self._sources.attributes if not hasattr(Tensor, name)}

    def value(self, value: Any, where: str) -> Expression:
        """A plain value; `where` names it in errors."""
        if isinstance(value, nn.Module):
            if value.state_dict():
                raise UserError(f"{where} holds a module with weights that is not registered; use --to onnx")
            return self.module(value)
        if value is None or isinstance(value, bool | int | str):
            return Expression(_text(value))
        if isinstance(value, float):
            return Expression(repr(value) if math.isfinite(value) else f"float({str(value)!r})")
        if isinstance(value, torch.dtype):
            return Expression(str(value))
        if isinstance(value, Tensor):
            return _constant(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            return self._made(type(value), fields, where)
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            return self._made(type(value), value._asdict(), where)
        if isinstance(value, FunctionType) and "<" not in value.__qualname__ and not is_foreign(value.__module__):
            return Expression(self._need((value.__module__, value.__qualname__)))
        if isinstance(value, Mapping):
            items = tuple((f"{_text(key)}: ", self.value(item, where)) for key, item in value.items())
            return Expression("{", items, "}")
        if isinstance(value, Sequence):
            inner = tuple(("", self.value(item, where)) for item in value)
            if isinstance(value, list):
                return Expression("[", inner, "]")
            return Expression("(", inner, ",)" if len(inner) == 1 else ")")
        raise UserError(
            f"{where} is a {type(value).__name__}, which cannot be written into a Python file; use --to onnx or "
            "--to torch-export"
        )

    def _made(self, kind: type, fields: Mapping[str, Any], where: str) -> Expression:
        values = {name: self.value(value, f"{where}.{name}") for name, value in fields.items()}
        if len(values) <= 3:
            return Expression(f"{self._need(_key(kind))}(", tuple(("", value) for value in values.values()), ")")
        return self._call(self._need(_key(kind)), values, "")

    def _need(self, key: Key) -> str:
        if key not in self.needs:
            self.needs.append(key)
        return self._sources.names.get(key, key[1])

    def _call(self, name: str, values: Mapping[str, Expression], hint: str) -> Expression:
        return Expression(f"{name}(", tuple((_keyword(key), value) for key, value in values.items()), ")", hint)


def _keyword(name: str) -> str:
    """`name=` in a call; a part of a module may have any name, of which only identifiers can be written so."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(
            f"a part named {name!r} cannot be written into a Python file; use --to onnx or --to torch-export"
        )
    return f"{name}="


def _torch_base(kind: type) -> type:
    """The most special class of torch that `kind` derives from."""
    return next(base for base in kind.__mro__ if is_foreign(base.__module__) and issubclass(base, nn.Module))


def _names_of(base: type, module: nn.Module) -> frozenset[str]:
    """The attributes that torch's own constructor sets."""
    with torch.device("meta"):
        plain: nn.Module = base(**dict(_given(module, base)))
    return frozenset({*plain.__dict__, *plain._parameters, *plain._buffers, *plain._modules})


def _given(module: nn.Module, base: type) -> list[tuple[str, Any]]:
    """What torch's constructor was given, read back from the attributes; defaults are left out."""
    found = []
    for name, parameter in inspect.signature(base).parameters.items():
        if name in ("device", "dtype") or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if not hasattr(module, name):
            if parameter.default is parameter.empty:
                raise UserError(f"nn.{base.__name__} does not say its {name!r}; use --to onnx or --to torch-export")
            continue
        value = getattr(module, name)
        if isinstance(value, Tensor) or (value is None and name == "bias"):
            value = value is not None
        if isinstance(value, tuple) and len(set(value)) == 1 and name != "normalized_shape":
            value = value[0]  # (3, 3) is what 3 has become
        if value != parameter.default:
            found.append((name, value))
    return found


def _arguments(module: nn.Module, base: type) -> tuple[tuple[str, Expression], ...]:
    """Those that must be given by position, the others by name."""
    parameters = inspect.signature(base).parameters
    return tuple(
        ("" if parameters[name].default is inspect.Parameter.empty else f"{name}=", Expression(_text(value)))
        for name, value in _given(module, base)
    )


def _parameter(parameter: Tensor) -> Expression:
    return Expression(f"nn.Parameter(torch.zeros({_shape(parameter)}))")


def _constant(value: Tensor | None) -> Expression:
    if value is None:
        return Expression("None")
    if value.numel() > LARGEST_CONSTANT:
        raise UserError(f"a constant of {value.numel():,} numbers is too large for a Python file; use --to onnx")
    return Expression(f"nn.Buffer(torch.tensor({value.tolist()}, dtype={value.dtype}), persistent=False)")


def _shape(tensor: Tensor) -> str:
    return ", ".join(map(str, tensor.shape)) if tensor.dim() else "()"


def _text(value: Any) -> str:
    """A literal in double quotes."""
    if isinstance(value, str) and "'" not in repr(value)[1:-1] and '"' not in value:
        return f'"{repr(value)[1:-1]}"'
    return repr(value)


def named_parts(root: Expression) -> tuple[list[tuple[str, Expression]], Expression]:
    """Functions for what occurs more than once and does not fit half a line, innermost first; and what is left."""
    counts = _occurrences(root)
    repeated = {line for line, count in counts.items() if count > 1 and len(line) > WIDTH // 2}
    names: dict[str, str] = {}
    made: list[tuple[str, Expression]] = []

    def visit(node: Expression, *, is_root: bool = False) -> Expression:
        line = node.line()
        if line in names:
            return Expression(f"{names[line]}()")
        new = dataclasses.replace(node, parts=tuple((prefix, visit(part)) for prefix, part in node.parts))
        if is_root or line not in repeated or not node.hint:
            return new
        names[line] = name = _free(_snake(node.hint), set(names.values()))
        made.append((name, new))
        return Expression(f"{name}()")

    rest = visit(root, is_root=True)
    return made, rest


def _occurrences(root: Expression) -> Counter[str]:
    """How often each part would be written; what stands inside a repeated one is written once."""
    counts: Counter[str] = Counter()
    waiting = [part for _, part in root.parts]
    while waiting:
        node = waiting.pop()
        line = node.line()
        counts[line] += 1
        if counts[line] == 1 or not node.hint:  # without a hint it never becomes a function
            waiting += [part for _, part in node.parts]
    return counts


def _snake(name: str) -> str:
    words = re.sub(r"([a-z0-9])([A-Z])|([A-Z]+)([A-Z][a-z])", r"\1\3_\2\4", name.replace("ReLU", "Relu")).lower()
    # Letters of ASCII alone: the hint may be a key that comes from a file.
    words = re.sub(r"\W+", "_", words, flags=re.ASCII).strip("_") or "part"
    return f"make_{words}" if words.isidentifier() else f"make_part_{words}"


def _free(name: str, taken: set[str]) -> str:
    number, free = 2, name
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free
