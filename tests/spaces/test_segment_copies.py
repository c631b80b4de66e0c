"""What runs around the programs of fused cells: values, gradients, and how often a map is copied.

The kernels are replaced by their twin (`tests.helpers.twin_kernels`), so that this code runs on a CPU, in float64.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.launches import _Counter, as_on_a_gpu
from benchmarks.training_launches import launches
from softcell.arch import Genotype, notation, sample
from softcell.kernels.derived import derived_cell, derived_cell_reference, derived_nodes
from softcell.nn.calibrate import ChannelAttention, SpatialAttention, calibrated
from softcell.nn.candidates import Spec, get_candidate
from softcell.nn.conv import concatenated
from softcell.nn.stack import flat
from softcell.nn.stochastic import DropPath, fixed_noise
from softcell.spaces import Network, build_space
from softcell.spaces._derived_plan import DerivedPass, Pick, plan_derived
from softcell.spaces.execution import fused_networks, modules_only
from tests.helpers.picked_cells import require_close
from tests.helpers.segmented_cells import CELLS, Segmented, factors_of, inputs_of, outcome
from tests.helpers.twin_kernels import use_twin_kernels
from tests.reference.published_genotypes import DARTS_V2


@pytest.fixture(autouse=True)
def twin_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_twin_kernels(monkeypatch)


@pytest.fixture
def nan_memory() -> Any:
    """New tensors hold NaN, so that a value which nothing writes is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", list(CELLS))
def test_cells_equal_their_modules(name: str, stride: int, training: bool, nan_memory: None) -> None:
    cell = Segmented(name, 4, stride=stride).train(training)
    states, factors = inputs_of(cell, 3, (6, 5)), factors_of(cell, 3) if training else None
    mine, theirs = (outcome(cell, states, factors, fused=fused) for fused in (True, False))
    require_close(mine, theirs, 1e-9)


