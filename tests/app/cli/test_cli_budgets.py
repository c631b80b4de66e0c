"""Budgets of random searches and of random architectures for comparison, from the user's point of view."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from softcell.api import train
from softcell.app import baseline
from softcell.app.baseline import APART, STRIDE, draw_random
from softcell.app.cli.main import run
from softcell.arch import Genotype, sample
from softcell.errors import UserError
from softcell.evaluate.recipe import resolve
from softcell.spaces import build_space
from softcell.spaces.base import evaluation_space
from softcell.spaces.costs import count_genotype
from tests.helpers.cli_calls import CELL, TINY, TINY_TRAIN, Softcell
from tests.helpers.unsealed import unsealed

COUNTED = evaluation_space("nb201", "digits")
"""Larger than what is trained here: a budget is about the size it was stated for."""


DRAWS = [sample(COUNTED.layout(), number) for number in range(1, 20)]
LATER = [sample(COUNTED.layout(), APART + number) for number in range(1, 20)]
"""Compared with the findings of random search."""
LIMIT = 85_000


@functools.cache
def parameters(genotype: Genotype) -> int:
    return count_genotype(COUNTED, genotype, (1, 8, 8), 10).parameters


def allowed(draws: list[Genotype]) -> list[Genotype]:
    # Not at import: counting takes seconds, and every test process imports this file.
    return [genotype for genotype in draws if parameters(genotype) <= LIMIT]


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished search with a budget; not to be changed."""
    folder = tmp_path_factory.mktemp("bounded") / "run"
    words = ["search", "random", *TINY, "--epochs", "1", "--set", "method.samples=2", "--max-params", str(LIMIT)]
    assert run([*words, "--out", str(folder), "--quiet"]) == 0
    return folder


def trained(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "run.json").read_text())["results"]
    return results


def test_a_random_search_says_that_it_met_its_budget(call: Softcell) -> None:
    answer = call(
        "search", "random", *TINY, "--epochs", "1", "--set", "method.samples=1", "--max-params", "85k", "--out", "run"
    )
    assert answer.code == 0
    assert "\nbudget        " in answer.out and "parameters, within the budget of 85k parameters\n" in answer.out
    assert trained(Path("run"))["budget_met"] is True
    assert "ignores" not in answer.out + answer.error


@pytest.mark.parametrize(
    ("option", "expected"), [(("--max-params", "100"), "out of reach"), (("--resource", "mild"), "has none")]
)
def test_options_that_random_search_lacks_are_rejected(option: tuple[str, str], expected: str, call: Softcell) -> None:
    answer = call("search", "random", *TINY, "--epochs", "1", *option, "--out", "run")
    assert answer.code == 2 and expected in answer.error
    assert not Path("run").exists()


def test_info_shows_the_budget_of_a_search_in_words(call: Softcell, bounded: Path) -> None:
    out = call("info", bounded).out
    cost, sizes = parameters(Genotype.load(bounded)), "cells_per_stage 1, channels 16, nodes 4, input 1x8x8, 10 classes"
    line = next(line for line in out.splitlines() if line.startswith("budget "))
    assert (
        line.split(maxsplit=1)[1]
        == f"{cost / 1e3:.3g}k parameters, within the budget of 85k parameters; counted for {sizes}"
    )
    assert "{" not in out and f"{cost:,}" in out


def test_random_architectures_for_comparison_meet_the_budget_of_the_search(call: Softcell, bounded: Path) -> None:
    assert LATER[: len(allowed(LATER))] != allowed(LATER)
    answer = call("train", bounded, *TINY_TRAIN, "--random", "2", "--out", "out")
    assert answer.code == 0
    assert "sampled within the budget of the search: at most 85k parameters, counted as in the search" in answer.out
    assert "channels 16" in answer.out and "misses" not in answer.out
    for number in (1, 2):
        found = Genotype.load(f"out/random-{number}")
        assert found == allowed(LATER)[number - 1]
        assert found.about["budget"]["max_params"] == LIMIT and "found" not in found.about["budget"]
    again = call("train", "--resume", "out", "--random", "3")  # whose search is not named any more
    assert again.code == 0 and "sampled within the budget" in again.out
    assert Genotype.load("out/random-3") == allowed(LATER)[2]


