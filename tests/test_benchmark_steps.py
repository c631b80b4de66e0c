"""Search steps compared with the plain formulation, which computes the same and shares nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import plain, steps
from benchmarks.steps import Case, batch, compare, step_state
from softcell.arch import WeightMix
from softcell.spaces import Bound
from softcell.spaces.cell import MixedCell
from softcell.spaces.execution import is_modules_only

CPU = torch.device("cpu")
TINY = [
    Case("darts", {"cells": 3, "channels": 4}, (1, 8, 8), 8),
    Case("nb201", {"cells_per_stage": 1, "channels": 4}, (1, 8, 8), 8),
]


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.space)
def test_steps_of_both_formulations_are_compared(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "peak_megabytes", lambda *given, **options: 1.0)
    modules: list[bool] = []
    forward = plain.PlainCell.forward

    def watched(cell: plain.PlainCell, *given: Any) -> list[Tensor]:
        modules.append(is_modules_only())
        return forward(cell, *given)

    monkeypatch.setattr(plain.PlainCell, "forward", watched)
    row = compare(case, CPU, rounds=1)
    assert row["ratio_wall"] == pytest.approx(row["plain"]["wall_ms"] / row["softcell"]["wall_ms"])
    assert modules and all(modules), "on a GPU, what surrounds its cells would be fused"


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.space)
def test_the_plain_formulation_computes_the_same(case: Case) -> None:
    ours, theirs = (step_state(case, CPU, plain=is_plain).supernet.double() for is_plain in (False, True))
    around = {name: value for name, value in ours.state_dict().items() if not name.startswith("cells.")}
    theirs.load_state_dict(around, strict=False)
    for mixed, own in zip(ours.cells, theirs.cells, strict=True):  # type: ignore[arg-type]
        assert isinstance(mixed, MixedCell) and isinstance(own, plain.PlainCell)
        number = 0
        for choice, edge in zip(mixed.table.choices, own.edges, strict=True):
            assert isinstance(edge, nn.ModuleList)
            for k in range(len(choice.candidates)):
                if (module := mixed.edges.module(number)) is not None:
                    edge[k].load_state_dict(module.state_dict())
                number += 1
    mix = WeightMix(ours.layout, {table.name: torch.rand(table.shape).double() for table in ours.layout.tables})
    images = batch(case, CPU)[0].double()
    found, wanted = (Bound(net, mix) for net in (ours, theirs))
    torch.testing.assert_close(found.head(found.features(images)[-1]), wanted.head(wanted.features(images)[-1]))
