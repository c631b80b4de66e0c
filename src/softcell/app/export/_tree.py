"""Writes a network out as Python: a class for each kind of module, and an expression with every module and its parts.

Modules are traced where that is possible (`_trace`), from the network downwards; of the others, and of all below them,
the source is copied (`_source`). Parts that occur several times become functions of the numbers in which they differ.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import keyword
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from softcell.app.export._source import REPLACED, Key, Sources, is_foreign
from softcell.app.export._trace import Traced, Units, is_plain_sequence, key_of, quoted, torch_base
from softcell.errors import UserError

WIDTH = 120
LARGEST_CONSTANT = 100_000
"""Maximum number of values of a constant tensor that is written out."""
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList)


@dataclass(frozen=True)
class Expression:
    """`open` + `parts` + `close`, on one line where it fits; a part is a prefix (`name=`) and an expression."""

    open: str
    parts: tuple[tuple[str, Expression], ...] = ()
    close: str = ""
    hint: str = ""  # a name for a function that returns it, or for an argument

    def line(self) -> str:
        return self.open + ", ".join(prefix + part.line() for prefix, part in self.parts) + self.close

    def lines(self, room: int = WIDTH, prefix: str = "") -> list[str]:
        """Broken to `room` columns, with `prefix` before the first line."""
        if not self.parts or len(prefix) + len(self.line()) <= room:
            return [self.line()]
        close = self.close.removeprefix(",")  # of a tuple of one: every item has a comma here
        if not any(part.parts for _, part in self.parts):  # arguments of a call, or the cells of a network
            items = []
            for item, equal in itertools.groupby(prefix + part.line() for prefix, part in self.parts):
                count = len(list(equal))
                calls = count > 2 and item.startswith("make_")
                items += [f"*({item} for _ in range({count}))"] if calls else [item] * count
            return [self.open, *filled(items, room), close]
        result = [self.open]
        for prefix, part in self.parts:
            first, *rest = part.lines(room - 5, prefix)  # indented, and with a comma
            result += [f"    {prefix}{first}", *(f"    {line}" for line in rest)]
            result[-1] += ","
        return [*result, close]


def filled(items: Sequence[str], room: int = WIDTH) -> list[str]:
    """Indented lines of items with commas, as many in each line of `room` columns as fit."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(item) + 2 <= room:
            lines[-1] += f" {item},"
        else:
            lines.append(f"    {item},")
    return lines


