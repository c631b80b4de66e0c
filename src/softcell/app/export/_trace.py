"""The forward pass of a module as straight-line code, with its children as calls.

A module is traced symbolically in eval mode: decisions by its settings (the picks of a cell, options that are off)
disappear, and the computation remains. Modules whose code depends on the values or sizes of tensors cannot
be traced; their source is copied instead (see `_source`).
"""

from __future__ import annotations

import inspect
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from softcell.app.export._source import REPLACED, Key, is_foreign
from softcell.nn.conv import FactorisedReduction, ReLUFirst
from softcell.nn.stochastic import Dropout, DropPath

IDENTITIES = (nn.Identity, DropPath, Dropout)  # nothing is dropped outside training
LONGEST_TERM, LONGEST_ARGUMENT, LONGEST_ITEM = 72, 40, 12
"""Characters of an expression inside a sum or product, inside a call, and inside the list that is returned."""

_ADD, _MULTIPLY, _UNARY, _ATOM = range(4)
_BINARY: dict[Any, tuple[str, int]] = {
    operator.add: ("+", _ADD),
    operator.iadd: ("+", _ADD),
    operator.sub: ("-", _ADD),
    operator.mul: ("*", _MULTIPLY),
    operator.imul: ("*", _MULTIPLY),
    operator.truediv: ("/", _MULTIPLY),
    operator.floordiv: ("//", _MULTIPLY),
    operator.mod: ("%", _MULTIPLY),
    operator.matmul: ("@", _MULTIPLY),
}


class Untraceable(Exception):
    """The code of a module depends on values, sizes or the device of tensors, or uses something unknown."""


@dataclass(frozen=True)
class Result:
    """The result of the child at a path, as the argument of another one."""

    path: str


@dataclass(frozen=True)
class Traced:
    """The code of a `forward`, and the parts of its module that it uses.

    calls: in their order the path of a child and its arguments, where None is a tensor; tensors: the paths of
    parameters and buffers; result: None for a tensor, else lists and tuples of them.
    """

    lines: tuple[str, ...]
    calls: tuple[tuple[str, tuple[Any, ...]], ...]
    tensors: frozenset[str]
    result: Any


def trace(module: nn.Module, arguments: tuple[Any, ...]) -> Traced:
    """The code of `module.forward`; arguments: None for a tensor, possibly in lists."""
    flat: list[None] = []
    _map(arguments, lambda _: flat.append(None))
    root = _ROOTS.get(len(flat))
    if root is None:
        raise Untraceable(f"{len(flat)} tensors as arguments")
    tracer = _Tracer()
    try:
        with torch.no_grad():
            graph = tracer.trace(root(module, arguments))
    except Exception as error:  # the module's code may raise anything when called with proxies instead of tensors
        raise Untraceable(str(error)) from error
    return _Writer(module, arguments, graph).write()


def _map(value: Any, function: Callable[[None], Any]) -> Any:
    """The same lists and tuples with every None replaced; other values are constants and stay."""
    if isinstance(value, list | tuple):
        return type(value)([_map(item, function) for item in value])
    return function(value) if value is None else value


