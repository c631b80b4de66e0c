"""Fused NOS cells on a GPU: in bfloat16 as exact as their modules, and recorded as a step of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.arch import sample
from softcell.kernels.backend import has_triton
from softcell.kernels.warm_up import dry_launches
from softcell.spaces import build_space
from softcell.spaces.execution import fused_networks
from tests.helpers.kernel_cells import errors_by_kind, of_learned
from tests.helpers.kernel_runs import replayed, require_fused_network
from tests.helpers.segmented_cells import CELLS, Segmented, factors_of, inputs_of, outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="needs Triton"),
]


@pytest.mark.parametrize(("channels", "size"), [(36, (32, 32)), (72, (16, 16)), (144, (8, 8)), (8, (9, 7))])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", list(CELLS))
def test_in_bfloat16_a_cell_errs_as_its_modules_do(
    name: str, training: bool, channels: int, size: tuple[int, int]
) -> None:
    cell = Segmented(name, channels).train(training)
    states = [x.bfloat16().double() for x in inputs_of(cell, 6, size)]
    factors = factors_of(cell, 6) if training else None
    exact = outcome(cell, states, factors, fused=False)
    short = [
        outcome(cell, states, factors, fused=fused, device=device, dtype=torch.bfloat16)
        for fused, device in ((True, "cuda"), (False, "cpu"))
    ]
    mine, modules = (errors_by_kind(of_learned(found, exact), of_learned(exact, exact), 2) for found in short)
    for kind, errors in mine.items():
        # Calibrations multiply what was rounded before. The twins in bfloat16 err up to 1.2 times as much as modules.
        means = [sum(own) / len(own) for own in (errors, modules[kind])]
        assert means[0] <= 2 * means[1] + 0.02, f"{kind}: {means[0]:.4f}, modules {means[1]:.4f}"


def nos_network(**settings: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    space = build_space("nos", settings)
    network = space.network(sample(space.layout(), 0), (3, 32, 32), 10, auxiliary=True)
    network.use_drop_path(0.0)
    return network.cuda().train()


@pytest.mark.parametrize("seed", [0, 1])
def test_a_recorded_pass_equals_an_eager_one(seed: int) -> None:
    network = nos_network(cells=4, channels=16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.manual_seed(seed)
    x = torch.randn(8, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    parameters = list(network.parameters())

    def step() -> list[Tensor]:
        with fused_networks(), torch.autocast("cuda", torch.bfloat16):
            logits, auxiliary = network.forward_with_auxiliary(x)
        loss = logits.float().square().sum() + auxiliary.float().square().sum()
        return [logits.detach(), *torch.autograd.grad(loss, parameters)]

    expected = step()
    for a, b in zip(replayed(step), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_a_fused_network_equals_its_modules_in_float64() -> None:
    """In float32 and with the widths of the paper, all gradients and running statistics."""

    def run(own: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        logits, auxiliary = own.forward_with_auxiliary(images)
        return logits, logits.square().mean() + auxiliary.square().mean()

    require_fused_network(nos_network(cells=8, channels=36), run)


def test_a_pass_compiles_nothing_that_a_dry_pass_did_not_list() -> None:
    """Kernels that this process has compiled are not listed, so sizes are those of no other test."""
    network = nos_network(cells=3, channels=20)
    x = torch.randn(5, 3, 32, 32, device="cuda")

    def run() -> None:
        with fused_networks():
            logits, auxiliary = network.forward_with_auxiliary(x)
        (logits.sum() + auxiliary.sum()).backward()

    listed: list[str] = []
    with dry_launches(lambda job: listed.append(job.name)):
        run()
    assert {"_stages", "_apply"} <= set(listed)
    run()
    again: list[str] = []
    with dry_launches(lambda job: again.append(job.name)):
        run()
    assert not again
