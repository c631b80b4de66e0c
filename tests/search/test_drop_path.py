"""Drop-path of a search: switched by the recipe, growing over the epochs, for every method."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from softcell.errors import UserError
from softcell.methods import METHODS, Method
from softcell.search import resolve, search
from tests.helpers.method_kinds import one_of_each_kind
from tests.helpers.search_toys import THREE_EDGES, settings, write_data

DIFFERENTIABLE = [name for name in METHODS if issubclass(METHODS.get(name), Method)]


@pytest.mark.parametrize(
    ("method", "regime"),
    [
        ("darts", "bilevel"),  # the rate is set between epochs, whatever makes the steps
        *(pytest.param(name, "bilevel", marks=pytest.mark.exhaustive) for name in DIFFERENTIABLE if name != "darts"),
        *(pytest.param(*one.values, "single-level", marks=one.marks) for one in one_of_each_kind(DIFFERENTIABLE)),
    ],
)
def test_paths_are_dropped_more_and_more_often(
    method: str, regime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["softcell.search.task"]
    step = getattr(module, regime.replace("-", "_"))
    rates: list[float] = []

    def watch(step_state: Any, *batches: Any) -> Any:
        assert all(cell.drops() for cell in step_state.supernet.cells)
        rates.append(round(float(step_state.supernet.drop_path.current), 6))
        return step(step_state, *batches)

    monkeypatch.setattr(module, regime.replace("-", "_"), watch)
    given = {"method": method, "regime": regime, "drop_path": 0.3, "space_settings": THREE_EDGES}
    data = write_data(tmp_path / "data.npz", train=32)
    result = search(resolve(settings("nb201", data, **given)), tmp_path / "run")
    assert result.genotype is not None
    assert list(dict.fromkeys(rates)) == [0.0, 0.1, 0.2]


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_outside_0_to_1_is_refused(rate: float) -> None:
    with pytest.raises(UserError, match="0 <= drop_path < 1"):
        resolve({"drop_path": rate})
