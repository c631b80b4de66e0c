"""Fused derived cells of NAS-Bench-1Shot1 against their own modules: values, gradients, statistics, drop-path.

By the plain twins on the CPU in float64, and by the kernels on a GPU or in Triton's interpreter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import Cell, Pick, sample
from softcell.kernels import cell as kernels
from softcell.kernels.backend import cell_settings
from softcell.kernels.cell import mixed_cell, mixed_cell_reference
from softcell.kernels.library_conv import store, store_reference
from softcell.kernels.pool import Pool, pool, pool_reference
from softcell.kernels.taps import tiles
from softcell.nn import Spec
from softcell.nn.stochastic import DropPath
from softcell.spaces import PickedCell, _fused_cell, build_space
from softcell.spaces._fused_plan import Unfit
from softcell.spaces._rectified_plan import plan_rectified
from tests.helpers.kernel_runs import DEVICE, INTERPRETED, MARKS, without_tf32
from tests.helpers.picked_cells import (
    CONV1,
    CONV3,
    LINK,
    MAX,
    RECTIFIED,
    SKIP,
    form_of,
    inputs_of,
    outcome,
    picked,
    require_close,
    require_modules_results,
)

PASSES = [(True, True), (True, False), (False, False)]
"""Training or evaluation, with or without drop-path."""
SHAPES = [(5, (6, 5)), (8, (3, 7)), (16, (4, 4)), (1, (5, 5))]
"""Channels and image sizes."""


def both(
    name: str, *, training: bool, drops: bool, channels: int = 4, size: tuple[int, int] = (6, 5), **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    x, factors = inputs_of(name, channels, 3, size)
    dropped = factors if drops else None
    cell = picked(name, channels, dropped).train(training)
    return outcome(cell, x, dropped, fused=True, **options), outcome(cell, x, dropped, fused=False, **options)


@pytest.fixture(params=["kernels", "library"])
def library_runs(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the library runs the convolutions."""
    chosen = request.param == "library"
    with cell_settings(library_channels=1 if chosen else 1000):
        yield chosen


@pytest.mark.parametrize("function", [mixed_cell, mixed_cell_reference])
@pytest.mark.parametrize(("training", "drops"), PASSES)
@pytest.mark.parametrize("name", list(RECTIFIED))
def test_a_derived_cell_equals_its_modules(
    name: str, training: bool, drops: bool, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fused_cell, "mixed_cell", function)
    require_modules_results(both, name, training=training, drops=drops)


