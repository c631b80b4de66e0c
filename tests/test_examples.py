"""The example space, candidate and method: short, conforming, and usable in a search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from softcell.methods import METHODS
from softcell.registry import load_plugin
from softcell.search import resolve, search
from softcell.spaces import build_space
from softcell.testing import (
    CANDIDATE_CHECKS,
    METHOD_CHECKS,
    SPACE_CHECKS,
    RaggedSpace,
    check_candidate,
    check_method,
    check_name,
    check_space,
)

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = tuple(EXAMPLES / f"my_{what}.py" for what in ("candidate", "method", "space"))


@pytest.fixture(autouse=True)
def plugins() -> None:
    for file in FILES:
        load_plugin(file)


def chain() -> Any:
    return build_space("chain", {"layers": 3, "channels": 4})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_example_fits_on_a_page(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize("check", CANDIDATE_CHECKS, ids=check_name)
def test_the_candidate_keeps_the_contracts(check: Callable[[str], None]) -> None:
    check("gated_conv_3x3")


@pytest.mark.parametrize("check", SPACE_CHECKS, ids=check_name)
def test_the_space_keeps_the_contracts(check: Callable[[Any], None]) -> None:
    check(chain())


@pytest.mark.parametrize("space", ["chain", "ragged"])
@pytest.mark.parametrize("check", METHOD_CHECKS, ids=check_name)
def test_the_method_keeps_the_contracts(check: Callable[..., None], space: str) -> None:
    check(METHODS.get("cooling"), chain() if space == "chain" else RaggedSpace())


def test_whole_suites_run_by_one_call() -> None:
    check_candidate("gated_conv_3x3")
    check_space(chain())
    check_method("cooling", chain())
    check_method("random", chain())


def test_all_three_search_together_for_an_epoch(tmp_path: Path) -> None:
    recipe = resolve(
        {
            "method": "cooling",
            "space": "chain",
            "data": "digits",
            "epochs": 1,
            "threads": 1,
            "space_settings": {"layers": 2, "channels": 4, "candidates": ["skip_connect", "gated_conv_3x3"]},
            "plugins": [str(file) for file in FILES],
        }
    )
    result = search(recipe, tmp_path / "run")
    assert result.genotype is not None
    assert result.genotype.space == "chain"
    assert {pick.op for pick in result.genotype.cells["chain"].picks} <= {"skip_connect", "gated_conv_3x3"}
    assert result.metrics[-1]["val_split"] == "validation"
    assert 0.0 < result.metrics[-1]["train_loss"] < 3.0
