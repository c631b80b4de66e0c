"""Plans of recorded steps are one step old, and a resumed run follows those of an unbroken one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.arch import Plan
from softcell.engine.capture import CapturedStep
from softcell.engine.task import Stepped
from softcell.methods.darts import Darts, DartsSettings
from softcell.methods.entrannas import EnTranNas, EnTranNasDst, EnTranNasDstSettings, EnTranNasSettings
from softcell.search import resolve, search
from softcell.search.task import PlanQueue
from softcell.spaces import Space, build_space
from softcell.testing import tiny_space
from tests.helpers.search_toys import remains, settings, state_of, write_data

METHODS = ["entrannas", "entrannas-dst"]


def moved(method: EnTranNas, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for alpha in method.alpha.values():
            alpha.copy_(torch.randn(alpha.shape, generator=generator))


def test_a_plan_uses_the_parameters_before_the_previous_step() -> None:
    method = EnTranNas(tiny_space("darts").layout(), EnTranNasSettings())
    plans, exact, found = PlanQueue(method.planner), list[Plan](), list[Plan | None]()
    for step in range(5):
        moved(method, step)
        exact.append(method.planner.current())
        found.append(plans.next())
    assert len(set(exact)) == 5, "every step derives another architecture"
    assert found == [exact[0], *exact[:-1]]


def test_resumed_plans_match_an_uninterrupted_run() -> None:
    method = EnTranNas(tiny_space("darts").layout(), EnTranNasSettings())
    plans, resumed = PlanQueue(method.planner), PlanQueue(method.planner)
    for step in range(3):
        moved(method, step)
        plans.next()
    resumed.load_state_dict(plans.state_dict())
    moved(method, 3)
    assert resumed.next() == plans.next()


def pruning(space: Space, steps: int) -> Iterator[EnTranNasDst]:
    """A method whose thresholds rise while its logits move: connections are pruned one after the other, some return."""
    torch.manual_seed(0)
    method = EnTranNasDst(space.layout(), EnTranNasDstSettings(init_scale=0.3))
    generator = torch.Generator().manual_seed(3)
    for step in range(steps):
        with torch.no_grad():
            for alpha in method.alpha.values():
                alpha += 0.03 * torch.randn(alpha.shape, generator=generator)
            for beta in method.beta.values():
                beta.fill_(-3.0 + 6.0 * step / steps)
        yield method


def contains(plan: Plan, other: Plan) -> bool:
    return all(
        {*theirs} <= {*own}
        for live, needed in zip(plan, other, strict=True)
        if live is not None and needed is not None
        for own, theirs in zip(live, needed, strict=True)
    )


def test_captured_plans_of_dst_change_seldom_and_run_what_is_needed() -> None:
    space = build_space("darts")
    plans, exact, found = None, list[Plan](), list[Plan]()
    for method in pruning(space, 200):
        plans = PlanQueue(method.planner) if plans is None else plans
        exact.append(method.planner.current())
        found.append(plans.next())
    needed = [exact[0], *exact[:-1]]
    assert all(contains(plan, other) for plan, other in zip(found, needed, strict=True))
    changes = [sum(a != b for a, b in pairwise(each)) for each in (needed, found)]
    assert changes[0] > 100
    assert changes[1] < changes[0] / 4
    assert sum(map(len, found[-1][-1])) < sum(map(len, found[0][-1])) / 3, "what is pruned stops running"


@pytest.mark.parametrize("given", [{}, {"share_features": True, "bottleneck": 2}])
def test_a_widened_plan_computes_what_the_exact_one_does(given: dict[str, Any]) -> None:
    space = build_space("darts", {"cells": 3, "channels": 4, "nodes": 2, **given})
    method = list(pruning(space, 20))[-1].double()
    supernet = space.supernet((3, 8, 8), 3).double()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    everything = tuple(
        None if live is None else tuple(tuple(range(1, len(c.candidates))) for c in space.layout().table(name).choices)
        for name, live in zip(space.layout().sites, method.planner.current(), strict=True)
    )
    assert everything != method.planner.current()
    outcomes = []
    for plan in (None, everything):
        supernet.zero_grad()
        method.zero_grad()
        with method.planner.following(plan):
            y = supernet(x, method.relax())
        y.square().sum().backward()
        parameters = [*supernet.parameters(), *method.parameters()]
        outcomes.append([y, *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters)])
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b)


def test_methods_without_plans_have_none() -> None:
    assert PlanQueue(Darts(tiny_space("darts").layout(), DartsSettings()).planner).next() is None
    everything = EnTranNas(tiny_space("darts").layout(), EnTranNasSettings(engines="all"))
    assert PlanQueue(everything.planner).next() is None


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
        sys.modules["softcell.search.task"],
        "prepare_step",
        lambda step, engine, world, notify, **rest: Recorded(step, notify),
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