class _Root(nn.Module):
    """Calls `forward` of a module itself, so that it is not taken for one of the children."""

    def __init__(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.module, self._arguments = module, arguments
        self.training = module.training

    def run(self, *values: Any) -> Any:
        rest = iter(values)
        return self.module.forward(*_map(self._arguments, lambda _: next(rest)))


# torch.fx makes a single proxy for `*values`, so there is a class for each number of tensors.
class _Root1(_Root):
    def forward(self, a: Any) -> Any:
        return self.run(a)


class _Root2(_Root):
    def forward(self, a: Any, b: Any) -> Any:
        return self.run(a, b)


class _Root3(_Root):
    def forward(self, a: Any, b: Any, c: Any) -> Any:
        return self.run(a, b, c)


_ROOTS: dict[int, type[_Root]] = {1: _Root1, 2: _Root2, 3: _Root3}


class _Value(fx.Proxy):
    """A tensor on the CPU that needs no gradient, for code that checks."""

    is_cuda = False
    requires_grad = False


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # Children stay calls: `Units` traces each of them by itself.
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if isinstance(m, IDENTITIES):
            return args[0]
        if isinstance(m, ReLUFirst | FactorisedReduction):
            args = args[:1]  # the second is max(x, 0), which saves work where several modules share it
        return super().call_module(m, forward, args, kwargs)


class _Writer:
    """Writes a graph as statements; a value that is used once is inlined."""

    def __init__(self, module: nn.Module, arguments: tuple[Any, ...], graph: fx.Graph) -> None:
        self._module, self._graph = module, graph
        self._names: dict[fx.Node, str] = {}
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self._tensors: set[str] = set()
        self._lines: list[str] = []
        self._parameters = list(inspect.signature(module.forward).parameters)[: len(arguments)]
        placeholders = iter([node for node in graph.nodes if node.op == "placeholder"])

        def name(value: Any, expression: str) -> None:
            if value is None:
                self._names[next(placeholders)] = expression
            elif isinstance(value, list | tuple):
                for index, item in enumerate(value):
                    name(item, f"{expression}[{index}]")

        for parameter, value in zip(self._parameters, arguments, strict=True):
            name(value, parameter)
        self._uses: Counter[fx.Node] = Counter()
        # From the end: what only unused nodes read is not used either.
        for node in reversed(graph.nodes):
            if node.op == "output" or self._uses[node]:
                self._count([*node.args, *node.kwargs.values()])

    def _count(self, value: Any) -> None:
        """Counts the uses of nodes in an argument; neighbouring items of one list count as one use of it."""
        if isinstance(value, fx.Node):
            self._uses[value] += 1
        elif run := _slice(value):
            self._uses[run[0]] += 1
        elif isinstance(value, list | tuple):
            for item in value:
                self._count(item)
        elif isinstance(value, slice):
            self._count([value.start, value.stop, value.step])

    def write(self) -> Traced:
        for node in self._graph.nodes:
            if node.op == "call_module":
                if node.kwargs:
                    raise Untraceable(f"{node.target} is called with named arguments")
                self._calls.append((_own(str(node.target)), tuple(fx.map_arg(node.args, _given))))
            if node.op == "output":
                given = node.args[0]
                alone = isinstance(given, fx.Node) and given not in self._names
                text = self._expression(given) if alone else self._value(given, LONGEST_ITEM)
                self._lines.append(f"return {text[0]}")
            elif node.op not in ("placeholder", "get_attr") and self._uses[node] > 1:
                self._assign(node)
        head = f"def forward(self, {', '.join(self._parameters)}):"
        lines = (head, *(f"    {line}" for line in self._lines))
        result = fx.map_arg(next(node for node in self._graph.nodes if node.op == "output").args[0], lambda _: None)
        return Traced(lines, tuple(self._calls), frozenset(self._tensors), result)

    def _assign(self, node: fx.Node, text: str | None = None) -> str:
        text = self._expression(node)[0] if text is None else text
        number = sum(name.startswith("x") and name[1:].isdigit() for name in self._names.values()) + 1
        self._names[node] = f"x{number}"
        self._lines.append(f"x{number} = {text}")
        return f"x{number}"

    def _value(self, value: Any, longest: int = LONGEST_ARGUMENT) -> tuple[str, int]:
        """The text of an argument and how tightly it binds; a longer one gets a name on a separate line."""
        if isinstance(value, fx.Node):
            if value in self._names:
                return self._names[value], _ATOM
            text, binds = self._expression(value)
            return (self._assign(value, text), _ATOM) if len(text) > longest else (text, binds)
        if isinstance(value, slice):
            ends = ["" if end is None else self._value(end)[0] for end in (value.start, value.stop, value.step)]
            return ":".join(ends if ends[2] else ends[:2]), _ATOM
        if run := _slice(value):
            source, first, last = run
            return f"{self._inner(source, _ATOM)}[{first}:{last + 1}]", _ATOM
        if isinstance(value, list | tuple):
            inner = ", ".join(self._value(item, longest)[0] for item in value)
            if isinstance(value, list):
                return f"[{inner}]", _ATOM
            return f"({inner},)" if len(value) == 1 else f"({inner})", _ATOM
        if isinstance(value, torch.dtype):
            return str(value), _ATOM
        if value is Ellipsis:
            return "...", _ATOM
        plain = value is None or isinstance(value, bool | int | str)
        if plain or (isinstance(value, float) and math.isfinite(value)):
            return repr(value), _UNARY if isinstance(value, int | float) and value < 0 else _ATOM
        raise Untraceable(f"a constant of type {type(value).__name__}")

    def _inner(self, value: Any, least: int) -> str:
        text, binds = self._value(value, LONGEST_TERM)
        return text if binds >= least else f"({text})"

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        named = [f"{key}={self._value(value)[0]}" for key, value in kwargs.items()]
        return ", ".join([*(self._value(value)[0] for value in args), *named])

    def _expression(self, node: fx.Node) -> tuple[str, int]:
        args, kwargs = node.args, dict(node.kwargs)
        if node.op == "call_module":
            return f"{self._path(_own(str(node.target)))}({self._arguments(args, kwargs)})", _ATOM
        if node.op == "get_attr":
            path = _own(str(node.target))
            self._tensors.add(path)
            return self._path(path), _ATOM
        if node.op == "call_method":
            return f"{self._inner(args[0], _ATOM)}.{node.target}({self._arguments(args[1:], kwargs)})", _ATOM
        return self._function(node.target, args, kwargs)

    def _function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, int]:
        if target in _BINARY:
            sign, binds = _BINARY[target]
            return f"{self._inner(args[0], binds)} {sign} {self._inner(args[1], binds + 1)}", binds
        if target is operator.neg:
            return f"-{self._inner(args[0], _UNARY)}", _UNARY
        if target is getattr:
            return f"{self._inner(args[0], _ATOM)}.{args[1]}", _ATOM
        if target is operator.getitem:
            index = args[1]
            if isinstance(index, tuple) and index:
                text = ", ".join(self._value(item)[0] for item in index) + ("," if len(index) == 1 else "")
            else:
                text = self._value(index)[0]
            return f"{self._inner(args[0], _ATOM)}[{text}]", _ATOM
        name = getattr(target, "__name__", "")
        if target is torch.zeros_like:
            kwargs.pop("memory_format", None)  # the layout does not change values
        for prefix, place in (("F", F), ("torch", torch)):
            if getattr(place, name, None) is target:
                return f"{prefix}.{name}({self._arguments(args, kwargs)})", _ATOM
        raise Untraceable(f"the function {target}")

    def _path(self, path: str) -> str:
        """`self.cells[0]` for `cells.0`: items of lists and dictionaries are read as such."""
        text, here = "self", self._module
        for name in path.split("."):
            if isinstance(here, nn.ModuleList | nn.Sequential | nn.ParameterList):
                text += f"[{int(name)}]"
            elif isinstance(here, nn.ModuleDict):
                text += f"[{quoted(name)}]"
            elif name.isidentifier():
                text += f".{name}"
            else:
                raise Untraceable(f"a part named {name!r}")
            here = here[name] if isinstance(here, nn.ModuleDict) else getattr(here, name)
        return text


