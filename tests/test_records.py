"""Published records can be repeated elsewhere: they contain commands, and no paths of the original machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RECORDS = sorted([*ROOT.glob("benchmarks/records/*.json"), *ROOT.glob("results/**/*.json")])


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (*strings(key), *strings(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_record_names_date_and_hardware_and_no_place(record: Path) -> None:
    found = json.loads(record.read_text(encoding="utf-8"))
    assert "date" in found
    assert {"hardware", "hardware_of"} & set(found)
    assert [text for text in strings(found) if text.startswith(("/", "~"))] == []


def test_there_are_records() -> None:
    assert RECORDS
