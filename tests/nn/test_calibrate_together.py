"""Calibrations that run together equal their modules: values, gradients, running statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from softcell.nn import calibrate, stack
from softcell.nn.calibrate import (
    LARGEST_ON_CPU,
    Calibration,
    ChannelAttention,
    DynamicKernel,
    SpatialAttention,
    family,
    grouping_calibrations_pays,
    run_calibrations,
)
from softcell.nn.norm import BatchNorm2d, updates_together
from softcell.nn.stack import flat, vectors
from tests.helpers.kernel_runs import INTERPRETED, without_tf32

KINDS = {
    "channel": lambda c, stride, affine: ChannelAttention(c),
    "spatial": lambda c, stride, affine: SpatialAttention(c, stride, affine=affine),
    "3x3": lambda c, stride, affine: DynamicKernel(c, 3, affine=affine),
    "5x5": lambda c, stride, affine: DynamicKernel(c, 5, affine=affine),
    "dilated 5x5": lambda c, stride, affine: DynamicKernel(c, 5, 2, affine=affine),
    "other reduction": lambda c, stride, affine: DynamicKernel(c, 3, reduction=2, affine=affine),
}
SETS: dict[str, tuple[str, ...]] = {
    "all, thrice": tuple(KINDS) * 3,
    "paper": ("spatial", "channel", "3x3", "5x5"),
    "uneven": ("5x5", "channel", "3x3", "5x5", "channel", "spatial", "5x5"),
    "kernels": ("3x3", "3x3"),
    "attentions": ("spatial", "spatial", "channel"),
    "one of each attention": ("channel", "spatial"),
}


def made(names: Sequence[str], channels: int, stride: int = 1, *, affine: bool = False) -> list[Calibration]:
    torch.manual_seed(0)
    modules = [KINDS[name](channels, stride, affine).double() for name in names]
    for module in modules:
        for norm in (part for part in module.modules() if isinstance(part, nn.BatchNorm2d)):
            assert norm.running_mean is not None and norm.running_var is not None
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            if affine:
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)
    return modules


def image(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def outputs_of(modules: Sequence[Calibration], x: Tensor, together: bool) -> list[Tensor]:
    if not together:
        return [module(x) for module in modules]
    found = run_calibrations(modules, x)
    assert len(found) == len(modules)
    return [found[id(module)] for module in modules]


def outcome(modules: Sequence[Calibration], x: Tensor, together: bool) -> list[Tensor]:
    """Outputs, gradients of inputs and parameters, once and twice, and buffers."""
    x = x.clone().requires_grad_()
    outputs = outputs_of(modules, x, together)
    # Not a function of sums: taps of a kernel sum to 1.
    loss = sum(((i + 1) * (3 * y).sin()).sum() for i, y in enumerate(outputs))
    assert isinstance(loss, Tensor)
    wanted = [x, *(p for module in modules for p in module.parameters())]
    plain = torch.autograd.grad(loss, wanted, retain_graph=True)
    first = torch.autograd.grad(loss, wanted, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
    return [*outputs, *plain, *first, *second, *(b.clone() for module in modules for b in module.buffers())]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [3, 33])
@pytest.mark.parametrize("names", list(SETS))
def test_values_gradients_and_statistics_match_the_modules(
    names: str, channels: int, stride: int, affine: bool, training: bool
) -> None:
    layout = torch.channels_last if channels == 16 else torch.contiguous_format
    x = image(2, channels, 5, 6).contiguous(memory_format=layout)
    expected, found = (
        outcome([m.train(training) for m in made(SETS[names], channels, stride, affine=affine)], x, together)
        for together in (False, True)
    )
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("names", list(SETS))
def test_kernels_made_as_on_a_gpu_match_the_modules(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def fits(x: Tensor, compressed: Tensor, taps: tuple[int, ...]) -> bool:
        asked.append(taps)
        return True  # so that the twin of the kernels runs

    monkeypatch.setattr(calibrate, "fits", fits)
    x = image(2, 33, 5, 6)
    expected, found = (outcome(made(SETS[names], 33, affine=True), x, together) for together in (False, True))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)
    # Kernels that are compressed to different widths are made plainly.
    sizes = sorted(25 if "5x5" in name else 9 for name in SETS[names] if "x" in name)
    assert [sorted(own) for own in asked] == ([] if names == "all, thrice" or not sizes else [sizes])


@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("names", list(SETS))
def test_norms_as_on_a_gpu_match_the_modules(names: str, affine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several widths share one norm; running statistics are updated at the end of a pass."""
    monkeypatch.setattr(stack, "runs_triton", lambda x: True)  # the twin of the kernels runs
    x, results = image(2, 33, 5, 6), []
    for together in (False, True):
        modules = made(SETS[names], 33, affine=affine)
        with updates_together():
            found = outcome(modules, x, together)
        buffers = [buffer for module in modules for buffer in module.buffers()]
        results.append([*found[: len(found) - len(buffers)], *buffers])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_gradient_of_a_product_is_added_to_that_of_its_rows(dtype: torch.dtype) -> None:
    x, weight = image(2, 6, 4).to(dtype).requires_grad_(), image(3, 4).to(dtype).requires_grad_()
    results = []
    for entered in (calibrate._Entered.apply, lambda x, weight: (x, x @ weight.t())):
        rows, y = entered(x * 1, weight * 1)
        loss = (rows.square() * image(2, 6, 4).to(dtype)).sum() + y.sin().sum()
        plain = torch.autograd.grad(loss, (x, weight), retain_graph=True)
        first = torch.autograd.grad(loss, (x, weight), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight))
        results.append([rows, y, *plain, *first, *second])
    for a, b in zip(*results, strict=True):
        tolerance = 1e-10 if dtype == torch.float64 else 5e-2
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max()))


