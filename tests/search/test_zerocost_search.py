"""Zero-cost search in whole runs: the best of all networks, budgets, records, and resuming bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.app.cli.output import search_accuracy
from softcell.arch import Genotype, sample
from softcell.data import load
from softcell.data.batches import Feeds
from softcell.errors import UserError
from softcell.methods.proxies import SUPERNET_PROXIES
from softcell.methods.zerocost import ZeroCost, ZeroCostSettings
from softcell.search import resolve, search
from softcell.search.samplers import score_architecture
from softcell.spaces import build_space
from softcell.spaces.costs import count_genotype
from tests.helpers.search_toys import TINY, check_resumed, settings, write_data

NETWORK = TINY["nb201"]
OWN = {"generations": 3, "population": 4, "parents": 2, "images": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.npz")


def recipe(data: Path, resource: dict[str, Any] | None = None, space: dict[str, Any] | None = None, **own: Any) -> Any:
    given = settings("nb201", data, method="zero-cost", epochs=1, seed=3, method_settings={**OWN, **own})
    given["space_settings"] = {**NETWORK, **(space or {})}
    return resolve({**given, "resource": {"network": NETWORK, **(resource or {})}})


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())["results"]
    return found


@pytest.mark.parametrize("proxy", ["synflow", "naswot", "snip", "flops"])
def test_the_result_is_the_best_of_all_networks_by_brute_force(proxy: Any, data: Path, tmp_path: Path) -> None:
    few = {"candidates": ["skip_connect", "nor_conv_1x1", "nor_conv_3x3"], "nodes": 2 + 1}
    asked = recipe(data, space=few, proxy=proxy, generations=12)
    result = search(asked, tmp_path / "run")
    space, dataset = build_space("nb201", {**NETWORK, **few}), load(str(data), None, None)
    plain = Feeds(dataset, 16, 3, torch.device("cpu"), torch.float32).plain(
        dataset.train, asked.parts(dataset.train)["weights"]
    )
    batch = next(iter(plain.epoch(0)))
    cells = {sample(space.layout(), seed).dumps(): sample(space.layout(), seed) for seed in range(600)}.values()
    every = {tuple(pick.op for pick in g.cells["cell"].picks): g for g in cells}
    assert len(every) == 27
    score = ZeroCost(space.layout(), ZeroCostSettings(proxy), 0).score
    scores = {
        ops: score_architecture(space, g, score, batch.images[:8], batch.labels[:8], 3, 3) for ops, g in every.items()
    }
    assert result.genotype is not None
    found = tuple(pick.op for pick in result.genotype.cells["cell"].picks)
    assert scores[found] == max(scores.values())
    known = results(tmp_path / "run")["untrained"]
    assert known == {"proxy": proxy, "images": 8, "best_score": scores[found], "networks": 27}
    assert results(tmp_path / "run")["val_accuracy"] is None, "nothing was trained"


@pytest.mark.parametrize(("epoch", "step"), [(0, 3), (2, 1)])
def test_a_stopped_search_resumes_bit_for_bit(data: Path, tmp_path: Path, epoch: int, step: int) -> None:
    check_resumed(recipe(data), tmp_path, epoch, step)
    assert results(tmp_path / "whole")["untrained"]["networks"] == 12


def test_the_result_keeps_to_its_budget(data: Path, tmp_path: Path) -> None:
    space = build_space("nb201", NETWORK)

    def parameters(genotype: Genotype) -> int:
        return count_genotype(space, genotype, (1, 8, 8), 3).parameters

    limit = sorted(parameters(sample(space.layout(), seed)) for seed in range(16))[4]
    free = search(recipe(data), tmp_path / "free").genotype
    assert free is not None and parameters(free) > limit
    found = search(recipe(data, {"max_params": limit}, generations=2), tmp_path / "run").genotype
    assert found is not None and parameters(found) <= limit
    assert results(tmp_path / "run")["budget_met"] is True


def test_a_budget_out_of_reach_is_refused_before_there_is_a_folder(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the budget is out of reach: .* smallest"):
        search(recipe(data, {"max_params": 100}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("proxy", SUPERNET_PROXIES)
def test_a_score_depends_only_on_architecture_and_seed(proxy: Any) -> None:
    space = build_space("nb201", NETWORK)
    score_of = ZeroCost(space.layout(), ZeroCostSettings(proxy), 0).score
    first, second = sample(space.layout(), 0), sample(space.layout(), 1)
    batch = torch.randn(4, 1, 8, 8), torch.tensor([0, 4, 1, 2])
    before = torch.random.get_rng_state()
    score = score_architecture(space, first, score_of, *batch, 5, 0)
    assert torch.equal(torch.random.get_rng_state(), before), "the run's own random numbers stay as they were"
    torch.randn(3)
    assert score_architecture(space, second, score_of, *batch, 5, 0) != score
    assert score_architecture(space, first, score_of, *batch, 5, 0) == score
    assert score_architecture(space, first, score_of, *batch, 5, 1) != score


def test_a_score_that_no_network_has_is_an_error(tmp_path: Path) -> None:
    """Layers of full attention end in BatchNorm, so the sum of a batch's logits depends on no image."""
    given = settings("fullattention", "digits", method="zero-cost", space_settings={"layers": 1, "channels": 16})
    sizes = {"generations": 1, "population": 3, "parents": 1, "images": 4}
    given["method_settings"] = {"proxy": "jacob_cov", **sizes}
    with pytest.raises(UserError, match=r"none of . networks has a score \(proxy=jacob_cov\).*method.proxy"):
        search(resolve(given), tmp_path / "run")


@pytest.mark.parametrize(("best", "shown"), [(1234.5678, "1234.6"), (None, "not finite")])
def test_the_best_score_is_shown_after_a_search_even_if_it_is_not_finite(best: float | None, shown: str) -> None:
    rows = [{"epoch": 0, "best_score": best, "networks": 12}]
    assert search_accuracy(rows) == {"score": f"{shown}, the best of 12 untrained networks"}
