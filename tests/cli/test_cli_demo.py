from __future__ import annotations

from pathlib import Path

import pytest
from cli_calls import Softcell

from softcell.evaluate.recipe import RECIPES
from softcell.methods.darts import Darts
from softcell.spaces.darts import DartsSpace


def test_the_demo_goes_from_search_to_a_comparison_with_three_random_cells(
    call: Softcell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"cells": 3, "channels": 2}
    monkeypatch.setattr(DartsSpace, "small", size)
    monkeypatch.setattr(DartsSpace, "evaluation", {"small": size})
    monkeypatch.setattr(Darts, "recipes", {"small": {"epochs": 1, "batch_size": 256}})
    monkeypatch.setitem(RECIPES, "small", {"epochs": 1, "batch_size": 512})
    answer = call("demo", "--threads", "1")
    assert answer.code == 0
    assert "concat(2, 3, 4, 5)" in answer.out  # the cell, drawn
    assert "runs/demo-1/search/genotype.svg" in answer.out
    assert (tmp_path / "runs" / "demo-1" / "search" / "genotype.svg").is_file()
    assert "mean ± std (n=3)" in answer.out
    assert "accuracy on the test split" in answer.out
