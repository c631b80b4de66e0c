"""Regularised evolution in whole searches: it resumes bit for bit and keeps to budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from softcell.arch import Genotype, sample
from softcell.arch.genotype import Cell
from softcell.methods.evolution import EvolutionSettings, RegularisedEvolution
from softcell.search import resolve, search
from softcell.spaces import build_space
from softcell.spaces.costs import count_genotype
from tests.helpers.search_toys import TINY, check_resumed, settings, write_data

NETWORK = TINY["nb201"]
SPACE = build_space("nb201", NETWORK)
OWN = {"population": 2, "tournament": 2, "samples": 5}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.npz")


def recipe(data: Path, **resource: Any) -> Any:
    own = {"method": "evolution", "epochs": 1, "seed": 3, "method_settings": OWN}
    return resolve(settings("nb201", data, **own, resource={"network": NETWORK, **resource}))


def parameters(genotype: Genotype) -> int:
    return count_genotype(SPACE, genotype, (1, 8, 8), 3).parameters


def trained(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "architecture.jsonl").read_text().splitlines()]


def test_a_search_trains_the_proposals_based_on_its_accuracies(data: Path, tmp_path: Path) -> None:
    result = search(recipe(data), tmp_path / "run")
    lines, scores = trained(tmp_path / "run"), [row["val_accuracy"] for row in result.metrics]
    fresh = RegularisedEvolution(SPACE.layout(), EvolutionSettings(**OWN), 3)
    wanted = [fresh.propose(n, scores[:n]).to_dict()["cells"] for n in range(5)]
    assert [line["genotype"] for line in lines] == wanted
    assert result.genotype is not None
    assert result.genotype.to_dict()["cells"] == wanted[scores.index(max(scores))]


@pytest.mark.parametrize(("epoch", "step"), [(1, 1), (3, 1)])
def test_a_stopped_search_resumes_bit_for_bit(data: Path, tmp_path: Path, epoch: int, step: int) -> None:
    check_resumed(recipe(data), tmp_path, epoch, step)


@pytest.mark.exhaustive
def test_every_trained_architecture_meets_the_budget(data: Path, tmp_path: Path) -> None:
    limit = sorted(parameters(sample(SPACE.layout(), seed)) for seed in range(60))[15]
    check_resumed(recipe(data, max_params=limit), tmp_path, 3, 1)
    lines = trained(tmp_path / "whole")
    cells = [Genotype.from_dict({**sample(SPACE.layout(), 0).to_dict(), "cells": line["genotype"]}) for line in lines]
    assert len(cells) == 5 and all(isinstance(g.cells["cell"], Cell) and parameters(g) <= limit for g in cells)
    found = json.loads((tmp_path / "whole" / "run.json").read_text())["results"]
    assert found["budget_met"] is True and found["derived_parameters"] <= limit
