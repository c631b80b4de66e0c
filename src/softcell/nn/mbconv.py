"""Inverted bottlenecks: the candidates of MobileNet-like chains, in the order convolution, norm, ReLU6.

Sandler et al.: MobileNetV2, CVPR 2018; squeeze-and-excitation on the expanded width as in MobileNetV3 (Howard et al.,
ICCV 2019). `mbconv_e6_k5` expands six-fold and has a 5×5 kernel; `_se` adds squeeze-and-excitation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.nn.candidates import Spec, candidate
from softcell.nn.norm import BatchNorm2d

KERNELS = (3, 5, 7)
EXPANSIONS = (3, 6)
SQUEEZE = 4


class SqueezeExcite(nn.Module):
    """x ⊙ sigmoid(W2 relu(W1 mean_hw(x))): [n, c, h, w] to the same shape, through c / 4 channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(1, channels // SQUEEZE)
        self.squeeze, self.excite = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.mean(x, dim=(2, 3), keepdim=True)
        return x * torch.sigmoid(self.excite(F.relu(self.squeeze(y))))


def conv_norm(c_in: int, c_out: int, kernel: int, stride: int = 1, *, groups: int = 1, affine: bool) -> nn.Sequential:
    """k×k convolution, norm, ReLU6: [n, c_in, h, w] to [n, c_out, ⌈h/s⌉, ⌈w/s⌉]."""
    conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, BatchNorm2d(c_out, affine=affine), nn.ReLU6())


class MBConv(nn.Module):
    """Expand (1×1), filter each channel (k×k), project (1×1); plus the input where width and resolution stay.

    [n, c_in, h, w] to [n, c_out, ⌈h/s⌉, ⌈w/s⌉]
    """

    def __init__(
        self, c_in: int, c_out: int, kernel: int, stride: int, expansion: int, *, se: bool = False, affine: bool = True
    ) -> None:
        super().__init__()
        wide = c_in * expansion
        self.expand = conv_norm(c_in, wide, 1, affine=affine) if expansion > 1 else None
        self.filter = conv_norm(wide, wide, kernel, stride, groups=wide, affine=affine)
        self.squeeze = SqueezeExcite(wide) if se else None
        self.project = nn.Sequential(nn.Conv2d(wide, c_out, 1, bias=False), BatchNorm2d(c_out, affine=affine))
        self.has_shortcut = stride == 1 and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x if self.expand is None else self.expand(x)
        y = self.filter(y)
        if self.squeeze is not None:
            y = self.squeeze(y)
        y = self.project(y)
        return x + y if self.has_shortcut else y


def name_of(expansion: int, kernel: int, *, se: bool) -> str:
    return f"mbconv_e{expansion}_k{kernel}" + ("_se" if se else "")


def _register(expansion: int, kernel: int, se: bool) -> None:
    @candidate(name_of(expansion, kernel, se=se), widens=True)
    def build(spec: Spec) -> nn.Module:
        return MBConv(spec.c_in, spec.channels, kernel, spec.stride, expansion, se=se, affine=spec.affine)


for _expansion in EXPANSIONS:
    for _kernel in KERNELS:
        for _se in (False, True):
            _register(_expansion, _kernel, _se)
