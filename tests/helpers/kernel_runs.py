"""Where tests of Triton's kernels run, on a GPU or on a CPU by Triton's interpreter (`TRITON_INTERPRET=1`), and how."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from softcell.engine import set_tf32
from softcell.kernels.backend import has_triton
from softcell.spaces.execution import fused_networks, modules_only

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA device or TRITON_INTERPRET=1"),
    pytest.mark.skipif(not has_triton(), reason="needs Triton"),
]


@contextmanager
def without_tf32() -> Iterator[None]:
    """Within this context, or a function that it decorates, torch's float32 products and convolutions are exact.

    Every session forbids TF32; otherwise convolutions on a GPU round their inputs to ten bits. pytest's `monkeypatch`
    cannot restore `matmul.allow_tf32`, which is no attribute of an instance or class.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    set_tf32(False)
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def replayed(step: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What `step` returns when it is replayed as a CUDA graph; fails if it waits for the device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            recorded = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    torch.cuda.synchronize()
    return recorded


@without_tf32()
def require_fused_network(network: nn.Module, run: Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]) -> None:
    """In float32 on 16 images a fused network is as near to float64 as its modules: logits, gradients, statistics.

    run: a network and images [n, 3, 32, 32] to logits and loss.
    """
    exact, single = copy.deepcopy(network).double(), copy.deepcopy(network)
    x = torch.randn(16, 3, 32, 32, device="cuda")

    def found(own: nn.Module, images: Tensor) -> dict[str, Tensor]:
        logits, loss = run(own, images)
        loss.backward()
        gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
        return {"logits": logits.detach(), **gradients, **{n: b for n, b in own.named_buffers() if "running" in n}}

    with fused_networks():
        mine = found(network, x)
    with modules_only():
        others, theirs = found(single, x), found(exact, x.double())
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        errors = [float((own[name].double() - expected).norm() / expected.norm()) for own in (mine, others)]
        # Rounding decides about ReLUs near 0: modules in float32 are no nearer to float64. A sum over a whole map, such
        # as the gradient of a norm with one channel, changes by more than others.
        allowed = 1e-3 if expected.numel() >= 8 else 1e-2
        assert errors[0] <= max(allowed, 10 * errors[1]), f"{name}: {errors[0]:.2e}, modules {errors[1]:.2e}"