class Tree:
    """Expressions for modules and values; a copied module has the values that its code reads."""

    def __init__(self, sources: Sources, units: Units | None = None) -> None:
        self._sources, self._units = sources, units
        self.needs: list[Key] = []
        """Classes of plain values that the expressions name."""
        self.classes: dict[tuple[str, ...], tuple[str, str]] = {}
        """By the code of a traced module the name of its class and a sentence on it."""

    def module(self, module: nn.Module, hint: str = "") -> Expression:
        key = key_of(type(module))
        if key in REPLACED and REPLACED[key] == "nn.Identity":
            return Expression("nn.Identity()")
        if self._units is not None and id(module) in self._units.traced:
            name = self._named(module, self._units.traced[id(module)])
            return self._call(name, self._traced_parts(module), hint or name)
        if isinstance(module, _CONTAINERS):
            return self._container(module, hint or key[1])
        base = torch_base(type(module))
        if base is nn.Module and self._only_holds(module):
            return self._call("Part", self._traced_parts(module), hint or key[1])
        if base is nn.Module:
            return self._call(self._class_name(type(module)), self._parts(module), hint or key[1])
        made = Expression(f"{self._class_name(type(module))}(", _arguments(module, base), ")")
        extra = self._parts(module, without=_names_of(base, module)) if type(module) is not base else {}
        if not extra or key in REPLACED:
            return made
        parts = tuple((_keyword(name), value) for name, value in extra.items())
        return Expression("having(", (("", made), *parts), ")", hint or key[1])

    def _only_holds(self, module: nn.Module) -> bool:
        """Whether a module is never called itself, but only its parts are."""
        units = self._units
        return units is not None and id(module) not in units.called and key_of(type(module)) not in units.copied

    def _named(self, module: nn.Module, found: Traced) -> str:
        if found.lines not in self.classes:
            own = type(module).__name__.removeprefix("Picked")
            taken = {name for name, _ in self.classes.values()} | set(self._sources.names.values())
            about = (inspect.getdoc(type(module)) or "").partition("\n\n")[0].replace("\n", " ")
            self.classes[found.lines] = _free(own, taken | {"Part"}), about
        return self.classes[found.lines][0]

    def _class_name(self, kind: type) -> str:
        key = key_of(kind)
        if key in REPLACED:
            return REPLACED[key]
        return f"nn.{kind.__name__}" if is_foreign(key[0]) else self._sources.names[key]

    def _container(self, module: nn.Module, hint: str) -> Expression:
        plain = self._units is not None and id(module) in self._units.called and is_plain_sequence(module)
        name = "nn.Sequential" if plain else self._class_name(type(module))
        if isinstance(module, nn.ParameterList):
            items = tuple(("", _parameter(value)) for value in module)
            return Expression(f"{name}([", items, "])")
        children = module._modules
        if isinstance(module, nn.ModuleDict):
            kept = [(key, child) for key, child in module.items() if self._is_needed(child)]
            named = tuple((f"{quoted(key)}: ", self.module(child, key)) for key, child in kept)
            return Expression(f"{name}({{", named, "})")
        inner = tuple(("", self.module(child)) for child in children.values() if child is not None)
        if list(children) != [str(number) for number in range(len(inner))]:
            raise UserError(f"{name} has named parts, which cannot be written out; use --to onnx")
        if isinstance(module, nn.ModuleList):
            return Expression(f"{name}([", inner, "])")
        return Expression(f"{name}(", inner, ")", hint)

    def _is_needed(self, module: nn.Module) -> bool:
        """Whether a part has weights or is called; parts of copied modules are always kept."""
        if self._units is None or any(key_of(type(part)) in self._units.copied for part in module.modules()):
            return True
        return bool(module.state_dict()) or any(id(part) in self._units.called for part in module.modules())

    def _traced_parts(self, module: nn.Module) -> dict[str, Expression]:
        """Parameters, buffers and children of a traced module, or of one that only holds others."""
        assert self._units is not None
        parts = {name: _parameter(value) for name, value in module._parameters.items() if value is not None}
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                parts[name] = _buffer(buffer)
            elif buffer is not None and id(buffer) in self._units.tensors:
                parts[name] = _constant(buffer)
        children = {name: child for name, child in module._modules.items() if child is not None}
        return parts | {name: self.module(child, name) for name, child in children.items() if self._is_needed(child)}

    def _parts(self, module: nn.Module, without: frozenset[str] = frozenset()) -> dict[str, Expression]:
        """Parameters, buffers, children and the plain values that the copied code of the class reads."""
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
                parts[name] = _buffer(buffer)
        for name, child in module._modules.items():
            if child is None:
                if name in read:
                    parts[name] = Expression("None")
            elif name in read or child.state_dict():
                parts[name] = self.module(child, name)
        return parts

    def _read(self, kind: type) -> set[str]:
        """Names that the code reads of instances of `kind`: after `self.`, or after a dot if tensors lack the name."""
        own: set[str] = set()
        for base in kind.__mro__:
            own |= self._sources.own.get(key_of(base), set())
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
            return Expression(f"{self._need(key_of(kind))}(", tuple(("", value) for value in values.values()), ")")
        return self._call(self._need(key_of(kind)), values, "")

    def _need(self, key: Key) -> str:
        if key not in self.needs:
            self.needs.append(key)
        return self._sources.names.get(key, key[1])

    def _call(self, name: str, values: Mapping[str, Expression], hint: str) -> Expression:
        return Expression(f"{name}(", tuple((_keyword(key), value) for key, value in values.items()), ")", hint)


