"""Networks stay channels-last on a GPU, backward too: other layouts use kernels that are several times slower."""

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
    given = [part.requires_grad_() for part in parts]
    found = torch.autograd.grad(torch.cat([dense_gradient(part) for part in given], 1).square().sum(), given)
    mean = torch.autograd.grad(torch.mean(dense_gradient(given[0]), dim=(2, 3)).sum(), given[0])
    assert all(g.is_contiguous(memory_format=torch.channels_last) for g in (*found, *mean))
    for gradient, part in zip(found, parts, strict=True):
        torch.testing.assert_close(gradient, 2 * part.detach())


def test_gradients_that_reach_norms_of_a_darts_network_are_channels_last() -> None:
    torch.manual_seed(0)
    built = build_space("darts", {"cells": 5})
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
