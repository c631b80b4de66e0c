"""Which Lite-Transformers run as one: those of the edges that leave one node of a cell, where they are alike.

Groups of one kind, whichever cells they are in, lay their weights side by side in one `LiteEnsemble`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from softcell.nn.lite_ensemble import LiteEnsemble
from softcell.nn.lite_transformer import LiteTransformer, Shape, order_of


class Member(NamedTuple):
    """The Lite-Transformer of one edge, and the shapes [c, h, w] of what it attends to by candidate; None for zeros."""

    site: int
    source: int
    choice: int
    module: LiteTransformer
    outputs: Mapping[int, Shape | None]


class Group(NamedTuple):
    """Choices of one site that leave one node: group number `place` of an ensemble."""

    choices: tuple[int, ...]
    ensemble: int
    place: int


def form_groups(members: Iterable[Member]) -> tuple[list[LiteEnsemble], dict[int, list[Group]]]:
    """The ensembles, and the groups of every site; edges whose maps are not all of one shape are left out."""
    kinds: dict[tuple[Shape, int, tuple[int, ...], int], dict[tuple[int, int], list[Member]]] = {}
    for member in members:
        module = member.module
        maps = [shape for shape in member.outputs.values() if shape is not None]
        if any(shape != module.shape for shape in maps):
            continue
        kind = (module.shape, module.tokens, tuple(order_of(member.outputs)), len(maps))
        kinds.setdefault(kind, {}).setdefault((member.site, member.source), []).append(member)
    ensembles: list[LiteEnsemble] = []
    groups: dict[int, list[Group]] = {}
    for (_, _, order, num_maps), alike in kinds.items():
        for place, ((site, _), own) in enumerate(alike.items()):
            groups.setdefault(site, []).append(Group(tuple(m.choice for m in own), len(ensembles), place))
        ensembles.append(LiteEnsemble([[m.module for m in own] for own in alike.values()], order, num_maps))
    return ensembles, groups
