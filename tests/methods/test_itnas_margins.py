"""Rows of many sites are aggregated to one per choice: each aggregate against hand-computed values."""

import math

import pytest
import torch
from torch import Tensor

from softcell.methods.itnas.attention import AGGREGATES, Aggregate, SiteRows, aggregate, margins, scores
from softcell.spaces import build_space

# One saturated site of the first stage speaks for candidate 0; the other four, two of the last stage, for 1 or 2.
ROWS = [[0.90, 0.05, 0.05], [0.20, 0.30, 0.25], [0.20, 0.30, 0.28], [0.10, 0.25, 0.30], [0.20, 0.35, 0.30]]
STAGES = [0, 0, 1, 2, 2]


def rows(values: list[list[float]] = ROWS) -> SiteRows:
    """One choice; logarithms of single images would lie below those of the means, so these are taken lower."""
    means = torch.tensor(values, dtype=torch.float64)[:, None]
    return SiteRows(means, means.log() - 0.01, torch.ones(len(values), 1, dtype=torch.bool), STAGES)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("mean", [1.60 / 5, 1.25 / 5, 1.18 / 5]),
        ("log-mean", [math.exp(sum(math.log(row[k]) for row in ROWS) / 5 - 0.01) for k in range(3)]),
        ("vote", [(1 + 0.320) / 6, (3 + 0.250) / 6, (1 + 0.236) / 6]),
        ("last", [0.20, 0.35, 0.30]),
        ("last-stage", [0.15, 0.30, 0.30]),
    ],
)
def test_aggregates_match_hand_computed_values(how: Aggregate, expected: list[float]) -> None:
    torch.testing.assert_close(aggregate(rows(), how)[0], torch.tensor(expected, dtype=torch.float64))


def test_one_saturated_site_elects_its_candidate_by_the_mean_and_by_no_vote() -> None:
    first = {how: int(aggregate(rows(), how)[0].argmax()) for how in AGGREGATES}
    assert first["mean"] == 0
    assert first["vote"] == first["last"] == 1


def test_sites_without_a_row_are_ignored() -> None:
    own = rows()
    own.present[:2] = False
    shorter = rows(ROWS[2:])
    shorter = SiteRows(shorter.means, shorter.logs, shorter.present, STAGES[2:])
    for how in AGGREGATES:
        torch.testing.assert_close(aggregate(own, how), aggregate(shorter, how))
    own.present[:] = False
    for how in AGGREGATES:
        assert not aggregate(own, how).any()


def one_edge(values: Tensor, sites: list[list[float]], images: int = 1000) -> bool:
    """Whether the edge is close, where images differ by nothing."""
    table = (
        build_space("nb201", {"nodes": 2, "candidates": ["none", "skip_connect", "nor_conv_3x3"]}).layout().tables[0]
    )
    mean = torch.tensor(sites, dtype=torch.float64).mean(0)
    (found,) = margins(table, mean[None], torch.outer(mean, mean), images, sites=scores(rows(sites), "mean"))
    leads = values.tolist()
    spread = math.sqrt(sum((x - sum(leads) / len(leads)) ** 2 for x in leads) / (len(leads) - 1) / len(leads))
    assert found.site_error == pytest.approx(spread) and found.image_error == pytest.approx(0, abs=1e-7)
    assert found.standard_error == pytest.approx(spread, abs=1e-7)
    assert (found.wins, found.sites) == (sum(x > 0 for x in leads), len(leads))
    return found.close


def test_a_lead_from_few_sites_is_close_however_many_images_agree() -> None:
    """The mean leads by 0.07 and no image contradicts it, but four of five sites do."""
    assert one_edge(torch.tensor([0.85, -0.10, -0.10, -0.15, -0.15], dtype=torch.float64), ROWS)
    steady = [[0.5, 0.3, 0.1], [0.51, 0.3, 0.1], [0.52, 0.3, 0.1], [0.5, 0.29, 0.1], [0.51, 0.29, 0.1]]
    assert not one_edge(torch.tensor([0.2, 0.21, 0.22, 0.21, 0.22], dtype=torch.float64), steady)
