"""Random paths through a supernet: one architecture of the space runs at every site, drawn on the host."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from softcell.arch.choice import Layout
from softcell.arch.derive import Rule
from softcell.arch.mix import Live, Plan, live_of


def uniform_path(layout: Layout, rng: random.Random) -> Plan:
    """One architecture, uniformly from the space; the same on every machine."""
    rule = layout.rule
    assert isinstance(rule, Rule)
    lives = {table.name: live_of(table, rule.sample(table, rng)) for table in layout.tables}
    return tuple(lives[name] for name in layout.sites)


def widened(layout: Layout, path: Plan, places: Iterable[tuple[int, int]], lives: Mapping[str, Live]) -> Plan:
    """The path with all candidates in `lives`, by table, at some places (site and choice)."""
    plan = [list(live) for live in path if live is not None]
    assert len(plan) == len(path), "a path names what runs at every site"
    for site, choice in places:
        plan[site][choice] = lives[layout.sites[site]][choice]
    return tuple(tuple(live) for live in plan)
