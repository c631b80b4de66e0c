"""Plain frozen dataclasses in and out of dictionaries, strictly.

Recipes, spaces and methods are described by frozen dataclasses. This file reads them from YAML, JSON and
`key=value` strings: an unknown key, a wrong type or an impossible value is a `UserError` that says what would be right.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from softcell.errors import UserError, nearest
from softcell.files import parse_yaml

T = TypeVar("T")


class SettingError(UserError):
    """A setting has a wrong value: `where` it is, the `rule` that it breaks, and the value that it `got`."""

    def __init__(self, where: str, rule: str, got: str, way_out: str = "") -> None:
        super().__init__(f"{where} must be {rule}, got {got}{way_out}")
        self.where, self.rule, self.got, self.way_out = where, rule, got, way_out


_REMOVED: dict[Any, str] = {
    ("engine", "compile"): "; it was removed, since it was never measured to be faster: use auto",
}
"""Values of settings that earlier versions accepted, with the way out."""


def build(kind: type[T], values: Mapping[str, Any], where: str = "settings", elsewhere: Iterable[str] = ()) -> T:
    """A dataclass of type `kind` from a mapping; nested dataclasses from nested mappings.

    elsewhere: dotted names of settings that may be given in addition to these; suggested in place of a wrong one.
    """
    assert dataclasses.is_dataclass(kind)
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind) if f.init]
    arguments = {}
    for key, value in values.items():
        if key not in names:
            nested = [*_nested(hints, names), *elsewhere]
            raise UserError(f"{where}: no setting {_full(str(key), value)!r}; {_hint(str(key), value, names, nested)}")
        arguments[key] = convert(hints[key], value, f"{where}.{key}")
    needed = [f.name for f in dataclasses.fields(kind) if f.init and _has_no_default(f) and f.name not in arguments]
    if needed:
        raise UserError(f"{where}: {', '.join(needed)} must be given")
    return cast(T, kind(**arguments))


def _nested(hints: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """`weights.lr` and all other settings of the dataclasses among the fields."""
    return [
        f"{name}.{field.name}"
        for name in names
        if dataclasses.is_dataclass(hints[name])
        for field in dataclasses.fields(hints[name])
        if field.init
    ]


def _full(key: str, value: Any) -> str:
    """A setting as it was written: `weights.lr` where `weights` holds just that."""
    while isinstance(value, Mapping) and len(value) == 1:
        ((inner, value),) = value.items()
        key = f"{key}.{inner}"
    return key


def _hint(key: str, value: Any, names: Iterable[str], nested: Iterable[str]) -> str:
    """What may have been meant.

    First settings of that very name deeper down (`lr`: `weights.lr`) or less deep (`weights.lr`: `lr`); then names with
    the whole of `key` as words (`cells_per_stage`), then a similar one.
    """
    names, last = list(names), _full(key, value).rpartition(".")[2]
    meant = [name for name in nested if name.rpartition(".")[2] == key]
    if isinstance(value, Mapping):
        meant += [name for name in names if name == last]
    meant = meant or sorted(name for name in names if f"_{key}_" in f"_{name}_")
    if not meant and isinstance(value, Mapping):
        written, nested = _full(key, value), list(nested)
        meant = [name for name in nested if name.endswith(f".{last}")]
        meant = difflib.get_close_matches(written, meant, n=1)
    if not meant:
        return nearest(key, names)
    return f"did you mean {' or '.join(map(repr, meant))}? known: {', '.join(sorted(names))}"


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def to_dict(value: Any) -> Any:
    """Dataclasses to dictionaries and tuples to lists, all the way down: what JSON and YAML can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Mapping):
        return {str(key): to_dict(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_dict(item) for item in value]
    return value


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings merged into one; the later wins."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
                result[key] = merge(result[key], value)
            else:
                result[key] = dict(value) if isinstance(value, Mapping) else value
    return result


SHORT = {"method": "method_settings", "space": "space_settings", "classifier": "classifier_settings"}
"""Files, `--set` and Python calls may use the short form `space: {cells: 5}` for `space_settings: {cells: 5}`."""


def short_name(key: str) -> str:
    """A dotted name as users type it.

    Example:
        >>> from softcell.settings import short_name
        >>> short_name("search.space_settings.cells")
        'search.space.cells'
    """
    shorts = {full: short for short, full in SHORT.items()}
    return ".".join(shorts.get(part, part) for part in key.split("."))


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Layers of settings as one, the later winning: without None, and with the short forms of `SHORT` expanded.

    Example:
        >>> from softcell.settings import layered
        >>> layered({"space": {"cells": 8, "nodes": 2}, "epochs": 50}, {"space": {"cells": 5}, "epochs": None})
        {'space_settings': {'cells': 5, 'nodes': 2}, 'epochs': 50}
    """
    pairs = ((key, value) for layer in layers for key, value in layer.items() if value is not None)
    return merge(*({SHORT[key] if key in SHORT and isinstance(value, Mapping) else key: value} for key, value in pairs))


def assignments(items: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """`["weights.lr=0.1", "space.cells=5"]` to a nested mapping; values are read as YAML. option: named in errors."""
    result: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            example = "epochs=5" if option == "--set" else "timeout_min=60"
            raise UserError(f"{option} takes key=value (for example {example}), got {item!r}")
        result = merge(result, nested({key.strip(): parse_yaml(text, f"{option} {key}: the value {text[:60]!r}")}))
    return result


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"weights.lr": 0.1}` to `{"weights": {"lr": 0.1}}`; the inverse of `flat`."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        result = merge(result, value)
    return result


def convert(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`, or a `UserError` that names the rule."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is typing.Literal:
        if value not in arguments:
            removed = _REMOVED.get((where.rpartition(".")[2], str(value)), "")
            raise SettingError(where, f"one of {', '.join(map(str, arguments))}", repr(value), removed)
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise SettingError(where, "a mapping of settings", repr(value))
        return build(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise SettingError(where, "a list", repr(value))
        return tuple(convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping) or kind is dict:
        if not isinstance(value, Mapping):
            raise SettingError(where, "a mapping", repr(value))
        return dict(value)
    return _convert_plain(kind, value, where)


def _convert_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    errors: list[SettingError] = []
    for kind in kinds:
        if kind is type(None):
            continue
        try:
            return convert(kind, value, where)
        except SettingError as error:
            errors.append(error)
    # Several kinds of value are accepted: all are named, without repeating the name of the setting.
    rules = [error.rule if error.where == where else f"{error.where} must be {error.rule}" for error in errors]
    raise SettingError(where, ", or ".join(dict.fromkeys(rules)), errors[0].got, errors[0].way_out)


def _convert_plain(kind: Any, value: Any, where: str) -> Any:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        is_seed_setting = where.rpartition(".")[2].startswith("seed")  # seeds have their own rule (`is_seed`)
        if abs(value) >= 2**63 and not is_seed_setting:  # which no tensor can hold
            raise SettingError(where, "a whole number below 2**63", str(value)[:30])
        return value
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:  # YAML reads 1e-3 as text, so numbers in text are accepted too
            number = float(value)
        except (ValueError, OverflowError):
            pass
        else:
            if not math.isfinite(number):  # nor could a run folder keep it
                raise SettingError(where, "a finite number", repr(value))
            return number
    if kind is str and isinstance(value, str):
        return value
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    raise SettingError(where, str(names.get(kind, kind)), repr(value))


def positive(name: str, value: float) -> None:
    """Raises unless `value > 0`."""
    if not value > 0:
        raise UserError(f"`{name} > 0` must hold, but got {value}")


def below_one(name: str, value: float) -> None:
    """Raises unless `0 <= value < 1`."""
    if not 0.0 <= value < 1.0:
        raise UserError(f"`0 <= {name} < 1` must hold, but got {name}={value}")


def at_most(name: str, value: int, most: int) -> None:
    """Raises unless `value <= most`."""
    if value > most:
        raise UserError(f"`{name} <= {most:,}` must hold, but got {name}={value:,}")


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names; tuples as the lists that files have."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return found


def not_negative(name: str, value: float) -> None:
    """Raises unless `value >= 0`."""
    if not value >= 0:
        raise UserError(f"`{name} >= 0` must hold, but got {value}")


MAX_EPOCHS = 1_000_000
"""Of a run. A larger number is a mistake, and a run must be able to list its epochs."""
MAX_RANDOM = 1_000
"""Random architectures that are trained for comparison."""
SEEDS = 2**63
"""Above every seed: torch overflows beyond 64 bits, and other readers of a `run.json` may use one for the sign."""
MAX_SEEDS = 10_000
"""Maximum number of runs for `--seeds`; larger values are probably a seed passed by mistake."""


def bounded_epochs(name: str, value: int) -> None:
    """Raises unless `value` is a number of epochs that a run can list."""
    at_most(name, value, MAX_EPOCHS)


def is_seed(name: str, value: int) -> None:
    """Raises unless `value` is a seed that every generator accepts."""
    if not 0 <= value < SEEDS:
        raise UserError(f"`0 <= {name} < 2**63` must hold, but got {name}={value}")


def without_auto(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without `precision=auto`: a resumed run has already chosen."""
    return {key: value for key, value in given.items() if not (key == "precision" and value == "auto")}


def refuse_changes(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises if a resumed run would get settings different from those it started with."""
    different = [key for key in stored if stored[key] != wanted[key]]
    if different:
        changes = ", ".join(f"{key}: {stored[key]} -> {wanted[key]}" for key in different)
        raise UserError(f"a resumed run keeps its recipe, but these settings differ: {changes}; leave them out")
