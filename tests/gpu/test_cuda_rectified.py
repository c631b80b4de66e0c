"""Fused NAS-Bench-1Shot1 cells on a GPU: in bfloat16 as exact as their modules, and recorded as a step of training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import sample
from softcell.kernels.backend import cell_settings, has_triton
from softcell.spaces import Network, build_space
from softcell.spaces.execution import fused_networks
from tests.helpers.kernel_cells import errors_by_kind, of_learned, require_rounding_only
from tests.helpers.kernel_runs import replayed, require_fused_network
from tests.helpers.picked_cells import RECTIFIED, inputs_of, outcome, picked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="needs Triton"),
]


SEEDS = {1: 21, 2: 9, 3: 21}
"""By space, of architectures whose blocks all lead to the output: parameters of others get no gradient from modules."""


def network_of(number: int, **settings: int) -> Network:
    torch.manual_seed(0)
    space = build_space(f"nb1shot1-{number}", settings)
    network = space.network(sample(space.layout(), SEEDS[number]), (3, 32, 32), 10).cuda().train()
    assert network.has_fused_cells() == [True] * len(network.cells)  # type: ignore[arg-type]
    network.use_drop_path(0.0)
    return network


LIBRARY, KERNELS = 1, 2**30
SIZES = [
    (5, (9, 7), KERNELS),
    (16, (32, 32), KERNELS),
    (128, (16, 16), KERNELS),
    (64, (9, 7), LIBRARY),
    (128, (16, 16), LIBRARY),
    (512, (8, 8), LIBRARY),
]


@pytest.mark.parametrize(("channels", "size", "library"), SIZES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", list(RECTIFIED))
def test_in_bfloat16_a_derived_cell_errs_as_its_modules_do(
    name: str, training: bool, channels: int, size: tuple[int, int], library: int
) -> None:
    """library: from this number of channels on, the library runs the convolutions."""
    x, factors = inputs_of(name, channels, 6, size)
    x, dropped = x.bfloat16().double(), factors if training else None
    cell = picked(name, channels, dropped).train(training)
    exact = outcome(cell, x, dropped, fused=False)
    with cell_settings(library_channels=library):
        short = [
            outcome(cell, x, dropped, fused=fused, device=device, dtype=torch.bfloat16)
            for fused, device in ((True, "cuda"), (False, "cpu"))
        ]
    kinds = [errors_by_kind(of_learned(found, exact), of_learned(exact, exact), 1) for found in short]
    require_rounding_only(*kinds)


@pytest.mark.parametrize("channels", [16, 128])
def test_a_recorded_pass_equals_an_eager_one(channels: int) -> None:
    built = network_of(1, cells_per_stack=1, channels=channels)
    network = built.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(8, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    parameters = list(network.parameters())

    def step() -> list[Tensor]:
        with fused_networks(), torch.autocast("cuda", torch.bfloat16):
            logits = network(x)
        return [logits.detach(), *torch.autograd.grad(logits.float().square().sum(), parameters)]

    expected = step()
    for a, b in zip(replayed(step), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("library", [LIBRARY, KERNELS])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_fused_network_equals_its_modules_in_float64(number: int, library: int) -> None:
    """In float32, all gradients and running statistics."""

    def run(own: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = own(images)
        return logits, logits.square().mean()

    with cell_settings(library_channels=library):
        require_fused_network(network_of(number, cells_per_stack=1, channels=32), run)
