"""Genotypes: versioned, readable JSON files from which a network is rebuilt without the search."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from softcell.arch.choice import Layout, Pick
from softcell.errors import UserError
from softcell.files import parse_json, read_text
from softcell.text import Shown, count_of

FORMAT = "softcell-genotype"
VERSION = 1
MAX_NODES = 100
"""The highest node number in a cell. A larger one is a typing error and must not fill the memory."""
MAX_EDGES = 10_000


@dataclass(frozen=True, slots=True)
class Cell:
    """The picks of one table and the nodes that form its output.

    Example:
        >>> from softcell.arch import Cell, Pick
        >>> cell = Cell(picks=(Pick(0, 2, "skip_connect"), Pick(1, 2, "conv")), output=(2,))
        >>> [pick.op for pick in cell.incoming(2)]
        ['skip_connect', 'conv']
    """

    picks: tuple[Pick, ...]
    output: tuple[int, ...]

    def incoming(self, target: int) -> tuple[Pick, ...]:
        return tuple(pick for pick in self.picks if pick.target == target)

    @property
    def targets(self) -> tuple[int, ...]:
        return tuple(sorted({pick.target for pick in self.picks}))


@dataclass(frozen=True, repr=False)
class Genotype(Shown):
    """An architecture: the space it belongs to and one cell per table.

    `settings` holds what the space must know to rebuild the cells (never sizes such as depth and width); `about` says
    where the architecture came from and is ignored in comparisons.

    Example:
        >>> from softcell.arch import Cell, Genotype, Pick
        >>> genotype = Genotype("nb201", {"cell": Cell((Pick(0, 1, "nor_conv_3x3"),), output=(1,))})
        >>> genotype.save("genotype.json")
        >>> Genotype.load("genotype.json") == genotype
        True
    """

    space: str
    cells: Mapping[str, Cell]
    settings: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        cells = (f"{name} {count_of(len(cell.picks), 'edge')}" for name, cell in self.cells.items())
        return f"Genotype({self.space}: {', '.join(cells)})"

    def __hash__(self) -> int:
        # Without `settings`, which are compared too but may hold lists, which have no hash.
        return hash((self.space, tuple(sorted(self.cells.items(), key=lambda item: item[0]))))

    def to_dict(self) -> dict[str, Any]:
        cells = {
            name: {
                "edges": [[pick.source, pick.target, pick.op] for pick in cell.picks],
                "output": list(cell.output),
            }
            for name, cell in self.cells.items()
        }
        return {
            "format": FORMAT,
            "version": VERSION,
            "space": self.space,
            "cells": cells,
            "settings": dict(self.settings),
            "about": dict(self.about),
        }

    @classmethod
    def from_dict(cls, data: object, where: str = "genotype") -> Genotype:
        """Reads what `to_dict` wrote; anything else is rejected with the rule it breaks."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise UserError(
                f"{where}: a genotype file must say format={FORMAT!r}; for DARTS or NAS-Bench-201 notation use "
                "`softcell convert` first"
            )
        version = data.get("version")
        if type(version) is not int or version < 1:
            raise UserError(f"{where}: version must be a positive whole number, got {version!r}")
        if version > VERSION:
            raise UserError(
                f"{where}: version {version} is newer than this softcell reads (up to {VERSION}); upgrade softcell"
            )
        space, cells = data.get("space"), data.get("cells")
        if not isinstance(space, str) or not isinstance(cells, dict) or not cells:
            raise UserError(f"{where}: `space` must be a name and `cells` must name at least one cell")
        return cls(
            space=space,
            cells={str(name): _cell(f"{where}: cell {name!r}", cell) for name, cell in cells.items()},
            settings=_mapping(where, "settings", data),
            about=_mapping(where, "about", data),
        )

    def dumps(self) -> str:
        """JSON with one edge per line, so that two genotypes can be compared with `diff`."""
        # `indent` applies to all levels: each edge, 8 columns deep, is folded back into one line.
        text = json.dumps(self.to_dict(), indent=2)
        for cell in self.cells.values():
            for pick in cell.picks:
                edge = [pick.source, pick.target, pick.op]
                text = text.replace(json.dumps(edge, indent=2).replace("\n", "\n        "), json.dumps(edge))
        return text + "\n"

    @classmethod
    def loads(cls, text: str, where: str = "genotype") -> Genotype:
        return cls.from_dict(parse_json(text, where), where)

    @classmethod
    def load(cls, path: str | Path) -> Genotype:
        """Reads a genotype file, or the `genotype.json` of a run folder."""
        file = Path(path)
        if file.is_dir():
            file = file / "genotype.json"
        try:
            text = read_text(file)
        except FileNotFoundError as error:
            raise UserError(f"{file}: no such file; pass a genotype file or a finished run folder") from error
        return cls.loads(text, str(file))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.dumps(), encoding="utf-8")


