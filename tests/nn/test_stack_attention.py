"""Blocks of attention run together equal separate ones: values, gradients, running statistics."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import WeightMix
from softcell.kernels.local import in_lines
from softcell.nn import stack
from softcell.nn.attention import AttentionBlock, LocalAttention
from softcell.nn.candidates import Spec, get_candidate
from softcell.nn.stack import block_key, grouping_blocks_pays, run_blocks, run_summed
from softcell.spaces import build_space, cell, execution
from softcell.spaces.execution import modules_only
from softcell.spaces.fullattention import CANDIDATES
from tests.helpers.kernel_runs import DEVICE, MARKS


def made(spec: Spec, names: tuple[str, ...] = CANDIDATES) -> list[nn.Module]:
    """In float64, every number random: fresh norms hide a forgotten scale, shift or running value."""
    torch.manual_seed(0)
    modules = [get_candidate(name).build(spec).double() for name in names]
    for module in modules:
        for norm in (part for part in module.modules() if isinstance(part, nn.BatchNorm2d)):
            given: Any = norm
            given.running_mean.normal_()
            given.running_var.uniform_(0.5, 2)
            if norm.affine:
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)
    return modules


def outcome(modules: list[nn.Module], x: Tensor, *, together: bool) -> list[Tensor]:
    x = x.clone().requires_grad_()
    found = run_blocks(modules, x) if together else {id(module): module(x) for module in modules}
    assert set(found) == {id(module) for module in modules}
    outputs = [found[id(module)] for module in modules]
    loss = sum(((i + 1) * y.sin()).sum() for i, y in enumerate(outputs))
    assert isinstance(loss, Tensor)
    parameters = [p for module in modules for p in module.parameters()]
    twice = len(modules) < len(CANDIDATES)  # torch's fused attention has no second derivatives
    first = torch.autograd.grad(loss, [x, *parameters], create_graph=twice)
    second: tuple[Tensor, ...] = ()
    if twice:
        second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters, materialize_grads=True)
    buffers = [b.clone() for module in modules for b in module.buffers()]
    return [*outputs, *first, *second, *buffers]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "spec",
    [
        Spec(16, 1, affine=True, channels_in=16),
        Spec(32, 2, affine=False, channels_in=16),
        Spec(16, 2, affine=False, channels_in=16),
    ],
    ids=["same", "widens", "shrinks"],
)
@pytest.mark.parametrize("names", [CANDIDATES, ("local_sa_k3_h8", "local_sa_k5_h4")], ids=["all", "two"])
def test_values_gradients_and_statistics_match_the_blocks(names: tuple[str, ...], spec: Spec, training: bool) -> None:
    x = torch.randn(2, 16, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x.to(memory_format=torch.channels_last)
    expected, found = (
        outcome([m.train(training) for m in made(spec, names)], x, together=together) for together in (False, True)
    )
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
@pytest.mark.parametrize("names", [CANDIDATES, CANDIDATES[:3]], ids=["all", "local"])
def test_by_kernels_blocks_match_those_in_float64(
    names: tuple[str, ...], mark: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    spec = Spec(16, 1, affine=True, channels_in=16)
    exact = made(spec, names)
    single = [module.float().to(DEVICE) for module in made(spec, names)]
    x = torch.randn(2, 16, 5, 6, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    launched: list[int] = []
    run = stack.attend_by_lines
    monkeypatch.setattr(stack, "attend_by_lines", lambda *given: launched.append(len(given[2])) or run(*given))  # type: ignore[func-returns-value]
    outputs = []
    for modules, images in ((single, x.float().to(DEVICE)), (exact, x)):
        found = run_blocks(modules, images.requires_grad_())
        y = torch.stack([found[id(module)] for module in modules])
        own = [images, *(p for module in modules for p in module.parameters())]
        running = [b for module in modules for name, b in module.named_buffers() if "running" in name]
        outputs.append([y, *torch.autograd.grad(y.sin().sum(), own), *running])
    assert launched == [sum(name.startswith("local") for name in names)]
    for a, b in zip(*outputs, strict=True):
        assert float((a.double().cpu() - b).norm()) <= 1e-4 * float(b.norm()) + 1e-5


def test_modules_that_differ_or_have_hooks_run_separately() -> None:
    spec = Spec(16, 1, affine=False, channels_in=16)
    one, other = made(spec)[:2]
    assert block_key(None) is None and block_key(nn.Identity()) is None
    assert block_key(one) == block_key(other) is not None
    assert block_key(one) != block_key(made(Spec(32, 2, affine=False, channels_in=16))[0])
    (bare,) = made(Spec(16, 1, affine=False, channels_in=16, norm=False), CANDIDATES[:1])
    assert block_key(bare) is None
    assert isinstance(other, AttentionBlock)
    other.attention.register_forward_hook(lambda *given: None)
    assert block_key(other) is None
    (biased,) = made(spec, CANDIDATES[:1])
    assert isinstance(biased, AttentionBlock) and isinstance(biased.reduce, nn.Sequential)
    biased.reduce[1] = nn.GroupNorm(1, 8)
    assert block_key(biased) is None

    class Louder(LocalAttention):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    (own,) = made(spec, CANDIDATES[:1])
    assert isinstance(own, AttentionBlock)
    own.attention = Louder(8, 3, 4)
    assert block_key(own) is None, "it would not be heard"
    x = torch.randn(1, 16, 3, 3, dtype=torch.float64)
    assert run_blocks([one, other, None], x) == {}
    assert run_summed([one, other, None], x, lambda: pytest.fail("they do not stack")) is None
    assert not grouping_blocks_pays(x), "on a CPU launches cost nothing"


@pytest.mark.parametrize("live", [None, ((0, 2, 6), (1,))])
def test_a_supernet_is_the_same_with_blocks_together(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    space = build_space("fullattention", {"channels": 16, "layers": 2})
    supernet = space.supernet((3, 8, 8), 4).double()
    layout = space.layout()
    weights = {table.name: torch.rand(table.shape, dtype=torch.float64) for table in layout.tables}
    lives = {} if live is None else dict.fromkeys(range(len(layout.sites)), live)
    mix, x = WeightMix(layout, weights, lives), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    plain = supernet.eval()(x, mix)
    ran: list[int] = []
    alike: list[bool] = []

    def run(modules: Any, given: Tensor) -> dict[int, Tensor]:
        found = run_blocks(modules, given)
        ran.append(len(found))
        return found

    def run_as_one(modules: Any, given: Tensor, weights: Any) -> Tensor | None:
        found = run_summed(modules, given, weights)
        alike.append(found is not None)
        return found

    monkeypatch.setattr(execution, "grouping_blocks_pays", lambda x: True)
    monkeypatch.setattr(cell, "run_blocks", run)
    monkeypatch.setattr(cell, "run_summed", run_as_one)
    torch.testing.assert_close(supernet(x, mix), plain, rtol=1e-9, atol=1e-9)
    assert alike == ([True] * 10 if live is None else [True, False] * 5), "a single block runs alone"
    assert ran == [] if live is None else ran == [0] * 5
    monkeypatch.setattr(cell, "run_summed", lambda modules, x, weights: None)
    torch.testing.assert_close(supernet(x, mix), plain, rtol=1e-9, atol=1e-9)
    assert ran == [len(CANDIDATES)] * 10 if live is None else ran == [0] * 5 + [3, 0] * 5
    ran.clear()
    with modules_only():
        supernet(x, mix)
    assert ran == []


def _searched(supernet: nn.Module, images: Tensor, layout: Any) -> dict[str, Tensor]:
    """Outputs, gradients and running statistics of one training pass, and the gradients of the mixing weights."""
    torch.manual_seed(1)
    weights = {
        table.name: torch.rand(table.shape, dtype=torch.float64).to(images).requires_grad_() for table in layout.tables
    }
    y = supernet.train()(images, WeightMix(layout, weights, {}))
    named = {**dict(supernet.named_parameters()), **weights}
    gradients = torch.autograd.grad((y * torch.arange(y.numel()).view(y.shape).to(y).cos()).sum(), list(named.values()))
    running = {name: b.clone() for name, b in supernet.named_buffers() if "running" in name}
    return {"y": y.detach(), **running, **{f"d{n}": g for n, g in zip(named, gradients, strict=True)}}


def _supernets(count: int) -> tuple[list[nn.Module], Any]:
    space = build_space("fullattention", {"channels": 16, "layers": 1})
    torch.manual_seed(0)
    supernet = space.supernet((3, 6, 5), 4).double()
    return [copy.deepcopy(supernet) for _ in range(count)], space.layout()


@pytest.mark.parametrize("summed", [True, False])
def test_in_training_a_supernet_is_the_same_with_blocks_summed(summed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (one, other), layout = _supernets(2)
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    plain = _searched(one, x, layout)
    ran: list[int] = []
    run = stack._run_summed
    monkeypatch.setattr(stack, "_run_summed", lambda *given: ran.append(len(given[0])) or run(*given))  # type: ignore[func-returns-value]
    monkeypatch.setattr(execution, "grouping_blocks_pays", lambda x: True)
    monkeypatch.setattr(stack, "runs_triton", lambda x: summed)  # in float64 kernels run as their twins
    converted, convert = [], stack.flat
    monkeypatch.setattr(stack, "flat", lambda weights, dtype: converted.append(len(weights)) or convert(weights, dtype))  # type: ignore[func-returns-value]
    found = _searched(other, x, layout)
    assert ran == ([len(CANDIDATES)] * 5 if summed else [])
    # Six convolutions per block, and one where the width changes.
    assert converted == [len(CANDIDATES) * (5 * 6 + 2)], "weights of all layers are converted together"
    for name, expected in plain.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
def test_by_kernels_a_supernet_is_as_near_to_float64_as_its_modules(
    mark: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    (one, other, exact), layout = _supernets(3)
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    expected = _searched(exact, x, layout)
    with modules_only():
        plain = _searched(one.float().to(DEVICE), x.float().to(DEVICE), layout)
    monkeypatch.setattr(execution, "grouping_blocks_pays", lambda x: True)
    found = _searched(other.float().to(DEVICE), x.float().to(DEVICE), layout)
    for name, wanted in expected.items():
        size = float(wanted.norm()) + 1e-2
        errors = [float((own[name].cpu().double() - wanted).norm()) / size for own in (found, plain)]
        # Rounding decides about ReLUs near 0: modules in float32 are no nearer to float64.
        assert errors[0] <= max(1e-3, 10 * errors[1]), f"{name}: {errors[0]:.2e}, modules {errors[1]:.2e}"


def test_embeddings_of_several_layers_are_laid_out_together() -> None:
    layers = ((((3, 4), (5, 2)), 8), (((7, 4), (3, 1)), 12))
    sizes = [sum(2 * c * extent for extent, _ in kinds) for kinds, c in layers]
    vector = torch.randn(sum(sizes), dtype=torch.float64, requires_grad=True)
    found = in_lines(vector, layers)
    for lines, part, (kinds, c) in zip(found, torch.split(vector, sizes), layers, strict=True):
        expected = []
        for own, (extent, heads) in zip(part.split([2 * c * k for k, _ in kinds]), kinds, strict=True):
            expected += [one.permute(2, 0, 1).flatten(1) for one in own.view(2, heads, -1, extent)]
        assert torch.equal(lines, torch.cat(expected))
        assert lines.shape[1] == c
    pulls = [torch.randn_like(lines) for lines in found]
    (gradient,) = torch.autograd.grad(found, vector, pulls)
    again = in_lines(gradient, layers)  # the gradient is in the order of the vector
    assert all(torch.equal(a, b) for a, b in zip(again, pulls, strict=True))