def _keyword(name: str) -> str:
    """`name=` in a call; names that are not identifiers cannot be written like this."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(
            f"a part named {name!r} cannot be written into a Python file; use --to onnx or --to torch-export"
        )
    return f"{name}="


def _names_of(base: type, module: nn.Module) -> frozenset[str]:
    """The attributes that torch's own constructor sets."""
    # Only the names are needed, not the memory of the weights.
    with torch.device("meta"):
        plain: nn.Module = base(**dict(_given(module, base)))
    return frozenset({*plain.__dict__, *plain._parameters, *plain._buffers, *plain._modules})


def _given(module: nn.Module, base: type) -> list[tuple[str, Any]]:
    """The arguments of torch's constructor, read back from the attributes; defaults are left out."""
    found = []
    for name, parameter in inspect.signature(base).parameters.items():
        if name in ("device", "dtype") or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if not hasattr(module, name):
            if parameter.default is parameter.empty:
                raise UserError(f"nn.{base.__name__} does not keep its {name!r}; use --to onnx or --to torch-export")
            continue
        value = getattr(module, name)
        if isinstance(value, Tensor) or (value is None and name == "bias"):
            value = value is not None
        if isinstance(value, tuple) and len(set(value)) == 1 and name != "normalized_shape":
            value = value[0]  # 3 has become (3, 3)
        # Convolutions over several pixels state their stride: edges of stride 1 and 2 then share a function.
        stated = name == "stride" and isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1
        if stated or value != parameter.default:
            found.append((name, value))
    return found


def _arguments(module: nn.Module, base: type) -> tuple[tuple[str, Expression], ...]:
    """Required arguments by position, the others by name."""
    parameters = inspect.signature(base).parameters
    return tuple(
        ("" if parameters[name].default is inspect.Parameter.empty else f"{name}=", Expression(_text(value), hint=name))
        for name, value in _given(module, base)
    )


def _parameter(parameter: Tensor) -> Expression:
    return Expression("nn.Parameter(torch.zeros(", _shape(parameter), "))")


def _buffer(buffer: Tensor) -> Expression:
    return Expression(f"nn.Buffer(torch.zeros({_shape_text(buffer)}, dtype={buffer.dtype}))")


def _constant(value: Tensor | None) -> Expression:
    if value is None:
        return Expression("None")
    if value.numel() > LARGEST_CONSTANT:
        raise UserError(f"a constant of {value.numel():,} numbers is too large for a Python file; use --to onnx")
    return Expression(f"nn.Buffer(torch.tensor({value.tolist()}, dtype={value.dtype}), persistent=False)")


def _shape(tensor: Tensor) -> tuple[tuple[str, Expression], ...]:
    return tuple(("", Expression(str(size), hint="size")) for size in tensor.shape) or (("", Expression("()")),)


def _shape_text(tensor: Tensor) -> str:
    return ", ".join(map(str, tensor.shape)) if tensor.dim() else "()"


def _text(value: Any) -> str:
    """A literal in double quotes."""
    return quoted(value) if isinstance(value, str) else repr(value)


ARGUMENTS = {
    "in_channels": "channels",
    "num_features": "channels",
    "out_channels": "outputs",
    "in_features": "features",
}
"""Names of torch's arguments in the functions of a file."""


@dataclass
class Function:
    """A part that occurs several times: the numbers in which its occurrences differ are its arguments."""

    name: str
    example: Expression
    columns: list[list[int]]  # for each argument the positions of its numbers
    arguments: list[str]


