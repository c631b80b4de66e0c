"""Fused NAS-Bench-201 cells on a GPU: in bfloat16 as exact as their modules, and recorded as a step of training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import notation
from softcell.kernels.backend import has_triton
from softcell.spaces import build_space
from softcell.spaces.execution import fused_networks
from tests.helpers.kernel_cells import errors_by_kind, of_learned, require_rounding_only
from tests.helpers.kernel_runs import replayed, require_fused_network
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
    for a, b in zip(replayed(step), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_a_fused_network_equals_its_modules_in_float64() -> None:
    """In float32 and with the paper's sizes, all gradients and running statistics."""
    torch.manual_seed(0)
    network = build_space("nb201", {}).network(notation.parse(BEST), (3, 32, 32), 10).cuda().train()
    network.use_drop_path(0.0)

    def run(own: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = own(images)
        return logits, logits.square().mean()

    require_fused_network(network, run)
