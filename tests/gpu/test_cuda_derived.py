"""Fused DARTS networks on a GPU: a second stream changes no bit, and all widths fit into shared memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.arch import notation
from softcell.kernels import derived
from softcell.kernels.backend import has_triton
from softcell.spaces import Network, build_space
from softcell.spaces.execution import fused_networks
from tests.reference.published_genotypes import DARTS_V2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="needs Triton"),
]
PASSES = 10


def gradients(network: Network, images: Tensor, dtype: torch.dtype) -> list[Tensor]:
    with fused_networks(), torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits, extra = network.forward_with_auxiliary(images)
    assert extra is not None
    loss = logits.float().square().mean() + 0.4 * extra.float().square().mean()
    return list(torch.autograd.grad(loss, list(network.parameters())))


@pytest.mark.parametrize(
    ("channels", "dtype"),
    [(36, torch.bfloat16), (36, torch.float32), (24, torch.float32), (12, torch.float32)],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_gradients_of_cells_have_the_same_bits_with_and_without_a_second_stream(
    channels: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from softcell.kernels import derived_layout_triton as layout

    begun: list[bool] = []

    def watched(original: Any) -> Any:
        def run(*given: Any) -> Any:
            begun.append(original(*given))
            return begun[-1]

        return run

    monkeypatch.setattr(derived, "_begins", watched(derived._begins))
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # of stem and tower
    torch.manual_seed(0)
    space = build_space("darts", {"cells": 20, "channels": channels})
    network = space.network(notation.parse(DARTS_V2), (3, 32, 32), 10, auxiliary=True)
    network.drop_path.probability = 0.0
    network = network.cuda().to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    images = torch.randn(96, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    monkeypatch.setattr(layout, "OVERRIDES", {"beside": False})
    expected = gradients(network, images, dtype)
    monkeypatch.setattr(layout, "OVERRIDES", {})
    for _ in range(PASSES):
        found = gradients(network, images, dtype)
        assert all(map(torch.equal, found, expected))
    assert begun and all(begun), "the gradient of a cell's newer input begins the buffer of the cell before"