class Functions:
    """Functions for parts that occur more than once and do not fit half a line.

    Numbers of an expression are counted from left to right; two parts are of one kind where all else is equal.
    """

    def __init__(self, root: Expression) -> None:
        found: dict[str, list[list[str]]] = {}
        examples: dict[str, Expression] = {}
        hints: dict[str, Counter[str]] = {}
        counts = _occurrences(root)
        for node in _walk(root):
            kind = _kind(node)
            if counts[kind] > 1 and node.hint and node.parts and len(node.line()) > WIDTH // 2 and node is not root:
                examples.setdefault(kind, node)
                hints.setdefault(kind, Counter())[node.hint] += 1
                found.setdefault(kind, []).append([leaf.open for leaf in _numbers(node)])
        self._known: dict[str, Function] = {}
        for kind, rows in found.items():
            by_values: dict[tuple[str, ...], list[int]] = {}
            for position, values in enumerate(zip(*rows, strict=True)):
                if len(set(values)) > 1:
                    by_values.setdefault(values, []).append(position)
            leaves, names = _numbers(examples[kind]), list[str]()
            for positions in by_values.values():
                hint = leaves[positions[0]].hint or "size"
                names.append(_free(ARGUMENTS.get(hint, hint), set(names)))
            name = _free(_snake(hints[kind].most_common(1)[0][0]), {one.name for one in self._known.values()})
            self._known[kind] = Function(name, examples[kind], list(by_values.values()), names)
        self._root = root

    def write(self) -> tuple[list[tuple[str, list[str], Expression]], Expression]:
        """Name, arguments and body of every function, inner ones first, and the rest."""
        made = []
        for one in reversed(self._known.values()):  # a part is visited after the parts that contain it
            values = [leaf.open for leaf in _numbers(one.example)]
            for name, positions in zip(one.arguments, one.columns, strict=True):
                for position in positions:
                    values[position] = name
            made.append((one.name, one.arguments, self._body(one.example, values)))
        return made, self._body(self._root, [leaf.open for leaf in _numbers(self._root)])

    def _body(self, node: Expression, values: list[str]) -> Expression:
        """The expression with its numbers replaced by `values`, and its parts by calls where there is a function."""
        if not node.parts:
            return dataclasses.replace(node, open=values[0]) if _is_number(node) else node
        parts, start = [], 0
        for prefix, part in node.parts:
            own = values[start : start + len(_numbers(part))]
            start += len(own)
            function = self._known.get(_kind(part)) if part.parts else None
            if function is None:
                parts.append((prefix, self._body(part, own)))
            else:
                given = ", ".join(own[positions[0]] for positions in function.columns)
                parts.append((prefix, Expression(f"{function.name}({given})")))
        return dataclasses.replace(node, parts=tuple(parts))


def _is_number(node: Expression) -> bool:
    return not node.parts and node.open.isdigit()


def _walk(node: Expression) -> Iterator[Expression]:
    yield node
    for _, part in node.parts:
        yield from _walk(part)


def _numbers(node: Expression) -> list[Expression]:
    return [leaf for leaf in _walk(node) if _is_number(leaf)]


def _kind(node: Expression) -> str:
    """The expression on one line, with its numbers left open."""
    if not node.parts:
        return "#" if _is_number(node) else node.open
    return node.open + ", ".join(prefix + _kind(part) for prefix, part in node.parts) + node.close


def _occurrences(root: Expression) -> Counter[str]:
    """How often each kind of part would be written; the parts of a repeated one are written once."""
    counts: Counter[str] = Counter()
    waiting = [part for _, part in root.parts]
    while waiting:
        node = waiting.pop()
        kind = _kind(node)
        counts[kind] += 1
        if counts[kind] == 1 or not node.hint:  # without a hint it never becomes a function
            waiting += [part for _, part in node.parts]
    return counts


def _snake(name: str) -> str:
    words = re.sub(r"([a-z0-9])([A-Z])|([A-Z]+)([A-Z][a-z])", r"\1\3_\2\4", name.replace("ReLU", "Relu")).lower()
    # Only ASCII letters: the hint may be a key that comes from a file.
    words = re.sub(r"\W+", "_", words, flags=re.ASCII).strip("_") or "part"
    return f"make_{words}" if words.isidentifier() else f"make_part_{words}"


def _free(name: str, taken: set[str]) -> str:
    number, free = 2, name
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free
