"""Genotypes: JSON both ways, and every malformed file refused with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from softcell.arch import Cell, Choice, Genotype, Layout, Pick, StrongestEach, Table, check_against
from softcell.arch.genotype import FORMAT, VERSION, alive
from softcell.errors import UserError

CELL = Cell((Pick(0, 2, "skip"), Pick(1, 2, "conv"), Pick(2, 3, "none")), (2, 3))
GENOTYPE = Genotype("toy", {"cell": CELL}, {"tiers": 1}, {"method": "hand"})

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
edges = st.tuples(st.integers(0, 5), st.integers(0, 5), names).map(lambda e: Pick(min(e[:2]), max(e[:2]), e[2]))
cells = st.builds(
    Cell, st.lists(edges, max_size=6).map(tuple), st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple)
)
plain = st.dictionaries(names, st.one_of(st.integers(), st.booleans(), names, st.lists(st.integers(), max_size=3)))
genotypes = st.builds(Genotype, names, st.dictionaries(names, cells, min_size=1, max_size=3), plain, plain)


@settings(max_examples=150, deadline=None)
@given(genotype=genotypes)
def test_any_genotype_survives_json(genotype: Genotype) -> None:
    again = Genotype.loads(genotype.dumps())
    assert again == genotype
    assert again.about == genotype.about
    assert hash(again) == hash(genotype)
    assert again.dumps() == genotype.dumps()


def test_json_has_one_edge_per_line_and_says_format_and_version() -> None:
    text = GENOTYPE.dumps()
    assert '        [0, 2, "skip"],\n        [1, 2, "conv"],\n        [2, 3, "none"]\n' in text
    assert json.loads(text)["format"] == FORMAT
    assert json.loads(text)["version"] == VERSION == 1


def test_version_1_files_are_read_as_they_were_written() -> None:
    """A literal file: what was written once must be readable for ever."""
    text = """{"format": "softcell-genotype", "version": 1, "space": "toy",
               "cells": {"cell": {"edges": [[0, 2, "skip"], [1, 2, "conv"], [2, 3, "none"]], "output": [2, 3]}},
               "settings": {"tiers": 1}}"""
    assert Genotype.loads(text) == GENOTYPE


def test_the_origin_of_a_genotype_does_not_affect_equality_but_settings_do() -> None:
    assert Genotype("toy", {"cell": CELL}, {"tiers": 1}, {"seed": 3}) == GENOTYPE
    assert Genotype("toy", {"cell": CELL}, {"tiers": 2}) != GENOTYPE


def changed(**changes: Any) -> dict[str, Any]:
    return {**GENOTYPE.to_dict(), **changes}


MALFORMED = {
    "a list": ([], "format"),
    "another format": (changed(format="genotype"), "format"),
    "no version": (changed(version=None), "version"),
    "version 0": (changed(version=0), "version"),
    "a newer version": (changed(version=VERSION + 1), "upgrade"),
    "a version in text": (changed(version="1"), "version"),
    "no space": (changed(space=None), "space"),
    "no cells": (changed(cells={}), "cells"),
    "cells in a list": (changed(cells=[]), "cells"),
    "a cell without edges": (changed(cells={"cell": {"output": [1]}}), "'cell'.*edges"),
    "an edge backwards": (changed(cells={"cell": {"edges": [[2, 1, "a"]], "output": [1]}}), "source <= target"),
    "an edge of two": (changed(cells={"cell": {"edges": [[2, 1]], "output": [1]}}), "an edge must"),
    "a negative node": (changed(cells={"cell": {"edges": [[-1, 1, "a"]], "output": [1]}}), "an edge must"),
    "a node in text": (changed(cells={"cell": {"edges": [["0", 1, "a"]], "output": [1]}}), "an edge must"),
    "a node that is no number": (
        changed(cells={"cell": {"edges": [[False, True, "a"]], "output": [1]}}),
        "an edge must",
    ),
    "an operation that is no text": (changed(cells={"cell": {"edges": [[0, 1, 2]], "output": [1]}}), "an edge must"),
    "no output": (changed(cells={"cell": {"edges": [[0, 1, "a"]], "output": []}}), "output"),
    "an output in text": (changed(cells={"cell": {"edges": [[0, 1, "a"]], "output": "1"}}), "output"),
    "settings in a list": (changed(settings=[1]), "settings"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_genotype_is_refused_with_the_rule_it_breaks(what: str) -> None:
    data, message = MALFORMED[what]
    with pytest.raises(UserError, match=message):
        Genotype.from_dict(data)


def test_files_are_read_from_a_path_or_a_run_folder(tmp_path: Path) -> None:
    GENOTYPE.save(tmp_path / "genotype.json")
    assert Genotype.load(tmp_path / "genotype.json") == GENOTYPE
    assert Genotype.load(tmp_path) == GENOTYPE


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.json"):
        Genotype.load(tmp_path / "absent.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"format": ')
    with pytest.raises(UserError, match=r"broken\.json.*line 1"):
        Genotype.load(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"broken\.json"):
        Genotype.load(broken)


TABLE = Table("cell", (Choice(0, 2, ("skip",)), Choice(1, 2, ("conv", "skip")), Choice(2, 3, ("none", "skip"))), (2, 3))
LAYOUT = Layout("toy", (TABLE,), ("cell",), StrongestEach())


def test_a_genotype_is_checked_against_the_edges_and_candidates_of_a_layout() -> None:
    check_against(GENOTYPE, LAYOUT)
    for wrong, message in (
        (Genotype("other", {"cell": CELL}), "'other'"),
        (Genotype("toy", {"cell": CELL, "more": CELL}), "more"),
        (Genotype("toy", {"cell": Cell((Pick(0, 3, "skip"),), (3,))}), "0->3"),
        (Genotype("toy", {"cell": Cell((Pick(0, 2, "conv"),), (2,))}), "'conv'.*candidates: skip"),
    ):
        with pytest.raises(UserError, match=message):
            check_against(wrong, LAYOUT)


def test_dead_edges_and_nodes_are_left_out_of_a_cell() -> None:
    cell = Cell(
        (Pick(0, 2, "none"), Pick(1, 2, "none"), Pick(1, 3, "conv"), Pick(2, 3, "skip"), Pick(2, 4, "conv")), (2, 3, 4)
    )
    assert alive(cell, 2) == Cell((Pick(1, 3, "conv"),), (3,))


def test_a_cell_without_any_path_keeps_its_output_nodes() -> None:
    cell = Cell((Pick(0, 1, "none"), Pick(1, 2, "conv")), (1, 2))
    assert alive(cell, 1) == Cell((), (1, 2))


@pytest.mark.parametrize("pick", [Pick(3, 3, "conv"), Pick(5, 3, "conv"), Pick(0, 1, "conv")])
def test_edges_that_do_not_lead_forward_are_refused(pick: Pick) -> None:
    with pytest.raises(UserError, match="earlier node"):
        alive(Cell((pick,), (3,)), 2)
