"""Networks stay channels-last on a GPU, backward too: other layouts take kernels that are several times slower."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import sample
from softcell.nn.conv import dense_gradient
from softcell.spaces import build_space

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_gradients_of_means_and_of_parts_are_dense() -> None:
    parts = [torch.randn(2, 8, 4, 4, device="cuda").contiguous(memory_format=torch.channels_last) for _ in range(2)]
    found: list[Tensor] = []
    for part in parts:
        part.requires_grad_().register_hook(found.append)
    torch.cat([dense_gradient(part) for part in parts], 1).square().sum().backward()
    torch.mean(dense_gradient(parts[0]), dim=(2, 3)).sum().backward()
    assert len(found) == 3 and all(g.is_contiguous(memory_format=torch.channels_last) for g in found)
    torch.testing.assert_close(found[0], 2 * parts[0].detach())


@pytest.mark.parametrize(("space", "given"), [("darts", {"cells": 5}), ("nos", {"cells": 3}), ("fullattention", {})])
def test_gradients_that_reach_norms_are_channels_last(space: str, given: dict[str, int]) -> None:
    torch.manual_seed(0)
    built = build_space(space, given)
    network = built.network(sample(built.layout(), 0), (3, 32, 32), 10).cuda().train()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    other: list[str] = []

    def watch(name: str) -> object:
        def hook(module: nn.Module, given: object, out: Tensor) -> None:
            def look(gradient: Tensor) -> None:
                if min(gradient.shape[1:]) > 1 and not gradient.is_contiguous(memory_format=torch.channels_last):
                    other.append(name)

            out.register_hook(look)

        return hook

    for name, module in network.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(watch(name))  # type: ignore[arg-type]
    x = torch.randn(2, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    network(x).square().sum().backward()
    assert not other
