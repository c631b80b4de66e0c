"""The study of penalty weights, rehearsed: stopped and resumed, it ends with the parameters of every search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from softcell.arch import Genotype
from softcell.spaces.base import evaluation_space
from softcell.spaces.costs import count_genotype
from studies import snas_levels

TINY = ["--data", "digits", "--epochs", "1", "--scale", "small", "--seeds", "1", "--weights", "0", "0.005"]
TINY += ["--set", "space.cells=3", "--set", "space.channels=2", "--set", "space.nodes=2", "--set", "batch_size=256"]
TINY += ["--set", "split.weights=0.1", "--set", "split.validation=0.1"]


def test_it_records_the_parameters_of_every_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    snas_levels.main([*TINY, *places, "--minutes", "0"])
    file = tmp_path / "out" / "levels-monte-carlo-digits.json"
    assert [row["epochs_done"] for row in json.loads(file.read_text())["rows"]] == [0, 0]
    snas_levels.main([*TINY, *places])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["weight"], row["finished"]) for row in rows] == [(0, True), (0.005, True)]
    for row in rows:
        found = Genotype.load(tmp_path / "runs" / f"monte-carlo-{row['weight']:g}-digits-0")
        assert row["genotype"]["cells"] == found.to_dict()["cells"]
        if "parameters" in row:
            space = evaluation_space("darts", "digits")
            assert row["parameters"] == count_genotype(space, found, (1, 8, 8), 10).parameters
        else:
            assert 0 in row["reached"].values()
    assert "none: reduce" in capsys.readouterr().out


def test_a_cell_without_reached_output_is_named(tmp_path: Path) -> None:
    edges = [[0, 2, "none"], [1, 2, "none"], [2, 3, "sep_conv_3x3"]]
    empty = {"edges": edges, "output": [2, 3]}
    full = {"edges": [[0, 2, "skip_connect"], [2, 3, "none"]], "output": [2, 3]}
    genotype = Genotype.from_dict(
        {"format": "softcell-genotype", "version": 1, "space": "darts", "cells": {"normal": full, "reduce": empty}}
    )
    assert {name: snas_levels.reached(genotype, name) for name in genotype.cells} == {"normal": 1, "reduce": 0}
