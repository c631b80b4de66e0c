"""Untrusted files are read within limits, as plain data, or refused in one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softcell import files
from softcell.errors import UserError
from softcell.files import Fields, parse_json, parse_yaml, read_json_lines, read_text

TEXT = st.text(st.characters(codec="utf-8"))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN)
def test_json_of_plain_data_is_read_as_the_standard_library_reads_it(value: Any) -> None:
    text = json.dumps(value)
    assert parse_json(text, "here") == json.loads(text)


@given(st.text(max_size=60))
def test_any_text_is_plain_data_or_a_user_error(text: str) -> None:
    for parse in (parse_json, parse_yaml):
        try:
            found = parse(text, "here")
        except UserError:
            continue
        json.dumps(found, default=_refuse)


def _refuse(value: Any) -> Any:
    raise AssertionError(f"{value!r} is no plain data")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "nested deeper|not valid JSON|cannot be read"),
        ("[" * 200 + "]" * 200, "nested deeper than 64"),
        ("9" * 5000, "at most 40 digits"),
        ('{"a": ' + "1" * 41 + "}", "at most 40 digits"),
    ],
)
def test_depth_and_digits_are_bounded(text: str, why: str) -> None:
    for parse in (parse_json, parse_yaml):
        with pytest.raises(UserError, match=why):
            parse(text, "here")


def test_yaml_cannot_grow_beyond_memory() -> None:
    with pytest.raises(UserError, match="at most 2,000,000 values"):
        parse_yaml(BOMB, "here")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12:30:45", "12:30:45"),
        ("1:30.5", "1:30.5"),
        ("2001-99-99", "2001-99-99"),
        ("2001-01-01", "2001-01-01"),
        ("010", "010"),
        ("10", 10),
        ("-7", -7),
        ("0", 0),
        ("1_000", 1000),
        ("0x10", 16),
        ("0.025", 0.025),
        (".5", 0.5),
        ("1.5e+3", 1500.0),
        ("1e-3", "1e-3"),
        ("true", True),
        ("null", None),
        ("[1, a, {b: 2}]", [1, "a", {"b": 2}]),
    ],
)
def test_yaml_reads_numbers_as_people_write_them(text: str, value: Any) -> None:
    found = parse_yaml(text, "here")
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    ["!!timestamp 2001-99-99", "!!int ''", "!!set {a}", "!!binary aGk=", "!!python/name:os.system", "? [1]\n: 2"],
)
def test_tags_that_give_no_plain_data_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="here"):
        parse_yaml(text, "here")


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(UserError, match="surrogate"):
        parse_json(r'"\ud800"', "here")
    assert parse_json(r'"😀"', "here") == "😀"


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="regular file"):
        read_text(tmp_path / "pipe")
    with pytest.raises(UserError, match="cannot be read"):
        read_text(tmp_path)


def test_large_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 11)
    assert read_text(tmp_path / "large", most_bytes=11) == "x" * 11
    with pytest.raises(UserError, match="is larger"):
        read_text(tmp_path / "large", most_bytes=10)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(files.MAX_BYTES * 100)
    with pytest.raises(UserError, match="at most 64 MiB"):
        read_text(tmp_path / "sparse")


def test_lines_are_named_by_their_number(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"a": 1}\n{"a": 2}\n')
    assert read_json_lines(tmp_path / "lines") == [{"a": 1}, {"a": 2}]
    for bad in ("[]", "{", "\ufffd", ""):
        (tmp_path / "lines").write_text('{"a": 1}\n' + bad + "\n")
        with pytest.raises(UserError, match="line 2"):
            read_json_lines(tmp_path / "lines")


def test_a_missing_field_is_named() -> None:
    found = Fields.of({"recipe": {"space": {"x": 1}}}, "run.json")
    assert found["recipe"]["space"]["x"] == 1 and found.get("none") is None
    with pytest.raises(UserError, match=r"run\.json must have `recipe\.space\.y`"):
        found["recipe"]["space"]["y"]
