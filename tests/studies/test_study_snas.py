"""The study of children, rehearsed: stopped and resumed, it ends with a complete record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.data import load, split
from studies import snas

TINY = [
    "--data",
    "digits",
    "--epochs",
    "1",
    "--held",
    "100",
    "--scale",
    "small",
    "--seeds",
    "2",
    "--levels",
    "mild",
    "--darts",
    "darts",
]
TINY += ["--set", "space.cells=3", "--set", "space.channels=2", "--set", "space.nodes=2", "--set", "batch_size=256"]


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "children-digits.json").read_text())
    return found


@pytest.mark.exhaustive
def test_it_stops_resumes_and_records_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_arms_of_darts_differ_by_their_regime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Second order learns as first order does, on halves; on one level DARTS has the images and steps of SNAS."""
    jobs: dict[str, Any] = {}

    def keep(found: list[Any], *rest: Any) -> None:
        jobs.update({folder.name.removesuffix("-digits-0"): recipe for recipe, folder in found})

    monkeypatch.setattr(snas, "run_searches", keep)
    asked = [word for word in TINY if word not in ("--darts", "darts")]
    snas.main([*asked, "--seeds", "1", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    regimes = {arm: recipe.regime for arm, recipe in jobs.items()}
    assert regimes == {
        "snas-mild": "single-level",
        "darts": "bilevel",
        "darts-second-order": "unrolled",
        "darts-single-level": "single-level",
    }
    assert jobs["darts-second-order"].split == jobs["darts"].split
    assert jobs["darts-single-level"].split == jobs["snas-mild"].split
    assert {row["arm"] for row in record(tmp_path)["rows"]} == set(jobs)
