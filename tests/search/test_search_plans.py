"""Plans of recorded steps are one step old, and a resumed run follows those of an unbroken one."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.arch import Plan
from softcell.engine.capture import CapturedStep
from softcell.engine.task import Stepped
from softcell.methods.darts import Darts, DartsSettings
from softcell.methods.entrannas import EnTranNas, EnTranNasSettings
from softcell.search import resolve, search
from softcell.search.plans import Plans
from softcell.testing import tiny_space
from tests.helpers.search_toys import remains, settings, state_of, write_data

METHODS = ["entrannas", "entrannas-dst"]


def moved(method: EnTranNas, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for alpha in method.alpha.values():
            alpha.copy_(torch.randn(alpha.shape, generator=generator))


def test_a_plan_comes_from_the_parameters_as_they_were_before_the_step_in_front() -> None:
    method = EnTranNas(tiny_space("darts").layout(), EnTranNasSettings())
    plans, exact, found = Plans(method.planner), list[Plan](), list[Plan | None]()
    for step in range(5):
        moved(method, step)
        exact.append(method.planner.current())
        found.append(plans.next())
    assert len(set(exact)) == 5, "every step derives another architecture"
    assert found == [exact[0], *exact[:-1]]


def test_resumed_plans_are_those_of_an_uninterrupted_run() -> None:
    method = EnTranNas(tiny_space("darts").layout(), EnTranNasSettings())
    plans, resumed = Plans(method.planner), Plans(method.planner)
    for step in range(3):
        moved(method, step)
        plans.next()
    resumed.load_state_dict(plans.state_dict())
    moved(method, 3)
    assert resumed.next() == plans.next()


def test_methods_without_plans_have_none() -> None:
    assert Plans(Darts(tiny_space("darts").layout(), DartsSettings()).planner).next() is None
    everything = EnTranNas(tiny_space("darts").layout(), EnTranNasSettings(engines="all"))
    assert Plans(everything.planner).next() is None


class Recorded(CapturedStep):
    """Takes plans as a recorded step does, and runs every step at once."""

    keys: list[Any]

    def __init__(self, step: Any, notify: Any) -> None:
        super().__init__(step, notify)
        Recorded.keys = []

    def __call__(self, *inputs: torch.Tensor, key: Any = None) -> None:
        Recorded.keys.append(key)
        self._step(*inputs)


@pytest.mark.parametrize("method", METHODS)
def test_a_recorded_search_follows_plans_and_resumes_bit_by_bit(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_data(tmp_path / "data.npz")
    recipe = resolve(settings("darts", data, method=method, epochs=2, child_every=0))
    monkeypatch.setattr(
        sys.modules["softcell.search.task"], "prepare_step", lambda step, engine, world, notify: Recorded(step, notify)
    )
    search(recipe, tmp_path / "whole")
    plans = list(Recorded.keys)
    assert all(plan is not None and plan[0] is None and any(plan) for plan in plans)
    if method == "entrannas":
        assert len(set(plans)) > 1, "the derivation moves"

    def strike(event: Any) -> None:
        if isinstance(event, Stepped) and event.epoch == 1 and event.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    broken = search(recipe, tmp_path / "broken", on_event=strike)
    assert broken.genotype is None, "it was interrupted"
    assert state_of(tmp_path / "broken")["plans"] is not None
    search(recipe, tmp_path / "broken", resume=True)
    assert remains(tmp_path / "broken") == remains(tmp_path / "whole")
