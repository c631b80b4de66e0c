"""The study of children, rehearsed: stopped and gone on with, it ends with a complete record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.data import load, split
from studies import snas

TINY = ["--data", "digits", "--epochs", "1", "--held", "100", "--scale", "small", "--seeds", "2", "--levels", "mild"]
TINY += ["--set", "space.cells=3", "--set", "space.channels=2", "--set", "space.nodes=2", "--set", "batch_size=256"]


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "children-digits.json").read_text())
    return found


def test_it_stops_goes_on_and_records_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    snas.main([*TINY, *places, "--minutes", "0"])
    assert {row["result"] for row in record(tmp_path)["rows"]} == {"not measured"}
    assert "0/2" in capsys.readouterr().out
    snas.main([*TINY, *places])
    rows, images = record(tmp_path)["rows"], load("digits").train
    assert [(row["arm"], row["seed"]) for row in rows] == [(a, s) for s in (0, 1) for a in ("snas-mild", "darts")]
    for seed in (0, 1):
        own, other = (r["result"] for r in rows if r["seed"] == seed)
        assert own["recipe"]["split"] == {"held": 100, "weights": 1247}
        assert other["recipe"]["split"] == {"held": 100, "weights": 623, "validation": 624}
        assert own["split"] == other["split"] == "held"
        left_out = [split(images, r["recipe"]["split"], r["recipe"]["seed"])["held"] for r in (own, other)]
        assert torch.equal(*left_out), "both are measured on the same images"
        assert own["loss_of_child"] == own["search_accuracy"] - own["child_accuracy"]
    assert record(tmp_path)["summary"]["darts"]["child_accuracy"]["n"] == 2
    for name in ("accuracy.svg", "entropy.svg", "darts-1.svg"):
        assert (tmp_path / "out" / name).exists()