@pytest.mark.parametrize("training", [True, False])
def test_norms_without_weights_have_running_statistics(training: bool, nan_memory: None) -> None:
    """A part of pools whose norms have no scale and shift has no parameters at all."""
    pool = get_candidate("avg_pool_3x3").build(Spec(4, affine=False, pool_norm=True)).double().train(training)
    norm = pool[1]  # type: ignore[index]
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    x, theirs = torch.randn(3, 4, 6, 5).double(), copy.deepcopy(pool)
    cell = plan_derived([None], [Pick(0, 1, pool)], 1, 4, 1, DropPath(0.0))
    shared = DerivedPass([cell], x)
    [node] = shared.run_nodes(cell, [x], None)
    shared.finish()
    torch.testing.assert_close(node, theirs(x))
    for a, b in zip(pool.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_training_on_a_single_value_per_channel_is_an_error() -> None:
    """As in PyTorch, whose norms would divide by a variance of 0; in evaluation mode it is not."""
    pool = get_candidate("avg_pool_3x3").build(Spec(4, pool_norm=True)).double()
    cell, x = plan_derived([None], [Pick(0, 1, pool)], 1, 4, 1, DropPath(0.0)), torch.randn(1, 4, 1, 1).double()
    for run in (lambda own: own.run(cell, [x]), lambda own: own.run_nodes(cell, [x], None)):
        pool.train()
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            run(DerivedPass([cell], x))
        pool.eval()
        torch.testing.assert_close(run(DerivedPass([cell], x))[0], pool(x))


def network_of(
    space: str, seed: int, *, auxiliary: bool = True, genotype: Genotype | None = None, **settings: Any
) -> Network:
    torch.manual_seed(seed)
    if genotype is None and space == "darts":
        genotype = notation.parse(DARTS_V2)
    built = build_space(space, {"cells": 4, "channels": 8, **settings})
    genotype = sample(built.layout(), seed) if genotype is None else genotype
    network = built.network(genotype, (3, 16, 15), 10, auxiliary=auxiliary).double()
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return network


def results(network: Network, images: Tensor, *, fused: bool, reads: str) -> dict[str, Tensor | None]:
    """reads: what the loss reads."""
    network.zero_grad()
    with fixed_noise(), fused_networks() if fused else modules_only():
        logits, auxiliary = network.forward_with_auxiliary(images)
    loss = logits.new_zeros(())
    if reads != "auxiliary":
        loss = loss + logits.square().mean()
    if reads != "logits":
        assert auxiliary is not None
        loss = loss + auxiliary.square().mean()
    loss.backward()
    found = {"logits": logits.detach(), **dict(network.named_buffers())}
    return found | {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in network.named_parameters()}


@pytest.mark.parametrize("reads", ["both", "logits", "auxiliary"])
@pytest.mark.parametrize(("space", "seed"), [("nos", 0), ("nos", 3), ("s4", 1), ("darts", 0)])
def test_networks_equal_their_modules(space: str, seed: int, reads: str, nan_memory: None) -> None:
    """If only the tower is read, the last cells' outputs get no gradient."""
    fused = network_of(space, seed).train()
    modules, images = copy.deepcopy(fused), torch.randn(4, 3, 16, 15).double()
    mine = results(fused, images, fused=True, reads=reads)
    require_close(mine, results(modules, images, fused=False, reads=reads), 1e-8)


@pytest.mark.parametrize("outputs", [(5, 2, 3, 4), (4, 2)])
def test_cells_may_return_some_nodes_in_any_order(outputs: tuple[int, ...], nan_memory: None) -> None:
    genotype = notation.parse(DARTS_V2)
    cells = {name: replace(cell, output=outputs) for name, cell in genotype.cells.items()}
    fused = network_of("darts", 0, genotype=replace(genotype, cells=cells)).train()
    assert all(fused.has_fused_cells())
    modules, images = copy.deepcopy(fused), torch.randn(4, 3, 16, 15).double()
    mine = results(fused, images, fused=True, reads="both")
    require_close(mine, results(modules, images, fused=False, reads="both"), 1e-8)


def test_nodes_of_a_part_have_no_gaps() -> None:
    cell = Segmented("a pair at each tier", 4).train()
    program, states = cell.form().programs[0], inputs_of(cell, 3, (6, 5))
    nodes, _ = derived_nodes(program.program, torch.float64, program.flat_parameters(), None, None, *states)
    assert len(nodes) > 1
    assert all(node.is_contiguous(memory_format=torch.channels_last) for node in nodes)


def counted(space: str) -> tuple[Counter[str], Counter[str]]:
    """Operations of a training step by name, and those of them on maps with gaps."""
    torch.manual_seed(0)
    genotype = notation.parse(DARTS_V2) if space == "darts" else None
    built = build_space(space, {"cells": 4, "channels": 16})
    genotype = sample(built.layout(), 0) if genotype is None else genotype
    found = launches(built.network(genotype, (3, 32, 32), 10, auxiliary=True), 32, fused=True)
    every, gaps = Counter[str](), Counter[str]()
    for total, own in zip((every, gaps), found, strict=True):
        for name, count in own.items():
            total[name.removeprefix("aten.").split(".")[0]] += count
    return every, +gaps


def test_copies_of_a_step_of_nos() -> None:
    """Two normal cells and two reduction cells. A calibration that reads a node of a program copies nothing."""
    every, gaps = counted("nos")
    # Each cell's gradient is divided into its nodes by one copy.
    assert gaps == {"add": 7, "copy_": 4, "div": 1, "clone": 1}
    assert (every["add"], every["clone"], every["copy_"], every["_foreach_copy_"]) == (37, 8, 6, 32)
    assert every["_to_copy"] == 48, "gradients of weights of calibrations are converted while they are copied"


def test_copies_of_a_step_of_darts() -> None:
    """Outputs of cells have two readers, but for the last one; kernels add their gradients."""
    every, gaps = counted("darts")
    assert gaps == {"clone": 1, "div": 1}, "the gradient of the mean over pixels"
    assert (every["add"], every["copy_"], every["_foreach_copy_"]) == (2, 2, 1)


@pytest.fixture
def cell() -> tuple[Any, list[Tensor], Tensor]:
    """A program of a whole cell, its inputs and its parameters, which need gradients."""
    own = Segmented("only features", 4).train()
    states = [x.requires_grad_() for x in inputs_of(own, 3, (6, 5))]
    program = own.form().programs[0]
    return program.program, states, program.flat_parameters().detach().requires_grad_()


@pytest.mark.parametrize("arrived", [(0,), (2,), (0, 1), (0, 1, 2)])
def test_gradients_of_readers_are_added(arrived: tuple[int, ...], cell: Any, nan_memory: None) -> None:
    """arrived: which of three readers give a gradient; of any layout."""
    program, states, parameters = cell
    *outs, _ = derived_cell(program, torch.float64, parameters, None, None, *states, readers=3)
    [own, _] = derived_cell_reference(program, torch.float64, parameters, None, None, *states)
    assert len({out.data_ptr() for out in outs}) == 1, "the same memory"
    pulls = [torch.randn_like(own), torch.randn_like(own).contiguous(), torch.randn_like(own)[:1].expand_as(own)]
    given = [*states, parameters]
    mine = torch.autograd.grad([outs[i] for i in arrived], given, [pulls[i] for i in arrived])
    theirs = torch.autograd.grad(own, given, sum(pulls[i] for i in arrived))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_cell_without_a_gradient_passes_none_on(cell: Any) -> None:
    program, states, parameters = cell
    [out, _] = derived_cell(program, torch.float64, parameters, None, None, *states)

    class Ended(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> None:
            return None

    given = [*states, parameters]
    ended = Ended.apply(out)  # type: ignore[no-untyped-call]
    assert torch.autograd.grad(ended, given, allow_unused=True) == (None,) * len(given)


@pytest.mark.parametrize("arrived", [(0,), (1,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("c", "dtype"),
    [(3, torch.float64), (4, torch.float32), (3, torch.float32), (4, torch.bfloat16), (6, torch.bfloat16)],
)
def test_concatenated_maps_get_the_sum_of_the_gradients_of_readers(
    c: int, dtype: torch.dtype, arrived: tuple[int, ...], again: bool
) -> None:
    """again: with second derivatives. One map is frozen. Pixels of a map are whole words of 64 bits or not."""
    maps = [torch.randn(2, c, 4, 5, dtype=dtype).to(memory_format=torch.channels_last) for _ in range(3)]
    wanted = [x.requires_grad_() for x in maps[:2]]
    outs = concatenated(maps, 3)
    plain = torch.cat(maps, 1)
    assert all(torch.equal(out, plain) and out.is_contiguous(memory_format=torch.channels_last) for out in outs)
    pulls = [torch.randn_like(plain).requires_grad_(), torch.randn(plain.shape, dtype=dtype)]
    pulls.append(torch.randn(3 * c, 1, 1, dtype=dtype).expand_as(plain))
    options: dict[str, Any] = {"create_graph": again}
    mine = torch.autograd.grad([outs[i] for i in arrived], wanted, [pulls[i] for i in arrived], **options)
    theirs = torch.autograd.grad(plain, wanted, sum(pulls[i] for i in arrived), **options)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
        assert again or a.is_contiguous(memory_format=torch.channels_last)
    if again and 0 in arrived:
        (twice,) = torch.autograd.grad(mine[0].square().sum(), pulls[0])
        torch.testing.assert_close(twice[:, :c], 2 * mine[0])


@pytest.mark.parametrize(
    "of",
    [
        lambda x: x,
        lambda x: x.contiguous(),
        lambda x: torch.cat([x, x[:, :1]], 1).to(memory_format=torch.channels_last)[:, :4],
        lambda x: torch.cat([x, x], 1).to(memory_format=torch.channels_last)[:, 1:5],
        lambda x: torch.cat([x, x], 1).to(memory_format=torch.channels_last)[:, 2:6],
        lambda x: x[:, :3],
        lambda x: x[:, :, ::2, ::2],
        lambda x: x.contiguous()[..., ::2],
        lambda x: x[:1].expand_as(x),
    ],
    ids=[
        "dense",
        "channels first",
        "odd rows",
        "odd offset",
        "even offset",
        "odd width",
        "strided",
        "strided rows",
        "repeated",
    ],
)
def test_concatenated_maps_and_their_gradients_may_have_any_layout(of: Callable[[Tensor], Tensor]) -> None:
    """Float32 maps are copied as words of two channels only where all rows begin at a whole word."""
    maps = [of(torch.randn(2, 4, 4, 6).to(memory_format=torch.channels_last)).requires_grad_() for _ in range(2)]
    [out], plain = concatenated(maps, 1), torch.cat(maps, 1)
    assert torch.equal(out, plain) and out.is_contiguous(memory_format=torch.channels_last)
    pull = of(torch.randn(2, 4, 4, 6).to(memory_format=torch.channels_last)).repeat_interleave(2, 1)
    for own in (pull, pull.to(memory_format=torch.channels_last), torch.cat([pull, pull], 1)[:, 1 : 1 + len(pull[0])]):
        for a, b in zip(torch.autograd.grad(out, maps, own, retain_graph=True), own.chunk(2, 1), strict=True):
            assert torch.equal(a, b) and a.is_contiguous(memory_format=torch.channels_last)


def test_concatenated_maps_may_have_several_dtypes() -> None:
    maps = [torch.randn(2, 4, 3, 2), torch.randn(2, 4, 3, 2).bfloat16(), torch.randn(2, 4, 3, 2).double()]
    given = [x.to(memory_format=torch.channels_last).requires_grad_() for x in maps]
    [out], plain = concatenated(given, 1), torch.cat(given, 1)
    assert torch.equal(out, plain)
    pull = torch.randn_like(plain)
    for a, b in zip(torch.autograd.grad(out, given, pull), torch.autograd.grad(plain, given, pull), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


def test_concatenated_maps_without_gradients_are_one_tensor() -> None:
    maps = [torch.randn(2, 3, 4, 5).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        first, second = concatenated(maps, 2)
    assert first is second and not first.requires_grad
    assert not concatenated([x.detach() for x in maps], 1)[0].requires_grad


@pytest.mark.parametrize(("channel", "spatial", "backward"), [(True, False, 3), (False, True, 1), (True, True, 3)])
def test_attentions_alone_are_applied_in_one_pass(channel: bool, spatial: bool, backward: int) -> None:
    """backward: launches; the gradient of a channel attention takes one more, and one for the sum of its parts."""
    modules = [ChannelAttention(4)] * channel + [SpatialAttention(4)] * spatial
    shapes = [(3, 4, 1, 1)] * channel + [(3, 1, 6, 5)] * spatial
    given = [torch.randn(3, 4, 6, 5), *map(torch.randn, shapes)]
    given = [x.double().to(memory_format=torch.channels_last).requires_grad_() for x in given]
    pull, counter = torch.randn(3, 4, 6, 5).double(), _Counter()

    def run(*, at_once: bool) -> list[Tensor]:
        y = calibrated(given[0], list(zip(modules, given[1:], strict=True)), at_once=at_once)
        return [y, *torch.autograd.grad(y, given, pull)]

    with as_on_a_gpu(counter, together=True):
        mine = run(at_once=True)
        assert counter.found == {"calibrate": 1, "calibrate_gradient": backward}
        theirs = run(at_once=False)
        assert counter.found.total() == 1 + backward, "searches are as before"
        low = given[0].bfloat16()
        wide = calibrated(low, list(zip(modules, given[1:], strict=True)), at_once=True)
        assert wide.dtype == torch.float64 and counter.found.total() == 1 + backward, "more exact than the map"
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("again", [False, True])
def test_gradients_of_flat_weights_are_converted_back(again: bool) -> None:
    """again: with second derivatives."""
    weights = [torch.randn(3, 2, 3, 3).to(memory_format=torch.channels_last), torch.randn(4, 3, 1, 1)]
    weights = [w.requires_grad_() for w in weights]
    found = []
    for vector in (flat(weights, torch.bfloat16), flat(weights).bfloat16()):
        gradients = torch.autograd.grad(vector.float().pow(3).sum(), weights, create_graph=again)
        if again:
            gradients += torch.autograd.grad(sum(x.square().sum() for x in gradients), weights)  # type: ignore[arg-type]
        found.append((vector, *gradients))
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


@pytest.mark.parametrize("space", ["nos", "darts"])
def test_a_step_does_not_depend_on_values(space: str) -> None:
    """A step is captured as a CUDA graph: the host must read no tensor, and shapes must not depend on one."""
    every, _ = counted(space)
    assert not every.keys() & {"_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero", "unique"}
