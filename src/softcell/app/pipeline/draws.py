"""Random architectures to compare a found one with, which its search has not drawn itself."""

from __future__ import annotations

from itertools import count as numbers

from softcell.app.baseline import APART, STRIDE
from softcell.arch import Genotype, Layout, count, sample


def random_others(found: Genotype, layout: Layout, seed: int, num: int) -> list[Genotype]:
    """`num` random architectures of the space, all different, and none of them `found`.

    Where the space has no others left, they repeat.
    """
    others: list[Genotype] = []
    taken = [found.cells]
    for number in numbers(seed * STRIDE + APART):
        if len(others) == num:
            break
        other = sample(layout, number)
        if other.cells not in taken or count(layout) <= len(taken):
            others.append(other)
            taken.append(other.cells)
    return others
