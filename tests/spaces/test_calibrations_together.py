"""Cells run the outgoing calibrations of a node together; a step equals one module by module for every mix."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.arch import Live, WeightMix
from softcell.kernels import mix
from softcell.kernels.mix import small_weighted_sum
from softcell.methods import METHODS
from softcell.nn.calibrate import run_calibrations
from softcell.settings import build
from softcell.spaces import Supernet, _executors, block, build_space
from softcell.spaces.execution import modules_only

SIZE = {"cells": 3, "channels": 4, "nodes": 2}
SPACES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"share_features": True},
    "bottleneck": {"bottleneck": 2},
    "all kernels": {"dynamics": ("dynamic_conv_3x3", "dil_dynamic_conv_3x3", "dynamic_conv_5x5")},
}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("nos", {}, "plain"),
    ("nos", {}, "shared"),
    ("nos", {}, "bottleneck"),
    ("nos", {}, "all kernels"),
    ("snas", {}, "plain"),
    ("entrannas", {}, "plain"),
    ("entrannas-dst", {}, "bottleneck"),
    ("itnas", {}, "plain"),
    ("itnas", {"paths": "single"}, "plain"),
    ("itnas", {"paths": "single"}, "shared"),
]


ALIKE = (CASES[5], CASES[8])
"""EnTranNAS is in its DST variant, single paths are in the shared space."""
SUMS = ("CPU's sums", "GPU's sums")


@pytest.fixture(params=SUMS)
def summed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many terms each weighted sum of calibrations had whose weights were read with all others."""
    found: list[int] = []

    def run(inputs: Sequence[Tensor], weights: Tensor) -> Tensor:
        found.append(len(inputs))
        return small_weighted_sum(inputs, weights)

    monkeypatch.setattr(block, "small_weighted_sum", run)
    monkeypatch.setattr(mix, "copies_cheaply", lambda x: request.param == "GPU's sums")
    return found


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many modules of each node ran together."""
    found: list[int] = []

    def run(*arguments: Any) -> dict[int, Tensor]:
        made = run_calibrations(*arguments)
        found.append(len(made))
        return made

    monkeypatch.setattr(_executors, "run_calibrations", run)
    return found


@functools.cache
def built(settings: tuple[tuple[str, Any], ...], shape: tuple[int, int]) -> tuple[Supernet, dict[str, Tensor]]:
    """A supernet of NOS that tests share, and its state at the start."""
    torch.manual_seed(0)
    supernet = build_space("nos", dict(settings)).supernet((3, *shape), 5).double()
    return supernet, {key: value.clone() for key, value in supernet.state_dict().items()}


def outcome(
    method: str,
    settings: dict[str, Any],
    space: dict[str, Any],
    *,
    training: bool = True,
    dropping: bool = False,
    shape: tuple[int, int] = (8, 8),
) -> list[Tensor | None]:
    """Output, gradients and running statistics of one step."""
    supernet, state = built(tuple({**SIZE, **space}.items()), shape)
    supernet.load_state_dict(state)
    torch.manual_seed(0)
    kind: Any = METHODS.get(method)
    searcher = kind.for_supernet(build(kind.Settings, settings), supernet.float()).double()
    supernet.double().train(training)
    supernet.use_drop_path(0.5 if dropping else 0.0)
    supernet.drop_path.set_fraction(1.0)
    x = torch.randn(4, 3, *shape, dtype=torch.float64)
    torch.manual_seed(1)
    planner = searcher.planner
    with nullcontext() if planner is None else planner.following(planner.draw(0)):
        y = supernet(x, searcher.relax())
    wanted = [*searcher.parameters(), *supernet.parameters()]
    gradients = torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)
    return [y, *gradients, *(buffer.clone() for buffer in supernet.buffers())]


def require_equal(found: list[Tensor | None], expected: list[Tensor | None], tolerance: float = 1e-9) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None), "an unused parameter has no gradient"
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("summed", "method", "settings", "space"),
    [
        *(pytest.param(SUMS[0], *case, marks=[pytest.mark.exhaustive] if case in ALIKE else []) for case in CASES),
        *((SUMS[1], *CASES[i]) for i in (0, 3)),
    ],
    indirect=["summed"],
)
def test_a_step_equals_one_module_by_module(
    method: str, settings: dict[str, Any], space: str, ran: list[int], summed: list[int]
) -> None:
    found = outcome(method, settings, SPACES[space])
    # A single path has one calibration at most.
    assert any(ran) or settings.get("paths") == "single", "several calibrations leave a node"
    assert (max(summed, default=0) > 1) == (method != "itnas"), "plain weights are read at once"
    ran.clear()
    summed.clear()
    with modules_only():
        expected = outcome(method, settings, SPACES[space])
    assert not ran and not summed
    require_equal(found, expected)


@pytest.mark.parametrize(
    "how",
    [{"training": False}, {"dropping": True}, {"shape": (7, 9)}],
    ids=["evaluation", "dropping", "odd"],
)
def test_so_does_one_in_evaluation_with_drop_path_or_at_odd_sizes(how: dict[str, Any], ran: list[int]) -> None:
    found = outcome("nos", {}, {}, **how)
    assert any(ran)
    with modules_only():
        expected = outcome("nos", {}, {}, **how)
    require_equal(found, expected, 1e-6 if "dropping" in how else 1e-9)  # drop-path's factors are float32


def test_calibrations_of_a_node_that_no_feature_reaches_get_no_gradient(ran: list[int]) -> None:
    """Zeros instead of nothing would let weight decay and momentum move them."""
    results = []
    for literal in (False, True):
        torch.manual_seed(0)
        supernet = build_space("nos", {**SIZE, "nodes": 3}).supernet((3, 8, 8), 5).double()
        layout = supernet.layout
        lives: dict[int, Live] = {}
        for site, name in enumerate(layout.sites):
            table = layout.table(name)
            # The second block's surrogate, node 4, gets calibrations alone.
            lives[site] = tuple((7, 8, 9, 10) if c.target == 4 else (0, 7, 8, 9, 10) for c in table.choices)
        weights = {t.name: torch.rand(len(t), t.width, dtype=torch.float64) for t in layout.tables}
        mix = WeightMix(layout, weights, lives)
        if literal:
            with modules_only():
                y = supernet(torch.ones(2, 3, 8, 8, dtype=torch.float64), mix)
        else:
            y = supernet(torch.ones(2, 3, 8, 8, dtype=torch.float64), mix)
            assert max(ran) == 8, "from each input to surrogates 2 and 6 with features"
        results.append([y, *torch.autograd.grad(y.square().sum(), [*supernet.parameters()], allow_unused=True)])
    assert any(g is None for g in results[1])
    require_equal(*results)


class Recomputing(WeightMix):
    """Keeps inputs alone for the backward pass, at every choice."""

    def recomputes(self, site: int, choice: int) -> bool:
        return True


@pytest.mark.parametrize("recomputes", [False, True])
def test_weights_of_some_candidates_are_read_together_and_recomputed_ones_run_separately(
    recomputes: bool, ran: list[int], summed: list[int]
) -> None:
    results = []
    for only_modules in (False, True):
        torch.manual_seed(0)
        supernet = build_space("nos", SIZE).supernet((3, 8, 8), 5).double()
        layout = supernet.layout
        lives = {
            site: tuple(tuple(range(i % 2, 11, 2)) for i in range(len(layout.table(name))))
            for site, name in enumerate(layout.sites)
        }
        weights = {t.name: torch.rand(len(t), t.width, dtype=torch.float64).requires_grad_() for t in layout.tables}
        with modules_only() if only_modules else nullcontext():
            mixed = (Recomputing if recomputes else WeightMix)(layout, weights, lives)
            y = supernet(torch.randn(4, 3, 8, 8, dtype=torch.float64), mixed)
        wanted = [*weights.values(), *supernet.parameters()]
        results.append([y, *torch.autograd.grad(y.square().sum(), wanted, allow_unused=True), *supernet.buffers()])
        if not only_modules:
            assert any(ran) != recomputes
            calibrating = sum(k >= 7 for site in lives.values() for live in site for k in live)
            assert sum(summed) == calibrating, "the weight of every calibration"
    require_equal(*results)


def test_hooks_of_a_calibration_are_called() -> None:
    supernet = build_space("nos", SIZE).supernet((3, 8, 8), 5)
    modules = dict(supernet.named_modules())
    name = next(name for name in modules if name.endswith("dynamic_conv_5x5.score"))
    heard: list[torch.Size] = []
    modules[name].register_forward_hook(lambda module, given, output: heard.append(output.shape))
    weights = {t.name: torch.rand(len(t), t.width) for t in supernet.layout.tables}
    supernet(torch.ones(2, 3, 8, 8), WeightMix(supernet.layout, weights))
    assert [shape[1] for shape in heard] == [25]


def test_second_derivatives_match_the_modules(ran: list[int], summed: list[int]) -> None:
    def second() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        supernet = build_space("nos", {**SIZE, "nodes": 1}).supernet((3, 8, 8), 3).double()
        tables = {
            t.name: torch.rand(len(t), t.width, dtype=torch.float64).requires_grad_() for t in supernet.layout.tables
        }
        y = supernet(torch.randn(4, 3, 8, 8, dtype=torch.float64), WeightMix(supernet.layout, tables))
        weights = [*supernet.parameters()]
        first = torch.autograd.grad(y.square().sum(), weights, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [*tables.values(), *weights])

    found = second()
    assert any(ran) and summed
    with modules_only():
        expected = second()
    largest = max(float(b.norm()) for b in expected)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-9 * b.norm() + 1e-13 * largest
