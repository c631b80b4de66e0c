"""What a method hands the supernet for one step.

Most methods hand plain weights, one number per site, choice and candidate (`WeightMix`); the supernet then sums all
candidates of a node in one pass. A method whose weights come out of the feature maps themselves derives from `Mix` and
combines a choice's outputs on its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from softcell.arch.choice import Layout

Live = tuple[tuple[int, ...], ...]
"""For every choice of a table the candidate indices that run."""


class Mix(ABC):
    """How the outputs of a choice's candidates become one."""

    @abstractmethod
    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        """One output [n, c, h, w] out of those of the live candidates; None stands for zeros."""

    def live(self, site: int) -> Live | None:
        """Which candidates of each choice must run at this site; None means all."""
        return None


class WeightMix(Mix):
    """Plain weights.

    weights: per table [choices, width], shared by all its sites, or [sites of the table, choices, width].
    lives: per site the candidates that must run; a site that is not named runs all of them.
    """

    def __init__(self, layout: Layout, weights: Mapping[str, Tensor], lives: Mapping[int, Live] | None = None) -> None:
        self._weights: list[Tensor] = []
        seen: dict[str, int] = {}
        for name in layout.sites:
            table, position = weights[name], seen.get(name, 0)
            self._weights.append(table if table.dim() == 2 else table[position])
            seen[name] = position + 1
        self.tables = dict(weights)
        self._lives = dict(lives or {})

    def weights(self, site: int) -> Tensor:
        """[choices, width]"""
        return self._weights[site]

    def live(self, site: int) -> Live | None:
        return self._lives.get(site)

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        total: Tensor | None = None
        for candidate, output in outputs.items():
            if output is not None:
                term = self._weights[site][choice, candidate] * output
                total = term if total is None else total + term
        return total

    def detach(self) -> WeightMix:
        """The same mix without gradients to the architecture, for weight steps."""
        twin = object.__new__(WeightMix)
        twin._weights = [weights.detach() for weights in self._weights]
        twin.tables = {name: weights.detach() for name, weights in self.tables.items()}
        twin._lives = self._lives
        return twin
