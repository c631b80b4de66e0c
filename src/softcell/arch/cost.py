"""Costs of candidates, and the expected cost of a mix of them: pure data and pure functions.

Xie, Zheng, Liu, Lin: SNAS, ICLR 2019, §2.4 and Appendix F. H×W is the size of a layer's output, f×k its window, I and O
its input and output channels, g its groups, s its stride.

    Eq 9   E[L(Z) + η·C(Z)]                                    the objective; η is a weight
    Eq 10  C(Z) = Σ_edges Z_edge · C(O_edge)                   -> `linear_cost`
    Eq 11  E[C(Z)] = Σ_edges E[Z_edge · C(O_edge)]             -> `linear_cost` of probabilities, `policy_cost`
    Eq 35  parameters of a convolution  f·k·I·O/g              -> `convolution`
    Eq 36  FLOPs of a convolution       H·W·f·k·I·O/g
    Eq 37  memory access                H·W·(s²·I+O) + f·k·I·O/g
    Eq 38  FLOPs of pooling             H·W·f·k·I·O as printed  -> `pooling`
    Eq 39  FLOPs of a skip connection   0                      -> `passing`
    Eq 40  memory access of both        H·W·(s²·I+O)

Eq 37 and 40 are printed without s²: their H×W is one size for input and output. A layer of stride 2 reads a map of four
times the size of the one it writes, and the authors' code counts it so.

One multiplication with one addition counts as one FLOP, as in Eq 36; others call that a multiply-add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from softcell.arch.choice import Layout

KINDS = ("parameters", "flops", "memory")


class Resources(NamedTuple):
    """Costs of one layer or candidate for one image."""

    parameters: int = 0
    flops: int = 0
    memory: int = 0


def convolution(
    height: int, width: int, window: int, c_in: int, c_out: int, groups: int = 1, *, reduction: int = 1
) -> Resources:
    """A convolution without bias; height and width are its output's, `window` is f·k and `reduction` s²."""
    weights = window * c_in * c_out // groups  # Eq 35
    memory = height * width * (reduction * c_in + c_out) + weights  # Eq 37
    return Resources(weights, height * width * weights, memory)  # Eq 36


def pooling(
    height: int, width: int, window: int, c_in: int, c_out: int, *, reduction: int = 1, printed: bool = False
) -> Resources:
    """A pooling layer; sizes as for `convolution`.

    Deviation: a real pooling layer reads f·k values per output value, so H·W·f·k·O; Eq 38 prints another factor I,
    which `printed` gives.
    """
    flops = height * width * window * c_out * (c_in if printed else 1)  # Eq 38
    return Resources(0, flops, height * width * (reduction * c_in + c_out))  # Eq 40


def passing(height: int, width: int, c_in: int, c_out: int) -> Resources:
    """A skip connection: nothing is computed, but the map is read and written (Eq 39, 40)."""
    return Resources(0, 0, height * width * (c_in + c_out))


@dataclass(frozen=True)
class CostTables:
    """By kind of cost, for every site of a layout the cost of each candidate: float64 [choices, width], padding 0."""

    layout: Layout
    kinds: Mapping[str, tuple[Tensor, ...]]

    def __post_init__(self) -> None:
        for kind, sites in self.kinds.items():
            shapes = [self.layout.table(name).shape for name in self.layout.sites]
            assert [tuple(costs.shape) for costs in sites] == shapes, f"{kind}: one [choices, width] per site"

    def of(self, kind: str, table: str) -> Tensor:
        """[sites of the table, choices, width]"""
        return torch.stack([self.kinds[kind][site] for site in self.layout.sites_of(table)])

    def read_tables(self) -> tuple[str, ...]:
        """Names of the tables that some site reads."""
        return tuple(table.name for table in self.layout.tables if table.name in self.layout.sites)


def linear_cost(weights: Tensor, costs: Tensor) -> Tensor:
    """Eq 10, summed over sites.

    Of one-hot weights this is the cost of an architecture, of a relaxed sample its Monte Carlo estimate. Being linear,
    it is at the probabilities exactly the expectation of Eq 11.

    weights [choices, width] or [sites, choices, width]; costs [sites, choices, width]; gives [].
    """
    return (weights * costs).sum()


def policy_cost(probabilities: Tensor, costs: Tensor, uniform: Tensor) -> Tensor:
    """Eq 11 by policy gradient: the cost of one-hot draws, whose gradient is E[(C - b)·∇ log p(Z)].

    Each edge is credited with its own cost alone, since the others' have no part in its gradient's expectation. The
    baseline b is the edge's expected cost; it lowers the variance and, being the same for all draws, adds no bias.

    probabilities [choices, width]; costs [sites, choices, width]; uniform [draws, choices, width] inside (0, 1); gives
    the mean over the draws, [].
    """
    per_edge = costs.sum(0)
    gumbel = -torch.log(-torch.log(uniform))
    with torch.no_grad():
        winner = (torch.log(probabilities) + gumbel).argmax(-1, keepdim=True)  # padding: log 0, never wins
    draws = winner.shape[0]
    chosen = per_edge.expand(draws, *per_edge.shape).gather(-1, winner)
    log_p = torch.log(probabilities.expand(draws, *probabilities.shape).gather(-1, winner))
    baseline = (probabilities.detach() * per_edge).sum(-1, keepdim=True)
    credit = ((chosen - baseline) * log_p).sum() / draws
    return chosen.sum() / draws + credit - credit.detach()


def log_cost(weights: Tensor, costs: Tensor) -> Tensor:
    """The log form of the authors' code for one kind of cost: Σ_edges ln(max(1, cost)), averaged over sites.

    Of a relaxed sample it is theirs. Of the probabilities it is the logarithm of the expected cost; the expectation of
    the former is below it, and differs from it in gradient too, since a logarithm is not linear.

    weights [choices, width] or [sites, choices, width]; costs [sites, choices, width]; gives [].
    """
    return (weights * costs).sum(-1).clamp(min=1.0).log().sum(-1).mean()
