"""A custom candidate operation, usable by name in every space.

    softcell search --plugin examples/my_candidate.py --set "space.candidates=[none, skip_connect, gated_conv_3x3]"

A candidate maps [n, channels, h, w] to [n, channels, ceil(h / stride), ceil(w / stride)], for any h and w.
`softcell.testing.check_candidate("gated_conv_3x3")` checks this.
"""

from __future__ import annotations

from torch import Tensor, nn

from softcell.nn import ReLUConvBN, Spec, candidate


class GatedConv(nn.Module):
    """A 3×3 convolution whose channels are scaled by the content of the whole image."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        # `affine` is False in search and True in the final network: pass it to every BatchNorm.
        self.conv = ReLUConvBN(spec.channels, spec.channels, 3, spec.stride, affine=spec.affine)
        self.gate = nn.Linear(spec.channels, spec.channels)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x.mean(dim=(2, 3))).sigmoid()
        return self.conv(x) * gate[:, :, None, None]


@candidate("gated_conv_3x3")
def gated_conv_3x3(spec: Spec) -> nn.Module:
    return GatedConv(spec)