def _mapping(where: str, key: str, data: Mapping[str, Any]) -> dict[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise UserError(f"{where}: `{key}` must be a mapping, got {type(value).__name__}")
    return value


def _cell(where: str, data: object) -> Cell:
    if not isinstance(data, dict) or not isinstance(data.get("edges"), list):
        raise UserError(f"{where}: must hold `edges`, a list of [source, target, operation]")
    picks = []
    if len(data["edges"]) > MAX_EDGES:
        raise UserError(f"{where}: a cell must have at most {MAX_EDGES:,} edges, but has {len(data['edges']):,}")
    for edge in data["edges"]:
        # `int(...)` matches booleans too, hence the test of types.
        match edge:
            case [int(source), int(target), str(op)] if 0 <= source <= target and bool not in map(type, edge):
                picks.append(Pick(source, target, op))
            case _:
                raise UserError(
                    f"{where}: an edge must be [source, target, operation] with 0 <= source <= target, got {edge!r:.80}"
                )
        if target > MAX_NODES:
            raise UserError(f"{where}: a node must have a number up to {MAX_NODES}, got {target} in {edge!r:.80}")
    output = data.get("output")
    if not isinstance(output, list) or not output or not all(type(n) is int and n >= 0 for n in output):
        raise UserError(f"{where}: `output` must list the output nodes, got {output!r:.80}")
    if max(output) > MAX_NODES or len(output) > MAX_NODES:
        raise UserError(f"{where}: `output` must list nodes up to number {MAX_NODES}, got {output!r:.80}")
    return Cell(tuple(picks), tuple(output))


def check_forward(cell: Cell, inputs: int) -> None:
    """Raises `UserError` unless every edge leads from an earlier node to an inner one; the first `inputs` are given."""
    for pick in cell.picks:
        if not (pick.source < pick.target and pick.target >= inputs):
            raise UserError(
                f"an edge must lead from an earlier node to an inner node ({inputs} or later), but got {pick}"
            )


def alive(cell: Cell, inputs: int) -> Cell:
    """The part of a cell that an input reaches: dead edges and `none` are dropped, dead nodes leave the output.

    A cell that no input reaches keeps its output nodes; they are then zeros.
    """
    check_forward(cell, inputs)
    reached = set(range(inputs))
    picks = []
    # By target: whether a source is reached is known before its outgoing edges are looked at.
    for pick in sorted(cell.picks, key=lambda pick: (pick.target, pick.source)):
        if pick.op != "none" and pick.source in reached:
            reached.add(pick.target)
            picks.append(pick)
    output = tuple(node for node in cell.output if node in reached)
    return Cell(tuple(picks), output or cell.output)


def reaches_output(cell: Cell, inputs: int) -> bool:
    """Whether an input reaches some output node of a cell: otherwise its output is always zeros."""
    reached = set(range(inputs))
    for pick in sorted(cell.picks, key=lambda pick: (pick.target, pick.source)):
        if pick.op != "none" and pick.source in reached:
            reached.add(pick.target)
    return not reached.isdisjoint(cell.output)


def empty_cells(genotype: Genotype, layout: Layout) -> list[str]:
    """Names of the cells whose output no input reaches; layout: of the genotype's space.

    Example:
        >>> from softcell.arch import empty_cells, notation
        >>> from softcell.spaces import build_space
        >>> nothing = notation.parse("|none~0|+|none~0|none~1|+|none~0|none~1|none~2|")
        >>> empty_cells(nothing, build_space("nb201").layout())
        ['cell']
    """
    first = {table.name: min(table.targets) for table in layout.tables}
    return [name for name, cell in genotype.cells.items() if name in first and not reaches_output(cell, first[name])]


def check_against(genotype: Genotype, layout: Layout) -> None:
    """Raises `UserError` unless every cell and edge of the genotype exists in the layout's tables.

    Example:
        >>> from softcell.arch import check_against, sample
        >>> from softcell.errors import UserError
        >>> from softcell.spaces import build_space
        >>> layout = build_space("nb201").layout()
        >>> check_against(sample(layout, seed=0), layout)
        >>> try:
        ...     check_against(sample(layout, seed=0), build_space("darts").layout())
        ... except UserError as error:
        ...     print(error)
        genotype of space 'nb201' used where space 'darts' was asked for
    """
    known = {table.name for table in layout.tables}
    if genotype.space != layout.space:
        raise UserError(f"genotype of space {genotype.space!r} used where space {layout.space!r} was asked for")
    if set(genotype.cells) != known:
        raise UserError(
            f"a genotype of space {layout.space!r} must have the cells {sorted(known)}, got {sorted(genotype.cells)}"
        )
    for table in layout.tables:
        options = {(c.source, c.target): c.candidates for c in table.choices}
        for pick in genotype.cells[table.name].picks:
            candidates = options.get((pick.source, pick.target))
            if candidates is None:
                raise UserError(
                    f"cell {table.name!r} has no edge {pick.source}->{pick.target} in space {layout.space!r}; "
                    f"edges: {', '.join(map(str, table.choices))}"
                )
            if pick.op not in candidates:
                raise UserError(
                    f"operation {pick.op!r} is not a candidate of edge {pick.source}->{pick.target} in cell "
                    f"{table.name!r}; candidates: {', '.join(candidates)}"
                )
