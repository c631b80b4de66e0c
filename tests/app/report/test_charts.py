"""Charts: every value is drawn at its position."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from softcell.app.report import curves_svg, heat_svg
from softcell.app.report.charts import (
    LOOKS,
    Cloud,
    Series,
    _labelled,
    _short,
    front_svg,
    line_chart,
    scatter,
    ticks,
)
from softcell.app.report.theme import big
from softcell.errors import UserError

SVG = "{http://www.w3.org/2000/svg}"
numbers = st.none() | st.floats() | st.integers(-(10**6), 10**6)


def lines(svg: str) -> list[list[tuple[float, float]]]:
    found = [e.attrib["d"] for e in ET.fromstring(svg).iter(f"{SVG}path") if "sc-edge" in e.get("class", "")]
    return [[(float(x), float(y)) for x, y in re.findall(r"([-\d.]+) ([-\d.]+)", d)] for d in found]


def texts(svg: str) -> list[str]:
    return ["".join(e.itertext()) for e in ET.fromstring(svg).iter(f"{SVG}text")]


def test_no_two_series_look_alike() -> None:
    names = [f"series {i}" for i in range(12)]
    svg = curves_svg([{"epoch": e, **{n: e + 0.1 * i for i, n in enumerate(names)}} for e in range(3)], names, "many")
    assert len(lines(svg)) == 12
    looks = re.findall(r'class="sc-edge (sc-l-\w+(?: sc-thin)?)"', svg)
    assert len(set(looks)) == 12  # the second six repeat the looks of the first with thinner lines
    marks = {name: len(re.findall(rf'class="sc-[fo]-{name}"', svg)) for name in LOOKS}
    assert set(marks.values()) == {1 + 2 + 3 + 3}  # one and two beside the names, and one at each of three points


def test_points_are_linear_in_epoch_and_value() -> None:
    history = [{"epoch": 2 * i, "accuracy": 10.0 * i} for i in range(11)]
    (line,) = lines(curves_svg(history, ["accuracy"], "accuracy"))
    assert len(line) == 11
    for i, (x, y) in enumerate(line):
        assert x == pytest.approx(line[0][0] + i * 48, abs=0.1)
        assert y == pytest.approx(line[0][1] - i * 24, abs=0.1)


def test_unmeasured_epochs_are_joined_and_values_that_are_no_numbers_leave_a_gap() -> None:
    joined: list[dict[str, object]] = [{"a": 1.0}, {}, {"a": None}, {"a": 2.0}]
    assert [len(line) for line in lines(curves_svg(joined, ["a"], "t"))] == [2]
    broken = [{"a": 1.0}, {"a": 2.0}, {"a": math.nan}, {"a": 2.0}, {"a": 1.0}]
    assert [len(line) for line in lines(curves_svg(broken, ["a"], "t"))] == [2, 2]


@pytest.mark.parametrize("level", [0.0, 0.5, 0.9999])
def test_series_are_named_with_their_last_value_and_names_do_not_overlap(level: float) -> None:
    history = [{"a": 0.0, "b": 1.0}, *[{"a": level, "b": level + 0.0001, "<c>": level}] * 3]
    svg = curves_svg(history, ["a", "b", "<c>"], "close")
    names = [e for e in ET.fromstring(svg).iter(f"{SVG}text") if e.get("class") == "sc-op"]
    assert sorted("".join(e.itertext()) for e in names) == [f"<c> {level:g}", f"a {level:g}", f"b {level + 0.0001:g}"]
    places = sorted(float(e.attrib["y"]) - 4 for e in names)
    assert all(b - a >= 17.9 for a, b in pairwise(places))
    (grid,) = {float(e.attrib["y"]) - 4 for e in ET.fromstring(svg).iter(f"{SVG}text") if e.text == "1.0"}
    assert grid <= places[0] <= places[-1] <= grid + 240


@pytest.mark.parametrize("history", [[], [{}], [{"a": 1.0}], [{"a": 1.0}] * 5, [{"a": math.inf}] * 3])
def test_little_data_still_makes_a_chart(history: list[dict[str, float]]) -> None:
    svg = curves_svg(history, ["a"], "t")
    assert ("no data" in texts(svg)) == (not any(math.isfinite(entry.get("a", math.nan)) for entry in history))


@settings(max_examples=60, deadline=None)
@example([{"epoch": None, "a": 0.0}, {"epoch": 2.4e-54, "a": 0.0}], "")
@given(st.lists(st.dictionaries(st.sampled_from(["epoch", "a", "b"]), numbers), max_size=12), st.text(max_size=90))
def test_any_history_makes_valid_xml_within_the_page(history: list[dict[str, object]], title: str) -> None:
    svg = curves_svg(history, ["a", "b"], title)
    root = ET.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert all(0 <= x <= width and 0 <= y <= height for line in lines(svg) for x, y in line)
    assert "nan" not in svg
    assert svg == curves_svg(history, ["a", "b"], title)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_enclose_their_range_and_are_few(low: float, spread: float) -> None:
    found = [value for value, _ in ticks(low, low + spread)]
    assert found[0] <= low + 1e-6 * spread + 1e-12 * abs(low)
    assert found[-1] >= low + spread - 1e-6 * spread - 1e-12 * abs(low)
    assert 2 <= len(found) <= 20
    assert found == sorted(set(found))


def test_ticks_are_round() -> None:
    assert [label for _, label in ticks(38, 90)] == ["30", "40", "50", "60", "70", "80", "90"]
    assert [label for _, label in ticks(0, 1)] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]


def test_labels_of_ticks_differ_however_close_they_are() -> None:
    labels = [label for _, label in ticks(1.60938, 1.60941, wanted=4)]
    assert labels == ["1.60938", "1.60939", "1.6094", "1.60941"]
    near = _labelled(ticks(123_400, 123_900, whole=True, wanted=4), shares=False)
    assert [label for _, label in near] == ["123.4k", "123.6k", "123.8k", "124k"]
    assert [label for _, label in ticks(1e7, 1.001e7, wanted=2)] == ["1e+07", "1.0005e+07", "1.001e+07"]


@given(st.integers(-(10**12), 10**12) | st.floats(-1e9, 1e9), st.integers(1, 10**9) | st.floats(1e-6, 1e9))
@example(12_000, 10)
@example(1e7, 1e4)
@example(9_900_000, 150_000)  # 10.05M would be 10.1M
def test_every_label_shows_its_tick(low: float, spread: float) -> None:
    rows = ticks(low, low + spread, whole=isinstance(low, int), wanted=4)
    step = rows[1][0] - rows[0][0]
    for labelled in (rows, _labelled(rows, shares=False), _short(rows, least=1e3)):
        assert [value for value, _ in labelled] == [value for value, _ in rows]
        for value, label in labelled:
            size = {"k": 1e3, "M": 1e6, "G": 1e9}.get(label[-1], 1.0)
            assert float(label.rstrip("kMG")) * size == pytest.approx(value, rel=1e-15, abs=step / 50)


def test_costs_that_are_close_have_labels_that_differ() -> None:
    near = [Cloud("darts", [(123_400.0, 0.9), (123_900.0, 0.8)], None, ["a", "b"])]
    front = front_svg([(123_400.0, 0.9, "a"), (123_900.0, 0.95, "b")], "t", "parameters", "accuracy")
    for drawing in (str(scatter("t", "parameters", near)), front):
        assert ">123.4k</text>" in drawing and ">123k</text>" not in drawing


def test_rounding_to_the_next_unit_changes_the_unit() -> None:
    assert [big(v) for v in (999.4, 9_994, 999_400, 999_600, -999_999_999)] == ["999.4", "9.99k", "999k", "1M", "-1G"]


def test_counts_have_whole_ticks_and_large_values_are_short() -> None:
    changed = str(line_chart("edges", [Series("cell", [(1.0, 3.0), (2.0, 1.0)])]))
    assert "1.5" not in changed and ">2</text>" in changed
    shares = str(line_chart("accuracy", [Series("test", [(1.0, 0.969), (2.0, 0.989)])], shares=True))
    assert ">97.0 %</text>" in shares and ">97.5 %</text>" in shares
    costs = str(line_chart("parameters", [Series("expected", [(1.0, 18000.5), (2.0, 14500.5)])]))
    assert "14.5k" in costs and "e+04" not in costs


def test_a_chart_without_keys_is_refused() -> None:
    with pytest.raises(UserError, match="at least one key"):
        curves_svg([], [], "t")


def test_heat_map_prints_every_weight_and_leaves_padding_blank() -> None:
    svg = heat_svg([[0.25, 0.75], [1.0, None], [0.5]], ["0->2", "1->2", "<row>"], ["skip", "conv"], "weights")
    root = ET.fromstring(svg)
    found = [
        (re.sub(r"\D", "", r.get("class", "")), t.text)
        for r, t in zip(list(root)[:-1], list(root)[1:], strict=True)
        if r.tag == f"{SVG}rect" and t.tag == f"{SVG}text" and "sc-t" in t.get("class", "").split("-num ")[-1]
    ]
    assert [entry for entry in found if entry[1] in {"0.25", "0.75", "1.00", "0.50"}] == [
        ("2", "0.25"),
        ("7", "0.75"),
        ("9", "1.00"),
        ("5", "0.50"),
    ]
    assert {"skip", "conv", "0->2", "1->2", "<row>"} <= set(texts(svg))
    assert (
        root.findtext(f"{SVG}desc") == "0->2: strongest conv 0.75. 1->2: strongest skip 1. <row>: strongest skip 0.5."
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.none() | st.floats(), max_size=4), max_size=5), st.text(max_size=50))
def test_any_weights_make_valid_xml(weights: list[list[float | None]], name: str) -> None:
    svg = heat_svg(weights, [name] * len(weights), [name] * 4, name)
    ET.fromstring(svg)
    assert svg == heat_svg(weights, [name] * len(weights), [name] * 4, name)


def test_heat_map_needs_a_name_per_row_and_column() -> None:
    with pytest.raises(UserError, match="one name per row"):
        heat_svg([[1.0]], [], ["a"], "t")
    with pytest.raises(UserError, match="one name per column"):
        heat_svg([[1.0, 2.0]], ["r"], ["a"], "t")
