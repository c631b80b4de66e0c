"""From the rows of many sites to one row per choice: how cells that share a table agree on an indicator.

A method that reads an indicator at every site (IT-NAS: the attention of each cell's indicator token) has as many rows
per choice as there are cells. The mean lets one saturated cell outweigh many; other aggregates do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Aggregate = Literal["mean", "log-mean", "vote", "last", "last-stage"]
AGGREGATES: tuple[Aggregate, ...] = get_args(Aggregate)


@dataclass(frozen=True, slots=True)
class SiteRows:
    """What every site of a table read, as means over images.

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
    """Per choice what its sites say, [sites that count, width]: values, logarithms, or a 1 for each site's winner."""
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