def test_norms_in_another_mode_go_their_own_way() -> None:
    x, names = image(3, 16, 4, 4), ("3x3", "spatial", "5x5", "3x3", "spatial")
    results = []
    for together in (False, True):
        modules = made(names, 16)
        modules[0].eval()
        modules[4].eval()
        results.append(outcome(modules, x, together))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)


def test_gradients_have_the_layout_of_their_parameters_in_separate_memory() -> None:
    modules = [m.to(memory_format=torch.channels_last) for m in made(SETS["uneven"], 33)]  # type: ignore[call-overload]
    parameters = [p for module in modules for p in module.parameters()]
    outputs = outputs_of(modules, image(2, 33, 4, 4), True)
    gradients = torch.autograd.grad(sum(y.square().sum() for y in outputs), parameters)
    assert len({g.untyped_storage().data_ptr() for g in gradients}) == len(parameters)
    assert [g.stride() for g in gradients] == [p.stride() for p in parameters]


def test_a_flat_vector_takes_gradients_of_any_strides() -> None:
    weights = [image(2, 3, 1, 1).requires_grad_(), image(1, 2, 3, 3).requires_grad_()]
    gradients = torch.autograd.grad(flat(weights).sum(), weights)  # an expanded one
    for g, w in zip(gradients, weights, strict=True):
        torch.testing.assert_close(g, torch.ones_like(w))


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_lists_of_weights_are_vectors_of_their_own(dtype: torch.dtype | None) -> None:
    """Sizes that are not multiples of eight come last; what is not read gets no gradient."""
    shapes = [[(1, 3, 3, 3)], [(2, 4, 1, 1), (6, 4, 1, 1)], [(2, 8, 3, 3)]]
    lists = [[image(*shape).requires_grad_() for shape in own] for own in shapes]
    lists[1][0] = lists[1][0].detach().to(memory_format=torch.channels_last).requires_grad_()
    made = vectors(lists, dtype)
    for one, own in zip(made, lists, strict=True):
        torch.testing.assert_close(one, torch.cat([flat([w]) for w in own]).to(one.dtype))
        assert one.dtype == (dtype or torch.float64)
    assert [one.storage_offset() for one in made] == [32 + 144, 0, 32]
    wanted = [w for own in lists for w in own]
    loss = made[1].pow(3).sum() + made[2].pow(3).sum()
    first = torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True)
    assert first[0] is None
    known = [g for g in first if g is not None]
    assert len({g.untyped_storage().data_ptr() for g in known}) == 3
    for g, w in zip(known, wanted[1:], strict=True):
        torch.testing.assert_close(g, 3 * w.detach().square(), rtol=1e-5, atol=1e-5)
        assert g.stride() == w.stride()
    again = torch.autograd.grad(loss, wanted[1:], create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in again), wanted[1:])
    for g, w in zip(second, wanted[1:], strict=True):
        torch.testing.assert_close(g, 36 * w.detach().pow(3), rtol=1e-5, atol=1e-5)


class Counter(TorchDispatchMode):
    """Counts operations that are no views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        self.count += not views and "view" not in func._schema.name and "empty" not in func._schema.name
        return func(*args, **(kwargs or {}))


def test_four_edges_launch_less_than_one_and_a_half_edges_would() -> None:
    modules, x = made(SETS["paper"] * 4, 16), image(2, 16, 8, 8).contiguous(memory_format=torch.channels_last)
    counts = []
    for own, together in ((modules, True), (modules[:4], False)):
        given = x.clone().requires_grad_()
        with Counter() as counter:
            outputs = outputs_of(own, given, together)
            parameters = [p for module in own for p in module.parameters()]
            torch.autograd.grad(outputs, [given, *parameters], [torch.ones_like(y) for y in outputs])
        counts.append(counter.count - len(outputs))  # without the ones
    assert counts[0] < 1.5 * counts[1], counts


class Own(ChannelAttention):
    """A user's own: its forward pass may be anything."""


