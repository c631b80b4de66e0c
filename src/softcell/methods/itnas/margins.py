"""From the rows of many sites to one row per choice, and how clear the choice is.

Every cell has an indicator token of its own, so a choice has as many rows as there are cells. With the mean, one
saturated cell outweighs many others; the other aggregates avoid that. `margins` compares the leads of the strongest
candidates, which are means over images, with their standard errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from softcell.arch.choice import Table
from softcell.arch.rules import rows, strongest

Aggregate = Literal["mean", "log-mean", "vote", "last", "last-stage"]
AGGREGATES: tuple[Aggregate, ...] = get_args(Aggregate)


@dataclass(frozen=True, slots=True)
class SiteRows:
    """The rows of every site of a table, as means over images.

    means, logs: [sites, choices, width], of the values and of their logarithms. present: bool [sites, choices], whether
    a site has a row for a choice. stages: one number per site; sites of one stage have maps of one shape.
    """

    means: Tensor
    logs: Tensor
    present: Tensor
    stages: Sequence[int]


def used_sites(present: Sequence[bool], stages: Sequence[int], how: Aggregate) -> list[int]:
    """The sites whose rows count for a choice, given at which sites it is present."""
    own = [site for site, is_there in enumerate(present) if is_there]
    if how == "last":
        return own[-1:]
    if how == "last-stage":
        return [site for site in own if stages[site] == stages[own[-1]]]
    return own


def scores(rows: SiteRows, how: Aggregate) -> list[Tensor]:
    """Per choice the scores of its sites [sites that count, width]: values, logarithms, or a 1 for each winner."""
    found = []
    for choice in range(rows.present.shape[1]):
        used = used_sites(rows.present[:, choice].tolist(), rows.stages, how)
        own = (rows.logs if how == "log-mean" else rows.means)[used, choice]
        if how == "vote":
            own = torch.nn.functional.one_hot(own.argmax(1), own.shape[1]).to(own.dtype)
        found.append(own)
    return found


def aggregate(rows: SiteRows, how: Aggregate) -> Tensor:
    """Strengths [choices, width] of a table; zeros for a choice without rows.

    mean: over sites. log-mean: the geometric mean. vote: the share of sites where a candidate is first; ties are
    broken by the mean. last, last-stage: the last site alone, the mean over those with maps of the last one's shape.
    """
    found = torch.zeros_like(rows.means[0])
    for choice, own in enumerate(scores(rows, how)):
        if not len(own):
            continue
        if how == "log-mean":
            found[choice] = own.mean(0).exp()
        elif how == "vote":
            mean = rows.means[:, choice][rows.present[:, choice]].mean(0)  # below 1, so it decides ties alone
            found[choice] = (own.sum(0) + mean) / (len(own) + 1)
        else:
            found[choice] = own.mean(0)
    return found


@dataclass(frozen=True, slots=True)
class Margin:
    """The lead of an edge's strongest candidate over the second, and its standard error.

    The error has two parts: `image_error`, over images, and `site_error`, over the sites that were averaged. `wins`:
    the number of `sites` at which the strongest candidate leads the second.
    """

    edge: str
    best: str
    strength: float
    runner_up: str | None
    margin: float | None
    standard_error: float | None
    close: bool
    image_error: float | None = None
    site_error: float | None = None
    wins: int | None = None
    sites: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        text = f"{self.edge} {self.best} over {self.runner_up} by {self.margin:.2g} ± {self.standard_error:.2g}"
        return text if self.sites is None else f"{text}, at {self.wins} of {self.sites} sites"


@dataclass(frozen=True, slots=True)
class Margins:
    """The margins of all edges by table, over a number of `images`.

    An edge is close when its margin is below `close_below` standard errors. `aggregate`: how sites were combined.
    """

    images: int
    close_below: float
    edges: Mapping[str, Sequence[Margin]]
    aggregate: str = "mean"

    def to_dict(self) -> dict[str, Any]:
        return {
            "images": self.images,
            "aggregate": self.aggregate,
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
    table: Table,
    mean: Tensor,
    products: Tensor | None,
    images: int,
    exclude: Sequence[str] = (),
    close: float = 2.0,
    sites: Sequence[Tensor] | None = None,
) -> list[Margin]:
    """One margin per choice.

    mean [choices, width] of the strengths over images, products [choices·width, choices·width] the mean of their
    products of two; None where strengths are not means over images. sites: per choice the strengths [sites, width] that
    were averaged. An edge is close when its margin is below `close` standard errors, over images and over sites: a
    candidate that leads by a little in all cells is clearer than one that leads by much in some and trails in others.
    """
    values, found = rows(table, mean), []
    second: list[list[float]] | None = None if products is None else products.double().cpu().tolist()
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
        by_image = 0.0
        if second is not None:
            # Var(a - b) = E[a²] - 2 E[ab] + E[b²] - (E[a] - E[b])², unbiased
            variance = max(0.0, second[a][a] - 2 * second[a][b] + second[b][b] - lead**2)
            by_image = sqrt(variance / max(1, images - 1))
        by_site, wins, count = 0.0, None, None
        if sites is not None and len(sites[index]):
            leads = (sites[index][:, best] - sites[index][:, other]).double().cpu().tolist()
            wins, count, centre = sum(one > 0 for one in leads), len(leads), sum(leads) / len(leads)
            by_site = sqrt(sum((one - centre) ** 2 for one in leads) / max(1, count - 1) / count)
        error = sqrt(by_image**2 + by_site**2)
        found.append(
            Margin(
                *(str(choice), names[best], row[best], names[other], lead, error, lead < close * error),
                *(by_image, by_site, wins, count),
            )
        )
    return found
