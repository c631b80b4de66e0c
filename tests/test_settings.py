"""Settings: strict input, plain output."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softcell.errors import UserError, nearest
from softcell.settings import SettingError, assignments, build, convert, merge, not_negative, positive, to_dict


@dataclass(frozen=True)
class Inner:
    lr: float = 0.1
    steps: int = 3

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        not_negative("steps", self.steps)


@dataclass(frozen=True)
class Outer:
    name: str = "x"
    fast: bool = False
    size: int | None = None
    kind: Literal["a", "b"] = "a"
    ops: tuple[str, ...] = ("p", "q")
    inner: Inner = field(default_factory=Inner)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Needy:
    given: int
    other: int = 0


def test_nested_values_are_read_and_written() -> None:
    built = build(Outer, {"size": 4, "ops": ["r"], "inner": {"lr": 1, "steps": 0}, "extra": {"k": [1]}})
    assert built == Outer(size=4, ops=("r",), inner=Inner(1.0, 0), extra={"k": [1]})
    assert isinstance(built.inner.lr, float)
    assert build(Outer, to_dict(built)) == built
    assert to_dict(built)["ops"] == ["r"]


@given(
    st.builds(
        Outer,
        name=st.text(),
        fast=st.booleans(),
        size=st.none() | st.integers(1 - 2**63, 2**63 - 1),
        kind=st.sampled_from(["a", "b"]),
        ops=st.lists(st.text()).map(tuple),
        inner=st.builds(Inner, st.floats(min_value=1e-9, allow_infinity=False), st.integers(0, 2**63 - 1)),
    )
)
def test_any_settings_survive_being_written_and_read(settings: Outer) -> None:
    assert build(Outer, to_dict(settings)) == settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nam": "y"}, "did you mean 'name'"),
        ({"inner": {"learning": 1}}, r"inner: no setting 'learning'.*known: lr, steps"),
        ({"name": 3}, "text, got 3"),
        ({"fast": 1}, "true or false, got 1"),
        ({"fast": "yes"}, "true or false"),
        ({"size": 1.5}, "whole number, got 1.5"),
        ({"size": True}, "whole number, got True"),
        ({"size": "4"}, "whole number"),
        ({"kind": "c"}, "one of a, b, got 'c'"),
        ({"ops": "pq"}, "a list, got 'pq'"),
        ({"ops": ["p", 1]}, r"ops\[1\] must be text"),
        ({"inner": 3}, "mapping of settings, got 3"),
        ({"inner": {"lr": "fast"}}, r"inner\.lr must be a number, got 'fast'"),
        ({"inner": {"lr": True}}, "a number, got True"),
        ({"inner": {"lr": 0}}, "`lr > 0` must hold, but got 0"),
        ({"inner": {"lr": "nan"}}, "inner.lr must be a finite number, got 'nan'"),
        ({"inner": {"lr": float("inf")}}, "inner.lr must be a finite number, got inf"),
        ({"inner": {"steps": -1}}, "`steps >= 0` must hold, but got -1"),
        ({"extra": [1]}, "mapping, got"),
        ({"name": None}, "text, got None"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place_and_the_rule(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(Outer, values)


def test_a_setting_without_a_default_must_be_given() -> None:
    assert build(Needy, {"given": 1}) == Needy(1)
    with pytest.raises(UserError, match="given must be given"):
        build(Needy, {"other": 1}, where="plugin")


def test_numbers_that_yaml_reads_as_text_are_numbers() -> None:
    assert build(Inner, {"lr": "1e-3"}).lr == 1e-3
    assert build(Inner, assignments(["lr=1e-3"])).lr == 1e-3


def test_later_layers_win_and_leave_the_others_alone() -> None:
    first = {"a": {"x": 1, "y": 2}, "b": 3}
    assert merge(first, {"a": {"y": 5}, "c": 6}) == {"a": {"x": 1, "y": 5}, "b": 3, "c": 6}
    assert merge(first, {"a": 7}) == {"a": 7, "b": 3}
    assert merge({"a": 7}, first)["a"] == {"x": 1, "y": 2}
    assert first == {"a": {"x": 1, "y": 2}, "b": 3}


def test_assignments_are_nested_by_dots_and_read_as_yaml() -> None:
    given = assignments(["weights.lr=0.1", "weights.clip=5", "space.candidates=[none, skip]", "stop=true", "root=a=b"])
    assert given == {
        "weights": {"lr": 0.1, "clip": 5},
        "space": {"candidates": ["none", "skip"]},
        "stop": True,
        "root": "a=b",
    }
    assert assignments(["a=1", "a=2"]) == {"a": 2}


@pytest.mark.parametrize("item", ["lr", "=3", " =3", "a=[1"])
def test_a_malformed_assignment_is_refused(item: str) -> None:
    with pytest.raises(UserError, match="--set"):
        assignments([item])


def test_a_mistyped_name_is_answered_with_the_nearest_and_all_known() -> None:
    assert nearest("dart", ["darts", "random"]) == "did you mean 'darts'? known: darts, random"
    assert nearest("zzz", ["darts"]) == "known: darts"
    assert nearest("zzz", []) == "known: none"


def test_a_longer_name_with_the_same_words_is_meant_before_a_similar_one() -> None:
    @dataclass(frozen=True)
    class Sizes:
        channels: int = 1
        cells_per_stage: int = 1
        weight_decay: float = 0.0
        lr_decay: float = 0.0

    for key, hint in (
        ("cells", "did you mean 'cells_per_stage'? known: cells_per_stage, channels"),
        ("per_stage", "did you mean 'cells_per_stage'?"),
        ("decay", "did you mean 'lr_decay' or 'weight_decay'?"),
        ("channel", "did you mean 'channels'?"),  # similar, not a word of another name
        ("stag", "no setting 'stag'; known:"),
    ):
        with pytest.raises(UserError, match=re.escape(hint)):
            build(Sizes, {key: 1})


def test_a_name_that_is_not_text_has_a_hint_too() -> None:
    assert nearest(5, ["five", "six"]) == "known: five, six"


def test_an_error_carries_the_rule_and_the_value_and_names_every_accepted_kind() -> None:
    with pytest.raises(SettingError, match=r"^x must be a whole number, or x\[1\] must be text, got \[.*\]$") as caught:
        convert(int | tuple[str, ...] | None, ["a", 2], "x")
    assert (caught.value.where, caught.value.got) == ("x", "['a', 2]")
    with pytest.raises(SettingError, match=r"^x must be true or false, or a number, got 'y'$"):
        convert(bool | float, "y", "x")
