"""Triton's kernels against their twins, and the fused cell against modules in float64 on the CPU: needs a GPU.

Sizes are odd ones and those of the papers: 16 channels at 32×32, 32 at 16×16, 64 at 8×8, and reductions between them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.kernels import norm, pool, taps
from softcell.kernels.backend import has_triton, triton_kernels
from softcell.kernels.cell import Program
from softcell.spaces._fused_cell import FusedCell
from tests.helpers.kernel_cells import (
    OneSite,
    build_cell,
    fuse,
    leaving,
    outcome,
    random_inputs,
    require_rounding_only,
    short_outcomes,
)
from tests.helpers.kernel_runs import replayed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="needs Triton"),
]
TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
# Space, number of the cell (1 is a reduction, which doubles the channels), channels, size of its inputs.
CASES = [
    ("darts", 0, 16, (9, 7)),
    ("darts", 1, 16, (16, 16)),
    ("darts", 1, 5, (9, 7)),
    ("darts", 0, 16, (32, 32)),
    ("darts", 1, 16, (32, 32)),
    ("darts", 0, 32, (16, 16)),
    ("darts", 1, 32, (16, 16)),
    ("darts", 0, 64, (8, 8)),
    ("shared", 0, 5, (9, 7)),
    ("shared", 0, 16, (32, 32)),
    ("shared", 1, 16, (32, 32)),
    ("shared", 0, 64, (8, 8)),
    ("nb201", 0, 16, (8, 8)),
    ("nb201", 0, 16, (32, 32)),
    ("nb201", 0, 32, (16, 16)),
    ("nb201", 0, 64, (8, 8)),
]
Make = Callable[[], FusedCell]
PROGRAMS: dict[str, tuple[Make, tuple[int, int]]] = {
    **{
        f"{space}-{number}-{channels}-{size[0]}x{size[1]}": (
            lambda space=space, number=number, channels=channels: fuse(build_cell(space, number, channels=channels)),
            size,
        )
        for space, number, channels, size in CASES
    },
    # What leaves one node, where a cell cannot be fused as a whole or a mix needs every output.
    "bottleneck-input": (lambda: leaving("bottleneck", 0, 0, channels=64, bottleneck=4), (32, 32)),
    "bottleneck-inner": (lambda: leaving("bottleneck", 0, 2, channels=64, bottleneck=2), (16, 16)),
    "bottleneck-reduction": (lambda: leaving("bottleneck", 1, 1, channels=64, bottleneck=4), (16, 16)),
    "bottleneck-shared": (lambda: leaving("bottleneck, shared", 0, 1, channels=10, bottleneck=2), (9, 7)),
    "nos-input": (lambda: leaving("nos", 0, 0, channels=16), (16, 16)),
    "nos-reduction": (lambda: leaving("nos", 1, 0, channels=16), (9, 7)),
    "nos-shared": (lambda: leaving("nos, shared", 0, 1, channels=5), (8, 8)),
    "darts-apart": (lambda: leaving("darts", 0, 0, apart=True, channels=16), (8, 8)),
    "darts-apart-reduction": (lambda: leaving("darts", 1, 1, apart=True, channels=16), (16, 16)),
    "nb201-apart": (lambda: leaving("nb201", 0, 0, apart=True, channels=16), (9, 7)),
}


def relative(mine: Tensor, theirs: Tensor, least: float = 1e-30) -> float:
    """`least`: the norm below which `theirs` owes its size to terms that happen to cancel."""
    mine, theirs = mine.double().cpu(), theirs.double().cpu()
    return float((mine - theirs).norm() / max(float(theirs.norm()), least))


class Bench:
    """Random planes for a program, and the comparison of a kernel with its twin in float64 on the CPU."""

    def __init__(self, program: Program, size: tuple[int, int], batch: int, dtype: torch.dtype) -> None:
        self.program, self.dtype = program, dtype
        torch.manual_seed(1)
        height, width = (-(-s // program.stride) for s in size)
        c = program.channels
        self.rows = batch * height * width
        self.buffer = self.random(program.planes, batch, height, width, c)
        self.given = self.buffer if program.stride == 1 else self.random(program.inputs, batch, *size, c)
        self.gradient = self.random(program.planes, batch, height, width, c)
        self.weights = self.random(program.size)
        self.mix = torch.rand(1000, device="cuda")
        self.factors = torch.randint(3, (100, batch), device="cuda").float()
        self.moments = torch.rand(3, program.planes, c, device="cuda") + 0.5
        self.partial = torch.rand(2, taps.tiles(self.rows), program.planes, c, device="cuda")
        self.winners = torch.zeros(max(1, program.slots), batch, height, width, c, device="cuda", dtype=torch.uint8)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").to(self.dtype)

    def compare(
        self,
        family: str,
        twin: Callable[..., None],
        args: list[Any],
        outputs: list[int],
        sums: tuple[int, ...] = (),
        **kw: Any,
    ) -> float:
        """The worst relative error of the outputs; `sums` are those that may be one sum over a whole plane."""
        mine = [a.clone() if isinstance(a, Tensor) else a for a in args]
        theirs = [a.cpu().double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        theirs = [a.cpu().clone() if isinstance(a, Tensor) else a for a in theirs]
        for i, a in enumerate(args):  # a buffer that is given twice stays one buffer
            for j in range(i):
                if a is args[j]:
                    mine[i], theirs[i] = mine[j], theirs[j]
        getattr(triton_kernels(family), twin.__name__.removesuffix("_reference"))(*mine, **kw)
        twin(*theirs, **kw)
        least = dict.fromkeys(sums, (self.rows * self.program.channels) ** 0.5)  # of that many terms around 1
        return max(relative(mine[i], theirs[i], least.get(i, 1e-30)) for i in outputs)


def build_bench(name: str, dtype: torch.dtype) -> Bench:
    make, size = PROGRAMS[name]
    return Bench(make().program, size, 5 if size[0] * size[1] < 100 else 2, dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_convolutions_equal_their_twins(name: str, dtype: torch.dtype, tolerance: float) -> None:
    b = build_bench(name, dtype)
    waves = [(b.program.waves[0], b.given), *((wave, b.buffer) for wave in b.program.waves[1:][-1:])]
    for wave, x in waves:
        flat = torch.zeros(b.program.size, device="cuda")
        parts = taps.shares(wave.first, x[0].numel() // x.shape[-1], x.shape[-1])
        sums = torch.zeros(len(parts), *x.shape[1:], device="cuda")
        errors = [
            b.compare("taps", taps.convolve_reference, [x, b.weights, b.buffer, b.partial, wave.first], [2, 3]),
            b.compare("taps", taps.input_gradient_reference, [b.gradient, b.weights, sums, parts], [2]),
            b.compare("taps", taps.weight_gradient_reference, [x, b.gradient, flat, wave.first], [2]),
        ]
        if wave.second:
            again = [b.gradient, b.weights, b.buffer, b.gradient, b.partial, wave.second]
            errors += [
                b.compare("taps", taps.masked_input_gradient_reference, again, [3, 4]),
                b.compare("taps", taps.weight_gradient_reference, [b.buffer, b.gradient, flat, wave.second], [2]),
            ]
        assert max(errors) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_norms_and_mixes_equal_their_twins(name: str, dtype: torch.dtype, tolerance: float) -> None:
    b = build_bench(name, dtype)
    wave = b.program.waves[0]
    errors = [
        b.compare("norm", norm.finish_moments_reference, [b.partial, b.rows, b.moments, wave.measured, 1e-5], [2])
    ]
    in_place = [planes for planes in (wave.inner, *b.program.finished) if planes]
    for by_batch in (True, False):
        for planes in in_place:
            inner = [b.partial, b.buffer, b.gradient, b.moments, planes]
            errors.append(b.compare("norm", norm.normalise_gradient_reference, inner, [2], by_batch=by_batch))
        for (j, terms), factors in itertools.product(enumerate(b.program.terms), (None, b.factors)):
            node = b.program.inputs + j
            both = [b.buffer, b.gradient, b.moments, b.mix, factors, torch.zeros_like(b.mix), node, terms]
            errors.append(b.compare("norm", norm.combine_gradient_reference, both, [1, 5], (5,), by_batch=by_batch))
            one = [b.buffer, b.moments, b.mix, factors, node, terms]
            errors.append(b.compare("norm", norm.combine_reference, one, [0]))
    for planes in in_place:
        summed = [b.buffer, b.gradient, b.partial, planes]
        assert b.compare("norm", norm.gradient_sums_reference, summed, [2]) < 1e-5, (
            "sums are float32 whatever is summed"
        )
        errors.append(b.compare("norm", norm.normalise_reference, [b.buffer, b.moments, planes], [0]))
    assert max(errors) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_pools_equal_their_twins(name: str, dtype: torch.dtype, tolerance: float) -> None:
    b = build_bench(name, dtype)
    wave, x = b.program.waves[0], b.given
    assert b.compare("pool", pool.pool_reference, [x, b.buffer, b.winners, b.partial, wave.pools], [1, 2]) < tolerance
    pool.pool(x, b.buffer.clone(), b.winners, None, wave.pools)
    parts = torch.randn(3, *x.shape[1:], device="cuda")
    leaving = [
        pool.Leaving(source, 0, 3, identities, next((p for p in wave.pools if p.source == source), None), adds=True)
        for source, identities in zip(wave.sources, wave.identities, strict=True)
    ]
    for factors in (None, b.factors):
        args = [x, parts, b.gradient, torch.randn_like(x), b.mix, factors, b.winners, leaving]
        assert b.compare("pool", pool.gather_gradient_reference, args, [3]) < tolerance


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("space", "number", "channels", "size"), CASES)
def test_a_fused_cell_equals_its_modules(
    space: str, number: int, channels: int, size: tuple[int, int], training: bool
) -> None:
    cell = build_cell(space, number, channels=channels).train(training)
    found = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        own = copy.deepcopy(cell).to(device, dtype)
        states, weights = random_inputs(own, size, 6 if size[0] < 32 else 2, torch.float32)
        inputs = [t.to(device, dtype).requires_grad_() for t in (*states, weights)]
        nodes = own(inputs[:-1], OneSite(inputs[-1]), 0)[own.inputs :]
        found.append(outcome(own, nodes, inputs))
    mine, theirs = found
    assert mine.keys() == theirs.keys()
    worst = max((relative(mine[name], theirs[name]), name) for name in theirs)
    assert worst[0] < 1e-4, worst


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("space", "number", "channels", "size"), CASES)
def test_in_bfloat16_a_fused_cell_errs_as_its_modules_do(
    space: str, number: int, channels: int, size: tuple[int, int], training: bool
) -> None:
    cell = build_cell(space, number, channels=channels).train(training)
    require_rounding_only(*short_outcomes(cell, size, 6 if size[0] < 32 else 2, "cuda"))


def test_a_fused_cell_can_be_recorded() -> None:
    cell = build_cell("darts", channels=16).cuda()
    states, weights = random_inputs(cell, (8, 8), 4, torch.float32)
    states, weights = [s.cuda() for s in states], weights.cuda().requires_grad_()

    def step() -> list[Tensor]:
        nodes = cell(states, OneSite(weights), 0)
        return [nodes[-1].detach(), *torch.autograd.grad(nodes[-1].square().sum(), [weights, *cell.parameters()][:9])]

    expected = step()
    for a, b in zip(replayed(step), expected, strict=True):
        torch.testing.assert_close(a, b)