class Doubled(BatchNorm2d):
    """An unknown norm."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_unknown_modules_and_modules_with_hooks_run_separately() -> None:
    x = image(2, 4, 4, 4)
    heard: list[str] = []
    modules = made(("3x3", "3x3", "spatial", "channel", "channel"), 4)
    hooked: Any = modules[0]
    hooked.score.register_forward_hook(lambda *_: heard.append("score"))
    averaging: Any = modules[2]
    averaging.norm.momentum = None
    foreign: Any = made(("3x3",), 4)[0]
    foreign.norm = Doubled(1).double()
    alone = [hooked, averaging, foreign, Own(4).double(), nn.Identity(), None]
    assert all(family(module) is None for module in alone)
    found = run_calibrations([*modules, *alone], x)
    assert found.keys() == {id(modules[i]) for i in (1, 3, 4)}
    assert not heard
    assert run_calibrations([modules[1], hooked, None], x) == {}, "one module alone is not grouped"
    assert len(run_calibrations([modules[3], modules[3], modules[4]], x)) == 2, "shared by two edges"


def test_sizes_at_which_a_cpu_runs_them_together() -> None:
    assert grouping_calibrations_pays(torch.zeros(LARGEST_ON_CPU))
    assert not grouping_calibrations_pays(torch.zeros(LARGEST_ON_CPU + 1))
    assert grouping_calibrations_pays(torch.zeros(LARGEST_ON_CPU + 1, device="meta")), "elsewhere a launch costs more"


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_under_autocast_they_err_no_more_than_the_modules_do(given: torch.dtype) -> None:
    x, names = image(4, 16, 8, 8), SETS["uneven"]

    def run(together: bool, dtype: torch.dtype, autocasts: bool) -> tuple[list[Tensor], list[Tensor]]:
        modules = [m.to(dtype) for m in made(names, 16)]
        own = x.to(given).to(dtype if not autocasts else given).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts):
            outputs = outputs_of(modules, own, together)
        loss = sum((3 * y.float()).sin().sum() for y in outputs)
        assert isinstance(loss, Tensor)
        parameters = [p for module in modules for p in module.parameters()]
        found = torch.autograd.grad(loss, [own, *parameters])
        return outputs, [*found, *(b for module in modules for b in module.buffers())]

    exact, modules, stacked = (
        run(*how) for how in ((False, torch.float64, False), (False, torch.float32, True), (True, torch.float32, True))
    )
    if not INTERPRETED:  # kernels return channel attentions in float32
        assert [y.dtype for y in stacked[0]] == [y.dtype for y in modules[0]]
    for part in (0, 1):
        for true, a, b in zip(exact[part], modules[part], stacked[part], strict=True):
            scale = true.double().norm().clamp(min=1e-6)
            theirs, ours = ((y.double() - true.double()).norm() / scale for y in (a, b))
            assert ours < 2 * theirs + 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none")
@pytest.mark.parametrize("channels", [16, 33])
@pytest.mark.parametrize("stride", [1, 2])
@without_tf32()
def test_on_a_gpu_they_are_what_modules_are_in_float64(channels: int, stride: int) -> None:
    x = image(4, channels, 9, 8)
    expected = outcome(made(SETS["uneven"], channels, stride), x, False)

    def on_the_device(together: bool) -> list[Tensor]:
        modules: list[Any] = [
            m.to(device="cuda", dtype=torch.float32, memory_format=torch.channels_last)  # type: ignore[call-overload]
            for m in made(SETS["uneven"], channels, stride)
        ]
        return outcome(modules, x.to("cuda", torch.float32, memory_format=torch.channels_last), together)

    # Gradients of the squeezing weights are small differences of large terms: float32 itself errs by 1e-3 there.
    for true, a, b in zip(expected, on_the_device(False), on_the_device(True), strict=True):
        scale = true.double().norm().clamp(min=1e-3)
        theirs, ours = ((y.cpu().double() - true).norm() / scale for y in (a, b))
        assert ours < 3 * theirs + 5e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none")
def test_on_a_gpu_they_can_be_recorded_and_never_wait() -> None:
    modules: list[Any] = [m.to("cuda", torch.float32) for m in made(SETS["uneven"], 16)]
    x = image(4, 16, 8, 8).to("cuda", torch.float32)
    parameters = [p for module in modules for p in module.parameters()]

    def step() -> list[Tensor]:
        outputs = outputs_of(modules, x, True)
        return [*outputs, *torch.autograd.grad(sum(y.square().sum() for y in outputs), parameters)]

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    x.copy_(image(4, 16, 8, 8).flip(0))
    graph.replay()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(recorded, step())