def _slice(value: Any) -> tuple[fx.Node, int, int] | None:
    """Source, first and last index of a list of neighbouring items that are all read from one other list."""
    if not isinstance(value, list) or len(value) < 2:
        return None
    if not all(isinstance(item, fx.Node) and item.target is operator.getitem for item in value):
        return None
    (source, first), indices = value[0].args, [item.args[1] for item in value]
    alike = all(item.args[0] is source for item in value) and isinstance(first, int)
    if not alike or source.op != "call_module" or indices != list(range(first, first + len(value))):
        return None
    return (source, first, first + len(value) - 1) if first >= 0 else None


def _given(node: fx.Node) -> Any:
    return Result(_own(str(node.target))) if node.op == "call_module" else None


def _own(target: str) -> str:
    """The path below the module itself; constants that the tracer created have none."""
    head, _, rest = target.partition(".")
    if head != "module" or not rest:
        raise Untraceable(f"a tensor that is not part of the module ({target})")
    return rest


def quoted(name: str) -> str:
    """A literal in double quotes."""
    return f'"{repr(name)[1:-1]}"' if "'" not in repr(name)[1:-1] and '"' not in name else repr(name)


def part_at(module: nn.Module, path: str) -> nn.Module | Tensor:
    """What a path of `Traced` leads to."""
    here: Any = module
    for name in path.split("."):
        here = here[name] if isinstance(here, nn.ModuleDict) else getattr(here, name)
    return here  # type: ignore[no-any-return]


class Units:
    """The modules of a network that could be traced, by `id`; the classes of those that are copied instead."""

    def __init__(self, network: nn.Module) -> None:
        self.traced: dict[int, Traced] = {}
        self.called: set[int] = set()
        self.tensors: set[int] = set()
        self.copied: list[Key] = []
        self._arguments: dict[int, tuple[Any, ...]] = {}
        self._visit(network, (None,))

    def _visit(self, module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        """Traces a module and everything that it calls; returns the structure of its result."""
        key = key_of(type(module))
        if id(module) in self.called:  # called twice, in the same way if it is to be traced
            if id(module) in self.traced and self._arguments[id(module)] != arguments:
                del self.traced[id(module)]
                self._copy(module)
            return self.traced[id(module)].result if id(module) in self.traced else None
        self.called.add(id(module))
        if is_plain_sequence(module):
            for child in module.children():
                self._visit(child, (None,))
            return None
        if is_foreign(key[0]) or key in REPLACED:
            return None
        try:
            if torch_base(type(module)) is not nn.Module:
                raise Untraceable("a subclass of a torch module")
            found = trace(module, arguments)
        except Untraceable:
            self._copy(module)
            return None
        self.traced[id(module)], self._arguments[id(module)] = found, arguments
        self.tensors |= {id(part_at(module, path)) for path in found.tensors}
        results: dict[str, Any] = {}
        for path, given in found.calls:
            called = part_at(module, path)
            assert isinstance(called, nn.Module)
            results[path] = self._visit(called, _resolved(given, results))
        return found.result

    def _copy(self, module: nn.Module) -> None:
        keys = [key_of(type(part)) for part in module.modules()]
        self.copied += [key for key in keys if not is_foreign(key[0]) and key not in REPLACED]


def is_plain_sequence(module: nn.Module) -> bool:
    """Whether `nn.Sequential` does the same: traced code never gives `ReLUFirst` a second argument."""
    own = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return own or isinstance(module, ReLUFirst)


def _resolved(given: Any, results: Mapping[str, Any]) -> Any:
    """Arguments with the structure of the results that are among them."""
    if isinstance(given, list | tuple):
        return type(given)([_resolved(item, results) for item in given])
    return results[given.path] if isinstance(given, Result) else given


def key_of(kind: type) -> Key:
    return kind.__module__, kind.__qualname__


def torch_base(kind: type) -> type:
    """The most derived torch class among the base classes of `kind`."""
    return next(base for base in kind.__mro__ if is_foreign(base.__module__) and issubclass(base, nn.Module))
