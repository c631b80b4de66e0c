"""How sure a derivation is: margins between candidates whose strengths are means over images, with standard errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

from torch import Tensor

from softcell.arch.choice import Table
from softcell.arch.derive import rows, strongest


@dataclass(frozen=True, slots=True)
class Margin:
    """By how much the strongest candidate of an edge leads the second, and the standard error of that lead."""

    edge: str
    best: str
    strength: float
    runner_up: str | None
    margin: float | None
    standard_error: float | None
    close: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.edge} {self.best} over {self.runner_up} by {self.margin:.2g} ± {self.standard_error:.2g}"


@dataclass(frozen=True, slots=True)
class Selection:
    """What a derivation from images rests on: the margins of every table's edges, by its name.

    An edge is close when its margin is below `close_below` standard errors.
    """

    images: int
    close_below: float
    edges: Mapping[str, Sequence[Margin]]

    def to_dict(self) -> dict[str, Any]:
        return {
            "images": self.images,
            "close_below": self.close_below,
            "close_edges": sum(m.close for own in self.edges.values() for m in own),
            "edges": {name: [m.to_dict() for m in own] for name, own in self.edges.items()},
        }

    def __str__(self) -> str:
        found = [(name, m) for name, own in self.edges.items() for m in own]
        close = [f"{name} {m}" for name, m in found if m.close]
        text = f"selection from {self.images:,} images: {len(close)} of {len(found)} edges are close"
        return f"{text} (a lead below {self.close_below:g} standard errors)" + "".join(f"; {c}" for c in close)


def margins(
    table: Table, mean: Tensor, products: Tensor, images: int, exclude: Sequence[str] = (), close: float = 2.0
) -> list[Margin]:
    """One margin per choice.

    mean [choices, width] of the strengths over images, products [choices·width, choices·width] the mean of their
    products of two. An edge is close when its margin is below `close` standard errors.
    """
    values, found = rows(table, mean), []
    second: list[list[float]] = products.double().cpu().tolist()
    for index, (choice, row) in enumerate(zip(table.choices, values, strict=True)):
        allowed = [k for k, op in enumerate(choice.candidates) if op not in exclude] or list(
            range(len(choice.candidates))
        )
        ranked = sorted(allowed, key=strongest(row), reverse=True)
        best, names = ranked[0], choice.candidates
        if len(ranked) == 1:
            found.append(Margin(str(choice), names[best], row[best], None, None, None, False))
            continue
        other, start = ranked[1], index * table.width
        a, b = start + best, start + other
        lead = row[best] - row[other]
        # Var(a - b) = E[a²] - 2 E[ab] + E[b²] - (E[a] - E[b])², unbiased
        variance = max(0.0, second[a][a] - 2 * second[a][b] + second[b][b] - lead**2)
        error = sqrt(variance / max(1, images - 1))
        found.append(Margin(str(choice), names[best], row[best], names[other], lead, error, lead < close * error))
    return found
