"""Fused derived cells: the twin against modules; the kernels against the twin, on a GPU or by the interpreter.

TRITON_INTERPRET=1 pytest tests/kernels/test_kernel_derived.py
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.derived import EARLIER
from softcell.arch import notation
from softcell.kernels.backend import triton_kernels
from softcell.kernels.derived import derived_cell, derived_cell_reference
from softcell.nn.conv import SeparableConv
from softcell.nn.norm import update_running
from softcell.nn.stack import as_vector
from softcell.spaces import Network, _derived_plan, build_space, execution
from softcell.spaces._derived_plan import Pick, plan_derived
from softcell.spaces._fused_plan import Unfit
from softcell.spaces.execution import fused_networks, is_modules_only, modules_only
from tests.helpers.derived_cells import WIDTHS, Cell, edges_of_one_size, states
from tests.helpers.kernel_runs import DEVICE, INTERPRETED, MARKS
from tests.reference.published_genotypes import DARTS_V2

FORMS = list(product((1, 2), (False, True), (False, True)))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.detach().cpu().double() - b.detach().cpu().double()).norm() / (b.detach().double().norm() + 1e-12))


@pytest.mark.parametrize(("stride", "older_is_larger", "pool_norm"), FORMS)
@pytest.mark.parametrize("training", [True, False])
def test_twin_equals_the_modules_with_running_statistics(
    stride: int, older_is_larger: bool, pool_norm: bool, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    cell = Cell(4, stride, older_is_larger=older_is_larger, pool_norm=pool_norm).double().train(training)
    twin = Cell(4, stride, older_is_larger=older_is_larger, pool_norm=pool_norm).double().train(training)
    twin.load_state_dict(cell.state_dict())
    given = [x.double() for x in states(3, (6, 5), older_is_larger=older_is_larger)]
    fused = twin.plan()
    factors = torch.rand(fused.program.paths, 3, dtype=torch.float64) if training else None
    monkeypatch.setattr(type(twin.drop_path), "factors", lambda *_: factors)
    monkeypatch.setattr(_derived_plan, "derived_cell", derived_cell_reference)
    mine, theirs = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    y, z = fused(mine), cell(*theirs, factors)
    torch.testing.assert_close(y, z)
    grad = torch.randn_like(y)
    y.backward(grad)
    z.backward(grad)
    for a, b in zip((*mine, *twin.parameters()), (*theirs, *cell.parameters()), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    for (name, a), (_, b) in zip(twin.named_buffers(), cell.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def outcomes(
    fused: _derived_plan.DerivedCell, given: list[Tensor], dtype: torch.dtype, *, plain: bool, training: bool
) -> list[Tensor]:
    """Output, statistics, gradients of parameters and inputs, always with the same random numbers.

    The newer input has another reader, whose gradient the kernels add to their own. In training the random numbers are
    drop-path's factors and these gradients; else running statistics and these gradients.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(1)
    parameters = torch.cat([as_vector(w) for w in fused.parameters()]).detach().to(wide)
    parameters.requires_grad_()
    inputs = [x.to(parameters.device, dtype).requires_grad_() for x in given]
    shape = (fused.program.paths, len(given[0])) if training else (2, fused.program.planes, fused.program.channels)
    drawn = (torch.rand(shape, generator=generator) + 0.5).to(parameters.device, wide)
    running, factors = (None, drawn) if training else (drawn, None)
    run = derived_cell_reference if plain else derived_cell
    out, passed, moments = run(fused.program, dtype, parameters, running, factors, *inputs, passes=True)
    grad, other = (torch.randn(x.shape, generator=generator).to(x.device, dtype) for x in (out, passed))
    return [out, moments, *torch.autograd.grad((out, passed), (parameters, *inputs), (grad, other))]


