"""Noise as a candidate: every value is replaced by one from N(0, 1), whatever came in (space S4 of RobustDARTS).

Zela et al.: Understanding and Robustifying Differentiable Architecture Search, ICLR 2020, §3. Nothing can be learned
through it, so a sound search leaves it out.

In training the values are drawn anew at every step. Deviation: in evaluation they are one fixed pattern per edge, the
same for every image, so that a measured accuracy repeats, does not depend on the size of batches, and a derived network
can be exported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from softcell.nn.candidates import Spec, candidate
from softcell.nn.drop import normal_for_batch

PRIME = 2**31 - 1  # squares of numbers below it fit 64 bits
_FIXED: list[bool] = []


@contextmanager
def fixed_noise() -> Iterator[None]:
    """Within this context noise is its fixed pattern in training too: what a comparison of two networks needs."""
    _FIXED.append(True)
    try:
        yield
    finally:
        _FIXED.pop()


def fixed_normal(salt: Tensor, channels: int, height: int, width: int) -> Tensor:
    """N(0, 1) numbers [channels, height, width] in float32 that depend on `salt` (int64 []) and the place alone.

    Whole numbers are scattered by a quadratic map modulo a prime, two of them make a normal one (Box, Muller 1958).
    """
    places = torch.arange(channels * height * width, device=salt.device, dtype=torch.int64) + salt
    first = (places * 48271 + 11) % PRIME
    first = (first * first + places) % PRIME
    second = (places * 69621 + 7) % PRIME
    second = (second * second + first) % PRIME
    u, v = (first + 1).to(torch.float32) / (PRIME + 1), second.to(torch.float32) / PRIME
    normal = torch.sqrt(-2.0 * torch.log(u)) * torch.cos(2.0 * math.pi * v)
    return normal.view(channels, height, width)


class Noise(nn.Module):
    """[n, c, h, w] to noise [n, c, ⌈h/stride⌉, ⌈w/stride⌉]; `salt` sets the fixed patterns of edges apart."""

    salt: Tensor

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.register_buffer("salt", torch.randint(PRIME, ()))

    def forward(self, x: Tensor) -> Tensor:
        n, c, height, width = x.shape
        height, width = -(-height // self.stride), -(-width // self.stride)
        if self.training and not _FIXED:
            return normal_for_batch(x, c, height, width).to(x.dtype)
        return fixed_normal(self.salt, c, height, width).to(x.dtype).expand(n, c, height, width)


@candidate("noise", blind=True)
def noise(spec: Spec) -> nn.Module:
    return Noise(spec.stride)
