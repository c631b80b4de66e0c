"""A drawing in plain data: boxes, labels and routes. Lengths are pixels, y grows downwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from softcell.arch import Pick

Kind = Literal["input", "inner", "surrogate", "empty", "output"]
Point = tuple[float, float]

CHAR = 7.25  # advance of one character of a 12 px monospace font, with a little to spare


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; x and y are its upper left corner."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def centre(self) -> Point:
        return self.x + self.width / 2, self.y + self.height / 2

    def overlaps(self, other: Box) -> bool:
        return self.x < other.right and other.x < self.right and self.y < other.bottom and other.y < self.bottom


@dataclass(frozen=True, slots=True)
class Node:
    """A box. `number` is the cell's node, None for the box that concatenates several."""

    number: int | None
    label: str
    kind: Kind
    box: Box


@dataclass(frozen=True, slots=True)
class Edge:
    """A link between two nodes (indices into `Drawing.nodes`); without an operation it only hands on.

    `points`: two neighbours on one horizontal or vertical are joined by a straight line, others by an S-curve that
    starts and ends horizontally. `text` is the operation's name as it fits, in the box `label`.
    """

    source: int
    target: int
    op: str | None
    text: str
    label: Box | None
    points: tuple[Point, ...]
    arrow: bool = True


@dataclass(frozen=True, slots=True)
class Drawing:
    """A laid-out cell within [0, width] x [0, height]; `absent` are the picks that let nothing through."""

    width: float
    height: float
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    absent: tuple[Pick, ...]