OUTCOMES = ("output", "statistics", "gradient of parameters", "gradient of older", "gradient of newer")


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """New tensors hold NaN, so that a value which no kernel writes is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


TYPES = [(torch.float32, 1e-5), *([] if INTERPRETED else [(torch.bfloat16, 0.05)])]  # the interpreter has no bfloat16
SIZES = [(5, (7, 6)), *([(5, (8, 8))] if INTERPRETED else [(36, (16, 16)), (144, (8, 8))])]
CASES = [(True, *size) for size in SIZES] + [(False, *SIZES[0])]  # kernels of other sizes take long to compile


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize(("stride", "older_is_larger", "pool_norm"), FORMS)
@pytest.mark.parametrize(("training", "channels", "size"), CASES)
class TestKernels:
    pytestmark = MARKS

    def test_kernels_equal_their_twin_in_float64(
        self, stride: int, older_is_larger: bool, pool_norm: bool, channels: int, size: tuple[int, int],
        dtype: torch.dtype, tolerance: float, training: bool, nan_memory: None,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        cell = Cell(channels, stride, older_is_larger=older_is_larger, pool_norm=pool_norm).to(DEVICE)
        given = states(3, size, older_is_larger=older_is_larger)
        fused = cell.plan()
        mine = outcomes(fused, given, dtype, plain=False, training=training)
        theirs = outcomes(cell.double().cpu().plan(), given, torch.float64, plain=True, training=training)
        cell.float().to(DEVICE)
        # Rounding flips ReLUs and winners of pools: the twin in the same precision says how far that carries.
        exact = dtype == torch.float32
        if exact and channels > 100:
            tolerance = 1e-4  # rounding can flip a ReLU near 0; on an H200 a gradient was off by 5e-5
        twin = theirs if exact else outcomes(cell.plan(), given, dtype, plain=True, training=training)
        far = {
            name: f"error {relative(a, b):.2e}, bound {tolerance + 2 * relative(rounded, b):.2e}"
            for name, a, b, rounded in zip(OUTCOMES, mine, theirs, twin, strict=True)
            if not relative(a, b) <= tolerance + 2 * relative(rounded, b)
        }
        assert not far, far
        again = outcomes(cell.plan(), given, dtype, plain=False, training=training)
        differing = [name for name, a, b in zip(OUTCOMES, mine, again, strict=True) if not torch.equal(a, b)]
        assert not differing, f"a second run gave other values: {differing}"  # no atomic sums


SETTINGS: list[dict[str, int]] = [
    {"weight_rows": 16, "stage_rows": 32, "lower_rows": 32, "weight_programs": 400},  # several tiles, several splits
    {"pitch": 1, "product_sums": 0, "weight_side": 64, "beside": 0, "splits_block": 256},
    {"channels": 16, "stage_depth": 32, "lower_depth": 64, "gather_rows": 32, "lower_apart": 0},
    {"activate_lines": 0, "stage_lines": 1, "tile_programs": 0, "lower_rows": 32},
    {"point_tile_programs": 0, "point_side": 16, "stage_rows": 32, "tile_pulled": 0},
    {"stage_lines": 0, "lower_inner": 16, "lower_pulled": 16, "point_depth": 16, "point_side": 16, "flat": 32},
    {**EARLIER, "finish_rows": 2},
    {"lines_together": 1, "gather_registers": 80, "finish_rows": 1024},
]


class TestBlocks:
    pytestmark = MARKS

    @pytest.mark.parametrize("settings", SETTINGS)
    def test_any_sizes_of_blocks_give_the_same(
        self, settings: dict[str, int], nan_memory: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch.manual_seed(0)
        cell = Cell(20, 1, older_is_larger=True, pool_norm=True).to(DEVICE)
        given = states(2, (8, 8), older_is_larger=True)
        monkeypatch.setattr(triton_kernels("derived_layout"), "OVERRIDES", settings)
        mine = outcomes(cell.plan(), given, torch.float32, plain=False, training=True)
        theirs = outcomes(cell.double().cpu().plan(), given, torch.float64, plain=True, training=True)
        errors = {name: relative(a, b) for name, a, b in zip(OUTCOMES, mine, theirs, strict=True)}
        assert all(error <= 1e-5 for error in errors.values()), errors

    def test_pools_that_stride_are_read_by_windows(self, nan_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        cell = Cell(5, 2, older_is_larger=False, pool_norm=True).to(DEVICE)
        given = states(2, (7, 6), older_is_larger=False)
        found = []
        for together in (0, 1):
            monkeypatch.setattr(triton_kernels("derived_layout"), "OVERRIDES", {"gather_together": together})
            found.append(outcomes(cell.plan(), given, torch.float32, plain=False, training=True))
        for name, a, b in zip(OUTCOMES, *found, strict=True):
            assert torch.equal(a, b), name

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"gather_groups": 2, "gather_flat": 16},
            {"gather_groups": 0, "stage_lines": 1},
            EARLIER,
            {
                "stage_lines": 1,
                "depth_flat": 32,
                "depth_programs": 20,
                "tile_pulled": 0,
                "beside": 0,
            },
            {"weight_factors": 2, "stage_lines": 0, "depth_programs": 1},
        ],
    )
    @pytest.mark.parametrize(("window", "size"), [(3, (7, 6)), (3, (8, 8)), (5, (5, 9))])
    def test_windows_of_one_size_are_read_by_lines(
        self,
        window: int,
        size: tuple[int, int],
        settings: dict[str, int],
        nan_memory: None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Of 7 and 5 lines the last group of four is not whole, and 6 or 9 columns do not fill blocks.

        Of 8 × 8 pixels four images fill blocks of 64 and 128 rows, which `_stage_lines` requires.
        """
        torch.manual_seed(0)
        parts = {"older_is_larger": False, "pool_norm": True, "edges": edges_of_one_size(window)}
        cell = Cell(20, 1, **parts).to(DEVICE)
        given = states(4, size, older_is_larger=False)
        monkeypatch.setattr(triton_kernels("derived_layout"), "OVERRIDES", settings)
        mine = outcomes(cell.plan(), given, torch.float32, plain=False, training=True)
        theirs = outcomes(cell.double().cpu().plan(), given, torch.float64, plain=True, training=True)
        errors = {name: relative(a, b) for name, a, b in zip(OUTCOMES, mine, theirs, strict=True)}
        assert all(error <= 1e-5 for error in errors.values()), errors

    @pytest.mark.parametrize(
        ("channels", "dtype", "bytes_there", "expected"),
        [
            (8, torch.bfloat16, 99 * 1024, False),
            (8, torch.bfloat16, 163 * 1024, True),
            (36, torch.float32, 163 * 1024, True),
            (48, torch.float32, 163 * 1024, False),
            (48, torch.float32, 227 * 1024, True),
        ],
    )
    def test_tiles_are_not_used_where_shared_memory_is_too_small(
        self, channels: int, dtype: torch.dtype, bytes_there: int, expected: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Consumer GPUs have 99 KB per program, an A100 163, an H100 227."""
        monkeypatch.setattr(triton_kernels("derived_layout"), "shared_memory", lambda device: bytes_there)
        plan = Cell(channels, 1, older_is_larger=False, pool_norm=True, edges=edges_of_one_size(3)).plan()
        triton_kernels("derived")._scheduled.cache_clear()
        shapes = [(7, width, 8, 8) for width in WIDTHS]
        schedules = plan.schedules(shapes, dtype, torch.device("cpu"), training=True)
        triton_kernels("derived")._scheduled.cache_clear()
        names = {launch.kernel.__name__ for schedule in schedules for launch in schedule.launches}
        assert {"_lower_tiles" in names, "_point_tiles" in names} == {expected}

    def test_sides_of_blocks_cover_columns_with_little_waste(self) -> None:
        side_for = triton_kernels("derived_layout").side_for
        # 9 taps of 40 channels are 3 × 128; 144 columns are 3 × 64, since 2 × 128 would be a third more.
        assert [side_for(length, 128) for length in (5, 36, 72, 144, 360, 648)] == [16, 64, 128, 64, 128, 128]
        assert side_for(360, 64) == 64


def test_a_shared_module_is_refused() -> None:
    cell = Cell(4, 1, older_is_larger=False, pool_norm=False)
    shared = SeparableConv(4, 3, 1, affine=True)
    picks = [Pick(0, 2, shared), Pick(0, 3, shared)]
    with pytest.raises(Unfit, match="share"):
        plan_derived((cell.older, cell.newer), picks, 2, 4, 1, cell.drop_path)


def test_unknown_modules_are_refused() -> None:
    cell = Cell(4, 1, older_is_larger=False, pool_norm=False)
    with pytest.raises(Unfit, match="Conv2d"):
        plan_derived((cell.older, cell.newer), [Pick(0, 2, nn.Conv2d(4, 4, 3, padding=1))], 1, 4, 1, cell.drop_path)


def passes(network: Network, images: Tensor, *, fused: bool) -> dict[str, Tensor]:
    """Logits, gradients and running statistics of one training pass."""
    network.train()
    network.zero_grad()
    with fused_networks() if fused else modules_only():
        logits, auxiliary = network.forward_with_auxiliary(images)
        (logits.square().mean() + auxiliary.square().mean()).backward()
    found = {"logits": logits.detach(), "auxiliary": auxiliary.detach()}
    found |= {name: p.grad for name, p in network.named_parameters()}
    return found | {name: b.float() for name, b in network.named_buffers() if "running" in name}


def test_cells_of_a_pass_draw_factors_and_update_statistics_together(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = build_space("darts", {"cells": 3, "channels": 4}).network(notation.parse(DARTS_V2), (3, 16, 16), 10)
    network = network.double()
    modules = copy.deepcopy(network)
    network.use_drop_path(0.5)
    modules.use_drop_path(0.0)
    drawn: list[int] = []
    updates: list[int] = []

    def factors(drop_path: nn.Module, x: Tensor, paths: int) -> Tensor:
        drawn.append(paths)
        return torch.ones(paths, len(x), dtype=x.dtype)

    def update(norms: list[nn.BatchNorm2d], *new: list[Tensor]) -> None:
        updates.append(len(norms))
        update_running(norms, *new)

    monkeypatch.setattr(type(network.drop_path), "factors", factors)
    monkeypatch.setattr(_derived_plan, "update_running", update)
    monkeypatch.setattr(_derived_plan, "derived_cell", derived_cell_reference)
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    with fused_networks():
        mine = network.train()(images)
        with torch.no_grad():
            judged = network.eval()(images)
    with modules_only():
        torch.testing.assert_close(mine, modules.train()(images))
        torch.testing.assert_close(judged, modules.eval()(images))
    assert drawn == [6 + 5 + 5]  # of a normal cell and two reduction cells: all but identities
    assert len(updates) == 1
    for (name, a), (_, b) in zip(network.named_buffers(), modules.named_buffers(), strict=True):
        if "drop_path" not in name:
            torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("frozen_first", [False, True])
def test_norms_may_be_frozen_at_any_time(frozen_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    space = build_space("darts", {"cells": 3, "channels": 4})
    fused = space.network(notation.parse(DARTS_V2), (3, 16, 16), 10).double().train()
    modules = copy.deepcopy(fused)
    ran: list[bool] = []

    def noted(*given: Any, **named: Any) -> Any:
        ran.append(True)
        return derived_cell_reference(*given, **named)

    monkeypatch.setattr(_derived_plan, "derived_cell", noted)
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    for frozen in (frozen_first, not frozen_first, frozen_first):
        for network in (fused, modules):
            for before in network.pre:  # type: ignore[union-attr]
                norms = [module for module in before.modules() if isinstance(module, nn.BatchNorm2d)]
                norms[-1].train(not frozen)
        with fused_networks():
            mine = fused(images)
        with modules_only():
            torch.testing.assert_close(mine, modules(images))
        for (name, a), (_, b) in zip(fused.named_buffers(), modules.named_buffers(), strict=True):
            torch.testing.assert_close(a, b, msg=name)
        assert len(ran) == (0 if frozen else 3)
        ran.clear()


class TestNetworks:
    pytestmark = MARKS

    def test_a_fused_network_equals_its_modules(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """DARTS_V2 in float32 against the same modules in float64: all gradients and running statistics."""
        torch.manual_seed(0)
        # The interpreter's tensors are on a CPU.
        monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
        sizes = {"cells": 3, "channels": 4} if INTERPRETED else {"cells": 8, "channels": 36}
        genotype = notation.parse(DARTS_V2)
        network = build_space("darts", sizes).network(genotype, (3, 32, 32), 10, auxiliary=True).to(DEVICE)
        network.drop_path.probability = 0.0
        images = torch.randn(2 if INTERPRETED else 16, 3, 32, 32, device=DEVICE)
        exact = copy.deepcopy(network).double()
        single = passes(copy.deepcopy(network), images, fused=False)
        mine = passes(network, images, fused=True)
        theirs = passes(exact, images.double(), fused=False)
        assert all(cell._known[True] is not None for cell in network.cells)  # nothing ran module by module
        # Rounding decides about ReLUs near 0: modules in float32 are no nearer to float64.
        bounds = {name: max(1e-3, 10 * relative(single[name], b)) for name, b in theirs.items()}
        errors = {name: relative(mine[name], b) for name, b in theirs.items()}
        far = {n: f"error {e:.2e}, bound {bounds[n]:.2e}" for n, e in errors.items() if not e <= bounds[n]}
        assert not far, f"{len(far)} of {len(errors)}: {far}"
