"""From strengths to architectures: by a rule, at random, at the lowest cost, or within a budget."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from softcell.arch.choice import Layout, Pick, Table
from softcell.arch.genotype import Cell, Genotype
from softcell.arch.rules import Positive, Rule, StrongestEach, TopInputs, allowed_candidates, rows
from softcell.errors import UserError


def derive(
    layout: Layout, strengths: Mapping[str, Tensor], rule: Rule | None = None, about: Mapping[str, object] | None = None
) -> Genotype:
    """The genotype that `rule` (by default the space's own) makes of every table's strengths [choices, width].

    The space's own rule completes what another rule derives.

    Example:
        >>> import torch
        >>> from softcell.arch import derive
        >>> from softcell.spaces import build_space
        >>> layout = build_space("nb201").layout()
        >>> strengths = {table.name: torch.zeros(table.shape) for table in layout.tables}
        >>> strengths["cell"][:, 3] = 1.0
        >>> {pick.op for pick in derive(layout, strengths).cells["cell"].picks}
        {'nor_conv_3x3'}
    """
    cells = {
        table.name: Cell(derive_picks(layout, table, strengths[table.name], rule), table.output)
        for table in layout.tables
    }
    return Genotype(layout.space, cells, settings=layout.settings, about=dict(about or {}))


def derive_picks(layout: Layout, table: Table, strengths: Tensor, rule: Rule | None = None) -> tuple[Pick, ...]:
    """The picks of one table, strengths [choices, width], as `derive` makes them."""
    picks = (rule or layout.rule)(table, strengths)
    if rule is not None and isinstance(layout.rule, Rule):
        picks = layout.rule.complete(table, strengths, picks)
    return picks


def derive_cheapest(layout: Layout, costs: Mapping[str, Tensor], rule: Rule | None = None) -> Genotype:
    """The architecture that costs least among those `rule` derives and whose cells reach their outputs.

    costs: per table [choices, width], the cost of a candidate on its edge, never negative. Where a rule may derive
    `none` on an edge, it is one path from an input to an output node: every further edge and node only adds to the
    cost.

    Example:
        >>> import torch
        >>> from softcell.arch import derive_cheapest
        >>> from softcell.spaces import build_space
        >>> layout = build_space("nb201").layout()
        >>> costs = {"cell": torch.tensor([[0.0, 1.0, 9.0, 9.0, 9.0]]).expand(layout.tables[0].shape)}
        >>> [str(pick) for pick in derive_cheapest(layout, costs).cells["cell"].picks if pick.op != "none"]
        ['skip_connect(0->3)']
    """
    own, strengths = rule or layout.rule, {}
    for table in layout.tables:
        values = rows(table, costs[table.name])
        kept = _cheapest_path(table, values, own.exclude) if isinstance(own, StrongestEach) else None
        strengths[table.name] = -costs[table.name] if kept is None else kept.to(costs[table.name])
    return derive(layout, strengths, rule)


def derives_cheapest(layout: Layout, rule: Rule | None = None) -> bool:
    """Whether the result of `derive_cheapest` is known to be the minimum: costs are sums over the picks of these rules.

    Example:
        >>> from softcell.arch import derives_cheapest
        >>> from softcell.spaces import build_space
        >>> derives_cheapest(build_space("nb201").layout()), derives_cheapest(build_space("nos").layout())
        (True, False)
    """
    space_rule = layout.rule
    completed = rule is not None and isinstance(space_rule, Rule) and type(space_rule).complete is not Rule.complete
    return isinstance(rule or space_rule, StrongestEach | TopInputs | Positive) and not completed


def _cheapest_path(table: Table, costs: list[list[float]], exclude: tuple[str, ...]) -> Tensor:
    """Strengths [choices, width], 1 for what is kept: the cheapest path to an output node, elsewhere `none`."""
    least: list[tuple[float, int]] = []  # by choice: what the cheapest operation adds, and which it is
    none: list[int | None] = []
    for choice, row in zip(table.choices, costs, strict=True):
        allowed = allowed_candidates(choice.candidates, exclude)
        nothing = next((k for k in allowed if choice.candidates[k] == "none"), None)
        best = min((k for k in allowed if k != nothing), key=lambda k: (row[k], k), default=None)
        # An edge that cannot be `none` is there anyway.
        least.append((math.inf, 0) if best is None else (0.0 if nothing is None else row[best], best))
        none.append(nothing)
    paths: dict[int, tuple[float, tuple[int, ...]]] = {
        node: (0.0, ()) for node in (*table.sources, *table.output) if node not in table.targets
    }
    # Targets ascend and edges lead forward, so the paths of all sources are final.
    for target in table.targets:
        arriving = [
            (paths[source][0] + least[index][0], (*paths[source][1], index))
            for index in table.incoming(target)
            if (source := table.choices[index].source) in paths and least[index][0] < math.inf
        ]
        if arriving:
            paths[target] = min(arriving)
    kept = min((paths[node] for node in table.output if node in paths), default=(0.0, ()))[1]
    strengths = torch.zeros(table.shape, dtype=torch.float64)
    for index, (nothing, (_, best)) in enumerate(zip(none, least, strict=True)):
        strengths[index, best if index in kept or nothing is None else nothing] = 1.0
    return strengths


def sample(layout: Layout, seed: int) -> Genotype:
    """A uniformly random architecture of the space; the same for the same seed on every machine.

    Example:
        >>> from softcell.arch import sample
        >>> from softcell.spaces import build_space
        >>> layout = build_space("nb201").layout()
        >>> sample(layout, seed=1) == sample(layout, seed=1)
        True
    """
    return replace(random_architecture(layout, random.Random(seed)), about={"method": "random", "seed": seed})


def random_architecture(layout: Layout, rng: random.Random) -> Genotype:
    """A uniformly random architecture of the space, drawn from `rng`."""
    rule = layout.rule
    assert isinstance(rule, Rule)
    cells = {table.name: Cell(rule.sample(table, rng), table.output) for table in layout.tables}
    return Genotype(layout.space, cells, settings=layout.settings)


def count(layout: Layout) -> int:
    """The number of architectures of the space.

    Example:
        >>> from softcell.arch import count
        >>> from softcell.spaces import build_space
        >>> count(build_space("nb201").layout())
        15625
    """
    rule = layout.rule
    assert isinstance(rule, Rule)
    return prod(rule.count(table) for table in layout.tables)


def strongest_within(
    strengths: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], limit: float
) -> tuple[int, ...]:
    """One candidate per choice: the largest sum of strengths whose sum of costs is at most `limit`.

    strengths, costs: per choice one number per candidate. In a tie the cheaper one; `UserError` where none fits.
    This is a multiple-choice knapsack: after each choice only those partial architectures are kept that no other beats
    in both strength and cost.
    """
    left = [0.0]  # the least cost of the remaining choices
    for row in reversed(costs):
        left.append(left[-1] + min(row))
    left.reverse()
    kept: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]  # cost, strength, candidates
    for i, (values, prices) in enumerate(zip(strengths, costs, strict=True)):
        # What exceeds the limit even with the cheapest candidates for the rest cannot be completed.
        grown = sorted(
            (
                (cost + price, -(strength + value), (*chosen, k))
                for cost, strength, chosen in kept
                for k, (value, price) in enumerate(zip(values, prices, strict=True))
                if cost + price + left[i + 1] <= limit
            ),
        )
        kept, best = [], float("inf")
        for cost, loss, chosen in grown:  # by rising cost: each must be stronger than all before it
            if loss < best:
                best = loss
                kept.append((cost, -loss, chosen))
    if not kept:
        raise UserError(f"no architecture costs at most {limit:g}; the cheapest costs {left[0]:g}")
    # Strength rises with cost among those kept, so the last one is the strongest.
    return kept[-1][2]
