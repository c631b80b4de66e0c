"""Kernels access only their own tensors and read only what was written, and no program what another one writes.

TRITON_INTERPRET=1 pytest tests/kernels/test_kernel_memory.py
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import product

import pytest
import torch
from torch import Tensor

from benchmarks.derived import EARLIER
from benchmarks.supernet import FEWER
from softcell.kernels.backend import cell_settings, has_triton, triton_kernels
from softcell.kernels.calibrate import calibrate, dynamic_kernels
from softcell.kernels.derived import derived_cell
from softcell.kernels.indicator import Form, Laid, indicate
from softcell.nn.stack import as_vector
from tests.helpers.derived_cells import Cell, edges_of_one_size, states
from tests.helpers.kernel_cells import build_cell, fuse, outcome, random_inputs
from tests.helpers.kernel_runs import INTERPRETED
from tests.helpers.picked_cells import inputs_of, picked
from tests.helpers.picked_cells import outcome as outcome_of_picked
from tests.helpers.segmented_cells import Segmented
from tests.helpers.segmented_cells import inputs_of as inputs_of_segments
from tests.helpers.segmented_cells import outcome as outcome_of_segments
from tests.helpers.watched import filled_memory, watched

pytestmark = pytest.mark.skipif(not (has_triton() and INTERPRETED), reason="needs Triton and TRITON_INTERPRET=1")
FORMS = list(product(("chosen", "others"), (True, False)))


def require_sound(run: Callable[[], dict[str, Tensor]]) -> None:
    """Results do not depend on what new memory holds, and no launch reads or writes what it must not."""
    with filled_memory(float("nan"), 205), watched() as watch:
        mine = run()
    with filled_memory(-7.7e3, 3):
        again = run()
    assert watch.launches and not watch.problems, dict(watch.problems)
    assert not [name for name, value in mine.items() if not torch.equal(value, again[name])]


@pytest.mark.parametrize(("name", "training"), FORMS)
@pytest.mark.parametrize(("space", "number"), [("nb201", 0), ("darts", 1)])
def test_mixed_cells(space: str, number: int, name: str, training: bool) -> None:
    def run() -> dict[str, Tensor]:
        cell = build_cell(space, number, channels=3, nodes=2 if space == "darts" else 3).train(training)
        given, weights = random_inputs(cell, (5, 4), 2, torch.float32)
        inputs = [one.requires_grad_() for one in (*given, weights)]
        with cell_settings(**(FEWER if name == "others" else {})):
            nodes = fuse(cell)(inputs[:-1], inputs[-1].flatten())
            return outcome(cell, nodes[cell.inputs :], inputs)

    require_sound(run)


@pytest.mark.parametrize(("name", "training"), FORMS)
@pytest.mark.parametrize("cell", ["all five", "two on an edge"])
def test_derived_cells_with_weights_by_channel(cell: str, name: str, training: bool) -> None:
    x, factors = inputs_of(cell, 5, 2, (6, 5))
    dropped = factors if training else None
    own = picked(cell, 5, dropped).train(training)

    def run() -> dict[str, Tensor]:
        with cell_settings(**(FEWER if name == "others" else {})):
            return outcome_of_picked(own, x, dropped, fused=True, dtype=torch.float32)

    require_sound(run)


@pytest.mark.parametrize(("name", "training"), FORMS)
@pytest.mark.parametrize("stride", [1, 2])
def test_derived_cells(stride: int, name: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels("derived_layout"), "OVERRIDES", EARLIER if name == "others" else {})
    torch.manual_seed(0)
    edges = {"edges": edges_of_one_size(3)} if stride == 1 else {}
    cell = Cell(5, stride, older_is_larger=stride == 2, pool_norm=True, **edges)  # type: ignore[arg-type]
    given = states(2, (5, 6), older_is_larger=stride == 2)
    fused = cell.plan()
    program = fused.program
    flat = torch.cat([as_vector(weight) for weight in fused.parameters()]).detach()
    running = torch.rand(2, program.planes, program.channels) + 0.5
    factors = torch.rand(program.paths, 2)

    def run() -> dict[str, Tensor]:
        inputs = [one.clone().requires_grad_() for one in (flat, *given)]
        known = (None, factors) if training else (running, None)
        out, moments = derived_cell(program, torch.float32, inputs[0], *known, *inputs[1:])
        found = torch.autograd.grad((out**2).sum(), inputs)
        normed = [norm.plane for norm in program.norms]
        return {"output": out, "statistics": moments[:, normed]} | {str(i): one for i, one in enumerate(found)}

    require_sound(run)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["a pair at each tier", "one calibration after the other"])
@pytest.mark.parametrize("stride", [1, 2])
def test_parts_of_derived_cells_and_what_runs_between_them(stride: int, name: str, training: bool) -> None:
    cell = Segmented(name, 5, stride=stride).train(training)
    given = inputs_of_segments(cell, 2, (5, 6))
    require_sound(lambda: outcome_of_segments(cell, given, None, fused=True, dtype=torch.float32))


def with_gradients(outputs: Callable[..., Tensor | tuple[Tensor, ...]], *given: Tensor) -> dict[str, Tensor]:
    """Outputs, and gradients of the sum of their squares."""
    own = [one.detach().requires_grad_() for one in given]
    found = outputs(*own)
    found = found if isinstance(found, tuple) else (found,)
    gradients = torch.autograd.grad(sum((y**2).sum() for y in found), own)  # type: ignore[arg-type]
    return {str(i): one for i, one in enumerate((*found, *gradients))}


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize(("channel", "spatial"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("side", [3, 32])
def test_calibrations(side: int, channel: bool, spatial: bool, size: int) -> None:
    """Images of 32 pixels a side are divided into several parts."""
    torch.manual_seed(0)
    shapes = {"channel": (2, 5, 1, 1), "spatial": (2, 1, side, side), "kernels": (2, 5, size, size)}
    named = {name: torch.randn(shapes[name]) for name in ["channel"] * channel + ["spatial"] * spatial}
    named |= {"kernels": torch.randn(shapes["kernels"])} if size else {}

    def outputs(base: Tensor, *more: Tensor) -> Tensor:
        own = dict(zip(named, more, strict=True))
        return calibrate(base, own.get("channel"), own.get("spatial"), own.get("kernels"))

    base = torch.randn(2, 5, side, side).to(memory_format=torch.channels_last)
    require_sound(lambda: with_gradients(outputs, base, *named.values()))


@pytest.mark.parametrize("attentions", [0, 2])
def test_dynamic_kernels(attentions: int) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 35, 5), torch.randn(2, 35, 4), torch.randn(34, 5), torch.randn(2, 5, 2)]
    given += [torch.randn(attentions, 5), torch.randn(attentions, 5, 1)] if attentions else []
    require_sound(lambda: with_gradients(lambda *own: dynamic_kernels(*own[:4], (9, 25), *own[4:]), *given))


@pytest.mark.parametrize(("sides", "eps"), [((2, 5), 1e-5), ((2, 5), None), ((6, 10), None)], ids=str)
def test_indicator_tokens(sides: tuple[int, int], eps: float | None) -> None:
    """The last case has whole maps as tokens."""
    torch.manual_seed(0)
    g, m, zeros, n, c, inner = 2, 3, 1, 2, 5, 2
    d, size = sides[0] * sides[1] * c, 60 * c
    shapes = [(g, m, d), (g, d, 1), (g, 1, 1), (g, 1), (g, zeros), (g, 1, size), (g, 1, size), (g, c, c), (g, 1, 1, c)]
    shapes += [(g, 1, 1, c), (g, c, inner), (g, 1, inner), (g, inner, c), (g, 1, c), (g, 1, 1, c), (g, 1, 1, c)]
    laid = [torch.randn(shape) / shape[1] ** 0.5 for shape in shapes]
    x = torch.randn(g * m, n, 6, 10, c)
    require_sound(lambda: with_gradients(lambda x, *own: indicate(x, Laid(*own), Form(sides, eps, 1e-5)), x, *laid))


@pytest.mark.parametrize(
    ("name", "grid", "problem"),
    [
        ("reads_beyond", 1, "reads outside its tensors"),
        ("races", 2, "reads what another program writes"),
    ],
)
def test_mistakes_are_seen(name: str, grid: int, problem: str) -> None:
    kernel = getattr(import_module("tests.helpers.faulty_triton"), name)
    x, y = torch.ones(15 if grid == 1 else 32), torch.zeros(16)
    with watched() as watch:
        kernel[(grid,)](x, y, SIZE=16)
    assert watch.problems[f"{name} {problem}"] == 1


def test_memory_that_nothing_wrote_is_seen() -> None:
    with pytest.raises(AssertionError), filled_memory(1.0, 1):
        require_sound(lambda: {"sum": torch.empty(3).sum()})
