"""Pooling candidates: they have no weights, so all edges that leave a node share one computation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from softcell.nn.candidates import Spec, candidate
from softcell.nn.norm import BatchNorm2d


class AveragePool(nn.AvgPool2d):
    """`nn.AvgPool2d` with a correct gradient on every device.

    On CUDA, torch's own is wrong for channels-last inputs with padding (pytorch issue 188344, seen in 2.11), so the
    input is made channels-first there.
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.contiguous() if input.is_cuda else input)


_WINDOWS: dict[tuple[int, int, torch.device, torch.dtype], Tensor] = {}


def adaptive_windows(size: int, wanted: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A [wanted, size] with which A @ x @ B.T is adaptive average pooling of x [..., size, size'].

    Row i averages positions ⌊i·size/wanted⌋ to ⌈(i+1)·size/wanted⌉. By products, since torch's own adaptive pooling has
    no deterministic gradient on CUDA. Kept, since copying it each step would stall a GPU.
    """
    key = (size, wanted, device, dtype)
    if key not in _WINDOWS:
        matrix = torch.zeros(wanted, size, dtype=dtype)
        for i in range(wanted):
            first, last = i * size // wanted, -(-(i + 1) * size // wanted)
            matrix[i, first:last] = 1.0 / (last - first)
        _WINDOWS[key] = matrix.to(device)
    return _WINDOWS[key]


def _shares(spec: Spec) -> bool:
    # Batch-norm without scale and shift gives every edge the same result; with them each edge has its own weights.
    return not (spec.pool_norm and spec.affine)


def _with_norm(pool: nn.Module, spec: Spec) -> nn.Module:
    return nn.Sequential(pool, BatchNorm2d(spec.channels, affine=spec.affine)) if spec.pool_norm else pool


@candidate("max_pool_3x3", shared=_shares)
def max_pool_3x3(spec: Spec) -> nn.Module:
    return _with_norm(nn.MaxPool2d(3, spec.stride, 1), spec)


@candidate("avg_pool_3x3", shared=_shares)
def avg_pool_3x3(spec: Spec) -> nn.Module:
    return _with_norm(AveragePool(3, spec.stride, 1, count_include_pad=False), spec)
