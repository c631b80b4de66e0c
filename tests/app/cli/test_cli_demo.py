from __future__ import annotations

from pathlib import Path

import pytest

from softcell.app.cli import run as run_command
from softcell.evaluate.recipe import RECIPES
from softcell.methods.darts import Darts
from softcell.spaces.darts import DartsSpace
from tests.helpers.cli_calls import Softcell


def test_the_demo_goes_from_search_to_a_comparison_with_three_random_cells(
    call: Softcell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"cells": 3, "channels": 2, "nodes": 2}
    monkeypatch.setattr(DartsSpace, "small", size)
    monkeypatch.setattr(DartsSpace, "evaluation", {"small": size})
    monkeypatch.setattr(Darts, "recipes", {"small": {"epochs": 1, "batch_size": 256}})
    monkeypatch.setitem(RECIPES, "small", {"batch_size": 512, "auxiliary": 0.0})
    monkeypatch.setattr(run_command, "EPOCHS", 1)
    answer = call("demo", "--threads", "1")
    assert answer.code == 0
    assert "concat(2, 3)" in answer.out  # the cell, drawn
    assert "runs/demo-1/search/genotype.svg" in answer.out
    assert (tmp_path / "runs" / "demo-1" / "search" / "genotype.svg").is_file()
    assert "mean ± std (n=3)" in answer.out
    assert "accuracy on the test split" in answer.out

    # The same folder is resumed: here both parts are finished already.
    again = call("demo", "--threads", "1", "--out", "runs/demo-1")
    assert again.code == 0
    assert again.out.count("is already finished") >= 2
    assert "mean ± std (n=3)" in again.out


def test_an_interrupted_demo_prints_the_command_that_resumes_it(
    call: Softcell, monkeypatch: pytest.MonkeyPatch
) -> None:
    from softcell.app import jobs

    class Stopped:
        genotype, exit_code = None, 130

    monkeypatch.setattr(jobs, "search", lambda *_, **__: Stopped())
    answer = call("demo", "--seed", "3", "--out", "my demo")
    assert answer.code == 130
    assert "softcell demo --out 'my demo' --seed 3" in answer.out
