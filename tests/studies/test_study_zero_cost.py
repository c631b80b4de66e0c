"""Scores of untrained networks against the table of NAS-Bench-201."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from softcell.arch import sample
from softcell.data import load
from softcell.data.batches import first_batch
from softcell.evaluate.nb201 import OPERATIONS, Nb201Table, kendall, load_table
from softcell.methods.proxies import Proxy
from softcell.spaces import build_space
from softcell.spaces.costs import count_genotype
from studies.zero_cost import Correlation, main, scored, spearman, with_error

FILE = "nb201_200epochs.csv.gz"


@pytest.fixture(scope="module")
def table() -> Nb201Table:
    given = os.environ.get("SOFTCELL_NB201")
    place = Path(given) if given else Path(__file__).parents[2].parent / "shared" / "data" / "nb201"
    file = place / FILE if place.is_dir() else place
    if not file.is_file():
        pytest.skip(f"no table of NAS-Bench-201: set SOFTCELL_NB201 to {FILE} or its folder")
    return load_table(file)


@pytest.mark.parametrize("proxy", ["synflow", "naswot"])
def test_scores_rank_random_cells_as_trained_accuracy_does(proxy: Proxy, table: Nb201Table) -> None:
    """On small networks and digits; the literature has Spearman 0.7 to 0.8 at full size. By chance 0 ± 0.1."""
    dataset = load("digits", None, None)
    space = build_space("nb201", {"candidates": OPERATIONS, "cells_per_stage": 1, "channels": 8})
    found = scored(table, space, proxy, first_batch(dataset, 16), 10, 120, "cifar10_test")
    assert kendall(*found) > 0.3 and spearman(*found) > 0.4


def test_the_error_of_a_correlation_is_that_of_independent_samples() -> None:
    """Spearman's rho of n independent pairs has the variance 1 / (n - 1)."""
    rng = random.Random(1)
    x, y = ([rng.random() for _ in range(200)] for _ in range(2))
    found = with_error(spearman, x, y)
    assert found.value == spearman(x, y) and found.error == pytest.approx(199**-0.5, rel=0.15)
    assert with_error(spearman, x, x) == pytest.approx((1.0, 0.0))
    assert str(Correlation(0.5, 0.0449)) == "0.500 ± 0.045"


def test_the_study_prints_a_row_per_proxy(table: Nb201Table, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--table", table.source, "--data", "digits", "--cells", "12", "--images", "4"]
    main([*given, "--proxies", "params", "flops"])
    first, second = capsys.readouterr().out.splitlines()
    space = build_space("nb201", {"candidates": OPERATIONS})
    cells = [sample(space.layout(), seed) for seed in range(12)]
    costs = [count_genotype(space, cell, (1, 8, 8), 10) for cell in cells]
    accuracies = [table.lookup(cell)["cifar10_test"] for cell in cells]
    assert first.startswith(f"params: Kendall {kendall([cost.parameters for cost in costs], accuracies):.3f} ± ")
    assert second.startswith(f"flops: Kendall {kendall([cost.multiply_adds for cost in costs], accuracies):.3f} ± ")
    with pytest.raises(SystemExit):
        main([*given, "--proxies", "magic"])
    assert "invalid choice: 'magic'" in capsys.readouterr().err
