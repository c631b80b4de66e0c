"""Fused NAS-Bench-201 cells on a GPU: in bfloat16 as exact as their modules, and recorded as a step of training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from softcell.arch import notation
from softcell.kernels.backend import has_triton
from softcell.spaces import build_space
from softcell.spaces.execution import fused_networks, modules_only
from tests.helpers.kernel_cells import errors_by_kind, require_rounding_only
from tests.helpers.picked_cells import CELLS, inputs_of, outcome, picked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="needs Triton"),
]
BEST = "|nor_conv_3x3~0|+|nor_conv_3x3~0|nor_conv_3x3~1|+|skip_connect~0|nor_conv_3x3~1|nor_conv_3x3~2|"


@pytest.mark.parametrize(("channels", "size"), [(16, (32, 32)), (32, (16, 16)), (64, (8, 8)), (5, (9, 7))])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", list(CELLS))
def test_in_bfloat16_a_derived_cell_errs_as_its_modules_do(
    name: str, training: bool, channels: int, size: tuple[int, int]
) -> None:
    x, factors = inputs_of(name, channels, 6, size)
    x, dropped = x.bfloat16().double(), factors if training else None
    cell = picked(name, channels, dropped).train(training)
    exact = outcome(cell, x, dropped, fused=False)
    short = [
        outcome(cell, x, dropped, fused=fused, device=device, dtype=torch.bfloat16)
        for fused, device in ((True, "cuda"), (False, "cpu"))
    ]
    kinds = [errors_by_kind(of_learned(found, exact), of_learned(exact, exact), 1) for found in short]
    require_rounding_only(*kinds)


def of_learned(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without tensors that are zero, or are rounding errors of a sum that is zero."""
    return {name: found[name] for name, value in exact.items() if value.double().norm() > 1e-6}


def test_a_recorded_pass_equals_an_eager_one() -> None:
    torch.manual_seed(0)
    built = build_space("nb201", {"cells_per_stage": 1}).network(notation.parse(BEST), (3, 32, 32), 10)
    network = built.cuda().train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    network.use_drop_path(0.0)
    x = torch.randn(8, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    parameters = list(network.parameters())

    def step() -> list[Tensor]:
        with fused_networks(), torch.autocast("cuda", torch.bfloat16):
            logits = network(x)
        return [logits.detach(), *torch.autograd.grad(logits.float().square().sum(), parameters)]

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    graph.replay()
    for a, b in zip(recorded, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_a_fused_network_equals_its_modules_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 and with the paper's sizes, all gradients and running statistics."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    torch.manual_seed(0)
    network = build_space("nb201", {}).network(notation.parse(BEST), (3, 32, 32), 10).cuda().train()
    network.use_drop_path(0.0)
    exact, single = copy.deepcopy(network).double(), copy.deepcopy(network)
    x = torch.randn(16, 3, 32, 32, device="cuda")

    def found(own: torch.nn.Module, images: Tensor) -> dict[str, Tensor]:
        logits = own(images)
        logits.square().mean().backward()
        gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
        return {"logits": logits.detach(), **gradients, **{n: b for n, b in own.named_buffers() if "running" in n}}

    with fused_networks():
        mine = found(network, x)
    with modules_only():
        others, theirs = found(single, x), found(exact, x.double())
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        errors = [float((own[name].double() - expected).norm() / expected.norm()) for own in (mine, others)]
        # Rounding decides about ReLUs near 0: modules in float32 are no nearer to float64.
        assert errors[0] <= max(1e-3, 10 * errors[1]), f"{name}: {errors[0]:.2e}, modules {errors[1]:.2e}"
