"""The mix: what a method passes to the supernet for one step.

Most methods use plain weights, one number per site, choice and candidate (`WeightMix`); the supernet then sums all
candidates of a node in one pass. A method that computes its weights from the feature maps derives from `Mix` and
combines the outputs of a choice itself.

Relaxations over ragged tables make such weights: softmax and concrete samples without padding, falling temperatures.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from typing import Literal, Self

import torch
from torch import Tensor

from softcell.arch.choice import LINK, Layout, Pick, Table
from softcell.arch.rules import Rule

Live = tuple[tuple[int, ...], ...]
"""For every choice of a table the candidate indices that run."""

Plan = tuple[Live | None, ...]
"""For every site the candidates that run there; None: all. The host needs it before a step."""


def live_of(table: Table, picks: Iterable[Pick]) -> Live:
    """For every choice the candidates that are picked."""
    taken = {(pick.source, pick.target, pick.op) for pick in picks}
    return tuple(
        tuple(k for k, op in enumerate(choice.candidates) if (choice.source, choice.target, op) in taken)
        for choice in table.choices
    )


def live_where(mask: Tensor) -> Live:
    """For every choice the candidates at which mask [choices, width] is true."""
    return tuple(tuple(k for k, is_in in enumerate(row) if is_in) for row in mask.tolist())


class Mix(ABC):
    """How the outputs of a choice's candidates become one.

    Example:
        >>> import torch
        >>> from softcell.arch import Mix
        >>> class Mean(Mix):
        ...     def combine(self, site, choice, outputs):
        ...         return torch.stack([output for output in outputs.values() if output is not None]).mean(0)
        >>> Mean().combine(site=0, choice=0, outputs={0: torch.tensor([1.0]), 2: torch.tensor([3.0])})
        tensor([2.])
    """

    @abstractmethod
    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        """One output [n, c, h, w] out of those of the live candidates; None means zeros."""

    def combine_together(
        self, site: int, outputs: Mapping[int, Mapping[int, Tensor | None]]
    ) -> Mapping[int, Tensor | None]:
        """The results of `combine` for the outgoing choices of one node, by choice, where one call for all is cheaper.

        Choices missing from the result are combined one by one.
        """
        return {}

    def compete(self, site: int, outputs: Mapping[int, Mapping[int, Tensor | None]]) -> Tensor | None:
        """One output out of those of choices that compete to be inputs of a node (`Table.contests`), by choice.

        By default the sum of the results of `combine` for each; their weights then compete.
        """
        found = [self.combine(site, choice, own) for choice, own in sorted(outputs.items())]
        present = [x for x in found if x is not None]
        return sum(present[1:], start=present[0]) if present else None

    def live(self, site: int) -> Live | None:
        """Which candidates of each choice must run at this site; None means all."""
        return None

    def recomputes(self, site: int, choice: int) -> bool:
        """Whether a choice's candidates keep only their inputs for the backward pass, which recomputes them."""
        return False

    def meet(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> None:
        """Receives all live outputs of a choice before `combine` gets them in parts.

        Called where a node has features and calibrating candidates as inputs: their outputs have different shapes and
        are combined kind by kind.
        """
        return None

    def signature(self) -> Hashable | None:
        """All of this mix but its numbers, as the key of a captured step; None: it cannot be captured."""
        return None

    def copy(self) -> Self:
        """The same mix in separate memory; itself where its numbers are parameters, which change in place."""
        return self

    def take(self, other: Self) -> None:
        """Copies the numbers of a mix of the same signature, in place."""
        return None


class WeightMix(Mix):
    """Plain weights.

    weights: per table [choices, width], shared by all its sites, or [sites of the table, choices, width].
    lives: per site the candidates that must run; a site that is not named runs all of them.
    picked: per site that runs some candidates, each with a weight of exactly 1, which they are, and the same as a
    tensor [choices, width] of ones and zeros. Such a site ignores `weights`.
    masked: per site the candidates that run and their weights [choices, width], 0 or 1. Such a site ignores `weights`.
    offsets: per table [choices] a number that each choice adds to all values of its target node, in mixed cells. Copies
    of the mix leave it out: it only carries gradients of terms whose value is 0.

    Example:
        >>> import torch
        >>> from softcell.arch import WeightMix
        >>> from softcell.spaces import build_space
        >>> layout = build_space("nb201").layout()
        >>> mix = WeightMix(layout, {"cell": torch.full(layout.tables[0].shape, 0.2)})
        >>> mix.weights(site=0).shape
        torch.Size([6, 5])
        >>> mix.combine(site=0, choice=0, outputs={1: torch.tensor([5.0]), 3: torch.tensor([10.0])})
        tensor([3.])
    """

    def __init__(
        self,
        layout: Layout,
        weights: Mapping[str, Tensor],
        lives: Mapping[int, Live] | None = None,
        picked: Mapping[int, tuple[Live, Tensor]] | None = None,
        masked: Mapping[int, tuple[Live, Tensor]] | None = None,
        offsets: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._weights: list[Tensor] = []
        self._offsets = [offsets[name] for name in layout.sites] if offsets else []
        seen: dict[str, int] = {}
        for name in layout.sites:
            table, position = weights[name], seen.get(name, 0)
            self._weights.append(table if table.dim() == 2 else table[position])
            seen[name] = position + 1
        self.tables = dict(weights)
        self._lives = dict(lives or {})
        self._picked = frozenset(picked or ())
        for site, (live, ones) in {**(picked or {}), **(masked or {})}.items():
            self._weights[site], self._lives[site] = ones, live

    def weights(self, site: int) -> Tensor:
        """[choices, width]"""
        return self._weights[site]

    def live(self, site: int) -> Live | None:
        return self._lives.get(site)

    def offsets(self, site: int) -> Tensor | None:
        """[choices]; None: nothing is added."""
        return self._offsets[site] if self._offsets else None

    def is_picked(self, site: int) -> bool:
        """Whether all live candidates of the site weigh exactly 1: a node is then their plain sum."""
        return site in self._picked

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        total: Tensor | None = None
        for candidate, output in outputs.items():
            if output is not None:
                term = self._weights[site][choice, candidate] * output
                total = term if total is None else total + term
        return total

    def signature(self) -> Hashable:
        """Which candidates run at each site, and which are picked."""
        return (tuple(self.live(site) for site in range(len(self._weights))), self._picked)

    def copy(self) -> Self:
        """The same mix in separate memory; sites that share weights still do."""
        # `__init__` would need the layout, which a mix does not keep.
        twin = object.__new__(type(self))
        known = {id(weights): weights.detach().clone() for weights in _all(self)}
        twin._weights = [known[id(weights)] for weights in self._weights]
        twin.tables = {name: known[id(weights)] for name, weights in self.tables.items()}
        twin._lives, twin._picked, twin._offsets = self._lives, self._picked, []
        return twin

    def take(self, other: Self) -> None:
        for own, given in zip(_all(self), _all(other), strict=True):
            own.copy_(given)

    def detach(self) -> WeightMix:
        """The same mix without gradients to the architecture, for weight steps."""
        twin = object.__new__(WeightMix)
        twin._weights = [weights.detach() for weights in self._weights]
        twin.tables = {name: weights.detach() for name, weights in self.tables.items()}
        twin._lives, twin._picked, twin._offsets = self._lives, self._picked, []
        return twin


def _all(mix: WeightMix) -> tuple[Tensor, ...]:
    return (*mix._weights, *mix.tables.values())


def uniform_path(layout: Layout, rng: random.Random) -> Plan:
    """One random architecture of the space, drawn uniformly on the host, at every site; the same on every machine."""
    rule = layout.rule
    assert isinstance(rule, Rule)
    lives = {table.name: live_of(table, rule.sample(table, rng)) for table in layout.tables}
    return tuple(lives[name] for name in layout.sites)


def widened(layout: Layout, path: Plan, at: Iterable[tuple[int, int]], lives: Mapping[str, Live]) -> Plan:
    """The path with all candidates in `lives`, by table, at some pairs of site and choice."""
    plan = [list(live) for live in path if live is not None]
    assert len(plan) == len(path), "a path names what runs at every site"
    for site, choice in at:
        plan[site][choice] = lives[layout.sites[site]][choice]
    return tuple(tuple(live) for live in plan)


def masked_softmax(logits: Tensor, mask: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """Softmax over the real candidates of each choice; padding gets exactly 0.

    logits, mask [..., choices, width] to probabilities of the same shape.

    Example:
        >>> import torch
        >>> from softcell.arch import masked_softmax
        >>> logits = torch.zeros(2, 3)
        >>> masked_softmax(logits, torch.tensor([[True, True, False], [True, True, True]]))
        tensor([[0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """
    # Every choice has a candidate: a row of -inf alone would become NaN.
    return torch.softmax((logits / temperature).masked_fill(~mask, -torch.inf), dim=-1)


def contested_softmax(logits: Tensor, mask: Tensor, members: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """`masked_softmax`, but one softmax over the links of each contest; `none` gets 1 minus its link.

    logits, mask [..., choices, width]; members bool [contests, choices] to probabilities like the logits.
    """
    links = torch.where(members, (logits / temperature)[..., None, :, LINK], -torch.inf)  # [..., contests, choices]
    return with_links(masked_softmax(logits, mask, temperature), torch.softmax(links, dim=-1), members, mask)


def gumbel(uniform: Tensor) -> Tensor:
    """Gumbel variables from uniform ones, any shape; 0 and 1 are clamped inside, where both logarithms are finite."""
    bounds = torch.finfo(uniform.dtype)
    return -torch.log(-torch.log(uniform.clamp(bounds.tiny, 1.0 - bounds.eps)))


def concrete(
    log_alpha: Tensor, mask: Tensor, temperature: Tensor | float, uniform: Tensor, members: Tensor | None = None
) -> Tensor:
    """One relaxed one-hot sample softmax((log α + G) / λ) per choice, or per contest of choices (SNAS, Eq 5).

    log_alpha, mask, uniform [..., choices, width], temperature λ [] and members bool [contests, choices] to
    [..., choices, width]; padding is exactly 0.
    """
    noisy = log_alpha + gumbel(uniform)
    if members is None:
        return masked_softmax(noisy, mask, temperature)
    return contested_softmax(noisy, mask, members, temperature)


def contested_shares(strengths: Tensor, members: Tensor) -> Tensor:
    """`normalised`, but the links of each contest sum to 1; `none` gets 1 minus its link."""
    links = torch.where(members, strengths[..., None, :, LINK], 0.0)
    shares = links / links.sum(-1, keepdim=True)
    return with_links(normalised(strengths), shares, members, torch.ones_like(strengths, dtype=torch.bool))


def with_links(others: Tensor, links: Tensor, members: Tensor, mask: Tensor) -> Tensor:
    """Probabilities [..., choices, width] with those of contested links [..., contests, choices] put in."""
    link = torch.where(members, links, 0.0).sum(-2)
    gap = (1.0 - link) * mask[..., 0]
    # Columns: `none`, the link, padding up to the width of the table.
    row = torch.stack([gap, link, *([torch.zeros_like(link)] * (others.shape[-1] - LINK - 1))], dim=-1)
    return torch.where(members.any(0)[:, None], row, others)


def entropy(probabilities: Tensor) -> Tensor:
    """Entropy in nats per choice: [..., choices, width] to [..., choices]; 0·ln 0 counts as 0."""
    return -torch.xlogy(probabilities, probabilities).sum(dim=-1)


def normalised(strengths: Tensor) -> Tensor:
    """Strengths [..., choices, width], not negative, to shares of the same shape that sum to 1 per choice."""
    return strengths / strengths.sum(-1, keepdim=True)


Schedule = Literal["linear", "exponential", "constant"]


def temperature_at(progress: float, first: float, last: float, schedule: Schedule) -> float:
    """The temperature λ at `progress` 0..1; `constant` stays at `first`."""
    match schedule:
        case "linear":
            return first + (last - first) * progress
        case "exponential":
            return float(first * (last / first) ** progress)
        case "constant":
            return first
