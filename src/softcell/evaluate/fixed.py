"""Settings of a space that a genotype decides: a network has the nodes or layers of its genotype, whatever is set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from softcell.arch import Cell, Genotype, Table
from softcell.errors import UserError
from softcell.spaces import Space

FIXED = ("nodes", "layers")
"""Settings that say how many nodes the cells of a space have."""


def fixed_by(genotype: Genotype, space: Space) -> dict[str, Any]:
    """The value of each such setting with which cells of `space` end where those of `genotype` do."""
    last = max(map(_last, genotype.cells.values()))
    found = {}
    for name in {field.name for field in fields(space)} & set(FIXED):  # type: ignore[arg-type]
        for value in range(1, last + 2):
            try:
                layout = replace(space, **{name: value}).layout()  # type: ignore[type-var]
            except UserError:
                continue  # a number of nodes that this space does not have
            alike = all(layout.settings.get(key, own) == own for key, own in genotype.settings.items())
            if alike and max(map(_last, layout.tables)) == last:
                found[name] = value
                break
    return found


def settled(genotype: Genotype, space: Space, asked: Mapping[str, Any]) -> Space:
    """`space` with what the genotype decides; settings that are `asked` for must not contradict it."""
    fixed = fixed_by(genotype, space)
    for name, value in fixed.items():
        if name in asked and getattr(space, name) != value:
            raise UserError(
                f"the number of {name} must be that of the genotype, {value}, but got {name}={getattr(space, name)}; "
                f"leave it out, or search with space.{name}={getattr(space, name)}"
            )
    return replace(space, **fixed)  # type: ignore[type-var]


def _last(cell: Cell | Table) -> int:
    """The highest number among the nodes."""
    edges = cell.picks if isinstance(cell, Cell) else cell.choices
    return max(*cell.output, *(edge.target for edge in edges), 0)
