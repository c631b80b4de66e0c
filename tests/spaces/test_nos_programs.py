"""NOS cells that run as on a GPU, by programs of each node, compute what their modules compute."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.arch import Live, WeightMix
from softcell.nn import calibrate
from softcell.nn.stack import vectors
from softcell.spaces import Supernet, _executors, build_space, execution
from softcell.spaces._calibration_sums import CalibrationSums
from softcell.spaces.block import Block
from softcell.spaces.execution import is_modules_only, modules_only

SIZE = {"cells": 3, "channels": 4, "nodes": 2}
WITHOUT_SKIP = {"features": ("sep_conv_3x3", "avg_pool_3x3")}


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Cells on the CPU take the GPU code path; how many sums each node that calibrates added to."""
    found: list[int] = []

    def noted(sums: CalibrationSums, node: int, value: Any) -> bool:
        done = plainly(sums, node, value)
        found.append(len(sums._pending[-1].targets) if done else 0)
        return done

    plainly = CalibrationSums.add
    monkeypatch.setattr(CalibrationSums, "add", noted)
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    monkeypatch.setattr(_executors, "runs_triton", lambda x: True)
    monkeypatch.setattr(calibrate, "fits", lambda x, compressed, taps: True)
    return found


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many nodes got the share of their source by the weights of a program, for each call."""
    found: list[int] = []

    def noted(block: Block, weights: Tensor, places: Any) -> Tensor:
        found.append(len(places))
        return plainly(block, weights, places)

    plainly = Block.with_shares
    monkeypatch.setattr(Block, "with_shares", noted)
    return found


def lives_of(supernet: Supernet, run: tuple[int, ...]) -> dict[int, Live]:
    """Every choice of every cell runs these candidates."""
    layout = supernet.layout
    return {site: tuple(run for _ in layout.table(name).choices) for site, name in enumerate(layout.sites)}


def outcome(
    *,
    plain: bool,
    space: dict[str, Any],
    run: tuple[int, ...] | None = None,
    scale: float = 1.0,
    training: bool = True,
    dropping: bool = False,
    unreached: bool = False,
    autocast: bool = False,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor | None]:
    """Output, gradients of everything, and buffers. scale: of the weights, whose sum is then beyond one.

    unreached: no feature leads to one of the nodes.
    """
    torch.manual_seed(0)
    supernet = build_space("nos", {**SIZE, **space}).supernet((3, 8, 8), 5).to(dtype).train(training)
    supernet.use_drop_path(0.5 if dropping else 0.0)
    supernet.drop_path.set_fraction(1.0)
    layout = supernet.layout
    logits = {t.name: torch.randn(t.shape, dtype=dtype).requires_grad_() for t in layout.tables}
    weights = {name: scale * torch.softmax(own, 1) for name, own in logits.items()}
    lives = None if run is None else lives_of(supernet, run)
    if unreached:  # the second block's surrogate, node 4, gets calibrations alone
        lives = {
            site: tuple((7, 8, 9, 10) if c.target == 4 else (0, 6, 7, 8, 9, 10) for c in layout.table(name).choices)
            for site, name in enumerate(layout.sites)
        }
    mix = WeightMix(layout, weights, lives)
    x = torch.randn(4, 3, 8, 8, dtype=dtype)
    torch.manual_seed(1)
    with modules_only() if plain else nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = supernet(x, mix)
    wanted = [*logits.values(), *supernet.parameters()]
    gradients = torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)
    return [y, *gradients, *supernet.buffers()]


def require_equal(found: list[Tensor | None], expected: list[Tensor | None], tolerance: float) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None), "an unused parameter has no gradient"
        if a is not None and b is not None:
            largest = max(float(b.detach().abs().max()), 1e-3) if b.is_floating_point() else 0.0
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * largest)


EVERY = [2, 2, 1, 1, 1] * 3
"""Of three cells: from inputs to both surrogates, from a surrogate to its node, from the first node to a surrogate."""


@pytest.mark.parametrize(
    ("how", "num_shares", "num_sums"),
    [
        ({}, [2, 2], EVERY),  # shares of the normal cell, and of the two reduction cells
        ({"training": False}, [2, 2], EVERY),
        ({"dropping": True}, [2, 2], []),  # each edge has a factor of its own
        ({"scale": 3.0}, [2, 2], EVERY),  # some sources get no share
        ({"run": (0, 4, 6, 7, 10)}, [2, 2], EVERY),
        ({"run": (0, 4, 8, 9)}, [], EVERY),  # no identity
        ({"run": (0, 7, 8)}, [], []),  # no kernel
        ({"run": (0, 8, 10)}, [], EVERY),
        ({"run": (6,)}, [], []),  # identities alone need no program
        ({"run": (6, 9)}, [], EVERY),
        ({"space": WITHOUT_SKIP}, [], EVERY),
        ({"space": {"share_features": True}}, [2, 2], [0, 0, 1, 1, 1] * 3),  # a module that two edges share
        ({"space": {"dynamics": ("dynamic_conv_3x3", "dil_dynamic_conv_5x5")}}, [2, 2], []),
        ({"space": {"nodes": 3}}, [3, 3], [3, 3, 1, 2, 1, 1, 1] * 3),
        ({"space": {"nodes": 3}, "unreached": True}, [3, 3], [2, 2, 1, 1, 1, 1, 1] * 3),
    ],
    ids=str,
)
def test_programs_of_nodes_compute_what_modules_compute(
    how: dict[str, Any], num_shares: list[int], num_sums: list[int], shares: list[int], added: list[int]
) -> None:
    given = {"space": {}, **how}
    found = outcome(plain=False, **given)
    assert shares == num_shares and added == num_sums
    expected = outcome(plain=True, **given)
    assert shares == num_shares and added == num_sums, "only programs read such weights"
    require_equal(found, expected, 1e-6 if "dropping" in how else 1e-9)  # drop-path's factors are float32


def test_float32_differs_by_rounding() -> None:
    require_equal(*(outcome(plain=plain, space={}, dtype=torch.float32) for plain in (False, True)), 1e-3)


def test_under_autocast_programs_err_little_more_than_modules() -> None:
    exact = outcome(plain=True, space={}, dtype=torch.float64)
    errors = []
    for plain in (False, True):
        found = outcome(plain=plain, space={}, dtype=torch.float32, autocast=True)
        pairs = [(a, b) for a, b in zip(found, exact, strict=True) if a is not None and b is not None]
        assert all(a.shape == b.shape for a, b in pairs)
        norms = [((a.double() - b).norm(), b.norm()) for a, b in pairs if b.is_floating_point()]
        errors.append(sum(float((error / norm.clamp(min=1e-3)).detach()) for error, norm in norms) / len(norms))
    assert errors[0] < 1.25 * errors[1], errors


def test_weights_of_all_calibrations_of_a_pass_are_stacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def noted(lists: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
        calls.append(len(lists))
        return vectors(lists, dtype)

    monkeypatch.setattr(calibrate, "vectors", noted)
    outcome(plain=False, space={})
    # For each node W1 and W2 of channel attentions, W1 of all others, and three more; attentions that stride have a W1.
    assert calls == [3 * 5 * 6 + 2 * 2]
    calls.clear()
    outcome(plain=False, space={}, dropping=True)
    assert len(calls) == 15, "drop-path has a factor for each edge: node by node"


def test_sets_of_drawn_calibrations_keep_a_limited_memory(added: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_executors, "MOST_FORMS", 2)
    supernet = build_space("nos", SIZE).supernet((3, 8, 8), 5).double().eval()
    weights = {t.name: torch.softmax(torch.randn(t.shape, dtype=torch.float64), 1) for t in supernet.layout.tables}
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    drawn = [(0, 7, 8), (0, 8, 10), (4, 8, 9), (0, 7, 9, 10), (6, 9, 10), (0, 10)]
    for run in drawn:
        mix = WeightMix(supernet.layout, weights, lives_of(supernet, run))
        found = supernet(x, mix)
        with modules_only():
            torch.testing.assert_close(found, supernet(x, mix))
    assert {len(cell.block.constants) for cell in supernet.cells} <= {1, 2}  # type: ignore[union-attr]
    added.clear()
    supernet(x, WeightMix(supernet.layout, weights, lives_of(supernet, drawn[1])))
    assert any(added), "known sets are still added at once"
