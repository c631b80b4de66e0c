"""Zero-cost search as a sampler: it proposes what the evolution requests, in any order of calls."""

from __future__ import annotations

from typing import Any

import pytest

from softcell.arch import Genotype, count
from softcell.arch.evolve import Evolution, evolve
from softcell.errors import UserError
from softcell.methods.zerocost import ZeroCost, ZeroCostSettings
from softcell.spaces import build_space

LAYOUT = build_space("nb201").layout()
SETTINGS = ZeroCostSettings(generations=5, population=6, parents=3)


def toy(genotype: Genotype) -> float:
    return -float(sum(pick.op != "nor_conv_3x3" for pick in genotype.cells["cell"].picks))


def run(sampler: ZeroCost, number: int) -> tuple[list[Genotype], list[float]]:
    found: list[Genotype] = []
    scores: list[float] = []
    for n in range(number):
        found.append(sampler.propose(n, list(scores)))
        scores.append(toy(found[-1]))
    return found, scores


def test_proposals_are_what_the_evolution_scores_in_order() -> None:
    sampler = ZeroCost(LAYOUT, SETTINGS, seed=4)
    found, _ = run(sampler, sampler.num_samples)
    wanted = evolve(LAYOUT, Evolution(5, 6, 3), toy, lambda genotype: True, 4)
    assert found == list(wanted.scored)


def test_a_proposal_follows_from_the_scores_it_is_given() -> None:
    sampler = ZeroCost(LAYOUT, SETTINGS, seed=1)
    found, scores = run(sampler, 30)
    others = [float(n % 7) for n in range(30)]
    for given in (others, scores, scores[:8] + others[8:]):
        for number in (29, 7, 0, 18):
            fresh = ZeroCost(LAYOUT, SETTINGS, seed=1).propose(number, given[:number])
            assert sampler.propose(number, given[:number]) == fresh
    assert sampler.propose(29, scores[:29]) == found[29]
    assert sampler.propose(29, others[:29]) != found[29]


def test_the_best_is_proposed_again_once_all_are_known() -> None:
    small = build_space("nb201", {"candidates": ["skip_connect", "nor_conv_3x3"], "nodes": 3}).layout()
    assert count(small) == 8
    found, scores = run(ZeroCost(small, ZeroCostSettings(generations=5, population=4), seed=0), 20)
    assert len(set(found)) == 8
    assert set(found[8:]) == {found[scores.index(0.0)]}


def test_what_is_not_allowed_is_never_proposed() -> None:
    sampler = ZeroCost(LAYOUT, SETTINGS, seed=0)
    sampler.allowed = lambda genotype: toy(genotype) <= -4
    assert max(run(sampler, 30)[1]) == -4.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"proxy": "guess"}, r"no proxy 'guess' \(`method.proxy`\); known: fisher, flops, .*, zico"),
        ({"proxy": "synflo"}, "did you mean 'synflow'"),
        ({"proxy": "zico", "images": 3}, "`method.images >= 4` must hold for zico, .* but got images=3"),
        ({"images": 1}, "`method.images >= 2` must hold, but got images=1"),
        ({"generations": 0}, "generations=0"),
        ({"mutation": 0.0}, "`0 < method.mutation <= 1` must hold"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ZeroCostSettings(**given)
