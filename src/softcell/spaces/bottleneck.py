"""A cell that works on fewer channels than it is handed and hands on (EnTranNAS, §2.5).

One 1×1 convolution per source node narrows it before all candidates that leave it, one per inner node widens the sum
that arrives there. They are convolutions alone, as printed: every candidate between them has its own ReLU and norm. It
belongs to supernets and to networks in search form; evaluation networks have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor, nn

from softcell.nn.candidates import Spec


def narrowed(spec_of: Callable[[int], Spec], ratio: int) -> Callable[[int], Spec]:
    """What candidates are built for inside a bottleneck: `ratio` times fewer channels, at least one."""
    return lambda source: replace(spec_of(source), channels=max(1, spec_of(source).channels // ratio))


class Bottleneck(nn.Module):
    """The narrowing of every node in `sources` and the widening of every node in `inner`.

    wide, narrow: what candidates would be built for without and are built for with it.
    """

    def __init__(self, sources: Iterable[int], inner: Iterable[int], wide: Spec, narrow: Spec) -> None:
        super().__init__()
        c, few = wide.channels, narrow.channels
        self.reduce = nn.ModuleDict({str(node): nn.Conv2d(c, few, 1, bias=False) for node in sources})
        self.recover = nn.ModuleDict({str(node): nn.Conv2d(few, c, 1, bias=False) for node in inner})

    def leave(self, node: int, x: Tensor) -> Tensor:
        """[n, c, h, w] to [n, c / ratio, h, w]"""
        return self.reduce[str(node)](x)  # type: ignore[no-any-return]

    def arrive(self, node: int, x: Tensor) -> Tensor:
        """[n, c / ratio, h, w] to [n, c, h, w]"""
        return self.recover[str(node)](x)  # type: ignore[no-any-return]