@pytest.mark.parametrize(("training", "drops"), PASSES)
@pytest.mark.parametrize("name", list(RECTIFIED))
def test_the_library_may_run_the_convolutions(
    name: str, training: bool, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unused(*given: Any) -> None:
        assert not given[-1], "the kernels have convolutions to run"

    for function in ("convolve", "input_gradient", "weight_gradient"):
        monkeypatch.setattr(kernels, function, unused)
    with cell_settings(library_channels=4):
        mine, theirs = both(name, training=training, drops=drops)
    require_close(mine, theirs, 1e-10)


def test_from_some_width_on_the_library_runs_the_convolutions() -> None:
    narrow, wide = (form_of(picked("space 1", channels)).cell.program for channels in (127, 128))
    assert not narrow.uses_library() and wide.uses_library()


@pytest.mark.parametrize(("channels", "size"), SHAPES)
@pytest.mark.parametrize("training", [True, False])
def test_all_widths_and_sizes_are_supported(
    channels: int, size: tuple[int, int], training: bool, library_runs: bool
) -> None:
    for name in ("space 1", "several in a block"):
        mine, theirs = both(name, training=training, drops=training, channels=channels, size=size)
        require_close(mine, theirs, 1e-10)


@pytest.mark.parametrize("name", list(RECTIFIED))
def test_only_the_last_node_may_have_a_gradient(name: str) -> None:
    require_close(*both(name, training=True, drops=True, last=True), 1e-10)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_sampled_cells_of_each_space_equal_their_modules(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = build_space(f"nb1shot1-{number}").layout()
    fused = 0
    for seed in range(12):
        cell = sample(layout, seed).cells["cell"]
        if all(pick.op not in ("conv_1x1", "conv_3x3") for pick in cell.picks):
            continue
        picks = tuple((pick.source, pick.target, pick.op) for pick in cell.picks)
        monkeypatch.setitem(RECTIFIED, "sampled", picks)
        require_close(*both("sampled", training=seed % 3 != 0, drops=seed % 3 == 1), 1e-10)
        fused += 1
    assert fused >= 10


def test_programs_have_no_nodes_that_only_repeat_others() -> None:
    """Sums of one parent are that parent; pools of one source are one plane."""
    program = form_of(picked("space 1", 4)).cell.program
    # The input, four blocks, the three sums of two parents, and the output.
    assert program.nodes == 1 + 4 + 3 + 1
    assert len(program.rectified) == 3
    often = form_of(picked("one input read often", 4)).cell.program
    assert often.nodes == 1 + 4 + 1
    assert often.slots == 1
    (pool,) = (pool for wave in often.waves for pool in wave.pools)
    readers = [term for terms in often.terms for term in terms if term.plane == pool.largest]
    assert [term.adds for term in readers] == [True, False]


def test_cells_may_have_several_inputs(library_runs: bool) -> None:
    torch.manual_seed(0)
    edges = [
        *((0, 2, module(CONV3)), (1, 3, module(CONV1)), (0, 4, module(LINK)), (1, 4, module(LINK))),
        *((2, 4, module(LINK)), (3, 4, module(LINK))),
    ]
    first, second, *links = (own.double() for _, _, own in edges)
    form = plan_rectified(edges, 2, 5, 4, DropPath(0.0))
    wave = form.cell.program.waves[0]
    assert wave.sources == (0, 1) and len(wave.first) == 4
    assert len(wave.measured) == 2, "links have no norm"
    states = [torch.randn(3, 4, 5, 6, dtype=torch.float64).requires_grad_() for _ in range(2)]
    a, b = (state.relu() for state in states)
    *_, mine = form([a, b])
    expected = sum(link(value) for link, value in zip(links, (a, b, first(a), second(b)), strict=True))
    torch.testing.assert_close(mine, expected)
    wanted = [*states, *(p for _, _, own in edges for p in own.parameters())]
    slope = torch.randn_like(mine)
    for one, other in zip(
        *(torch.autograd.grad(y, wanted, slope, retain_graph=True) for y in (mine, expected)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_the_gradient_of_a_node_that_is_zero_is_zero() -> None:
    """As for ReLU, also where the gradient comes from outside and nothing in the cell reads the node."""
    cell = picked("loose ends", 4)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64).relu()
    form = form_of(cell)
    nodes = form([x])
    conv = next(module for module in cell.edges.own["7_8"].modules() if isinstance(module, nn.Conv2d))
    (gradient,) = torch.autograd.grad(nodes[8].neg().exp().sum(), conv.weight)
    (expected,) = torch.autograd.grad(cell([x])[8].neg().exp().sum(), conv.weight)
    assert float((nodes[8] == 0).double().mean()) > 0.1
    torch.testing.assert_close(gradient, expected)


def test_inputs_that_are_zero_have_the_gradient_of_modules(library_runs: bool) -> None:
    """No ReLU is applied to them, only to values that follow norms."""
    cell = picked("space 2", 4)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64).relu().requires_grad_()
    mine, theirs = (
        torch.autograd.grad(run([x])[-1].square().sum(), x)[0] for run in (form_of(copy.deepcopy(cell)), cell)
    )
    assert bool(theirs[x == 0].any())
    torch.testing.assert_close(mine, theirs)


def test_second_derivatives_equal_those_of_modules() -> None:
    found = []
    for fused in (True, False):
        cell = picked("space 1", 2)
        x = torch.randn(2, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
        own = (form_of(cell) if fused else cell)([x.relu()])[-1]
        (first,) = torch.autograd.grad(own.square().sum(), x, create_graph=True)
        weights = [conv.weight for conv in cell.modules() if isinstance(conv, nn.Conv2d)]
        found.append([first, *torch.autograd.grad(first.square().sum(), weights)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


# --- what has no fused form ---


def refused(*edges: tuple[int, int, nn.Module]) -> str:
    with pytest.raises(Unfit) as found:
        plan_rectified(edges, 1, 1 + max(target for _, target, _ in edges), 4, DropPath(0.0))
    return str(found.value)


def module(op: str, channels: int = 4, **settings: Any) -> nn.Module:
    spec = Spec(channels, **settings)
    cell = PickedCell(Cell((Pick(0, 1, op),), output=(1,)), 1, lambda source: spec, DropPath(0.0))
    found = cell.edges.module(0)
    assert found is not None
    return found


def test_cells_without_a_fused_form_are_refused() -> None:
    convolution = (0, 1, module(CONV3))
    assert "no scale and shift" in refused((0, 1, module(CONV3, affine=False)))
    assert "no convolution with a norm" in refused((0, 1, module(MAX, pool_norm=False)), (0, 2, module(SKIP)))
    assert "may be negative" in refused(convolution, (1, 2, module(LINK)), (2, 3, module(SKIP)))
    assert "SeparableConv" in refused(convolution, (1, 2, module("sep_conv_3x3")))
    assert "Sequential" in refused(convolution, (1, 2, module(MAX, pool_norm=True)))
    assert "stride" in refused((0, 1, module(CONV3, stride=2)))
    assert "stride" in refused(convolution, (0, 2, module(MAX, stride=2, pool_norm=False)))
    assert "width" in refused(convolution, (1, 2, module(LINK, channels=8)))
    shared = module(CONV3)
    assert "share" in refused((0, 1, shared), (0, 2, shared))
    other = module(CONV3)
    other[1].eps = 0.1  # type: ignore[index]
    assert "eps" in refused(convolution, (1, 2, other))


def test_cells_whose_inputs_may_be_negative_are_not_fused() -> None:
    """Other spaces can have these candidates, and their cells read sums without a ReLU."""
    built = build_space("nb201", {"cells_per_stage": 1, "channels": 4, "candidates": ("none", CONV3)})
    network = built.network(sample(built.layout(), 1), (3, 8, 8), 5)
    assert network.has_fused_cells() == [False] * 3


# --- the kernels themselves ---


class TestKernels:
    pytestmark = MARKS

    @pytest.mark.parametrize(("training", "drops"), PASSES)
    @pytest.mark.parametrize("name", list(RECTIFIED))
    def test_kernels_equal_modules_in_float64(
        self, name: str, training: bool, drops: bool, library_runs: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        channels, batch, size = (5, 2, (6, 5)) if INTERPRETED else (16, 6, (9, 7))
        x, factors = inputs_of(name, channels, batch, size)
        dropped = factors if drops else None
        cell = picked(name, channels, dropped).train(training)
        exact = outcome(cell, x, dropped, fused=False)
        mine = outcome(cell, x, dropped, fused=True, device=DEVICE, dtype=torch.float32)
        require_close(mine, exact, 1e-4)

    @without_tf32()
    def test_inputs_that_are_zero_have_the_gradient_of_modules(self, library_runs: bool) -> None:
        cell = picked("space 2", 5)
        x = torch.randn(2, 5, 4, 5, dtype=torch.float64).relu()
        found = []
        for device, dtype in ((DEVICE, torch.float32), ("cpu", torch.float64)):
            own, given = copy.deepcopy(cell).to(device, dtype), x.to(device, dtype).requires_grad_()
            run = form_of(own) if dtype is torch.float32 else own
            found.append(torch.autograd.grad(run([given])[-1].square().sum(), given)[0].double().cpu())
        require_close({"x": found[0]}, {"x": found[1]}, 1e-4)

    @pytest.mark.parametrize("channels", [5, 300])
    def test_pools_without_statistics_take_any_number_of_rows(self, channels: int) -> None:
        """Wide maps take fewer rows per program than the tiles of statistics."""
        x = torch.randn(1, 2, 5, 7, channels, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        found = []
        for function in (pool, pool_reference):
            y = torch.full((3, 2, 5, 7, channels), -1.0, device=DEVICE)
            winners = torch.full((1, *y.shape[1:]), 99, dtype=torch.uint8, device=DEVICE)
            function(x, y, winners, None, [Pool(0, 1, 2, 0, 1)])
            found.append((y, winners))
        (mine, my_winners), (theirs, their_winners) = found
        torch.testing.assert_close(mine, theirs)
        assert torch.equal(my_winners, their_winners)

    @pytest.mark.parametrize("channels", [5, 80])
    @pytest.mark.parametrize("measured", [True, False])
    def test_outputs_of_the_library_are_stored_with_their_statistics(self, channels: int, measured: bool) -> None:
        rows = torch.randn(3, 7, 9, channels, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        found = []
        for function in (store, store_reference):
            y = torch.zeros(4, *rows.shape, device=DEVICE)
            partial = torch.zeros(2, tiles(rows.numel() // channels), 4, channels, device=DEVICE)
            function(rows, y, partial if measured else None, 2)
            found.append((y, partial))
        assert bool(found[0][1].any()) is measured
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
