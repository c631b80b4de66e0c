"""Cells and candidates written down literally: plain loops, one module per candidate and edge, nothing shared.

Oracles for `softcell.nn` and the cells of `softcell.spaces`; slow on purpose, and independent of the code they check.
The candidates follow the definitions of DARTS (arXiv:1806.09055, §3.1.1) and NAS-Bench-201 (arXiv:2001.00326, §2.1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Reduce(nn.Module):
    """DARTS's halving identity: two 1×1 convolutions of stride 2, the second one pixel down and to the right."""

    def __init__(self, channels: int, affine: bool) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels // 2, 1, 2, bias=False)
        self.b = nn.Conv2d(channels, channels // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(channels, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.clamp(x, min=0)
        return self.norm(torch.cat((self.a(x), self.b(x[:, :, 1:, 1:])), 1))


class Block(nn.Module):
    """ReLU, the given convolutions in turn, batch-norm."""

    def __init__(self, *convs: nn.Conv2d, affine: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)
        self.norm = nn.BatchNorm2d(convs[-1].out_channels, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.clamp(x, min=0)
        for conv in self.convs:
            x = conv(x)
        return self.norm(x)


class Nothing(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return 0.0 * x[:, :, :: self.stride, :: self.stride]


def depthwise(c: int, kernel: int, stride: int, dilation: int = 1) -> nn.Conv2d:
    padding = dilation * (kernel - 1) // 2
    return nn.Conv2d(c, c, kernel, stride, padding, dilation, groups=c, bias=False)


def pointwise(c: int) -> nn.Conv2d:
    return nn.Conv2d(c, c, 1, bias=False)


def literal(op: str, c: int, stride: int, affine: bool = False, pool_norm: bool = True) -> nn.Module:
    """Candidate `op` by its definition."""
    if op == "none":
        return Nothing(stride)
    if op == "skip_connect":
        return nn.Identity() if stride == 1 else Reduce(c, affine)
    if op in ("max_pool_3x3", "avg_pool_3x3"):
        pool = nn.MaxPool2d(3, stride, 1) if op[:3] == "max" else nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        return nn.Sequential(pool, nn.BatchNorm2d(c, affine=affine)) if pool_norm else pool
    kernel = int(op[-1])
    if op.startswith("sep_conv"):
        return nn.Sequential(
            Block(depthwise(c, kernel, stride), pointwise(c), affine=affine),
            Block(depthwise(c, kernel, 1), pointwise(c), affine=affine),
        )
    if op.startswith("dil_conv"):
        return Block(depthwise(c, kernel, stride, dilation=2), pointwise(c), affine=affine)
    assert op.startswith("nor_conv")
    return Block(nn.Conv2d(c, c, kernel, stride, kernel // 2, bias=False), affine=affine)


class LiteralCell(nn.Module):
    """DARTS Eq 1 and 2: node j is the sum over edges i < j of Σ_k w[edge, k] · o_k(node i)."""

    def __init__(self, num_inputs: int, edges: list[tuple[int, int]], ops: list[list[nn.Module]]) -> None:
        super().__init__()
        self.num_inputs, self.edges = num_inputs, edges
        self.ops = nn.ModuleList(nn.ModuleList(row) for row in ops)

    def forward(self, inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
        nodes = list(inputs)
        for j in range(self.num_inputs, max(target for _, target in self.edges) + 1):
            total: Tensor | float = 0.0
            for e, (source, target) in enumerate(self.edges):
                if target == j:
                    for k, op in enumerate(self.ops[e]):
                        total = total + weights[e, k] * op(nodes[source])
            assert isinstance(total, Tensor)
            nodes.append(total)
        return nodes


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Parameters and buffers in order of definition: twins define the same tensors in the same order."""
    mine, theirs = list(source.state_dict().values()), list(target.state_dict().values())
    assert [t.shape for t in mine] == [t.shape for t in theirs]
    with torch.no_grad():
        for a, b in zip(theirs, mine, strict=True):
            a.copy_(b)
