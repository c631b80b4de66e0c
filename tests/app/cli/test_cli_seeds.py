"""Seeds that no generator accepts are rejected with a message, wherever one is given or derived from another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from softcell import api
from softcell.engine import seed_everything
from softcell.errors import UserError
from softcell.evaluate.nb201 import zero_cost
from softcell.evaluate.recipe import resolve as resolve_training
from softcell.evaluate.teacher import TeacherRecipe
from softcell.search import resolve
from softcell.search.genotypes import read_genotype
from softcell.settings import SEEDS, is_seed
from softcell.spaces import build_space
from tests.helpers.cli_calls import CELL, TINY, Softcell

LAST = SEEDS - 1
RULE = "`0 <= seed < 2**63` must hold, but got seed="


@pytest.mark.parametrize(
    "words",
    [
        ("search", *TINY, "--seed", 2**64),
        ("search", *TINY, "--seed", SEEDS),
        ("search", *TINY, "--seed", -1),
        ("search", *TINY, "--set", f"seed={2**70}"),
        ("search", *TINY, "--seed", LAST, "--seeds", "2"),  # the second one
        ("train", CELL, "--seed", 2**64),
        ("train", CELL, "--seed", -1),
        ("teacher", "--seed", 2**64),
        ("random", "--space", "nb201", "--seed", 2**64),
        ("random", "--space", "nb201", "--seed", LAST, "--count", "2"),
    ],
    ids=lambda words: " ".join(map(str, (words[0], *words[-2:]))),
)
def test_a_seed_out_of_range_is_rejected(words: tuple[Any, ...], call: Softcell, tmp_path: Path) -> None:
    answer = call(*map(str, words))
    assert answer.code == 2
    assert RULE in answer.error and answer.error.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_number_of_seeds_that_looks_like_a_seed_is_rejected(call: Softcell, tmp_path: Path) -> None:
    answer = call("search", *TINY, "--seeds", str(2**64))
    assert answer.code == 2 and "--seeds is the number of seeds" in answer.error
    assert not list(tmp_path.iterdir())


def test_python_calls_raise_too(tmp_path: Path) -> None:
    genotype = read_genotype(CELL)
    for seed in (-1, SEEDS, 2**70):
        for ask in (
            lambda seed=seed: api.search("darts", space="nb201", seed=seed, out=tmp_path / "run"),
            lambda seed=seed: api.train(genotype, seed=seed, out=tmp_path / "run"),
            lambda seed=seed: api.search_seeds("darts", space="nb201", seed=seed, seeds=1, out=tmp_path / "run"),
            lambda seed=seed: TeacherRecipe(seed=seed),
            lambda seed=seed: zero_cost(
                build_space("nb201"), "synflow", torch.zeros(1, 3, 8, 8), torch.zeros(1).long(), 2, seed
            ),
        ):
            with pytest.raises(UserError, match="seed < 2"):
                ask()
    assert not (tmp_path / "run").exists()


def test_every_generator_accepts_the_largest_seed(call: Softcell) -> None:
    is_seed("seed", LAST)
    assert resolve({"seed": LAST}).seed == resolve_training(read_genotype(CELL), {"seed": LAST}).seed == LAST
    state = torch.get_rng_state()
    seed_everything(LAST)
    torch.set_rng_state(state)
    assert call("random", "--space", "nb201", "--to", "nb201", "--seed", str(LAST)).code == 0
    answer = call("search", *TINY, "--epochs", "1", "--seed", str(LAST), "--out", "run", "-q")
    assert answer.code == 0, answer.error
    assert (
        call("train", "run", "--channels", "2", "--epochs", "1", "--seed", str(LAST), "--random", "1", "-q").code == 0
    )
