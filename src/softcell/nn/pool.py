"""Pooling candidates: no weights of their own, so all edges that leave a node share one computation."""

from __future__ import annotations

from torch import Tensor, nn

from softcell.nn.candidates import Spec, candidate
from softcell.nn.norm import BatchNorm2d


class AveragePool(nn.AvgPool2d):
    """`nn.AvgPool2d` with a right gradient everywhere.

    On CUDA, torch's own is wrong for channels-last inputs with padding (pytorch issue 188344, seen in 2.11), so there
    it is given a channels-first one.
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.contiguous() if input.is_cuda else input)


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
