"""Training passes through derived networks, fused or module by module, with given factors of drop-path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from softcell.nn.stochastic import DropPath
from softcell.spaces import Network
from softcell.spaces.execution import fused_networks, modules_only


def two_passes(network: Network, factors: Tensor, *, fused: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Logits, gradients and buffers of two passes of images [4, 3, 9, 8].

    factors [paths, 4]: of drop-path, in the order of the modules; empty if nothing is dropped. All are used.
    """
    own = next(network.parameters())
    images = torch.randn(4, 3, 9, 8, generator=torch.Generator().manual_seed(1)).to(own)
    rows: Iterator[Tensor] = iter([*factors, *factors])
    monkeypatch.setattr(DropPath, "factors", lambda own, x, paths: torch.stack([next(rows) for _ in range(paths)]))
    monkeypatch.setattr(DropPath, "forward", lambda own, x: x * next(rows).view(-1, 1, 1, 1))
    network.zero_grad()
    for _ in range(2):
        with fused_networks() if fused else modules_only():
            logits = network(images)
        logits.square().mean().backward()
    assert next(rows, None) is None, "every factor was used"
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients, **dict(network.named_buffers())}