def test_random_architectures_without_a_budget_are_unchanged(call: Softcell) -> None:
    answer = call("train", CELL, *TINY_TRAIN, "--random", "2", "--seed", "2", "--out", "out")
    assert answer.code == 0 and "budget" not in answer.out
    layout = build_space("nb201", {"channels": 2}).layout()
    for number in (1, 2):
        found = Genotype.load(f"out/random-{number}")
        assert found == sample(layout, 2 * STRIDE + number)
        assert found.about == {"method": "random", "seed": 2 * STRIDE + number}


def test_an_epoch_and_a_run_of_an_earlier_version_have_the_budget_of_their_recipe(
    call: Softcell, bounded: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for name in ("run.json", "genotype.json"):
        (old / name).write_bytes((bounded / name).read_bytes())
    manifest, genotype = json.loads((old / "run.json").read_text()), json.loads((old / "genotype.json").read_text())
    manifest["results"].pop("data", None)
    del genotype["about"]["budget"]
    (old / "run.json").write_text(json.dumps(unsealed(manifest)))
    (old / "genotype.json").write_text(json.dumps(genotype))
    for source in (f"{bounded}@1", old):
        answer = call("train", source, *TINY_TRAIN, "--random", "1", "--out", "out", "--overwrite")
        assert answer.code == 0 and "sampled within the budget" in answer.out
        assert Genotype.load("out/random-1") == allowed(LATER)[0]
        assert Genotype.load("out").about["budget"]["found"] == {"parameters": parameters(Genotype.load("out"))}


def test_random_architectures_may_be_added_to_a_training_run_of_an_epoch(call: Softcell, bounded: Path) -> None:
    assert LATER[0] != allowed(LATER)[0]
    assert call("train", f"{bounded}@1", *TINY_TRAIN, "--out", "later").code == 0
    again = call("train", "--resume", "later", "--random", "1")
    assert again.code == 0 and "sampled within the budget" in again.out
    assert Genotype.load("later/random-1") == allowed(LATER)[0]


def test_an_epoch_whose_budget_cannot_be_counted_any_more_can_be_trained_alone(
    call: Softcell, bounded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(*given: object) -> dict[str, object]:
        raise UserError("the latency table is gone")

    monkeypatch.setattr(baseline, "state_budget_for", count)
    assert call("train", f"{bounded}@1", *TINY_TRAIN, "--out", "alone").code == 0
    rejected = call("train", f"{bounded}@1", *TINY_TRAIN, "--random", "1", "--out", "compared")
    assert rejected.code == 2 and "the latency table is gone" in rejected.error


def test_a_network_that_misses_the_budget_of_its_search_is_noted(call: Softcell, tmp_path: Path) -> None:
    about = {"max_params": 1000, "input": [1, 8, 8], "classes": 10, "network": {"cells_per_stage": 1, "channels": 16}}
    found = {"budget": {**about, "found": {"parameters": parameters(DRAWS[0])}}}
    Genotype("nb201", DRAWS[0].cells, DRAWS[0].settings, found).save("found.json")
    plain = call("train", "found.json", *TINY_TRAIN, "--out", "plain")
    assert plain.code == 0
    assert "note: this network misses the budget of its search: it has " in plain.out
    assert "over the budget of 1k parameters, as counted there\n" in plain.out
    rejected = call("train", "found.json", *TINY_TRAIN, "--random", "1", "--out", "beside")
    assert rejected.code == 2
    assert "out of reach of random architectures" in rejected.error and "leave out --random" in rejected.error
    assert not Path("beside").exists(), "before the first training, not after it"


@pytest.mark.parametrize("method", ["darts", "snas"])
def test_a_budget_that_no_architecture_meets_is_rejected_at_once(method: str, call: Softcell) -> None:
    answer = call("search", method, *TINY, "--epochs", "1", "--out", "run", "--max-params", "1k")
    assert answer.code == 2
    assert "no architecture meets a budget of 1k parameters: the smallest network has" in answer.error
    assert "resource.network.channels=N" in answer.error
    assert not Path("run").exists()


def test_a_budget_is_counted_for_images_of_another_size(call: Softcell) -> None:
    counts = {}
    for name, more in (("own", ()), ("larger", ("--at-size", "16"))):
        answer = call("search", "darts", *TINY, "--epochs", "1", "--out", name, "--max-flops", "9G", *more)
        assert answer.code == 0
        found, results = Genotype.load(name), trained(Path(name))
        side = 16 if more else 8
        assert results["derived_flops"] == count_genotype(COUNTED, found, (1, side, side), 10).multiply_adds
        assert found.about["budget"]["input"] == [1, side, side]
        counts[name] = results["derived_flops"]
    assert counts["larger"] > 3 * counts["own"]
    assert call("train", "larger", *TINY_TRAIN, "--out", "trained").code == 0
    rejected = call("search", "darts", *TINY, "--at-size", "16")
    assert rejected.code == 2
    assert "pass a budget too (--max-params, --max-flops)" in rejected.error


def test_an_empty_cell_is_reported_and_trained_only_on_request(call: Softcell) -> None:
    """A penalty that leaves nothing but `none`."""
    strong = ("--set", "resource.weight=1000", "--set", "architecture.lr=5", "--epochs", "2")
    answer = call("search", "snas", *TINY, *strong, "--out", "run")
    assert answer.code == 0
    assert "cell 'cell' is empty: all paths from its inputs to its output are `none`" in answer.out + answer.error
    assert trained(Path("run"))["empty_cells"] == ["cell"]
    rejected = call("train", "run", *TINY_TRAIN, "--out", "trained")
    assert rejected.code == 2
    assert "must lead from an input to its output" in rejected.error
    assert "--set allow_empty=true" in rejected.error
    assert call("train", "run", *TINY_TRAIN, "--out", "trained", "--seeds", "2").code == 2
    assert not Path("trained").exists()
    with pytest.raises(UserError, match="allow_empty"):
        train("run", out="trained", epochs=1)
    assert call("train", "run", *TINY_TRAIN, "--out", "trained", "--set", "allow_empty=true").code == 0


def test_random_architectures_meet_a_budget_that_the_found_one_missed(call: Softcell, tmp_path: Path) -> None:
    about = {"max_params": LIMIT, "input": [1, 8, 8], "classes": 10, "network": {"cells_per_stage": 1, "channels": 16}}
    large = max(DRAWS, key=parameters)
    found = {"budget": {**about, "found": {"parameters": parameters(large)}}}
    Genotype("nb201", large.cells, large.settings, found).save("large.json")
    answer = call("train", "large.json", *TINY_TRAIN, "--random", "1", "--out", "out")
    assert answer.code == 0
    assert "note: this network misses the budget" in answer.out and "the random architectures meet it" in answer.out
    assert Genotype.load("out/random-1") == allowed(DRAWS)[0]


def test_a_baseline_needs_random_architectures() -> None:
    with pytest.raises(UserError, match="count=0"):
        draw_random(DRAWS[0], resolve(DRAWS[0], {}), 0)


def test_random_search_is_not_compared_with_its_own_samples(call: Softcell) -> None:
    few = ("--set", "method.samples=6", "--epochs", "1", "--out", "drawn", "-q")
    assert call("search", "random", *TINY, *few).code == 0
    rows = [json.loads(line)["genotype"] for line in Path("drawn/architecture.jsonl").read_text().splitlines()]
    assert call("train", "drawn", *TINY_TRAIN, "--random", "4", "--out", "out", "-q").code == 0
    beside = [Genotype.load(f"out/random-{k}").to_dict()["cells"] for k in (1, 2, 3, 4)]
    assert len(rows) == 6 and all(one not in rows for one in beside)
