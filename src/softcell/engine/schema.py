"""The types of a manifest's fields, on which whoever reads a run may rely. A field may be missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from softcell.errors import UserError

Test = tuple[Callable[[Any], bool], str]
_ABSENT = object()


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _all(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _or_none(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or test(value)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(n) is int and 0 < n < 2**20 for n in value)


MAPPING: Test = (lambda value: isinstance(value, Mapping), "a mapping")
TEXT: Test = (_is_text, "text")
WHOLE: Test = (_is_whole, "a whole number of 0 or more")
NUMBER: Test = (_or_none(_is_number), "a finite number, or null")
TEXTS: Test = (_all(_is_text), "a list of texts")
NUMBERS: Test = (_all(_is_number), "a list of numbers")

TYPES: dict[str, Test] = {
    "recipe": MAPPING,
    "results": MAPPING,
    "checksums": MAPPING,
    "seed": WHOLE,
    "recipe.method": TEXT,
    "recipe.space": TEXT,
    "recipe.data": TEXT,
    "recipe.data_root": (_or_none(_is_text), "text, or null"),
    "recipe.recipe": TEXT,
    "recipe.task": TEXT,
    "recipe.classifier": TEXT,
    "recipe.epochs": WHOLE,
    "recipe.space_settings": MAPPING,
    "recipe.method_settings": MAPPING,
    "recipe.classifier_settings": MAPPING,
    "recipe.resource": MAPPING,
    "recipe.plugins": TEXTS,
    "results.splits": MAPPING,
    "results.genotype": MAPPING,
    "results.guide": MAPPING,
    "results.guide.digest": TEXT,
    "results.parameters": WHOLE,
    "results.multiply_adds": WHOLE,
    "results.count": WHOLE,
    "results.split": TEXT,
    "results.accuracy": NUMBER,
    "results.loss": NUMBER,
    "results.val_accuracy": NUMBER,
    "results.recall_at_1": NUMBER,
    "results.recall_at_2": NUMBER,
    "results.recall_at_4": NUMBER,
    "results.recall_at_8": NUMBER,
    "results.data": MAPPING,
    "results.data.shape": (_is_shape, "three whole numbers above 0"),
    "results.data.classes": TEXTS,
    "results.data.num_classes": WHOLE,
    "results.data.outputs": WHOLE,
    "results.data.mean": NUMBERS,
    "results.data.std": NUMBERS,
    "results.data.source": TEXT,
    "results.data.fingerprint": MAPPING,
    "results.data.scaled_to": (lambda value: _is_shape([1, *value]) if isinstance(value, list) else False, "two sizes"),
    "results.data.whole": (lambda value: isinstance(value, bool), "true or false"),
}


def check_types(manifest: Mapping[str, Any], where: str, types: Mapping[str, Test] | None = None) -> None:
    """Raises `UserError` where a field of `manifest` is there and of a wrong type."""
    for name, (test, kind) in (TYPES if types is None else types).items():
        value: Any = manifest
        for part in name.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is not _ABSENT and not test(value):
            raise UserError(f"{where}: `{name}` must be {kind}, got {value!r:.80}; the file is damaged")
