"""What arrives at a node of a cell, and how it becomes the node's value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from softcell.arch import Mix, Table, WeightMix
from softcell.kernels.mix import stacked_sum, weighted_sum
from softcell.kernels.norm import scaled
from softcell.nn.candidates import Spec
from softcell.spaces.edges import Bottleneck

Output = tuple[int, int, Tensor | None]
"""Choice, candidate and what its module gave; None for zeros."""


class Arrived(NamedTuple):
    """What has reached a node of a mixed cell; a tuple, in which the compiler sees that there are tensors."""

    outputs: list[Output]
    sums: list[Tensor]  # of features, weighted (and dropped) already
    summed: set[int]  # their candidates

    def plus(self, value: Tensor | None) -> Tensor | None:
        """The sums and `value`, the sum of the other features."""
        terms = self.sums if value is None else [*self.sums, value]
        return total(terms) if terms else None


class Combiner:
    """Combines outputs of a table's candidates, each [n, c, h, w], by a mix; None where there are zeros alone."""

    def __init__(self, table: Table) -> None:
        self._width, self._contest_of = table.width, table.contest_of
        self._index_cache: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    def combine(self, outputs: list[Output], mix: Mix, site: int, factors: Tensor | None) -> Tensor | None:
        """The sum of all outputs; with drop-path (factors [choices, n]), choice by choice."""
        if factors is None:
            return self.sum(outputs, mix, site)
        if self._contest_of and not isinstance(mix, WeightMix):  # what is dropped of those that compete are their maps
            outputs = [
                (c, k, scaled(x, factors, c) if x is not None and c in self._contest_of else x) for c, k, x in outputs
            ]
        value = self._compete(outputs, mix, site)
        outputs = [output for output in outputs if isinstance(mix, WeightMix) or output[0] not in self._contest_of]
        for choice in sorted({choice for choice, _, _ in outputs}):
            own = self.sum([output for output in outputs if output[0] == choice], mix, site)
            if own is not None:
                kept = scaled(own, factors, choice)
                value = kept if value is None else value + kept
        return value

    def sum(self, outputs: list[Output], mix: Mix, site: int) -> Tensor | None:
        """The sum of all outputs, none dropped; plain weights take one pass over all of them."""
        if isinstance(mix, WeightMix):
            present = [(choice, candidate, x) for choice, candidate, x in outputs if x is not None]
            if not present:
                return None
            if mix.is_picked(site):
                return total([x for _, _, x in present])
            return weighted_sum([x for _, _, x in present], self._weights([one[:2] for one in present], mix, site))
        value = self._compete(outputs, mix, site)
        for choice in sorted({choice for choice, _, _ in outputs if choice not in self._contest_of}):
            own = mix.combine(site, choice, {k: x for c, k, x in outputs if c == choice})
            if own is not None:
                value = own if value is None else value + own
        return value

    def _compete(self, outputs: list[Output], mix: Mix, site: int) -> Tensor | None:
        """The sum over contests of what their choices are combined to; None where none compete, or by plain weights."""
        contests: dict[tuple[int, ...], dict[int, dict[int, Tensor | None]]] = {}
        for choice, candidate, x in () if isinstance(mix, WeightMix) else outputs:
            if choice in self._contest_of:
                contests.setdefault(self._contest_of[choice], {}).setdefault(choice, {})[candidate] = x
        found = [mix.compete(site, own) for own in contests.values()]
        present = [x for x in found if x is not None]
        return total(present) if present else None

    def sum_alike(self, outputs: Tensor, places: Sequence[tuple[int, int]], mix: WeightMix, site: int) -> Tensor:
        """The sum of outputs [n, places, c, h, w], by choice and candidate of each place."""
        return stacked_sum(outputs, self._weights(places, mix, site))

    def _weights(self, places: Sequence[tuple[int, int]], mix: WeightMix, site: int) -> Tensor:
        """Those of a mix by choice and candidate, [places]."""
        weights = mix.weights(site).flatten()
        index = self._index(weights.device, tuple(choice * self._width + k for choice, k in places))
        return weights.index_select(0, index)

    def _index(self, device: torch.device, positions: tuple[int, ...]) -> Tensor:
        """Positions as a tensor on the device; kept, since copying them each step would stall a GPU."""
        key = (device, positions)
        if key not in self._index_cache:
            self._index_cache[key] = torch.tensor(positions, device=device)
        return self._index_cache[key]


def total(terms: Sequence[Tensor]) -> Tensor:
    """Σ terms, all of one shape."""
    value = terms[0]
    for term in terms[1:]:
        value = value + term
    return value


def node_value(node: int, arrived: Tensor | None, like: Tensor, spec: Spec, bottleneck: Bottleneck | None) -> Tensor:
    """The value of a node from the sum of what arrives at it, None if nothing does; like: an input of the cell."""
    value = zeros(like, spec) if arrived is None else arrived
    return value if bottleneck is None else bottleneck.recover_target(node, value)


def zeros(like: Tensor, spec: Spec) -> Tensor:
    """The value of a node that nothing reaches, at the resolution that candidates of `spec` make of `like`."""
    n, _, height, width = like.shape
    return like.new_zeros(n, spec.channels, -(-height // spec.stride), -(-width // spec.stride))
